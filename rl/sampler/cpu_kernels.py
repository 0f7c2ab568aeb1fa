"""Wrap cpu_kernels.cpp as functions on torch tensors.

The library is compiled at the first use, cached next to the bytecode, and called through ctypes. If
it cannot be compiled (no C++ compiler), `load_cpu_kernels` warns once and returns None, and the
decoder uses torch operations. Shapes as in cpu_kernels.cpp. All tensors are contiguous float32
(indices int64) on the CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from kernels import UNBOUNDED, AttentionBounds

_SOURCE = Path(__file__).with_suffix(".cpp")
# The sums of a dot product may be computed in any order, which permits vectorization. NaN and
# infinity keep their meaning.
_FLAGS = (
    "-O3",
    "-march=native",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
)
# By default compilers use 256-bit registers on AVX-512 processors, because of processors of ten
# years ago. Attention then took 1.5 times as long (Zen 4).
_X86_FLAGS = ("-mprefer-vector-width=512",)
_COMPILE_TIMEOUT = 120.0  # timeout of the compiler


class CpuKernels:
    """Expose the four functions of the library.

    They run on the calling thread, and on `torch.get_num_threads()` threads if the work is large.
    """

    def __init__(self, path: Path):
        pointer, number, integer = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
        threads = ctypes.c_int
        arguments = {
            "rms_norm": [pointer, pointer, number, integer, integer, pointer],
            "silu_mul": [pointer, integer, integer, threads, pointer],
            "attend": [
                *[pointer] * 2, number, *[pointer] * 12, *[integer] * 5, number, threads, pointer
            ],
            "draw": [*[pointer] * 4, integer, integer, threads, pointer, pointer],
        }  # fmt: skip
        self._library = ctypes.CDLL(str(path))
        for name, types in arguments.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, None

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Compute x / sqrt(mean(x^2) + eps) * weight."""
        out = torch.empty_like(x_NE)
        self._library.rms_norm(
            x_NE.data_ptr(), weight_E.data_ptr(), eps, *x_NE.shape, out.data_ptr()
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute silu(gate) * up, from [.., 2 I] to [.., I]."""
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        rows = out.numel() // width
        self._library.silu_mul(
            gate_up.data_ptr(), rows, width, torch.get_num_threads(), out.data_ptr()
        )
        return out

    def sample(
        self,
        logits_NV: Tensor,
        uniform_N: Tensor,
        temperature_N: Tensor | None,
        greedy_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Sample a token (int64) and return its logprob for each row, as
        `token_sampling.sample_tokens`.

        `uniform_N` is float64, `temperature_N` float32, `greedy_N` bool.
        """
        token_N, logprob_N = (
            logits_NV.new_empty(len(logits_NV), dtype=torch.int64),
            logits_NV.new_empty(len(logits_NV)),
        )
        pointers = (
            None if tensor is None else tensor.data_ptr() for tensor in (temperature_N, greedy_N)
        )
        self._library.draw(
            logits_NV.data_ptr(),
            *pointers,
            uniform_N.data_ptr(),
            *logits_NV.shape,
            torch.get_num_threads(),
            token_N.data_ptr(),
            logprob_N.data_ptr(),
        )
        return token_N, logprob_N

    def attend(
        self,
        qkv_NX: Tensor,
        norm_qk: Tensor | None,
        eps: float,
        rope: Tensor,
        position_N: Tensor,
        prompt_kv: Tensor,
        prompt_of_row_N: Tensor,
        prompt_length_P: Tensor,
        row_kv: Tensor,
        slot_N: Tensor,
        written_N: Tensor,
        heads: int,
        bounds: AttentionBounds = UNBOUNDED,
    ) -> Tensor:
        """Apply norms and rotary embeddings, store keys and values, and attend. Return [N, H * D].

        Row n stores its key and value at index written_N[n] of slot slot_N[n] in `row_kv`. It
        attends to its prompt and to the positions of its slot up to that index. Slots ascend, and
        the rows of one slot are consecutive positions.

        `norm_qk` has shape [2 D] (None: no norms), `rope` [2, positions, D] (see
        `FastForward.rope`), `prompt_kv` [2, P, K, T, D] and `row_kv` [2, N or more, K, T, D]. The
        strides of slots and heads are arbitrary.
        """
        key_heads, width = row_kv.shape[2], row_kv.shape[4]
        out = qkv_NX.new_empty(len(qkv_NX), heads * width)
        strides = (ctypes.c_int64 * 4)(
            prompt_kv.stride(1), prompt_kv.stride(2), row_kv.stride(1), row_kv.stride(2)
        )
        self._library.attend(
            qkv_NX.data_ptr(),
            norm_qk.data_ptr() if norm_qk is not None else None,
            eps,
            rope.data_ptr(),
            rope.data_ptr() + 4 * rope.stride(0),
            position_N.data_ptr(),
            *_key_value_pointers(prompt_kv),
            prompt_of_row_N.data_ptr(),
            prompt_length_P.data_ptr(),
            *_key_value_pointers(row_kv),
            slot_N.data_ptr(),
            written_N.data_ptr(),
            strides,
            len(qkv_NX),
            heads,
            key_heads,
            width,
            bounds.window,
            bounds.softcap,
            torch.get_num_threads(),
            out.data_ptr(),
        )
        return out


def _key_value_pointers(kv: Tensor) -> tuple[int, int]:
    """Return the addresses of the keys and of the values."""
    return kv.data_ptr(), kv.data_ptr() + 4 * kv.stride(0)


@functools.cache
def load_cpu_kernels() -> CpuKernels | None:
    """Return the library, compiled if necessary.

    Warns and returns None if it cannot be compiled.
    """
    paths = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    compiler = os.environ.get("CXX") or next(filter(None, paths), None)
    if compiler is None:
        warnings.warn(
            "no C++ compiler (looked for CXX, c++, g++ and clang++): sampling on the CPU uses "
            "torch operations, which take 1.1 to 1.6 times as long; install a compiler, on Debian "
            "with apt-get install g++",
            stacklevel=2,
        )
        return None
    try:
        return _load_library(compiler)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or error
        warnings.warn(
            f"{compiler} cannot build {_SOURCE.name}, sampling on the CPU uses slower "
            f"torch operations: {message}",
            stacklevel=2,
        )
        return None


def _load_library(compiler: str) -> CpuKernels:
    """Load the library of this source, compiler and CPU, which is cached next to the bytecode.

    Compiles it if the cache does not hold it, or holds one that this system cannot load: another
    system of a shared checkout may have another C library.
    """
    flags = (*_FLAGS, *(_X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()))
    key = hashlib.sha256(
        "\0".join([_SOURCE.read_text(), compiler, *flags, _describe_cpu()]).encode()
    ).hexdigest()[:16]
    cached = _SOURCE.parent / "__pycache__" / f"{_SOURCE.stem}-{key}.so"
    if cached.is_file():
        with contextlib.suppress(OSError):
            return CpuKernels(cached)
    # CXX may hold arguments or a wrapper ("ccache g++")
    command = [compiler] if Path(compiler).is_file() else shlex.split(compiler)
    return CpuKernels(_build_library([*command, *flags], cached))


def _build_library(command: list[str], cached: Path) -> Path:
    """Compile the library and store it in `cached`, or in a temporary folder of this process if
    that folder is not writable. Return its path.
    """
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / cached.name
        subprocess.run(
            [*command, str(_SOURCE), "-o", str(built)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT,
        )
        partial: str | None = None
        try:
            cached.parent.mkdir(exist_ok=True)
            # Another process may compile it too, on a machine with the same process ids.
            handle, partial = tempfile.mkstemp(prefix=cached.name, dir=cached.parent)
            os.close(handle)
            shutil.copy(built, partial)  # with the permissions: mkstemp's exclude other users
            os.replace(partial, cached)
            return cached
        except OSError:  # the folder is not writable: use a copy for this process
            if partial is not None:
                Path(partial).unlink(missing_ok=True)
            process_copy = Path(tempfile.mkdtemp()) / cached.name
            shutil.copyfile(built, process_copy)
            atexit.register(shutil.rmtree, process_copy.parent, ignore_errors=True)
            return process_copy


def _describe_cpu() -> str:
    """Return what -march=native depends on: machines of several kinds may share a checkout."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    flags = [
        line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))
    ][:2]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(flags))])
