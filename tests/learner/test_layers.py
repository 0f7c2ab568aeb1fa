"""Test the description of a model's layers against its published architecture, and the first layers
that represent all layers.
"""

import copy

import pytest
import torch
from tiny_models import tiny_model

from rl.layers import describe_layers, truncate_layers_, truncated_layers
from rl.learner.layout_probe import find_layout_faults
from rl.models import model_loading

FULL, SLIDING = ("full",) * 4, ("sliding",) * 4
# Written by hand from the published architectures: kinds of the layers, positions, (experts,
# experts per token, blocks with experts).
KNOWN = {
    "llama": (FULL, "rotary", None),
    "gpt2": (FULL, "learned", None),
    "opt": (FULL, "learned", None),
    "bloom": (FULL, "alibi", None),
    "mpt": (FULL, "alibi", None),
    "mistral": (SLIDING, "rotary", None),
    "gemma2": (("sliding", "full") * 2, "rotary", None),
    "llama4_text": (("chunked",) * 3 + ("full",), "rotary", (4, 2, 4)),
    "gpt_neo": (("full", "sliding") * 2, "learned", None),
    "lfm2": (("convolution", "full") * 2, "rotary", None),
    "qwen3_next": (("linear",) * 3 + ("full",), "rotary", (4, 2, 4)),
    "qwen3_5_text": (("linear",) * 3 + ("full",), "rotary", None),
    "falcon_h1": (("state space+full",) * 4, "rotary", None),
    "mamba2": (("state space",) * 4, "none", None),
    "jamba": (("state space", "full") * 2, "none", (4, 2, 2)),
    "bamba": (("state space", "full") * 2, "rotary", None),
    "recurrent_gemma": (("state space", "state space", "sliding", "state space"), "rotary", None),
    "mixtral": (FULL, "rotary", (4, 2, 4)),
    "qwen3_moe": (FULL, "rotary", (4, 2, 4)),
    "deepseek_v3": (FULL, "rotary", (4, 2, 3)),
    "gpt_oss": (("sliding", "full") * 2, "rotary", (4, 2, 4)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_read_is_what_the_architecture_is(name):
    changes = {"sliding_window": None} if name in ("mixtral", "qwen3_moe") else {}
    model = tiny_model(name, **changes)
    result, (kinds, positions, experts) = describe_layers(model), KNOWN[name]
    assert (result.kinds, result.positions) == (kinds, positions)
    mixed = result.experts and (
        result.experts.count, result.experts.per_token, len(result.experts.blocks)
    )  # fmt: skip
    assert mixed == experts
    assert result.has_state == any(kind not in ("full", "sliding", "chunked") for kind in kinds)
    assert result.num_kv_layers == sum(
        "full" in kind or kind in ("sliding", "chunked") for kind in kinds
    )
    assert result.takes_positions == (name not in ("bloom", "mpt", "mamba2"))


def test_experts_are_counted_in_numbers():
    model = tiny_model("qwen3_moe", sliding_window=None)
    # Factors: layers, experts, gate and up, down.
    assert describe_layers(model).experts.num_parameters == 4 * 4 * (2 * 24 * 32 + 32 * 24)


def count_layers(model) -> int:
    return truncate_layers_(copy.deepcopy(model))


def test_the_first_layers_of_every_make_stand_for_all():
    assert count_layers(tiny_model("llama", num_hidden_layers=12)) == 2
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 3
    hybrid = tiny_model("qwen3_next", num_hidden_layers=12, layer_types=kinds)
    assert count_layers(hybrid) == 4
    # a dense layer, then experts
    assert count_layers(tiny_model("deepseek_v3", num_hidden_layers=12)) == 2
    patched = tiny_model("llama", num_hidden_layers=12)
    layer = patched.model.layers[7].mlp
    layer.forward = lambda x, forward=layer.forward: forward(x)
    assert count_layers(patched) == 8
    odd = tiny_model("llama", num_hidden_layers=12)
    odd.model.layers[5].mlp.down_proj = torch.nn.Linear(48, 32, bias=True)
    assert count_layers(odd) == 6


def test_the_model_is_whole_again_afterwards():
    model = tiny_model("llama", num_hidden_layers=6)
    layers, ids = model.model.layers, torch.arange(9)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with truncated_layers(model):
            assert not torch.equal(model(input_ids=ids).logits, before)
        assert model.model.layers is layers and torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("at", [0, 9])
def test_a_fault_in_one_late_layer_is_seen(at):
    model = model_loading._disable_randomness(tiny_model("llama", num_hidden_layers=10))
    attention = model.model.layers[at].self_attn
    forward = attention.forward

    def leaking(*args, **kwargs):
        out, *rest = forward(*args, **kwargs)
        return out + 1e-3 * out.mean(1, keepdim=True), *rest

    attention.forward = leaking
    assert "to its right" in find_layout_faults(model, ["padded"])["padded"]
