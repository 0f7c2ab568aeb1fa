"""Test that every number in the settings is checked on input."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from rl.algorithms import METHODS
from rl.client.service_client import MAX_RANK
from rl.config import (
    ModelSettings,
    OptimSettings,
    Range,
    RunSettings,
    SettingsError,
    check_ranges,
    cli,
    read_run,
    unflatten_settings,
)
from rl.config.fields import get_fields
from rl.rlvr import PPOConfig, REINFORCEConfig
from rl.trainer import main
from rl.types import AdamParams

RECIPE = Path(__file__).parents[2] / "recipes" / "addition.yaml"
HUGE = "1" + "0" * 22
BAD = (
    "nan", "inf", "-inf", "-1", "0", "1e22", HUGE, "9" * 400, "9" * 5000, "two", "", "true",
    "1e-320",
)  # fmt: skip

# Odd-looking values that are accepted, and why. Every numeric setting refuses all other values of
# BAD.
_OFF = "0 turns it off"
ALLOWED: dict[str, dict[str, str]] = {
    "0": {
        **dict.fromkeys(("lora_rank", "warmup_steps", "weight_decay", "grad_clip_norm",
                         "eval_every", "save_every", "rollouts_every", "dynamic_sampling",
                         "max_steps_off_policy", "sampler_ranks", "overlong_share",
                         "overlong_penalty", "cut_off_penalty", "kl_coef", "other_reward_weight",
                         "entropy_coef", "value_coef", "label_smoothing", "centre_coef", "cql_coef",
                         "reward_threshold", "router_aux_loss_coef",
                         "num_speculative_tokens"), _OFF),
        "seed": "a seed like any other",
        "steps": "a stage that only evaluates and saves",
        "profile": "no step is profiled",
        "beta1": "no momentum: RMSProp",
        "beta2": "the newest gradient alone: sign descent",
        "beta": "dro without the pull to what drew the answers",
        "eval_temperature": "greedy",
        "curriculum_down": "never back",
        "clip_low": "no lower clip (cispo)",
        "correction_low": "no lower bound",
        "players_temperature": "greedy",
        "desirable_weight": "bad answers alone",
        "undesirable_weight": "good answers alone",
        "reward_discount": "each turn its own reward alone",
        "kl_discount": "each token its own KL alone",
        "gamma": "the next reward alone",
        "gae_lambda": "one-step advantages",
        "alpha": "cross-entropy alone",
        "rewards": "a reward that is only measured",
        "reward_models": "a judge that is only measured",
        "min_reward": "a reward like any other",
        "kept_logits_gib": "nothing is kept: all is worked out again",
    },
    "-1": {"seed": "a seed like any other", "top_k": "no truncation, the default",
           "reward_threshold": "rewards may be negative",
           "other_reward_weight": "a price on what the reward says", "rewards": "a price",
           "reward_models": "a price", "min_reward": "rewards may be negative"},
    # representable in float64 but not in float32: harmless if it only scales, compares or adds on
    # the CPU in float64
    "1e-320": {**dict.fromkeys(("plan_gpu_memory", "timeout", "stop_grace", "reward_timeout"),
                               "as good as at once: whatever waits for it ends"),
               **dict.fromkeys(("curriculum_up", "curriculum_down", "overlong_share",
                                "overlong_penalty", "cut_off_penalty", "kl_coef", "kl_target",
                                "kl_rate", "other_reward_weight", "entropy_coef", "value_coef",
                                "centre_coef", "cql_coef", "reward_threshold", "reward_discount",
                                "kl_discount", "gamma", "gae_lambda", "alpha", "rewards",
                                "reward_models", "beta", "label_smoothing", "weight_decay", "beta1",
                                "beta2", "top_fraction", "correction_low", "desirable_weight",
                                "undesirable_weight", "learning_rate", "critic_learning_rate",
                                "lora_alpha", "reward_scale", "reward_clip", "clip", "clip_low",
                                "value_clip", "kept_logits_gib", "min_reward", "target_kl",
                                "truncated_is", "expectile", "grad_clip_norm",
                                "router_aux_loss_coef"), "as good as nothing of it")},
}  # fmt: skip


def list_leaf_fields(cls: type) -> dict[str, tuple[type, str]]:
    """Return {flat name: (its class, its annotation)}."""
    result: dict[str, tuple[type, str]] = {}
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[item.name]):
            result |= list_leaf_fields(typing.cast(type, hints[item.name]))
        else:
            result[item.name] = (cls, str(hints[item.name]))
    return result


def is_number(annotation: str) -> bool:
    return bool(re.search(r"(?<!\w)(int|float)(?!\w)", annotation)) and "Literal" not in annotation


SETTINGS = {**{name: spec.Settings for name, spec in METHODS.items()}, "run": RunSettings}
NUMBERS = [
    (method, name, owner, annotation)
    for method, cls in SETTINGS.items()
    for name, (owner, annotation) in list_leaf_fields(cls).items()
    if is_number(annotation)
]
ONCE = list({(item[2], item[1]): item for item in NUMBERS}.values())


def test_every_number_has_a_range() -> None:
    """Annotate a number as Annotated[float, Range(...)], of rl/config/number_range.py."""
    assert len(NUMBERS) > 300 and {method for method, *_ in NUMBERS} == SETTINGS.keys()
    for method, cls in SETTINGS.items():
        ranged = {name for name, field in get_fields(cls).items() if field.range}
        assert ranged == {name for of, name, *_ in NUMBERS if of == method}, method


@pytest.mark.parametrize(
    "value", BAD, ids=lambda text: text if len(text) < 30 else f"{len(text)} digits"
)
def test_every_number_refuses_it_on_the_line_and_names_the_flag(value: str) -> None:
    accepted: dict[str, str] = {}
    for method, name, *_ in ONCE:
        flag = "--" + name.replace("_", "-")
        words = [value] if name not in ("rewards", "reward_models") else ["gsm8k", value]
        line = ["grpo" if method == "run" else method, flag, *words]
        try:
            read_run(line, METHODS, RECIPE, RunSettings)
        except SettingsError as error:
            named = [
                problem for problem in error.problems if flag in problem or f" {name} " in problem
            ]
            assert named, (method, name, error.problems)
            assert max(map(len, error.problems)) < 1000, "a long value is not repeated whole"
        else:
            accepted[name] = method
    extra = accepted.keys() - ALLOWED.get(value, {}).keys()
    assert not extra, f"{value} is accepted: narrow the range, or say why in ALLOWED"


def test_the_list_names_nothing_that_is_refused() -> None:
    """Settings that only take effect together with another setting are built separately."""
    tables = {name: field for cls in SETTINGS.values() for name, field in get_fields(cls).items()}
    for value, names in ALLOWED.items():
        for name in names:
            allowed = tables[name].range
            assert allowed is not None and allowed.contains(float(value)), (value, name)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, -1, 0, 1e22, 10**22, 10**400, True, "7"],
    ids=lambda v: str(v)[:30],
)
def test_every_number_refuses_it_in_python(value: Any) -> None:
    """Settings sections are built directly, without the command line, as in scripts."""
    for _, name, owner, annotation in ONCE:
        inputs: Any = value
        if "tuple" in annotation:
            inputs = (("gsm8k", value),) if name in ("rewards", "reward_models") else (value,)
        is_allowed = any(str(value) == text and name in names for text, names in ALLOWED.items())
        try:
            owner(**{name: inputs})
        except ValueError as error:
            assert name in str(error), (owner, name, error)
        else:
            assert is_allowed or (value == "7" and "tuple" in annotation), (owner, name, value)


def test_every_number_refuses_it_in_a_runs_config() -> None:
    for method, name, _, _ in NUMBERS:
        if name in ("rewards", "curriculum_steps"):
            continue
        problems: list[str] = []
        unflatten_settings(SETTINGS[method], {name: "nan"}, problems, "config.json")
        assert any(name in problem for problem in problems), (method, name)


@pytest.mark.parametrize(("allowed", "value", "expected"), [
    (Range(0, 1), 2, "lies from 0 to 1"),
    (Range(0, 1, above=True), 0, "lies above 0 and up to 1"),
    (Range(0, 1, above=True, below=True), math.nan, "lies between 0 and 1"),
    (Range(0, 10**9), -1, "is at least 0"),
    (Range(0, 10**9), 10**10, "is at most 1000000000"),
    (Range(0, 1e9, above=True), -1, "is positive"),
    (Range(1, 1e9, why="a cap"), math.nan, "is at least 1 (a cap)"),
])  # fmt: skip
def test_a_range_says_what_it_expects(allowed: Range, value: float, expected: str) -> None:
    assert allowed.describe_violation(value) == expected and not allowed.contains(value)


def test_numpys_numbers_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    check_ranges(OptimSettings(learning_rate=numpy.float64(1e-3), warmup_steps=numpy.int64(3)))
    with pytest.raises(ValueError, match="warmup_steps is a whole number, got 2.5"):
        OptimSettings(warmup_steps=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("words", "output"), [
    pytest.param("grpo --batch-size 10000000 --group-size 1000000",
                 "10000000000000 answers a batch", marks=pytest.mark.slow),
    ("grpo --batch-size 10000000000", "--batch-size is at most"),
    ("sft --max-tokens 1000000000000", "--max-tokens is at most"),
    ("grpo --max-tokens 500000 --kv-cache-tokens 400000",
     "does not fit into --kv-cache-tokens 400000"),
    pytest.param("grpo --max-tokens 200000", "the model's context holds", marks=pytest.mark.slow),
    ("grpo --lora-rank 1000000000", "--lora-rank is at most"),
    ("ppo --plan --batch-size 10000000 --group-size 1000000", "answers a batch"),
    ("grpo --temperature 1e-9", "--temperature is at least 0.001"),
    ("grpo --reward-clip 0.1 --reward-scale inf", "--reward-scale is at most 1000000000, got inf"),
])  # fmt: skip
def test_sizes_that_cannot_fit_are_refused_before_any_work(
    words: str, output: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        more = ["--output-dir", str(tmp_path / "run"), "--base-model", "tiny:addition", "--quiet"]
        main(cli.parse_run([*words.split(), *more], METHODS, RECIPE, options=RunSettings))
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and output in text and "nothing was started" in text
    assert not (tmp_path / "run").exists()


def test_a_folder_below_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunSettings(output_dir=Path("~/x")).output_dir == tmp_path / "x"
    assert RunSettings(output_dir=Path("a~b/~")).output_dir == Path("a~b/~")
    with pytest.raises(ValueError, match="output_dir"):
        RunSettings(output_dir=Path("~nobody-of-this-name/x"))


@pytest.mark.parametrize("config", [PPOConfig, REINFORCEConfig])
def test_the_algorithms_as_objects_refuse_the_same(config: type) -> None:
    for name, (_, annotation) in list_leaf_fields(config).items():
        if is_number(annotation):
            for value in (math.nan, math.inf, -1, 1e22, True, "7"):
                with pytest.raises(ValueError, match=name):
                    config(**{name: value})


@pytest.mark.parametrize("eps", [0.0, 1e-46, -1e-8])
def test_adamw_of_the_clients_has_the_bounds_of_the_settings(eps):
    """In float32 both numbers are 0, and a weight that never had a gradient becomes 0 / 0."""
    with pytest.raises(ValueError, match="eps is at least 1e-30"):
        AdamParams(eps=eps)
    with pytest.raises(ValueError, match="adam_eps"):
        OptimSettings(adam_eps=eps)


def test_a_rank_that_no_client_takes_is_known_as_a_setting():
    ModelSettings(base_model="x", lora_rank=MAX_RANK)
    with pytest.raises(ValueError, match="lora_rank"):
        ModelSettings(base_model="x", lora_rank=MAX_RANK + 1)
