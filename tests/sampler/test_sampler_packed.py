"""Test matrices in oneDNN's layout: products match float64, and no layout outlives the values it
was made from.
"""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from sampler_models import (  # noqa: F401
    add_lora,
    check_logprobs,
    make_request,
    one_thread,
    run_requests,
    tiny_model,
)

from rl.sampler import Engine, linear_layers, make_decoder

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
WIDE = dict(hidden_size=256, intermediate_size=512, head_dim=32, vocab_size=2000)
WIDE["num_hidden_layers"] = 1


def make_wide_model(kind="qwen3"):
    """Return a model with gate_up and head matrices large enough for the layout."""
    return tiny_model(kind, **WIDE)


def answer(decoder, prompt=(4, 9, 2)):
    (response,) = run_requests(Engine(decoder), [make_request(list(prompt), 3, max_tokens=6)])
    return response.sequences


@pytest.mark.parametrize("rows", [(1,), (3,), (64,), (130,), (2, 70)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_float64s(rows, biased):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*rows, 600, generator=g), torch.randn(700, 600, generator=g)
    bias = torch.randn(700, generator=g) if biased else None
    with torch.inference_mode():
        result = linear_layers.packed_linear(x, linear_layers.get_layout(weight)[1], bias)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    bound = 600 * 2.0**-24 * (x.double().abs() @ weight.double().abs().t() + 4)
    assert result.dtype == torch.float32 and bool(((result.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_a_wide_model_samples_what_transformers_scores(kind, monkeypatch):
    calls, product = [], linear_layers.packed_linear
    monkeypatch.setattr(
        linear_layers, "packed_linear", lambda *inputs: calls.append(product(*inputs)) or calls[-1]
    )
    model = make_wide_model(kind)
    for sequence in answer(make_decoder(model, kind="fast")):
        check_logprobs(model, [4, 9, 2], sequence, atol=2e-4)
    assert calls


def test_weights_that_are_loaded_in_place_are_the_next_products():
    model = make_wide_model()
    decoder = make_decoder(model, kind="fast")
    before = answer(decoder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    with torch.inference_mode():
        decoder.load_(model.named_parameters())
    after = answer(decoder)
    assert after != before and after == answer(make_decoder(model, kind="fast"))


def test_forks_share_the_layout_of_what_they_share():
    """Versions of an adapter share a base: each has separate adapters, and the base's matrices are
    copied to the layout once.
    """
    decoder = make_decoder(add_lora(make_wide_model(), ["q_proj", "down_proj"]), kind="fast")
    answer(decoder)
    held = len(linear_layers._layouts)
    other = decoder.fork()
    assert answer(other) == answer(decoder) and len(linear_layers._layouts) == held
    del decoder, other
    assert len(linear_layers._layouts) < held


def test_small_low_and_large_matrices_stay_as_they_are(monkeypatch):
    small, large = torch.zeros(8, 8), torch.zeros(512, 512)
    assert linear_layers.get_layout(small) is None
    assert linear_layers.get_layout(large.bfloat16()) is None
    with torch.inference_mode():
        assert (
            linear_layers.get_layout(torch.zeros(512, 512)) is None
        )  # changes of inference tensors are not counted
    assert linear_layers.fits_budget([large, small])
    assert not linear_layers.fits_budget([small])
    assert not linear_layers.fits_budget([])
    monkeypatch.setattr(linear_layers, "MAX_BYTES", large.nbytes)
    assert linear_layers.fits_budget([large]) and not linear_layers.fits_budget([large, large])
    assert not make_decoder(make_wide_model(), kind="fast").head.may_pack


def test_the_plan_counts_what_is_held_twice():
    """The bytes of the layouts that a decoder made; 0 on a GPU, in bfloat16, or above the limit."""
    # the module, for names that the package does not export
    plan = import_module("rl.memory_plan.byte_counts")
    model = make_wide_model()
    c = model.config
    shape = plan.ModelShape(
        name="x", fast=True, hidden=c.hidden_size, heads=c.num_attention_heads,
        key_heads=c.num_key_value_heads, head_width=c.head_dim, layers=c.num_hidden_layers,
        mlp=c.intermediate_size, vocab=c.vocab_size, parameters=0, trainable=0, adapters=0, small=0,
        largest=0, max_context=None, windowed=False,
    )  # fmt: skip
    decoder = make_decoder(model, kind="fast")
    held = sum(
        item.weight.nbytes
        for layer in decoder.layers
        for item in (layer.qkv, layer.out, layer.gate_up, layer.down, decoder.head)
        if item.may_pack and item.weight.numel() >= linear_layers.MIN_ELEMENTS
    )
    launch = plan.LaunchShape(cuda=False, bf16=False, world=1, per_node=1)
    assert held > 0 and plan.packed_copy_bytes(shape, launch) == held
    limits = (plan.PACKED_MIN_SIZE, plan.PACKED_MAX_SIZE)
    assert limits == (linear_layers.MIN_ELEMENTS, linear_layers.MAX_BYTES)
    for changes in ({"bf16": True}, {"cuda": True}):
        assert plan.packed_copy_bytes(shape, replace(launch, **changes)) == 0
    assert plan.packed_copy_bytes(replace(shape, layers=2000), launch) == 0
