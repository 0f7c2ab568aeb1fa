"""Test the command line, with settings classes defined here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import tyro

from rl import algorithms
from rl.config import (
    CHANGEABLE_OPTIONS,
    RawValue,
    SettingsError,
    cli,
    format_as_flags,
    load_resolved_config,
    run_config,
)
from rl.config import RunSettings as RealSettings
from rl.config.fields import convert_value, get_fields
from rl.config.format_help import exit_with_problems


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The run."""

    name: str | None = None
    """Name of the run."""
    output_dir: Path | None = None
    """Folder."""
    seed: int = 0
    """Seed."""
    resume: bool = False
    """Continue."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer."""

    learning_rate: float = 1e-4
    """Step size of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the step size changes."""

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is positive, got {self.learning_rate}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    max_tokens: int | None = None
    """Longest answer."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    shuffle: bool = True
    """Shuffle the problems."""
    parts: tuple[tuple[str, float], ...] = ()
    """Parts of the reward and their weights."""
    base_model: str = "tiny:addition"
    """The model."""


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """GRPO."""

    optim: Optim = field(default_factory=lambda: Optim(learning_rate=3e-4))
    sampling: Sampling = field(default_factory=Sampling)
    group_size: int = 8
    """Samples of each problem."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size is at least 2, got {self.group_size}")


@dataclass(frozen=True, kw_only=True)
class Sft:
    """SFT."""

    optim: Optim = field(default_factory=Optim)
    noise: float = 0.0
    """Share of digits that are spoilt."""


@dataclass(frozen=True, kw_only=True)
class RequiredSettings:
    """A method with a required setting."""

    teacher: str
    """Where the teacher is."""


@dataclass(frozen=True)
class Spec:
    Settings: type
    summary: str
    variants: dict = field(default_factory=dict)


METHODS = {
    "grpo": Spec(Grpo, "groups of answers"),
    "sft": Spec(Sft, "supervised"),
    "distill": Spec(RequiredSettings, "learn from a teacher"),
}
DEFAULT = "# Two-digit addition, taught badly and then improved\nmethod: grpo\ngroup_size: 4\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/addition.yaml").write_text(DEFAULT)
    return tmp_path


def read(*argv: str) -> cli.RunConfig:
    return cli.read_run(list(argv), METHODS, Path("recipes/addition.yaml"), RunSettings)


def read_problems(*argv: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(*argv)
    return caught.value.problems


def write_recipe(text: str, name: str = "r.yaml") -> str:
    Path("recipes", name).write_text(text)
    return f"recipes/{name}"


# --------------------------------------------------------------------------------- what values mean

LINES = [
    [],
    ["--learning-rate", "3e-4"],
    ["--learning_rate", "inf"],
    ["--learning-rate=1", "--betas", "0.5", "0.25"],
    ["--schedule", "cosine", "--max-tokens", "None"],
    ["--max-tokens", "-3", "--stop", "a b", "", "--group-size", "2"],
    ["--stop", "--no-shuffle"],
    ["--parts", "length", "0.5", "format", "-1"],
    ["--group-size", "4", "--group-size", "6"],
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line) or "nothing")
def test_a_line_means_what_tyro_says(line: list[str]) -> None:
    expected = tyro.cli(Grpo, args=line, config=(tyro.conf.OmitArgPrefixes,))
    assert read("grpo", *line).stages[0].settings == expected


def test_names_that_occur_twice_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class DuplicateSettings:
        optim: Optim = field(default_factory=Optim)
        learning_rate: float = 1.0

    # Names are resolved in this module, not in the function.
    DuplicateSettings.__annotations__ = {"optim": Optim, "learning_rate": float}
    with pytest.raises(TypeError, match="two settings named 'learning_rate'"):
        get_fields(DuplicateSettings)


def test_choices_of_an_optional_setting_are_listed_in_their_order() -> None:
    @dataclass(frozen=True, kw_only=True)
    class EffortSettings:
        effort: str | None = None

    EffortSettings.__annotations__ = {"effort": Literal["low", "middle", "high", "highest"] | None}
    with pytest.raises(ValueError, match="not one of None, low, middle, high, highest"):
        convert_value(get_fields(EffortSettings)["effort"], RawValue(("nope",), "--effort"))


# ------------------------------------------------------------------------------------------ recipes


def test_recipe_scalars_are_read_by_the_type_of_the_setting() -> None:
    """PyYAML by itself reads "3e-4" as a text and "no" as False."""
    path = write_recipe(
        "method: grpo\nlearning-rate: 3e-4\nbetas: [0.5, 1e-1]\nmax_tokens: null\n"
        "stop: [no, 'x: y', 1.0]\nshuffle: off\nparts: {length: 0.5, format: 1}\nbase_model: on\n"
    )
    settings = read(path).stages[0].settings
    assert settings.optim == Optim(learning_rate=0.0003, betas=(0.5, 0.1))
    parts = (("length", 0.5), ("format", 1.0))
    stop = ("no", "x: y", "1.0")
    assert settings.sampling == Sampling(stop=stop, shuffle=False, parts=parts, base_model="on")


def test_stages_are_named_and_a_flag_is_for_each_that_has_the_setting() -> None:
    path = write_recipe(
        "learning_rate: 0.1\nschedule: linear\nseed: 5\nstages:\n"
        "- {method: sft, learning_rate: 0.2}\n- {method: grpo, name: polish}\n- {method: sft}\n"
    )
    run = read(path, "--schedule", "cosine", "--group-size", "3")
    assert [stage.name for stage in run.stages] == ["sft-1", "polish", "sft-2"]
    assert [stage.settings.optim.learning_rate for stage in run.stages] == [0.2, 0.1, 0.1]
    assert [stage.settings.optim.schedule for stage in run.stages] == ["cosine"] * 3
    assert run.stages[1].settings.group_size == 3
    assert (run.name, run.options.seed, run.recipe) == ("r", 5, path)


def test_names_of_runs() -> None:
    assert read().name == "addition"  # without words: the default recipe
    assert read("--seed", "3").options.seed == 3
    assert read("sft").name == "sft"
    assert read("sft", "--name", "mine").name == "mine"


def test_method_and_recipe_must_agree() -> None:
    bare = write_recipe("group_size: 5\n")
    assert read("grpo", bare).stages[0].settings.group_size == 5
    assert read("grpo", "recipes/addition.yaml").stages[0].method == "grpo"
    assert "is a recipe for grpo, not sft" in read_problems("sft", "recipes/addition.yaml")[0]
    assert "no `method:`" in read_problems(bare)[0]
    two = write_recipe("stages:\n- method: sft\n- method: grpo\n", "two.yaml")
    assert "runs 2 stages (sft, grpo); leave out 'grpo'" in read_problems("grpo", two)[0]


# Each source writes the same values; the second dict has mistakes.
VALUES = {"learning_rate": 0.5, "betas": (0.5, 0.25), "shuffle": False, "max_tokens": None}
WRONG = {"learning_rate": "fast", "betas": (0.5,), "group_sise": 4}


def _as_flags(values: dict, start: str = "--") -> list[str]:
    words = []
    for name, value in values.items():
        items = value if isinstance(value, tuple) else (value,)
        words += [start + name, *map(str, items)]
    return words


def _as_recipe(values: dict, stage: bool) -> str:
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in values.items()]
    if stage:
        return write_recipe("stages:\n- method: grpo\n" + "".join(f"  {line}" for line in lines))
    return write_recipe("method: grpo\n" + "".join(lines))


def _as_config(values: dict) -> cli.RunConfig:
    config = run_config.resolve_config(read("grpo"))
    config["stages"][0]["settings"] |= json.loads(json.dumps(values))
    return load_resolved_config(config, METHODS, options=RunSettings)


def _as_arguments(values: dict) -> cli.RunConfig:
    return cli.read_run(["grpo"], METHODS, Path("none.yaml"), RunSettings, values)


WAYS: dict[str, Callable[[dict], cli.RunConfig]] = {
    "--": lambda values: read("grpo", *_as_flags(values)),
    "--grpo.": lambda values: read("grpo", *_as_flags(values, "--grpo.")),
    "recipes/r.yaml line 2, ": lambda values: read(_as_recipe(values, stage=False)),
    "recipes/r.yaml line 3, ": lambda values: read(_as_recipe(values, stage=True)),
    "config.json stage grpo, ": _as_config,
    "arguments --": _as_arguments,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_means_the_same_and_names_its_place(way: str) -> None:
    expected = Grpo(
        optim=Optim(learning_rate=0.5, betas=(0.5, 0.25)), sampling=Sampling(shuffle=False)
    )
    assert WAYS[way](VALUES).stages[0].settings == expected
    with pytest.raises(SettingsError) as caught:
        WAYS[way](WRONG)
    unknown, rate, betas = caught.value.problems
    assert "group_sise: no " in unknown and "did you mean" in unknown
    assert rate.startswith(way.removeprefix("arguments ") + "learning_rate: fast is not FLOAT")
    assert "betas: takes 2 values (FLOAT FLOAT), got 1: 0.5" in betas


def test_of_two_sources_the_later_counts(folder: Path) -> None:
    """Each source overrides all earlier ones, even if they set the setting too."""
    text = "group_size: 2\nstages:\n- method: grpo\n  group_size: 3\n"
    run = read(write_recipe(text))
    assert run.stages[0].settings.group_size == 3
    path, everywhere, of_stage = "recipes/r.yaml", ["--group-size", "4"], ["--grpo.group-size", "5"]
    assert read(path, *everywhere).stages[0].settings.group_size == 4
    assert read(path, *of_stage, *everywhere).stages[0].settings.group_size == 5
    words, arguments = [path, *everywhere], {"group_size": 6}
    run = cli.read_run(words, METHODS, Path("none.yaml"), RunSettings, arguments)
    assert run.stages[0].settings.group_size == 6
    (folder / "config.json").write_text(json.dumps(run_config.resolve_config(run)))
    resumed = ["--resume", "--output-dir", str(folder)]
    assert read(*resumed).stages[0].settings.group_size == 6
    assert read(*resumed, *everywhere).stages[0].settings.group_size == 4


# ----------------------------------------------------------------------------------------- mistakes

MISTAKES = [
    (["grpo", "--learning-rat", "1"],
     "--learning-rat: no such setting; did you mean --learning-rate?"),
    (["grpo", "--noise", "1"], "--noise: no such setting of this run (it is a setting of sft)"),
    (["grpo", "--learning-rate", "fast"],
     "--learning-rate: fast is not FLOAT (a number, like 0.5 or 3e-4)"),
    (["grpo", "--max-tokens", "few"],
     "--max-tokens: few is not INT (a whole number, like 8) or None"),
    (["grpo", "--vllm-mode", "colocate"], "--vllm-mode: no such setting: with sampler vllm the run"),
    (["grpo", "--push-to-hub"], "--push-to-hub: no such setting: export.py RUN OUT --push REPO"),
    (["grpo", "--remove-unused-columns", "x"],
     "--remove-unused-columns: no such setting: a reward receives all columns"),
    (["grpo", "--group-size", "1.5"], "--group-size: 1.5 is not INT (a whole number, like 8)"),
    (["grpo", "--group-size"], "--group-size: takes 1 value (INT), got none"),
    (["grpo", "--betas", "0.9"], "--betas: takes 2 values (FLOAT FLOAT), got 1: 0.9"),
    (["grpo", "--schedule", "linaer"], "did you mean linear?"),
    (["grpo", "--no-shuffle", "x"], "--no-shuffle: takes no value, got x"),
    (["grpo", "--no-stop"], "--no-stop: stop is no switch"),
    (["grpo", "--no-output-dir"],
     "--no-output-dir: --output-dir is no switch; --output-dir None unsets it"),
    (["grpo", "--shuffle", "recipes/addition.yaml"],
     "--shuffle: recipes/addition.yaml is not one of True, False"),
    (["grpo", "--output-dir", ""], "--output-dir: '' is not PATH or None"),
    (["grpo", "-s", "1"], "-s: flags begin with two dashes, like --s"),
    (["grpo", "--learning-rate", "-1"], "--learning-rate is positive, got -1.0"),
    (["grpo", "--group-size", "1"], "--group-size is at least 2, got 1"),
    (["distill"], "teacher is required: set it with --teacher STR"),
    (["grop"], "unknown method 'grop'; did you mean grpo?"),
    (["adition"], "unknown method 'adition'; did you mean recipes/addition.yaml?"),
    (["recipes/adition.yaml"],
     "no recipe file 'recipes/adition.yaml'; did you mean recipes/addition.yaml?"),
    (["grpo", "sft"], "'sft' is not expected: the line holds at most a method"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    MISTAKES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_on_the_line_is_one_problem_that_says_the_remedy(
    line: list[str], expected: str
) -> None:
    result = read_problems(*line)
    assert len(result) == 1 and expected in result[0], result


RECIPE_MISTAKES = [
    ("method: grpo\nlearning_rat: 1\n",
     "line 2, learning_rat: no setting of grpo; did you mean learning_rate?"),
    ("method: grpo\ngroup_size: 4\ngroup-size: 5\n",
     "line 3: group_size occurs twice (first in line 2)"),
    ("method: grpo\nnoise: 1\n", "line 2, noise: no setting of grpo (it is a setting of sft)"),
    ("method: grpo\ngroup_size: [1, 2]\n", "line 2, group_size: takes 1 value (INT), got 2"),
    ("method: grpo\ngroup_size: null\n", "line 2, group_size: null is not INT"),
    ("method: grpo\ngroup_size: true\n", "line 2, group_size: true is not INT"),
    ("method: grpo\n  group_size: 4\n", "line 2: not YAML"),
    ("method: grop\n", "line 1: unknown method 'grop'; did you mean grpo?"),
    ("stages: []\n", "line 1: `stages:` is a list"),
    ("method: grpo\nstages:\n- method: sft\n",
     "line 1: `method:` and `stages:` exclude each other"),
    ("stages:\n- learning_rate: 1\n", "line 2: this stage has no `method:`"),
    ("stages:\n- methd: sft\n", "is `methd:` a misspelled `method:`?"),
    ("stages:\n- method: sft\n  seed: 1\n",
     "line 3, seed: applies to the whole run; move it to the recipe's top level"),
    ("- a\n- b\n", "a recipe is a mapping of settings"),
    ("", "a recipe is a mapping of settings"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"), RECIPE_MISTAKES, ids=[expected[:30] for _, expected in RECIPE_MISTAKES]
)
def test_a_mistake_in_a_recipe_is_named_with_its_line(text: str, expected: str) -> None:
    result = read_problems(write_recipe(text))
    assert len(result) == 1 and result[0].startswith("recipes/r.yaml") and expected in result[0], (
        result
    )


def test_a_misspelled_recipe_is_looked_for_in_its_own_folder_too(tmp_path: Path) -> None:
    path = tmp_path / "sorting.yaml"
    path.write_text("method: sft\n")
    result = read_problems(str(path.with_name("sortin.yaml")))
    assert len(result) == 1 and result[0].endswith(f"; did you mean {path}?"), result
    # a long folder makes no two names alike
    assert "did you mean" not in read_problems(str(path.with_name("quality.yaml")))[0]
    # the folder of the default recipe is listed once
    assert read_problems("recipes/qzx.yaml")[0].count("recipes/addition.yaml") == 1


def test_settings_of_a_recipe_are_named_as_it_writes_them_and_flags_as_they_are_typed() -> None:
    path = write_recipe("method: grpo\ngroup_size: 1\n")
    assert read_problems(path) == ["group_size is at least 2, got 1"]
    assert read_problems(path, "--group-size", "0") == ["--group-size is at least 2, got 0"]
    # group_size is checked after learning_rate
    assert read_problems(path, "--learning-rate", "-1") == ["--learning-rate is positive, got -1.0"]
    text = "batch_size 7 (not --batch-size, my_batch_size, 'batch_size' or batch_sizes)"
    assert format_as_flags(text, ["batch_size", "size"]) == f"--batch-size{text[10:]}"
    paths = "no folder runs/train_limit, train_limit/x or train_limit.yaml; train.py train_limit; "
    text = f"{paths}stage train_limit: lower "
    assert format_as_flags(f"{text}train_limit.", ["train_limit"]) == f"{text}--train-limit."


def test_all_problems_are_shown_at_once_in_one_box(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(
        "learning_rate: fast\ngroupsize: 3\nstages:\n- method: sft\n  noise: loud\n- method: grpo\n"
    )
    words = [path, "--sed", "1", "--betas", "1"]
    with pytest.raises(SystemExit) as caught:
        cli.parse_run(words, METHODS, Path("recipes/addition.yaml"), options=RunSettings)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == ""
    assert err.count("╭") == 1 and "5 problems: nothing was started" in err
    shown = ("line 1, learning_rate", "groupsize", "line 5, noise", "mean --seed?", "--betas")
    assert [text for text in shown if text not in err] == [] and "Traceback" not in err
    assert err.count("learning_rate: fast") == 1  # wrong in both stages, reported once


@pytest.mark.parametrize("begun", [False, True])
def test_the_box_says_whether_anything_began(
    begun: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`execute` fails before or after it reports its start."""
    from rl.errors import UserError
    from rl.trainer import entry_point

    def execute(run: object, begins: Callable[[], None], *, ends_process: bool) -> None:
        assert ends_process
        if begun:
            begins()
        raise UserError("max_tokens 900 is too long")

    monkeypatch.setattr(entry_point, "execute", execute)
    default = Path("recipes/addition.yaml")
    with pytest.raises(SystemExit) as caught:
        entry_point.main(cli.read_run(["grpo"], algorithms.METHODS, default, RealSettings))
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert f"1 problem: {'the run stopped' if begun else 'nothing was started'}" in err
    assert "--max-tokens 900 is too long" in err


def test_only_rank_0_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        exit_with_problems(["x"])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        exit_with_problems(["[bold]not markup[/]"])
    assert "[bold]not markup[/]" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- help


def read_help(
    capsys: pytest.CaptureFixture[str], *argv: str, methods=METHODS, options=RunSettings
) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.parse_run(list(argv), methods, Path("recipes/addition.yaml"), options=options)
    assert caught.value.code == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def test_help_is_the_index(capsys: pytest.CaptureFixture[str]) -> None:
    page = read_help(capsys, "--help")
    for name, spec in METHODS.items():
        assert re.search(rf"{name} +{spec.summary}", page)
    assert re.search(
        r"recipes/addition.yaml +Two-digit addition, taught badly and then improved \(the "
        r"default\)",
        page,
    )


@pytest.mark.parametrize("method", METHODS)
def test_help_of_a_method_has_every_setting_with_help_and_default(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = read_help(capsys, method, "--help", "all")
    for cls in (METHODS[method].Settings, RunSettings):
        for name in get_fields(cls):
            assert f"--{name.replace('_', '-')}" in page
    assert "Seed. (default: 0)" in page
    if method == "grpo":
        assert "Step size of AdamW. (default: 0.0003)" in page


@pytest.mark.parametrize("more", [[], ["all"]])
def test_help_of_a_recipe_shows_its_values(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = read_help(capsys, "recipes/addition.yaml", "--help", *more)
    assert "Samples of each problem. (default: 4)" in page


def test_help_of_a_recipe_of_two_stages_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe("stages:\n- method: sft\n  noise: 0.7\n- method: grpo\n")
    page = read_help(capsys, path, "--help", "all")
    assert "train.py sft" in page and "train.py grpo" in page and "spoilt. (default: 0.7)" in page


@pytest.mark.parametrize("method", algorithms.METHODS)
def test_help_of_a_method_begins_with_its_twelve_most_used_settings(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = read_help(capsys, method, "--help", methods=algorithms.METHODS, options=RealSettings)
    names = re.findall(r"^--([a-z-]+) ", page, re.MULTILINE)
    assert len(names) == 12 == len({*names})
    known = {*get_fields(algorithms.METHODS[method].Settings), *get_fields(RealSettings)}
    assert {name.replace("-", "_") for name in names} <= known
    assert {"base-model", "dataset", "steps", "learning-rate", "output-dir"} < {*names}
    assert ("teacher" in names) == (method == "distill")
    assert f"python train.py {method} --help all" in page
    assert "Rank of the LoRA adapters; 0 trains all weights. (default: 0)" in page


@pytest.mark.parametrize("words", [[], ["grpo"]])
def test_help_whose_reader_has_left_ends_quietly(words: list[str]) -> None:
    """As in `train.py --help | head -3`; here the pipe has no reader at all."""
    train = Path(__file__).parents[2] / "train.py"
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, str(train), *words, "--help"],
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rl.config import cli; from rl.config.format_help import print_index\n"
        "assert not {'torch', 'transformers', 'accelerate', 'datasets', 'matplotlib'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# -------------------------------------------------------------------------------------- config.json


def test_resolved_settings_survive_json() -> None:
    path = write_recipe(
        "stages:\n- method: sft\n  learning_rate: 0.1234567890123456789\n- method: grpo\n  stop: "
        "['None', 'a b']\n"
    )
    run = read(
        path, "--parts", "a", "inf", "--output-dir", "somewhere/else", "--max-tokens", "None"
    )
    config = json.loads(json.dumps(run_config.resolve_config(run), allow_nan=False))
    assert load_resolved_config(config, METHODS, options=RunSettings) == run
    assert config["stages"][1]["settings"]["max_tokens"] is None
    assert config["options"]["output_dir"] == "somewhere/else"


def test_a_saved_config_that_no_longer_fits_says_where() -> None:
    config = run_config.resolve_config(read("sft"))
    config["stages"][0]["settings"] |= {"noize": 1, "learning_rate": "fast"}
    with pytest.raises(SettingsError) as caught:
        load_resolved_config(config, METHODS, options=RunSettings)
    unknown, wrong = caught.value.problems
    assert "config.json stage sft, noize: no setting of sft; did you mean noise?" in unknown
    assert "config.json stage sft, learning_rate" in wrong
    with pytest.raises(SettingsError, match="is this file the config.json of a run"):
        load_resolved_config({"model_type": "qwen3"}, METHODS, options=RunSettings)


def test_difference_names_each_changed_setting() -> None:
    two = write_recipe("stages:\n- method: sft\n- method: grpo\n")
    saved = run_config.resolve_config(read(two))
    # resuming is not a change of settings
    resumed = run_config.resolve_config(read(two, "--resume"))
    assert run_config.diff_configs(saved, resumed, ignore=CHANGEABLE_OPTIONS) == []
    words = ["--learning-rate", "0.5", "--seed", "1", "--stop", "a", "b", "--max-tokens", "5"]
    request = run_config.resolve_config(read(two, *words))
    assert run_config.diff_configs(saved, request) == [
        "seed 0 -> 1",
        "stage sft: learning_rate 0.0001 -> 0.5",
        "stage grpo: learning_rate 0.0003 -> 0.5",
        "stage grpo: max_tokens (not set) -> 5",
        "stage grpo: stop (none) -> a b",
    ]
    assert run_config.diff_configs(saved, run_config.resolve_config(read("sft"))) == [
        "stages sft (sft), grpo (grpo) -> sft (sft)"
    ]


def test_a_setting_that_an_older_config_lacks_had_its_default() -> None:
    request = run_config.resolve_config(read("sft"))
    table = {"methods": METHODS, "options": RunSettings}

    def copy_with(part: str, name: str, value: dict[str, str]) -> dict:
        """Return a copy of the config with another value of a setting, or without it."""
        config = json.loads(json.dumps(request))
        held = config["options"] if part == "options" else config["stages"][0]["settings"]
        del held[name]
        held.update(value)
        return config

    settings = request["stages"][0]["settings"]
    for part, name in [("options", "seed"), *(("stages", name) for name in settings)]:
        default = (request["options"] | settings)[name]
        saved, other = copy_with(part, name, {}), copy_with(part, name, {name: "another"})
        was = f"{name} {run_config.format_value(default)}"
        assert run_config.diff_configs(saved, request, **table) == []
        assert run_config.diff_configs(saved, other, **table) == [f"{was} -> another"]
        assert run_config.diff_configs(request, saved, **table) == [f"{was} -> (not set)"]
