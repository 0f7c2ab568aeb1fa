"""Test models with a recurrent state: learner, sampler and adapters are exact, and a killed run
resumes bit for bit.
"""

import copy
import os
import signal

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    check_logprobs,
    make_request,
    one_thread,
    random_prompts,
    run_requests,
)
from test_architectures import (
    compute_plain_logprobs,
    gradient_error,
    make_datums,
    make_learner,
    run_learner,
)
from tiny_models import VOCAB, tiny_model
from whole_runs import final_weights, train

from rl.models import add_lora, load_model, model_loading
from rl.sampler import Engine, make_decoder, verify_decoder
from rl.sampler.hf_states import RecurrentState
from rl.trainer.batch_log import BatchLog
from rl.types import LoraConfig

QUICK = ("lfm2", "falcon_h1")
HYBRIDS = (*QUICK, "qwen3_next", "qwen3_5_text", "mamba", "mamba2", "jamba", "bamba", "granitemoehybrid", "zamba2", "nemotron_h",
           "olmo_hybrid")  # fmt: skip
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS]


def model_of(name: str, **changes):
    return model_loading._disable_randomness(tiny_model(name, **changes))


def in_float64(name: str):
    """Return the model in float64. Experts run in a loop, because the grouped products have no
    float64.
    """
    model = model_of(name)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.double()


def check_samples(model, engine: Engine, temperature: float = 1.0) -> None:
    """Compare samples with a plain forward for each: prompts of 1, 2 and more tokens (shorter than
    a convolution's width), and few rows at once.
    """
    prompts = random_prompts([1, 2, 9, 21, 9], VOCAB)
    requests = [
        make_request(prompt, n, max_tokens=5 + 3 * i, temperature=temperature, problem=i)
        for i, (prompt, n) in enumerate(zip(prompts, (2, 1, 3, 2, 1), strict=True))
    ]
    for prompt, response in zip(prompts, run_requests(engine, requests), strict=True):
        for sequence in response.sequences:
            check_logprobs(model, prompt, sequence, temperature)


@pytest.mark.parametrize("name", EACH)
def test_what_is_sampled_is_scored_alike(name):
    model = model_of(name)
    decoder = make_decoder(model)
    assert decoder.plan.rows == "slots"
    for temperature in (1.0, 0.7):
        engine = Engine(decoder, eos_token_ids=(3,), max_rows=4)
        check_samples(model, engine, temperature)
        # each prompt is prefilled once for its group
        assert engine.counters.peak_rows == 4 and engine.counters.prefill_prompts == 5


@pytest.mark.parametrize("limit", [(0.3, float("inf")), (0.0, 0.7), (0.4, 0.6)])
@pytest.mark.parametrize(
    "name",
    [
        "mamba2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bamba", "nemotron_h", "zamba2")),
    ],
)
def test_limits_of_time_steps_hold_for_single_steps_too(name, limit):
    """Many steps reach the limits. The decoder's copy of the model is compared with a plain forward
    in float64.
    """
    model = in_float64(name)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = limit
    check_samples(model, Engine(make_decoder(model), eos_token_ids=(3,), max_rows=4), 0.7)


@pytest.mark.parametrize(
    "fault", ["a state of another row", "a state that is not reset", "keys of another row"]
)
def test_a_state_in_the_wrong_slot_is_seen_by_the_trial(fault, monkeypatch):
    enter = RecurrentState.add_rows

    def faulty(self, prompt_of_row):
        before = self.cache
        enter(self, prompt_of_row)
        last = len(self.prompt_of_row) - 1
        for layer in self.cache.layers:
            if fault == "keys of another row":
                if isinstance(getattr(layer, "keys", None), torch.Tensor):
                    layer.keys = layer.keys.roll(1, 0)
                continue
            for name in ("conv_states", "recurrent_states"):
                states = getattr(layer, name, {})
                for i, state in states.items():
                    if state is not None and fault == "a state of another row":
                        states[i] = state.roll(1, 0)
                    elif state is not None and before is not None:
                        state[last] = state[0]

    model = model_of("falcon_h1")
    assert verify_decoder.find_batching(verify_decoder.truncated_copy(model)[0]).rows == "slots"
    monkeypatch.setattr(RecurrentState, "add_rows", faulty)
    assert verify_decoder.find_batching(verify_decoder.truncated_copy(model)[0]).rows != "slots"


@pytest.mark.parametrize("name", EACH)
def test_the_gradient_of_padded_rows_is_that_of_sequences_alone(name):
    """In float64, so that any difference is not rounding; packed rows are refused."""
    model, data = in_float64(name), make_datums(((9, (7, 5)), (4, (3, 12))))
    logprobs, gradient = compute_plain_logprobs(model, data)
    learner = make_learner(model, layout="padded", fused=False)
    np.testing.assert_allclose(run_learner(learner, data), logprobs, atol=1e-6)
    assert gradient_error(learner, gradient) < 1e-6
    with pytest.raises(ValueError, match="layout packed is not exact"):
        make_learner(model, layout="packed")


@pytest.mark.parametrize("name", EACH)
def test_every_adapter_of_a_lora_learns_and_is_sampled_with(name, tmp_path):
    """PEFT reads the saved adapter. An adapter on a layer would stay at zero if a kernel reads the
    layer's weight directly.
    """
    from peft import PeftModel

    model_of(name).save_pretrained(tmp_path / "base")
    loaded = add_lora(load_model(str(tmp_path / "base")), LoraConfig(rank=2, seed=0))
    learner = make_learner(loaded.model, layout="padded")
    run_learner(learner, make_datums(((9, (7, 5)), (4, (3, 12)))))
    for n, p in learner.trainable.items():
        if "lora_B" in n and "adapter_list" not in n:  # Zamba's lists hold unused layers
            assert p.grad is not None and p.grad.abs().max() > 0, n
    with torch.no_grad():
        for parameter in learner.trainable.values():
            generator = torch.Generator().manual_seed(1)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    learner.model.save_pretrained(str(tmp_path / "adapter"))
    base = model_loading._disable_randomness(
        type(model_of(name)).from_pretrained(str(tmp_path / "base"))
    )
    plain = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter")).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        result, before, mine = (
            model(input_ids=ids).logits for model in (plain, base, learner.model.eval())
        )
    assert float((result - mine).abs().max()) < 1e-5 < float((result - before).abs().max())
    check_samples(plain, Engine(make_decoder(learner.model), eos_token_ids=(3,), max_rows=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_a_run_that_is_killed_ends_with_the_same_bits(name, tmp_path):
    """kill -9 in the third of four steps; the run resumes from the second."""
    from rl import get_tokenizer

    tokenizer = get_tokenizer("tiny:addition")
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model_of(name, vocab_size=len(tokenizer), **ids).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    words = (f"grpo --base-model {tmp_path / 'base'} --steps 4 --save-every 2 --group-size 4 --batch-size 4 --max-tokens 5 "
             "--dataset addition --rollouts-every 0 --renderer plain --eval-every 0")  # fmt: skip
    whole = train(words, tmp_path / "whole")
    if (child := os.fork()) == 0:
        write_row = BatchLog.write_row

        def kill(self, done, metrics):
            if done == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            write_row(self, done, metrics)

        BatchLog.write_row = kill
        train(words, tmp_path / "cut")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert train(f"{words} --resume", tmp_path / "cut") == whole
    first, other = final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")
    assert first.keys() == other.keys() and all(
        torch.equal(first[name], other[name]) for name in first
    )
