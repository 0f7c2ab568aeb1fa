"""Compute learning-rate schedules as functions of the step, and rules of thumb for the peak."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def compute_lr_factor(
    schedule: str, step: int, total: int, warmup: int = 0, floor: float = 0.0
) -> float:
    """Return the factor on the peak learning rate at `step` (0-based) of `total`.

    Warm-up rises linearly and reaches 1 at step `warmup`. Then `constant` stays at 1; `linear` and
    `cosine` (SGDR, arXiv 1608.03983, equation 5, a single cycle) fall to `floor` at the step after
    the last.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - progress)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}: one of {', '.join(SCHEDULES)}")


_LORA_EXPONENTS = {"qwen": 0.0775, "llama": 0.781}


def lora_learning_rate(hidden_size: int, family: str = "qwen") -> float:
    """Return an initial learning rate for LoRA: 5e-5 * 10 * (2000 / hidden_size)^p.

    p = 0.0775 (Qwen) or 0.781 (Llama). This is the rule of Tinker's cookbook (its hyperparameter
    utilities), fitted to supervised training: LoRA needs ten times the rate of full weights, wider
    models less. `family`: prefix of a model's name, "Qwen" or "Llama" (letter case is ignored).
    """
    names = [name for name in _LORA_EXPONENTS if family.lower().startswith(name)]
    if not names:
        raise ValueError(
            f"the rule is fitted to the families {', '.join(_LORA_EXPONENTS)}, got "
            f"{family!r}: use the most similar family"
        )
    if hidden_size < 1:
        raise ValueError(f"hidden_size is the model's width, at least 1, got {hidden_size}")
    return 5e-5 * 10 * (2000 / hidden_size) ** _LORA_EXPONENTS[names[0]]


def scale_lr_by_batch(learning_rate: float, batch_size: int, reference_batch_size: int) -> float:
    """Scale a learning rate that suits `reference_batch_size` to `batch_size`, with the square
    root.
    """
    if batch_size < 1 or reference_batch_size < 1:
        raise ValueError(f"batch sizes are at least 1, got {batch_size} and {reference_batch_size}")
    return learning_rate * math.sqrt(batch_size / reference_batch_size)
