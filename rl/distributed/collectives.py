"""Provide ranks and collectives on Python objects.

This module and no other uses torch.distributed. On a single process every function is the identity,
so callers need no case distinction.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rl.distributed.gloo_interface import select_gloo_interface
from rl.distributed.heartbeat import HeartbeatMonitor, HeartbeatSender
from rl.distributed.packed_messages import pack_message, unpack_message
from rl.errors import OtherRankFailed, RankLost
from rl.sanitize import list_some

SUM_BUCKET_BYTES = 256 << 20  # bytes of a flat message of gradients
_MAX_ADDRESS_BYTES = 2048  # bytes of a process's pickled name and heartbeat address


def rank() -> int:
    """Return this process's rank in its world."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Return the number of ranks in this process's world."""
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass(frozen=True)
class BridgeMembers:
    """Describe processes that communicate in addition to their worlds.

    `store`: their common store; None: they are all ranks of this world. `rank_name`: this process's
    name in errors.
    """

    rank: int
    world: int
    store: Any
    rank_name: str

    def group(self, name: str, timeout: datetime.timedelta, backend: str = "gloo") -> Any:
        """Return a process group of these processes."""
        if self.store is None:
            return dist.new_group(backend=backend, timeout=timeout)
        store = dist.PrefixStore(name, self.store)
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, self.rank, self.world, timeout=timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, self.rank, self.world, options)


class ObjectGroup:
    """Move Python objects between ranks over gloo.

    Tensors of the learner use the accelerator's backend instead. `members`: these processes instead
    of the ranks of this world.

    `received_bytes`: bytes of rank 0's verbs that this rank has received. `sent_buffer_bytes`:
    bytes of the buffers that rank 0 has broadcast.

    Every wait on rank 0 has a timeout of `timeout_seconds`, after which rank 0 names the ranks it
    waited for. The other ranks wait a little more than twice as long for rank 0, so that rank 0
    times out first. A wait that fails raises RankLost. The other ranks also end `timeout_seconds`
    and a heartbeat after rank 0's process is stopped, or after rank 0 keeps a ready rank waiting
    without waiting for another rank itself (rl.distributed.heartbeat).
    """

    def __init__(self, timeout_seconds: float, members: BridgeMembers | None = None):
        self.timeout_seconds = timeout_seconds
        members = members or BridgeMembers(rank(), world(), None, f"rank {rank()}")
        self.rank, self.world, self._members = members.rank, members.world, members
        self.received_bytes = self.sent_buffer_bytes = 0
        self._names = ["rank 0"]
        self._heartbeat: HeartbeatSender | HeartbeatMonitor | None = None
        self._buffers: Any = None  # process group of `broadcast_buffer`, from its first use on
        self._staging: StagingBuffers | None = None
        if self.world > 1:
            bound = datetime.timedelta(seconds=2 * timeout_seconds + 60)
            self._results = members.group("results", bound)
            self._verbs = members.group(
                "verbs",
                datetime.timedelta(seconds=max(timeout_seconds, 3 * self.heartbeat_seconds)),
            )
            sender = HeartbeatSender(self.heartbeat_seconds) if self.rank == 0 else None
            me = f"{members.rank_name} (process {os.getpid()} on {socket.gethostname()})"
            try:
                peers = self._all_gather((me, sender and (sender.port, sender.token)))
            except RuntimeError as error:
                raise RankLost(
                    "another rank ended while the ranks were connecting: the output of that rank "
                    "says why"
                ) from error
            self._names = [name for name, _ in peers]
            self._heartbeat = sender or self._monitor_driver(*peers[0][1])

    def _all_gather(self, item: Any) -> list[Any]:
        """Return every rank's object, which must pickle into `_MAX_ADDRESS_BYTES` bytes."""
        mine = torch.zeros(_MAX_ADDRESS_BYTES, dtype=torch.uint8)
        pickled = pickle.dumps(item)
        mine[: len(pickled)] = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        gathered = [torch.zeros_like(mine) for _ in range(self.world)]
        self._results.allgather([gathered], [mine]).wait()
        return [pickle.loads(tensor.numpy().tobytes()) for tensor in gathered]

    def _monitor_driver(self, port: int, token: str) -> HeartbeatMonitor:
        """Return the monitor of rank 0, which runs on the rendezvous host."""
        name = self.rank_name(self.rank).partition(" (")[0]
        return HeartbeatMonitor(
            os.environ.get("MASTER_ADDR", "localhost"),
            port,
            token,
            interval_seconds=self.heartbeat_seconds,
            timeout=self.timeout_seconds,
            lost_message=lambda seconds: f"{name} ends: {self._driver_lost_message(seconds)}",
        )

    def close(self) -> None:
        """Stop sending or expecting heartbeats: the ranks are about to disconnect."""
        if self._heartbeat is not None:
            self._heartbeat.close()

    @property
    def heartbeat_seconds(self) -> float:
        """Return the interval of rank 0's heartbeats."""
        return min(10.0, self.timeout_seconds / 4)

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for errors."""
        return self._names[rank]

    def broadcast_verb(self, verb: Any, shares: Sequence[Any] | None = None) -> Any:
        """Return rank 0's object on every rank. Raises RankLost if a rank does not take part.

        `shares`: an object for each rank. Each rank receives its share alone, appended to `verb`,
        which is a tuple then.
        """
        if self.world == 1:
            return verb if shares is None else (*verb, shares[0])
        begin = time.monotonic()
        try:
            return self._send_verb(verb, shares) if self.rank == 0 else self._receive_verb()
        except RuntimeError as error:
            seconds = time.monotonic() - begin
            if self.rank > 0:
                raise RankLost(self._driver_lost_message(seconds)) from error
            raise RankLost(self._lost_message(self._disconnected_ranks(), seconds)) from error

    def _send_verb(self, verb: Any, shares: Sequence[Any] | None) -> Any:
        """Broadcast the sizes and the verb, then send each other rank its share.

        Everything is pickled before anything is sent, so that an object that cannot be pickled
        leaves no rank waiting. A share of several ranks is pickled once.
        """
        others = () if shares is None else shares[1:]
        packed = {key: pack_message(share) for key, share in {id(s): s for s in others}.items()}
        header, messages = pack_message(verb), [packed[id(share)] for share in others]
        sizes = torch.zeros(self.world, dtype=torch.int64)  # of the header, then of each message
        sizes[: 1 + len(messages)] = torch.tensor([len(header), *map(len, messages)])
        self._verbs.broadcast(sizes, 0).wait()
        self._verbs.broadcast(header, 0).wait()
        works = [self._verbs.send([message], to, 0) for to, message in enumerate(messages, 1)]
        for work in works:
            work.wait()
        return verb if shares is None else (*verb, shares[0])

    def _receive_verb(self) -> Any:
        """Receive rank 0's verb, and this rank's share if there is one."""
        sizes = torch.empty(self.world, dtype=torch.int64)
        self._verbs.broadcast(sizes, 0).wait()
        header = torch.empty(int(sizes[0]), dtype=torch.uint8)
        self._verbs.broadcast(header, 0).wait()
        message = torch.empty(int(sizes[self.rank]), dtype=torch.uint8)
        self.received_bytes += sizes.nbytes + header.nbytes + message.nbytes
        if not len(message):
            return unpack_message(header)
        self._verbs.recv([message], 0, 0).wait()
        return (*unpack_message(header), unpack_message(message))

    def broadcast_buffer(
        self, buffer: torch.Tensor, following: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rank 0's buffer on every rank: over NCCL in GPU memory if there are GPUs, from
        pinned memory of rank 0, otherwise over gloo.

        `following`: on rank 0, the buffer of the next call, which is copied to the GPU while this
        one is sent. Rank 0 does not wait for NCCL, which reports no lost rank before its timeout:
        the next `gather` does.
        """
        if self._buffers is None:
            cuda = torch.cuda.is_available()
            bound = datetime.timedelta(seconds=self.timeout_seconds)
            self._buffers = self._members.group("buffers", bound, "nccl" if cuda else "gloo")
            self._staging = StagingBuffers() if cuda and self.rank == 0 else None
        self.sent_buffer_bytes += buffer.nbytes if self.rank == 0 else 0
        with self._mark_waiting():
            if self._staging is None:
                self._buffers.broadcast(buffer, 0).wait()
                return buffer
            return self._staging.send(
                buffer, lambda staged: self._buffers.broadcast(staged, 0).wait(), following
            )

    def gather(self, item: Any, seconds: float | None = None) -> list[Any] | None:
        """Return every rank's object in rank order on rank 0, None elsewhere.

        `seconds`: limit of this rank's wait, at most the group's. Raises RankLost if a rank does
        not take part.
        """
        seconds = seconds and min(seconds, self.timeout_seconds)
        if self.world == 1:
            return [item]
        if self.rank > 0:
            payload = pack_message(item)
            limit = [] if seconds is None else [datetime.timedelta(seconds=seconds)]
            begin = time.monotonic()
            try:
                with self._mark_waiting():
                    self._results.send([torch.tensor([len(payload)])], 0, 0).wait(*limit)
                    self._results.send([payload], 0, 0).wait()
            except RuntimeError as error:
                waited = time.monotonic() - begin
                raise RankLost(self._driver_lost_message(waited, seconds)) from error
            return None
        with self._mark_waiting():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world - 1)]
            self._receive(sizes, seconds)
            payloads = self._receive([torch.empty(int(size), dtype=torch.uint8) for size in sizes])
        return [item, *map(unpack_message, payloads)]

    @contextlib.contextmanager
    def _mark_waiting(self) -> Iterator[None]:
        """Mark a wait: rank 0's heartbeats report it, and another rank's monitor limits it."""
        assert self._heartbeat is not None
        self._heartbeat.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._heartbeat.waiting_since = None

    def _receive(
        self, buffers: list[torch.Tensor], seconds: float | None = None
    ) -> list[torch.Tensor]:
        """Fill a tensor from each other rank, on rank 0, within `seconds` (by default the timeout).

        Raises RankLost naming the ranks that sent nothing.
        """
        begin = time.monotonic()
        works = [self._start_receive(tensor, i + 1) for i, tensor in enumerate(buffers)]
        deadline, silent = begin + (seconds or self.timeout_seconds), []
        for i, work in enumerate(works):
            remaining = max(0.01, deadline - time.monotonic())  # gloo treats 0 as no timeout
            if not _arrives_in_time(work, remaining):
                silent.append(i + 1)
        if silent:
            raise RankLost(self._lost_message(silent, time.monotonic() - begin, seconds))
        return buffers

    def _start_receive(self, tensor: torch.Tensor, source: int) -> dist.Work | None:
        """Start to receive a tensor from a rank; return None if its connection is closed."""
        try:
            return self._results.recv([tensor], source, 0)
        except RuntimeError:
            return None

    def _disconnected_ranks(self) -> list[int]:
        """Return the ranks with a closed connection, on rank 0 after a failed broadcast.

        Return all other ranks if none can be identified.
        """
        closed = []
        for other in range(1, self.world):
            begin = time.monotonic()
            work = self._start_receive(torch.zeros(1, dtype=torch.int64), other)
            if not _arrives_in_time(work, 0.2) and time.monotonic() - begin < 0.15:
                closed.append(other)
        return closed or list(range(1, self.world))

    def _driver_lost_message(self, seconds: float, limit: float | None = None) -> str:
        """Return the message about a driver that did not answer. `limit`: as in `gather`."""
        return f"{self.rank_name(0)}, the driver, {self._explain_silence(seconds, limit)}"

    def _lost_message(self, ranks: list[int], seconds: float, limit: float | None = None) -> str:
        """Return the message about ranks that did not answer."""
        names = list_some([self.rank_name(r) for r in ranks], 8)
        return f"{names} {self._explain_silence(seconds, limit)}"

    def _explain_silence(self, seconds: float, limit: float | None) -> str:
        """Return the likely state of a rank, judged by the seconds of waiting for it."""
        if seconds < 0.95 * (limit or self.timeout_seconds):
            return (
                "is lost: it ended or closed its connection (the output of that rank says why, "
                "unless the system killed it for lack of memory)"
            )
        if limit is not None:
            return (
                f"did not answer within {limit:g} s: it may be stuck in a collective with this "
                "rank, which ends"
            )
        return (
            f"did not answer within {self.timeout_seconds:g} s: it hangs, or needs longer (raise "
            "the setting timeout)"
        )


# a buffer that is copied ahead: in host memory, on the device, and its stream
StagedBuffer = tuple[torch.Tensor, torch.Tensor, torch.cuda.Stream]


class StagingBuffers:
    """Copy buffers from pinned host memory to the GPU and send them from there: while one is sent,
    the next is copied.

    Each has one of two streams, in which its copy, its broadcast and its successor's copy into the
    same memory follow each other. On the learner's stream a buffer would wait for the learner.
    """

    def __init__(self) -> None:
        self._streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        self._staged: StagedBuffer | None = None

    def send(
        self,
        buffer: torch.Tensor,
        broadcast: Callable[[torch.Tensor], object],
        following: torch.Tensor | None,
    ) -> torch.Tensor:
        """Call `broadcast` with the buffer on the device, then begin to copy `following`. Return
        the buffer on the device.
        """
        staged, self._staged = self._staged, None
        if staged is None or staged[0] is not buffer:  # the first of a transfer
            staged = self._copy(buffer)
        _, on_device, stream = staged
        with torch.cuda.stream(stream):
            broadcast(on_device)
        if following is not None:
            self._staged = self._copy(following)
        return on_device

    def _copy(self, buffer: torch.Tensor) -> StagedBuffer:
        self._streams.reverse()
        stream = self._streams[0]
        with torch.cuda.stream(stream):
            return buffer, buffer.cuda(non_blocking=True), stream


def _arrives_in_time(work: dist.Work | None, seconds: float) -> bool:
    """Return whether a message arrives within `seconds`."""
    if work is None:
        return False
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def is_communication_error(error: BaseException) -> bool:
    """Return whether a collective failed because of a missing rank or the network.

    gloo raises plain RuntimeErrors, which are recognized by their text.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        name in str(error).lower() for name in ("gloo", "nccl", "connection closed by peer")
    )


def all_sum_(tensors: list[torch.Tensor]) -> None:
    """Sum each tensor over the ranks, in place, as flat messages of one dtype and at most
    SUM_BUCKET_BYTES each. A larger contiguous tensor is summed where it is, in several messages.
    """
    if world() == 1 or not tensors:
        return
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        for bucket in _split_into_buckets([t for t in tensors if t.dtype == dtype]):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                _sum_flat_(bucket[0].view(-1))
                continue
            flat = torch.cat([t.reshape(-1) for t in bucket])
            _sum_flat_(flat)
            for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))


def _sum_flat_(flat: torch.Tensor) -> None:
    """Sum a tensor [N] over the ranks, in place, in messages of at most SUM_BUCKET_BYTES."""
    for piece in flat.split(max(1, SUM_BUCKET_BYTES // flat.itemsize)):
        dist.all_reduce(piece)


def _split_into_buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive tensors of together at most SUM_BUCKET_BYTES; a larger tensor alone."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > SUM_BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def copy_from_rank_0_(tensors: Iterable[torch.Tensor]) -> None:
    """Replace the tensors of every rank by those of rank 0."""
    if world() > 1:
        for tensor in tensors:
            message = tensor.detach().contiguous()
            dist.broadcast(message, 0)
            tensor.detach().copy_(message)


@contextlib.contextmanager
def all_or_none(device: torch.device) -> Iterator[None]:
    """Wrap work that each rank does independently before the ranks communicate.

    If it fails on a rank, no rank continues and waits for it. Raises OtherRankFailed on the ranks
    that succeeded.
    """
    failed = torch.ones(1, device=device)
    try:
        yield
        failed.zero_()
    finally:
        all_sum_([failed])
    if float(failed) > 0:
        raise OtherRankFailed


def join_rendezvous(timeout_seconds: float) -> tuple[Any, int, int]:
    """Return (a store shared by all processes of the launch, this process's rank, the number of
    processes).

    It runs before any world is initialized. Raises RankLost if a process does not join in time.
    """
    rendezvous = dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_seconds))  # type: ignore[operator]
    try:
        return next(iter(rendezvous))
    except RuntimeError as error:  # torch's store timed out
        raise RankLost(
            f"not all processes of the launch joined within {timeout_seconds:g} s "
            f"({str(error).splitlines()[0]}): look at the last output of the others, or raise "
            "--timeout"
        ) from error


def prefix_store(store: Any, name: str) -> Any:
    """Return a view of a store with a separate key namespace."""
    return dist.PrefixStore(name, store)


def init_world(store: Any, rank: int, world: int, timeout_seconds: float) -> None:
    """Initialize these processes as a separate world: collectives run among them only."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    bound = datetime.timedelta(seconds=timeout_seconds)
    select_gloo_interface()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=bound)


def new_world_group(timeout_seconds: float) -> Any:
    """Return a second group of all ranks over the same backend; `timeout_seconds` bounds each
    wait.
    """
    return dist.new_group(timeout=datetime.timedelta(seconds=timeout_seconds))


@dataclass(frozen=True)
class ShardMesh:
    """Arrange the ranks in rows of `size` consecutive ranks; each row holds all weights once.

    `rank`: this rank's place in its row. `mesh`: torch's DeviceMesh, None where one row holds all
    ranks.
    """

    rank: int
    size: int
    mesh: Any = None


_shard_mesh: ShardMesh | None = None


def init_shard_mesh(size: int, timeout_seconds: float) -> None:
    """Let rows of `size` consecutive ranks hold the weights once each (hybrid sharding).

    All ranks call it together. `size` divides the number of ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh

    global _shard_mesh
    if size == world() or shard_mesh().size == size:
        return
    ranks = torch.arange(world()).view(-1, size)
    row = new_row_group(size, timeout_seconds)
    mesh = DeviceMesh.from_group(
        [_new_column_group(size, timeout_seconds), row],
        _mesh_device(),
        mesh=ranks,
        mesh_dim_names=("replicate", "shard"),
    )
    _shard_mesh = ShardMesh(rank() % size, size, mesh)


def shard_mesh() -> ShardMesh:
    """Return the mesh over which `shard_model` shards: one row of all ranks by default."""
    return _shard_mesh or ShardMesh(rank(), world())


def new_row_group(size: int, timeout_seconds: float) -> Any:
    """Return the group of this rank's row of `size` consecutive ranks.

    All ranks call it together.
    """
    bound = datetime.timedelta(seconds=timeout_seconds)
    rows = torch.arange(world()).view(-1, size).tolist()
    return [dist.new_group(row, timeout=bound) for row in rows][rank() // size]


def _new_column_group(size: int, timeout_seconds: float) -> Any:
    """Return the group of the ranks with this rank's place in their rows of `size`.

    All ranks call it together.
    """
    bound = datetime.timedelta(seconds=timeout_seconds)
    columns = torch.arange(world()).view(-1, size).T.tolist()
    return [dist.new_group(column, timeout=bound) for column in columns][rank() % size]


def _mesh_device() -> str:
    """Return the device type of a DeviceMesh."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def shard_model(
    model: torch.nn.Module,
    layers: list[torch.nn.Module],
    *,
    bf16: bool,
    experts: Iterable[torch.nn.Module] = (),
    expert_mesh: Any = None,
) -> None:
    """Shard a model over `shard_mesh()` in place (FSDP2): each of `layers` is a unit, the rest
    another unit.

    Gradients are SUMS over all ranks, in fp32. `bf16`: weights are gathered and used in bf16.
    `experts`: modules of which this rank has its part of the experts already. Each is a unit, whose
    second dimension is sharded over `expert_mesh` (the first may have fewer rows than ranks).
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
    )
    # The layer casts hidden states; the router's weights may be fp32 and stay so.
    expert_policy = replace(policy, cast_forward_inputs=False)
    for module in experts:
        fully_shard(
            module, mesh=expert_mesh, mp_policy=expert_policy, shard_placement_fn=lambda _: Shard(1)
        )
    for module in (*layers, model):
        fully_shard(module, mesh=shard_mesh().mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
            module.set_gradient_divide_factor(1.0)
    root: Any = model
    # Initialize now, not at the first forward. Adapters may be disabled in that forward, and FSDP
    # would then sum their bf16 gradients in bf16 in all later steps.
    root._get_fsdp_state()._lazy_init()


@dataclass(frozen=True)
class RankGroup:
    """Hold some ranks of this world that compute together; see
    `rl.sampler.tensor_parallel.TensorParallelGroup`.
    """

    rank: int
    size: int
    group: Any

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the group, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return `x` of every rank of the group, in rank order."""
        gathered = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(gathered, x.contiguous(), group=self.group)
        return gathered

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Send x[i] of a contiguous [size, ...] to rank i; return what each rank sent, in rank
        order.
        """
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=self.group)
        return received

    def exchange_rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send the next sent[i] rows of x to rank i; return the received[i] rows of each rank i, in
        rank order.
        """
        rows = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(rows, x.contiguous(), received, sent, group=self.group)
        return rows

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by that of the group's first rank, in place."""
        dist.broadcast(x, group=self.group, group_src=0)
        return x


_rank_groups: dict[int, RankGroup] = {}
_column_meshes: dict[int, Any] = {}


def get_rank_group(size: int, timeout_seconds: float) -> RankGroup | None:
    """Return this rank's group of `size` consecutive ranks, or None for size 1.

    Each call returns the same group. All ranks call it together.
    """
    if size > 1 and size not in _rank_groups:
        _rank_groups[size] = RankGroup(rank() % size, size, new_row_group(size, timeout_seconds))
    return _rank_groups.get(size)


def get_column_mesh(size: int, timeout_seconds: float) -> Any:
    """Return torch's DeviceMesh of the ranks with this rank's place in their groups of `size`.

    Each call returns the same mesh. All ranks call it together.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if size not in _column_meshes:
        group = _new_column_group(size, timeout_seconds)
        _column_meshes[size] = DeviceMesh.from_group(group, _mesh_device())
    return _column_meshes[size]


def shutdown() -> None:
    """Destroy all process groups."""
    global _shard_mesh
    _shard_mesh = None
    _rank_groups.clear()
    _column_meshes.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
