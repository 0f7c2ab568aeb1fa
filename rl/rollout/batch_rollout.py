"""Run groups of environments to their end, with episodes in lockstep or each by itself."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rl.rollout.env_executor import EnvExecutor
from rl.rollout.event_log import EventLog
from rl.rollout.rollout_engine import ActionStream, PlayerStream, RolloutEngine, SamplingStep
from rl.rollout.rollout_types import EnvGroupBuilder, Pending, RolloutBatch
from rl.seed import derive_seed
from rl.types import SampleResponse, SamplingParams

if TYPE_CHECKING:
    from rl.sampler import SamplingRequest


# responses, and the engine's counters
Samples: TypeAlias = tuple[list[SampleResponse], dict[str, int]]


class ActionSampler(Protocol):
    """Sample actions: the part of SamplingClient that rollouts use."""

    @property
    def info(self) -> Mapping[str, Any]: ...

    def sample_many(self, requests: Sequence[SamplingRequest], /) -> Pending[Samples]: ...


@dataclass(frozen=True, kw_only=True)
class RolloutSchedule:
    """Schedule the episodes of a rollout.

    make_stream       makes a stream of a sampler (rl.client.SampleStream): each episode continues
                      as soon as its environment has answered. None: lockstep, all episodes take
                      each turn together, in a single call of `sample_many`. A sampler with a
                      method `open_stream` makes its stream itself
    steps             sampler steps between two checks for ready episodes
    max_environments  environments and rewards that work at the same time
    env_timeout       seconds of a turn of an environment that blocks (None: not limited)
    """

    make_stream: Callable[[Any], Any] | None = None
    steps: int = 16
    max_environments: int = 256
    env_timeout: float | None = None


def rollout(
    builders: Sequence[EnvGroupBuilder],
    sampler: ActionSampler,
    params: SamplingParams,
    *,
    seed: int,
    max_turns: int | None = None,
    players: Mapping[str, ActionSampler] | None = None,
    schedule: RolloutSchedule = RolloutSchedule(),
    event_log: EventLog | None = None,
    parts: int = 1,
    process: Callable[[RolloutBatch], RolloutBatch] = lambda part: part,
) -> RolloutBatch:
    """Run the episodes of every group to their end. Return their trajectories and rewards, in the
    order of `builders`.

    The tokens do not depend on `schedule`; logprobs agree up to rounding, because the batches
    differ. `event_log` decides which episodes were ready at which tick.

    If the next observation of an episode leaves fewer than `params.max_tokens` tokens in the
    model's context or the sampler's KV cache, the episode ends: it is truncated, the metrics of its
    last turn have `context_overflow` 1, and it keeps the rewards earned so far. If the first
    observation leaves too few, the episode is left out and `errors` has the reason. The same holds
    for the builder's `max_tokens`. `max_turns` overrides the builders' `max_turns`.

    `players`: samplers of seats that are not the policy's, by the names that environments use. If
    several seats of an episode are the policy's, the trajectories of each seat form a separate
    group, because they are not comparable across seats.

    `process` is called with each of `parts` parts of the batch, of about equal size and in the
    order of `builders`, as soon as its groups have ended. The result merges what it returns.

    The random stream of a sample is a function of (seed, turn, problem, index in the group,
    position) alone; a problem that occurs twice in the batch gets a second stream. Raises
    ValueError for a group without members or turns.
    """
    samplers: dict[str | None, ActionSampler] = {None: sampler}
    samplers.update((players or {}).items())
    with open_engine(samplers, params, schedule, event_log, max_turns=max_turns) as engine:
        streams = assign_random_streams([builder.problem_index for builder in builders])
        for number, (builder, stream) in enumerate(zip(builders, streams, strict=True)):
            engine.start_group(number, builder, seed=seed, random_stream=stream)
        results: list[RolloutBatch] = []
        cuts = [round(i * len(builders) / parts) for i in range(parts + 1)]
        ranges = list(itertools.starmap(range, itertools.pairwise(cuts)))
        for numbers in ranges:
            while not set(numbers) <= set(engine.completed_groups()):
                engine.tick()
            part = engine.take_rollouts(numbers)
            if numbers is not ranges[-1]:
                results.append(process(part))
    results.append(process(part))  # without the streams, whose memory a judge may need
    return functools.reduce(RolloutBatch.merge, results)


@contextmanager
def open_engine(
    samplers: Mapping[str | None, Any],
    params: SamplingParams,
    schedule: RolloutSchedule,
    event_log: EventLog | None = None,
    *,
    max_turns: int | None = None,
) -> Iterator[RolloutEngine]:
    """Yield an engine of these players' samplers. Its groups and streams close with the context."""
    executor = EnvExecutor(schedule.max_environments)
    with ExitStack() as stack:
        stack.callback(executor.close)
        streams = {
            player: PlayerStream(
                BatchStream(sampler)
                if schedule.make_stream is None
                else stack.enter_context(
                    sampler.open_stream()
                    if hasattr(sampler, "open_stream")
                    else schedule.make_stream(sampler)
                ),
                sampler.info,
            )
            for player, sampler in samplers.items()
        }
        engine = RolloutEngine(
            streams,
            params,
            executor,
            event_log or EventLog(),
            steps=schedule.steps,
            env_timeout=schedule.env_timeout,
            max_turns=max_turns,
            lockstep=schedule.make_stream is None,
        )
        stack.callback(engine.close)
        yield engine


def assign_random_streams(problem_indices: Sequence[int]) -> list[int]:
    """Return a random stream for each group: the problem's index, or for the k-th repetition of the
    problem in the batch a number derived from both.
    """
    counts: Counter[int] = Counter()
    streams = []
    for index in problem_indices:
        streams.append(index if counts[index] == 0 else derive_seed(index, counts[index]))
        counts[index] += 1
    return streams


class BatchStream(ActionStream):
    """Sample all added requests to their end in a single call of `sample_many`.

    Requests of adjacent members of a group with the same prompt share a request (a single prefill).
    """

    def __init__(self, sampler: ActionSampler):
        self._sampler = sampler
        self._requests: dict[int, SamplingRequest] = {}
        self._next_ticket = 0

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def add(self, request: SamplingRequest) -> int:
        self._next_ticket += 1
        self._requests[self._next_ticket] = request
        return self._next_ticket

    def drop(self, ticket: int) -> None:
        del self._requests[ticket]

    def end_conversation(self, conversation: str) -> None:
        """Do nothing: no cache outlives a call of `sample_many`."""

    def recompute_cache(self) -> None:
        """Do nothing: no cache outlives a call of `sample_many`."""

    def switch_weights(self, client: ActionSampler, *, recompute: bool) -> None:
        self._sampler = client

    def unfinished(self) -> Mapping[int, SamplingRequest]:
        return self._requests

    def run_steps(self, steps: int) -> SamplingStep:
        groups: list[list[SamplingRequest]] = []
        for request in self._requests.values():
            if groups and _continues(groups[-1], request):
                groups[-1].append(request)
            else:
                groups.append([request])
        requests = [replace(group[0], num_samples=len(group)) for group in groups]
        responses, counters = self._sampler.sample_many(requests).result()
        sequences = [sequence for response in responses for sequence in response.sequences]
        tickets, self._requests = list(self._requests), {}
        return SamplingStep(
            {
                ticket: SampleResponse(sequences=[sequence])
                for ticket, sequence in zip(tickets, sequences, strict=True)
            },
            counters,
        )


def _continues(group: Sequence[SamplingRequest], request: SamplingRequest) -> bool:
    """Return whether a request is that of the next member of the same group, for the same
    prompt. Each request has one sample.
    """
    first = group[0]
    return (
        request.first_index == first.first_index + len(group)
        and (request.problem, request.seed) == (first.problem, first.seed)
        and (request.params, request.scoring) == (first.params, first.scoring)
        and (request.prompt, request.prompt_key()) == (first.prompt, first.prompt_key())
    )
