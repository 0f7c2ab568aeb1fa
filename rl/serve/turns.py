"""Whose turn it is: work waits in lanes, one a model, and lanes take turns, first among owners and then among an owner's lanes.

Work is a generator that gives way between slices. Samples are no lane: all that wait are taken together, after each slice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl.serve.refusals import Refused

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


@dataclass
class SampleJob:
    """A sample that waits to be drawn together with others. `client()` is asked for on the thread that draws."""

    owner: str
    client: Callable[[], Any]
    arguments: dict[str, Any]
    done: Future = field(default_factory=Future)
    prompt_tokens: int = 0  # once it has been read
    drawn_by: Any = None  # the client, once it has been asked for
    show: Callable[[dict[int, Any]], None] | None = None  # is told what its samples have drawn so far, on the thread that draws


class Turns:
    """Bounded: `limit` jobs and samples that wait. Filled by any thread, emptied by one."""

    def __init__(self, limit: int):
        self.limit = limit
        self.changed = threading.Condition()
        self._owners: OrderedDict[str, OrderedDict[str, deque[Job]]] = OrderedDict()
        self._samples: deque[SampleJob] = deque()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting + len(self._samples)

    def check_room(self, more: int = 1) -> None:
        """Raises Refused (429) where the queue is full."""
        if len(self) + more > self.limit:
            raise Refused(429, f"{len(self)} requests wait already, the most that this server takes: try again", retry_after=1.0)

    def add(self, job: Job) -> None:
        with self.changed:
            self._owners.setdefault(job.owner, OrderedDict()).setdefault(job.lane, deque()).append(job)
            self._waiting += 1
            self.changed.notify()

    def add_sample(self, job: SampleJob) -> None:
        self.check_room()
        with self.changed:
            self._samples.append(job)
            self.changed.notify()

    def samples(self) -> list[SampleJob]:
        """All samples that wait, whoever asked: they are drawn together."""
        with self.changed:
            taken = list(self._samples)
            self._samples.clear()
            return taken

    def only_samples(self) -> bool:
        """Whether samples wait and nothing else does."""
        with self.changed:
            return bool(self._samples) and not self._owners

    def next(self) -> Job | None:
        """The job whose turn it is; it stays at the head of its lane until `finish`, and its owner and lane go to the back."""
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
                        self._owners.setdefault(owner, OrderedDict())[lane] = deque([jobs.popleft()])
                        self._waiting += 1
                    taken += jobs
            return taken, samples
