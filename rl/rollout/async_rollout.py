"""Run a batch of groups asynchronously: `rollout` for episodes and rewards of uneven length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rl.rollout.env_executor import EnvExecutor
from rl.rollout.event_log import EventLog
from rl.rollout.lockstep import ActionSampler, RolloutBatch, assign_random_streams
from rl.rollout.rollout_engine import PlayerStream, RolloutEngine
from rl.rollout.rollout_types import EnvGroupBuilder
from rl.types import SamplingParams


def continuous_rollout(
    builders: Sequence[EnvGroupBuilder],
    sampler: ActionSampler,
    params: SamplingParams,
    *,
    seed: int,
    make_stream: Callable[[Any], Any],
    max_turns: int | None = None,
    players: Mapping[str, ActionSampler] | None = None,
    max_environments: int = 256,
    steps: int = 16,
    env_timeout: float | None = None,
    event_log: EventLog | None = None,
) -> RolloutBatch:
    """Return the result of `rollout`, while each episode advances independently. The tokens are the
    same; logprobs agree up to rounding, because the batches differ.

    `make_stream` makes a stream of a sampler (rl.client.SampleStream). `max_environments`:
    environments that work at the same time. `steps`: sampler steps between two checks for ready
    episodes. `env_timeout`: timeout of an environment that blocks. `event_log` decides which
    episodes were ready.
    """
    waiters = EnvExecutor(max_environments)
    streams = assign_random_streams([builder.problem_index for builder in builders])
    samplers: list[tuple[str | None, ActionSampler]] = [*(players or {}).items(), (None, sampler)]
    with ExitStack() as stack:
        stack.callback(waiters.close)
        seats = {
            player: PlayerStream(
                stack.enter_context(make_stream(client)), client.info["max_context"]
            )
            for player, client in samplers
        }
        flow = RolloutEngine(
            seats,
            params,
            waiters,
            event_log or EventLog(),
            steps=steps,
            env_timeout=env_timeout,
            max_turns=max_turns,
        )
        stack.callback(flow.close)
        for number, (builder, problem) in enumerate(zip(builders, streams, strict=True)):
            flow.start_group(number, builder, seed=seed, problem=problem)
        while len(flow.completed_groups()) < len(builders):
            flow.tick()
        return flow.take_rollouts(range(len(builders)))
