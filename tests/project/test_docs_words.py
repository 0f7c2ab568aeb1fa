"""Test that README and docs name existing settings. Their commands run in
tests/project/test_doc_blocks.py.

Links must lead to existing pages and sections, docs/index.md must list every page, and the README
must stay short.
"""

import re
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

from rl.algorithms import METHODS
from rl.config import RunSettings
from rl.config.fields import get_fields

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SCRIPTS = "evaluate export plot report watch sample serve check_reward why minimal_loop".split()
SCRIPTS += ["rl/envs/demo_generator"]
# Flags of other programs that the pages name.
OTHERS = {
    *"config_file num_processes num_machines machine_rank main_process_ip".split(),  # accelerate
    *"account nodes partition".split(),  # Slurm
    *"no-deps python no-build-isolation no-index target torch-backend".split(),  # pip and uv
    *"model model_args num_generations".split(),  # lm-evaluation-harness, TRL
    *"version pid logdir backend-store-uri".split(),  # whetstone, py-spy, tensorboard, mlflow
    "setting",  # a placeholder
    # vllm serve
    *"enable-scale-out enable-lora enable-return-routed-experts hf-overrides logprobs-mode".split(),
    *"lora-target-modules max-cpu-loras max-lora-rank max-loras max-model-len".split(),
    *"no-enable-chunked-prefill no-enable-sleep-mode tensor-parallel-size".split(),
    "weight-transfer-config",
}
# scripts of bench/ with flags that pages name
BENCH = {"gpu", "campaign", "grpo_vs_trl", "harness", "sampler", "staleness", "vllm_learns"}
IN_CODE = re.compile(r"```.*?```|`[^`\n]+`|^    .*$", re.S | re.M)
FLAG = re.compile(r"(?<![\w-])--([a-z][\w.-]*)")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
SETTINGS = {*get_fields(RunSettings)}.union(*(get_fields(m.Settings) for m in METHODS.values()))


def flags_of(script: str) -> set[str]:
    """Return the flags that a script's parser defines, wherever it is built."""
    text = (ROOT / f"{script}.py").read_text()
    return set(re.findall(r'add_argument\(\s*(?:"-\w", )?"--([\w-]+)"', text))


def list_known_flags() -> set[str]:
    reference = {key.replace("_", "-") for key in SETTINGS}
    theirs = set().union(*map(flags_of, [*SCRIPTS, *(f"bench/{script}" for script in BENCH)]))
    return reference | {f"no-{key}" for key in reference} | theirs | {"help"} | OTHERS


KNOWN_FLAGS = list_known_flags()


def named(text: str) -> set[str]:
    return {flag for code in IN_CODE.findall(text) for flag in FLAG.findall(code)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_of_a_page_exists(page):
    flags = set()
    for flag in named(page.read_text()):
        # --environment.key and --template.key accept the settings of an environment or a template.
        # --STAGE.key is a setting of a single stage.
        first, _, rest = flag.partition(".")
        flags.add(rest if first in METHODS else first)
    assert not sorted(flags - KNOWN_FLAGS)


def test_what_is_read_of_a_page():
    text = "`--steps 3` and --not-this\n    train.py --lora-rank 2\n"
    assert named(text) == {"steps", "lora-rank"}


def section_ids(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def find_broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target, section in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.S)):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (section and section not in section_ids(path)):
            broken.append(f"{target}#{section}")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    assert find_broken_links(page, page.read_text()) == []


def test_a_broken_link_is_seen():
    text = "[a](docs/nothing.md) [b](docs/running.md#nothing) [c](docs/running.md#does-it-fit)"
    broken = ["docs/nothing.md#", "docs/running.md#nothing"]
    assert find_broken_links(ROOT / "README.md", text) == broken


PARTS = ["Start", "Guides", "Internals"]


def index_parts() -> dict[str, list[str]]:
    """Return the pages that docs/index.md lists, by part."""
    _, *sections = re.split(r"^## (.*)\n", (DOCS / "index.md").read_text(), flags=re.M)
    return {
        part: re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \|", text, re.M)
        for part, text in zip(sections[::2], sections[1::2], strict=True)
    }


def flatten_nav(entries: list) -> list[str]:
    """Return the pages of a part of the nav, in order. A part may have nested parts."""
    return [
        page
        for entry in entries
        for page in ([entry] if isinstance(entry, str) else flatten_nav(*entry.values()))
    ]


def test_the_index_lists_every_page_once():
    parts = index_parts()
    assert list(parts) == PARTS
    pages = [str(page.relative_to(DOCS)) for page in PAGES[1:] if page.name != "index.md"]
    assert sorted(sum(parts.values(), [])) == sorted(pages)


def test_the_site_has_the_parts_of_the_index():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    parts = {part: flatten_nav(pages) for entry in nav for part, pages in entry.items()}
    parts["Start"].remove("index.md")
    assert parts == index_parts()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


@pytest.mark.parametrize("page", ["README.md", "docs/methods.md"])
def test_pages_quote_the_loop(page):
    """The first block under "The loop" quotes rl/trainer/training_loop.py, the second
    rl/trainer/batch_source.py.
    """
    section = (ROOT / page).read_text().partition("## The loop\n")[2]
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    files = (("training_loop.py", 4), ("batch_source.py", 8))
    for quoted, (name, indent) in zip(blocks, files, strict=False):
        assert textwrap.indent(quoted, " " * indent) in (ROOT / "rl" / "trainer" / name).read_text()


def test_the_reward_of_the_readme_scores():
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    names: dict = {}
    exec(block, names)
    for answer in ("46", 46):
        assert names["last_number"]("What is 12 + 34?", "12 + 34 = 46", {"answer": answer}) == 1
        assert names["last_number"]("What is 12 + 34?", "46, or 47", {"answer": answer}) == 0
        assert names["last_number"]("What is 12 + 34?", "", {"answer": answer}) == 0


INSTALL = re.compile(r"pip install (?!-r|-e \"?\.)([A-Za-z][\w.-]*)")


def list_commands(text: str, packages: set[str]) -> list[str]:
    """Return the commands that install a package of an extra by name, or an extra of a checkout
    without -e.
    """
    names = [name for name in INSTALL.findall(text) if name.lower() in packages]
    return names + re.findall(r"pip install \S*\.\[[\w,-]+\]", text)


def test_packages_of_extras_are_installed_by_one_command():
    """Code and pages use `pip install -e ".[EXTRA]"` (rl.errors.install_command)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: project["optional-dependencies"][name] for name in
              ("serve", "search", "quantized", "wandb", "tensorboard", "trackio", "mlflow",
               "report", "language")}  # fmt: skip
    packages = {re.split(r"[\s>=<;]", line)[0] for lines in extras.values() for line in lines}
    assert {"plotly", "starlette", "bm25s", "py3langid"} <= packages
    assert list_commands("pip install plotly", packages) == ["plotly"]
    assert list_commands('pip install ".[report]"', packages)
    assert not list_commands('pip install -e ".[report]" or pip install openai', packages)
    sources = [*ROOT.glob("*.py"), *(ROOT / "rl").rglob("*.py")]
    for path in [*sources, *PAGES, ROOT / "examples" / "README.md"]:
        assert not list_commands(path.read_text(encoding="utf-8"), packages), path
