"""Schedule the work of all tenants fairly: round robin, with a bound for each tenant.

Work waits in lanes, a lane per model. The queue serves tenants in turn, and each tenant's lanes in
turn. Work is a generator that yields between slices. Samples have no lane: after each slice, all
waiting samples are taken together.

`rl/serve/tenant_limit.py` limits each tenant's share of the queue.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl.serve.tenant_limit import check_share

WorkFn = Callable[[], Generator[None, None, Any]]


@dataclass
class EngineJob:
    """Hold a unit of work of `owner`. `done` resolves to the generator's return value or error."""

    owner: str
    lane: str
    verb: str
    work: WorkFn
    done: Future = field(default_factory=Future)
    generator: Generator[None, None, Any] | None = None
    tenant: str = ""  # whose turn and share of the queue the job takes; the owner if empty


@dataclass
class SamplingJob:
    """Hold a sample request that waits to be batched with others.

    `get_client()` is called on the sampling thread.
    """

    owner: str
    get_client: Callable[[], Any]
    arguments: dict[str, Any]
    done: Future = field(default_factory=Future)
    prompt_tokens: int = 0  # set when the prompt has been read
    sampling_client: Any = None  # the result of `get_client()`, set when it has been called
    # receives the tokens sampled so far; called on the sampling thread
    on_progress: Callable[[dict[int, Any]], None] | None = None
    tenant: str = ""  # as in `EngineJob`


class FairQueue:
    """Queue up to `limit` jobs and samples. Any thread adds work; a single thread takes it.

    `has_others(tenant)` returns whether other tenants exist, which may send requests at any time.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.has_others: Callable[[str], bool] = lambda tenant: False
        self._tenant_counts: Counter[str] = Counter()  # waiting jobs and samples by tenant
        # requests by tenant that wait for an earlier number, outside the queue
        self._early_counts: Counter[str] = Counter()
        self.changed = threading.Condition()
        self._lanes_by_tenant: OrderedDict[str, OrderedDict[str, deque[EngineJob]]] = OrderedDict()
        self._samples: deque[SamplingJob] = deque()
        self._waiting_jobs = 0

    def __len__(self) -> int:
        return self._waiting_jobs + len(self._samples)

    def check_capacity(self, tenant: str, amount: int = 1, *, in_order: bool = False) -> None:
        """Raise HttpError (429) if the queue is full, or if the tenant's share of it is.

        `in_order`: the request is the next number of a model, and later numbers wait for it. These
        are then not counted, because they stay until this request has arrived.
        """
        with self.changed:
            if len(self) + amount > self.limit // 2:
                self._drop_cancelled()
            total, tenant_total, others_queued = (
                len(self),
                self._tenant_counts[tenant],
                any(other != tenant for other in self._tenant_counts),
            )
            early = 0 if in_order else self._early_counts[tenant]
        resource = "waiting requests (--queued)"
        others = others_queued or self.has_others(tenant)
        check_share(
            resource,
            self.limit,
            total + early,
            tenant_total + early,
            others,
            amount=amount,
            retry_after=1.0,
        )

    def add(self, job: EngineJob) -> None:
        """Append a job to its lane."""
        with self.changed:
            job.tenant = job.tenant or job.owner
            self._lanes_by_tenant.setdefault(job.tenant, OrderedDict()).setdefault(
                job.lane, deque()
            ).append(job)
            self._waiting_jobs += 1
            self._tenant_counts[job.tenant] += 1
            self.changed.notify()

    def add_sample(self, job: SamplingJob) -> None:
        """Queue a sample. Raises HttpError (429) if the queue, or the tenant's share, is full."""
        job.tenant = job.tenant or job.owner
        self.check_capacity(job.tenant)
        with self.changed:
            self._samples.append(job)
            self._tenant_counts[job.tenant] += 1
            self.changed.notify()

    def add_early(self, tenant: str, amount: int) -> None:
        """Add `amount`, possibly negative, to the tenant's requests that wait for a number."""
        with self.changed:
            self._early_counts[tenant] += amount
            if not self._early_counts[tenant]:
                del self._early_counts[tenant]

    def _decrement_tenant(self, job: EngineJob | SamplingJob) -> None:
        """Subtract a job from its tenant's count. The caller holds `changed`."""
        self._tenant_counts[job.tenant] -= 1
        if not self._tenant_counts[job.tenant]:
            del self._tenant_counts[job.tenant]

    def _drop_cancelled(self) -> None:
        """Remove cancelled samples. The caller holds `changed`."""
        cancelled = [job for job in self._samples if job.done.cancelled()]
        if cancelled:
            self._samples = deque(job for job in self._samples if not job.done.cancelled())
            for job in cancelled:
                self._decrement_tenant(job)

    def take_samples(self) -> list[SamplingJob]:
        """Remove all waiting samples from the queue, and return them."""
        with self.changed:
            self._drop_cancelled()
            samples = list(self._samples)
            self._samples.clear()
            for job in samples:
                self._decrement_tenant(job)
            return samples

    def has_only_samples(self) -> bool:
        """Return whether samples wait and no other work does."""
        with self.changed:
            return bool(self._samples) and not self._lanes_by_tenant

    def next_job(self) -> EngineJob | None:
        """Return the next job, or None. Its tenant and its lane move to the end of the order.

        The job stays at the head of its lane until `finish_job`.
        """
        with self.changed:
            if not self._lanes_by_tenant:
                return None
            tenant, lanes = next(iter(self._lanes_by_tenant.items()))
            lane, jobs = next(iter(lanes.items()))
            self._lanes_by_tenant.move_to_end(tenant)
            lanes.move_to_end(lane)
            return jobs[0]

    def finish_job(self, job: EngineJob) -> None:
        """Remove a finished job from the head of its lane."""
        with self.changed:
            lanes = self._lanes_by_tenant[job.tenant]
            lanes[job.lane].popleft()
            self._waiting_jobs -= 1
            self._decrement_tenant(job)
            if not lanes[job.lane]:
                del lanes[job.lane]
            if not lanes:
                del self._lanes_by_tenant[job.tenant]

    def drain(self) -> tuple[list[EngineJob], list[SamplingJob]]:
        """Remove and return all work that has not started, because the server ends."""
        with self.changed:
            lanes_of_all, self._lanes_by_tenant = self._lanes_by_tenant, OrderedDict()
            samples, self._samples = list(self._samples), deque()
            self._waiting_jobs = 0
            jobs_removed: list[EngineJob] = []
            for tenant, lanes in lanes_of_all.items():
                for lane, jobs in lanes.items():
                    if jobs[0].generator is not None:
                        self._lanes_by_tenant.setdefault(tenant, OrderedDict())[lane] = deque(
                            [jobs.popleft()]
                        )
                        self._waiting_jobs += 1
                    jobs_removed += jobs
            for job in jobs_removed:
                self._decrement_tenant(job)
            for sample in samples:
                self._decrement_tenant(sample)
            return jobs_removed, samples
