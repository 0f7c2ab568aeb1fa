"""Which engine samples: asked for, or found out by a trial; a trial that fails says so and nothing
changes but the speed.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sampler_models import add_lora, one_thread, tiny_model  # noqa: F401

from rl.errors import UserError
from rl.sampler import (
    Engine,
    MultiStepEngine,
    decode_inputs,
    engine_selection,
    make_decoder,
    make_engine,
)


def decoder_of(kind="qwen3", dtype=None, **changes):
    return make_decoder(tiny_model(kind, **changes), dtype=dtype, kind="fast")


def test_who_says_gets_it_and_a_cpu_is_plain_by_default():
    decoder = decoder_of()
    assert type(make_engine(decoder)) is Engine and type(make_engine(decoder, "plain")) is Engine
    engine = make_engine(decoder, "paged", eos_token_ids=(3,), kv_cache_tokens=512)
    assert type(engine) is MultiStepEngine and engine.eos_token_ids == (3,)
    with pytest.raises(UserError, match="fast decoder.*leave sampler_cache at auto"):
        make_engine(make_decoder(tiny_model("gpt2")), "paged")
    decoder.tp_group = SimpleNamespace(size=2)  # of two ranks, whose sums no step by itself makes
    with pytest.raises(UserError, match="2 ranks.*sampler_tp at 1"):
        make_engine(decoder, "paged")
    with pytest.raises(ValueError, match="use the plain Engine"):
        MultiStepEngine(decoder)
    decoder.device = torch.device("cuda")
    decoder.new_state = lambda tokens: None  # as on a GPU, which this machine may not have
    assert type(make_engine(decoder)) is Engine
    with pytest.raises(ValueError, match="auto, plain, paged"):
        make_engine(decoder, "pages")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "with adapters"])
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
    """Planted, one at a time, as a kernel that a device runs wrongly would show."""
    decoder = decoder_of(max_position_embeddings=1024)
    if fault in FAULTS:
        monkeypatch.setattr(decode_inputs, "_sample", FAULTS[fault](decode_inputs._sample))
    else:
        real = decode_inputs.compute_paged_attention

        def attend(q, kv, table, length, shared):
            if fault == "the shared pages" and shared is not None:
                shared = replace(shared, length=shared.length // 2)
            return real(
                q,
                kv,
                table,
                length - (length % 256 == 1).int() if fault == "a page's end" else length,
                shared,
            )

        monkeypatch.setattr(decode_inputs, "compute_paged_attention", attend)
    try:
        said = engine_selection.compare_engines(decoder)
    except FloatingPointError:
        said = "diverged"
    assert said is not None


def test_where_the_trial_fails_it_is_said_once_and_sampling_is_plain(monkeypatch):
    decoder = decoder_of()
    # which this machine may not have: the trial meets what it meets
    decoder.device = torch.device("cuda")
    engine_selection._paged_engine_failure.cache_clear()
    asked = []

    def fails(small):
        asked.append(small)
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(engine_selection, "compare_engines", fails)
    monkeypatch.setattr(engine_selection, "Engine", lambda decoder, **settings: "plain")
    with pytest.warns(
        UserWarning, match="no kernel image is available.*, so the plain engine samples"
    ) as said:
        assert [make_engine(decoder) for _ in range(3)] == ["plain"] * 3
    assert len(asked) == len(said) == 1
    engine_selection._paged_engine_failure.cache_clear()
    monkeypatch.setattr(engine_selection, "compare_engines", lambda small: None)
    monkeypatch.setattr(engine_selection, "MultiStepEngine", lambda decoder, **settings: "stepped")
    assert make_engine(decoder) == "stepped"
    engine_selection._paged_engine_failure.cache_clear()


def test_what_cannot_go_together_is_said_before_a_model_is_loaded():
    from rl.config.sections import SamplingSettings

    assert SamplingSettings(sampler_cache="paged").sampler_cache == "paged"
    with pytest.raises(ValueError, match="leave sampler_cache at auto, or sampler at auto or fast"):
        SamplingSettings(sampler_cache="paged", sampler="hf")


def test_engines_that_keep_a_plain_cache_say_so_where_pages_are_asked_for():
    from rl.runtime import sampler_versions
    from rl.runtime.rank_settings import SamplerSettings

    loaded = SimpleNamespace(eos_token_ids=(3,), tokenizer=None, model=tiny_model("qwen3"))
    source = sampler_versions.SamplerVersion(
        make_decoder(loaded.model), loaded, 0, None, learned=True
    )
    assert (
        type(
            sampler_versions.make_version_engine(
                source, SamplerSettings(cache="paged", kv_cache_tokens=512)
            )
        )
        is MultiStepEngine
    )
    assert type(sampler_versions.make_version_engine(source, SamplerSettings())) is Engine
    with pytest.raises(UserError, match="router_replay.*leave sampler_cache at auto"):
        sampler_versions.make_version_engine(
            source, SamplerSettings(cache="paged", router_replay=True)
        )
