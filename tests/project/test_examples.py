"""Run the notebooks and scripts of examples/: shortened by default, as written in the campaign."""

import ast
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_docs_words import find_broken_links

from rl.algorithms import METHODS
from rl.config import RunSettings, read_run
from rl.trainer.entry_point import resolve_run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SCRIPTS = sorted(EXAMPLES.glob("*/train.py"))
# The last line that a working script prints.
LAST_LINES = {
    "agent": r"assistant .*",
    "code": r"(-0\.1|0\.0|1\.0)  '.*'",
    "distillation": r"student-on-policy-final \{'12\+34=': .*\}",
    "games": r"(user|assistant) .*",
    "images": r"4 circles: \[.*\]",
    "tool_use": r"(assistant|tool) .*",
}


def read_cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def run_notebook(path: Path, **small: int) -> dict:
    """Run the code cells in order, with the numbers of `small`, and return their names."""
    names: dict = {"__name__": "__main__"}
    for cell in read_cells(path):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for name, value in small.items():
                source = re.sub(rf"\b{name}=\d+", f"{name}={value}", source)
            exec(compile(source, f"{path.name} {cell['id']}", "exec"), names)
    return names


def run_script(folder: Path, monkeypatch, tmp_path: Path, *flags: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(folder / "train.py"), *flags])
    runpy.run_path(str(folder / "train.py"), run_name="__main__")


FOLDERS = [
    pytest.param(path.parent, id=name, marks=[pytest.mark.extras] if name == "agent" else [])
    for path in SCRIPTS
    for name in [path.parent.name]
]


def test_the_table_lists_every_example():
    """Links lead to files, and the commands name the files of the rows."""
    page = EXAMPLES / "README.md"
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"`(?:python|jupyter lab) (examples/[\w/.]+)`", text)
    folders = re.findall(r"^\| \[(\w+)\]", text, re.M)
    listed = [*NOTEBOOKS, *(EXAMPLES / name / "train.py" for name in folders)]
    assert [ROOT / command for command in commands] == listed
    assert set(listed) == {*NOTEBOOKS, *SCRIPTS}
    assert find_broken_links(page, text) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.parent.name)
def test_the_commands_of_a_header_are_accepted(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"python {path.relative_to(ROOT)}\n" in header and "\nSeen" in header
    for line in header.replace("\\\n", " ").splitlines():
        _, command, words = line.partition("python train.py ")
        if command:
            recipe = ROOT / "recipes" / "addition.yaml"
            assert read_run(shlex.split(words, comments=True), METHODS, recipe, RunSettings).stages


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_run_on_a_gpu_is_accepted(path, monkeypatch):
    """The settings are in a block of a text cell, which no other test runs."""
    monkeypatch.chdir(ROOT)
    text = "\n".join("".join(cell["source"]) for cell in read_cells(path))
    [block] = re.findall(r"```python\n(.*?)```", text, re.S)
    runs = []
    stub = SimpleNamespace(train=lambda what, **settings: runs.append(resolve_run(what, settings)))
    exec(block, {"rl": stub})
    assert runs[0].stages[0].settings.model.lora_rank == 32
    assert find_broken_links(path, text) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_clean(path):
    """The outputs are small and contain no path of the machine that wrote them."""
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len(text) < 200_000 and not re.search(r"/(home|root|tmp|work)/", text)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.slow
@pytest.mark.usefixtures("curves")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = run_notebook(path, steps=2, batch_size=2, group_size=4)["trained"]
    assert trained.metrics[-1]["step"] == 2 and trained._repr_png_()


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_script_runs(folder, tmp_path, monkeypatch, capsys):
    if folder.name == "agent":
        pytest.importorskip("starlette")
    run_script(folder, monkeypatch, tmp_path, "--tiny")
    assert re.fullmatch(LAST_LINES[folder.name], capsys.readouterr().out.splitlines()[-1])


@pytest.mark.campaign
def test_the_first_run_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_notebook(EXAMPLES / "first_run.ipynb")["accuracy"] >= 0.8


@pytest.mark.campaign
def test_the_reward_of_the_notebook_is_learned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = run_notebook(EXAMPLES / "own_reward.ipynb")["trained"]
    rewards = [row["reward/total"] for row in trained.metrics]
    assert rewards[0] < 0.3 and sum(rewards[-5:]) / 5 > 0.65
