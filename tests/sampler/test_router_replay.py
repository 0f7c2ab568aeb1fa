"""Test router replay: the sampler records its experts, and a learner with the record routes, trains
and scores with the same experts.
"""

import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    add_lora,
    check_logprobs,
    make_request,
    multistep_engine,
    one_thread,
    paged_engine,
    run_requests,
)
from test_architectures import make_datums, make_learner, run_learner
from test_asynchronous import ENVIRONMENT, same
from tiny_models import VOCAB, tiny_model
from whole_runs import train, two_and_two, updates_end_while_answers_are_drawn

from rl.data import load_rollouts
from rl.errors import UserError
from rl.layers import describe_layers, record_experts, replay_experts
from rl.models import model_loading
from rl.rollout import Trajectory, Transition, trajectory_to_datums
from rl.sampler import (
    Engine,
    MultiAdapterDecoder,
    enable_expert_recording,
    make_base_decoder,
    make_decoder,
)
from rl.types import (
    Datum,
    ModelInput,
    SampledSequence,
    experts_as_text,
    experts_from_text,
)


def model_of(name: str = "qwen3_moe", **changes):
    whole = {"sliding_window": None} if name in ("qwen3_moe", "mixtral") else {}
    return model_loading._disable_randomness(tiny_model(name, **whole, **changes))


def record_own_experts(model, tokens) -> np.ndarray:
    """Return the experts of a plain forward: [tokens, blocks * experts per token]."""
    with torch.no_grad(), record_experts(model, describe_layers(model).experts) as chosen:
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return chosen().flatten(1).numpy()


def sampled(model, dtype=None, samples: int = 3, kind=Engine, decoder=None, **settings):
    """Return (prompt, sequence) of samples for prompts of three lengths, with few rows at once, so
    that rows start late and end early.
    """
    decoder = decoder or make_decoder(model, dtype=dtype)
    settings = {"max_rows": 4, **settings}
    engine = kind(decoder, eos_token_ids=(1, 2, 3), record_experts=True, **settings)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in (5, 11, 2)]
    requests = [
        make_request(prompt, samples, max_tokens=8 + i, problem=i)
        for i, prompt in enumerate(prompts)
    ]
    responses = run_requests(engine, requests)
    return [(p, s) for p, r in zip(prompts, responses, strict=True) for s in r.sequences]


def datum_of(prompt, sequence) -> Datum:
    turn = Transition(ModelInput.from_ints(prompt), sequence, 0.0, True)
    (result,) = trajectory_to_datums(Trajectory([turn], advantage=1.0))
    targets = {"target_tokens": result.loss_fn_inputs["target_tokens"]}
    targets["weights"] = result.loss_fn_inputs["mask"]
    return Datum(result.model_input, targets, experts=result.experts)


def random_experts(rng, tokens: int) -> np.ndarray:
    """Return two of four experts for each token and each of four layers."""
    rows = [rng.permutation(4)[:2] for _ in range(tokens * 4)]
    return np.stack(rows).reshape(tokens, 8).astype(np.int16)


def check_record(model, prompt, sequence, first: int = 0) -> None:
    """Check that the record, from position `first` on, equals the experts of a plain forward of the
    finished sequence.
    """
    expected = record_own_experts(model, [*prompt, *sequence.tokens[:-1]])[first:]
    mine, expected = (np.sort(x.reshape(-1, 2)) for x in (sequence.experts[first:], expected))
    assert np.array_equal(mine, expected)


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("gpt_oss", "deepseek_v3", "qwen3_next", "llama4_text")
]


@pytest.mark.parametrize("name", ["qwen3_moe", *SLOW])
def test_what_is_noted_of_a_sample_is_what_its_finished_sequence_chooses(name):
    model = model_of(name)
    result = sampled(model)
    assert len({len(sequence.tokens) for _, sequence in result}) > 2
    for prompt, sequence in result:
        check_record(model, prompt, sequence)


@pytest.mark.parametrize("kind", [paged_engine, multistep_engine])
@pytest.mark.parametrize("pages", [12, 64])
def test_a_paged_cache_records_the_same_of_preempted_rows_as_well(kind, pages, monkeypatch):
    monkeypatch.setattr(Engine, "expects_lengths", False)
    model = model_of()
    engines = []

    def make(*args, **settings):
        engines.append(kind(*args, page=2, kv_cache_tokens=2 * pages, **settings))
        return engines[-1]

    records = sampled(model, kind=make, decoder=make_decoder(model, kind="fast"))
    expected = sampled(model, decoder=make_decoder(model, kind="hf"))
    for (prompt, sequence), (_, other) in zip(records, expected, strict=True):
        assert sequence.tokens == other.tokens
        check_record(model, prompt, sequence)
    assert bool(engines[0].preemptions) == (pages == 12)


@pytest.mark.parametrize("blocks", [4, 5, 7])
def test_a_prompt_keeps_its_experts_after_the_block_of_another_with_the_same_beginning_is_evicted(
    blocks,
):
    model = model_of()
    engine = paged_engine(
        make_decoder(model), (), page=64, kv_cache_tokens=64 * blocks, record_experts=True
    )

    def make_prompt(number, length):
        return [(number * 7 + i * 13 + number * i * i) % VOCAB for i in range(length)]

    first = make_prompt(1, 65)
    second = first[:32] + make_prompt(2, 33)  # its block begins as the block of `first` does
    others = [make_prompt(number, 65) for number in range(3, 3 + 2 * blocks)]
    for prompt in [first, *(prompt for other in others for prompt in (second, other))]:
        (response,) = run_requests(engine, [make_request(prompt, max_tokens=2)])
        check_record(model, prompt, response.sequences[0])
    assert engine.counters.prefix_cached_tokens


@pytest.mark.parametrize("kind", [Engine, paged_engine])
def test_a_conversation_keeps_the_experts_of_its_earlier_turns(kind):
    model = model_of()
    settings = {} if kind is Engine else {"page": 4}
    engine = kind(make_decoder(model), (), kv_cache_tokens=512, record_experts=True, **settings)
    prompt = [5, 9, 4] * 6
    for _ in range(3):
        (response,) = run_requests(engine, [make_request(prompt, max_tokens=5, conversation="a")])
        check_record(model, prompt, response.sequences[0])
        prompt = [*prompt, *response.sequences[0].tokens, 7, 11]
    assert engine.counters.prefix_cached_tokens


@pytest.mark.parametrize("kind", [Engine, paged_engine])
def test_rows_of_several_adapters_record_the_experts_of_their_own_model(kind):
    plain, models = model_of(), []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(add_lora(copy.deepcopy(plain), ["q_proj", "o_proj", "lm_head"], r=3 + seed))
    base = make_base_decoder(plain, None, None)
    decoder = MultiAdapterDecoder(base)
    for number, model in enumerate(models):
        decoder.add_adapter(number, make_decoder(model, kind="fast", base=base), 0)
    engine = kind(decoder, (), kv_cache_tokens=1024, record_experts=True)
    prompts = [[5, 9, 4, 11, 6], [7, 3], [8, 8, 10]]
    requests = [
        make_request(prompt, max_tokens=9, seed=i, adapter_id=i % 2)
        for i, prompt in enumerate(prompts)
    ]
    for i, response in enumerate(run_requests(engine, requests)):
        check_record(models[i % 2], prompts[i], response.sequences[0])
        check_logprobs(models[i % 2], prompts[i], response.sequences[0], atol=2e-5)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_that_are_given_are_taken_in_every_layout_and_in_the_backward(
    layout, checkpointing
):
    """The experts differ from the routers' choice, in rows of all lengths. Logprobs and gradients
    equal those of each sequence alone with the same experts.
    """
    model, rng = model_of(), np.random.default_rng(3)
    data, shared = make_datums(((9, (7, 5)), (4, (3, 12)))), (9, 9, 4, 4)
    experts = describe_layers(model).experts
    prompts: dict[tuple, np.ndarray] = {}
    for datum, length in zip(data, shared, strict=True):
        datum.experts = random_experts(rng, datum.model_input.length)
        prompt = tuple(datum.model_input.to_ints()[:length])
        # all samples of a prompt share its record
        datum.experts[:length] = prompts.setdefault(prompt, datum.experts[:length])
    model.zero_grad()
    expected = []
    for datum in data:
        chosen = torch.from_numpy(datum.experts).long().unflatten(1, (-1, 2))
        targets, weights = (
            torch.from_numpy(datum.loss_fn_inputs[name].array)
            for name in ("target_tokens", "weights")
        )
        with replay_experts(model, experts, chosen):
            ids = torch.tensor([datum.model_input.to_ints()])
            logits = model(input_ids=ids, use_cache=False).logits[0].double()
            logp = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            (-(logp * weights).sum()).backward()
        expected.append(logp.detach().numpy())
    learner = make_learner(
        model, layout=layout, gradient_checkpointing=checkpointing, router_replay=True
    )
    np.testing.assert_allclose(run_learner(learner, data), np.concatenate(expected), atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            learner.trainable[name].grad, parameter.grad, atol=2e-4, rtol=1e-3, msg=name
        )
    routers = [p.grad for n, p in learner.trainable.items() if n.endswith("mlp.gate.weight")]
    assert len(routers) == 4 and all(grad.abs().max() > 1e-3 for grad in routers)
    plain = make_learner(model, layout=layout)
    # without replay the routing differs
    assert np.abs(run_learner(plain, data) - np.concatenate(expected)).max() > 0.1


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_datums_with_and_without_a_record_of_experts_share_no_micro_batch(layout):
    """Datums of the same lengths, interleaved: each is routed as in a separate batch."""
    model, rng = model_of(), np.random.default_rng(5)
    data = make_datums(((6, (5, 5, 5, 5)),))
    for datum in data[1::2]:
        datum.experts = random_experts(rng, datum.model_input.length)
    data[3].experts[:6] = data[1].experts[:6]  # all samples of a prompt share its record
    learner = make_learner(model, layout=layout, router_replay=True)
    alone = [run_learner(learner, [datum]) for datum in data]
    np.testing.assert_allclose(run_learner(learner, data), np.concatenate(alone), atol=1e-4)
    without = [run_learner(learner, [Datum(d.model_input, d.loss_fn_inputs)]) for d in data]
    gaps = [np.abs(a - b).max() for a, b in zip(alone, without, strict=True)]
    assert [gap > 0.05 for gap in gaps] == [False, True, False, True], (
        "the record decides where there is one"
    )


def test_in_bf16_sampler_and_learner_route_alike_under_replay_and_the_metric_says_how_many_would_not_have():
    """A toy model with nearly tied router scores, so that rounding changes some choices."""
    model = model_of(num_hidden_layers=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(0.02)
    data = [datum_of(*item) for item in sampled(model, torch.bfloat16, samples=8)]
    drawn = {id(d): d.experts.copy() for d in data}
    learner = make_learner(model, bf16=True, router_replay=True, layout="padded")
    from rl.losses import get_loss

    seen: list[torch.Tensor] = []
    block = learner.model.model.layers[2].mlp.experts
    block.register_forward_pre_hook(lambda module, args: seen.append(args[1].detach().clone()))
    _, sums = learner.run(
        data, get_loss("cross_entropy"), {}, temperature=1.0, divisor=1.0, backward=False
    )
    assert sums["routed:sum"] == sum(d.model_input.length for d in data)
    assert 0 < sums["rerouted:sum"] < sums["routed:sum"]
    expected = sorted(
        tuple(sorted(row)) for d in data for row in drawn[id(d)].reshape(-1, 4, 2)[:, 2].tolist()
    )
    taken = [tuple(sorted(row)) for part in seen for row in part.tolist()]
    assert not set(map(tuple, expected)) - set(taken) and len(taken) >= len(expected)
    assert all(np.array_equal(drawn[id(d)], d.experts) for d in data)


def test_turns_keep_the_experts_of_the_turn_that_read_them_first():
    def turn(prompt, answer, mark):
        sequence = SampledSequence(answer, [-1.0] * len(answer))
        sequence.experts = np.full((len(prompt) + len(answer) - 1, 2), mark, np.int16)
        return Transition(ModelInput.from_ints(prompt), sequence, 0.0, False)

    turns = [
        turn([1, 2], [3, 4], 10),
        turn([1, 2, 3, 4, 5], [6, 7], 20),
        turn([1, 2, 3, 4, 5, 6, 7, 8], [9], 30),
    ]
    (result,) = trajectory_to_datums(Trajectory(turns, advantage=1.0))
    # by hand: tokens 1 2 3 come from the first turn. Its last token, 4, was fed in the second turn
    # with 5 and 6; 7 and 8 in the third.
    assert result.experts[:, 0].tolist() == [10, 10, 10, 20, 20, 20, 30, 30]
    assert result.model_input.length == 8
    assert result.with_inputs({}).experts is result.experts
    turns[1].ac.experts = None
    (lost,) = trajectory_to_datums(Trajectory(turns[:2], advantage=1.0))
    assert lost.experts is None
    with pytest.raises(ValueError, match="one row a token"):
        Datum(ModelInput.from_ints([1, 2]), {}, experts=np.zeros((3, 2), np.int16))


def test_a_model_whose_experts_cannot_be_told_is_refused_by_name():
    with pytest.raises(UserError, match="router_replay needs a model with experts"):
        enable_expert_recording(make_decoder(model_of("llama")))
    with pytest.raises(
        UserError, match=r"PhimoeForCausalLM cannot replay the choice of experts.*turn it off"
    ):
        enable_expert_recording(make_decoder(model_of("phimoe")))
    learner, data = make_learner(model_of(), router_replay=True), make_datums(((9, (7,)),))
    data[0].experts = np.zeros((data[0].model_input.length, 6), np.int16)
    with pytest.raises(ValueError, match="datum 0: its 6 experts a token do not fit this model"):
        run_learner(learner, data)


def test_the_model_is_as_it_was_afterwards():
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        with record_experts(model, describe_layers(model).experts):
            assert torch.equal(model(input_ids=ids).logits, logits)
        assert not any("forward" in vars(module) for module in model.modules()) and torch.equal(
            model(input_ids=ids).logits, logits
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def mixture_that_adds(folder):
    """Save a mixture of experts with the tokens of tiny:addition.

    Its rows are multiples of 64 bytes: MKL rounds other rows by their address, which differs
    between processes and runs.
    """
    from rl import get_tokenizer

    tokenizer = get_tokenizer("tiny:addition")
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    wide = {"moe_intermediate_size": 32, "head_dim": 16}
    model_of(vocab_size=len(tokenizer), **wide, **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_a_run_with_replay_is_resumed_to_the_bit_and_says_what_it_rerouted(tmp_path):
    mixture_that_adds(tmp_path / "base")
    words = (f"grpo --base-model {tmp_path / 'base'} --batch-size 4 --group-size 4 --max-tokens 5 --dataset addition --renderer plain "
             "--eval-every 0 --rollouts-every 0")  # fmt: skip
    rows = two_and_two(f"{words} --router-replay", tmp_path)
    shares = [row["optim/rerouted"] for row in rows if "optim/rerouted" in row]
    assert len(shares) == 4 and shares[0] <= 0.02  # in float32
    plain = train(f"{words} --steps 1 --router-aux-loss-coef 0.01", tmp_path / "plain")
    assert "optim/rerouted" not in plain[-1]
    losses = [row["optim/router_aux_loss"] for row in plain if "optim/router_aux_loss" in row]
    assert 1.5 < losses[0] <= 4.0  # even routing gives 2 of 4


def test_a_record_as_text_comes_back_and_what_is_none_is_named():
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (7, 4), (300, 384)):
        experts = rng.integers(-1, 128, shape).astype(np.int16)
        result = experts_from_text(experts_as_text(experts))
        assert result.dtype == np.int16 and np.array_equal(result, experts)
    good = experts_as_text(np.ones((3, 2), np.int16))
    bad = [None, 7, [], "", "3x2:", "3x2", good[:-4], good.replace("3x2", "3x3"), good.replace("3x2", "2x2"), good.replace("3x2", "0x2"),
           good.replace("3x2", "3x2x1"), good.replace("3x2", "99999999999x9999999999"), good + "!",
           experts_as_text(np.full((1, 1), -2, np.int16))]  # fmt: skip
    for text in bad:
        with pytest.raises(ValueError, match="no record of experts"):
            experts_from_text(text)


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_what_was_drawn_elsewhere_keeps_its_experts_and_new_weights_are_noted_as_well(name):
    """The first half of an answer comes from a model, the rest from another model: in the same
    engine, and in an engine that resumes from a checkpoint.
    """
    item, other = model_of(name), model_of(name)
    with torch.no_grad():
        for key, value in other.named_parameters():
            if key.endswith("gate.weight"):
                value.copy_(-value)
    prompt, drawn_first = [5, 9, 4, 11, 6], 6
    request, first = make_request(prompt, max_tokens=14, seed=3), len(prompt) + drawn_first - 1

    def engine_of(model):
        return Engine(make_decoder(model), eos_token_ids=(), max_rows=4, record_experts=True)

    def half(engine):
        engine.add(request)
        for _ in range(drawn_first):
            engine.step()
        return engine

    whole = half(engine_of(item)).run()[0].sequences[0]
    check_record(item, prompt, whole)
    changed = half(engine_of(item))
    # a weight version without recorded experts so far
    changed.change_weights(make_decoder(other), 1)
    ((_, remaining),) = half(engine_of(item)).unfinished_requests()
    saved = json.loads(json.dumps(remaining.resume_from.as_json()))
    remaining = replace(remaining, resume_from=SampledSequence.from_json(saved))
    assert np.array_equal(remaining.resume_from.experts, whole.experts[:first])
    resumed = run_requests(engine_of(other), [remaining])
    for (sequence,) in (changed.run()[0].sequences, resumed[0].sequences):
        assert len(sequence.experts) == len(prompt) + 14 - 1
        assert np.array_equal(sequence.experts[:first], whole.experts[:first])
        assert not np.array_equal(sequence.experts[first:], whole.experts[first:])
    # The resumed text is prefilled again by the same forwards, so the remaining experts equal those
    # of the whole text.
    check_record(other, prompt, sequence, first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--max-steps-off-policy 2 --slice-steps 2",
        "--max-steps-off-policy 1 --slice-steps 2 --recompute-cache",
    ],
)
def test_experts_stay_with_answers_through_new_weights_checkpoints_and_a_run_that_is_repeated(
    options, tmp_path
):
    """Samples are drawn while the learner updates. A replayed run, and a run resumed midway, equal
    the first bit for bit, including experts.
    """
    mixture_that_adds(tmp_path / "base")
    (tmp_path / "uneven.py").write_text(ENVIRONMENT)
    words = (f"grpo --base-model {tmp_path / 'base'} --steps 4 --batch-size 4 --group-size 2 --max-tokens 5 --eval-every 0 --save-every 2 "
             f"--keep-last 9 --rollouts-every 1 --environment {tmp_path}/uneven.py:Uneven --environment-isolation thread --renderer plain "
             f"--learning-rate 1e-2 --no-self-test --router-replay {options}")  # fmt: skip
    first = tmp_path / "first"
    with updates_end_while_answers_are_drawn():
        rows = train(words, first)
    answers = read_answers(first)
    assert all(len(experts_from_text(turn["experts"])[0]) == 8 for turn in answers)
    assert len(answers) > 4 * 4 * 2
    assert any("versions" in turn for turn in answers)  # new weights arrived during an answer
    # every datum had a record
    assert all(0 <= row["optim/rerouted"] for row in rows if "optim/policy_loss" in row)
    assert sum("optim/rerouted" in row for row in rows) == 4

    def check_equal(more: str, folder):
        assert train(f"{words} --replay {first}{more}", folder) == rows
        assert read_answers(folder) == answers and same(first, folder)

    check_equal("", tmp_path / "again")
    cut = tmp_path / "cut"
    shutil.copytree(first, cut)
    for path in (cut / "checkpoints").iterdir():
        if path.name != "grpo-000002":
            shutil.rmtree(path)
    state = (cut / "checkpoints" / "grpo-000002" / "state.json").read_text()
    assert '"experts": "' in state or '"experts":"' in state  # of unfinished answers
    check_equal(" --resume", cut)


def read_rollouts(folder) -> list[dict]:
    """Return the rows of a run's rollout files."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def read_answers(folder) -> list[dict]:
    """Return every answer in a run's rollout files, with its experts."""
    turns = [turn for row in read_rollouts(folder) for turn in row.get("turns", [row])]
    return [turn for turn in turns if turn.get("sampled", True)]


@pytest.mark.slow
def test_stored_answers_are_learnt_with_the_experts_that_they_were_drawn_with(tmp_path):
    mixture_that_adds(tmp_path / "base")
    model = f"--base-model {tmp_path / 'base'} --renderer plain --eval-every 0"
    train(f"grpo {model} --steps 2 --batch-size 4 --group-size 4 --max-tokens 5 --dataset addition --rollouts-every 1 --router-replay",
          tmp_path / "run")  # fmt: skip
    stored = load_rollouts(tmp_path / "run")
    assert all(answer.experts for problem in stored for answer in problem.answers)
    # handwritten: the complementary experts, to check that the learner uses the record
    file, rows = tmp_path / "other.jsonl", read_rollouts(tmp_path / "run")
    others = [experts_as_text(3 - experts_from_text(row["experts"])) for row in rows]
    lines = [json.dumps({**r, "experts": e}) for r, e in zip(rows, others, strict=True)]
    file.write_text("\n".join(lines) + "\n")
    words = f"offline {model} --steps 1 --batch-size 4 --loss importance_sampling --temperature 0.8 --no-self-test"
    results = {}
    for name, source, more in (
        ("told", tmp_path / "run", "--router-replay"),
        ("other", file, "--router-replay"),
        ("plain", file, ""),
    ):
        metrics = train(f"{words} --dataset {source} {more}", tmp_path / name)
        results[name] = next(row for row in metrics if "optim/grad_norm" in row)
    told, other, plain = results.values()
    assert told["optim/rerouted"] < 0.5 < other["optim/rerouted"] and "optim/rerouted" not in plain
    assert abs(told["optim/kl_behaviour_v1"]) < abs(other["optim/kl_behaviour_v1"])
    # an answer without experts, and answers with a wrong record
    fine = {key: value for key, value in rows[0].items() if key != "experts"}
    for wrong, says in (
        ("12", "no record of experts"),
        (experts_as_text(np.zeros((2, 8), np.int16)), "tells of 2 tokens"),
    ):
        file.write_text(json.dumps({**fine, "experts": wrong}))
        with pytest.raises(UserError, match=f"line 1.*{says}"):
            load_rollouts(file)
    file.write_text(json.dumps(fine))
    assert load_rollouts(file)[0].answers[0].experts is None
