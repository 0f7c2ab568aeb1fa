"""Schedule the work of all tenants fairly: round robin, with a bound for each tenant.

Work waits in lanes, a lane per model. The queue serves tenants in turn, and each tenant's lanes in
turn. Work is a generator that yields between slices. Sample requests have no lane: after each
slice, as many as the sampler has room for are taken together, one of each tenant in turn.

`check_share` limits each tenant's share of a resource: queue, sessions, models, samplers, open
requests, bytes. While other tenants exist, each tenant may hold half of the capacity that the
others do not use, so that capacity remains for the next tenant. (Routers limit flows that share a
buffer by this rule: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
switches", 1998, with their factor at 1.) A tenant is a key, or a session if the server has no keys.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl.serve.http_errors import HttpError

T = TypeVar("T")


class TenantCounter(Counter[str | None]):
    """Count by tenant. It has no zeros: its keys are the tenants that hold something."""

    def change(self, tenant: str | None, amount: int) -> None:
        """Add `amount`, possibly negative."""
        self[tenant] += amount
        if not self[tenant]:
            del self[tenant]


def check_share(
    resource: str,
    limit: int,
    total_used: int,
    tenant_used: int,
    has_others: bool,
    *,
    amount: int = 1,
    retry_after: float = 5.0,
) -> None:
    """Raise HttpError (429) if `amount` exceeds the free capacity or the tenant's share.

    resource       in the plural, with its flag
    limit          capacity of the server
    total_used     amount that all tenants hold
    tenant_used    amount that the tenant holds
    has_others     whether other tenants exist
    """
    share = max(1, (limit - (total_used - tenant_used)) // 2)
    if total_used + amount > limit:
        text = f"this server holds {total_used} {resource}, and its limit is {limit}"
    elif has_others and tenant_used + amount > share:
        text = (
            f"you hold {tenant_used} {resource}; your share is {share} of {limit} while other "
            "tenants exist"
        )
    else:
        return
    raise HttpError(429, f"{text}: try again later", retry_after=retry_after)


def choose_evictions(
    tenant_by_item: Mapping[T, str], excess: int, get_size: Callable[[T], int] = lambda item: 1
) -> list[T]:
    """Return items to evict: repeatedly the oldest item of the tenant that holds most, until their
    sizes are at least `excess`.

    tenant_by_item    the tenant of each item, the oldest item first
    """
    remaining = dict(tenant_by_item)
    chosen: list[T] = []
    while excess > 0 and remaining:
        held: Counter[str] = Counter()
        for item, tenant in remaining.items():
            held[tenant] += get_size(item)
        most = max(held.values())
        chosen.append(next(item for item, tenant in remaining.items() if held[tenant] == most))
        del remaining[chosen[-1]]
        excess -= get_size(chosen[-1])
    return chosen


VerbSteps = Generator[None, None, Any]


@dataclass(eq=False)
class EngineJob:
    """Hold a unit of work. `done` resolves to the generator's return value or error."""

    tenant: str  # whose turn and share of the queue the job takes
    lane: str
    verb: str
    work: Callable[[], VerbSteps]
    done: Future = field(default_factory=Future)
    generator: VerbSteps | None = None


@dataclass(eq=False)
class SamplingJob:
    """Hold a sample request that waits to be batched with others.

    `get_client()` is called on the sampling thread.
    """

    tenant: str  # as in `EngineJob`
    get_client: Callable[[], Any]
    arguments: dict[str, Any]  # of `SamplingClient.make_request`
    done: Future = field(default_factory=Future)
    prompt_tokens: int = 0  # set when the prompt has been read
    sampling_client: Any = None  # the result of `get_client()`, set when it has been called
    # called on the sampling thread every few tokens with the samples so far, by index
    on_progress: Callable[[dict[int, Any]], None] | None = None
    sequence_ids: Sequence[str] = ()  # of the samples, if promised before sampling

    @property
    def num_samples(self) -> int:
        """Return the number of samples that the request asks for."""
        return self.arguments.get("num_samples", 1)


class FairQueue:
    """Queue up to `limit` jobs and samples. Any thread adds work; a single thread takes it.

    `has_others(tenant)` returns whether other tenants exist, which may send requests at any time.
    """

    def __init__(self, limit: int, has_others: Callable[[str], bool] = lambda tenant: False):
        self.limit, self.has_others = limit, has_others
        self._tenant_counts = TenantCounter()  # waiting jobs and samples by tenant
        # requests by tenant that wait for an earlier number, outside the queue
        self._early_counts = TenantCounter()
        self.changed = threading.Condition()
        self._lanes_by_tenant: OrderedDict[str, OrderedDict[str, deque[EngineJob]]] = OrderedDict()
        self._samples: OrderedDict[str, deque[SamplingJob]] = OrderedDict()  # by tenant

    def __len__(self) -> int:
        return self._tenant_counts.total()

    def check_capacity(self, tenant: str, *, in_order: bool = False) -> None:
        """Raise HttpError (429) if the queue is full, or if the tenant's share of it is.

        `in_order`: the request is the next number of a model, and later numbers wait for it. These
        are then not counted, because they stay until this request has arrived.
        """
        with self.changed:
            if len(self) >= self.limit // 2:
                self._drop_cancelled()
            total, tenant_total = len(self), self._tenant_counts[tenant]
            others = any(other != tenant for other in self._tenant_counts)
            early = 0 if in_order else self._early_counts[tenant]
        check_share(
            "waiting requests (--queued)",
            self.limit,
            total + early,
            tenant_total + early,
            others or self.has_others(tenant),
            retry_after=1.0,
        )

    def add(self, job: EngineJob) -> None:
        """Append a job to its lane."""
        with self.changed:
            lanes = self._lanes_by_tenant.setdefault(job.tenant, OrderedDict())
            lanes.setdefault(job.lane, deque()).append(job)
            self._tenant_counts.change(job.tenant, 1)
            self.changed.notify()

    def add_sample(self, job: SamplingJob) -> None:
        """Queue a sample. Raises HttpError (429) if the queue, or the tenant's share, is full."""
        self.check_capacity(job.tenant)
        with self.changed:
            self._samples.setdefault(job.tenant, deque()).append(job)
            self._tenant_counts.change(job.tenant, 1)
            self.changed.notify()

    def add_early(self, tenant: str, amount: int) -> None:
        """Add `amount`, possibly negative, to the tenant's requests that wait for a number."""
        with self.changed:
            self._early_counts.change(tenant, amount)

    def _drop_cancelled(self) -> None:
        """Remove cancelled samples. The caller holds `changed`."""
        for tenant, jobs in list(self._samples.items()):
            for job in [job for job in jobs if job.done.cancelled()]:
                self._tenant_counts.change(job.tenant, -1)
                jobs.remove(job)
            if not jobs:
                del self._samples[tenant]

    def take_samples(
        self, room: float = math.inf, busy_tenants: Collection[str] = ()
    ) -> list[SamplingJob]:
        """Remove sample requests from the queue, one of each tenant in turn, until they have `room`
        samples, and return them. The last request may exceed `room`, and so may the first of each
        tenant that is not among `busy_tenants`.
        """
        with self.changed:
            self._drop_cancelled()
            taken: list[SamplingJob] = []
            busy = set(busy_tenants)
            while True:
                tenant = next((t for t in self._samples if room > 0 or t not in busy), None)
                if tenant is None:
                    return taken
                busy.add(tenant)
                jobs = self._samples.pop(tenant)
                taken.append(jobs.popleft())
                if jobs:
                    self._samples[tenant] = jobs  # at the end of the order
                self._tenant_counts.change(tenant, -1)
                room -= taken[-1].num_samples

    def has_only_samples(self) -> bool:
        """Return whether samples wait and no other work does."""
        with self.changed:
            return bool(self._samples) and not self._lanes_by_tenant

    def next_job(self) -> EngineJob | None:
        """Return the next job, or None. Its tenant and its lane move to the end of the order.

        The job stays at the head of its lane until `finish_job`. It counts as started: `drain`
        leaves it.
        """
        with self.changed:
            if not self._lanes_by_tenant:
                return None
            tenant, lanes = next(iter(self._lanes_by_tenant.items()))
            lane, jobs = next(iter(lanes.items()))
            self._lanes_by_tenant.move_to_end(tenant)
            lanes.move_to_end(lane)
            jobs[0].generator = jobs[0].generator or jobs[0].work()
            return jobs[0]

    def finish_job(self, job: EngineJob) -> None:
        """Remove a finished job from its lane."""
        with self.changed:
            lanes = self._lanes_by_tenant[job.tenant]
            lanes[job.lane].remove(job)
            self._tenant_counts.change(job.tenant, -1)
            if not lanes[job.lane]:
                del lanes[job.lane]
            if not lanes:
                del self._lanes_by_tenant[job.tenant]

    def drain(self) -> list[EngineJob | SamplingJob]:
        """Remove and return all work that has not started, because the server ends."""
        with self.changed:
            lanes = [lane for lanes in self._lanes_by_tenant.values() for lane in lanes.values()]
            jobs = [job for lane in lanes for job in lane if job.generator is None]
            for job in jobs:
                self.finish_job(job)
            return [*jobs, *self.take_samples()]
