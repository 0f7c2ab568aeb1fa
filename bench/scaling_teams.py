"""Samplers that several GPUs of a machine hold together (`--sampler-tp`) in the scaling model: what
they send, and how long it takes.

A forward of the sampler sums [positions, D] over the team after its embedding and after attention
and MLP of every layer ([rows, D] in the last), and puts fp32 logits [rows, V] side by side behind
its head (rl.sampler.split); after a draw the first rank's tokens and logprobs go to the others.
k: GPUs of a team, L: layers, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl.errors import UserError
from rl.memory import check_team_holds
from rl.memory.given import FP32, Launch, ModelShape
from rl.memory.plan import PREFILL_TOKENS

SIZES = (1, 2, 4, 8)
DRAWN = 2 * 8  # bytes of a drawn token and its logprob, as they are sent


@dataclass(frozen=True)
class Sent:
    """Collectives of one rank of a team: how many, and the bytes of whole tensors."""

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
    """A forward over so many positions with logits for so many rows; `size`: bytes of a number of
    the hidden states.

    The last layer's two sums are of the positions alone whose logits are asked for.
    """
    sums = 2 * shape.layers + 1
    summed = (sums - 2) * positions + 2 * rows
    return Sent(sums + 1, float(summed * shape.hidden * size), float(FP32 * rows * shape.vocab))


def draw(rows: int) -> Sent:
    """After it: what was drawn."""
    return Sent(1, copied=float(DRAWN * rows))


def of_a_step(shape: ModelShape, launch: Launch, load: Any, rows: int) -> Sent:
    """Of all answers that a team draws in a GRPO step: prompts read a batch at a time, then `rows`
    rows decoded at once.
    """
    answers = launch.team * load.answers
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
    """Rings over NVLink, and what each call takes however little it sends."""
    if team == 1:
        return 0.0
    wire = (team - 1) / team * (2 * sent.summed + sent.gathered) + sent.copied
    return sent.calls * hardware.collective_seconds + wire / hardware.nvlink


def teams(shape: ModelShape, launch: Launch, hardware: Any) -> Iterator[int]:
    """Sizes of teams that a launch on so many GPUs of a machine, and the model's heads and columns,
    can be cut up into.
    """
    for size in SIZES:
        if size > 1 and (not launch.cuda or min(launch.world, hardware.per_node) % size):
            continue
        try:
            check_team_holds(shape, size)
        except UserError:
            continue
        yield size
