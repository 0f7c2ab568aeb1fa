"""SampleStream: sampling that others may join while it runs, a slice at a time."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rl.clients.driver import Driver
from rl.clients.sampling import SamplingClient
from rl.clients.slices import Asked, Slice
from rl.errors import UserError
from rl.sampler import Request

# of the engine in a slice: what a request that arrives waits at most, in tokens of others
STEPS = 16


class SampleStream:
    """A sampler whose engine lives on between calls: its batch, its cache, and what it has drawn so
    far.

    stream = SampleStream(client)
    ticket = stream.add(Request(prompt=[1, 5, 7], params=SamplingParams(max_tokens=64), seed=0,
    problem=3)) while stream.busy:
        found = stream.slice()       # at most STEPS engine steps, alike on every rank; .finished: {ticket: SampleResponse or ValueError}
    stream.close()

    `add` and `drop` only note what the next slice takes along, and may be called from any thread at
    any time; `slice` (one caller at a time) is a verb like others, so whatever else is submitted
    (an update, `sample_many`) runs between two slices. A server calls it in a loop in a thread of
    its own while `busy`, and answers those who finished; with `shows=True` it also gets what
    running samples have drawn so far (`.drawn[ticket][sample]`, whole and not the news alone), to
    send on as it comes. A request that cannot run has its error in `finished`, and costs no other.
    The random stream of a sample is that of its request, whoever is beside it.

    `switch` gives it other weights between two slices: samples that are being drawn go on under
    them, and say which version drew each token (`SampledSequence.versions`). The stream keeps the
    client that it draws from, so those weights stay as long as it needs them.

    `mixed`: it draws for several clients in one batch, all that have the same
    `SamplingClient.mixes` as its first; each request is added with its client. Their samples are
    those that each would have drawn alone; one whose weights give no numbers fails alone.
    """

    _numbers = itertools.count()

    def __init__(self, client: SamplingClient, mixed: bool = False):
        if mixed and client.mixes is None:
            raise UserError(
                "these weights share no base with others (or are sampled by the generic decoder): mixed=False"
            )
        self.client, self.mixed = client, mixed
        self._driver: Driver = client._driver
        self._number = next(SampleStream._numbers)
        far = self._driver.far
        # a team counts as one
        self._ranks: int = (
            client.info["world"] // client.info["sampler_tp"] if far is None else far.ranks
        )
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._arrived: list[tuple[int, int, Request]] = []
        self._dropped: list[int] = []
        self._left: list[str] = []
        self._ranks_of: dict[str, int] = {}  # of conversations
        # ticket to (rank, cost, whose weights) of what runs
        self._at: dict[int, tuple[int, int, SamplingClient]] = {}
        self._load = [0] * self._ranks
        self._anew = False
        self._finalizer = weakref.finalize(self, _close, self._driver, self._number)
        self._finalizer.atexit = False

    @property
    def busy(self) -> bool:
        """Whether anything is to be drawn."""
        return bool(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def add(self, request: Request, client: SamplingClient | None = None) -> int:
        """A ticket for the request, which the next slice lets in. A conversation stays with the
        rank that has it in its cache.

        `client`: whose weights draw it, in a mixed stream; they stay until it has ended.
        """
        if client is not None and self.mixed:
            if client.mixes != self.client.mixes:
                raise UserError(
                    "a mixed stream is of clients whose `mixes` are the same: this one's weights stand on another base"
                )
            request = replace(request, weights=client._version_id)
        elif client is not self.client and client is not None:
            raise UserError(
                "a stream that is not mixed draws from one client: SampleStream(client, mixed=True), or another stream"
            )
        elif self.mixed:
            raise UserError(
                "a mixed stream is told with each request whose it is: add(request, client)"
            )
        with self._lock:
            ticket = next(self._tickets)
            rank = self._ranks_of.get(
                request.conversation or "",
                min(range(self._ranks), key=lambda r: (self._load[r], r)),
            )
            if request.conversation is not None:
                self._ranks_of[request.conversation] = rank
            cost = len(request.prompt) + request.num_samples * (request.params.max_tokens or 1024)
            self._load[rank] += cost
            self._at[ticket] = (rank, cost, client or self.client)
            self._arrived.append((ticket, rank, request))
            return ticket

    def leave(self, conversation: str) -> None:
        """It has no further turn: the next slice gives back what it has in the cache."""
        with self._lock:
            if self._ranks_of.pop(conversation, None) is not None:
                self._left.append(conversation)

    def drop(self, ticket: int) -> None:
        """Nobody wants it any more: it leaves at the next slice, and is never among the finished."""
        with self._lock:
            if self._done(ticket):
                self._dropped.append(ticket)

    def slice(self, steps: int = STEPS, *, shows: Collection[int] | bool = False) -> Slice:
        """Lets in what has arrived and takes at most `steps` steps; what has finished by now.
        `shows`: tickets, or True for all.
        """
        with self._lock:
            arrived, self._arrived = self._arrived, []
            dropped, self._dropped = self._dropped, []
            left, self._left = self._left, []
            anew, self._anew = self._anew, False
        asked = Asked(steps, arrived, dropped, left, anew, self.mixed, shows)
        found: Slice = self._driver.submit(
            "sample_slice", self._number, self.client._version_id, asked
        ).result()
        with self._lock:
            found.finished = {
                ticket: response
                for ticket, response in found.finished.items()
                if self._done(ticket)
            }
        for response in found.finished.values():
            if not isinstance(response, Exception):
                self.client._noted(response)
        return found

    def switch(self, client: SamplingClient, *, anew: bool = False) -> None:
        """The next slice draws from these weights. `anew`: what was read and drawn so far is read
        again by them, else it is kept.
        """
        self.client = client
        self._anew = self._anew or anew

    def renew(self) -> None:
        """The next slice reads anew what was read and drawn so far, as one that goes on from
        `unfinished` does.
        """
        self._anew = True

    def unfinished(self) -> Mapping[int, Request]:
        """What is under way, by ticket, with what is drawn of it: `add` it to another stream and it
        goes on there.
        """
        with self._lock:
            waiting = {ticket: request for ticket, _, request in self._arrived}
            running = self._driver.submit("unfinished", self._number).result()
            return dict(
                sorted(
                    {
                        ticket: r
                        for ticket, r in {**running, **waiting}.items()
                        if ticket in self._at
                    }.items()
                )
            )

    def close(self) -> None:
        """Gives back what the engines hold; what was under way is lost."""
        self._finalizer()

    def _done(self, ticket: int) -> bool:
        found = self._at.pop(ticket, None)
        if found is None:
            return False
        rank, cost, _ = found
        self._load[rank] -= cost
        return True

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _close(driver: Driver, number: int) -> None:
    if not driver.closed:
        driver.submit("close_stream", number)
