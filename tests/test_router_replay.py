"""Router replay: what the sampler notes of its experts, and that a learner given them routes, learns and scores by them."""

import copy

import numpy as np
import pytest
import torch
from test_architectures import datums, learnt, make_learner
from whole_runs import train, two_and_two

from bench.tiny_models import VOCAB, tiny_model
from rl.episodes import trajectory_to_datums
from rl.episodes.episode import Trajectory, Transition
from rl.errors import UserError
from rl.layers import describe, given, noted
from rl.models import load
from rl.sampler import Request, RoutedEngine, make_decoder, note_experts
from rl.types import Datum, ModelInput, SampledSequence, SamplingParams


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(name: str = "qwen3_moe", **changes):
    return load._prepared(tiny_model(name, **({"sliding_window": None} if name in ("qwen3_moe", "mixtral") else {}), **changes))


def own_choices(model, tokens) -> np.ndarray:
    """[tokens, blocks * experts a token] of a plain forward."""
    with torch.no_grad(), noted(model, describe(model).experts) as chosen:
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return chosen().flatten(1).numpy()


def sampled(model, dtype=None, samples: int = 3):
    """Prompts of three lengths, few rows at once, so that rows enter late and leave early: (prompt, sequence) of each sample."""
    decoder = make_decoder(model, dtype=dtype)
    note_experts(decoder)
    engine = RoutedEngine(decoder, eos_token_ids=(1, 2, 3), max_rows=4)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in (5, 11, 2)]
    for i, prompt in enumerate(prompts):
        engine.add(Request(prompt=prompt, num_samples=samples, params=SamplingParams(max_tokens=8 + i), problem=i))
    return [(p, sequence) for p, response in zip(prompts, engine.run(), strict=True) for sequence in response.sequences]


def datum_of(prompt, sequence) -> Datum:
    (found,) = trajectory_to_datums(Trajectory([Transition(ModelInput.from_ints(prompt), sequence, 0.0, True)], advantage=1.0))
    weights = found.loss_fn_inputs["mask"]
    return Datum(found.model_input, {"target_tokens": found.loss_fn_inputs["target_tokens"], "weights": weights}, experts=found.experts)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "deepseek_v3", "qwen3_next", "llama4_text")]


@pytest.mark.parametrize("name", ["qwen3_moe", *SLOW])
def test_what_is_noted_of_a_sample_is_what_its_finished_sequence_chooses(name):
    model = model_of(name)
    found = sampled(model)
    assert len({len(sequence.tokens) for _, sequence in found}) > 2
    for prompt, sequence in found:
        experts = np.sort(sequence.experts.reshape(len(sequence.experts), -1, 2))
        assert np.array_equal(experts, np.sort(own_choices(model, [*prompt, *sequence.tokens[:-1]]).reshape(experts.shape)))


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_that_are_given_are_taken_in_every_layout_and_in_the_backward(layout, checkpointing):
    """Others than the routers would choose, in rows of all lengths: logprobs and gradients against each sequence alone, given the same."""
    model, data, rng = model_of(), datums(((9, (7, 5)), (4, (3, 12)))), np.random.default_rng(3)
    experts = describe(model).experts
    prompts: dict[tuple, np.ndarray] = {}
    for datum in data:  # a prompt has one choice, whoever answers it
        tokens = datum.model_input.to_ints()
        shared = 9 if data.index(datum) < 2 else 4
        own = np.stack([rng.permutation(4)[:2] for _ in range(len(tokens) * 4)]).reshape(len(tokens), 8).astype(np.int16)
        own[: shared - 1] = prompts.setdefault(tuple(tokens[: shared - 1]), own[: shared - 1])
        own[shared - 1] = prompts.setdefault(tuple(tokens[:shared]), own[shared - 1])
        datum.experts = own
    model.zero_grad()
    expected = []
    for datum in data:
        with given(model, experts, torch.from_numpy(datum.experts).long().unflatten(1, (-1, 2))):
            logits = model(input_ids=torch.tensor([datum.model_input.to_ints()]), use_cache=False).logits[0].double()
            logp = logits.log_softmax(-1).gather(-1, torch.from_numpy(datum.loss_fn_inputs["target_tokens"].array)[:, None])[:, 0]
            (-(logp * torch.from_numpy(datum.loss_fn_inputs["weights"].array)).sum()).backward()
        expected.append(logp.detach().numpy())
    learner = make_learner(model, layout=layout, gradient_checkpointing=checkpointing, router_replay=True)
    np.testing.assert_allclose(learnt(learner, data), np.concatenate(expected), atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(learner.trainable[name].grad, parameter.grad, atol=2e-4, rtol=1e-3, msg=name)
    routers = [p.grad for n, p in learner.trainable.items() if n.endswith("mlp.gate.weight")]
    assert len(routers) == 4 and all(grad.abs().max() > 1e-3 for grad in routers)
    plain = make_learner(model, layout=layout)
    assert np.abs(learnt(plain, data) - np.concatenate(expected)).max() > 0.1  # without replay they go elsewhere


def test_in_bf16_sampler_and_learner_route_alike_under_replay_and_the_metric_says_how_many_would_not_have():
    """A toy whose routers are nearly undecided, so that rounding turns some of them."""
    model = model_of(num_hidden_layers=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(0.02)
    data = [datum_of(*one) for one in sampled(model, torch.bfloat16, samples=8)]
    drawn = {id(d): d.experts.copy() for d in data}
    learner = make_learner(model, bf16=True, router_replay=True, layout="padded")
    from rl.losses import get_loss

    seen: list[torch.Tensor] = []
    block = learner.model.model.layers[2].mlp.experts
    block.register_forward_pre_hook(lambda module, args: seen.append(args[1].detach().clone()))
    _, sums = learner.run(data, get_loss("cross_entropy"), {}, temperature=1.0, divisor=1.0, backward=False)
    assert sums["routed:sum"] == sum(d.model_input.length for d in data)
    assert 0 < sums["rerouted:sum"] < sums["routed:sum"]
    wanted = sorted(tuple(sorted(row)) for d in data for row in drawn[id(d)].reshape(-1, 4, 2)[:, 2].tolist())
    taken = [tuple(sorted(row)) for part in seen for row in part.tolist()]
    assert not set(map(tuple, wanted)) - set(taken) and len(taken) >= len(wanted)
    assert all(np.array_equal(drawn[id(d)], d.experts) for d in data)


def test_turns_keep_the_experts_of_the_turn_that_read_them_first():
    def turn(prompt, answer, mark):
        sequence = SampledSequence(answer, [-1.0] * len(answer))
        sequence.experts = np.full((len(prompt) + len(answer) - 1, 2), mark, np.int16)
        return Transition(ModelInput.from_ints(prompt), sequence, 0.0, False)

    turns = [turn([1, 2], [3, 4], 10), turn([1, 2, 3, 4, 5], [6, 7], 20), turn([1, 2, 3, 4, 5, 6, 7, 8], [9], 30)]
    (found,) = trajectory_to_datums(Trajectory(turns, advantage=1.0))
    # by hand: 1 2 3 in the first turn; its last token, 4, was fed in the second, with 5 and 6; 7 and 8 in the third
    assert found.experts[:, 0].tolist() == [10, 10, 10, 20, 20, 20, 30, 30] and found.model_input.length == 8
    assert found.with_inputs({}).experts is found.experts
    turns[1].ac.experts = None
    (lost,) = trajectory_to_datums(Trajectory(turns[:2], advantage=1.0))
    assert lost.experts is None
    with pytest.raises(ValueError, match="one row a token"):
        Datum(ModelInput.from_ints([1, 2]), {}, experts=np.zeros((3, 2), np.int16))


def test_a_model_whose_experts_cannot_be_told_is_refused_by_name():
    with pytest.raises(UserError, match="router_replay is for models with experts"):
        note_experts(make_decoder(model_of("llama")))
    with pytest.raises(UserError, match=r"PhimoeForCausalLM cannot be told.*turn it off"):
        note_experts(make_decoder(model_of("phimoe")))
    learner, data = make_learner(model_of(), router_replay=True), datums(((9, (7,)),))
    data[0].experts = np.zeros((data[0].model_input.length, 6), np.int16)
    with pytest.raises(ValueError, match="datums with 6 experts a token are not of this model"):
        learnt(learner, data)


def test_the_model_is_as_it_was_afterwards():
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        with noted(model, describe(model).experts):
            assert torch.equal(model(input_ids=ids).logits, logits)
        assert not any("forward" in vars(module) for module in model.modules()) and torch.equal(model(input_ids=ids).logits, logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_run_with_replay_is_resumed_to_the_bit_and_says_what_it_rerouted(tmp_path):
    from rl import get_tokenizer

    tokenizer = get_tokenizer("tiny:addition")
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model_of(vocab_size=len(tokenizer), **ids).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    words = (f"grpo --base-model {tmp_path / 'base'} --batch-size 4 --group-size 4 --max-tokens 5 --dataset addition --renderer plain "
             "--eval-every 0 --rollouts-every 0")  # fmt: skip
    rows = two_and_two(f"{words} --router-replay", tmp_path)
    shares = [row["optim/rerouted"] for row in rows if "optim/rerouted" in row]
    assert len(shares) == 4 and shares[0] <= 0.02  # in float32
    plain = train(f"{words} --steps 1 --router-aux-loss-coef 0.01", tmp_path / "plain")
    assert "optim/rerouted" not in plain[-1]
    assert 1.5 < next(row["optim/router_aux_loss"] for row in plain if "optim/router_aux_loss" in row) <= 4.0  # even routing: 2 of 4
