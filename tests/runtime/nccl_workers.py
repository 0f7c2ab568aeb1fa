"""Workers of a stub of a vLLM server that receive weights through the library of nccl_stub.c."""

import base64
import ctypes
import math
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).with_name("nccl_stub.c")
TRANSFER_PATHS = {
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
}


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


def build_library(folder):
    """Return the path of the compiled library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stub of NCCL with")
    path = Path(folder) / "libnccl_stub.so"
    line = [compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE)]
    subprocess.run(line, check=True)
    return path


class NcclWorkers:
    """Simulate vLLM's workers: each joins as another rank and receives all tensors.

    `calls`: the paths in order. `fault`: "refuses" to join, "dies" or "hangs" before it has received
    the second buffer.
    """

    def __init__(self, library, count):
        self.library, self.count = ctypes.CDLL(str(library)), count
        self.comms, self.is_active, self.fault = [], False, None
        self.has_parts = False  # tensors of an update that failed
        self.calls, self.info, self.buffers = [], None, 0
        self.ends_hang = threading.Event()

    def post(self, path, body):
        """Execute a call. Return (whether it succeeded, the tensors by name of `/update_weights`)."""
        self.calls.append(path)
        if path == "/shutdown_weight_transfer_engine":
            assert not self.is_active
            self.leave()
        elif path == "/init_weight_transfer_engine":
            if self.fault == "refuses":
                return False, None
            self.info = body["init_info"]
            assert self.info["packed"] and self.info["world_size"] == self.count + 1
            self.comms = self.each(self.join)
        elif path == "/start_weight_update":
            if self.is_active:
                return False, None
            self.is_active = True
        elif path == "/finish_weight_update":
            if not self.is_active:
                return False, None
            self.is_active = self.has_parts = False
        else:
            assert path == "/update_weights" and self.is_active
            if self.has_parts:  # vLLM's layers count the tensors that they already hold
                self.is_active = False
                return False, None
            try:
                received = self.each(lambda rank: self.receive(rank, **body["update_info"]))
            except (RuntimeError, IndexError):  # as vLLM's worker
                self.is_active, self.has_parts = False, True
                return False, None
            first, *others = received
            for other in others:
                assert all(torch.equal(first[name], other[name]) for name in first)
            return True, first
        return True, None

    def each(self, function):
        with ThreadPoolExecutor(self.count) as executor:
            return list(executor.map(function, range(self.count)))

    def leave(self):
        for comm in self.comms:
            self.library.ncclCommAbort(comm)
        self.comms = []

    def join(self, number):
        content = base64.b64decode(self.info["nccl_unique_id_b64"], validate=True)
        unique_id, comm = UniqueId.from_buffer_copy(content), ctypes.c_void_p()
        rank = number + self.info["rank_offset"]
        init = self.library.ncclCommInitRank
        self.check(init(ctypes.byref(comm), self.info["world_size"], unique_id, rank))
        one = (ctypes.c_float * 1)()  # vLLM adds up a number
        self.check(self.library.ncclAllReduce(one, one, ctypes.c_size_t(1), 7, 0, comm, None))
        return comm

    def receive(self, number, names, dtype_names, shapes):
        """Return tensors by name, received in buffers that end with the tensor that exceeds the
        agreed size.
        """
        tensors, pending, size, buffers = {}, [], 0, 0
        whole = list(zip(names, dtype_names, shapes, strict=True))
        for i, (name, dtype, shape) in enumerate(whole):
            dtype = getattr(torch, dtype)
            pending.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
            size += pending[-1][3]
            if size <= self.info["packed_buffer_size_bytes"] and i + 1 < len(whole):
                continue
            if buffers == 1 and self.fault in ("dies", "hangs"):
                if self.fault == "hangs":
                    self.ends_hang.wait(60)
                self.leave()
            buffers += 1
            data = torch.empty(size, dtype=torch.uint8)
            pointer, count = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(size)
            comm = self.comms[number]
            self.check(self.library.ncclBroadcast(pointer, pointer, count, 1, 0, comm, None))
            parts = data.split([bytes_ for *_, bytes_ in pending])
            for (name, dtype, shape, _), part in zip(pending, parts, strict=True):
                tensors[name] = part.view(dtype).view(
                    shape
                )  # fails if it is not aligned, as in vLLM
            pending, size = [], 0
        self.buffers = buffers
        return tensors

    def check(self, result):
        if result:
            raise RuntimeError(f"NCCL returned {result}")
