"""What a rank does of a stream: an engine that lives on between verbs, a few steps at a time.

A stream is a sampler that others may join while it runs. Every rank has its own engine of it and
takes the requests that the driver has dealt to it; a slice is so many steps of each, so other verbs
(an update, an evaluation) stand between two slices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from rl.sampler import Engine, PagedEngine, Request, SteppedEngine
from rl.types import SampledSequence, SampleResponse


@dataclass
class Slice:
    """What came of a slice: requests that have ended (an error: was refused, or failed alone), by
    ticket; the engines' counters since the last one.

    `drawn`: what running samples have drawn in all, by ticket and sample, where that was asked for.
    """

    finished: dict[int, SampleResponse | Exception] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    drawn: dict[int, dict[int, SampledSequence]] = field(default_factory=dict)

    @classmethod
    def together(cls, parts: Sequence[Slice]) -> Slice:
        """What all ranks did, tickets in order."""
        whole = cls()
        for part in parts:
            whole.finished |= part.finished
            whole.drawn |= part.drawn
            for name, count in part.counters.items():
                peak = name.startswith("peak_")
                before = whole.counters.get(name, 0)
                whole.counters[name] = max(before, count) if peak else before + count
        whole.finished = dict(sorted(whole.finished.items()))
        return whole


class Stream:
    """This rank's engine of one stream, and who asked for what."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.version_id = -1  # of the weights, as the worker numbers them
        self.tickets: dict[int, int] = {}  # by the engine's number of the request
        self._counted: dict[str, int] = {}

    def take(
        self, arrived: Mapping[int, Request], dropped: Sequence[int]
    ) -> dict[int, SampleResponse | Exception]:
        """Lets requests in, and others go; what cannot run back."""
        refused: dict[int, SampleResponse | Exception] = {}
        for number in [number for number, ticket in self.tickets.items() if ticket in set(dropped)]:
            self.engine.drop(number)
            del self.tickets[number]
        for ticket, request in arrived.items():
            try:
                self.tickets[self.engine.add(request)] = ticket
            except ValueError as error:
                refused[ticket] = error.with_traceback(None)
        return refused

    def run(self, steps: int) -> dict[int, SampleResponse | Exception]:
        finished: dict[int, SampleResponse | Exception] = {}
        engine = self.engine
        while steps > 0 and engine.busy:
            before = engine.counters.steps
            if isinstance(engine, SteppedEngine):
                # a look of several may not pass the end of a slice, where weights change
                engine.most = steps
            for done in engine.step():
                finished[self.tickets.pop(done.request_id)] = done.response
            steps -= max(engine.counters.steps - before, 1)
        return finished

    def drawn(self, tickets: Collection[int] | bool) -> dict[int, dict[int, SampledSequence]]:
        """Of these tickets; True: of all."""
        wanted = {
            number
            for number, ticket in self.tickets.items()
            if tickets is True or ticket in tickets
        }  # type: ignore[operator]
        return (
            {self.tickets[number]: samples for number, samples in self.engine.drawn(wanted).items()}
            if wanted
            else {}
        )

    def counters(self) -> dict[str, int]:
        """Since they were last asked for."""
        now = asdict(self.engine.counters)
        since = {
            name: count if name.startswith("peak_") else count - self._counted.get(name, 0)
            for name, count in now.items()
        }
        self._counted = now
        return since

    def unfinished(self) -> dict[int, Request]:
        return {self.tickets[number]: request for number, request in self.engine.unfinished()}

    def anew(self, make_engine: Callable[[], Engine]) -> None:
        """Everything goes on in another engine, which reads what was drawn so far again."""
        left, self.tickets = self.unfinished(), {}
        if isinstance(self.engine, PagedEngine):
            self.engine.close()  # before the other is made, which may have its pages
        self.engine = make_engine()
        self._counted = {}
        for ticket, request in left.items():
            self.tickets[self.engine.add(request)] = ticket


@dataclass(frozen=True)
class Asked:
    """What a slice is asked to do. `arrived`: (ticket, rank or team that takes it, request).
    `anew`: caches are read again first.

    `mixed`: requests are of several models on one base, and say of which.
    """

    steps: int
    arrived: Sequence[tuple[int, int, Request]] = ()
    dropped: Sequence[int] = ()
    left: Sequence[str] = ()  # conversations that have no further turn
    anew: bool = False
    mixed: bool = False
    # the tickets of which to tell what has been drawn so far; True: all
    shows: Collection[int] | bool = False


def run_slice(stream: Stream, asked: Asked, rank: int, make_engine: Callable[[], Engine]) -> Slice:
    """This rank's part of a slice."""
    if asked.anew:
        stream.anew(make_engine)
    mine = {ticket: request for ticket, to, request in asked.arrived if to == rank}
    for name in asked.left:
        stream.engine.forget(name)
    refused = stream.take(mine, asked.dropped)
    done = stream.run(asked.steps)
    part = Slice({**refused, **done}, stream.counters())
    return replace(part, drawn=stream.drawn(asked.shows)) if asked.shows else part
