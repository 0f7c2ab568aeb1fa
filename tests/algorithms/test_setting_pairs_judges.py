"""Test pairs of settings: number of turns of an episode x kind of judge."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from scripted import ScriptedSampler
from test_rubric import GenerationRenderer

from rl.envs import Environment, EnvironmentGroup, TurnResult, resolve_environment
from rl.judges import (
    ComparisonModel,
    LearnedRewards,
    PairwiseJudge,
    RewardModel,
    Rubric,
    RubricJudge,
    apply_learned_rewards,
)
from rl.models import load_tokenizer
from rl.renderers import get_renderer
from rl.rollout import RolloutBatch, rollout
from rl.types import ModelInput, Problem, SamplingParams

MEMBERS, ROWS = 3, 2
TURNS = (1, 2, 3)


class InterviewEnvironment(Environment):
    """The first question comes from the row; later questions differ between members."""

    def start(self):
        self.turn = 1
        return f"<row {self.row['number']}>"

    def step(self, answer):
        self.turn += 1
        done = self.turn > self.row["turns"]
        question = f"<row {self.row['number']} member {self.member} turn {self.turn}>"
        return TurnResult(reward=0.25, done=True) if done else TurnResult(question, reward=0.5)


def play_interview(turns: int) -> RolloutBatch:
    """Return episodes in which every answer is a different number."""
    tokenizer, count = load_tokenizer("tiny:ascii"), itertools.count()
    renderer, spec = get_renderer("plain", tokenizer), resolve_environment(InterviewEnvironment)
    problems = [Problem((), {"number": i, "turns": turns}, index=i) for i in range(ROWS)]
    builders = [EnvironmentGroup(spec, problem, MEMBERS, renderer) for problem in problems]
    sampler = ScriptedSampler(tokenizer, lambda *_: f"[{next(count)}]")
    return rollout(builders, sampler, SamplingParams(max_tokens=20, temperature=1.0), seed=0)


class FakeJudgeClient:
    """A judge's client that records every text it receives and prefers later numbers."""

    info = {"max_context": None, "base_model": "a stand-in"}

    def __init__(self):
        self.texts: list[str] = []

    def _note(self, inputs) -> list[str]:
        texts = ["".join(map(chr, item.to_ints())) for item in inputs]
        self.texts += texts
        return texts

    def compute_logprobs_many(self, inputs):
        texts = self._note(inputs)
        logprobs = [[None, *[-0.01 * len(text)] * (len(text) - 1)] for text in texts]
        return SimpleNamespace(result=lambda: logprobs)

    def compute_values(self, inputs):
        texts = self._note(inputs)
        values = [[0.0, float(re.findall(r"\[(\d+)\]", text)[-1])] for text in texts]
        return SimpleNamespace(result=lambda: values)

    def sample_many(self, requests):
        texts = self._note([ModelInput.from_ints(request.prompt) for request in requests])
        sequence = SimpleNamespace(tokens=list(map(ord, "Score: 7")))
        results = [SimpleNamespace(sequences=[sequence]) for _ in texts]
        return SimpleNamespace(result=lambda: (results, {}))


class JudgeRenderer(GenerationRenderer):
    """Also builds the input of a reward model, whose policy has another tokenizer."""

    def reward_model_input(self, prompt, answer):
        tokenizer = load_tokenizer("tiny:ascii")
        return ModelInput.from_ints([ord(c) for c in tokenizer.decode([*prompt, *answer])])


def judge_of(kind: str, client: FakeJudgeClient):
    renderer = JudgeRenderer()
    if kind == "comparison":
        return PairwiseJudge(ComparisonModel(client, renderer))
    if kind == "reward":
        return RewardModel(client, "a stand-in", renderer, policy_renderer=renderer)
    rubric = Rubric.from_weights((("Is it right?", 1.0),), kind.removeprefix("rubric-"))
    return RubricJudge(client, renderer, rubric)


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("kind", ["comparison", "reward", "rubric-yes_no", "rubric-score"])
def test_an_answer_is_judged_beside_its_own_conversation(kind, turns):
    rollouts, client = play_interview(turns), FakeJudgeClient()
    result = apply_learned_rewards(rollouts, LearnedRewards(judge_of(kind, client), 0.5))
    assert not result.errors and len(result.groups) == ROWS
    conversations = {}  # by the last answer: the text of the conversation, and its group
    for row, group in enumerate(rollouts.groups):
        for member, trajectory in enumerate(group.trajectories_G):
            assert len(trajectory.transitions) == turns
            later = [f"<row {row} member {member} turn {turn}>" for turn in range(2, turns + 1)]
            questions = [f"<row {row}>", *later]
            answers = [turn.logs["response"] for turn in trajectory.transitions]
            conversations[answers[-1]] = ([*questions, *answers], row)
    seen = set()
    for text in client.texts:
        last = [answer for answer in conversations if answer in text]
        assert last and len(last) <= (2 if kind == "comparison" else 1), text
        for answer in last:
            missing = [part for part in conversations[answer][0] if part not in text]
            assert not missing, f"{answer} was judged without {missing}:\n{text}"
        known = {part for answer in last for part in conversations[answer][0]}
        strange = set(re.findall(r"<row[^>]*>|\[\d+\]", text)) - known
        assert not strange, f"{last} were judged beside {strange}:\n{text}"
        seen |= set(last)
    assert seen == set(conversations)
    for group, before in zip(result.groups, rollouts.groups, strict=True):
        learned = [metrics["reward/learned"] for metrics in group.metrics_G]
        reference = [0.5 * total for total in before.get_total_rewards()]
        assert group.get_total_rewards() == pytest.approx(np.add(learned, reference).tolist())
