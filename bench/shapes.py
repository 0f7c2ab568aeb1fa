"""Define the LM heads of the kernel benchmarks' models, and an H100's measured limits."""

from __future__ import annotations

from dataclasses import dataclass

TFLOPS = 790.0  # bfloat16, a large square product
TB_PER_S = 3.0  # a large copy


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
    """Return the milliseconds of `products` x N D V operations on an H100."""
    return products * tokens * shape.D * shape.V / (TFLOPS * 1e9)


def copy_floor_ms(size: float) -> float:
    """Return the milliseconds to move `size` bytes on an H100."""
    return size / (TB_PER_S * 1e9)
