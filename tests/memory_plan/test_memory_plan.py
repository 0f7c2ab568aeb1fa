"""Test the memory plan against what processes really hold, and against sizes computed by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_server import run_script
from test_distributed import run_launch, start_launch
from transformers import AutoConfig

from rl.algorithms import METHODS
from rl.config import RunConfig, RunSettings, read_run
from rl.distributed import FSDPSharding, Sharding, ZeroSharding
from rl.errors import UserError
from rl.memory_plan import (
    GIB,
    ComputeConfig,
    LaunchShape,
    MemoryPlan,
    MicroBatch,
    MicroBatchMemory,
    ModelShape,
    ModelSkeleton,
    StepWork,
    compute_concurrent_rows,
    largest_micro_batch,
    load_model_skeleton,
    plan_memory,
    trace_micro_batch,
)
from rl.memory_plan.activations import StorageTracker
from rl.memory_plan.tracing import HEAD_BLOCKS
from rl.trainer.memory_report import _describe_launch, find_savings, select_listed
from rl.trainer.memory_requirements import compute_stage_needs, resolve_launch
from rl.types import LoraConfig
from tools import scaling

REPO = Path(__file__).resolve().parents[2]
MODEL = {
    "vocab_size": 16_000,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1536,
}
WORK = {
    "groups": 4,
    "group": 4,
    "prompt": 64,
    "answer": 64,
    "datums": 8,
    "budget": 1024,
    "kv_cache_tokens": 100_000,
    "lora_rank": 0,
    "drawn": 1,
    "checkpointing": False,
    "fused": True,
    "world": 1,
}

CASES = {
    "full": {},
    "lora": {"lora_rank": 16},
    "checkpointing": {"checkpointing": True, "budget": 2048, "datums": 16},
    "plain_head": {
        "fused": False,
        "vocab_size": 48_000,
        "hidden_size": 256,
        "head_dim": 32,
        "intermediate_size": 768,
    },
    "kv_cache": {"groups": 16, "group": 8, "answer": 96, "datums": 2, "budget": 320, "drawn": 96},
    "ddp": {"world": 2, "datums": 16},
    "zero3": {"world": 2, "datums": 16},
    "fsdp2": {"world": 2, "datums": 16},
}


def folder_of(model: dict, path: Path) -> str:
    from transformers import Qwen3Config

    Qwen3Config(**model, tie_word_embeddings=True, max_position_embeddings=4096).save_pretrained(
        path
    )
    return str(path)


def predict_memory(folder: str, s: dict, sharding: Sharding) -> MemoryPlan:
    lora = LoraConfig(s["lora_rank"], train_unembed=True) if s["lora_rank"] else None
    skeleton = ModelSkeleton(folder, None, lora)
    length = s["prompt"] + s["answer"]
    batch = largest_micro_batch(
        groups=s["datums"],
        group=1,
        prompt=s["prompt"],
        answer=s["answer"],
        budget=s["budget"],
        layout="padded",
        world=s["world"],
        hidden=s["hidden_size"],
    )
    assert batch.rows * length == s["budget"]
    options = ComputeConfig(
        fused=s["fused"], checkpointing=s["checkpointing"], keeps_gradients=sharding.keeps_gradients
    )
    work = StepWork(batch=batch, samples=True, prompts=s["groups"] // s["world"], prompt=s["prompt"],
                rows=s["groups"] * s["group"] // s["world"], answer=s["answer"])  # fmt: skip
    launch = LaunchShape(
        cuda=False, bf16=False, world=s["world"], per_node=s["world"], sharding=sharding
    )
    return plan_memory(skeleton.shape, skeleton.measure_micro_batch(batch, options), launch, work)


def measure_memory(folder: str, s: dict, out: Path, config: str | None) -> list[int]:
    """Return the bytes of each rank."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    out.mkdir()
    settings = out / "settings.json"
    settings.write_text(json.dumps({**s, "model": folder, "vocab": s["vocab_size"]}))
    options = []
    if config == "zero3":
        options = ["--deepspeed_config_file", str(REPO / "ds_configs" / "zero3.json")]
    run_launch(
        config, out, out, settings, processes=s["world"], options=options,
        script="tests/memory_plan/memory_peak.py",
    )  # fmt: skip
    return [json.loads((out / f"peak-{rank}.json").read_text()) for rank in range(s["world"])]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the peak of a process from /proc"
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[pytest.mark.campaign] * (name in ("full", "lora", "ddp")))
        for name in CASES
    ],
)
def test_the_plan_is_within_15_percent_of_a_process(case, tmp_path):
    s = {**MODEL, **WORK, **CASES[case]}
    folder = folder_of({name: s[name] for name in MODEL}, tmp_path / "model")
    config = case if s["world"] > 1 else None
    shardings = {"zero3": ZeroSharding(stage=3), "fsdp2": FSDPSharding()}
    expected = predict_memory(folder, s, shardings.get(case, Sharding()))
    for got in measure_memory(folder, s, tmp_path / "out", config):
        assert abs(expected.peak / got - 1) < 0.15, (
            f"{case}: planned {expected.peak / 2**20:.0f} MiB, measured {got / 2**20:.0f}"
        )


# ----------------------------------------------------------------------------------- by hand, quick

# Tensors of 1,000 numbers would be small; here all tensors, of at most 200,000, count as large. A
# token of cache takes 16 numbers: 2 x 2 x 2 x 2.
SHAPE = ModelShape(
    name="x",
    parameters=1_000_000,
    trainable=1_000_000,
    adapters=0,
    small=0,
    largest=200_000,
    layers=2,
    hidden=64,
    heads=4,
    key_heads=2,
    head_width=2,
    mlp=128,
    vocab=1000,
    max_context=None,
    fast=True,
    windowed=False,
)
WORKING = StepWork(batch=MicroBatch(1, 8, 8), samples=True, prompts=3, prompt=10, rows=6, answer=5)


GPU = LaunchShape(cuda=True, bf16=True)


def on_four(sharding: Sharding = Sharding(), **options) -> LaunchShape:  # noqa: B008
    return replace(GPU, world=4, sharding=sharding, **options)


def items(launch: LaunchShape, shape: ModelShape = SHAPE) -> dict[str, tuple[float, float, float]]:
    result = plan_memory(shape, MicroBatchMemory(), launch, WORKING)
    return {
        item.name.split(" ")[0]: (item.sample, item.train, item.update) for item in result.items
    }


def test_the_temporaries_of_graphs_with_logits_processing_by_hand():
    """52 bytes a logit, of the rows of the bucket (8 for 6) or as many as 2^21 logits hold, and at
    least of a row.
    """

    def logits(launch: LaunchShape, rows: int, vocab: int, pages: int) -> float:
        work, shape = replace(WORKING, rows=rows, pages=pages), replace(SHAPE, vocab=vocab)
        plan = plan_memory(shape, MicroBatchMemory(), launch, work)
        return next(item.sample for item in plan.items if item.name == "logits and output head")

    cpu = LaunchShape(cuda=False, bf16=False)
    for rows, vocab, most in ((6, 1000, 8), (500, 152_000, 13), (500, 3_000_000, 1)):
        paged, plain = (logits(GPU, rows, vocab, pages) for pages in (9, 0))
        assert paged - plain == 52 * most * vocab
        assert logits(cpu, rows, vocab, 9) == logits(cpu, rows, vocab, 0)


def test_bytes_of_each_launch_by_hand():
    million = 1_000_000.0
    single = items(GPU)
    assert single["weights"] == (4 * million,) * 3
    assert single["optimizer"] == (8 * million,) * 3
    assert single["gradients"] == (0, 4 * million, 4 * million)
    assert single["sampler's"] == (2 * million,) * 3
    # bf16: each prompt once, and all but the last token of each answer.
    assert single["KV"] == (16 * 2 * (3 * 10 + 6 * 4), 0, 0)
    assert single["temporary"] == (0, 0, 0)
    # All gradients end to end fit in a bucket.
    assert items(on_four())["temporary"] == (0, 0, 4 * million)
    large = replace(SHAPE, trainable=10**9)
    assert items(on_four(), large)["temporary"] == (0, 0, 256 * 2**20)
    zero2 = items(on_four(ZeroSharding(stage=2)))
    assert zero2["weights"] == (2 * million,) * 3
    assert zero2["optimizer"] == (3 * million,) * 3  # 8 and an fp32 copy of 4, a quarter of them
    assert zero2["gradients"] == (0, million, million)
    assert zero2["sampler's"] == (2 * million,) * 3  # never sharded
    zero3 = items(on_four(ZeroSharding(stage=3)))
    assert zero3["weights"] == (million / 2,) * 3
    assert zero3["gradients"] == (million,) * 3
    # The bucket; all gathered weights; gradients to send.
    assert zero3["temporary"] == (2e9, 2e9 + 2 * million, 2e9 + 6 * million)
    offload = items(on_four(ZeroSharding(stage=3, offload=True)))
    assert offload["optimizer"] == offload["gradients"] == (0, 0, 0)
    layered = replace(SHAPE, layer=300_000)
    fsdp = items(on_four(FSDPSharding()), layered)
    # fp32, a quarter per rank.
    assert fsdp["weights"] == (million,) * 3 and fsdp["optimizer"] == (2 * million,) * 3
    assert fsdp["gradients"] == (0, million, million)
    # In bf16: the weights outside of the two layers, and both layers; plus the larger layer's
    # gradients in fp32 for the sum.
    assert fsdp["temporary"] == (0, 2 * (400_000 + 600_000) + 4 * 400_000, 0)
    # With two machines of four GPUs, a GPU under HSDP holds the same as with a single machine.
    assert items(replace(GPU, world=8, sharding=FSDPSharding(replicas=2)), layered) == fsdp
    # ZeRO-3 over both machines, and a second copy over each machine.
    hpz = items(replace(GPU, world=8, sharding=ZeroSharding(stage=3, hpz=4)))
    assert hpz["weights"] == (2 * million / 8 + 2 * million / 4,) * 3
    cpu = items(LaunchShape(cuda=False, bf16=False))
    assert cpu["sampler's"] == (4 * million,) * 3 and cpu["CUDA"] == (0, 0, 0)


def test_a_low_base_and_an_optimizer_of_8_bit_by_hand():
    shape = replace(SHAPE, trainable=100_000, adapters=100_000, matrices=800_000, linears=500_000)

    def weights(launch: LaunchShape) -> float:
        return items(launch, shape)["weights"][0]

    low = 4e6 - 2 * 8e5
    assert weights(replace(GPU, base_dtype="fp32")) == 4e6
    assert weights(replace(GPU, base_dtype="bf16")) == low
    # QLoRA's figure: 0.127 bits per parameter for the scales.
    expected = low - 5e5 * (2 - (4 + 0.127) / 8)
    assert weights(replace(GPU, base_dtype="4bit")) == pytest.approx(expected, rel=1e-5)
    assert weights(on_four(FSDPSharding(), base_dtype="bf16")) == low / 4
    # The whole model is in bf16.
    assert weights(replace(GPU, sharding=ZeroSharding(stage=1), base_dtype="bf16")) == 2e6
    moments = 1e5 * (2 + 8 / 256)
    assert items(replace(GPU, optimizer="adamw_8bit"), shape)["optimizer"][0] == moments
    launch = replace(GPU, optimizer="paged_adamw_8bit")
    paged = plan_memory(shape, MicroBatchMemory(), launch, WORKING)
    assert not any(item.train for item in paged.items if item.name.startswith("optimizer"))
    assert dict(paged.host)["optimizer pages that do not fit on the GPU, at most"] == moments
    launch = replace(GPU, world=8, per_node=8, sharding=ZeroSharding(stage=3), loads_in_shards=True)
    host = dict(plan_memory(SHAPE, MicroBatchMemory(), launch, WORKING).host)
    assert host["loading: every process reads its share, one tensor at a time"] == 8 * 4 * 200_000


def test_the_base_of_a_stage_is_what_its_settings_and_launch_make_it(tmp_path):
    folder = folder_of({**MODEL, "num_hidden_layers": 2}, tmp_path)
    line = f"sft --dataset addition --base-model {folder} --max-tokens 8".split()

    def weights(*words: str, launch: LaunchShape = GPU) -> float:
        (needs,) = compute_stage_needs(read_config(*line, *words), launch, 16)
        return next(item.train for item in needs.plan.items if item.name == "weights")

    low, high = weights("--lora-rank", "4"), weights("--lora-rank", "4", "--base-dtype", "fp32")
    # The embedding stays in bf16.
    assert 0.5 < low / high < 0.55
    assert weights("--lora-rank", "4", "--base-dtype", "4bit") < 0.8 * low
    assert weights("--lora-rank", "4", launch=LaunchShape(cuda=False, bf16=False)) == high


def test_long_answers_of_a_7b_fit_into_80_gib(tmp_path):
    """The figures of docs/running.md: full training on 8 GPUs, a LoRA on one."""
    config = scaling.config_of("7B")
    config.max_position_embeddings = 1_010_000
    config.save_pretrained(tmp_path)

    def gib(launch: LaunchShape, words: str) -> list[float]:
        line = f"recipes/gsm8k.yaml --base-model {tmp_path} --gradient-checkpointing {words}"
        (needs,) = compute_stage_needs(read_config(*line.split()), launch, 512)
        return [needs.plan.peak / GIB, sum(item.train for item in needs.plan.items) / GIB]

    one = replace(GPU, memory=80 * GIB)
    eight = replace(one, world=8, per_node=8, sharding=ZeroSharding(stage=3))
    words = "--lora-rank 0 --max-tokens 131072 --token-budget 132096"
    assert gib(eight, f"{words} --context-parallel-size 8") == pytest.approx([59, 50], abs=1)
    assert gib(eight, words) == pytest.approx([106, 106], abs=1)
    assert gib(one, "--max-tokens 32768 --token-budget 33792") == pytest.approx([57, 57], abs=1)


def test_a_smaller_cache_is_named_where_the_cache_does_not_fit(tmp_path):
    folder = folder_of({**MODEL, "num_hidden_layers": 2}, tmp_path)
    words = (
        f"grpo --dataset addition --base-model {folder} --batch-size 512 --group-size 16 "
        "--max-tokens 1024 --max-rows 8192 --token-budget 2048 --lora-rank 4 --kv-cache-tokens"
    ).split()
    run = read_config(*words, str(1 << 23))
    (needs,) = compute_stage_needs(run, GPU, 512)
    whole = needs.plan.peak
    cache = next(item.sample for item in needs.plan.items if item.name == "KV cache")
    assert cache > 0.7 * whole
    room = whole - 0.9 * cache  # a quarter of the cache is still too much
    listed = select_listed(find_savings(run, GPU, 512), room)
    (named,) = [change for change in listed if change.kind == "kv_cache_tokens"]
    peaks = {}
    for size in ((1 << 23) >> i for i in range(1, 6)):
        (needs,) = compute_stage_needs(read_config(*words, str(size)), GPU, 512)
        peaks[size] = needs.plan.peak
    largest = max(size for size, peak in peaks.items() if peak <= room)
    assert peaks[1 << 21] > room
    assert named.command == f"--kv-cache-tokens {largest}"
    assert named.peak == peaks[largest] <= room


def read_config(*words: str) -> RunConfig:
    return read_run(words, METHODS, REPO / "recipes" / "addition.yaml", RunSettings)


def test_layers_of_a_hybrid_that_carry_a_state_keep_no_keys():
    assert items(GPU, replace(SHAPE, caching=1))["KV"][0] == items(GPU)["KV"][0] / 2


def test_a_launch_under_fsdp_is_planned_as_one(monkeypatch):
    for name, value in {"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    launch, _ = resolve_launch(read_config("--plan-gpus", "8"))
    assert _describe_launch(launch) == "8 processes, FSDP2, bf16"
    launch, _ = resolve_launch(read_config("--plan-gpus", "8", "--plan-zero", "2"))
    assert launch.sharding == ZeroSharding(stage=2)


def test_a_critic_and_a_frozen_policy_are_counted():
    """When all weights are trained, a critic takes as much as the policy, and a reference takes
    another copy for sampling. Under an adapter the reference takes none.
    """
    launch = replace(GPU, world=2, sharding=ZeroSharding(stage=2))
    words = ["ppo", "--dataset", "addition", "--critic-model", "policy"]
    full, adapted, free = (
        compute_stage_needs(
            read_config(*words, "--lora-rank", rank, "--kl-coef", price), launch, 16
        )[0].plan
        for rank, price in (("0", "0.1"), ("4", "0.1"), ("0", "0"))
    )
    sizes = {item.name.split(" ")[0]: item for item in full.items}
    learner = [sizes[name] for name in ("weights", "optimizer", "gradients")]
    critic = sizes["critic:"]
    assert critic.train == sum(item.train for item in learner) > critic.sample
    assert critic.sample == sum(item.sample for item in learner)
    assert sizes["models"].sample == sizes["sampler's"].sample > 0
    assert [
        next(item.sample for item in plan.items if item.name.startswith("models"))
        for plan in (adapted, free)
    ] == [0, 0]


@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo", "reward_model"])
def test_both_answers_of_a_pair_are_planned(method):
    words = [method, "--dataset", "addition", "--batch-size", "8", "--max-tokens", "100"]
    run = read_config(*words, "--layout", "padded")
    (needs,) = compute_stage_needs(run, replace(GPU, world=2), 28, traced=False)
    assert needs.work.batch == MicroBatch(8, 128, 8 * 128)  # 8 pairs over 2 ranks


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_method_that_samples_no_held_out_answers_holds_no_sampler(method):
    def plan_sampler(*words: str) -> float:
        run = read_config(method, "--dataset", "addition", *words)
        (needs,) = compute_stage_needs(run, GPU, 16, traced=False)
        items = {item.name: item for item in needs.plan.items}
        return items["sampler's copy of the weights"].train + items["KV cache"].sample

    assert plan_sampler() == plan_sampler("--reward", "exact_match", "--eval-every", "0") == 0
    assert plan_sampler("--reward", "exact_match") > 0


def test_micro_batches_and_samples_by_hand():
    def largest(budget: int, layout: str, world: int = 1, prompt: int = 100, answer: int = 28,
                varlen: bool = False):  # fmt: skip
        sizes = {"groups": 4, "group": 8, "prompt": prompt, "answer": answer, "hidden": 64}
        return largest_micro_batch(
            **sizes, budget=budget, layout=layout, world=world, varlen=varlen
        )

    assert largest(1000, "padded") == MicroBatch(7, 128, 7 * 128)
    # A rank's share.
    assert largest(100_000, "padded", world=4) == MicroBatch(8, 128, 8 * 128)
    assert largest(1000, "shared") == MicroBatch(3, 100 + 8 * 28, 3 * 8 * 128, masked=True)
    # The prompt is counted once instead of eight times.
    assert largest(1000, "auto").masked
    assert not largest(4000, "auto", prompt=1, answer=400).masked
    # One row of three groups; keys of each prompt once, and of all whole answers.
    keys = 3 * (100 + 8 * 128)
    row = MicroBatch(1, 3 * (100 + 8 * 28), 3 * 8 * 128, keys=keys, sequences=3 * 9)
    assert largest(1000, "auto", varlen=True) == largest(1000, "shared", varlen=True) == row
    assert largest(1000, "packed", varlen=True) == MicroBatch(
        1, 7 * 128, 7 * 128, keys=7 * 128, sequences=7
    )
    assert largest(128, "auto", varlen=True) == MicroBatch(1, 128, 128, keys=128, sequences=1)
    # Four keys count as a position: 3 answers of 1 token to a prompt of 1,000, not 20.
    long = largest(1020, "auto", varlen=True, prompt=1000, answer=1)
    assert long == MicroBatch(1, 1003, 3003, keys=4003, sequences=4)
    # A row that exceeds the budget is still trained.
    assert largest(10, "padded") == MicroBatch(1, 128, 128)
    drawn = {"groups": 64, "group": 8, "prompt": 100, "answer": 51, "world": 2}
    assert compute_concurrent_rows(**drawn, kv_cache_tokens=10**9, max_rows=1024) == (32, 256)
    # A group takes 100 + 8 x 50 tokens.
    assert compute_concurrent_rows(**drawn, kv_cache_tokens=5000, max_rows=1024) == (10, 80)
    assert compute_concurrent_rows(**drawn, kv_cache_tokens=10**9, max_rows=20) == (3, 20)


def test_the_trace_finds_what_is_known(tmp_path):
    """The plain head holds whole logits, checkpointing holds less, the weights' casts are 2 bytes
    per number of each matrix, and no weight is created.
    """
    skeleton = ModelSkeleton(folder_of({**MODEL, "num_hidden_layers": 2}, tmp_path), None, None)
    assert (
        skeleton.shape.parameters
        == 16_000 * 512 + 2 * (512 * 64 * 4 * 8 + 3 * 512 * 1536 + 2 * 512 + 2 * 64) + 512
    )
    batch = MicroBatch(4, 64, 256)
    plain, fused = (
        skeleton.measure_micro_batch(batch, ComputeConfig(fused=on)) for on in (False, True)
    )
    first = 256 * 16_000 * 4
    assert plain.logits % first == 0 and 3 * first <= plain.logits <= 6 * first
    # At most what it keeps for the backward (below 64 MiB).
    assert fused.logits - HEAD_BLOCKS < first + 256 * 512 * 4 + 10_000
    large = MicroBatch(32, 64, 2048)
    kept, recomputed = (
        skeleton.measure_micro_batch(large, ComputeConfig(checkpointing=on)).total
        for on in (False, True)
    )
    assert recomputed < 0.8 * kept
    casts = skeleton.measure_micro_batch(batch, ComputeConfig(autocast=True)).casts
    # The layers' matrices; the head's cast is freed by then.
    assert casts == 2 * 2 * (512 * 64 * 4 * 8 + 3 * 512 * 1536)


@pytest.mark.parametrize(
    "checkpointing, layers, ranks",
    [
        (False, 2, 2),
        (True, 1, 1),
        pytest.param(False, 2, 1, marks=pytest.mark.slow),
        pytest.param(True, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_the_trace_holds_the_keys_of_sequences_and_no_mask(checkpointing, layers, ranks, tmp_path):
    """A rank of a group has its heads of all keys, here of `ranks` times as many."""
    skeleton = ModelSkeleton(folder_of({**MODEL, "num_hidden_layers": 2}, tmp_path), None, None)
    assert skeleton.shape.varlen
    config = ComputeConfig(autocast=True, cuda=True, checkpointing=checkpointing)

    def trace(keys: int = 0, **fields) -> float:
        batch = MicroBatch(1, 2048 * ranks, 4096 * ranks, keys=keys * ranks, **fields)
        return skeleton.measure_micro_batch(batch.divide(ranks), config).activations

    # keys and values of 8 heads of 64 in bf16, of the layers that hold their inputs
    more = 2048 * 2 * 8 * 64 * 2 * layers
    usual = trace(keys=4096)
    assert trace(keys=6144) - usual == more
    # the kernel rounds each sequence up to 128 positions of fp32 gradients
    assert trace(keys=4096, sequences=3) - usual == 3 * 128 * 8 // ranks * 64 * 4
    assert trace(keys=2048) < trace(masked=True)


def test_padding_that_ranks_add_to_a_row_is_a_sequence():
    batch = MicroBatch(1, 100, 90, keys=120, sequences=4)
    assert batch.divide(3) == MicroBatch(1, 34, 30, ranks=3, keys=122, sequences=5)
    assert batch.divide(2) == MicroBatch(1, 50, 45, ranks=2, keys=120, sequences=4)


SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
DEEP = {
    "qwen3": {**SIZES, "num_hidden_layers": 9},
    # Six in turn, and a remainder of two.
    "gemma3_text": {**SIZES, "num_hidden_layers": 20, "sliding_window": 16},
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_head": 4, "n_layer": 9},
    "bloom": {"vocab_size": 300, "hidden_size": 32, "n_head": 4, "n_layer": 9},
    "deepseek_v3": {
        **SIZES,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "falcon_h1": {
        **SIZES,
        "num_hidden_layers": 7,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
}
RUNS = {
    "plain": ComputeConfig(),
    "autocast": ComputeConfig(autocast=True, bf16_base=True),
    "checkpointing": ComputeConfig(autocast=True, checkpointing=True),
    "whole logits": ComputeConfig(fused=False),
    "sharded": ComputeConfig(dtype=torch.bfloat16, keeps_gradients=False),
}
EACH = [
    ("qwen3", None, "plain"),
    ("qwen3", 2, "checkpointing"),
    ("gpt2", None, "autocast"),
    ("bloom", 2, "checkpointing"),
    ("deepseek_v3", None, "sharded"),
    ("falcon_h1", None, "plain"),
]
MORE = [
    ("qwen3", 2, "autocast"),
    ("qwen3", None, "whole logits"),
    ("qwen3", 2, "sharded"),
    ("gemma3_text", 2, "plain"),
]


@pytest.mark.parametrize(
    ("kind", "rank", "run"),
    [pytest.param(*item, marks=() if item[0] == "gpt2" else pytest.mark.slow) for item in EACH]
    + [pytest.param(*item, marks=pytest.mark.campaign) for item in MORE],
)
def test_a_deep_model_is_worked_out_from_short_ones(kind, rank, run, tmp_path):
    """The result equals the bytes of the full depth, wherever the peak is: with few tokens (at the
    end of the backward) and many (at its beginning).
    """
    AutoConfig.for_model(kind, **DEEP[kind]).save_pretrained(tmp_path)
    lora = None if rank is None else LoraConfig(rank)
    skeleton = ModelSkeleton(str(tmp_path), None, lora)
    whole = ModelSkeleton(str(tmp_path), None, lora, all_layers=True)
    assert skeleton.shape == whole.shape
    assert skeleton._omitted > 0 == whole._omitted
    # torch's first run of a fake operation differs: its tensor is 96 bytes smaller.
    skeleton.measure_micro_batch(MicroBatch(1, 4, 3), RUNS[run])
    for batch in (MicroBatch(1, 4, 3), MicroBatch(4, 64, 256)):
        assert skeleton.measure_micro_batch(batch, RUNS[run]) == whole.measure_micro_batch(
            batch, RUNS[run]
        ), batch


def test_of_layers_that_cannot_be_marked_the_whole_model_is_traced(tmp_path, monkeypatch):
    AutoConfig.for_model("gpt2", **DEEP["gpt2"]).save_pretrained(tmp_path)
    skeleton, batch = ModelSkeleton(str(tmp_path), None, None), MicroBatch(4, 64, 256)
    skeleton.measure_micro_batch(batch, RUNS["plain"])
    marked = skeleton.measure_micro_batch(batch, RUNS["plain"])
    monkeypatch.setattr(StorageTracker, "mark_layers", lambda self, layers: None)
    assert skeleton.measure_micro_batch(batch, RUNS["plain"]) == marked


def test_a_trace_that_fails_is_not_tried_again(tmp_path, monkeypatch):
    AutoConfig.for_model("gpt2", **DEEP["gpt2"]).save_pretrained(tmp_path)
    traces = []

    def fail(skeleton, batch, config):
        traces.append(batch)
        raise RuntimeError("a value is needed")

    monkeypatch.setattr(ModelSkeleton, "_trace", fail)
    batches = [MicroBatch(1, 4, 3), MicroBatch(1, 4, 3), MicroBatch(4, 64, 256)]
    skeleton = load_model_skeleton(str(tmp_path), None, None)
    for batch in batches:
        with pytest.raises(UserError, match="a value is needed"):
            trace_micro_batch(skeleton, batch, RUNS["plain"])
    assert traces == [batches[0], batches[2]]


@pytest.mark.slow
def test_plan_on_the_command_line(tmp_path):
    folder = folder_of(MODEL, tmp_path / "model")  # a config without weights
    words = f"grpo --base-model {folder} --plan --plan-gpus 8 --output-dir {tmp_path}/run".split()
    fits = run_script("train.py", *words, cwd=tmp_path, COLUMNS="200")
    assert fits.returncode == 0, fits.stderr
    assert "8 processes, DDP, bf16" in fits.stdout and "fits:" in fits.stdout
    assert not (tmp_path / "run").exists()
    words += ["--plan-gpu-memory", 3, "--token-budget", 65536, "--batch-size", 128]
    small = run_script("train.py", *words, cwd=tmp_path, COLUMNS="200")
    assert small.returncode == 2 and "does not fit" in small.stdout
    advice = small.stderr.split("most effective first")[1]
    listed = [float(size) for size in re.findall(r": ([0-9.]+) GiB(?:, fits)?", advice)]
    assert listed and "--gradient-checkpointing" in small.stderr
    assert listed[:-1] == sorted(listed[:-1])  # the last figure may combine several settings


@pytest.mark.slow
def test_two_processes_print_one_plan_of_their_launch(tmp_path):
    folder = folder_of(MODEL, tmp_path / "model")
    words = f"grpo --base-model {folder} --plan".split()
    launch = start_launch("zero3", tmp_path, *words, script="train.py")
    assert launch.wait(200) == [0, 0], launch.output()
    text = " ".join(launch.output().replace("│", " ").split())
    assert text.count("2 processes, ZeRO-3, fp32") == 1 and text.count("fits:") == 1


# ------------------------------------------------------------------------------------------ scaling


def test_traffic_by_hand():
    sent = scaling.payload(SHAPE, on_four(ZeroSharding(stage=3)), micro_batches=3)
    assert sent == {"all_reduce": 0.0, "all_gather": 2e6 * (3 + 1), "reduce_scatter": 3 * 4e6}
    assert scaling.on_the_wire(sent, 4) == 0.75 * (8e6 + 12e6)
    summed = {"all_reduce": 4e6, "all_gather": 0.0, "reduce_scatter": 0.0}
    assert scaling.on_the_wire(summed, 2) == 4e6
    assert sum(scaling.payload(SHAPE, GPU, 3).values()) == 0
