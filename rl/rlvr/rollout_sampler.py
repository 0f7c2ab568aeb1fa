"""Sample a batch of trajectories from prompts; the caller sets their rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl.envs import ProblemGroupBuilder
from rl.errors import UserError
from rl.renderers import Renderer, get_renderer
from rl.rollout import Trajectory, TrajectoryGroup, rollout
from rl.seed import derive_seed
from rl.types import Problem, SamplingParams

if TYPE_CHECKING:
    from rl.client import SamplingClient, TrainingClient


@dataclass(slots=True)
class ScoredTrajectory:
    """Hold a response to a prompt, and its reward once it is set.

    `meta` is the prompt's metadata. `episode` has the sampled tokens and behavior logprobs.
    """

    prompt: str
    response: str
    episode: Trajectory
    meta: dict[str, Any] = field(default_factory=dict)
    reward: float | None = None

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the response, with the stop token if it was sampled."""
        return self.episode.transitions[-1].ac.tokens

    @property
    def truncated(self) -> bool:
        """Return whether max_new_tokens truncated the response."""
        return self.episode.transitions[-1].ac.stop_reason == "length"


@dataclass
class TrajectoryBatch:
    """Hold trajectories sampled at the same temperature, by default that of their episodes.

    Set the `reward` of each, or all of them with `batch.rewards = [...]`. Raises UserError for
    trajectories of several temperatures.
    """

    trajectories: list[ScoredTrajectory]
    temperature: float | None = None

    def __post_init__(self) -> None:
        sampled = [t.episode.transitions[-1].ac.temperature for t in self.trajectories]
        temperatures = {t for t in (self.temperature, *sampled) if t is not None}
        if len(temperatures) > 1:
            raise UserError(
                "the trajectories were sampled at the temperatures "
                f"{', '.join(f'{t:g}' for t in sorted(temperatures))}: an update takes those of one"
            )
        self.temperature = next(iter(temperatures), None)

    def __iter__(self) -> Iterator[ScoredTrajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, index: int) -> ScoredTrajectory:
        return self.trajectories[index]

    @property
    def rewards(self) -> list[float]:
        """Return the reward of each trajectory.

        Raises UserError if the batch is empty, or if a reward is missing or not finite.
        """
        if not self.trajectories:
            raise UserError(
                "the batch has no trajectories: generate_trajectories takes at least one prompt"
            )
        rewards = []
        for i, trajectory in enumerate(self.trajectories):
            if trajectory.reward is None:
                raise UserError(
                    f"trajectory {i} has no reward yet (prompt {trajectory.prompt[:40]!r}): set "
                    "trajectory.reward first"
                )
            reward = float(trajectory.reward)
            if not math.isfinite(reward):
                raise UserError(
                    f"trajectory {i} has the reward {reward} (prompt {trajectory.prompt[:40]!r}): "
                    "a finite number is expected"
                )
            rewards.append(reward)
        return rewards

    @rewards.setter
    def rewards(self, values: Sequence[float]) -> None:
        if len(values) != len(self.trajectories):
            raise UserError(
                f"{len(self.trajectories)} trajectories need as many rewards, in their order; got "
                f"{len(values)}"
            )
        for trajectory, value in zip(self.trajectories, values, strict=True):
            trajectory.reward = float(value)

    @property
    def mean_reward(self) -> float:
        """Return the mean reward."""
        return statistics.fmean(self.rewards)

    @property
    def std_reward(self) -> float:
        """Return the population standard deviation of the rewards."""
        return statistics.pstdev(self.rewards)

    def groups(self) -> list[TrajectoryGroup]:
        """Return the input of a method's `shape_rewards`.

        Each trajectory is a group by itself, with its reward on its only turn.
        """
        groups = []
        for i, (trajectory, reward) in enumerate(zip(self.trajectories, self.rewards, strict=True)):
            trajectory.episode.transitions[-1].reward = reward
            groups.append(TrajectoryGroup([trajectory.episode], [0.0], [{}], "rlvr", i))
        return groups


class RolloutSampler:
    """Sample responses with the current weights of a training client.

    `renderer` formats the prompt (a name of `rl.renderers.RENDERER_NAMES` or a renderer). The
    default is the model's chat template, or plain text if its tokenizer has none. The
    `samples_per_prompt` responses to a prompt are consecutive in the batch. The random streams are
    a function of `seed` (by default the service's), the weight version, the number of the call at
    that version, and the positions of prompt and sample. Thus a script that resumes after an update
    samples the same responses as without the interruption.
    """

    def __init__(
        self,
        client: TrainingClient,
        *,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        samples_per_prompt: int = 1,
        renderer: str | Renderer | None = None,
        seed: int | None = None,
    ):
        if samples_per_prompt < 1:
            raise UserError(f"samples_per_prompt must be at least 1, got {samples_per_prompt}")
        self.client = client
        self.params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature)
        self.samples_per_prompt = samples_per_prompt
        self.seed = client.service.seed if seed is None else seed
        tokenizer = client.get_tokenizer()
        default = "chat_template" if tokenizer.chat_template else "plain"
        self.renderer = (
            renderer
            if isinstance(renderer, Renderer)
            else get_renderer(renderer or default, tokenizer)
        )
        self._last_call = (-1, 0)  # weight version, number of calls at it
        self._weights: SamplingClient | None = None

    def generate_trajectories(
        self,
        prompts: Sequence[str | Mapping[str, Any]],
        metas: Sequence[Mapping[str, Any]] | None = None,
    ) -> TrajectoryBatch:
        """Return a batch of responses to the prompts, in their order.

        A prompt is a text, or {"prompt": text, "meta": {...}}. Raises UserError if a prompt is
        invalid or does not fit the context, or if `metas` has another length.
        """
        if isinstance(prompts, str) or not prompts:
            raise UserError(
                f"generate_trajectories takes a list of at least 1 prompt, got {prompts!r}"
            )
        if metas is not None and len(metas) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts need as many metas, in their order; got {len(metas)}"
            )
        problems = [
            _make_problem(i, prompt, None if metas is None else metas[i])
            for i, prompt in enumerate(prompts)
        ]
        builders = [
            ProblemGroupBuilder(problem, self.samples_per_prompt, self.renderer, None)
            for problem in problems
        ]
        if self._weights is not None:
            self._weights.release()
        self._weights = self.client.save_weights_and_get_sampling_client()
        version, calls = self._weights.version, 0
        if self._last_call[0] == version:
            calls = self._last_call[1] + 1
        self._last_call = (version, calls)
        rollouts = rollout(
            builders,
            self._weights,
            self.params,
            seed=derive_seed(self.seed, "rlvr", version, calls),
        )
        if rollouts.errors:
            raise UserError(rollouts.errors[0])
        trajectories = []
        for problem, group in zip(problems, rollouts.groups, strict=True):
            for episode in group.trajectories_G:
                logs = episode.transitions[-1].logs
                trajectories.append(
                    ScoredTrajectory(logs["prompt"], logs["response"], episode, dict(problem.meta))
                )
        return TrajectoryBatch(trajectories)


def _make_problem(
    index: int, prompt: str | Mapping[str, Any], meta: Mapping[str, Any] | None
) -> Problem:
    """Return the problem of a prompt. Raises UserError if the prompt is invalid."""
    text: Any = prompt
    if isinstance(prompt, Mapping):
        unknown = sorted(set(prompt) - {"prompt", "meta"})
        if unknown or "prompt" not in prompt:
            raise UserError(
                f"prompt {index} must be a text or {{'prompt': text, 'meta': {{...}}}}, got the "
                f"keys {sorted(prompt)}"
            )
        text, meta = prompt["prompt"], prompt.get("meta") if meta is None else meta
    if not isinstance(text, str) or not text:
        raise UserError(f"prompt {index} must be a text that is not empty, got {text!r}")
    if not isinstance(meta, Mapping | None):
        raise UserError(f"the meta of prompt {index} must be a mapping, got {meta!r}")
    return Problem([{"role": "user", "content": text}], meta=meta or {}, tag="rlvr", index=index)
