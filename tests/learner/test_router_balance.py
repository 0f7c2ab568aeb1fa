"""Test the load-balancing loss as a term of any loss: it has transformers' value on the same tokens
in every layout, and its gradient.
"""

import importlib

import numpy as np
import pytest
import torch
from test_architectures import (  # noqa: F401  (a fixture)
    SHORT_PAIRS,
    gradient_error,
    make_datums,
    make_learner,
    make_params,
    one_thread,
)
from test_lora_experts import STACKED
from tiny_models import tiny_model

from rl.errors import UserError
from rl.layers import compute_router_aux_loss, describe_layers, find_routers, record_router_scores
from rl.losses import get_loss
from rl.models import model_loading
from rl.types import Datum

COEF = 0.3
# These models have the function in their module.
OWN = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "jetmoe", "qwen3_next", "phimoe")
EVERYTHING = {
    "mixtral": ("padded", "packed", "shared"),
    "qwen3_moe": ("padded", "packed", "shared"),
}


def model_of(name):
    return model_loading._disable_randomness(
        tiny_model(name, **({"sliding_window": None} if name in EVERYTHING else {}))
    )


def with_mask(data):
    """Return the datums with a mask, for a loss of pairs."""
    results = []
    for datum in data:
        fields = dict(datum.loss_fn_inputs)
        fields["mask"] = (fields.pop("weights").array > 0).astype(np.float32)
        results.append(Datum(datum.model_input, fields))
    return results


def with_advantages(data):
    """Return the datums with advantages and no mask, as Tinker's are."""
    return [
        Datum(
            datum.model_input,
            {
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "advantages": -2.0 * datum.loss_fn_inputs["weights"].array,
            },
        )
        for datum in data
    ]


def compute_transformers_loss(model, data):
    """Compute transformers' value, differentiable: a single padded batch with the trained tokens as
    its attention mask.
    """
    module = importlib.import_module(type(model).__module__)
    width = max(datum.model_input.length for datum in data)
    ids, mask = torch.zeros(len(data), width, dtype=torch.long), torch.zeros(len(data), width)
    for row, datum in enumerate(data):
        n = datum.model_input.length
        ids[row, :n] = torch.tensor(datum.model_input.to_ints())
        inputs = datum.loss_fn_inputs
        name = next(name for name in ("mask", "weights", "advantages") if name in inputs)
        mask[row, :n] = torch.from_numpy(inputs[name].array != 0).float()
    out = model(input_ids=ids, use_cache=False, output_router_logits=True)
    experts = describe_layers(model).experts
    logits = tuple(item.reshape(-1, item.shape[-1]) for item in out.router_logits)
    return module.load_balancing_loss_func(logits, experts.count, experts.per_token, mask)


def gradients(learner, data, loss):
    learner.drop_gradients()
    _, sums = learner.run(data, get_loss(loss), {}, temperature=1.0, divisor=1.0, backward=True)
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in learner.trainable.items()
    }, sums


@pytest.mark.parametrize("loss", ["cross_entropy", "simpo", "importance_sampling"])
@pytest.mark.parametrize("name", make_params(OWN, ("mixtral",)))
def test_the_value_and_its_gradient_are_those_of_transformers(name, loss):
    model, data = model_of(name), make_datums(SHORT_PAIRS)
    weights = np.concatenate([datum.loss_fn_inputs["weights"].array for datum in data])
    units = {"cross_entropy": weights.sum(), "simpo": 2.0}.get(loss, np.count_nonzero(weights))
    if loss != "cross_entropy":
        data = with_mask(data) if loss == "simpo" else with_advantages(data)
    model.zero_grad()
    expected = compute_transformers_loss(model, data)
    (COEF * float(units) * expected).backward()
    added = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
    assert sum(float(g.abs().sum()) for g in added.values()) > 0
    for layout in EVERYTHING.get(name, ("padded",)):
        plain, sums = gradients(make_learner(model, layout=layout), data, loss)
        learner = make_learner(model, layout=layout, router_aux_loss_coef=COEF)
        both, with_it = gradients(learner, data, loss)
        assert with_it["router_aux_loss:sum"] / with_it["balanced:sum"] == pytest.approx(
            float(expected.detach()), rel=1e-5
        )
        assert with_it["balanced:sum"] == pytest.approx(units) and "balanced:sum" not in sums
        # The reported loss does not include the router loss.
        assert with_it["loss:sum"] == pytest.approx(sums["loss:sum"], rel=1e-6)
        off = sum(float((both[n] - plain[n] - g).double().square().sum()) for n, g in added.items())
        size = sum(float(both[n].double().square().sum()) for n in added)
        assert off**0.5 < 1e-5 * size**0.5, layout


def test_it_is_the_same_under_checkpointing_and_absent_where_nothing_is_learnt():
    model, data = model_of("qwen3_moe"), make_datums(((9, (7, 5)),))
    plain, _ = gradients(make_learner(model, router_aux_loss_coef=COEF), data, "cross_entropy")
    again = make_learner(model, router_aux_loss_coef=COEF, gradient_checkpointing=True)
    gradients(again, data, "cross_entropy")
    assert gradient_error(again, plain) < 1e-6
    _, sums = again.run(
        data, get_loss("cross_entropy"), {}, temperature=1.0, divisor=1.0, backward=False
    )
    assert "balanced:sum" not in sums


def test_by_hand():
    """With two experts and one choice, the loss is 2 if all tokens choose the same expert and 1 if
    half choose each. Tokens that do not count change nothing.
    """
    far = torch.tensor([[50.0, -50.0], [50.0, -50.0], [-50.0, 50.0]])

    def compute(layers, *counted):
        return float(compute_router_aux_loss(layers, 1, torch.tensor(counted)))

    assert compute([far], True, True, False) == pytest.approx(2.0)
    assert compute([far], True, False, True) == pytest.approx(1.0)
    # The loss is over all layers.
    assert compute([far, far.flip(1)], True, True, False) == pytest.approx(1.0)
    assert compute([far], False, False, False) == 0.0


@pytest.mark.parametrize(
    "name", make_params([n for n in STACKED if n != "kimi_linear"], ("mixtral", "deepseek_v3"))
)
def test_the_scores_of_every_familys_routers_are_found(name):
    model = model_of(name)
    experts = describe_layers(model).experts
    with record_router_scores(model) as scores:
        model(input_ids=torch.arange(3, 15)[None], use_cache=False)
    # Its other layers choose by a token's id and compute no scores.
    scored = 1 if name == "deepseek_v4" else len(experts.blocks)
    assert len(scores()) >= scored
    assert all(item.shape[0] == 12 and item.shape[1] >= experts.count for item in scores())


def test_a_model_without_experts_is_refused():
    with pytest.raises(UserError, match="router_aux_loss_coef is for models with experts"):
        make_learner(tiny_model("llama"), router_aux_loss_coef=COEF)
    assert not find_routers(tiny_model("llama"))
