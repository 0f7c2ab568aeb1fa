"""Test a language model that judges by a rubric."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from test_reward_model import Letters, group
from whole_runs import RECIPE, train

from rl import ServiceClient
from rl.algorithms import METHODS
from rl.config import LearnedRewardSettings, RunSettings, parse_run
from rl.errors import UserError
from rl.judges import LearnedRewards, Rubric, RubricJudge, RubricQuestion, apply_learned_rewards
from rl.judges.rubric_judge import make_rubric_prompt, parse_score
from rl.rewards import Score
from rl.rollout import RolloutBatch
from rl.trainer import make_renderer
from rl.types import ModelInput

POLITE_RIGHT = (("Is the answer polite?", 1.0), ("Is it right?", 3.0))


class YesNo:
    """A sampling client for `Letters`."""

    info = {"max_context": None, "base_model": "stub"}

    def __init__(self, likes):
        self.likes, self.requests_seen = likes, []

    def compute_logprobs_many(self, inputs):
        texts = ["".join(map(chr, item.to_ints())) for item in inputs]
        self.requests_seen.append(texts)
        return SimpleNamespace(result=lambda: [self._score(text) for text in texts])

    def _score(self, text):
        request, word = text.rsplit("\n", 1)
        answer = request.split("[Answer]\n")[1].split("\n")[0]
        both = self.likes(answer, request.split("[Question]\n")[1])
        logp = both[("yes", "no").index(word.rstrip("$"))]
        return [None, *[-9.0] * len(request), *[logp / len(word)] * len(word)]


def rate_answer(answer, question):
    """Return the logprobs of yes and no: length to 1 for politeness, 1 to 3 for being right."""
    return np.log([len(answer), 1] if "polite" in question else [1, 3]) - 4.0


def test_a_rubrics_score_is_the_weighted_mean_of_yes_against_no():
    client = YesNo(rate_answer)
    judge = RubricJudge(client, Letters(), Rubric.from_weights(POLITE_RIGHT))
    (first, second) = judge.scores([group("aaa", "b", "aaa"), group("cc")])
    for score, length in zip([*first, *second], [3, 1, 3, 2], strict=True):
        polite = length / (length + 1)
        assert score.reward == pytest.approx((1 * polite + 3 * 0.25) / 4)
        assert score.metrics == {
            "rubric/is_the_answer_polite": pytest.approx(polite),
            "rubric/is_it_right": pytest.approx(0.25),
        }
    assert len(client.requests_seen) == 1  # a single batch for the judge


def test_a_bad_thing_has_a_negative_weight():
    rubric = Rubric((RubricQuestion("Is it right?", 1.0, "right"),
                     RubricQuestion("Is it polite?", -1.0, "polite")))  # fmt: skip
    ((score,),) = RubricJudge(YesNo(rate_answer), Letters(), rubric).scores([group("aaa")])
    assert score.reward == pytest.approx((0.25 - 0.75) / 2)


def test_names_come_from_the_questions_and_differ():
    questions = ("Is the answer right and polite?", "Is the answer right and short?", "?!")
    rubric = Rubric.from_weights(tuple((question, 1) for question in questions))
    first = "is_the_answer_right_and"
    assert [q.name for q in rubric.questions] == [first, f"{first}-2", "question"]


@pytest.mark.parametrize(("text", "share"), [
    ("It is fine.\nScore: 7", 0.7),
    ("score 3, no: **Score: 8/10**", 0.8),
    ("Score: **5**", 0.5),
    ("Score is 2.5.", 0.25),
    ("**Score**: 8", 0.8),
    ("**Final Score**: 7", 0.7),
    ("*Score*: **8**", 0.8),
    ("TotalScore: 6", 0.6),
    ("FINALSCORE: 6, totalscore: 7", None),
    (r"Score: $\boxed{8}$", 0.8),
    ('{"score": 8}', 0.8),
    ("Score: 1e1", 1.0),
    ("Score: 4. Underscore 3", 0.4),
    ("<think>Score: 9</think> I cannot say", None),
    ("<think>Score: 9</think> Score: 1", 0.1),
    ("<think>Hm, maybe Score: 7", None),
    ("Score: 2 <think>or maybe Score: 7", 0.2),
    ("Score: 11", None),
    ("Score: -1", None),
    ("seven", None),
    ("", None),
])  # fmt: skip
def test_a_written_score_is_the_last_one_and_on_the_scale(text, share):
    assert parse_score(text, 10.0) == (None if share is None else pytest.approx(share))


class FakeGenerationClient:
    """A client that answers each prompt of `Letters` with `says(prompt)`."""

    info = {"max_context": None, "base_model": "stub"}

    def __init__(self, says):
        self.says, self.requests = says, []

    def sample_many(self, requests):
        self.requests += requests
        texts = [self.says("".join(map(chr, item.prompt))) for item in requests]
        sequences = [SimpleNamespace(tokens=list(map(ord, text))) for text in texts]
        results = [SimpleNamespace(sequences=[sequence]) for sequence in sequences]
        return SimpleNamespace(result=lambda: (results, {}))


class GenerationRenderer(Letters):
    def build_generation_prompt(self, messages):
        return self.build_supervised_example([*messages, {"role": "assistant", "content": ""}])[0]

    def get_stop_sequences(self):
        return ["$"]

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    def get_answer_text(self, tokens):
        return self.decode(tokens).rstrip("$")

    def marks(self):
        return ()

    def thought_marks(self):
        return None

    def call_format(self):
        return None

    def available_tools(self):
        return ()

    def cut_at_stop(self, text):
        return text


class ThoughtRenderer(GenerationRenderer):
    """A renderer whose prompts open the thoughts of the answer."""

    def build_generation_prompt(self, messages):
        prompt = super().build_generation_prompt(messages).to_ints()
        return ModelInput.from_ints([*prompt, *map(ord, "<think>")])

    def thought_marks(self):
        return "<think>", "</think>"


def test_a_score_in_thoughts_that_never_end_is_no_score():
    def says(prompt):
        return "maybe Score: 7" if "[Answer]\nbb" in prompt else "Score: 7</think>Score: 4$"

    rubric = Rubric.from_weights((("Is it right?", 1.0),), "score", scale=10.0, max_tokens=30)
    judge = RubricJudge(FakeGenerationClient(says), ThoughtRenderer(), rubric)
    ((first, second),) = judge.scores([group("a", "bb")])
    assert first.reward == pytest.approx(0.4)
    assert second.reward is None and "wrote no score" in second.error


def test_an_answer_for_which_the_judge_writes_no_score_costs_itself_alone():
    def says(prompt):
        if "[Answer]\nbb" in prompt and "right" in prompt:
            return "well, well"
        return f"Score: {2 if 'polite' in prompt else 4}$"

    client = FakeGenerationClient(says)
    rubric = Rubric.from_weights(POLITE_RIGHT, "score", scale=5.0, max_tokens=9)
    judge = RubricJudge(client, GenerationRenderer(), rubric)
    inputs = RolloutBatch([group("a", "bb", "a"), group("bb")], [], {}, 0.0, 0.0)
    rewards = LearnedRewards(judge, 0.0)
    result = apply_learned_rewards(inputs, rewards)
    ((kept),) = result.groups
    assert kept.get_total_rewards() == pytest.approx([(0.4 + 3 * 0.8) / 4] * 2)
    assert len(result.errors) == 2
    assert all("wrote no score from 0 to 5 for is_it_right" in error for error in result.errors)
    # equal answers are judged once
    assert len(client.requests) == 4 and {item.params.max_tokens for item in client.requests} == {9}
    assert rewards.take_seconds()["learned"] > 0 == rewards.take_seconds()["learned"]


def test_scores_without_metrics_and_with_stand_side_by_side():
    scores = [[0.5, Score(2.0, {"x": 1.0})]]
    judge = SimpleNamespace(scores_single_answers=True, scores=lambda groups: scores)
    ((first,), _) = LearnedRewards(judge, 1.0).judge_groups([group("a", "b", rewards=[1.0, 2.0])])
    assert first.get_total_rewards() == [1.5, 4.0]
    assert first.metrics_G == [
        {"reward/learned": 0.5, "reward/given": 1.0},
        {"x": 1.0, "reward/learned": 2.0, "reward/given": 2.0},
    ]


def test_the_probability_of_yes_is_that_of_a_model_run_by_itself(tmp_path):
    """Compare with the sampling client's logprobs of each token, computed on single sequences."""
    with ServiceClient(output_dir=tmp_path, seed=3) as service:
        client = service.create_sampling_client(base_model="tiny:ascii", seed=5)
        renderer = make_renderer(client, None)
        rubric = Rubric.from_weights(POLITE_RIGHT)
        first = group("A kind answer.")
        text = [{"role": "user", "content": "Hi?"}]
        first.trajectories_G[0].transitions[0].logs["messages"] = text
        ((score,),) = RubricJudge(client, renderer, rubric).scores([first])
        for question in rubric.questions:
            logp = []
            for word in ("yes", "no"):
                prompt = make_rubric_prompt(text, "A kind answer.", question, rubric)
                messages = [*prompt, {"role": "assistant", "content": word}]
                whole, _ = renderer.build_supervised_example(messages)
                before = renderer.build_generation_prompt(prompt).length
                logp.append(sum(client.compute_logprobs(whole).result()[before:]))
            share = 1 / (1 + math.exp(logp[1] - logp[0]))
            assert score.metrics[f"rubric/{question.name}"] == pytest.approx(share, rel=1e-4)


def test_a_conversation_too_long_for_the_judge_names_the_remedy():
    client = YesNo(rate_answer)
    client.info = {"max_context": 20, "base_model": "stub"}
    with pytest.raises(UserError, match="reads at most 20 tokens.*longer context"):
        RubricJudge(client, Letters(), Rubric.from_weights(POLITE_RIGHT)).scores([group("a")])


@pytest.mark.parametrize(("settings", "message"), [
    ({"rubric_model": "x"}, "rubric and rubric_model go together"),
    ({"rubric": POLITE_RIGHT}, "rubric and rubric_model go together"),
    ({"rubric_model": "x", "rubric": POLITE_RIGHT, "reward_model": "y"}, "leave out y"),
    ({"rubric_scale": 5.0}, "rubric_reading is yes_no"),
    ({"rubric_reading": "score"}, "no rubric_model"),
])  # fmt: skip
def test_settings_that_say_two_things_or_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        LearnedRewardSettings(**settings)
    LearnedRewardSettings(
        rubric_model="x", rubric=POLITE_RIGHT, rubric_reading="score", rubric_scale=5.0
    )


def test_a_rubric_on_the_line():
    words = [
        "grpo", "--rubric-model", "tiny:ascii", "--rubric", "Is it polite?", "1", "Is it right?",
        "-2",
    ]  # fmt: skip
    (stage,) = parse_run(words, METHODS, RECIPE, options=RunSettings).stages
    assert stage.settings.learned.rubric == (("Is it polite?", 1.0), ("Is it right?", -2.0))


SHORT = (
    "grpo --steps 1 --batch-size 2 --group-size 2 --eval-every 0 --max-tokens 4 --rubric-model "
    "tiny:ascii --rubric Polite? 1 Right? 2"
)


@pytest.mark.slow
def test_a_rubric_in_the_loop(tmp_path):
    """The metrics row of a batch has the rubric scores and the time spent on judging."""
    train(SHORT, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if "progress/batch" in row)
    polite, right = row["env/all/rubric/polite"], row["env/all/rubric/right"]
    assert row["reward/total"] == pytest.approx((polite + 2 * right) / 3) and 0 < polite < 1
    assert row["time/reward/learned"] > 0 and row["time/reward/exact_match"] >= 0


@pytest.mark.slow
def test_a_judge_that_writes_no_score_ends_the_run_and_says_so(tmp_path):
    with pytest.raises(UserError, match="the judge wrote no score from 0 to 10 for polite, right"):
        train(f"{SHORT} --rubric-reading score --rubric-max-tokens 4", tmp_path)
