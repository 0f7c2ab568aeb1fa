"""cpu_kernels.cpp as functions on torch tensors: compiled at the first use, kept beside the
bytecode, called through ctypes.

Where it cannot be compiled (no C++ compiler), `load` says so once and gives None, and the decoder's
torch operations do the work. Shapes as in cpu_kernels.cpp. All tensors are contiguous float32
(indices int64) on the CPU.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_suffix(".cpp")
# The sums of a dot product may be taken in any order (that is what lets them be vectorised); NaN
# and infinity keep their meaning.
_FLAGS = ("-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-std=c++17",
          "-shared", "-fPIC", "-pthread")  # fmt: skip
# Compilers halve the registers of AVX-512 by themselves, for processors of ten years ago: attention
# took half as long again (Zen 4).
_X86_FLAGS = ("-mprefer-vector-width=512",)
_SECONDS = 120.0  # for the compiler


class CpuKernels:
    """The library's four functions. They run on the calling thread, and on
    `torch.get_num_threads()` where the work is large.
    """

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        pointer, number, integer = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
        self._rms_norm, self._silu_mul, self._attend, self._draw = (
            library.rms_norm,
            library.silu_mul,
            library.attend,
            library.draw,
        )
        self._rms_norm.argtypes = [pointer, pointer, number, integer, integer, pointer]
        self._silu_mul.argtypes = [pointer, integer, integer, ctypes.c_int, pointer]
        self._attend.argtypes = [
            pointer,
            pointer,
            number,
            *[pointer] * 11,
            *[integer] * 4,
            ctypes.c_int,
            pointer,
        ]
        self._draw.argtypes = [*[pointer] * 4, integer, integer, ctypes.c_int, pointer, pointer]
        for function in (self._rms_norm, self._silu_mul, self._attend, self._draw):
            function.restype = None

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight."""
        out = torch.empty_like(x_NE)
        self._rms_norm(x_NE.data_ptr(), weight_E.data_ptr(), eps, *x_NE.shape, out.data_ptr())
        return out

    def silu_mul(self, gate_up_N2I: Tensor) -> Tensor:
        """silu(gate) * up, [N, I]."""
        rows, width = gate_up_N2I.shape
        out = gate_up_N2I.new_empty(rows, width // 2)
        self._silu_mul(
            gate_up_N2I.data_ptr(), rows, width // 2, torch.get_num_threads(), out.data_ptr()
        )
        return out

    def draw(
        self,
        logits_NV: Tensor,
        uniform_N: Tensor,
        temperature_N: Tensor | None,
        greedy_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """A token (int64) and its logprob a row: `token_sampling.draw`. `uniform_N` float64,
        `temperature_N` float32, `greedy_N` bool.
        """
        token_N, logprob_N = (
            logits_NV.new_empty(len(logits_NV), dtype=torch.int64),
            logits_NV.new_empty(len(logits_NV)),
        )
        others = (None if one is None else one.data_ptr() for one in (temperature_N, greedy_N))
        self._draw(
            logits_NV.data_ptr(), *others, uniform_N.data_ptr(), *logits_NV.shape, torch.get_num_threads(),
            token_N.data_ptr(), logprob_N.data_ptr(),
        )  # fmt: skip
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
        written_N: Tensor,
        heads: int,
    ) -> Tensor:
        """Norms and rotates the step's queries and keys, stores keys and values at `written_N`,
        attends. [N, H * D].

        `norm_qk` [2 D] (None: no norms), `rope` [2, positions, D] (see `FastForward.rope`),
        `prompt_kv` [2, P, K, T, D] and `row_kv` [2, N or more, K, T, D], of any strides for slots
        and heads.
        """
        key_heads, width = row_kv.shape[2], row_kv.shape[4]
        out = qkv_NX.new_empty(len(qkv_NX), heads * width)
        strides = (ctypes.c_int64 * 4)(
            prompt_kv.stride(1), prompt_kv.stride(2), row_kv.stride(1), row_kv.stride(2)
        )
        self._attend(
            qkv_NX.data_ptr(), norm_qk.data_ptr() if norm_qk is not None else None, eps, rope.data_ptr(),
            rope.data_ptr() + 4 * rope.stride(0), position_N.data_ptr(), *_keys_values(prompt_kv), prompt_of_row_N.data_ptr(),
            prompt_length_P.data_ptr(), *_keys_values(row_kv), written_N.data_ptr(), strides, len(qkv_NX), heads, key_heads, width,
            torch.get_num_threads(), out.data_ptr(),
        )  # fmt: skip
        return out


def _keys_values(kv: Tensor) -> tuple[int, int]:
    return kv.data_ptr(), kv.data_ptr() + 4 * kv.stride(0)


@functools.cache
def load() -> CpuKernels | None:
    """The compiled library, made if need be; None, with a warning, where it cannot be made."""
    compiler = (
        os.environ.get("CXX")
        or shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++")
    )
    if compiler is None:
        warnings.warn(
            "no C++ compiler (c++, g++, clang++, or CXX): sampling on the CPU takes its slower path",
            stacklevel=2,
        )
        return None
    try:
        return CpuKernels(_built(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        warnings.warn(
            f"{compiler} cannot build {_SOURCE.name}, sampling on the CPU takes its slower path: {said}",
            stacklevel=2,
        )
        return None


def _built(compiler: str) -> Path:
    """The library for this source, compiler and CPU: from the cache beside the bytecode, or
    compiled into it.
    """
    flags = (*_FLAGS, *(_X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()))
    key = hashlib.sha256(
        "\0".join([_SOURCE.read_text(), compiler, *flags, _cpu()]).encode()
    ).hexdigest()[:16]
    name = f"{_SOURCE.stem}-{key}.so"
    kept = _SOURCE.parent / "__pycache__" / name
    if kept.is_file():
        return kept
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / name
        subprocess.run(
            [compiler, *flags, str(_SOURCE), "-o", str(built)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        partial = kept.with_name(f"{name}.{os.getpid()}")  # another process may be at the same
        try:
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(built, partial)
            os.replace(partial, kept)
            return kept
        except OSError:  # a folder that cannot be written: for this process alone
            if partial.is_file():
                partial.unlink()
            alone = Path(tempfile.mkdtemp()) / name
            shutil.copyfile(built, alone)
            atexit.register(shutil.rmtree, alone.parent, ignore_errors=True)
            return alone


def _cpu() -> str:
    """What -march=native depends on: a checkout may be shared by machines of several kinds."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    flags = [
        line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))
    ][:2]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(flags))])
