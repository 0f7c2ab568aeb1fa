"""Test the learner's output head: what it allocates, which host reads it makes, and that it
receives no target outside the vocabulary.
"""

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, call, gradient, make_worker, random_datums
from test_kernel_tripwire import LargestTensorMode
from tiny_models import tiny_model
from torch import nn

from rl.learner import HeadRequest, LogprobHead
from rl.losses import LOSSES
from rl.types import Datum, ModelInput

V, T, K = 40_000, 64, 3


def model_of(trained: bool = True) -> nn.Module:
    """Return a model with a vocabulary far larger than its other sizes."""
    model = tiny_model("qwen3", vocab_size=V, num_hidden_layers=1, tie_word_embeddings=False)
    model.lm_head.requires_grad_(trained)
    return model


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("soft", [True, False])
def test_the_head_makes_no_logits_and_asks_the_device_nothing(soft, entropy, trained):
    """Forward and backward of the module make no tensor as large as [T, V], and the head reads no
    number back to the host.
    """
    model = model_of(trained)
    head = LogprobHead(model, kept_bytes=0)
    assert head.fused
    targets = torch.randint(0, V, (T, K) if soft else (T,))
    ids = torch.randint(0, V, (2, T // 2))
    with LargestTensorMode() as plain:
        model(input_ids=ids, use_cache=False)
    with LargestTensorMode() as wire:
        logp, result, _ = head(model, HeadRequest(targets, None, 0.7, entropy), input_ids=ids)
        assert wire.reads == plain.reads  # the reads of transformers' forward
        (logp.sum() + result.sum()).backward()
    assert wire.largest < T * V and logp.shape == targets.shape
    assert (model.lm_head.weight.grad is not None) == trained


@pytest.mark.parametrize("kept_bytes", [0, 1 << 30])
@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_entropies_without_a_gradient_leave_the_gradient_as_it_is(fused, soft, kept_bytes):
    torch.manual_seed(3)
    model = model_of()
    head = LogprobHead(model, fused=fused, kept_bytes=kept_bytes)
    targets = torch.randint(0, V, (T, K) if soft else (T,))
    ids = torch.randint(0, V, (2, T // 2))
    gradients, entropies = [], []
    for entropy, gradient_too in ((False, True), (True, False), (True, True)):
        request = HeadRequest(targets, None, 0.7, entropy, entropy_gradient=gradient_too)
        model.zero_grad()
        logp, values, _ = head(model, request, input_ids=ids)
        logp.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        entropies.append(values)
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert not entropies[0].any() and torch.equal(entropies[1], entropies[2].detach())
    assert not entropies[1].requires_grad and entropies[2].requires_grad


@pytest.fixture(scope="module")
def worker():
    return make_worker(value_head=True, token_budget=16)


def with_target(datum: Datum, wrong: int, soft: bool) -> Datum:
    inputs = dict(datum.loss_fn_inputs)
    targets = inputs["target_tokens"].array.copy()
    targets = np.stack([targets] * K, 1) if soft else targets
    targets[(-1, K - 1) if soft else -1] = wrong
    fields = {name: data.array for name, data in inputs.items()} | {"target_tokens": targets}
    return Datum(
        ModelInput.from_ints(datum.model_input.to_ints()),
        {"target_tokens": targets} if soft else fields,
    )


@pytest.mark.parametrize("loss", [*LOSSES, "soft"])
@pytest.mark.parametrize("wrong", [-100, -1, VOCABULARY])
def test_a_target_that_is_no_id_is_refused_before_anything_runs(worker, monkeypatch, loss, wrong):
    """The learner refuses the target for any caller, in the last of several micro-batches.
    Accumulated gradients stay.
    """
    datums = random_datums(8)
    call(worker, "forward_backward", 0, datums, "importance_sampling", {}, 1.0, True)
    before = gradient(worker).clone()
    datums[-1] = with_target(datums[-1], wrong, loss == "soft")
    monkeypatch.setattr(LogprobHead, "__call__", lambda *_, **__: pytest.fail("a forward ran"))
    name = "cross_entropy" if loss == "soft" else loss
    why = f"target_tokens holds the id {wrong}; the model's ids are 0 to {VOCABULARY - 1}"
    with pytest.raises(ValueError, match=f"datum 7: {why}"):
        call(worker, "forward_backward", 0, datums, name, {}, 1.0, True)
    assert torch.equal(gradient(worker), before) and worker.learners[0].has_gradient
