"""Send weights to the workers of a vLLM server over NCCL, as vLLM's transfer backend "nccl" does.

This process is rank 0 of a communicator with the workers of one server, so that a server that
fails does not disturb the transfers to others. The workers join by a unique id (vLLM's way for
programs that do not import vLLM), and get tensors packed into buffers.
"""

from __future__ import annotations

import base64
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rl.vllm.sample_reply import VllmServerError

LIBRARY_VARIABLE = "VLLM_NCCL_SO_PATH"  # of vLLM, too
_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # of ncclDataType_t and ncclRedOp_t
_BUFFER_BYTES = 1 << 28  # a buffer is sent when it holds more
_JOIN_SECONDS = 20.0  # for a thread to end after the server has answered


class NcclError(Exception):
    """Report an NCCL call that failed."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class NcclSender:
    """Send bytes to the workers of a server, as rank 0 of a communicator.

    `unique_id`: with which the workers join. `connect` and `broadcast` wait for the workers, and
    raise NcclError after `abort`, which ends a broadcast that another thread waits for. NCCL lets
    `connect` wait until the workers join. Raises OSError if there is no library of NCCL.
    """

    def __init__(self) -> None:
        self._library = load_library()
        self._device = torch.device("cpu")  # of a library in the tests
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
            # The learner may compute meanwhile. PyTorch keeps a buffer's memory for its stream, so
            # a stream for each buffer would keep many buffers.
            self._stream = torch.cuda.Stream(self._device)
        self._id, self._comm, self._has_ended = _UniqueId(), ctypes.c_void_p(), False
        self._lock = threading.Lock()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(self._id)))

    @property
    def unique_id(self) -> str:
        """Return the id in base64."""
        return base64.b64encode(bytes(self._id.internal)).decode()

    def connect(self, num_workers: int) -> None:
        """Join the communicator, and add up one number with all workers, as vLLM expects."""
        comm = ctypes.c_void_p()
        with torch.cuda.stream(self._stream):
            init = self._library.ncclCommInitRank
            self._check(init(ctypes.byref(comm), num_workers + 1, self._id, 0))
            with self._lock:
                self._comm, has_ended = comm, self._has_ended
            if has_ended:
                self.abort()
            number = torch.zeros(1, device=self._device)
            pointer = ctypes.c_void_p(number.data_ptr())
            reduce = self._library.ncclAllReduce
            self._check(reduce(pointer, pointer, 1, _FLOAT32, _SUM, *self._get_targets()))
            self._synchronize()

    def broadcast(self, data: Tensor) -> None:
        """Send bytes (a tensor of uint8 on the CPU) to all workers."""
        with torch.cuda.stream(self._stream):
            data = data.to(self._device)
            pointer, count = ctypes.c_void_p(data.data_ptr()), data.numel()
            send = self._library.ncclBroadcast
            self._check(send(pointer, pointer, count, _UINT8, 0, *self._get_targets()))
            self._synchronize()

    def abort(self) -> None:
        """End the communicator at once. A broadcast in another thread fails or ends early."""
        with self._lock:
            self._has_ended = True
            comm, self._comm = self._comm, ctypes.c_void_p()
            if comm:
                self._library.ncclCommAbort(comm)

    def _get_targets(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Return the communicator and the stream of a call. Raises NcclError after `abort`."""
        if not (comm := self._comm):
            raise NcclError("the communicator has ended")
        stream = None if self._stream is None else self._stream.cuda_stream
        return comm, ctypes.c_void_p(stream)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _check(self, result: int) -> None:
        if result:
            raise NcclError(self._library.ncclGetErrorString(result).decode(errors="replace"))


class NcclTransfer:
    """Send models to one server. `call(path, body, seconds)`: calls the server and raises
    VllmServerError. `seconds`: limit of each call.
    """

    def __init__(self, url: str, call: Callable[..., Any], seconds: float):
        self._url, self._call, self._seconds = url, call, seconds
        self._sender: NcclSender | None = None

    def send(self, folder: Path) -> None:
        """Send the tensors of a folder, and wait until the server has loaded them. Raises
        VllmServerError; the next call connects anew.
        """
        try:
            sender = self._sender or self._connect()
            self._call("/start_weight_update", {}, self._seconds)
            tensors = read_tensors(folder)
            info = {
                "names": list(tensors),
                "dtype_names": [str(x.dtype).removeprefix("torch.") for x in tensors.values()],
                "shapes": [list(x.shape) for x in tensors.values()],
            }

            def broadcast() -> None:
                for buffer in pack_tensors(tensors.values(), _BUFFER_BYTES):
                    sender.broadcast(buffer)

            self._run_both(sender, broadcast, "/update_weights", {"update_info": info})
            self._call("/finish_weight_update", {}, self._seconds)
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """End the communicator, such as that of a server that has been restarted."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.abort()

    def _connect(self) -> NcclSender:
        workers = int(self._call("/get_world_size")["world_size"])
        # Layers count the tensors that they got in an update that failed until an update is
        # finished. That of a killed run may still be open, and its communicator with it.
        with suppress(VllmServerError):
            self._call("/start_weight_update", {}, self._seconds)
        self._call("/finish_weight_update", {}, self._seconds)
        self._call("/shutdown_weight_transfer_engine", {}, self._seconds)
        try:
            self._sender = sender = NcclSender()
        except (NcclError, OSError) as error:
            raise VllmServerError(self._url, f"cannot be reached over NCCL: {error}") from error
        info = {
            "nccl_unique_id_b64": sender.unique_id,
            "rank_offset": 1,
            "world_size": workers + 1,
            "packed": True,
            "packed_buffer_size_bytes": _BUFFER_BYTES,
        }
        path = "/init_weight_transfer_engine"
        self._run_both(sender, lambda: sender.connect(workers), path, {"init_info": info})
        return sender

    def _run_both(
        self, sender: NcclSender, work: Callable[[], None], path: str, body: dict[str, Any]
    ) -> None:
        """Do work in a thread while the server executes a call, in which its workers take part.

        Nothing ends the wait for workers that do not join, so it is a daemon thread: the end of the
        process does not wait for it.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (raised below)
                errors.append(error)
                sender.abort()  # the workers would wait for it

        thread = threading.Thread(target=run, name="vllm-nccl", daemon=True)
        thread.start()
        try:
            self._call(path, body, self._seconds)
        except VllmServerError as error:
            if errors:
                error.args = (f"{error}; NCCL: {errors[0]}",)
            raise
        thread.join(_JOIN_SECONDS)
        if errors or thread.is_alive():
            text = errors[0] if errors else f"no end {_JOIN_SECONDS:g} s after the server's"
            raise VllmServerError(self._url, f"got no weights over NCCL: {text}")


def load_library() -> ctypes.CDLL:
    """Return the library of NCCL, by default the one that torch has loaded. Raises OSError if there
    is none.
    """
    default = "librccl.so.1" if torch.version.hip else "libnccl.so.2"
    library = ctypes.CDLL(os.environ.get(LIBRARY_VARIABLE) or default)
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by name; their values stay in the files until they are used.

    Those with the largest elements come first, since vLLM reads tensors where they lie in a buffer:
    behind an odd number of bf16 values a tensor of fp32 would not be aligned.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def pack_tensors(tensors: Iterable[Tensor], buffer_bytes: int) -> Iterator[Tensor]:
    """Yield the bytes of tensors. A buffer ends with the tensor that makes it larger than
    `buffer_bytes`, as vLLM's workers count.
    """
    parts: list[Tensor] = []
    size = 0
    for tensor in tensors:
        parts.append(tensor.contiguous().view(-1).view(torch.uint8))
        size += parts[-1].numel()
        if size > buffer_bytes:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat(parts)
