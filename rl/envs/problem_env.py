"""Define a problem as an environment with a turn: the prompt is the observation, the answer ends
the episode, and a reward scores the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.images import content_to_text, replace_images
from rl.renderers import Renderer, renderer_for_row
from rl.rewards import (
    CONVERSATION,
    RankScores,
    Reward,
    RewardItem,
    SampleScore,
    Score,
    ScoredProblem,
    Scorer,
)
from rl.rollout import Env, EnvGroupBuilder, StepResult, parse_answer
from rl.types import Message, ModelInput, Problem, SampledSequence


class ProblemEnv(Env):
    """Play an answer to a problem."""

    blocks = several_turns = False

    def __init__(self, builder: ProblemGroupBuilder):
        self.builder = builder
        self.scoring = builder.scoring

    def initial_observation(self) -> tuple[ModelInput, Sequence[str] | Sequence[int] | None]:
        """Return the prompt and its stop sequences."""
        return self.builder.prompt, self.builder.stop

    def step(self, action: SampledSequence) -> StepResult:
        """Return the finished step. Its reward is the score of the rank that sampled the action, if
        there is one; otherwise it is submitted to the scorer.
        """
        builder, scorer = self.builder, self.builder.scorer
        logs: Mapping[str, Any] = {
            "prompt": builder.prompt_text,
            "response": "",
            "messages": builder.problem.messages,
            **builder.expected,
        }
        reward: Any = 0.0
        computed: SampleScore | None = action.score
        if computed is not None and scorer is not None:
            ended, reward = computed.ended, computed.score
            logs = _DecodedLogs(logs, lambda: parse_answer(builder.renderer, action)[0])
            if isinstance(reward, Score):
                scorer.record_score(reward)
            else:
                assert builder.rank_scores is not None  # no other request gets a ticket
                reward = builder.rank_scores.expect(
                    reward, scorer, lambda: self._make_item(action, logs["response"])
                )
        else:
            response, ended = parse_answer(builder.renderer, action)
            logs = {**logs, "response": response}
            if scorer is not None:
                reward = scorer.submit(*self._make_item(action, response))
        return StepResult(
            reward=reward, episode_done=True, metrics={"ended": float(ended)}, logs=logs
        )

    def _make_item(self, action: SampledSequence, response: str) -> RewardItem:
        """Return the arguments of `Scorer.submit` for an answer with this text."""
        return self.builder.scored.make_item(response, action.num_tokens, action.stop_reason)


class _DecodedLogs(dict[str, Any]):
    """Hold the logs of an answer, a dict whose "response" is decoded when a value is first read."""

    def __init__(self, logs: Mapping[str, Any], decode: Callable[[], str]):
        super().__init__(logs)
        self.decode: Callable[[], str] | None = decode

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _decode_before(name: str) -> Callable[..., Any]:
    """Return a method of dict that decodes the response first."""
    method = getattr(dict, name)

    def call(logs: _DecodedLogs, *arguments: Any, **named: Any) -> Any:
        decode = logs.decode
        if decode is not None:
            dict.__setitem__(logs, "response", decode())
            logs.decode = None
        return method(logs, *arguments, **named)

    return call


# with its own __iter__, dict() and ** read a dict by __getitem__
for _name in (
    *("__getitem__", "__iter__", "__eq__", "__ne__", "__or__", "__ror__", "__repr__"),
    *("get", "items", "values", "copy", "pop", "popitem", "setdefault", "update", "clear"),
    *("__setitem__", "__delitem__", "__ior__"),
):
    setattr(_DecodedLogs, _name, _decode_before(_name))


class ProblemGroupBuilder(EnvGroupBuilder):
    """Build the group of a problem: the prompt is rendered once, and each member answers it.
    Without a scorer the reward is 0. `rank_scores`: the scorers that the ranks have opened for the
    same reward and renderer, to score what they sample.
    """

    def __init__(
        self,
        problem: Problem,
        group_size: int,
        renderer: Renderer,
        scorer: Scorer | None,
        rank_scores: RankScores | None = None,
    ):
        self.problem = problem
        self.group_size = group_size
        self.renderer = renderer_for_row(renderer, problem)
        self.scorer = scorer
        self.tag = problem.tag
        self.problem_index = problem.index
        self.meta = problem.meta
        prompt = self.renderer.build_generation_prompt(problem.messages)
        self.prompt = prompt.with_arrays()
        self.prompt_text = last_user_text(problem.messages)
        self.stop = self.renderer.get_stop_sequences()
        answer = problem.meta.get("answer", problem.meta.get("expected_answer"))
        self.expected = {} if answer is None else {"answer": str(answer)}
        self.scored = make_scored_problem(problem, None if scorer is None else scorer.reward)
        self.rank_scores = rank_scores
        # Pickled once for all answers; None: rank 0 scores them. The ranks' renderer does not know
        # the tools of a row, by which calls are parsed.
        self.scoring = (
            None if rank_scores is None or problem.tools else rank_scores.make_task(self.scored)
        )

    def make_envs(self) -> list[ProblemEnv]:
        """Return an environment for each member."""
        return [ProblemEnv(self) for _ in range(self.group_size)]


def make_scored_problem(problem: Problem, reward: Reward | None) -> ScoredProblem:
    """Return what a reward receives of a problem: the last user message, the row's columns, and the
    conversation if it takes episodes. The columns that a reward of lists receives include the
    prompt of a row that is a conversation.
    """
    meta: Mapping[str, Any] = problem.meta
    if reward is not None and reward.batched and problem.chat:
        meta = {**meta, CONVERSATION: replace_images(problem.messages)}
    takes_episodes = reward is not None and reward.episode
    messages = replace_images(problem.messages) if takes_episodes else None
    return ScoredProblem(last_user_text(problem.messages), meta, messages, problem.tag)


def last_user_text(messages: Sequence[Message]) -> str:
    """Return the `prompt` argument of a reward: the last user message."""
    for message in reversed(messages):
        if message["role"] == "user":
            return content_to_text(message["content"])
    return content_to_text(messages[-1]["content"])
