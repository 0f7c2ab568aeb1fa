"""Test LoRA on experts that are stored as one tensor: which models support it, gradients, sampling,
checkpoints, and reading by plain PEFT.
"""

import copy
import warnings

import numpy as np
import pytest
import torch
from helpers import gather_targets
from test_architectures import (  # noqa: F401  (a fixture)
    SHORT_PAIRS,
    make_datums,
    make_fake_accelerator,
    make_learner,
    make_params,
    one_thread,
    run_learner,
)
from tiny_models import VOCAB, tiny_model
from torch.func import functional_call

from rl.errors import UserError
from rl.learner import Learner, LearnerSettings, ModelSpec, learner_checkpoint
from rl.losses import get_loss
from rl.models import add_lora, load_model, merge_adapter, model_loading
from rl.sampler import Engine, SamplingRequest, make_decoder
from rl.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

RANK, ALPHA = 2, 3.0
CHANGES = {name: {"sliding_window": None} for name in ("qwen3_moe", "mixtral")}
STACKED = (
    "afmoe aria_text axk1 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 "
    "deepseek_v32 deepseek_v4 dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe "
    "glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoehybrid hunyuan_v1_moe "
    "hy_v3 inkling_text jamba jetmoe kimi_linear lfm2_moe llama4_text longcat_flash "
    "mimo_v2_flash minimax minimax_m2 mixtral nemotron_h olmoe phimoe qwen2_moe "
    "qwen3_5_moe_text qwen3_moe qwen3_next solar_open zaya"
).split()
QUICK = ("mixtral", "gpt_oss", "deepseek_v3")
# Models that go through to the sampler and back.
THROUGH = "mixtral qwen3_moe gpt_oss deepseek_v3 glm4_moe qwen3_next llama4_text jetmoe".split()


def base_of(name: str, **changes):
    return model_loading._disable_randomness(tiny_model(name, **CHANGES.get(name, {}), **changes))


def make_adapted_model(base, moved: bool = True, **parts):
    """Return a copy of the model with an adapter that has a nonzero B."""
    requests = {**dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), False), **parts}
    lora = LoraConfig(RANK, 0, alpha=ALPHA, train_experts=True, **requests)
    loaded = model_loading.LoadedModel(copy.deepcopy(base), None, "tiny", ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = add_lora(loaded, lora).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if moved and "lora_B" in name:
                parameter.normal_(0, 0.2, generator=generator)
    return model.eval()


def pairs(model):
    """Yield (the base's parameter, A's name, B's name, whether it is [experts, in, out]) for every
    tensor of experts that has an adapter.
    """
    from peft.tuners.lora.layer import ParamWrapper

    names = {id(p): n for n, p in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            parts = module.lora_A["default"].weight, module.lora_B["default"].weight
            yield (
                module.get_param(),
                *(names[id(p)] for p in parts),
                bool(getattr(module.get_base_layer(), "is_transposed", False)),
            )


def in_float64(base, model):
    """Return the base in float64, the adapter's tensors, and a function of them that computes the
    weights: expert e has W_e + alpha / rank * B_e A_e.
    """
    wide = copy.deepcopy(base).double()
    wide.set_experts_implementation("eager")  # the other implementations do not support float64
    leaves = {
        n: p.detach().double().requires_grad_()
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    local = {id(p): plain_name(n) for n, p in model.named_parameters()}

    def weights():
        results = dict(wide.named_parameters())
        for parameter, a, b, turned in pairs(model):
            name = local[id(parameter)]
            for e in range(1, 1 + len(parameter)):
                # [rank, in]: an expert's rows are contiguous.
                down = leaves[a][(e - 1) * RANK : e * RANK]
                # [out, rank]: an expert's columns are interleaved with those of the others, a
                # column per rank.
                up = leaves[b][:, e - 1 :: len(parameter)]
                delta = ALPHA / RANK * (up @ down)
                parts = [*results[name].unbind(0)]
                parts[e - 1] = parts[e - 1] + (delta.T if turned else delta)
                results = {**results, name: torch.stack(parts)}
        return results

    return wide, leaves, weights


def reference(base, model, data):
    """Return logprobs, and the gradients of the weighted sum at A and B, with a forward per
    sequence and without PEFT.
    """
    wide, leaves, weights = in_float64(base, model)
    made, logprobs = weights(), []
    total = torch.zeros((), dtype=torch.float64)
    for datum in data:
        ids = torch.tensor([datum.model_input.to_ints()])
        logits = functional_call(wide, made, (), {"input_ids": ids, "use_cache": False}).logits[0]
        logp = gather_targets(logits.log_softmax(-1), datum)
        total = total - (logp * torch.from_numpy(datum.loss_fn_inputs["weights"].array)).sum()
        logprobs.append(logp.detach().numpy())
    total.backward()
    return np.concatenate(logprobs), {name: leaf.grad for name, leaf in leaves.items()}


def plain_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer", "").removeprefix("base_model.model.")


def forward(model, rows: int = 2, length: int = 12):
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, VOCAB, (rows, length)))
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("name", make_params(STACKED, QUICK))
def test_every_stack_of_experts_has_an_adapter_that_is_seen_and_merges(name):
    base = base_of(name)
    model = make_adapted_model(base)
    names = {id(p): plain_name(n) for n, p in model.named_parameters()}
    stacks = {
        n
        for n, p in base.named_parameters()
        if p.ndim == 3 and len(p) > 1 and (".experts." in n or "put_linear.weight" in n)
    }
    assert {names[id(p)] for p, *_ in pairs(model)} == stacks and len(stacks) > 1
    with torch.no_grad():
        before, merged = forward(base), forward(merge_adapter(copy.deepcopy(model)))
    logits = forward(model)
    assert float((logits.detach() - before).abs().max()) > 1e-2
    torch.testing.assert_close(logits, merged, atol=2e-5, rtol=1e-4)
    logits.square().sum().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if name == "longcat_flash":  # all tokens may go to its experts that compute nothing
        trained = {n: p for n, p in trained.items() if p.grad is not None}
        assert len(trained) <= 2 * len(stacks)
    else:
        assert len(trained) == 2 * len(stacks)
    assert all("lora_" in n and p.grad.abs().max() > 0 for n, p in trained.items())


@pytest.mark.parametrize("layout", ["auto", "padded"])
@pytest.mark.parametrize("name", make_params(THROUGH, ("mixtral", "gpt_oss")))
def test_the_learner_has_the_gradient_of_float64(name, layout):
    """The reference has weights that are put together by hand from A and B."""
    base = base_of(name)
    model, data = make_adapted_model(base), make_datums(SHORT_PAIRS)
    logprobs, gradient = reference(base, model, data)
    learner = make_learner(model, layout=layout)
    np.testing.assert_allclose(run_learner(learner, data), logprobs, atol=1e-4)
    assert gradient.keys() == learner.trainable.keys()
    for key, expected in gradient.items():
        result = learner.trainable[key].grad.double()
        assert float((result - expected).norm()) < 1e-4 * float(expected.norm()), key


def test_checkpointed_layers_have_the_same_gradient():
    model = make_adapted_model(base_of("qwen3_moe"), train_attn=True)
    data = make_datums(((9, (7, 5)),))
    plain, again = make_learner(model), make_learner(model, gradient_checkpointing=True)
    np.testing.assert_array_equal(run_learner(plain, data), run_learner(again, data))
    for key, parameter in plain.trainable.items():
        torch.testing.assert_close(
            again.trainable[key].grad, parameter.grad, atol=1e-6, rtol=1e-5, msg=key
        )


@pytest.mark.parametrize("name", make_params(THROUGH, ("qwen3_moe",)))
def test_it_is_sampled_with_saved_read_by_plain_peft_and_gone_on_with(name, tmp_path):
    from peft import PeftModel

    base_of(name).save_pretrained(tmp_path / "base")
    spec = ModelSpec(
        str(tmp_path / "base"),
        lora=LoraConfig(RANK, 0, alpha=ALPHA, train_unembed=False, train_experts=True),
    )

    def made():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = add_lora(load_model(spec.base_model), spec.lora)
        return Learner(loaded, make_fake_accelerator(), LearnerSettings(token_budget=300))

    def updates(learner, steps):
        for step in steps:
            run_learner(learner, make_datums(SHORT_PAIRS, seed=step))
            learner.step(AdamParams(learning_rate=0.05))

    learner, metadata = made(), learner_checkpoint.SaveMetadata({})
    updates(learner, range(2))
    states = [torch.get_rng_state()]
    learner_checkpoint.save_learner_state(learner, spec, tmp_path / "state", states, metadata, None)
    updates(learner, range(2, 4))
    learner_checkpoint.save_sampler_weights(
        learner, spec, tmp_path / "adapter", False, None, False, metadata
    )

    other = made()
    learner_checkpoint.load_learner_state(other, tmp_path / "state", True, 0)
    updates(other, range(2, 4))
    for key, parameter in learner.trainable.items():
        assert torch.equal(parameter, other.trainable[key]), key  # same bits

    plain = type(base_of(name)).from_pretrained(str(tmp_path / "base"))
    plain = model_loading._disable_randomness(plain)
    with torch.no_grad():
        before = forward(plain)
        reread = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
        result, local = forward(reread), forward(learner.model.eval())
    assert float((result - local).abs().max()) < 1e-5 < 1e-2 < float((result - before).abs().max())

    decoder = make_decoder(made().model)  # the initial model, then the trained weights
    decoder.load_(learner.iter_weights())
    engine = Engine(decoder, eos_token_ids=(2,), max_rows=3)
    prompts = [[5, 9, 4, 7, 11], [6, 3]]
    params = SamplingParams(max_tokens=8, temperature=0.7)
    for i, prompt in enumerate(prompts):
        engine.add(SamplingRequest(prompt=prompt, num_samples=3, params=params, problem=i))
    sequences, scored = [], []
    for prompt, response in zip(prompts, engine.run(), strict=True):
        for sequence in response.sequences:
            tokens = [*prompt, *sequence.tokens]
            fields = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
            scored.append(Datum(ModelInput.from_ints(tokens[:-1]), fields))
            sequences.append(sequence)
    options = {"temperature": 0.7, "divisor": 1.0, "backward": False}
    outputs, _ = learner.run(scored, get_loss("cross_entropy"), {}, **options)
    for i, sequence in enumerate(sequences):
        logprobs = outputs[i]["logprobs"][-len(sequence.tokens) :]
        np.testing.assert_allclose(logprobs, sequence.logprobs, atol=1e-4)


# --------------------------------------------------------------------------------- errors and notes


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama", "train_experts is for models with experts, and this model has none: turn it off"),
        ("dbrx", "PEFT has no adapter for these experts .*ffn.experts holds them in no tensor"),
    ],
)
def test_a_model_without_such_experts_is_refused(name, why):
    with pytest.raises(UserError, match=why):
        make_adapted_model(tiny_model(name, large=False))


def test_experts_that_are_linear_layers_are_left_to_train_mlp():
    base = tiny_model("qwen3_moe", large=False)
    for layer in base.model.layers:
        layer.mlp.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({"up": torch.nn.Linear(4, 4)}) for _ in range(4)
        )
    with pytest.raises(UserError, match="linear layers, which train_mlp adapts"):
        make_adapted_model(base)


def test_the_share_without_an_adapter_is_that_of_the_routers():
    base = base_of("qwen3_moe")
    sizes = {n: p.numel() for n, p in base.named_parameters()}
    routers = sum(size for n, size in sizes.items() if n.endswith("mlp.gate.weight"))
    routers /= sum(sizes.values())
    loaded, other = (
        model_loading.LoadedModel(model, None, "tiny", ()) for model in (base, copy.deepcopy(base))
    )
    with pytest.warns(UserWarning, match="--train-experts adds adapters to them"):
        add_lora(other, LoraConfig(RANK))
    assert routers < 0.02
    share = add_lora(loaded, LoraConfig(RANK, train_experts=True)).unadapted_share
    assert share == pytest.approx(routers)
