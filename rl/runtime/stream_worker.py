"""Run a stream on a rank: an engine that persists between verbs and runs a few steps at a time.

A stream is a sampler that accepts requests while it runs. Every rank has a separate engine of it
and takes the requests that the driver has assigned to it. A step request runs a number of engine
steps on each rank, so other verbs (an update, an evaluation) run between two step requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field

from rl.rewards import ScoringTask
from rl.runtime.sampler_versions import RankEngine
from rl.sampler import Engine, SamplingRequest
from rl.types import SampledSequence, SampleResponse, merge_counters


@dataclass
class StepOutput:
    """Hold the result of a step request: finished requests by ticket (an error if the request was
    refused or failed), and the engines' counters since the last step request.

    `partial_output`: all tokens sampled so far by running samples, by ticket and sample, if
    requested.
    """

    finished: dict[int, SampleResponse | Exception] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    partial_output: dict[int, dict[int, SampledSequence]] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Sequence[StepOutput]) -> StepOutput:
        """Merge the outputs of all ranks, tickets in order. Counters are summed, peaks are
        maxima.
        """
        total = cls()
        for part in parts:
            total.finished |= part.finished
            total.partial_output |= part.partial_output
        total.counters = merge_counters(part.counters for part in parts)
        total.finished = dict(sorted(total.finished.items()))
        return total


@dataclass(frozen=True)
class StepRequest:
    """Describe a step request. `new_requests`: (ticket, rank or tensor-parallel group that takes
    it, request). `recompute`: first recompute the KV cache.

    `mixed`: requests are of several models on the same base, and name their model.
    """

    steps: int
    new_requests: Sequence[tuple[int, int, SamplingRequest]] = ()
    dropped: Sequence[int] = ()
    recompute: bool = False
    mixed: bool = False
    # tickets to return partial output of; True: all
    partial_tickets: Collection[int] | bool = False


class WorkerStream:
    """Hold this rank's engine of a stream, and the tickets of its requests."""

    def __init__(self, engine: RankEngine):
        self.engine = engine
        self.version_id = -1  # the worker's id of the weight version
        self.tickets: dict[int, int] = {}  # by the engine's request id
        self._tasks: dict[int, ScoringTask] = {}  # of requests that this rank scores, by ticket
        self._last_counters: dict[str, int] = {}

    def run(
        self,
        step_request: StepRequest,
        rank: int,
        make_engine: Callable[[Sequence[SamplingRequest]], RankEngine],
        on_finish: Callable[[ScoringTask | None, object], object] = lambda task, response: None,
    ) -> StepOutput:
        """Execute a step request on this rank. `make_engine` makes an engine for its unfinished
        requests. `on_finish` is called with the `scoring` and the response of a finished request.
        """
        if step_request.recompute:
            self.move_to_new_engine(make_engine)
        for number, ticket in list(self.tickets.items()):
            if ticket in step_request.dropped:
                self.engine.cancel(number)
                self._tasks.pop(self.tickets.pop(number), None)
        output = StepOutput()
        for ticket, to, request in step_request.new_requests:
            if to == rank:
                try:
                    self.tickets[self.engine.add(request)] = ticket
                    if request.scoring is not None:
                        self._tasks[ticket] = request.scoring
                except ValueError as error:  # it cannot run
                    output.finished[ticket] = error.with_traceback(None)
        for ticket, response in self.run_steps(step_request.steps).items():
            on_finish(self._tasks.pop(ticket, None), response)
            output.finished[ticket] = response
        output.counters = self._collect_counters()
        if step_request.partial_tickets:
            output.partial_output = self._collect_partial_output(step_request.partial_tickets)
        return output

    def run_steps(self, steps: int) -> dict[int, SampleResponse | Exception]:
        """Run at most `steps` engine steps. Return finished requests by ticket."""
        finished: dict[int, SampleResponse | Exception] = {}
        engine = self.engine
        while steps > 0 and engine.busy:
            steps_before = engine.counters.steps
            if isinstance(engine, Engine):
                # steps between host syncs must not pass the end of a step request, where weights
                # may change
                engine.max_steps = steps
            for done in engine.step():
                finished[self.tickets.pop(done.request_id)] = done.response
            steps -= max(engine.counters.steps - steps_before, 1)
        return finished

    def _collect_partial_output(
        self, tickets: Collection[int] | bool
    ) -> dict[int, dict[int, SampledSequence]]:
        """Return what these tickets (True: all) have sampled so far, by ticket and sample."""
        request_ids = {
            number
            for number, ticket in self.tickets.items()
            if tickets is True or ticket in tickets  # type: ignore[operator]
        }
        samples = self.engine.partial_samples(request_ids) if request_ids else {}
        return {self.tickets[number]: sequences for number, sequences in samples.items()}

    def _collect_counters(self) -> dict[str, int]:
        """Return the engine's counters since the last call; peaks are absolute."""
        current = asdict(self.engine.counters)
        difference = {
            name: count if name.startswith("peak_") else count - self._last_counters.get(name, 0)
            for name, count in current.items()
        }
        self._last_counters = current
        return difference

    def unfinished(self) -> dict[int, SamplingRequest]:
        """Return the unfinished requests by ticket, with the tokens sampled so far."""
        return {
            self.tickets[number]: request for number, request in self.engine.unfinished_requests()
        }

    def move_to_new_engine(
        self, make_engine: Callable[[Sequence[SamplingRequest]], RankEngine]
    ) -> None:
        """Move all requests to a new engine, which prefills the tokens sampled so far again.

        `make_engine` receives these requests.
        """
        remaining, self.tickets = self.unfinished(), {}
        self.engine.close()  # before the new engine is made, which may reuse its blocks
        self.engine = make_engine(list(remaining.values()))
        self._last_counters = {}
        for ticket, request in remaining.items():
            self.tickets[self.engine.add(request)] = ticket
