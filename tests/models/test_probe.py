"""Test the layout probe: it detects even faint faults of a layout and does not change the model."""

import copy

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from rl.learner.layout_probe import find_layout_faults
from rl.models import model_loading

LAYOUTS = ("padded", "packed", "shared")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(name: str = "llama", **changes):
    return model_loading._disable_randomness(tiny_model(name, **changes))


def change_attention(model, change) -> None:
    """Make the first layer's attention return `change(output)`."""
    layer = model.model.layers[0].self_attn
    original = layer.forward

    def forward(*args, **kwargs):
        out, *rest = original(*args, **kwargs)
        return change(out), *rest

    layer.forward = forward


@pytest.mark.parametrize("strength", [1.0, 1e-3, 1e-5])
def test_a_faint_leak_from_the_right_is_seen(strength):
    model = model_of()
    change_attention(model, lambda out: out + strength * out.mean(1, keepdim=True))
    assert "depends on tokens to its right" in find_layout_faults(model, ["padded"])["padded"]


@pytest.mark.parametrize("strength", [1.0, 1e-5])
def test_a_faint_state_that_goes_on_is_seen(strength):
    model = model_of()
    change_attention(model, lambda out: out + strength * out.cumsum(1))
    faults = find_layout_faults(model, LAYOUTS)
    assert faults.keys() == {"packed", "shared"} and all(
        "a sequence depends on" in why for why in faults.values()
    )


def test_positions_that_are_not_heeded_are_seen():
    """Rows are isolated, but each starts at the position where the previous row ended. No token of
    another row is seen, yet every position is wrong.
    """
    model = model_of("gpt2")
    table = model.transformer.wpe
    table.register_forward_pre_hook(
        lambda module, args: (torch.arange(args[0].shape[-1])[None].expand_as(args[0]),)
    )
    faults = find_layout_faults(model, LAYOUTS)
    assert faults.keys() == {"packed", "shared"}
    assert "differ from those of a separate forward" in faults["packed"]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("lfm2", {"padded"}),
        ("gpt_neo", {"padded"}),
        ("mistral", {"padded", "packed"}),
        ("mixtral", set(LAYOUTS)),
    ],
)
def test_weights_as_they_begin_are_judged_like_large_ones(name, taken, bf16):
    """Initial weights attend nearly uniformly, so that a fault hardly changes a logprob. It would
    grow in training.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        faults = find_layout_faults(model_of(name, large=False), LAYOUTS)
    assert set(LAYOUTS) - faults.keys() == taken


def test_a_window_is_proved_by_making_it_small_or_not_used():
    near, far = (
        model_of("mistral", sliding_window=8),
        model_of("mistral", sliding_window=100_000, max_position_embeddings=200_000),
    )
    for model in (near, far):
        faults = find_layout_faults(model, LAYOUTS)
        assert faults.keys() == {"shared"} and "differ" in faults["shared"]
    assert far.config.sliding_window == 100_000  # the probe restored it
    faults = find_layout_faults(model_of("gpt_neo"), ["packed"])
    assert "window_size=40 reaches farther" in faults["packed"]


def test_a_model_that_looks_ahead_is_refused_by_name():
    from test_architectures import make_learner

    with pytest.raises(ValueError, match="BertLMHeadModel.*cannot be trained.*to its right"):
        make_learner(tiny_model("bert", is_decoder=False))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x: x + 1e-3 * torch.randn_like(x), "differ from those of a separate forward"),
        # hits one token in a million, so a small sample of tokens would not show it
        (lambda x: torch.where(torch.rand_like(x) < 1e-6, -x, x), "random numbers (rand_like)"),
    ],
)
def test_randomness_under_any_name_is_found_in_training_mode(change, why):
    class NoisyModule(nn.Module):
        def forward(self, x):
            return change(x) if self.training else x

    model = model_of()
    mlp = model.model.layers[1].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, NoisyModule())
    assert find_layout_faults(model, ["padded"]) == {}
    faults = find_layout_faults(model, ["padded"], training=True)
    assert faults.keys() == {"training"} and why in faults["training"]


def test_numbers_drawn_without_effect_are_no_fault():
    """Layerdrop samples a number per layer."""
    assert find_layout_faults(model_of("opt", layerdrop=0.5), ["padded"], training=True) == {}


@pytest.mark.parametrize("training", [False, True])
def test_it_leaves_no_trace(training):
    model = model_of("mistral")
    model.train(training)
    model.model.layers[0].train(not training)
    model.register_buffer("seen", torch.zeros(1))
    model.model.register_forward_hook(lambda module, args, out: model.seen.add_(1) and None)
    modes, state = [m.training for m in model.modules()], copy.deepcopy(model.state_dict())
    config, rng = model.config.to_dict(), torch.get_rng_state()
    find_layout_faults(model, LAYOUTS, training=True)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [m.training for m in model.modules()] == modes and model.config.to_dict() == config
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not model.get_input_embeddings()._forward_hooks
