"""Limit each tenant's share of a resource: queue, sessions, models, samplers, open requests, bytes.

While other tenants exist, each tenant may hold half of the capacity that the others do not use, so
that capacity remains for the next tenant. (Routers limit flows that share a buffer by this rule:
Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998, with
their factor at 1.) A tenant is a key, or a session if the server has no keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from rl.serve.refusals import Refused

T = TypeVar("T")


def part_of(limit: int, total: int, mine: int) -> int:
    """Return the amount of `limit` that a tenant may hold, at least 1.

    total    amount that all tenants hold
    mine     amount that the tenant holds
    """
    return max(1, (limit - (total - mine)) // 2)


def check_share(
    what: str,
    limit: int,
    total: int,
    mine: int,
    others: bool,
    *,
    more: int = 1,
    retry_after: float = 5.0,
) -> None:
    """Raise Refused (429) if `more` exceeds the free capacity or the tenant's share.

    what      the resource, in the plural, with its flag
    limit     capacity of the server
    total     amount that all tenants hold
    mine      amount that the tenant holds
    others    whether other tenants exist
    """
    if total + more > limit:
        text = f"this server holds {total} {what}, and its limit is {limit}: try again later"
        raise Refused(429, text, retry_after=retry_after)
    share = part_of(limit, total, mine)
    if others and mine + more > share:
        text = (
            f"{mine} of the {what} are yours, and your share is {share} while other tenants "
            "exist: try again later"
        )
        raise Refused(429, text, retry_after=retry_after)


def surplus(holders: Mapping[T, str], oldest_first: Iterable[T], count: int) -> list[T]:
    """Return `count` items to evict: repeatedly the oldest item of the tenant that holds most.

    holders         the tenant of each item
    oldest_first    the items that may be evicted
    """
    counts: dict[str, int] = {}
    for tenant in holders.values():
        counts[tenant] = counts.get(tenant, 0) + 1
    queues: dict[str, list[T]] = {}
    for item in oldest_first:
        queues.setdefault(holders[item], []).append(item)
    chosen: list[T] = []
    while len(chosen) < count and queues:
        age = {item: i for i, item in enumerate(queue[0] for queue in queues.values())}
        tenant = max(queues, key=lambda name: (counts[name], -age[queues[name][0]]))
        chosen.append(queues[tenant].pop(0))
        counts[tenant] -= 1
        if not queues[tenant]:
            del queues[tenant]
    return chosen
