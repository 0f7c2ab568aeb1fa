"""Limit each tenant's share of a resource: queue, sessions, models, samplers, open requests, bytes.

While other tenants exist, each tenant may hold half of the capacity that the others do not use, so
that capacity remains for the next tenant. (Routers limit flows that share a buffer by this rule:
Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998, with
their factor at 1.) A tenant is a key, or a session if the server has no keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from rl.serve.http_errors import HttpError

T = TypeVar("T")


class TenantCounter(Counter[str | None]):
    """Count by tenant. It has no zeros: its keys are the tenants that hold something."""

    def change(self, tenant: str | None, amount: int) -> None:
        """Add `amount`, possibly negative."""
        self[tenant] += amount
        if not self[tenant]:
            del self[tenant]


def compute_share(limit: int, total_used: int, tenant_used: int) -> int:
    """Return the amount of `limit` that a tenant may hold, at least 1.

    total_used     amount that all tenants hold
    tenant_used    amount that the tenant holds
    """
    return max(1, (limit - (total_used - tenant_used)) // 2)


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
    if total_used + amount > limit:
        text = (
            f"this server holds {total_used} {resource}, and its limit is {limit}: try again later"
        )
        raise HttpError(429, text, retry_after=retry_after)
    share = compute_share(limit, total_used, tenant_used)
    if has_others and tenant_used + amount > share:
        text = (
            f"{tenant_used} of the {resource} are yours, and your share is {share} while other "
            "tenants exist: try again later"
        )
        raise HttpError(429, text, retry_after=retry_after)


def choose_evictions(tenant_by_item: Mapping[T, str], count: int) -> list[T]:
    """Return `count` items to evict: repeatedly the oldest item of the tenant that holds most.

    tenant_by_item    the tenant of each item, the oldest item first
    """
    remaining = dict(tenant_by_item)
    chosen: list[T] = []
    while len(chosen) < count and remaining:
        counts = Counter(remaining.values())
        most = max(counts.values())
        chosen.append(next(item for item, tenant in remaining.items() if counts[tenant] == most))
        del remaining[chosen[-1]]
    return chosen
