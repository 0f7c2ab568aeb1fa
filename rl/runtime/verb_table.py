"""Hold the table of the workers' verbs: one row a verb, written as a decorator of the worker's
method.

Driver, router and worker groups read all that they know of a verb from its row. A new verb is a
method with a row; only a verb that needs the learners' help before the samplers run it, or work
beside it, also has a method of `VerbRouter` (`router_method`).
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl.errors import RankLost

Method = TypeVar("Method", bound=Callable[..., Any])
LEARNER, SAMPLER = "learner", "sampler"  # groups of ranks
SERVICE = "service"  # each group executes the verb for its part of a service


@dataclass(frozen=True)
class VerbSpec:
    """Describe a verb.

    group          ranks that execute it if some ranks only sample; otherwise all ranks do
    reduce         merges the results of the group's ranks, in rank order, into the driver's
                   result; None: the first rank's, to which the others add nothing
    version_arg    index of the argument that names a weight version, which the verb waits for
    is_cleanup     it frees memory or takes scores: sample requests that are held back need not
                   run before it, and it also runs if the transfer of its version failed
    get_params     returns the sampling parameters in its arguments, which the learner of the
                   version records
    on_refusal     verb that runs in its place, on its first argument, if a verb that it depends
                   on failed or `split` raises
    split          method of the worker that rank 0 calls with the submitted arguments: it returns
                   each rank's arguments; None: every rank gets the submitted arguments
    in_step        its ranks communicate (gather or sum weights or gradients): if one fails, the
                   others may never answer
    router_method  method of `VerbRouter` that executes a sampler verb with the help of the
                   learners, or that runs beside a learner verb
    """

    group: str = LEARNER
    reduce: Callable[[Sequence[Any]], Any] | None = None
    version_arg: int | None = None
    is_cleanup: bool = False
    get_params: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    on_refusal: str | None = None
    split: str | None = None
    in_step: bool = False
    router_method: str | None = None


VERBS: dict[str, VerbSpec] = {}


def verb(*values: Any, **fields: Any) -> Callable[[Method], Method]:
    """Add a worker's method to the table under its name, with the fields of `VerbSpec`. A subclass
    that overrides the method keeps the row. Raises ValueError if the table has the name.
    """

    def add(method: Method) -> Method:
        if method.__name__ in VERBS:
            raise ValueError(f"the verb {method.__name__} has a row already: rename the method")
        VERBS[method.__name__] = VerbSpec(*values, **fields)
        return method

    return add


class VerbFuture(Future):
    """Hold the future result of a submitted verb. `verb`: its name.

    If a learner verb failed and nothing has read its error, a warning reports the error when the
    future is collected, as asyncio does.
    """

    def __init__(self, verb: str):
        super().__init__()
        self.verb = verb
        self._unread_error: BaseException | None = None

    def set_exception(self, exception: BaseException | None) -> None:
        """Set the error of the verb. After RankLost every verb fails with it: no warning."""
        spec = VERBS[self.verb]
        if spec.group == LEARNER and not (spec.is_cleanup or isinstance(exception, RankLost)):
            self._unread_error = exception
        super().set_exception(exception)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result, as `Future.result` does."""
        try:
            return super().result(timeout)
        except BaseException as error:
            if error is self._unread_error:  # rather than a timeout
                self._unread_error = None
            raise
        finally:
            del self  # a cycle with the traceback would keep the verb's tensors

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, as `Future.exception` does."""
        error = super().exception(timeout)
        self._unread_error = None
        return error

    # a default, since the globals are gone at the end of the interpreter
    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        if self._unread_error is not None:
            warn(
                f"{self.verb} failed, and its result was not read: "
                f"{type(self._unread_error).__name__}: {self._unread_error}\n"
                f"Call result() of the future that {self.verb} returned",
                stacklevel=99,  # no line of a script: it is collected anywhere
            )


@dataclass(eq=False)
class VerbCall:
    """Hold a submitted verb. `dependencies`: earlier futures; if any of them failed, the verb is
    refused.
    """

    verb: str
    arguments: Sequence[Any] = ()
    dependencies: Sequence[Future] = ()
    future: Future = field(default_factory=Future)

    @property
    def spec(self) -> VerbSpec:
        """Return the verb's row in the table."""
        return VERBS[self.verb]

    @property
    def version_id(self) -> int | None:
        """Return the weight version that the arguments name, or None."""
        index = self.spec.version_arg
        return None if index is None else self.arguments[index]


# ------------------------------------------------------------- work of a verb over the ranks


def merge_by_index(rank_results: Sequence[Mapping[int, Any]]) -> list[Any]:
    """Return the ranks' results in index order."""
    results = {i: value for table in rank_results for i, value in table.items()}
    return [results[i] for i in range(len(results))]


def assign_indices(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Return the sorted indices of the items of each part. Items are assigned in order of
    decreasing cost, each to the part with the smallest load.
    """
    loads = [(0, part) for part in range(parts)]
    indices: list[list[int]] = [[] for _ in loads]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = loads[0]
        indices[part].append(i)
        heapq.heapreplace(loads, (load + costs[i], part))
    return [sorted(part) for part in indices]
