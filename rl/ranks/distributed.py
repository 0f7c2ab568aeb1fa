"""Ranks and collectives on Python objects: the only place that knows torch.distributed.

On one process every function is the identity, so callers never ask which case they are in.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rl.errors import FailedElsewhere, RankLost
from rl.ranks.beats import Drum, Watch

_CARD = 2048  # bytes in which a process says who it is


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass(frozen=True)
class Members:
    """Processes that talk to each other beside the world that each computes in. `store`: where they
    meet; `called`: this one, in errors.
    """

    rank: int
    world: int
    store: Any
    called: str

    def group(self, name: str, timeout: datetime.timedelta) -> Any:
        return dist.ProcessGroupGloo(
            dist.PrefixStore(name, self.store), self.rank, self.world, timeout=timeout
        )


class _Everybody(Members):
    """All ranks of this world."""

    def __init__(self) -> None:
        super().__init__(rank(), world(), None, f"rank {rank()}")

    def group(self, name: str, timeout: datetime.timedelta) -> Any:
        return dist.new_group(backend="gloo", timeout=timeout)


class ObjectGroup:
    """Moves Python objects between ranks over gloo (tensors of the learner go over the
    accelerator's own backend).

    `among`: these processes rather than the ranks of this world.

    Every wait has a bound of `timeout_seconds` on rank 0, which can say whom it waited for; the
    others wait a little more than twice as long for rank 0, so that it is the first to give up. A
    wait that fails raises RankLost. A rank 0 whose process is stopped, or leaves one that is ready
    waiting without waiting for another itself, ends the others after `timeout_seconds` and a beat
    (rl.ranks.beats).
    """

    def __init__(self, timeout_seconds: float, among: Members | None = None):
        self.timeout_seconds = timeout_seconds
        among = among or _Everybody()
        self.rank, self.world = among.rank, among.world
        self._names = ["rank 0"]
        self._beats: Drum | Watch | None = None
        if self.world > 1:
            bound = datetime.timedelta(seconds=2 * timeout_seconds + 60)
            self._results = among.group("results", bound)
            self._verbs = among.group(
                "verbs", datetime.timedelta(seconds=max(timeout_seconds, 3 * self.beat_seconds))
            )
            drum = Drum(self.beat_seconds) if self.rank == 0 else None
            me = f"{among.called} (process {os.getpid()} on {socket.gethostname()})"
            try:
                known = self._all_gather((me, drum and (drum.port, drum.word)))
            except RuntimeError as error:
                raise RankLost(
                    "another rank ended while the ranks were getting to know each other: its own output says why"
                ) from error
            self._names = [name for name, _ in known]
            self._beats = drum or self._watch(*known[0][1])

    def _all_gather(self, item: Any) -> list[Any]:
        """Every rank's object, which is a small one."""
        mine = torch.zeros(_CARD, dtype=torch.uint8)
        pickled = pickle.dumps(item)
        mine[: len(pickled)] = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        found = [torch.zeros_like(mine) for _ in range(self.world)]
        self._results.allgather([found], [mine]).wait()
        return [pickle.loads(one.numpy().tobytes()) for one in found]

    def _watch(self, port: int, word: str) -> Watch:
        """Rank 0 is where the ranks met."""
        hosts = [os.environ.get("MASTER_ADDR", "localhost")]
        lost = f"{self.name(self.rank).partition(' (')[0]} ends: {self.name(0)}, the driver, "
        timeout = self.timeout_seconds
        return Watch(
            hosts,
            port,
            word,
            every=self.beat_seconds,
            timeout=timeout,
            lost=lambda seconds: lost + _how(seconds, timeout),
        )

    def close(self) -> None:
        """No more beats are sent, or expected: the ranks are about to part."""
        if self._beats is not None:
            self._beats.close()

    @property
    def beat_seconds(self) -> float:
        """How often rank 0 has to broadcast something, lest the others take it for lost."""
        return min(10.0, self.timeout_seconds / 4)

    def name(self, of: int) -> str:
        """A rank as an error names it."""
        return self._names[of]

    def broadcast_verb(self, verb: Any) -> Any:
        """Rank 0's object, on every rank."""
        if self.world == 1:
            return verb
        begin = time.monotonic()
        try:
            return self._broadcast(verb)
        except RuntimeError as error:
            seconds = time.monotonic() - begin
            if self.rank > 0:
                raise RankLost(
                    f"{self.name(0)}, the driver, {_how(seconds, self.timeout_seconds)}"
                ) from error
            raise RankLost(self._lost(self._gone(), seconds)) from error

    def _broadcast(self, item: Any) -> Any:
        payload = (
            torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
            if self.rank == 0
            else None
        )
        size = torch.tensor([0 if payload is None else len(payload)])
        self._verbs.broadcast(size, 0).wait()
        if payload is None:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self._verbs.broadcast(payload, 0).wait()
        return item if self.rank == 0 else pickle.loads(payload.numpy().tobytes())

    def gather(self, item: Any) -> list[Any] | None:
        """Every rank's object in rank order on rank 0, None elsewhere."""
        if self.world == 1:
            return [item]
        if self.rank > 0:
            payload = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
            begin = time.monotonic()
            try:
                with self._said(begin):
                    self._results.send([torch.tensor([len(payload)])], 0, 0).wait()
                    self._results.send([payload], 0, 0).wait()
            except RuntimeError as error:
                raise RankLost(
                    f"{self.name(0)}, the driver, {_how(time.monotonic() - begin, self.timeout_seconds)}"
                ) from error
            return None
        with self._said():
            sizes = self._receive(
                [torch.zeros(1, dtype=torch.int64) for _ in range(self.world - 1)]
            )
            payloads = self._receive([torch.empty(int(size), dtype=torch.uint8) for size in sizes])
        return [item, *(pickle.loads(payload.numpy().tobytes()) for payload in payloads)]

    @contextlib.contextmanager
    def _said(self, since: float | None = None) -> Iterator[None]:
        """Around a wait: on rank 0 its beats tell of it, elsewhere the watch knows since when it
        lasts.
        """
        if isinstance(self._beats, Drum):
            self._beats.collecting = True
        elif self._beats is not None:
            self._beats.waiting_since = since
        try:
            yield
        finally:
            if isinstance(self._beats, Drum):
                self._beats.collecting = False
            elif self._beats is not None:
                self._beats.waiting_since = None

    def _receive(self, into: list[torch.Tensor]) -> list[torch.Tensor]:
        """On rank 0: fills a tensor from each other rank. Raises RankLost naming those that sent
        nothing.
        """
        begin = time.monotonic()
        lost = self._silent(into, self.timeout_seconds)
        if lost:
            raise RankLost(self._lost(lost, time.monotonic() - begin))
        return into

    def _silent(self, into: list[torch.Tensor], seconds: float) -> list[int]:
        """The ranks from which nothing came within so many seconds, or whose connection is closed."""
        works = [self._listen(tensor, i + 1) for i, tensor in enumerate(into)]
        deadline, silent = time.monotonic() + seconds, []
        for i, work in enumerate(works):
            left = max(0.01, deadline - time.monotonic())  # gloo takes 0 for no bound at all
            if not _comes(work, left):
                silent.append(i + 1)
        return silent

    def _listen(self, tensor: torch.Tensor, to: int) -> dist.Work | None:
        """None where the connection is closed already."""
        try:
            return self._results.recv([tensor], to, 0)
        except RuntimeError:
            return None

    def _gone(self) -> list[int]:
        """On rank 0 after a failed broadcast: the ranks whose connection is closed; all where that
        cannot be told.
        """
        gone = []
        for other in range(1, self.world):
            begin, work = time.monotonic(), self._listen(torch.zeros(1, dtype=torch.int64), other)
            if not _comes(work, 0.2) and time.monotonic() - begin < 0.15:
                gone.append(other)
        return gone or list(range(1, self.world))

    def _lost(self, ranks: list[int], seconds: float) -> str:
        names = ", ".join(self.name(r) for r in ranks[:8]) + (
            f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        )
        return f"{names} {_how(seconds, self.timeout_seconds)}"


def _comes(work: dist.Work | None, seconds: float) -> bool:
    """Whether a message arrives within so many seconds."""
    if work is None:
        return False
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def _how(seconds: float, bound: float) -> str:
    """What became of a rank, from how long it was waited for."""
    if seconds < 0.95 * bound:
        return "is lost: it ended or closed its connection (its own output says why; a kill for want of memory leaves none)"
    return f"did not answer within {bound:g} s: it hangs, or needs longer (the setting timeout is this bound)"


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective failed, for want of another rank or of the network. gloo raises plain
    RuntimeErrors: told by their text.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        name in str(error).lower() for name in ("gloo", "nccl", "connection closed by peer")
    )


def all_sum_(tensors: list[torch.Tensor]) -> None:
    """Sums each tensor over the ranks, in place, as one flat message per dtype."""
    if world() == 1 or not tensors:
        return
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        same = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.all_reduce(flat)
        for tensor, piece in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(piece.view_as(tensor))


@contextlib.contextmanager
def all_or_none(device: torch.device) -> Iterator[None]:
    """Around what each rank does by itself before they talk: if it fails on one, none goes on and
    waits for that one.

    Raises FailedElsewhere on the ranks where it went well.
    """
    failed = torch.ones(1, device=device)
    try:
        yield
        failed.zero_()
    finally:
        all_sum_([failed])
    if float(failed) > 0:
        raise FailedElsewhere


def meeting_place(timeout_seconds: float) -> tuple[Any, int, int]:
    """(a store that all processes of the launch share, this one's rank in it, how many there are),
    before any world has begun.
    """
    found = dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_seconds))  # type: ignore[operator]
    try:
        return next(iter(found))
    except RuntimeError as error:  # torch's of the store
        raise RankLost(
            f"not all processes of the launch were there within {timeout_seconds:g} s ({str(error).splitlines()[0]}): look at what the "
            "others said last, or raise --timeout"
        ) from error


def corner(store: Any, name: str) -> Any:
    """A part of a store, whose keys are its own."""
    return dist.PrefixStore(name, store)


def begin_world(store: Any, rank: int, world: int, timeout_seconds: float) -> None:
    """These processes are a world of their own: what is collective in them is so among them alone."""
    backend, bound = (
        "nccl" if torch.cuda.is_available() else "gloo",
        datetime.timedelta(seconds=timeout_seconds),
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=bound)


def another_group(timeout_seconds: float) -> Any:
    """All ranks once more, over the same backend; `timeout_seconds`: the bound of one wait in it."""
    return dist.new_group(timeout=datetime.timedelta(seconds=timeout_seconds))


def shard_fully(model: torch.nn.Module, layers: list[torch.nn.Module], *, bf16: bool) -> None:
    """Shards a model over the ranks in place (FSDP2), each of `layers` a unit of its own and what
    is left another.

    Gradients are SUMS over the ranks, in fp32; `bf16`: weights are put together, and computed with,
    in bf16.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
    )
    for module in (*layers, model):
        fully_shard(module, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no average
            module.set_gradient_divide_factor(1.0)
    root: Any = model
    # Now, and not at the first forward: in that one adapters may be off, and FSDP would then sum
    # their bf16 gradients in bf16, for ever.
    root._get_fsdp_state()._lazy_init()


@dataclass(frozen=True)
class Team:
    """Some ranks of this world that compute one thing together. See `rl.sampler.split.Team`."""

    rank: int
    size: int
    group: Any

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(found, x.contiguous(), group=self.group)
        return found

    def first_(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, group=self.group, group_src=0)
        return x


_teams: dict[int, Team] = {}


def team(size: int, timeout_seconds: float) -> Team | None:
    """This rank's team of so many consecutive ranks, the same at each call; all ranks ask together.
    None of one rank alone.
    """
    for first in range(0, world(), size) if size > 1 and size not in _teams else ():
        ranks = range(first, first + size)
        group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_seconds))
        if rank() in ranks:
            _teams[size] = Team(rank() - first, size, group)
    return _teams[size] if size > 1 else None


def shutdown() -> None:
    _teams.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
