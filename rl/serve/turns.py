"""Schedule the work of all owners fairly.

Work waits in lanes, a lane per model. The queue serves owners in turn, and each owner's lanes in
turn. Work is a generator that yields between slices. Samples have no lane: after each slice, all
waiting samples are taken together.

`rl/serve/shares.py` limits each tenant's share of the queue.
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
    """Hold a unit of work of `owner`. `done` resolves to the generator's return value or error."""

    owner: str
    lane: str
    what: str
    work: Work
    done: Future = field(default_factory=Future)
    begun: Generator[None, None, Any] | None = None
    tenant: str = ""  # tenant for which the job counts; the owner if empty


@dataclass
class SampleJob:
    """Hold a sample request that waits to be batched with others.

    `client()` is called on the sampling thread.
    """

    owner: str
    client: Callable[[], Any]
    arguments: dict[str, Any]
    done: Future = field(default_factory=Future)
    prompt_tokens: int = 0  # set when the prompt has been read
    drawn_by: Any = None  # the result of `client()`, set when it has been called
    # receives the tokens sampled so far; called on the sampling thread
    show: Callable[[dict[int, Any]], None] | None = None
    tenant: str = ""  # as in `Job`


class Turns:
    """Queue up to `limit` jobs and samples. Any thread adds work; a single thread takes it.

    `others(tenant)` returns whether other tenants exist, which may send requests at any time.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.others: Callable[[str], bool] = lambda tenant: False
        self._held: Counter[str] = Counter()  # waiting jobs and samples by tenant
        # requests by tenant that wait for an earlier number, outside the queue
        self._early: Counter[str] = Counter()
        self.changed = threading.Condition()
        self._owners: OrderedDict[str, OrderedDict[str, deque[Job]]] = OrderedDict()
        self._samples: deque[SampleJob] = deque()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting + len(self._samples)

    def check_room(self, tenant: str, more: int = 1, *, next_one: bool = False) -> None:
        """Raise Refused (429) if the queue is full, or if the tenant's share of it is.

        `next_one`: the request is the next number of a model, and later numbers wait for it. These
        are then not counted, because they stay until this request has arrived.
        """
        with self.changed:
            if len(self) + more > self.limit // 2:
                self._forget_gone()
            total, tenant_total, others_queued = (
                len(self),
                self._held[tenant],
                any(other != tenant for other in self._held),
            )
            early = 0 if next_one else self._early[tenant]
        resource = "waiting requests (--queued)"
        others = others_queued or self.others(tenant)
        check_share(
            resource,
            self.limit,
            total + early,
            tenant_total + early,
            others,
            more=more,
            retry_after=1.0,
        )

    def add(self, job: Job) -> None:
        """Append a job to its lane."""
        with self.changed:
            job.tenant = job.tenant or job.owner
            self._owners.setdefault(job.owner, OrderedDict()).setdefault(job.lane, deque()).append(
                job
            )
            self._waiting += 1
            self._held[job.tenant] += 1
            self.changed.notify()

    def add_sample(self, job: SampleJob) -> None:
        """Queue a sample. Raises Refused (429) if the queue, or the tenant's share, is full."""
        job.tenant = job.tenant or job.owner
        self.check_room(job.tenant)
        with self.changed:
            self._samples.append(job)
            self._held[job.tenant] += 1
            self.changed.notify()

    def early(self, tenant: str, more: int) -> None:
        """Add `more` (may be negative) to the tenant's requests that wait for an earlier number."""
        with self.changed:
            self._early[tenant] += more
            if not self._early[tenant]:
                del self._early[tenant]

    def _left(self, job: Job | SampleJob) -> None:
        """Subtract a job from its tenant's count. The caller holds `changed`."""
        self._held[job.tenant] -= 1
        if not self._held[job.tenant]:
            del self._held[job.tenant]

    def _forget_gone(self) -> None:
        """Remove cancelled samples. The caller holds `changed`."""
        cancelled = [job for job in self._samples if job.done.cancelled()]
        if cancelled:
            self._samples = deque(job for job in self._samples if not job.done.cancelled())
            for job in cancelled:
                self._left(job)

    def samples(self) -> list[SampleJob]:
        """Remove all waiting samples from the queue, and return them."""
        with self.changed:
            self._forget_gone()
            samples = list(self._samples)
            self._samples.clear()
            for job in samples:
                self._left(job)
            return samples

    def only_samples(self) -> bool:
        """Return whether samples wait and no other work does."""
        with self.changed:
            return bool(self._samples) and not self._owners

    def next(self) -> Job | None:
        """Return the next job, or None. Its owner and its lane move to the end of the order.

        The job stays at the head of its lane until `finish`.
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
        """Remove a finished job from the head of its lane."""
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
        """Remove and return all work that has not started, because the server ends."""
        with self.changed:
            lanes_of_all, self._owners = self._owners, OrderedDict()
            samples, self._samples = list(self._samples), deque()
            self._waiting = 0
            jobs_removed: list[Job] = []
            for owner, lanes in lanes_of_all.items():
                for lane, jobs in lanes.items():
                    if jobs[0].begun is not None:
                        self._owners.setdefault(owner, OrderedDict())[lane] = deque(
                            [jobs.popleft()]
                        )
                        self._waiting += 1
                    jobs_removed += jobs
            for job in jobs_removed:
                self._left(job)
            for sample in samples:
                self._left(sample)
            return jobs_removed, samples
