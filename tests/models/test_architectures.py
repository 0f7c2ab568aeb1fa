"""Test the learner on tiny models of many architectures: every layout gives the result of a forward
over a single sequence, or is refused by name.
"""

import contextlib
import copy
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import gather_targets
from tiny_models import VOCAB, tiny_model

from rl import ServiceClient
from rl.errors import UserError
from rl.layers import get_config_number, get_hidden_size
from rl.learner import Learner, LearnerSettings
from rl.losses import CUSTOM_VALUE_LOSS, get_loss
from rl.models import add_lora, model_loading
from rl.rollout import Trajectory, Transition, trajectory_to_datums
from rl.types import Datum, LoraConfig, ModelInput, SamplingParams, find_length_limit

LAYOUTS = ("auto", "padded", "packed", "shared")
# Per architecture: (config changes, exact layouts), as its layers suggest. Windows are 40 tokens,
# longer than the probe reaches.
ALL, NO_MASK, ROWS = {"padded", "packed", "shared"}, {"padded", "packed"}, {"padded"}
KINDS: dict[str, tuple[dict, set[str]]] = {
    "gpt2": ({}, ALL),
    "llama": ({}, ALL),
    "qwen2": ({}, ALL),
    "mixtral": ({"sliding_window": None}, ALL),
    # sliding window: transformers applies a passed mask unchanged, so the window would be lost
    "mistral": ({}, NO_MASK),
    "gemma2": ({}, NO_MASK),
    "llama4_text": ({}, NO_MASK),  # chunked attention
    "lfm2": ({}, ROWS),  # convolutions
    "qwen3_next": ({}, ROWS),  # linear attention: its state crosses sequence boundaries
    "gpt_neo": ({}, ROWS),  # local layers, with the window in a buffer
    "opt": ({}, {"padded", "shared"}),  # positions do not separate sequences
    "bloom": ({}, ROWS),  # ALiBi
    "falcon_h1": ({}, ROWS),
    "mpt": ({}, ROWS),  # its config calls the width d_model
}
EAGER = "gpt2 llama qwen2 mixtral mistral gemma2 gptj codegen lfm2 qwen3_next llama4_text".split()


SHORT_PAIRS = ((9, (7, 5)), (4, (3, 12)))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_fake_accelerator(bf16: bool = False):
    """Return a stand-in for the parts of accelerate's Accelerator that a single-process learner
    uses. The real class allows only a single precision per process.
    """
    kind = types.SimpleNamespace(value="NO")
    autocast = (lambda: torch.autocast("cpu", torch.bfloat16)) if bf16 else contextlib.nullcontext
    return types.SimpleNamespace(
        device=torch.device("cpu"), distributed_type=kind, autocast=autocast
    )


def make_learner(model, *, bf16: bool = False, **settings) -> Learner:
    loaded = model_loading.LoadedModel(
        model_loading._disable_randomness(copy.deepcopy(model)), None, "tiny", ()
    )
    return Learner(
        loaded, make_fake_accelerator(bf16), LearnerSettings(**{"token_budget": 300, **settings})
    )


def make_datums(groups=((24, (20, 8, 46)), (6, (6, 48)), (50, (1,))), seed: int = 5) -> list[Datum]:
    """Return answers to prompts of these lengths; most are longer than a window."""
    rng, results = np.random.default_rng(seed), []
    for length, answers in groups:
        prompt = rng.integers(3, VOCAB, length).tolist()
        for n in answers:
            tokens = prompt + rng.integers(3, VOCAB, n).tolist()
            weights = np.concatenate([np.zeros(length - 1), rng.uniform(0.2, 1.0, n)]).astype(
                np.float32
            )
            results.append(
                Datum(
                    ModelInput.from_ints(tokens[:-1]),
                    {"target_tokens": tokens[1:], "weights": weights},
                )
            )
    return results


def compute_plain_logprobs(model, data):
    """Return the logprobs and the gradient of the weighted sum from the plain model: one sequence
    per forward, no padding, no mask.
    """
    model.zero_grad()
    logprobs = []
    for datum in data:
        ids = torch.tensor([datum.model_input.to_ints()])
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
        logp = gather_targets(logits.log_softmax(-1), datum)
        (-(logp * torch.from_numpy(datum.loss_fn_inputs["weights"].array)).sum()).backward()
        logprobs.append(logp.detach().numpy())
    return np.concatenate(logprobs), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def run_learner(learner, data):
    learner.drop_gradients()
    outputs, _ = learner.run(
        data, get_loss("cross_entropy"), {}, temperature=1.0, divisor=1.0, backward=True
    )
    return np.concatenate([outputs[i]["logprobs"] for i in range(len(data))])


def gradient_error(learner, gradient) -> float:
    results = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in learner.trainable.items()
    }
    off = sum(float((results[n] - g).double().square().sum()) for n, g in gradient.items())
    return (off / sum(float(g.double().square().sum()) for g in gradient.values())) ** 0.5


def model_of(name: str, attention: str | None = None):
    model = model_loading._disable_randomness(tiny_model(name, **KINDS.get(name, ({}, ALL))[0]))
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def check_every_layout(model, takes: set[str]) -> None:
    data = make_datums()
    logprobs, gradient = compute_plain_logprobs(model, data)
    for layout in LAYOUTS:
        if layout != "auto" and layout not in takes:
            refused = rf"layout {layout} is not exact for tiny \({type(model).__name__}\): "
            with pytest.raises(UserError, match=refused):
                make_learner(model, layout=layout)
            continue
        learner = make_learner(model, layout=layout)
        np.testing.assert_allclose(run_learner(learner, data), logprobs, atol=1e-4, err_msg=layout)
        assert gradient_error(learner, gradient) < 1e-4, layout


def make_params(names, quick):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


QUICK = ("llama", "mixtral", "mistral", "lfm2", "gpt_neo", "llama4_text", "mpt")


@pytest.mark.parametrize("name", make_params(KINDS, QUICK))
def test_a_layout_is_exact_or_refused(name):
    check_every_layout(model_of(name), KINDS[name][1])


@pytest.mark.parametrize(
    "name",
    ["gpt2", "mpt", "xglm", "bart", "opt", "xlm", "falcon_mamba", "dbrx", "whisper", "bloom"],
)
def test_width_and_length_are_read_by_whatever_name_a_config_has_for_them(name):
    """Width and length agree with the embeddings; a number that means "no limit" is ignored."""
    model = model_of(name)
    assert get_hidden_size(model) == model.get_input_embeddings().weight.shape[-1]
    limit = get_config_number(
        model, "max_position_embeddings", "n_positions", "max_target_positions"
    )
    places = [
        module
        for place, module in model.named_modules()
        if place.endswith(("wpe", "embed_positions", "position_embeddings"))
    ]
    assert limit is None or all(
        limit <= module.weight.shape[0] for module in places if hasattr(module, "weight")
    )


@pytest.mark.parametrize("name", make_params(sorted(EAGER), ("llama", "gptj")))
def test_a_layout_is_exact_or_refused_with_eager_attention(name):
    """Eager attention adds its mask."""
    check_every_layout(model_of(name, "eager"), KINDS.get(name, ({}, ALL))[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "mistral", "gemma2", "lfm2", "qwen3_next", "gpt_neo", "mixtral"]
)
def test_a_layout_under_bf16_is_no_further_off_than_the_model_alone(name):
    """The test compares root mean squares: an expert that changes through rounding moves a single
    token by as much as a leak would.
    """
    model, data = model_of(name), make_datums()
    exact, _ = compute_plain_logprobs(model, data)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = compute_plain_logprobs(model, data)
    spread = float(np.sqrt(np.mean((rounded - exact) ** 2)))
    assert spread > 1e-3
    for layout in ("auto", *sorted(KINDS[name][1])):
        result = run_learner(make_learner(model, bf16=True, layout=layout), data)
        assert float(np.sqrt(np.mean((result - exact) ** 2))) < 2 * spread, layout


# --------------------------------------------------------------------------------------- randomness

RANDOM = {
    "starcoder2": {"residual_dropout": 0.5, "embedding_dropout": 0.5, "attention_dropout": 0.5},
    "gpt_bigcode": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "bloom": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "opt": {"layerdrop": 0.5, "dropout": 0.5},
    "mixtral": {"router_jitter_noise": 0.5},
}


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_nothing_is_random_under_gradient_checkpointing(name):
    model = tiny_model(name, **RANDOM[name])
    data = make_datums(SHORT_PAIRS)
    logprobs, gradient = compute_plain_logprobs(copy.deepcopy(model).eval(), data)
    learner = make_learner(model, gradient_checkpointing=True)
    assert learner.model.training  # otherwise nothing is checkpointed
    for _ in range(2):
        np.testing.assert_allclose(run_learner(learner, data), logprobs, atol=1e-4)
        assert gradient_error(learner, gradient) < 1e-4


@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_phi_moe_is_not_changed_by_turning_noise_off_and_its_training_mode_is_refused(noise):
    """Its `router_jitter_noise` acts as a threshold in evaluation too, and in training mode its
    experts are sampled.
    """
    model = tiny_model("phimoe", router_jitter_noise=noise, sliding_window=None)
    data = make_datums(SHORT_PAIRS)
    logprobs, _ = compute_plain_logprobs(copy.deepcopy(model), data)
    np.testing.assert_allclose(
        run_learner(make_learner(model, layout="padded"), data), logprobs, atol=1e-4
    )
    with pytest.raises(UserError, match="PhimoeForCausalLM.*training mode"):
        make_learner(model, gradient_checkpointing=True)


def test_a_model_without_gradient_checkpointing_is_refused():
    model = model_of("llama")
    type(model).supports_gradient_checkpointing, before = (
        False,
        type(model).supports_gradient_checkpointing,
    )
    try:
        with pytest.raises(UserError, match="has no gradient checkpointing"):
            make_learner(model, gradient_checkpointing=True)
    finally:
        type(model).supports_gradient_checkpointing = before


# ---------------------------------------------------------------------------- changes to the logits


@pytest.mark.parametrize("fused", [True, False])
def test_a_softcap_that_bends_the_logits_is_the_models_own(fused):
    """Use a cap of the size of the logits: a tiny model's logits are far below the usual 30."""
    model, data = model_of("gemma2"), make_datums(((5, (4, 9)), (3, (6,))))
    model.config.final_logit_softcapping = 0.05
    logprobs, gradient = compute_plain_logprobs(model, data)
    learner = make_learner(model, fused=fused)
    # the fused head passes its probe with this softcap, so it stays on
    assert learner.head.fused == fused
    np.testing.assert_allclose(run_learner(learner, data), logprobs, atol=1e-5)
    assert gradient_error(learner, gradient) < 1e-4
    model.config.final_logit_softcapping = None
    assert np.abs(compute_plain_logprobs(model, data)[0] - logprobs).max() > 1e-2


# -------------------------------------------------------------- frequencies and the length of a row


def make_longrope_model(name: str = "phi3"):
    rng = np.random.default_rng(0)
    factors = {
        "short_factor": rng.uniform(1, 2, 4).tolist(),
        "long_factor": rng.uniform(3, 9, 4).tolist(),
    }
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        **factors,
    }
    return model_loading._disable_randomness(
        tiny_model(
            name, rope_parameters=rope, sliding_window=None, original_max_position_embeddings=32
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_longest_row_does_not_choose_the_frequencies_of_others(layout):
    """Rows of 31, 32 (the original length), 33 and more tokens in one call, and one prompt with
    answers on both sides of that length.
    """
    model, data = (
        make_longrope_model(),
        make_datums(((20, (8, 12, 13, 14, 40)), (3, (5,)), (31, (2, 1, 3)))),
    )
    assert {32, 33} <= {d.model_input.length for d in data}
    logprobs, gradient = compute_plain_logprobs(model, data)
    learner = make_learner(model, layout=layout)
    np.testing.assert_allclose(run_learner(learner, data), logprobs, atol=1e-4)
    assert gradient_error(learner, gradient) < 1e-4


def pair_of(prompt: int, chosen: int, rejected: int, seed: int) -> list[Datum]:
    """Return a preference pair, the better answer first: random tokens of these lengths, with
    random reference logprobs.
    """
    results = []
    for datum in make_datums(((prompt, (chosen, rejected)),), seed):
        mask = (datum.loss_fn_inputs["weights"].array != 0).astype(np.float32)
        reference = mask * np.random.default_rng(seed).uniform(-3.5, -2.5, len(mask)).astype(
            np.float32
        )
        fields = {
            "target_tokens": datum.loss_fn_inputs["target_tokens"],
            "mask": mask,
            "ref_logprobs": reference,
        }
        results.append(Datum(datum.model_input, fields))
    return results


# Lengths of prompt, chosen and rejected: both sequences below 32 tokens, on different sides in
# either order, exactly 32, and both beyond.
PAIRS = [(20, 8, 40), (20, 40, 8), (12, 5, 9), (30, 3, 4), (6, 27, 48), (40, 9, 3)]


def dpo_alone(model, pairs, beta: float = 0.1):
    """Compute DPO's loss in float64, one sequence per forward. Return its sum over pairs, the
    logprobs of each datum, and the gradient.
    """
    model.zero_grad()
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for pair in pairs:
        sums = []
        for datum in pair:
            fields = {
                name: torch.from_numpy(data.array) for name, data in datum.loss_fn_inputs.items()
            }
            logits = (
                model(input_ids=torch.tensor([datum.model_input.to_ints()]), use_cache=False)
                .logits[0]
                .double()
            )
            logp = logits.log_softmax(-1).gather(-1, fields["target_tokens"][:, None])[:, 0]
            sums.append(((logp - fields["ref_logprobs"]) * fields["mask"]).sum())
            logprobs.append(logp.detach().numpy())
        total = total - torch.nn.functional.logsigmoid(beta * (sums[0] - sums[1]))
    total.backward()
    return (
        float(total.detach()),
        logprobs,
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layout": "shared"},
        {"fused": False},
        {"token_budget": 30},
        {"gradient_checkpointing": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.items())) or "auto",
)
def test_a_pair_on_both_sides_of_the_original_length_is_learnt_by_the_frequencies_of_each_answer(
    settings,
):
    model, pairs = (
        make_longrope_model(),
        [pair_of(*lengths, seed) for seed, lengths in enumerate(PAIRS)],
    )
    loss, logprobs, gradient = dpo_alone(model, pairs)
    learner = make_learner(model, **settings)
    flat = [datum for pair in pairs for datum in pair]
    outputs, sums = learner.run(
        flat, get_loss("dpo"), {"beta": 0.1}, temperature=1.0, divisor=1.0, backward=True
    )
    assert sums["loss:sum"] == pytest.approx(loss, abs=1e-4) and sums["pairs:sum"] == len(PAIRS)
    for i, expected in enumerate(logprobs):
        np.testing.assert_allclose(outputs[i]["logprobs"], expected, atol=1e-4, err_msg=str(i))
    assert gradient_error(learner, gradient) < 1e-4


def test_the_parts_of_such_a_call_are_the_whole():
    flat = [datum for seed, lengths in enumerate(PAIRS) for datum in pair_of(*lengths, seed)]
    whole, parts = (make_learner(make_longrope_model(), token_budget=120) for _ in range(2))
    options = {"temperature": 1.0, "divisor": 1.0, "backward": True}
    outputs, sums = whole.run(flat, get_loss("dpo"), {}, **options)
    number, total, results = 0, 0.0, {}
    while number == 0 or number < parts.num_micro_batches:
        rows, metrics = parts.run(flat, get_loss("dpo"), {}, micro_batch=number, **options)
        number, total, results = number + 1, total + metrics["loss:sum"], results | rows
    assert number > 1 and total == sums["loss:sum"] and results.keys() == outputs.keys()
    assert all(np.array_equal(results[i]["logprobs"], outputs[i]["logprobs"]) for i in outputs)
    assert all(
        torch.equal(p.grad, parts.trainable[name].grad) for name, p in whole.trainable.items()
    )


def test_rewards_of_such_a_pair_are_those_of_each_answer_alone():
    """Bradley-Terry reads the value head at the last position of each answer."""
    pairs = [pair_of(*lengths, seed) for seed, lengths in enumerate(PAIRS)]
    loaded = model_loading.add_value_head(
        model_loading.LoadedModel(make_longrope_model(), None, "tiny", ())
    )
    learner = Learner(loaded, make_fake_accelerator(False), LearnerSettings(token_budget=300))
    with torch.no_grad():
        for name in learner.value_head_names:
            head = learner.trainable[name]
            head.add_(torch.randn(head.shape, generator=torch.Generator().manual_seed(1)))
    bare = [
        [
            Datum(d.model_input, {k: d.loss_fn_inputs[k] for k in ("target_tokens", "mask")})
            for d in pair
        ]
        for pair in pairs
    ]
    options = {"temperature": 1.0, "divisor": 1.0, "backward": False}
    flat = [datum for pair in bare for datum in pair]
    scores = [
        float(learner.run([d], CUSTOM_VALUE_LOSS, {}, **options)[0][0]["values"][-1]) for d in flat
    ]
    outputs, sums = learner.run(flat, get_loss("bradley_terry"), {}, **options)
    margins = np.array(scores[0::2]) - np.array(scores[1::2])
    assert sums["loss:sum"] == pytest.approx(np.log1p(np.exp(-margins)).sum(), rel=1e-5)
    assert [outputs[i]["values"][-1] for i in range(len(flat))] == pytest.approx(scores, abs=1e-5)


def test_an_episode_that_grows_past_the_original_length_is_scored_as_it_was_drawn(tmp_path):
    """Turns of 20 and 29 tokens lie before the original length, turns of 35 and 44 beyond it. They
    give two datums, each scored with the frequencies that sampled its answers.
    """
    make_longrope_model().save_pretrained(tmp_path / "model")
    rng, read, turns = np.random.default_rng(4), [], []
    with ServiceClient(output_dir=tmp_path / "out") as service:
        client = service.create_full_training_client(str(tmp_path / "model"))
        sampler = client.save_weights_and_get_sampling_client()
        limits = [find_length_limit(sampler.info, length)[0] for length in (32, 33)]
        assert limits == [32, sampler.info["max_context"]]
        for new in (20, 6, 6, 6):
            read = read + rng.integers(3, 40, new).tolist()
            params = SamplingParams(max_tokens=3, stop=[0])
            response = sampler.sample(ModelInput.from_ints(read), 1, params).result()
            (drawn,) = response.sequences
            turns.append(Transition(ModelInput.from_ints(read), drawn, 0.0, False))
            read = read + drawn.tokens
        actual = trajectory_to_datums(Trajectory(turns, advantage=1.0))
        lengths = [len(turns[1].ob.to_ints()) + 2, len(read) - 1]
        assert [d.model_input.length for d in actual] == lengths
        outputs = client.forward(actual, "importance_sampling").result().loss_fn_outputs
    for datum, output in zip(actual, outputs, strict=True):
        acted = datum.loss_fn_inputs["mask"].array != 0
        drawn = datum.loss_fn_inputs["logprobs"].array
        np.testing.assert_allclose(output["logprobs"].array[acted], drawn[acted], atol=1e-3)
    short = [replace(turn, ac=replace(turn.ac, beyond=False)) for turn in turns]
    (first,) = trajectory_to_datums(Trajectory(short, advantage=1.0))
    # as a single datum, the first answers would be scored with the long frequencies
    assert first.model_input.length == len(read) - 1


def test_rows_beyond_the_length_of_dynamic_frequencies_are_an_error():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    learner = make_learner(tiny_model("llama", rope_parameters=rope, max_position_embeddings=32))
    run_learner(learner, make_datums(((20, (8, 13)),)))
    with pytest.raises(
        ValueError, match="33 tokens is longer than this model.s original context of 32,.*dynamic"
    ):
        run_learner(learner, make_datums(((20, (8, 14)),)))


# ------------------------------------------------------------ the share of weights that LoRA adapts


def test_lora_says_which_share_it_leaves_out():
    loaded = model_loading.LoadedModel(tiny_model("qwen3_moe"), None, "tiny", ())
    sizes = {name: p.numel() for name, p in loaded.model.named_parameters()}
    left_out = (".experts.", "mlp.gate.weight")
    share = sum(n for name, n in sizes.items() if any(part in name for part in left_out))
    share /= sum(sizes.values())
    with pytest.warns(UserWarning, match=f"{share:.0%} of the weights of tiny"):
        assert add_lora(loaded, LoraConfig(rank=2)).unadapted_share == pytest.approx(share)
    assert share > 0.3


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_lora_on_a_dense_model_leaves_nothing_out(name):
    loaded = model_loading.LoadedModel(tiny_model(name), None, "tiny", ())
    assert add_lora(loaded, LoraConfig(rank=2)).unadapted_share == 0


def test_lora_on_experts_alone_is_an_error():
    loaded = model_loading.LoadedModel(tiny_model("qwen3_moe"), None, "tiny", ())
    with pytest.raises(UserError, match="no adapter for experts.*train_attn"):
        add_lora(loaded, LoraConfig(rank=2, train_attn=False, train_unembed=False))
