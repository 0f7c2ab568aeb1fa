"""Test command lines and recipes that are generated from the schema and then damaged."""

from __future__ import annotations

import json
import math
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fuzzing import ACCEPTED, ODD_NUMBERS, REFUSED, damage_bytes, run_family

from rl.algorithms import METHODS
from rl.config import RunSettings, SettingsError, load_resolved_config, read_run, resolve_config
from rl.config.fields import SettingField, get_fields
from rl.sanitize import sanitize_message

REPO = Path(__file__).resolve().parents[2]
DEFAULT = REPO / "recipes" / "addition.yaml"
RECIPES = [path.read_bytes() for path in sorted((REPO / "recipes").glob("*.yaml"))]
SECONDS = 20.0  # per input: a parser answers at once on an idle machine

# Words that are not plain decimal numbers but are accepted as numbers, and why.
WORDS_FOR_NUMBERS = {
    "1_000": "Python's way of writing a thousand",
    "٣": "a digit of another script, read as the number it is",
    "None": "no value, where a setting may have none", "null": "the same in a recipe",
    "": "an empty value of a recipe is null", "~": "null in YAML",
    "!!int 3": "a number with its kind before it, in YAML",
}  # fmt: skip
_DECIMAL = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_TEXTS = (
    "grpo", "sft", "x", "", "a b", "../..", "~", "*a", "&a b", "!!int 3", "{", "]", "- x", "a: b",
    "#", "\t", "\x1b[2J", "日本", "🦊", "'", '"', "|", ">", "%", "@", "`", "<<", "yes", "off", "0o17",
    "2020-01-01", "--x", "-", "x" * 3000,
)  # fmt: skip


@dataclass(frozen=True)
class CommandLineCase:
    """Words of a line and, if present, the recipe that PATH refers to."""

    words: tuple[str, ...]
    recipe: bytes | None = None
    numbers: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------- inputs


def _value(field: SettingField, rng: random.Random) -> list[str]:
    """Return words for a setting: often right, often of the wrong type, count or size."""
    kind = rng.random()
    if kind < 0.25 and field.spec.choices:
        return [rng.choice(list(field.spec.choices))]
    if kind < 0.35:
        default = field.default
        return [str(item) for item in default] if isinstance(default, tuple) else [str(default)]
    if kind < 0.75:
        return [rng.choice(ODD_NUMBERS)]
    if kind < 0.85:
        return [rng.choice(_TEXTS)]
    if kind < 0.95:
        return [repr(rng.choice([rng.uniform(-2, 2), rng.gauss(0, 1e6), rng.randrange(-5, 2000)]))]
    return [rng.choice([*ODD_NUMBERS, *_TEXTS]) for _ in range(rng.randrange(0, 5))]


def _misspelt(name: str, rng: random.Random) -> str:
    at = rng.randrange(len(name))
    return rng.choice([
        name[:at] + name[at + 1 :], name + "x", name[:at] + name[at:][::-1],
        name.upper(), "no_" + name,
    ])  # fmt: skip


def _line(rng: random.Random) -> CommandLineCase:
    method = rng.choice(list(METHODS))
    table = {**get_fields(METHODS[method].Settings), **get_fields(RunSettings)}
    words, numbers = [method] if rng.random() < 0.95 else [rng.choice(_TEXTS)], []
    # among equal flags the last counts, and the others are not read
    for name in rng.sample(list(table), rng.choice([0, 1, 1, 1, 2, 3, 6])):
        value = _value(table[name], rng)
        numbers += value if table[name].range else []
        name = _misspelt(name, rng) if rng.random() < 0.05 else name
        flag = "--" + (name if rng.random() < 0.3 else name.replace("_", "-"))
        words += [f"{flag}={' '.join(value)}"] if rng.random() < 0.2 else [flag, *value]
    if rng.random() < 0.05:
        words.insert(rng.randrange(len(words) + 1), rng.choice(_TEXTS))
    return CommandLineCase(
        tuple(word for word in words if word not in ("-h", "--help")), None, tuple(numbers)
    )


def _scalar(word: str, rng: random.Random) -> str:
    """Return a word in YAML, sometimes written wrongly."""
    if rng.random() < 0.1:
        return word
    return json.dumps(word) if rng.random() < 0.5 or not re.fullmatch(r"[\w.+/-]+", word) else word


def _yaml(rng: random.Random) -> CommandLineCase:
    """Return a recipe with odd values, wrong nesting, doubled keys and aliases."""
    numbers: list[str] = []

    def settings(method: str, indent: str) -> list[str]:
        table = dict(get_fields(METHODS[method].Settings))
        table |= get_fields(RunSettings) if not indent else {}
        lines = []
        for _ in range(rng.choice([0, 1, 1, 2, 4])):
            name = rng.choice(list(table))
            value = _value(table[name], rng)
            shape = rng.random()
            if shape < 0.08:
                lines.append(f"{indent}{name}: {{{_scalar('a', rng)}: {[1, [2, {}]]}}}")
                continue
            numbers.extend(value if table[name].range else [])
            words = [_scalar(word, rng) for word in value]
            text = words[0] if len(words) == 1 and shape < 0.85 else f"[{', '.join(words)}]"
            lines.append(f"{indent}{_misspelt(name, rng) if shape > 0.97 else name}: {text}")
            lines += lines[-1:] if rng.random() < 0.03 else []
        return lines

    if rng.random() < 0.6:
        method = rng.choice(list(METHODS))
        lines = [f"method: {method}", *settings(method, "")]
    else:
        lines = ["stages:"]
        for _ in range(rng.randrange(1, 4)):
            method = rng.choice(list(METHODS))
            lines.append(f"  - method: {method}")
            if rng.random() < 0.2:
                lines.append(f"    name: {_scalar(rng.choice(_TEXTS), rng)}")
            lines += settings(method, "    ")
    if rng.random() < 0.1:
        rng.shuffle(lines)
    text = "\n".join(lines) + "\n"
    return CommandLineCase(("PATH",), text.encode("utf-8", "replace"), tuple(numbers))


def inputs(seed: int, count: int) -> Iterator[CommandLineCase]:
    """Yield lines, recipes of the schema, damaged recipes of the repository, and noise."""
    rng = random.Random(f"settings {seed}")
    for _ in range(count):
        kind = rng.random()
        if kind < 0.45:
            yield _line(rng)
        elif kind < 0.8:
            request = _yaml(rng)
            if rng.random() >= 0.7:
                damaged = damage_bytes(request.recipe or b"", rng)
                request = CommandLineCase(request.words, damaged, tuple(WORDS_FOR_NUMBERS))
            yield request
        elif kind < 0.97:
            words = ("PATH", *_line(rng).words[1:])
            damaged = damage_bytes(rng.choice(RECIPES), rng)
            yield CommandLineCase(words, damaged, tuple(WORDS_FOR_NUMBERS))
        else:
            yield CommandLineCase(("PATH",), rng.randbytes(rng.randrange(0, 400)))


# -------------------------------------------------------------------------------------------- check


def _check_numbers(value: Any, field: SettingField) -> None:
    """Check that an accepted value is finite, of its type and within its range."""
    if isinstance(value, tuple):
        for item in value:
            _check_numbers(item, field)
    elif isinstance(value, (int, float)) and field.range is not None:
        assert not isinstance(value, bool) and math.isfinite(value), (field.name, value)
        assert field.range.low <= value <= field.range.high and (
            isinstance(value, int) or not field.whole
        ), (field.name, value)


def _check_run(run: Any, request: CommandLineCase) -> None:
    for settings in (run.options, *(stage.settings for stage in run.stages)):
        for name, field in get_fields(type(settings)).items():
            holder = settings if field.section is None else getattr(settings, field.section)
            _check_numbers(getattr(holder, name), field)
    config = json.loads(json.dumps(resolve_config(run), allow_nan=False))
    again = load_resolved_config(config, METHODS, options=RunSettings)
    assert (again.stages, again.options) == (run.stages, run.options), "config.json read back"
    for word in request.numbers:
        if request.recipe is not None and not word.strip():
            continue  # null, and an empty item at the end of a list: [3, ]
        assert _DECIMAL.fullmatch(word) or word in WORDS_FOR_NUMBERS, f"{word!r} read as a number"


def check(request: CommandLineCase) -> str:
    """Read a line (and its recipe); return whether it was accepted or refused."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        path = Path(folder) / "r.yaml"
        if request.recipe is not None:
            path.write_bytes(request.recipe)
        words = [str(path) if word == "PATH" else word for word in request.words]
        try:
            run = read_run(words, METHODS, DEFAULT, RunSettings)
        except SettingsError as error:
            assert error.problems and all(problem.strip() for problem in error.problems)
            assert max(map(len, error.problems)) < 4000, max(error.problems, key=len)
            sanitize_message(str(error))
            return REFUSED
    _check_run(run, request)
    return ACCEPTED


# -------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_within_its_ranges_or_one_clean_error(seed: int) -> None:
    report = run_family(inputs, check, seed=seed, count=100, seconds=SECONDS)
    assert not report.faults
    assert report.outcomes[ACCEPTED] > 5 and report.outcomes[REFUSED] > 30, "else they say little"


@pytest.mark.parametrize(("recipe", "numbers", "outcome"), [
    (f"method: online_dpo\nquiet: {'x' * 5000}\n", (), REFUSED),  # shortened in the error
    (f"stages:\n  - method: sft\n    name: {'x' * 5000}\n", (), REFUSED),
    ("method: reward_model\nsteps: [3,  ]\n", ("3", " "), ACCEPTED),  # a list with a single item
    ("method: grpo\nplan_gpus: !!int 3\n", ("!!int 3",), ACCEPTED),
])  # fmt: skip
def test_found_by_many_more(recipe: str, numbers: tuple[str, ...], outcome: str) -> None:
    assert check(CommandLineCase(("PATH",), recipe.encode(), numbers)) == outcome


def test_a_number_with_its_kind_is_text_on_the_command_line() -> None:
    assert check(CommandLineCase(("--plan-gpus", "!!int 3"), None, ("!!int 3",))) == REFUSED


def test_inputs_are_a_function_of_the_seed() -> None:
    assert list(inputs(3, 50)) == list(inputs(3, 50)) != list(inputs(4, 50))


def test_the_check_finds_what_it_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails for a parser that accepts nan, and for a parser that crashes."""
    import test_fuzz_settings as here

    sound = read_run

    def lenient(words: Any, *rest: Any) -> Any:
        run = sound(["grpo"], *rest)
        object.__setattr__(run.stages[0].settings.optim, "learning_rate", math.nan)
        return run

    monkeypatch.setattr(here, "read_run", lenient)
    assert len(run_family(here.inputs, here.check, seed=0, count=5).faults) == 5
    monkeypatch.setattr(here, "read_run", lambda *_: {}["x"])
    assert "KeyError" in run_family(here.inputs, here.check, seed=0, count=1).faults[0][2]
