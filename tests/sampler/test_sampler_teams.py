"""Test processes that share the sampler's weights (`sampler_tp`): two ranks on gloo sample the same
as a single process.

Learners run under DDP, ZeRO-3 and FSDP2.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampler_models import tiny_model
from teams_case import CASES
from test_distributed import run_launch

from rl.client import ServiceClient
from rl.distributed import check_tensor_parallel
from rl.errors import BadRequestError, UserError
from rl.models import load_model
from rl.runtime import SamplerSettings, WorkerSettings

SAME = ("drawn 0", "drawn 1", "by the last weights", "by the first weights", "of a stream")
SAME += ("of the folder",)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Save a tiny model of each family with the tokenizer of a preset: GQA, biases, norms of
    queries and keys, tied and untied heads.
    """
    folder = tmp_path_factory.mktemp("models")
    tokenizer = load_model("tiny:addition").tokenizer
    for kind in CASES:
        tiny_model(kind).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    return folder


# Each family runs under a slow launch, and each launch trains adapters and all weights: a launch
# hands over whole tensors, and the family decides how they are split.
LAUNCHES = {
    "ddp": list(CASES),
    "zero3": ["gemma", "olmo2", "llama"],
    "fsdp2": ["qwen3", "qwen2", "granite", "gemma3_text"],
}
EACH = [
    pytest.param(launch, case, marks=[pytest.mark.campaign] * (launch == "ddp"))
    for launch, cases in LAUNCHES.items()
    for case in cases
]


@pytest.fixture(scope="module")
def launched(models, tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """Return the results of a launch; each launch runs once."""

    @cache
    def launched(launch: str) -> dict[str, Any]:
        out = tmp_path_factory.mktemp(launch)
        run_launch(launch, out, models, out, *LAUNCHES[launch], script="tests/teams_case.py")
        return json.loads((out / "found.json").read_text())

    return launched


def same(first: list, other: list) -> None:
    """Compare samples [tokens, logprobs, version]: equal tokens, logprobs to 1e-5."""
    assert [tokens for tokens, *_ in first] == [tokens for tokens, *_ in other]
    for (_, mine, version), (_, its, other_version) in zip(first, other, strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-5)
        assert version == other_version


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "case"), EACH)
def test_two_that_hold_it_together_draw_what_each_would_alone(launched, launch, case):
    result = launched(launch)
    single, together = result["alone"][case], result["together"][case]
    for name in (*SAME, *(("of the merged folder", "of the base") if CASES[case] else ())):
        same(together[name], single[name])
        same(result["together, in pages"][case][name], single[name])
    assert together["by the last weights"] != together["by the first weights"]
    for first, other in zip(together["scores"], single["scores"], strict=True):
        np.testing.assert_allclose(
            np.array(first[1:], float), np.array(other[1:], float), atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "case"), EACH)
def test_the_sampler_agrees_with_the_learner(launched, launch, case):
    """Covers the weights of the last update, and weights that were moved and handed over again."""
    result = launched(launch)
    together = result["together"][case]
    assert max(together["off"]) < 2e-5 < 1e-2 < together["moved"]


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "case"), EACH)
def test_each_holds_about_half(launched, launch, case):
    result = launched(launch)
    whole, halves = result["alone"][case]["held"][0], result["together"][case]["held"]
    assert whole == result["together"][case]["parameters"]
    assert max(halves) < 0.6 * whole <= 0.6 * sum(halves)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch", [pytest.param("ddp", marks=pytest.mark.campaign), "zero3", "fsdp2"]
)
def test_a_sum_left_out_is_seen(launched, launch):
    """Under DDP the sampler's trial detects it. Under ZeRO-3 and FSDP2 no rank has the whole model
    for a comparison, so it shows in the samples.
    """
    result = launched(launch)
    broken = result["a sum left out"]
    if launch == "ddp":
        assert "does not reproduce the logits" in broken
    else:
        expected = result["alone"][LAUNCHES[launch][0]]["drawn 0"]
        assert [tokens for tokens, *_ in broken] != [tokens for tokens, *_ in expected]


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("tp", "ranks", "world", "local", "text"),
    [
        (2, 0, None, None, "one was started: start that many, as in .*--num_processes 2 "),
        (2, 0, 3, None, "does not divide the 3 processes of a machine: use 1, 3, or start"),
        (4, 0, 12, 6, "does not divide the 6 processes of a machine: use 1, 2, 3, 6, or start"),
        (2, 1, 3, None, "cannot be combined: each rank that only samples holds all weights"),
        (0, 0, None, None, "sampler_tp is a whole number of processes .*got 0"),
    ],
)
def test_launches_that_cannot_be_cut_up(tp, ranks, world, local, text, monkeypatch):
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError if tp else BadRequestError, match=text):
        check_tensor_parallel(tp, ranks)


def test_a_service_says_so_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    settings = WorkerSettings(sampler=SamplerSettings(tp=2))
    with pytest.raises(UserError, match="sampler_tp 2 splits the sampler's weights over 2"):
        ServiceClient(output_dir=tmp_path, settings=settings)
