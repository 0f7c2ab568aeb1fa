"""Define a problem as an environment with a turn: the prompt is the observation, the answer ends
the episode, and a reward scores the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.images import content_to_text, has_images
from rl.renderers import Renderer, format_with_calls, renderer_for_row
from rl.rewards import CONVERSATION, Episode, EpisodeTurn, Scorer
from rl.rollout import Env, EnvGroupBuilder, StepResult
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
        response = format_with_calls(message)
        reward: Any = 0.0
        if (scorer := builder.scorer) is not None:
            episode = None
            if scorer.reward.episode:
                turn = EpisodeTurn(
                    response, tokens=len(action.tokens), stop_reason=action.stop_reason
                )
                episode = make_reward_episode(builder.problem, turn)
            reward = scorer.submit(builder.prompt_text, response, builder.reward_meta, episode)
        return StepResult(
            reward=reward,
            episode_done=True,
            metrics={"ended": float(ended)},
            logs={
                "prompt": builder.prompt_text,
                "response": response,
                "messages": builder.problem.messages,
                **builder.expected,
            },
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
        self.meta = problem.meta
        self.prompt = renderer_for_row(renderer, problem).build_generation_prompt(problem.messages)
        self.prompt_text = last_user_text(problem.messages)
        self.stop = renderer.get_stop_sequences()
        answer = problem.meta.get("answer", problem.meta.get("expected_answer"))
        self.expected = {} if answer is None else {"answer": str(answer)}
        self.reward_meta = make_reward_meta(problem, scorer)

    def make_envs(self) -> list[ProblemEnv]:
        """Return an environment for each member."""
        return [ProblemEnv(self) for _ in range(self.group_size)]


def make_reward_episode(problem: Problem, turn: EpisodeTurn) -> Episode:
    """Return the episode that a reward of whole episodes receives for an answer to a problem."""
    answer: Message = {"role": "assistant", "content": turn.response}
    return Episode([*_remove_images(problem.messages), answer], [turn], problem.tag)


def make_reward_meta(problem: Problem, scorer: Scorer | None) -> Mapping[str, Any]:
    """Return the `meta` argument of a reward: the row's columns. A reward of lists also receives
    the prompt of a row that is a conversation.
    """
    if scorer is None or not scorer.reward.batched or not problem.chat:
        return problem.meta
    return {**problem.meta, CONVERSATION: _remove_images(problem.messages)}


def _remove_images(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without images, as a reward receives them."""
    return [
        {**message, "content": content_to_text(message["content"])}
        if has_images([message])
        else message
        for message in messages
    ]


def last_user_text(messages: Sequence[Message]) -> str:
    """Return the `prompt` argument of a reward: the last user message."""
    for message in reversed(messages):
        if message["role"] == "user":
            return content_to_text(message["content"])
    return content_to_text(messages[-1]["content"])
