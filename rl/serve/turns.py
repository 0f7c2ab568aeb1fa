"""Whose turn it is: work waits in lanes, one a model, and lanes take turns, first among owners and
then among an owner's lanes.

Work is a generator that gives way between slices. Samples are no lane: all that wait are taken
together, after each slice.

The queue is shared by the rule of `rl/serve/shares.py`.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl.serve.shares import check_share

Work = Callable[[], Generator[None, None, Any]]


@dataclass
class Job:
    """Something to be done for `owner`. `done` gets what the generator returns, or its error."""

    owner: str
    lane: str
    what: str
    work: Work
    done: Future = field(default_factory=Future)
    begun: Generator[None, None, Any] | None = None
    tenant: str = ""  # who is counted for it; the owner where nobody else is named


@dataclass
class SampleJob:
    """A sample that waits to be drawn together with others. `client()` is asked for on the thread
    that draws.
    """

    owner: str
    client: Callable[[], Any]
    arguments: dict[str, Any]
    done: Future = field(default_factory=Future)
    prompt_tokens: int = 0  # once it has been read
    drawn_by: Any = None  # the client, once it has been asked for
    # is told what its samples have drawn so far, on the thread that draws
    show: Callable[[dict[int, Any]], None] | None = None
    tenant: str = ""  # as of a `Job`


class Turns:
    """Bounded: `limit` jobs and samples that wait. Filled by any thread, emptied by one.

    `others(tenant)`: whether there are more of them, who may ask at any time.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.others: Callable[[str], bool] = lambda tenant: False
        self._held: Counter[str] = Counter()  # how much of what waits is each tenant's
        # what else each has asked for, whose turn has not come
        self._early: Counter[str] = Counter()
        self.changed = threading.Condition()
        self._owners: OrderedDict[str, OrderedDict[str, deque[Job]]] = OrderedDict()
        self._samples: deque[SampleJob] = deque()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting + len(self._samples)

    def check_room(self, tenant: str, more: int = 1, *, next_one: bool = False) -> None:
        """Raises Refused (429) where the queue is full, or this tenant's part of it.

        `next_one`: what others of its own wait for, which came before their turn: these are not
        counted, since they stay until it comes.
        """
        with self.changed:
            if len(self) + more > self.limit // 2:
                self._forget_gone()
            all_wait, held, beside = (
                len(self),
                self._held[tenant],
                any(one != tenant for one in self._held),
            )
            early = 0 if next_one else self._early[tenant]
        what = "requests that wait (--queued)"
        others = beside or self.others(tenant)
        check_share(
            what, self.limit, all_wait + early, held + early, others, more=more, retry_after=1.0
        )

    def add(self, job: Job) -> None:
        with self.changed:
            job.tenant = job.tenant or job.owner
            self._owners.setdefault(job.owner, OrderedDict()).setdefault(job.lane, deque()).append(
                job
            )
            self._waiting += 1
            self._held[job.tenant] += 1
            self.changed.notify()

    def add_sample(self, job: SampleJob) -> None:
        job.tenant = job.tenant or job.owner
        self.check_room(job.tenant)
        with self.changed:
            self._samples.append(job)
            self._held[job.tenant] += 1
            self.changed.notify()

    def early(self, tenant: str, more: int) -> None:
        """So many more (or less) that a tenant has asked for wait for something else before they
        can wait here.
        """
        with self.changed:
            self._early[tenant] += more
            if not self._early[tenant]:
                del self._early[tenant]

    def _left(self, job: Job | SampleJob) -> None:
        """One less of its tenant's waits. Within `changed`."""
        self._held[job.tenant] -= 1
        if not self._held[job.tenant]:
            del self._held[job.tenant]

    def _forget_gone(self) -> None:
        """Samples that nobody waits for any more give their places back. Within `changed`."""
        gone = [job for job in self._samples if job.done.cancelled()]
        if gone:
            self._samples = deque(job for job in self._samples if not job.done.cancelled())
            for job in gone:
                self._left(job)

    def samples(self) -> list[SampleJob]:
        """All samples that wait, whoever asked: they are drawn together."""
        with self.changed:
            self._forget_gone()
            taken = list(self._samples)
            self._samples.clear()
            for job in taken:
                self._left(job)
            return taken

    def only_samples(self) -> bool:
        """Whether samples wait and nothing else does."""
        with self.changed:
            return bool(self._samples) and not self._owners

    def next(self) -> Job | None:
        """The job whose turn it is; it stays at the head of its lane until `finish`, and its owner
        and lane go to the back.
        """
        with self.changed:
            if not self._owners:
                return None
            owner, lanes = next(iter(self._owners.items()))
            lane, jobs = next(iter(lanes.items()))
            self._owners.move_to_end(owner)
            lanes.move_to_end(lane)
            return jobs[0]

    def finish(self, job: Job) -> None:
        with self.changed:
            lanes = self._owners[job.owner]
            lanes[job.lane].popleft()
            self._waiting -= 1
            self._left(job)
            if not lanes[job.lane]:
                del lanes[job.lane]
            if not lanes:
                del self._owners[job.owner]

    def drain(self) -> tuple[list[Job], list[SampleJob]]:
        """Everything that has not begun, taken out: the server ends."""
        with self.changed:
            lanes_of_all, self._owners = self._owners, OrderedDict()
            samples, self._samples = list(self._samples), deque()
            self._waiting = 0
            taken: list[Job] = []
            for owner, lanes in lanes_of_all.items():
                for lane, jobs in lanes.items():
                    if jobs[0].begun is not None:
                        self._owners.setdefault(owner, OrderedDict())[lane] = deque(
                            [jobs.popleft()]
                        )
                        self._waiting += 1
                    taken += jobs
            for job in taken:
                self._left(job)
            for sample in samples:
                self._left(sample)
            return taken, samples
