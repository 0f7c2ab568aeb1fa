"""Model the traffic and time of samplers that several GPUs hold together (`--sampler-tp`).

A forward of the sampler all-reduces [positions, D] over the team after its embedding and after the
attention and MLP of every layer ([rows, D] in the last layer). It gathers fp32 logits [rows, V]
after its head (rl.sampler.tensor_parallel). After sampling, the first rank sends the tokens and logprobs to
the other ranks. Symbols: k GPUs of a team, L layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl.errors import UserError
from rl.memory_plan import check_tensor_parallel
from rl.memory_plan.byte_counts import PREFILL_TOKENS
from rl.memory_plan.shapes import FP32, LaunchShape, ModelShape

SIZES = (1, 2, 4, 8)
DRAWN = 2 * 8  # bytes of a sampled token and its logprob, as sent


@dataclass(frozen=True)
class Sent:
    """Count the collectives of a team's rank and the bytes of their whole tensors."""

    calls: int = 0
    summed: float = 0.0
    gathered: float = 0.0
    copied: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.calls + other.calls,
            self.summed + other.summed,
            self.gathered + other.gathered,
            self.copied + other.copied,
        )

    def times(self, count: int) -> Sent:
        return Sent(
            count * self.calls, count * self.summed, count * self.gathered, count * self.copied
        )


def forward(shape: ModelShape, positions: int, rows: int, size: int) -> Sent:
    """Return the traffic of a forward over `positions` positions with logits for `rows` rows.

    `size`: bytes per element of the hidden states. The last layer's two sums cover only the
    positions that need logits.
    """
    sums = 2 * shape.layers + 1
    summed = (sums - 2) * positions + 2 * rows
    return Sent(sums + 1, float(summed * shape.hidden * size), float(FP32 * rows * shape.vocab))


def draw(rows: int) -> Sent:
    """Return the traffic after a forward: the sampled tokens and logprobs."""
    return Sent(1, copied=float(DRAWN * rows))


def of_a_step(shape: ModelShape, launch: LaunchShape, load: Any, rows: int) -> Sent:
    """Return the traffic of all answers that a team samples in a GRPO step.

    The team prefills the prompts in batches, then decodes `rows` rows at once.
    """
    answers = launch.sampler_tp * load.answers
    prompts = answers // load.group
    batches = math.ceil(prompts * load.prompt / PREFILL_TOKENS)
    size = launch.compute_bytes
    read = forward(
        shape, math.ceil(prompts * load.prompt / batches), math.ceil(prompts / batches), size
    ).times(batches)
    at_once = math.ceil(answers / rows)
    decoded = forward(shape, rows, rows, size).times((load.answer - 1) * at_once)
    return read + decoded + draw(rows).times(load.answer * at_once)


def seconds(sent: Sent, team: int, hardware: Any) -> float:
    """Return the seconds of rings over NVLink, including the fixed latency of each call."""
    if team == 1:
        return 0.0
    wire = (team - 1) / team * (2 * sent.summed + sent.gathered) + sent.copied
    return sent.calls * hardware.collective_seconds + wire / hardware.nvlink


def teams(shape: ModelShape, launch: LaunchShape, hardware: Any) -> Iterator[int]:
    """Return the possible team sizes for a launch.

    The number of GPUs per machine, and the model's heads and columns, limit the sizes.
    """
    for size in SIZES:
        if size > 1 and (not launch.cuda or min(launch.world, hardware.per_node) % size):
            continue
        try:
            check_tensor_parallel(shape, size)
        except UserError:
            continue
        yield size
