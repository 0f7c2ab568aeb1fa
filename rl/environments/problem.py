"""Define a problem as an environment with a turn: the prompt is the observation, the answer ends
the episode, and a reward scores the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.episodes import Env, EnvGroupBuilder, StepResult
from rl.images import has_images, said
from rl.renderers import Renderer, with_calls
from rl.rewards import CONVERSATION, Episode, Scorer, Turn
from rl.types import Message, ModelInput, Problem, SampledSequence


class ProblemEnv(Env):
    """Play an answer to a problem."""

    blocks = several_turns = False

    def __init__(self, builder: ProblemGroupBuilder):
        self.builder = builder

    def initial_observation(self) -> tuple[ModelInput, Sequence[str] | Sequence[int] | None]:
        """Return the prompt and its stop sequences."""
        return self.builder.prompt, self.builder.stop

    def step(self, action: SampledSequence) -> StepResult:
        """Return the finished step; its reward is submitted to the scorer."""
        builder = self.builder
        message, ended = builder.renderer.parse_response(action.tokens)
        response = with_calls(message)
        scorer, meta = builder.scorer, builder.reward_meta
        earned: Any = (
            0.0
            if scorer is None
            else scorer.submit(builder.prompt_text, response, meta, self._episode(action, response))
        )
        return StepResult(
            reward=earned,
            episode_done=True,
            metrics={"ended": float(ended)},
            logs={
                "prompt": builder.prompt_text,
                "response": response,
                "messages": builder.problem.messages,
                **builder.expected,
            },
        )

    def _episode(self, action: SampledSequence, response: str) -> Episode | None:
        """Return the episode for a reward that takes whole episodes, else None."""
        builder = self.builder
        if builder.scorer is None or not builder.scorer.reward.episode:
            return None
        return episode_of(
            builder.problem,
            Turn(response, tokens=len(action.tokens), stop_reason=action.stop_reason),
        )


class ProblemGroupBuilder(EnvGroupBuilder):
    """Build the group of a problem: the prompt is rendered once, and each member answers it.
    Without a scorer the reward is 0.
    """

    def __init__(
        self, problem: Problem, group_size: int, renderer: Renderer, scorer: Scorer | None
    ):
        self.problem = problem
        self.group_size = group_size
        self.renderer = renderer
        self.scorer = scorer
        self.tag = problem.tag
        self.problem_index = problem.index
        self.prompt = renderer.build_generation_prompt(problem.messages)
        self.prompt_text = prompt_text(problem.messages)
        self.stop = renderer.get_stop_sequences()
        answer = problem.meta.get("answer", problem.meta.get("expected_answer"))
        self.expected = {} if answer is None else {"answer": str(answer)}
        self.reward_meta = reward_meta(problem, scorer)

    def make_envs(self) -> list[ProblemEnv]:
        """Return an environment for each member."""
        return [ProblemEnv(self) for _ in range(self.group_size)]


def episode_of(problem: Problem, turn: Turn) -> Episode:
    """Return the episode that a reward of whole episodes receives for an answer to a problem."""
    answer: Message = {"role": "assistant", "content": turn.response}
    return Episode([*_as_text(problem.messages), answer], [turn], problem.tag)


def reward_meta(problem: Problem, scorer: Scorer | None) -> Mapping[str, Any]:
    """Return the `meta` argument of a reward: the row's columns. A reward of lists also receives
    the prompt of a row that is a conversation.
    """
    if scorer is None or not scorer.reward.together or not problem.chat:
        return problem.meta
    return {**problem.meta, CONVERSATION: _as_text(problem.messages)}


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without images, as a reward receives them."""
    return [
        {**message, "content": said(message["content"])} if has_images([message]) else message
        for message in messages
    ]


def prompt_text(messages: Sequence[Message]) -> str:
    """Return the `prompt` argument of a reward: the last user message."""
    for message in reversed(messages):
        if message["role"] == "user":
            return said(message["content"])
    return said(messages[-1]["content"])
