"""Run a batch of groups asynchronously: `rollout` for episodes and rewards of uneven length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rl.episodes.clock import Clock
from rl.episodes.episode import EnvGroupBuilder
from rl.episodes.flow import Flow, Seat
from rl.episodes.rollout import Rollouts, Sampler, group_streams
from rl.episodes.waiting import Waiters
from rl.types import SamplingParams


def continuous_rollout(
    builders: Sequence[EnvGroupBuilder],
    sampler: Sampler,
    params: SamplingParams,
    *,
    seed: int,
    stream_of: Callable[[Any], Any],
    max_turns: int | None = None,
    players: Mapping[str, Sampler] | None = None,
    limit: int = 256,
    steps: int = 16,
    seconds: float | None = None,
    clock: Clock | None = None,
) -> Rollouts:
    """Return the result of `rollout`, while each episode advances independently. The tokens are the
    same; logprobs agree up to rounding, because the batches differ.

    `stream_of` makes a stream of a sampler (rl.clients.SampleStream). `limit`: environments that
    work at the same time. `steps`: sampler steps between two checks for ready episodes. `seconds`:
    timeout of an environment that blocks. `clock` decides which episodes were ready.
    """
    waiters = Waiters(limit)
    streams = group_streams([builder.problem_index for builder in builders])
    samplers: list[tuple[str | None, Sampler]] = [*(players or {}).items(), (None, sampler)]
    with ExitStack() as stack:
        stack.callback(waiters.close)
        seats = {
            player: Seat(stack.enter_context(stream_of(client)), client.info["max_context"])
            for player, client in samplers
        }
        flow = Flow(
            seats,
            params,
            waiters,
            clock or Clock(),
            steps=steps,
            seconds=seconds,
            max_turns=max_turns,
        )
        stack.callback(flow.close)
        for number, (builder, problem) in enumerate(zip(builders, streams, strict=True)):
            flow.begin(number, builder, seed=seed, problem=problem)
        while len(flow.done()) < len(builders):
            flow.tick()
        return flow.take(range(len(builders)))
