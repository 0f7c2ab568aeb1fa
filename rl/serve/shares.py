"""One rule of fairness for everything that tenants share: the queue, sessions, models, samplers,
open requests, bytes.

While there are other tenants, each may hold half of what they leave free, so that whoever comes
next finds room. (Routers bound flows that share a buffer by this rule: Choudhury and Hahne,
"Dynamic queue length thresholds for shared-memory packet switches", 1998, with their factor at 1.)
A tenant is a key, or a session where the server has no keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from rl.serve.refusals import Refused

T = TypeVar("T")


def part_of(limit: int, total: int, mine: int) -> int:
    """Return how much of `limit` a tenant may hold that holds `mine` of the `total` that is taken.
    At least 1.
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
    """Raise Refused (429) if `more` does not fit beside the `total` that is taken, or exceeds the
    tenant's part.

    `others`: whether other tenants may ask. `what` names the resource, and its flag, in the plural.
    """
    if total + more > limit:
        text = f"there are {total} {what}, and {limit} are the most of this server: try again later"
        raise Refused(429, text, retry_after=retry_after)
    part = part_of(limit, total, mine)
    if others and mine + more > part:
        text = f"{mine} of the {what} are yours, and {part} is your part of what others use too: try again later"
        raise Refused(429, text, retry_after=retry_after)


def surplus(holders: Mapping[T, str], oldest_first: Iterable[T], count: int) -> list[T]:
    """Choose `count` items to give up: each time the oldest one of the tenant that holds most.
    `holders`: the tenant of each item.
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
