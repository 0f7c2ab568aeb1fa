"""Test `--sampler-tp`: runs, memory plans and scripts with processes that share the sampler's
weights.

Equality of samples is tested in test_sampler_split.py and test_sampler_teams.py; here for whole
runs.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sampler_models import VOCAB, add_lora, one_thread, tiny_model  # noqa: F401
from test_distributed import REPO, run_launch
from test_sampler_split import ALL, on_ranks, split
from transformers import AutoConfig

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.distributed import ZeroSharding
from rl.errors import UserError
from rl.memory_plan import (
    GIB,
    LaunchShape,
    MicroBatch,
    MicroBatchMemory,
    ModelShape,
    ModelSkeleton,
    StepWork,
    plan_memory,
)
from rl.memory_plan.byte_counts import kv_cache_bytes, sampler_copy_bytes, sampler_working_bytes
from rl.runtime import SamplerSettings
from rl.sampler.decode_state import BatchSize
from rl.trainer import memory_report, open_weights
from rl.trainer.memory_report import check_memory, find_savings, report_memory, select_listed
from rl.trainer.memory_requirements import compute_stage_needs
from rl.trainer.saved_weights import collect_worker_settings
from rl.types import LoraConfig
from tools.scaling import config_of

ADDITION = REPO / "recipes" / "addition.yaml"
LINE = (
    "grpo --base-model {} --dataset addition --max-tokens 1024 --batch-size 64 --group-size 8 "
    "--output-dir /nowhere"
)


def read_config(words: str):
    return parse_run(words.split(), METHODS, ADDITION, options=RunSettings)


# -------------------------------------------------------------------- the counts of a plan, by hand

SHAPE = ModelShape(
    name="x", parameters=1_000_000, trainable=1_000_000, adapters=0, small=0, largest=200_000,
    layers=2, hidden=64, heads=4, key_heads=2, head_width=2, mlp=128, vocab=1000, max_context=None,
    fast=True, windowed=False, unsplit=10_000,
)  # fmt: skip
WORK = StepWork(batch=MicroBatch(1, 8, 8), samples=True, prompts=3, prompt=10, rows=6, answer=5)


def test_a_ranks_part_by_hand():
    first, second = (
        LaunchShape(cuda=True, bf16=True, world=4, sharding=ZeroSharding(stage=3), sampler_tp=team)
        for team in (1, 2)
    )
    assert sampler_copy_bytes(SHAPE, first) == 2e6
    base = 2 * (10_000 + 990_000 / 2)
    assert sampler_copy_bytes(SHAPE, second) == base
    adapted = replace(SHAPE, parameters=1_100_000, adapters=100_000, unsplit_adapters=40_000)
    # adapters are in fp32
    assert sampler_copy_bytes(adapted, second) == base + 4 * (40_000 + 60_000 / 2)
    cache = 16 * 2 * (3 * 10 + 6 * 4)
    assert kv_cache_bytes(SHAPE, first, WORK) == 2 * kv_cache_bytes(SHAPE, second, WORK) == cache
    # every rank has whole logits
    assert sampler_working_bytes(SHAPE, second, WORK) == 4 * 1000 * (4 * 6 + 3)
    reading = replace(WORK, prompts=1, prompt=8192, rows=1, answer=1)
    widths = 2 * 64 + 3 * 128 / 2 + 6 * 4 * 2 / 2
    assert sampler_working_bytes(replace(SHAPE, vocab=1), second, reading) == 2 * 8192 * widths
    one_process, joined = (
        plan_memory(SHAPE, MicroBatchMemory(), launch, WORK, [SHAPE]) for launch in (first, second)
    )
    sizes = [{item.name: item.train for item in result.items} for result in (one_process, joined)]
    changed = {name for name in sizes[0] if sizes[0][name] != sizes[1][name]}
    # models that only score are sampled from as well
    assert changed == {"sampler's copy of the weights", "models that only score"}


# ---------------------------------------------------------------------- counts against real tensors

REAL = {
    "qwen3": ({}, ()),
    "qwen3, tied": ({"tie_word_embeddings": True}, ()),
    "qwen2, biases": ({}, ()),
    "llama, a bias on every matrix": ({"attention_bias": True, "mlp_bias": True}, ()),
    "llama, adapters": ({"tie_word_embeddings": False}, (*ALL, "lm_head")),
    "qwen3_moe": ({}, ()),
    "qwen2_moe, a dense layer": ({"mlp_only_layers": [0]}, ()),
}


@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("size", [2, 4])
def test_the_plan_counts_what_ranks_really_hold(case, size, tmp_path):
    changes, adapted = REAL[case]
    model = tiny_model(case.split(",")[0], **{"num_key_value_heads": 4, **changes})
    model.config.save_pretrained(tmp_path)
    if adapted:
        model = add_lora(model, list(adapted), r=3)
    shape = ModelSkeleton(str(tmp_path), None, LoraConfig(3) if adapted else None).shape
    assert shape.parameters == sum(p.numel() for p in model.parameters())

    def held(team) -> tuple[int, int]:
        decoder = split(model, team)
        state = decoder.new_state(1000)
        state.reserve(BatchSize(2, 16, 4, 8))
        weights = sum(buffer.nbytes for buffer in decoder.weights.buffers.values())
        return weights, sum(block.nbytes for block in (*state.prompt_kv, *state.row_kv))

    launch = LaunchShape(cuda=False, bf16=False, world=size, sampler_tp=size)
    expected = sampler_copy_bytes(shape, launch)
    result = on_ranks(size, held)
    # the vocabulary of 41 does not divide evenly
    word = 4 * shape.hidden * (1 if model.config.tie_word_embeddings else 2)
    word += 4 * 3 if adapted else 0  # nor do the rows of the head's adapter
    assert VOCAB % size
    for weights, _ in result:
        assert abs(weights - expected) <= word < 0.05 * weights
    assert sum(weights for weights, _ in result) == pytest.approx(size * expected, abs=1)
    work = replace(WORK, prompts=2, prompt=16, rows=4, answer=9)
    assert {cache for _, cache in result} == {kv_cache_bytes(shape, launch, work)}


# ----------------------------------------------------- a policy that fits only with a split sampler


@pytest.fixture(scope="module")
def large_model(tmp_path_factory) -> str:
    """Return a folder with the config of a policy of 32.8e9 parameters."""
    folder = tmp_path_factory.mktemp("32B")
    config_of("32B").save_pretrained(folder)
    return str(folder)


EIGHT_GPUS = LaunchShape(cuda=True, bf16=True, world=8, per_node=8, sharding=ZeroSharding(stage=3))


def test_a_32b_policy_fits_8_gpus_of_80_gib_with_a_split_sampler(large_model, capsys):
    words = LINE.format(large_model) + (
        " --lora-rank 32 --gradient-checkpointing --plan --plan-gpus 8 --plan-gpu-memory 80 "
        "--plan-zero 3"
    )
    fits = r"(?s)needs 9\d\.\d GiB .*--sampler-tp 2: \d\d\.\d GiB, fits"
    with pytest.raises(UserError, match=fits) as refused:
        report_memory(read_config(words))
    # the smallest sufficient size
    assert "does not fit" in capsys.readouterr().out and "--sampler-tp 4" not in str(refused.value)
    report_memory(read_config(words + " --sampler-tp 2"))
    text = " ".join(capsys.readouterr().out.split())
    assert "fits:" in text
    assert "by groups of 2 processes, each with its part of weights and cache of a sampler" in text
    needs = {
        k: compute_stage_needs(read_config(words + f" --sampler-tp {k}"), EIGHT_GPUS, 512)[0]
        for k in (1, 2, 4, 8)
    }
    copies = {
        k: next(i.sample for i in p.plan.items if i.name.startswith("sampler's"))
        for k, p in needs.items()
    }
    assert copies[1] > 60 * GIB
    assert all(copies[1] / k < copies[k] < 1.05 * copies[1] / k for k in (2, 4, 8))
    one, two, four, eight = (p.plan.peak for p in needs.values())
    assert eight < four < two < 0.92 * 80 * GIB < one
    rows = {k: p.work.rows for k, p in needs.items()}
    # a team samples the rows of all its ranks together, as far as the cache has room
    assert rows[1] == 64 < rows[2] == 128 and rows[8] <= 512


def test_all_weights_of_it_fit_with_the_optimizer_in_host_memory(large_model):
    run = read_config(LINE.format(large_model) + " --gradient-checkpointing --token-budget 4096")
    room, changes = 0.92 * 80 * GIB, find_savings(run, EIGHT_GPUS, 512)
    (team,) = [change for change in select_listed(changes, room) if change.kind == "sampler_tp"]
    # not sufficient without offloading: the most effective size is listed
    assert team.command == "--sampler-tp 8" and team.peak > room
    offload = next(change for change in changes if "zero3_offload" in change.command)
    planned = compute_stage_needs(*offload.apply(*team.apply(run, EIGHT_GPUS)), 512)
    assert max(needs.plan.peak for needs in planned) <= room < offload.peak


def test_a_judge_is_split_and_a_reward_model_is_not():
    launch = LaunchShape(cuda=True, bf16=True, world=2, per_node=2)

    def scores(model: str, k: int) -> float:
        words = f" --{model}-model tiny:ascii --kl-coef 0 --sampler-tp {k}"
        run = read_config(LINE.format("tiny:ascii") + words)
        items = compute_stage_needs(run, launch, 16)[0].plan.items
        return next(item.sample for item in items if item.name == "models that only score")

    whole = scores("comparison", 1)
    assert 0.5 * whole < scores("comparison", 2) < 0.51 * whole
    assert scores("reward", 2) == scores("reward", 1) == whole > 0


def test_it_is_told_to_one_gpu_with_the_launch_it_needs_and_never_where_it_cannot_be(tmp_path):
    def offered(words: str, launch: LaunchShape) -> set[str]:
        changes = find_savings(read_config(words), launch, 512)
        return {change.command for change in changes if change.kind == "sampler_tp"}

    config = config_of("32B").to_dict() | {"num_hidden_layers": 8, "layer_types": None}
    AutoConfig.for_model(**config).save_pretrained(tmp_path / "large")
    words = LINE.format(tmp_path / "large") + " --lora-rank 8 --gradient-checkpointing"
    sizes = {f"--sampler-tp {k} on 8 GPUs" for k in (2, 4, 8)}
    assert offered(words, LaunchShape(cuda=True, bf16=True)) == sizes
    config_of("0.5B").save_pretrained(tmp_path)  # 14 heads, 2 key-value heads
    assert offered(LINE.format(tmp_path), EIGHT_GPUS) <= {"--sampler-tp 2"}
    assert not offered(LINE.format(tmp_path) + " --sampler hf", EIGHT_GPUS)


def test_launches_that_such_a_team_does_not_go_with_are_not_offered(tmp_path):
    """Three processes of a machine share the sampler. 8 GPUs are not a multiple of 3, which is not
    an error.
    """
    sizes = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=3)
    heads = dict(num_attention_heads=9, num_key_value_heads=3)
    tokens = dict(vocab_size=4096, bos_token_id=1, eos_token_id=2)
    AutoConfig.for_model("llama", **sizes, **heads, **tokens).save_pretrained(tmp_path)
    launch = LaunchShape(cuda=True, bf16=True, world=3, per_node=3)
    assert find_savings(read_config(LINE.format(tmp_path) + " --sampler-tp 3"), launch, 512)
    for line, present in ((" --sampler-tp 3", False), ("", True)):
        tried = memory_report._list_candidates(read_config(LINE.format(tmp_path) + line), launch)
        assert any("accelerate_configs" in change.command for change in tried) is present


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--sampler-tp 0", "--sampler-tp is at least 1 .*1 is a whole copy on each process"),
        ("--sampler-tp 2 --sampler hf", "requires the fast decoder.*leave --sampler-tp at 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_as_they_are_read(words, says, capsys):
    with pytest.raises(SystemExit):
        read_config(LINE.format("tiny:addition") + " " + words)
    text = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert re.search(says, text), text


def test_a_script_that_asks_for_them_is_refused_likewise():
    with pytest.raises(UserError, match="the sampler is hf.*leave sampler_tp at 1"):
        SamplerSettings(tp=2, kind="hf")


def test_it_holds_for_the_whole_run():
    first, second, paged = (
        read_config(LINE.format("tiny:addition") + f" --sampler-tp {words}").stages[0]
        for words in ("1", "2", "2 --sampler-cache paged")
    )
    sampler = collect_worker_settings([paged]).sampler
    assert (sampler.tp, sampler.cache) == (2, "paged")
    with pytest.raises(UserError, match="sampler_tp apply to the whole run"):
        collect_worker_settings([first, second])


NO_ROLES = "--sampler-tp 2 --sampler-ranks 1 --max-steps-off-policy 1"


@pytest.mark.parametrize(
    ("kind", "words", "world", "says"),
    [
        ("qwen3", "--sampler-tp 4", 4, "2 key-value heads.*Smaller sizes that do: 1, 2$"),
        ("llama50", "--sampler-tp 4", 4, "this model's 2 key-value heads, 50 MLP columns"),
        ("gpt2", "--sampler-tp 2", 2, "fast decoder .*is not supported by it: leave sampler_tp"),
        ("qwen3", "--sampler-tp 2", 3, "does not divide the 3 processes of a machine: use 1, 3"),
        ("qwen3", "--sampler-tp 2", 1, "2 processes of a machine, but only a single process was"),
        ("qwen3", NO_ROLES, 3, "cannot be combined"),
    ],
)
def test_a_model_or_launch_that_cannot_be_split_is_refused_before_weights_are_read(
    kind, words, world, says, tmp_path, monkeypatch
):
    """Both the start of a run and its plan refuse it. The folder contains no weights."""
    changes = {"intermediate_size": 50} if kind == "llama50" else {}
    tiny_model(kind.removesuffix("50"), **changes).config.save_pretrained(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(world))
    line = LINE.format(tmp_path).replace("1024", "8") + " "
    with pytest.raises(UserError, match=says):
        check_memory(read_config(line + words), pytest.fail)
    with pytest.raises(UserError, match=says):
        report_memory(read_config(line + words + f" --plan --plan-gpus {world}"))
    check_memory(read_config(line), pytest.fail)


# --------------------------------------------------------------------------------------- whole runs

REWARD = "def score(prompt, response, meta):\n    return float(sum(map(ord, response)) % 5)\n"
TRAIN = (
    "grpo --base-model tiny:addition --dataset addition --steps 2 --batch-size 4 --group-size 4 "
    "--max-tokens 4 --eval-every 0 --learning-rate 1e-2 --rollouts-every 1 --save-every 0 "
    "--no-eval-greedy --quiet"
)


def read_rollouts(folder: Path, step: int) -> list[dict]:
    file = folder / "run" / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """Run two processes that each have a whole sampler."""
    return trained("ddp", tmp_path_factory.mktemp("alone"), 1)


def trained(config: str, folder: Path, tp: int) -> Path:
    (folder / "own.py").write_text(REWARD)
    words = f"--reward {folder}/own.py:score --sampler-tp {tp} --output-dir {folder}/run"
    run_launch(config, folder, *f"{TRAIN} {words}".split(), script="train.py", seconds=120)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    ["ddp", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("zero3", "fsdp2"))],
)
def test_a_run_draws_and_learns_the_same(config, one_process, tmp_path):
    """The second step samples from weights that were handed over in parts. test_sampler_teams.py
    trains and samples under ZeRO-3 and FSDP2.
    """
    folder = trained(config, tmp_path, 2)
    for step in (1, 2):
        first, second = read_rollouts(one_process, step), read_rollouts(folder, step)
        assert len(first) == len(second) == 16 and len({row["reward"] for row in first}) > 2
        for mine, its in zip(first, second, strict=True):
            assert mine["response_tokens"] == its["response_tokens"]
            np.testing.assert_allclose(mine["logprobs"], its["logprobs"], atol=1e-5)
    if config == "ddp":
        _asked_again(folder)


def _asked_again(folder: Path) -> None:
    """Check that sampler_tp belongs to the launch, not to the run: a single process and a team of
    two evaluate the run's weights with the same results.
    """
    assert open_weights(str(folder / "run")).stage.settings.sampling.sampler_tp == 2
    words = [str(folder / "run"), "--limit", "6", "--samples", "2", "--trust-run", "--output"]
    run_launch(None, folder, *words, folder / "one.json", script="evaluate.py", seconds=120)
    words += [str(folder / "two.json"), "--sampler-tp", "2"]
    run_launch("ddp", folder, *words, script="evaluate.py", seconds=120)
    first, second = (
        [(row["response"], row["reward"]) for row in json.loads(text)["rows"]]
        for text in ((folder / name).read_text() for name in ("one.json", "two.json"))
    )
    assert len(first) == 12 and first == second
