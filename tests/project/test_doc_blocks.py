"""Test that the code blocks and commands of README.md and docs/*.md work as written. Bash and
python blocks run with small sizes on tiny models, recipes are parsed, rows are loaded, and other
blocks give a reason for being skipped.
"""

import json
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from doc_blocks import PAGES, REPO, Block, blocks_of, inline_commands_of, read_blocks
from doc_shell import DocShell, link_checkout, make_shell
from rank_server import Ranks

from rl.algorithms import METHODS
from rl.config import RunSettings, SettingsError, read_run
from rl.data import load_problems
from rl.rewards.code import parse_tests

TESTS = Path(__file__).resolve().parents[1]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
HANDLED = ("bash", "python", "yaml", "json", "jsonl", "toml")
MODEL_NAME = re.compile(r"(?<![\w/.])(?:Qwen|Skywork|meta-llama)/[\w.-]+\w")
SUM = {"prompt": "What is 1+1?", "answer": "2", "question": "What is 1+1?", "level": 1}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
PICTURE = {"prompt": "<image>how many?", "answer": "2", "images": ["cat.png"]}
ROWS = {
    **{f"{name}.jsonl": SUM for name in ("rows", "problems", "sums", "math")},
    "pairs.jsonl": {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"},
    "chats.jsonl": CHAT,
    "mine.jsonl": PICTURE,
}
PICTURES = ("cat.png", "picture.png")
# Files that a page names but leaves to the reader.
OWN_FILES = {
    "methods.md": {
        "mine.py": "from rl.algorithms import GRPO, GrpoSettings\n\n\n"
        "class Method(GRPO):\n    Settings = GrpoSettings\n"
    },
    "wrappers.md": {"mine.py": "def builders(row, group_size, renderer):\n    return None\n"},
}
# State that a page's python blocks continue from, according to its text.
BEFORE = {
    "own_loop.md": """
from rl.types import Datum, ModelInput
prompt = ModelInput.from_ints([5, 6, 7])
inputs = {"target_tokens": [6, 7], "logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}
datums = [Datum(ModelInput.from_ints([5, 6]), inputs)]
""",
}
# A loop of two steps shows as much as a loop of fifty.
SHORT_LOOPS = """
import builtins
def range(*numbers):
    return builtins.range(*numbers)[:2]
"""
# Values for placeholders in commands.
PLACEHOLDERS = {
    **dict.fromkeys(("RUN", "OTHER_RUN"), "runs/sorting"),
    **dict.fromkeys(("NAME", "MODEL"), "Qwen/Qwen3-0.6B"),
    **{"METHOD": "grpo", "RECIPE.yaml": "recipes/addition.yaml", "COMMAND": "train", "r": "2"},
}
# pages where RUN is a run made by the page's commands
RUN_OF_PAGE = {"games.md": "runs/grpo", "README.md": "runs/grpo"}
# Runs that a page continues from, and that none of its commands creates.
RUNS = {
    "runs/sorting": "grpo --base-model Qwen/Qwen3-0.6B --dataset sums.jsonl --reward exact_match",
    "runs/my-reward-model": "reward_model --base-model Qwen/Qwen3-0.6B --dataset pairs.jsonl",
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Yield a bash for commands, with the models and data sets of the pages in the hub cache."""
    home = tmp_path_factory.mktemp("docs")
    names = {name for page in PAGES for name in MODEL_NAME.findall(page.read_text())}
    recipes = [*(REPO / "recipes").glob("*.yaml")]
    names |= {name for path in recipes for name in MODEL_NAME.findall(path.read_text())}

    def write_hub(ranks: Ranks) -> None:
        script = str(TESTS / "offline_hub.py")
        launch = ranks.start(home / "hf" / "hub", *sorted(names), cwd=home, script=script)
        assert launch.wait(60) == [0], launch.output()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home / "hf"))
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        with make_shell(home, write_hub) as shell:
            yield shell


def write_inputs(folder: Path) -> None:
    """Write the rows and images that commands refer to."""
    import pandas
    from seeing import make_image

    for name, row in ROWS.items():
        (folder / name).write_text(f"{json.dumps(row)}\n" * 12)
    pandas.DataFrame([SUM] * 12).to_parquet(folder / "problems.parquet")
    for name in PICTURES:
        make_image(0).save(folder / name)


@pytest.fixture(scope="module")
def made_runs(shell, tmp_path_factory) -> Path:
    """Return a folder that contains RUNS."""
    folder = link_checkout(tmp_path_factory.mktemp("made") / "checkout", shell)
    write_inputs(folder)
    for name, words in RUNS.items():
        shell.run(f"python train.py {words} --output-dir {name}", folder)
    return folder / "runs"


def fill_placeholders(command: str, page: str, number: int) -> str:
    words = {**PLACEHOLDERS, "OUT": f"out-{number}"}
    words["RUN"] = RUN_OF_PAGE.get(page, words["RUN"])
    return re.sub(r"(?<![-\w.])[\w.]+", lambda match: words.get(match[0], match[0]), command)


def run_block(block: Block, shell: DocShell, folder: Path, commands: str) -> None:
    """Run a block, or load it as the product loads such files. `commands` are those of the page."""
    if block.language == "bash":
        shell.run(fill_placeholders(block.text, block.page, block.line), folder)
    elif block.language == "python" and block.file:
        if block.file not in commands:
            shell.run(f"python {block.file}", folder)
    elif block.language == "python":
        name = f"block_{block.line}.py"
        text = f"{SHORT_LOOPS}{BEFORE.get(block.page, '')}{block.text}"
        (folder / name).write_text(text)
        shell.run(f"python {name}", folder)
    elif block.language == "yaml":
        read_recipe(block, folder)
    elif block.language == "toml":
        tomllib.loads(block.text)
    else:
        read_rows(block, folder)


def read_recipe(block: Block, folder: Path) -> None:
    """Parse a recipe. Settings without a method must be valid for some method."""
    path = folder / (block.file or f"block_{block.line}.yaml")
    path.write_text(block.text)
    is_whole = {"method", "stages"} & yaml.safe_load(block.text).keys()
    errors = []
    for words in [[]] if is_whole else [[method] for method in METHODS]:
        try:
            read_run([*words, str(path)], METHODS, REPO / "recipes" / "addition.yaml", RunSettings)
            return
        except SettingsError as error:
            errors.append(error)
    raise errors[0]


def read_rows(block: Block, folder: Path) -> None:
    """Load rows of JSON, or a value of the column `tests` on each line."""
    lines = block.text.splitlines()
    if block.column:
        lines = [json.dumps({**SUM, block.column: json.loads(line)}) for line in lines]
    path = folder / (block.file or f"block_{block.line}.jsonl")
    path.write_text("\n".join(lines))
    problems = load_problems(path)
    assert len(problems) == len(lines)
    if block.column == "tests":
        for problem in problems:
            parse_tests(problem.meta, "python")


def test_blocks_of_each_kind_are_read(tmp_path, monkeypatch):
    """Check the kinds of blocks that few pages have, and that an error in each is reported."""
    monkeypatch.chdir(tmp_path)
    text = """
<!-- test: file=mine.yaml -->
```yaml
method: grpo
batch_size: 4
```
- in a list

  ```yaml
  group_size: 4
  ```

```json
{"prompt": "Hi", "answer": "Hello"}
```

    python train.py grpo
<!-- test: skip=two of them -->
```bash
python train.py sft
```
"""
    blocks = read_blocks("a.md", text)
    whole, part, row, command, skipped = blocks
    assert [b.language for b in blocks] == ["yaml", "yaml", "json", "bash", "bash"]
    assert (whole.file, part.text, row.line) == ("mine.yaml", "group_size: 4\n", 13)
    assert (command.text, skipped.skip) == ("python train.py grpo\n", "two of them")
    for block in (whole, part):
        read_recipe(block, tmp_path)
        with pytest.raises(SettingsError, match="no setting"):
            read_recipe(replace(block, text=block.text.replace("_size", "_sizes")), tmp_path)
    read_rows(row, tmp_path)
    with pytest.raises(ValueError, match="no column"):
        read_rows(replace(row, text=row.text.replace("prompt", "prompts")), tmp_path)


def test_every_block_says_what_is_done_with_it():
    undecided = [b.place for b in BLOCKS if b.language not in HANDLED and not b.skip]
    assert not undecided and len(BLOCKS) > 30


@pytest.mark.slow
def test_a_command_that_is_only_parsed_does_not_start(shell, tmp_path):
    """The run does not exist, so a script that starts would fail."""
    folder = link_checkout(tmp_path / "checkout", shell)
    for script in ("sample.py", "evaluate.py"):
        shell.run(
            f"python {script} runs/none --max-tokens 8 --system-prompt x", folder, only="part"
        )
        with pytest.raises(AssertionError, match="arguments: --max-tokns"):
            shell.run(f"python {script} runs/none --max-tokns 8", folder, only="part")
    with pytest.raises(AssertionError, match="No module named 'missing_package'"):
        shell.run("python -m missing_package.tool", folder)
    shell.run("docker build -f docker/Dockerfile -t x .", folder)
    with pytest.raises(AssertionError, match="no file docker/Missing"):
        shell.run("docker build -f docker/Missing -t x .", folder)


PAGES_TO_RUN = [page for page in PAGES if blocks_of(page) or inline_commands_of(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_TO_RUN, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, shell, made_runs, tmp_path, monkeypatch):
    blocks = [block for block in blocks_of(page) if not block.skip]
    folder = link_checkout(tmp_path / "checkout", shell)
    write_inputs(folder)
    shutil.copytree(made_runs, folder / "runs")
    files = OWN_FILES.get(page.name, {}) | {
        block.file: block.text for block in blocks if block.file
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    commands = "".join(block.text for block in blocks if block.language == "bash")
    for block in blocks:
        run_block(block, shell, folder, commands)
    for number, command in enumerate(inline_commands_of(page)):
        command = fill_placeholders(command, page.name, number)
        if re.match(r"python (sample|evaluate|export|plot)\.py runs/", command):
            shell.run(re.sub(r"\[.*?\]", "", command), folder)
        shell.parse(re.sub(r"[][]|\.\.\.", "", command), folder)
