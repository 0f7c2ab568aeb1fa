"""Define the LM heads of the kernel benchmarks' models, and the limits of the GPU.

The limits are those that `bench/gpu.py` has measured on this GPU (the file named by
WHETSTONE_GPU_FLOORS), otherwise those of an H100.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

_FLOORS = os.environ.get("WHETSTONE_GPU_FLOORS", "")
_LIMITS = {
    "tflops": 790.0,
    "tb_per_s": 3.0,
    **(json.loads(Path(_FLOORS).read_text()) if _FLOORS and Path(_FLOORS).is_file() else {}),
}
TFLOPS: float = _LIMITS["tflops"]  # bfloat16, a large square product
TB_PER_S: float = _LIMITS["tb_per_s"]  # a large copy


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Describe an LM head: hidden size D, vocabulary V, and the logits' softcap if it has any."""

    model: str
    D: int
    V: int
    softcap: float | None = None


SHAPES = (
    Shape(model="Qwen2.5-0.5B", D=896, V=151_936),
    Shape(model="Qwen3-0.6B", D=1024, V=151_936),
    Shape(model="Qwen3-1.7B", D=2048, V=151_936),
    Shape(model="Gemma-2-2B", D=2304, V=256_000, softcap=30.0),
    Shape(model="Qwen2.5-7B", D=3584, V=152_064),
    Shape(model="Llama-3.1-8B", D=4096, V=128_256),
)
TINY = Shape(model="tiny", D=64, V=4_096)
TOKENS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)


def floor_ms(products: float, tokens: int, shape: Shape) -> float:
    """Return the milliseconds of `products` x N D V operations."""
    return products * tokens * shape.D * shape.V / (TFLOPS * 1e9)


def copy_floor_ms(size: float) -> float:
    """Return the milliseconds to move `size` bytes."""
    return size / (TB_PER_S * 1e9)
