"""A problem as an environment of one turn: the prompt is the observation, the answer ends the episode, a reward scores it."""

from __future__ import annotations

from collections.abc import Sequence

from rl.episodes import Env, EnvGroupBuilder, StepResult
from rl.renderers import Renderer
from rl.rewards import Scorer
from rl.types import Message, ModelInput, Problem, SampledSequence


class ProblemEnv(Env):
    """One answer to one problem."""

    def __init__(self, builder: ProblemGroupBuilder):
        self.builder = builder

    def initial_observation(self) -> tuple[ModelInput, Sequence[str] | Sequence[int] | None]:
        return self.builder.prompt, self.builder.stop

    def step(self, action: SampledSequence) -> StepResult:
        builder = self.builder
        message, ended = builder.renderer.parse_response(action.tokens)
        response = str(message["content"])
        scorer = builder.scorer
        return StepResult(
            reward=0.0 if scorer is None else scorer.submit(builder.prompt_text, response, builder.problem.meta),
            episode_done=True,
            metrics={"ended": float(ended)},
            logs={"prompt": builder.prompt_text, "response": response, "messages": builder.problem.messages},
        )


class ProblemGroupBuilder(EnvGroupBuilder):
    """The group of one problem: the prompt is rendered once, every member answers it. Without a scorer the reward is 0."""

    def __init__(self, problem: Problem, group_size: int, renderer: Renderer, scorer: Scorer | None):
        self.problem = problem
        self.group_size = group_size
        self.renderer = renderer
        self.scorer = scorer
        self.tag = problem.tag
        self.problem_index = problem.index
        self.prompt = renderer.build_generation_prompt(problem.messages)
        self.prompt_text = prompt_text(problem.messages)
        self.stop = renderer.get_stop_sequences()

    def make_envs(self) -> list[ProblemEnv]:
        return [ProblemEnv(self) for _ in range(self.group_size)]


def prompt_text(messages: Sequence[Message]) -> str:
    """What a reward gets as `prompt`: the last user message."""
    for message in reversed(messages):
        if message["role"] == "user":
            return str(message["content"])
    return str(messages[-1]["content"])
