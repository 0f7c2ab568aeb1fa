"""Test the selection of the engine: an explicit request, or a trial. A failed trial warns and only
changes the speed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sampler_models import (  # noqa: F401
    add_lora,
    check_same,
    multistep_engine,
    one_thread,
    run_requests,
    tiny_model,
)
from test_router_replay import model_of
from test_sampler_split import on_ranks

from rl.errors import UserError
from rl.sampler import (
    Engine,
    SamplingRequest,
    cuda_graphs,
    engine_selection,
    make_decoder,
    make_engine,
)
from rl.types import SamplingParams
from rl.types.feature_table import find_conflict


def decoder_of(kind="qwen3", dtype=None, **changes):
    return make_decoder(tiny_model(kind, **changes), dtype=dtype, kind="fast")


def kind_of(engine):
    """Return "plain" (a contiguous cache), "paged", or "stepped" (several steps per host sync)."""
    return "stepped" if engine.steps_per_sync else "paged" if engine.is_paged else "plain"


def test_who_says_gets_it_and_a_cpu_is_plain_by_default():
    decoder = decoder_of()
    assert kind_of(make_engine(decoder)) == kind_of(make_engine(decoder, "plain")) == "plain"
    engine = make_engine(decoder, "paged", eos_token_ids=(3,), kv_cache_tokens=512)
    assert kind_of(engine) == "stepped" and engine.eos_token_ids == (3,)
    with pytest.raises(UserError, match="fast decoder.*leave sampler_cache at auto"):
        make_engine(make_decoder(tiny_model("gpt2")), "paged")
    settings = {"kv_cache_tokens": 512, "num_speculative_tokens": 2}
    assert kind_of(make_engine(decoder, "paged", **settings)) == "paged"
    with pytest.raises(UserError, match="the steps of a device feed one token"):
        multistep_engine(decoder, num_speculative_tokens=2)
    decoder.device = torch.device("cuda")
    # as on a GPU, which this machine may not have
    decoder.new_state = lambda tokens: SimpleNamespace(decoder=decoder)
    assert kind_of(make_engine(decoder, num_speculative_tokens=2)) == "plain"
    with pytest.raises(ValueError, match="auto, plain, paged"):
        make_engine(decoder, "pages")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "with adapters", "qwen3_moe"])
def test_a_trial_finds_nothing_where_both_are_right(kind, dtype):
    model = tiny_model("qwen3" if kind == "with adapters" else kind, max_position_embeddings=1024)
    decoder = make_decoder(
        add_lora(model, ["q_proj", "lm_head"]) if kind == "with adapters" else model,
        dtype=dtype,
        kind="fast",
    )
    assert engine_selection.compare_engines(decoder) is None


FAULTS = {
    "the draw": lambda real: lambda *args: ((real(*args)[0] + 1) % 41, real(*args)[1]),
    "the logprob": lambda real: lambda *args: (real(*args)[0], real(*args)[1] - 0.2),
    "no number": lambda real: lambda *args: (real(*args)[0], real(*args)[1] * torch.nan),
}


@pytest.mark.parametrize("fault", [*FAULTS, "the shared pages", "a page's end"])
def test_a_trial_sees_what_is_wrong(monkeypatch, fault):
    """Each planted fault imitates a kernel that a device runs incorrectly."""
    decoder = decoder_of(max_position_embeddings=1024)
    if fault in FAULTS:
        monkeypatch.setattr(cuda_graphs, "_sample", FAULTS[fault](cuda_graphs._sample))
    else:
        real = cuda_graphs.compute_paged_attention

        def attend(q, kv, table, length, shared, bounds):
            if fault == "the shared pages" and shared is not None:
                shared = replace(shared, length=shared.length // 2)
            return real(
                q,
                kv,
                table,
                length - (length % 256 == 1).int() if fault == "a page's end" else length,
                shared,
                bounds,
            )

        monkeypatch.setattr(cuda_graphs, "compute_paged_attention", attend)
    try:
        text = engine_selection.compare_engines(decoder)
    except FloatingPointError:
        text = "diverged"
    assert text is not None


class Kind(str):
    """A stand-in for an engine."""


def test_where_the_trial_fails_it_is_said_once_and_sampling_is_plain(monkeypatch):
    decoder = decoder_of()
    # this machine may not have a GPU; `compare_engines` is replaced
    decoder.device = torch.device("cuda")
    engine_selection._trial_failures.clear()
    requests = []

    def fails(small):
        requests.append(small)
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(engine_selection, "compare_engines", fails)
    monkeypatch.setattr(
        engine_selection,
        "Engine",
        lambda decoder, **settings: Kind("stepped" if "steps_per_sync" in settings else "plain"),
    )
    with pytest.warns(
        UserWarning, match="no kernel image is available.*, so the plain engine samples"
    ) as text:
        assert [make_engine(decoder) for _ in range(3)] == ["plain"] * 3
    assert len(requests) == len(text) == 1
    engine_selection._trial_failures.clear()
    monkeypatch.setattr(engine_selection, "compare_engines", lambda small: None)
    assert make_engine(decoder) == "stepped"
    decoder.base, trials = decoder, []
    for agrees, kind in ((True, "stepped"), (False, "plain")):

        def check(*args, agrees=agrees):
            trials.append(args)
            return agrees

        monkeypatch.setattr(engine_selection, "check_kernels_agree", check)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(engine_selection, "MultiAdapterDecoder", lambda base: base)
        assert make_engine(decoder, features=["adapters per row"]) == kind
    assert [args[1:3] for args in trials] == [(0, torch.float32)] * 2
    engine_selection._trial_failures.clear()


def test_what_cannot_go_together_is_said_before_a_model_is_loaded():
    from rl.config import SamplingSettings

    assert SamplingSettings(sampler_cache="paged").sampler_cache == "paged"
    with pytest.raises(ValueError, match="leave sampler_cache at auto"):
        SamplingSettings(sampler_cache="paged", sampler="hf")
    with pytest.raises(ValueError, match="num_speculative_tokens requires the fast decoder"):
        SamplingSettings(num_speculative_tokens=4, sampler="hf")
    with pytest.raises(ValueError, match="start the server with --speculative-config"):
        SamplingSettings(num_speculative_tokens=4, sampler="vllm")


CHOICES = {
    "decoder": ("fast decoder", "generic decoder"),
    "ranks": (None, "tensor parallelism"),
    "cache": (None, "paged cache"),
    "engine": (None, "adapters per row"),
    "record": (None, "router replay"),
    "drafts": (None, "speculative decoding"),
}


@cache
def make_features_decoder(generic: bool) -> Any:
    """Return a decoder, which engines without tensor parallelism share."""
    decoder = make_decoder(model_of("qwen3_moe"), kind="hf" if generic else "fast")
    if not generic:
        decoder.base = decoder  # as for a model without adapters that shares its base
    return decoder


def build(features: set[str], team):
    """Return the engine with these features. Raises UserError if no decoder has them."""
    generic = "generic decoder" in features
    if "tensor parallelism" not in features:
        decoder = make_features_decoder(generic)
    elif generic:
        decoder = make_decoder(model_of("qwen3_moe"), kind="hf", tp_group=team)  # is refused
    else:
        decoder = make_decoder(model_of("qwen3_moe"), kind="fast", tp_group=team)
        decoder.base = decoder
    engine = make_engine(
        decoder,
        "paged" if "paged cache" in features else "plain",
        features=features & {"adapters per row", "router replay"},
        kv_cache_tokens=1024,
        num_speculative_tokens=3 if "speculative decoding" in features else 0,
    )
    if engine.decoder.multi_adapter:
        engine.decoder.add_adapter(0, decoder, 0)
    return engine


PARAMS = SamplingParams(
    max_tokens=12, presence_penalty=0.5, top_p=0.9, min_tokens=3, stop=[5], temperature=0.6,
    logit_bias={3: 4.0, 7: 4.0, 4: 4.0},
)  # fmt: skip
REQUEST = SamplingRequest(
    prompt=[3, 7, 4, 3, 7, 3, 4, 4, 7, 7],
    num_samples=3,
    params=PARAMS,
    include_prompt_logprobs=True,
)


@cache
def sample_plainly() -> Any:
    return run_requests(Engine(make_features_decoder(True)), [REQUEST])


@pytest.mark.parametrize(
    "features",
    [{name for name in item if name} for item in itertools.product(*CHOICES.values())],
    ids=lambda features: ", ".join(sorted(features)),
)
def test_features_combine_unless_the_table_says_why_not(features):
    """Every allowed combination samples the same as the plain engine with the same model."""
    reason = find_conflict(features)
    if reason is not None:
        with pytest.raises(UserError) as caught:
            on_ranks(1, lambda team: build(features, team))
        assert str(caught.value) == reason
        return

    def run(team):
        engine = build(features, team)
        number = 0 if engine.decoder.multi_adapter else None
        responses = run_requests(engine, [replace(REQUEST, adapter_id=number)])
        counters = engine.counters
        drafts = 0 < counters.accepted_tokens < counters.drafted_tokens
        return (engine.decoder.multi_adapter, kind_of(engine), drafts), responses

    ((kind, responses),) = on_ranks(1, run)
    check_same(responses, sample_plainly(), 2e-5)
    for sequence in responses[0].sequences:
        assert (sequence.experts is not None) == ("router replay" in features)
    several = find_conflict({*features, "device steps"}) is None
    expected_kind = "plain" if "paged cache" not in features else "stepped" if several else "paged"
    drafts = "speculative decoding" in features
    assert kind == ("adapters per row" in features, expected_kind, drafts)


def test_a_decoder_without_experts_records_none_and_pages_hold_none():
    from rl.runtime import SamplerSettings, sampler_versions

    loaded = SimpleNamespace(eos_token_ids=(3,), tokenizer=None, model=tiny_model("qwen3"))
    source = sampler_versions.SamplerVersion(
        make_decoder(loaded.model), loaded, 0, None, learned=True
    )
    paged = SamplerSettings(cache="paged", kv_cache_tokens=512)
    assert kind_of(sampler_versions.make_version_engine(source, paged)) == "stepped"
    assert kind_of(sampler_versions.make_version_engine(source, SamplerSettings())) == "plain"
    with pytest.raises(UserError, match="router_replay needs a model with experts"):
        sampler_versions.make_version_engine(
            source, SamplerSettings(cache="paged", router_replay=True)
        )
