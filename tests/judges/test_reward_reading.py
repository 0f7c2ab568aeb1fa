"""Test that a reward model reads a sampled answer exactly as it read the answer in training."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ADAM
from test_renderer_specials import pairs, renderers, tokenizers  # noqa: F401  (fixtures)

from rl import ServiceClient
from rl.algorithms import Models, RewardModelTraining
from rl.algorithms.reward_model import RewardModelSettings, make_comparison_pair, make_scored_pair
from rl.envs import (
    Environment,
    EnvironmentGroup,
    ProblemGroupBuilder,
    TurnResult,
    resolve_environment,
)
from rl.judges import AnswerComparison, PairwiseJudge, RewardModel, make_comparison_prompt
from rl.models import load_tokenizer
from rl.renderers import get_renderer
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.trainer.saved_weights import SavedWeights
from rl.trainer.stage_models import StageModelFactory, make_own_renderer
from rl.types import Problem, SampledSequence

ROLE_COLON = [
    pytest.param(*item.values[1:], marks=item.marks) if not isinstance(item, tuple) else item[1]
    for item in pairs()
    if (item if isinstance(item, tuple) else item.values)[0] == "role_colon"
]


class Reader:
    """A stub reward model that records its inputs."""

    info = {"max_context": None}

    def __init__(self):
        self.read = []

    def compute_values(self, inputs):
        self.read += [item.to_ints() for item in inputs]
        return SimpleNamespace(
            result=lambda: [np.arange(item.length, dtype=np.float32) for item in inputs]
        )


def read_by_model(renderer, group, **more) -> list[list[int]]:
    """Return what a reward model with this renderer reads of a group."""
    reader = Reader()
    RewardModel(reader, "rm", renderer, **more).scores([group])
    return reader.read


def sampled(renderer, problem, text, end, *, logs=True):
    """Return a group of a single episode that answers `text` and ends with `end`; an empty `end`
    means cut off.
    """
    builder = ProblemGroupBuilder(problem, 1, renderer, None)
    drawn = [*renderer._encode(renderer.escaper.escape(text), continuing=True), *end]
    if len(end) > 1:  # a mark in words: tokenized as in training, together with the answer
        drawn = renderer._encode(
            renderer.escaper.escape(text) + renderer.decode(end), continuing=True
        )
    action = SampledSequence(drawn, [-1.0] * len(drawn), "stop" if end else "length")
    result = builder.make_envs()[0].step(action)
    turn = Transition(builder.prompt, action, 0.0, True, {}, result.logs if logs else {})
    return TrajectoryGroup([Trajectory([turn])], [0.0], [{}])


def as_drawn(renderer, name, text):
    """Return an answer as the model writes it; with role_colon it begins with a space."""
    return f" {text}" if name == "role_colon" else text


def first_end(renderer, name):
    """Return the mark of role_colon, or the first token that ends an answer."""
    if name == "role_colon":
        return renderer._encode("\n\nUser:", continuing=True)
    return [renderer.get_stop_sequences()[0]]


def ways_to_end(renderer, name):
    """Return every token that may end a sample, and the mark of role_colon."""
    ends = [[end] for end in sorted(renderer.end_tokens)]
    return [*ends, first_end(renderer, name)] if name == "role_colon" else ends


@pytest.mark.parametrize(("name", "model"), pairs())
def test_an_answer_is_read_as_it_was_in_training(renderers, tokenizers, name, model):  # noqa: F811
    renderer, tokenizer = renderers(name, model), tokenizers(model)
    extra = next((i for i in tokenizer.added_tokens_decoder if i != tokenizer.eos_token_id), 5)
    renderer = get_renderer(name, tokenizer, eos_token_ids=[extra])  # from the generation config
    rng = random.Random(f"{name} {model}")
    thinks = model in ("qwen3",) and name == "chat_template"
    for _ in range(5):
        turn = [{"role": "user", "content": "st"}, {"role": "assistant", "content": "ab"}]
        history = turn if rng.random() < 0.5 else []
        requests = [*history, {"role": "user", "content": rng.choice(["2+2?", "a a\n", "(7)"])}]
        response, rejected = rng.choice(["4", "ab st", "7 (a)."]), rng.choice(["5", "st\nab"])
        problem = Problem(requests, response=response, rejected=rejected)
        trained = [datum.model_input.to_ints() for datum in make_scored_pair(problem, renderer)]
        for answer, expected in zip((problem.response, problem.rejected), trained, strict=True):
            text = as_drawn(renderer, name, ("<think>\n\n</think>\n\n" if thinks else "") + answer)
            if thinks:  # the model writes it as a token
                drawn_thought = tokenizer.encode(
                    "<think>\n\n</think>\n\n", add_special_tokens=False
                )
            for end in ways_to_end(renderer, name):
                group = sampled(renderer, problem, as_drawn(renderer, name, answer), end)
                if thinks:
                    group.trajectories_G[0].transitions[-1].ac.tokens[:0] = drawn_thought
                reader = Reader()
                ((score,),) = RewardModel(reader, "rm", renderer).scores([group])
                assert reader.read == [expected], (text, end)
                # the score is read at the end mark, the last position, as in the loss
                assert score == len(expected) - 1
        cut = sampled(renderer, problem, as_drawn(renderer, name, "4 st"), [])
        turn = cut.trajectories_G[0].transitions[-1]
        # cut off: without an end mark
        assert read_by_model(renderer, cut) == [[*turn.ob.to_ints(), *turn.ac.tokens]]


@pytest.mark.parametrize(("name", "model"), pairs())
def test_the_mask_tells_where_the_prompt_ends(renderers, name, model):  # noqa: F811
    renderer = renderers(name, model)
    problem = Problem([{"role": "user", "content": "2+2?"}], response="4", rejected="5 st")
    prompt = renderer.build_generation_prompt(problem.messages).to_ints()
    for datum in make_scored_pair(problem, renderer):
        mask, tokens = datum.loss_fn_inputs["mask"].array, datum.model_input.to_ints()
        assert tokens[: len(prompt)] == prompt
        assert mask.tolist() == [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt) + 1)
        assert datum.loss_fn_inputs["target_tokens"].array.tolist() == [*tokens[1:], 0]


@pytest.mark.parametrize("name", ["plain", "chat_template", "role_colon"])
def test_an_answer_that_a_stop_text_ended_is_read_as_in_training(renderers, name):  # noqa: F811
    renderer = renderers(name, "llama-like")
    problem = Problem([{"role": "user", "content": "2+2?"}], response="ab 4", rejected="5")
    expected = make_scored_pair(problem, renderer)[0].model_input.to_ints()
    policy, end = renderer.with_stops(["st a"]), renderer._encode("st a", continuing=True)
    group = sampled(policy, problem, as_drawn(policy, name, "ab 4"), end)
    assert read_by_model(renderer, group) == [expected]


@pytest.mark.parametrize("model", ROLE_COLON)
def test_role_colons_mark_is_read_as_in_training_however_it_was_tokenised(renderers, model):  # noqa: F811
    """A policy may sample a text as other tokens than the tokenizer would produce."""
    renderer = renderers("role_colon", model)
    for response in ("4.", "ab st.", "7 (a)", "st"):
        problem = Problem([{"role": "user", "content": "2+2?"}], response=response, rejected="5")
        expected = make_scored_pair(problem, renderer)[0].model_input.to_ints()
        prompt = renderer.build_generation_prompt(problem.messages).to_ints()
        text = f" {response}\n\nUser:"
        for pieces in (
            [text],
            [f" {response}", "\n\nUser:"],
            [f" {response}\n\n", "User:"],
            list(text),
        ):
            drawn = [
                token for piece in pieces for token in renderer._encode(piece, continuing=True)
            ]
            if renderer.decode(drawn) != text:
                # a tokenizer that joins words with added spaces: these tokens are another text
                continue
            assert renderer.reward_model_input(prompt, drawn).to_ints() == expected, pieces


@pytest.mark.parametrize("policy", ["plain", "role_colon", "chat_template"])
@pytest.mark.parametrize("judge", ["plain", "role_colon", "chat_template"])
def test_a_policy_with_another_renderer_is_read_in_the_models_own(renderers, policy, judge):  # noqa: F811
    reference, other = renderers(judge, "llama-like"), renderers(policy, "llama-like")
    problem = Problem([{"role": "user", "content": "2+2?"}], response="ab 4", rejected="5")
    expected = make_scored_pair(problem, reference)[0].model_input.to_ints()
    whole, cut = (
        sampled(other, problem, as_drawn(other, policy, "ab 4"), end)
        for end in (first_end(other, policy), [])
    )
    assert read_by_model(reference, whole) == [expected]
    (read,) = read_by_model(reference, cut)
    assert read == expected[: len(read)] and len(read) < len(expected)  # without the end mark


TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "ab?"},
]


def read_in_training(renderer) -> list[int]:
    """Return the tokens of `TALK` with the answer st in the training data of a reward model."""
    problem = Problem(TALK, response="st", rejected="x")
    return make_scored_pair(problem, renderer)[0].model_input.to_ints()


@pytest.mark.parametrize("shares_vocabulary", [True, False])
def test_a_model_of_another_vocabulary_reads_all_turns_of_an_episode(renderers, shares_vocabulary):  # noqa: F811
    renderer = renderers("role_colon", "llama-like")
    turns = []
    for i, answer in ((1, "4"), (3, "st")):
        logs = {"prompt": TALK[i - 1]["content"], "new_messages": [TALK[i - 1]], "response": answer}
        tokens = renderer._encode(f" {answer}\n\nUser:", continuing=True)
        action = SampledSequence(tokens, [-1.0] * len(tokens), "stop")
        turns.append(
            Transition(renderer.build_generation_prompt(TALK[:i]), action, 0.0, False, {}, logs)
        )
    group = TrajectoryGroup([Trajectory(turns)], [0.0], [{}])
    read = read_by_model(renderer, group, shares_vocabulary=shares_vocabulary)
    assert read == [read_in_training(renderer)]


@pytest.mark.parametrize("name", ["chat_template", "plain", "role_colon"])
def test_the_held_out_margin_is_the_one_that_rlhf_reads(renderers, name, shared_data, tmp_path):  # noqa: F811
    texts = [("2+2?", "4", "five"), ("Hi", "Hello!", "No."), ("A b c", "d e", "x")]
    rows = [
        Problem([{"role": "user", "content": q}], response=a, rejected=b, index=i)
        for i, (q, a, b) in enumerate(texts)
    ]
    with ServiceClient(output_dir=tmp_path) as service:
        tokenizer = str(shared_data / "tokenizers" / "minimind_6400")
        options = {"tokenizer": tokenizer, "seed": 2, "value_head": True}
        client = service.create_full_training_client("tiny:chat", **options)
        renderer = get_renderer(name, client.get_tokenizer())
        datums = [d for row in rows for d in make_scored_pair(row, renderer)]
        client.forward_backward(datums, "bradley_terry").result()
        client.optim_step(ADAM).result()
        method = RewardModelTraining(RewardModelSettings())
        held_out = method.evaluate(rows, renderer, Models(client, {}))
        groups = [
            sampled(renderer, row, as_drawn(renderer, name, text), first_end(renderer, name))
            for row in rows
            for text in (row.response, row.rejected)
        ]
        scores = np.array(RewardModel(client, "rm", renderer).scores(groups)).reshape(-1, 2)
    margins = scores[:, 0] - scores[:, 1]
    assert np.abs(margins).max() > 1e-4
    assert margins.mean() == pytest.approx(held_out["test/rewards/margins"], abs=1e-6)


@pytest.mark.parametrize("answer", ["4", " 4\n", "<think>hm</think>\n\n4"])
def test_a_judge_is_shown_answers_as_it_was_in_training(renderers, answer):  # noqa: F811
    renderer = renderers("chat_template", "minimind_6400")
    problem = Problem([{"role": "user", "content": "2+2?"}], response=answer, rejected="5")
    end = renderer.get_stop_sequences()[:1]
    group = [sampled(renderer, problem, text, end) for text in ("", "5")]
    drawn = [*renderer.tokenizer.encode(answer, add_special_tokens=False), *end]
    builder = ProblemGroupBuilder(problem, 1, renderer, None)
    logs = builder.make_envs()[0].step(SampledSequence(drawn, [-1.0] * len(drawn))).logs
    group[0].trajectories_G[0].transitions[-1].logs = logs
    requests = []
    verdict = SimpleNamespace(first=1.0, second=0.0)
    judge = SimpleNamespace(compare=lambda result: requests.extend(result) or [verdict])
    both = TrajectoryGroup([item.trajectories_G[0] for item in group], [0.0, 0.0], [{}, {}])
    PairwiseJudge(judge).scores([both])
    shown, _ = renderer.build_supervised_example(
        [*make_comparison_prompt(requests[0]), {"role": "assistant", "content": "A"}]
    )
    assert shown.to_ints()[:-1] == make_comparison_pair(problem, renderer)[0].model_input.to_ints()
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    assert make_comparison_prompt(AnswerComparison(parts, "4", "5")) == make_comparison_prompt(
        AnswerComparison(problem.messages, "4", "5")
    )


@pytest.mark.parametrize("logs", [True, False])
def test_a_policy_of_another_vocabulary_is_read_as_text(logs, tokenizers):  # noqa: F811
    """The text equals that of the reward model's training data, whatever the policy's ids mean in
    its vocabulary.
    """
    theirs = get_renderer("role_colon", tokenizers("gpt2"))
    reference = get_renderer("chat_template", tokenizers("qwen3"), enable_thinking=False)
    problem = Problem([{"role": "user", "content": "2+2?"}], response="It is 4.", rejected="5")
    group = sampled(theirs, problem, " It is 4.", [min(theirs.end_tokens)])
    if not logs:
        turn = group.trajectories_G[0].transitions[-1]
        turn.logs = {"prompt": "2+2?", "response": turn.logs["response"]}
    expected = make_scored_pair(problem, reference)[0].model_input.to_ints()
    assert read_by_model(reference, group, shares_vocabulary=False) == [expected]


def test_reward_models_and_judges_keep_the_renderer_that_they_were_trained_with(monkeypatch):
    """The renderer comes from the settings of the stage that trained the model, in this run or
    another.
    """
    stage = SimpleNamespace(
        settings=SimpleNamespace(data=SimpleNamespace(renderer="role_colon", template=()))
    )
    monkeypatch.setattr(
        "rl.trainer.stage_models.open_weights",
        lambda target: SavedWeights(target, Path(target), stage=stage),
    )
    factory = StageModelFactory.__new__(StageModelFactory)
    factory.earlier = {"rm": SavedWeights("rm", Path("rm-final"), stage=stage)}
    tokenizer = load_tokenizer("tiny:ascii")
    client = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    question = [{"role": "user", "content": "hello"}]
    expected = get_renderer("role_colon", tokenizer).build_generation_prompt(question)
    assert expected != get_renderer("plain", tokenizer).build_generation_prompt(question)
    for name, path in (("rm", Path("rm-final")), ("runs/b", Path("runs/b"))):
        weights = factory.open(name)
        assert weights.path == path
        renderer = make_own_renderer(client, weights)
        assert renderer.build_generation_prompt(question) == expected


class TwoQuestionEnvironment(Environment):
    """Two questions, with a tool that nobody needs."""

    def start(self):
        def look(place: str) -> str:
            """Look at a place.

            Args:
                place: where
            """
            return place

        self.tools, self.turns = (look,) if self.row.get("tools") else (), 0
        return "2+2?"

    def step(self, answer):
        self.turns += 1
        return TurnResult("ab?", done=self.turns > 1)


def play_episode(renderer, name, answers, *, cut=False, tools=False):
    """Return the group of a single episode of `TwoQuestionEnvironment`, played as in a rollout."""
    spec = resolve_environment(TwoQuestionEnvironment)
    problem = Problem([], meta={"tools": tools})
    env = EnvironmentGroup(spec, problem, 1, renderer).make_envs()[0]
    prompt, _ = env.initial_observation().result()
    turns = []
    for answer in answers:
        ended = not (cut and len(turns) == len(answers) - 1)
        drawn = renderer._encode(as_drawn(renderer, name, answer), continuing=True)
        drawn = [*drawn, *(first_end(renderer, name) if ended else [])]
        action = SampledSequence(drawn, [-1.0] * len(drawn), "stop" if ended else "length")
        result = env.step(action).result()
        turns.append(Transition(prompt, action, 0.0, result.episode_done, {}, result.logs))
        prompt = result.next_observation
    env.close()
    return TrajectoryGroup([Trajectory(turns)], [0.0], [{}])


@pytest.mark.parametrize("knows_policy", [True, False])
@pytest.mark.parametrize("policy", ["plain", "role_colon", "chat_template"])
@pytest.mark.parametrize("judge", ["plain", "role_colon", "chat_template"])
def test_an_episode_of_an_environment_is_read_in_the_models_own_renderer(
    renderers,  # noqa: F811
    policy,
    judge,
    knows_policy,
):
    """All turns are read, whichever renderer of the same vocabulary the policy uses."""
    reference, other = renderers(judge, "llama-like"), renderers(policy, "llama-like")
    expected = read_in_training(reference)
    known = {"policy_renderer": other} if knows_policy else {}
    whole, cut = (play_episode(other, policy, ["4", "st"], cut=cut) for cut in (False, True))
    assert read_by_model(reference, whole, **known) == [expected]
    (read,) = read_by_model(reference, cut, **known)
    assert read == expected[: len(read)] and len(read) < len(expected)


def test_an_episode_in_the_models_own_format_is_read_with_its_tools(renderers):  # noqa: F811
    renderer = renderers("chat_template", "qwen3")
    group = play_episode(renderer, "chat_template", ["4", "st"], tools=True)
    last = group.trajectories_G[0].transitions[-1]
    assert "Look at a place" in renderer.decode(last.ob.to_ints())
    expected = renderer.reward_model_input(last.ob.token_ids(), last.ac.tokens).to_ints()
    assert read_by_model(renderer, group, policy_renderer=renderer) == [expected]


def test_a_run_tells_its_reward_model_the_policys_renderer(monkeypatch):
    hosts = StageModelFactory.__new__(StageModelFactory)
    hosts.__dict__.update(
        earlier={},
        policy=None,
        renderer="the policy's",
        service=SimpleNamespace(create_training_client_from_state=lambda path: path),
    )
    where = SimpleNamespace(stage=None, path=Path("rm"))
    inputs = {}
    state = {"spec": {"value_head": True}}
    for name, stub in (
        ("open_weights", lambda target: where),
        ("is_published_reward_model", lambda result: False),
        ("Path.is_file", lambda path: True),
        ("checkpoint_folder.read_verified_state", lambda path: state),
        ("shares_vocabulary", lambda *words: True),
        ("make_renderer", lambda *words: "its own"),
        ("RewardModel", lambda *words, **more: inputs.update(more)),
    ):
        monkeypatch.setattr(f"rl.trainer.stage_models.{name}", stub)
    hosts._load_reward_model("rm")
    assert inputs == {"shares_vocabulary": True, "policy_renderer": "the policy's"}
