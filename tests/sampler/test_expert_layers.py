"""Test the grouped and ungrouped products of experts against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from sampler_models import one_thread  # noqa: F401
from torch.nn import functional as F

from rl.sampler.expert_layers import ExpertLayer
from rl.sampler.forward_fast import activate_gate

EXPERTS, WIDTH, COLUMNS = 5, 16, 24


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return activate_gate("silu", gate_up)


def make_layer(dtype: torch.dtype = torch.float32, per_token: int = 2) -> ExpertLayer:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "router": (EXPERTS, WIDTH),
        "gate_up": (EXPERTS, 2 * COLUMNS, WIDTH),
        "down": (EXPERTS, WIDTH, COLUMNS),
    }
    buffers = {
        f"experts.{name}": torch.randn(shape, generator=generator).mul_(0.4).to(dtype)
        for name, shape in shapes.items()
    }
    return ExpertLayer("experts", buffers, per_token, True)


def loop_over_tokens(layer: ExpertLayer, x: torch.Tensor) -> torch.Tensor:
    """Return the products in float64, computed for a single token and expert at a time."""
    rows = []
    for token in x.double():
        scores = (layer.router_XE.double() @ token).softmax(-1)
        best = scores.argsort(descending=True)[: layer.per_token]
        total = torch.zeros(WIDTH, dtype=torch.float64)
        for expert in best.tolist():
            gate, up = (layer.gate_up_XIE[expert].double() @ token).chunk(2)
            output = layer.down_XEI[expert].double() @ (F.silu(gate) * up)
            total += scores[expert] / scores[best].sum() * output
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("per_token", [1, 2, EXPERTS])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_all_ways_of_the_products_agree(tokens, per_token):
    layer = make_layer(per_token=per_token)
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
    expected = loop_over_tokens(layer, x)
    weights, chosen = layer.route(x)
    for compute in (layer.compute_chosen, layer.compute_all):
        y = compute(x, weights, chosen, silu_mul)
        torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    y, record = layer(x.view(1, tokens, WIDTH), silu_mul)
    torch.testing.assert_close(y[0].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(record[0], chosen)


def test_grouped_products_are_those_of_the_loop():
    """In bfloat16, with experts that no token uses."""
    layer = make_layer(torch.bfloat16)
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    weights, chosen = layer.route(x)
    looped = layer.compute_chosen(x, weights, chosen, silu_mul)
    layer.uses_grouped_products = True
    grouped = layer.compute_chosen(x, weights, chosen, silu_mul)
    torch.testing.assert_close(grouped, looped, atol=2e-2, rtol=2e-2)


def test_an_expert_that_overflows_changes_no_token_of_others():
    layer = make_layer()
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))
    weights, chosen = layer.route(x)
    expected = layer.compute_all(x, weights, chosen, silu_mul)
    expert = int(chosen[0, 0])
    layer.down_XEI[expert] = torch.inf
    others = ~(chosen == expert).any(-1)
    assert others.any()
    y = layer.compute_all(x, weights, chosen, silu_mul)
    assert torch.equal(y[others], expected[others])
    assert not y[~others].isfinite().all(-1).any()
