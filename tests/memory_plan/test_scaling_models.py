"""Test tools/scaling.py on mixtures of experts and vision-language models: its numbers match
counted parameters, operations and bytes.
"""

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import seeing
import torch
from test_distributed import run_launch
from tiny_models import VOCAB, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from traffic_case import LENGTH, ROWS
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from rl.distributed import Sharding, ZeroSharding, collectives
from rl.memory_plan import LaunchShape, ModelSkeleton
from rl.types import LoraConfig
from tools import answer_path, scaling

TOKENS = 8


def mixture(per_token: int):
    model = tiny_model("qwen3_moe", num_experts_per_tok=per_token, sliding_window=None)
    model.set_attn_implementation("eager")
    # one matrix product per expert, which the FLOP counter sees
    model.config._experts_implementation = "eager"
    return model


def shape_of(model, folder, lora: LoraConfig | None = None):
    model.config.save_pretrained(folder)
    return ModelSkeleton(str(folder), None, lora).shape


def count_flops(model, **inputs) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("per_token", [1, 3])
def test_a_mixture_computes_with_the_experts_that_a_token_is_sent_to(per_token, tmp_path):
    model = mixture(per_token)
    shape = shape_of(model, tmp_path)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.idle_experts == experts * (4 - per_token) // 4
    ids = torch.arange(TOKENS)[None]
    attention = 4 * TOKENS**2 * shape.heads * shape.head_width * shape.layers
    table = VOCAB * shape.hidden  # embedding rows are looked up, not multiplied
    result = count_flops(model, input_ids=ids, use_cache=False) - attention
    # norms are not matrix products
    assert result == pytest.approx(2 * TOKENS * (shape.active_parameters - table), rel=0.02)
    assert result < 0.9 * 2 * TOKENS * (shape.parameters - table)


def test_a_token_sent_to_two_experts_more_costs_those_and_nothing_else(tmp_path):
    shapes = {k: shape_of(mixture(k), tmp_path / str(k)) for k in (1, 3)}
    ids = torch.arange(TOKENS)[None]
    more = count_flops(mixture(3), input_ids=ids, use_cache=False) - count_flops(
        mixture(1), input_ids=ids, use_cache=False
    )
    assert more == 2 * TOKENS * (shapes[3].active_parameters - shapes[1].active_parameters) > 0


def test_all_experts_are_sent_and_gathered_and_few_are_computed_with(tmp_path):
    shape, load = shape_of(mixture(1), tmp_path), scaling.Load()
    dense = replace(shape, idle_experts=0)
    for sharding in (Sharding(), *(ZeroSharding(stage=stage) for stage in (1, 2, 3))):
        launch = LaunchShape(cuda=True, bf16=True, world=4, sharding=sharding)
        assert scaling.payload(shape, launch, 3) == scaling.payload(dense, launch, 3)
    ddp = scaling.payload(shape, LaunchShape(cuda=True, bf16=True, world=4), 3)
    # including gradients of experts that no token reached
    assert ddp["all_reduce"] == 4 * shape.parameters
    saved = scaling.compute_flops(dense, load) - scaling.compute_flops(shape, load)
    assert saved == 8 * shape.idle_experts * load.tokens


def test_a_tower_runs_over_patches_and_learns_only_where_it_is_trained(tmp_path):
    """The tower's operations match the counter. The projector reads only one position in four, so
    the model is an upper bound.
    """
    _, config, tokenizer, processor, _ = seeing.FAMILIES["qwen3_vl"]()
    config.vision_config.depth = 6
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    reference = shape_of(model, tmp_path / "all")
    tower = sum(p.numel() for p in model.model.visual.parameters())
    assert reference.vision_parameters == reference.vision_trainable == tower
    assert reference.active_parameters == reference.parameters - tower
    frozen = shape_of(model, tmp_path / "lora", LoraConfig(2))
    assert frozen.vision_parameters == tower and frozen.vision_trainable == 0
    side = 4  # patches per side of a 16 x 16 image
    pixels = torch.zeros(side * side, 3 * 4 * 4)
    result = count_flops(
        model.model.visual, hidden_states=pixels, grid_thw=torch.tensor([[1, side, side]])
    )
    assert 0.6 * 2 * tower * side**2 < result < 1.1 * 2 * tower * side**2
    load = scaling.Load(patches=256)
    blind = scaling.compute_flops(reference, scaling.Load())
    assert blind == 8 * reference.active_parameters * load.tokens
    assert scaling.compute_flops(reference, load) - blind == 8 * tower * load.answers * 256
    seeing_costs = scaling.compute_flops(frozen, load) - scaling.compute_flops(
        frozen, scaling.Load()
    )
    assert seeing_costs == 2 * tower * load.answers * 256


# ----------------------------------------------------------------- samplers split over several GPUs


class CountingTeam:
    """A rank of a team that counts its all-reduces, all-gathers and broadcasts."""

    def __init__(self, team):
        self.team, self.rank, self.size = team, team.rank, team.size
        self.calls = self.summed = self.gathered = self.copied = 0

    def all_reduce_(self, x):
        self.calls, self.summed = self.calls + 1, self.summed + x.numel() * x.element_size()
        return self.team.all_reduce_(x)

    def all_gather(self, x):
        size = self.size * x.numel() * x.element_size()
        self.calls, self.gathered = self.calls + 1, self.gathered + size
        return self.team.all_gather(x)

    def broadcast_(self, x):
        self.calls, self.copied = self.calls + 1, self.copied + x.numel() * x.element_size()
        return self.team.broadcast_(x)


def test_a_teams_traffic_is_what_its_ranks_send(tmp_path):
    """Four groups of two answers, prompts of six tokens, five new tokens each, all in one batch. A
    vocabulary of 48 splits evenly.
    """
    from sampler_models import tiny_model as seen_model
    from test_sampler_split import on_ranks, split

    from rl.sampler import Engine, SamplingRequest
    from rl.types import SamplingParams

    model = seen_model("qwen3", vocab_size=48, tie_word_embeddings=False)
    load = scaling.Load(answers=4, group=2, prompt=6, answer=5)

    def counted(threads):
        team = CountingTeam(threads)
        # no self-test of the decoder, hence no collectives yet
        decoder = split(model, team, weights=list(model.named_parameters()))
        engine = Engine(decoder, eos_token_ids=(), max_rows=8)
        assert team.calls == 0
        options = {"num_samples": 2, "params": SamplingParams(max_tokens=5, stop=[]), "seed": 1}
        for i in range(4):
            engine.add(SamplingRequest(prompt=[i + 1] * 6, problem=i, **options))
        assert [len(s.tokens) for result in engine.run() for s in result.sequences] == [5] * 8
        return team

    shape = shape_of(model, tmp_path)
    launch = LaunchShape(cuda=False, bf16=False, world=2, sampler_tp=2)
    modelled = scaling.sampler_traffic(shape, launch, load, rows=8)
    for team in on_ranks(2, counted):
        for counter in ("calls", "summed", "gathered", "copied"):
            assert getattr(team, counter) == getattr(modelled, counter), counter


def test_seconds_of_a_team_by_hand():
    hardware = scaling.Hardware(nvlink=100.0, collective_seconds=2.0)
    sent = scaling.CollectiveTraffic(calls=3, summed=400.0, gathered=200.0, copied=50.0)
    assert (
        scaling.compute_ring_seconds(sent, 4, hardware)
        == 3 * 2.0 + (2 * 0.75 * 400 + 0.75 * 200 + 50) / 100
    )
    assert scaling.compute_ring_seconds(sent, 1, hardware) == 0


def test_a_32b_policy_is_sampled_by_as_few_gpus_together_as_fit(tmp_path):
    from rl.memory_plan import MicroBatchMemory

    scaling.config_of("32B").save_pretrained(tmp_path)
    shape = ModelSkeleton(str(tmp_path), None, None).shape

    def step(gpus: int, memory: float = 80.0):
        launch = LaunchShape(
            cuda=True, bf16=True, world=gpus, per_node=8, sharding=ZeroSharding(stage=3)
        )
        model = scaling.StepModel(
            name="32B",
            shape=shape,
            hardware=scaling.Hardware(memory_gib=memory),
            driver=scaling.DriverRates(),
            load=scaling.Load(),
            sampling_rate=1200.0,
        )
        return model.step(MicroBatchMemory(), launch)

    result = step(64)
    whole = step(64, 1000.0)
    assert whole.sampler_tp == 1 and whole.sampler_traffic_s == 0 and whole.memory_gib > 80 * 0.92
    assert result.fits and result.sampler_tp in (2, 4, 8)
    assert result.memory_gib <= 80 * 0.92 and result.sampler_traffic_s > 0
    assert result.sample_s == whole.sample_s + result.sampler_traffic_s
    assert result.step_s == pytest.approx(whole.step_s + result.sampler_traffic_s)
    never = step(64, 20.0)
    assert not never.fits and never.sampler_tp == 1


def test_the_table_is_what_the_model_gives_and_meets_its_targets():
    """Also with one thread of rank 0, a 7B reaches samplers in 2 s and a 32B those of another
    machine in 10 s, while they sample half of the time.
    """
    rates, options = scaling.RATES, (scaling.Load(), scaling.Hardware(), scaling.DriverRates())
    rows = list(scaling.table(rates, *options))
    table = (REPO / "bench" / "results" / "scaling.csv").read_text().splitlines()
    for row, cells in zip(rows, csv.DictReader(table), strict=True):
        for name, value in asdict(row).items():
            if isinstance(value, float):
                assert float(cells[name]) == pytest.approx(value, rel=1e-3, abs=1e-4), (row, name)
            else:
                assert cells[name] == str(value), (row, name)
    assert scaling.weak_scaling(rows, 8)["7B"][256] >= 0.9
    seconds = {(row.model, row.gpus): row.transfer_s for row in rows}
    assert seconds["7B", 8] <= 2 and seconds["32B", 16] <= 10


def test_the_table_of_expert_traffic_is_what_the_model_gives():
    """With experts divided over 8 ranks, a rank of 8 gathers a twentieth of the weights."""
    rows = list(scaling.list_expert_rows(scaling.make_skeleton("30B-A3B").shape))
    table = (REPO / "bench" / "results" / "expert_parallel.csv").read_text().splitlines()
    assert [{k: str(v) for k, v in row.items()} for row in rows] == list(csv.DictReader(table))
    gathered = {(r["ranks"], r["expert_parallel_size"]): r["all_gather_gb"] for r in rows}
    assert gathered[8, 8] < 0.05 * gathered[8, 1]


def test_seconds_of_a_transfer_by_hand():
    """8 chunks cross PCIe to the host, then get checksums, cross PCIe again, or are sent after their
    verbs, whichever takes longest. Samplers that sample give a part of their time to the last two.
    """
    rates = scaling.DriverRates(pcie=2.0**26, chunk_rate=2.0**26, verb_seconds=0.5)
    num_bytes = 8 * 2**26
    assert scaling.transfer_seconds(num_bytes, 2.0**27, rates, 1.0) == 8 + (4 + 4)
    assert scaling.transfer_seconds(num_bytes, 2.0**26, rates, 1.0) == 8 + (8 + 4)
    assert scaling.transfer_seconds(num_bytes, 2.0**26, rates, 0.25) == 8 + 4 * (8 + 4)
    assert scaling.transfer_seconds(num_bytes, 2.0**30, rates, 0.5) == 8 + 2 * 8
    slow = replace(rates, chunk_rate=2.0**23)
    assert scaling.transfer_seconds(num_bytes, 2.0**27, slow, 1.0) == 8 + 64


def test_the_rates_of_a_transfer_are_the_slowest_of_the_measurement():
    """tools/weight_chunks.py writes them. The model rounds them to the slower side, by 5% at most."""
    table = (REPO / "bench" / "results" / "weight_chunks.csv").read_text().splitlines()
    measured, rates = list(csv.DictReader(table)), scaling.DriverRates()
    assert {int(row["chunk_mib"]) * 2**20 for row in measured} == {scaling.GPU_CHUNK_BYTES}
    slowest = min(1e9 * float(row["checksum_gb_per_s"]) for row in measured)
    assert 0.95 * slowest <= rates.chunk_rate <= slowest
    longest = max(1e-3 * float(row["verb_ms"]) for row in measured)
    assert longest <= rates.verb_seconds <= 1.05 * longest


def test_answers_pass_rank_0_by_hand():
    """Four GPUs of 10 answers: rank 0 works on 40, 30 of which have messages. Each rank reads 10."""
    load = scaling.Load(answers=10)
    rates = scaling.DriverRates(
        bytes_per_answer=2e3, answer_seconds=3e-3, unpack_seconds=5e-3, network=1e4
    )
    expected = 40 * 3e-3 + 30 * 2e3 / 1e4 + 10 * 5e-3
    assert scaling.compute_batch_seconds(rates, load, 4) == pytest.approx(expected)
    assert scaling.compute_batch_seconds(rates, load, 1) == pytest.approx(10 * 3e-3)


def test_the_rates_of_an_answer_are_those_of_the_measurement():
    """tools/answer_path.py writes them. The model rounds them to the slower side, by 5% at most."""
    table = (REPO / "bench" / "results" / "answer_path.csv").read_text().splitlines()
    *of_rank_0, of_a_rank = csv.DictReader(table)
    assert of_a_rank["part"] == "a rank reads its share" and len(of_rank_0) == 8
    measured = {
        "answer_seconds": 1e-6 * sum(float(row["us_per_answer"]) for row in of_rank_0),
        "bytes_per_answer": sum(float(row["bytes_per_answer"]) for row in of_rank_0),
        "unpack_seconds": 1e-6 * float(of_a_rank["us_per_answer"]),
    }
    for name, value in measured.items():
        assert value <= getattr(scaling.DriverRates(), name) <= 1.05 * value, name


def test_the_measurement_takes_a_whole_step(monkeypatch):
    monkeypatch.setattr(collectives, "world", collectives.world)  # the measurement replaces it
    for name, value in {"RANKS": 2, "ANSWERS": 8, "ANSWER": 8, "PROMPT": 4, "ROUNDS": 1}.items():
        monkeypatch.setattr(answer_path, name, value)
    parts = answer_path.measure_parts()
    table = (REPO / "bench" / "results" / "answer_path.csv").read_text().splitlines()
    assert parts.keys() == {row["part"] for row in csv.DictReader(table)}


def test_rewards_are_limited_by_all_workers_or_by_rank_0():
    """256 GPUs of 32 machines sample 16,384 answers; a machine has 8 workers of 5 ms an answer."""
    rates = scaling.DriverRates(reward_seconds=5e-3, reward_workers=8, score_seconds=1e-5)
    seconds = scaling.compute_reward_seconds
    assert seconds(rates, 16_384, 32) == pytest.approx(16_384 * 5e-3 / 256)
    first = replace(rates, reward_machines=1)
    assert seconds(first, 16_384, 32) == pytest.approx(16_384 * 5e-3 / 8)
    slow = replace(rates, score_seconds=1e-3)
    assert seconds(slow, 16_384, 32) == pytest.approx(
        16_384 * 5e-3 / 256
    )  # no answer passes rank 0
    assert seconds(replace(slow, reward_machines=32), 16_384, 32) == pytest.approx(16.384)


# ------------------------------------------------------------------- bytes that real processes send

REPO = Path(__file__).resolve().parents[2]
DENSE = Qwen2Config(
    vocab_size=4096, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, intermediate_size=1536, tie_word_embeddings=True,
)  # fmt: skip
MIXTURE = Qwen3MoeConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2,
    moe_intermediate_size=96, intermediate_size=96,
)  # fmt: skip


def count_bytes(
    folder, model_config, launch, world, micro_batches, expert_size, local=1, options=()
):
    """Return (the model's shape, the content of traffic_case.py's file)."""
    AutoModelForCausalLM.from_config(model_config).save_pretrained(folder / "model")
    words = folder / "model", folder / "out.json", micro_batches, expert_size, local
    if launch == "zero3" and not options:
        options = ("--deepspeed_config_file", str(REPO / "ds_configs" / "zero3.json"))
    script = "tests/traffic_case.py"
    run_launch(launch, folder, *words, script=script, processes=world, options=options)
    result = json.loads((folder / "out.json").read_text())
    return ModelSkeleton(str(folder / "model"), None, None).shape, result


def check_bytes(sent, modelled):
    for kind in sent.keys() | modelled.keys():
        # abs covers the loss and the norm
        expected = pytest.approx(modelled.get(kind, 0), rel=2e-3, abs=100)
        assert sent.get(kind, 0) == expected, kind


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    ["ddp", "zero0", "zero3"]
    + [pytest.param(f"zero{n}", marks=pytest.mark.campaign) for n in (1, 2)],
)
def test_modelled_traffic_is_what_two_processes_send(launch, tmp_path):
    options = ()
    if launch == "zero0":  # none of the project's configs
        (tmp_path / "zero0.json").write_text(json.dumps({"zero_optimization": {"stage": 0}}))
        options = ("--deepspeed_config_file", str(tmp_path / "zero0.json"))
    config = "zero1" if launch == "zero0" else launch
    shape, result = count_bytes(tmp_path, DENSE, config, 2, 2, 0, options=options)
    assert (result["wrapped"] == "DeepSpeedEngine") == (launch != "ddp")
    # stage 0 sums each gradient once, as data parallelism does
    replicated = launch in ("ddp", "zero0")
    sharding = Sharding() if replicated else ZeroSharding(stage=int(launch[-1]))
    payload = scaling.payload(
        shape, LaunchShape(cuda=False, bf16=False, world=2, sharding=sharding), 2
    )
    expected = {k: scaling.on_the_wire({k: count}, 2) for k, count in payload.items()}
    check_bytes(result["bytes"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["hpz", pytest.param("hsdp", marks=pytest.mark.campaign)])
def test_weights_cross_machines_as_documented(launch, tmp_path):
    """Four processes are two machines of two; a step has three micro-batches. With hpz each weight
    is gathered from all machines once, for the sampler after the update, which fills the machine's
    copy; forwards and backwards gather inside a machine. With HSDP only gradients cross.
    """
    micro_batches = 3
    if launch == "hsdp":
        options = ("--num_machines", "1", "--parallelism_config_dp_shard_size", "2")
        shape, result = count_bytes(tmp_path, DENSE, "hsdp", 4, micro_batches, 0, 2, options)
    else:
        content = json.loads((REPO / "ds_configs" / "zero3_hpz.json").read_text())
        # DeepSpeed would keep all weights of a model this small until the backward.
        limits = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        zero = content["zero_optimization"] | {f"stage3_{name}": 0 for name in limits}
        assert zero["zero_hpz_partition_size"] == "auto"
        zero["zero_hpz_partition_size"] = 2
        (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": zero}))
        options = ("--deepspeed_config_file", str(tmp_path / "zero.json"))
        shape, result = count_bytes(tmp_path, DENSE, "zero3", 4, micro_batches, 0, 2, options)
    weights = 4 * shape.parameters
    crossing = result["crossing"].get("all_gather", 0.0)
    if launch == "hpz":
        assert crossing == pytest.approx(weights * 3 / 4, rel=2e-2)  # a ring of four ranks
        inside = result["bytes"]["all_gather"] - crossing
        # the tied embedding is gathered for the head too
        gathered = weights + 4 * DENSE.vocab_size * DENSE.hidden_size
        assert inside == pytest.approx(2 * micro_batches * gathered / 2, rel=2e-2)
    else:
        # Each rank sums its shard with that of the other machine, in each backward.
        assert result["crossing"].keys() == {"all_reduce"}
        expected = micro_batches * weights / 2
        assert result["crossing"]["all_reduce"] == pytest.approx(expected, rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "size"),
    [(2, 2), *(pytest.param(*n, marks=pytest.mark.campaign) for n in ((2, 1), (4, 2)))],
)
def test_modelled_traffic_of_experts_is_what_processes_send(world, size, tmp_path):
    shape, result = count_bytes(tmp_path, MIXTURE, "fsdp2", world, 1, size)
    check_bytes(
        result["bytes"], scaling.expert_traffic(shape, world, size, ROWS * LENGTH, recomputes=False)
    )
