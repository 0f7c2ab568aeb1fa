"""Build the models of scaling.py from inline configs, without weights, and model the traffic and time
of samplers that several GPUs hold together (`--sampler-tp`).

A forward of the sampler all-reduces [positions, D] over the team after its embedding and after the
attention and MLP of every layer ([rows, D] in the last layer). It gathers fp32 logits [rows, V]
after its head (rl.sampler.tensor_parallel). After sampling, the first rank sends the tokens and
logprobs to the other ranks. Symbols: k GPUs of a team, L layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rl.distributed import FP32
from rl.errors import UserError
from rl.memory_plan import LaunchShape, ModelShape, check_tensor_parallel
from rl.memory_plan.byte_counts import PREFILL_TOKENS

# The dense Qwen2.5 models: hidden size, layers, heads, key heads, MLP size, vocabulary, tied head.
SIZES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "3B": (2048, 36, 16, 2, 11_008, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
    "14B": (5120, 48, 40, 8, 13_824, 152_064, False),
    "32B": (5120, 64, 40, 8, 27_648, 152_064, False),
}
NAMES = (*SIZES, "30B-A3B", "8B-VL")


def config_of(name: str) -> Any:
    """Return the config of a model by name.

    The models are Qwen2.5, Qwen3's mixture of 128 experts that routes each token to 8 of them, and
    Qwen3-VL with its vision tower.
    """
    if name == "30B-A3B":
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            vocab_size=151_936,
            tie_word_embeddings=False,
            max_position_embeddings=32_768,
        )
    if name == "8B-VL":
        from transformers import Qwen3VLConfig

        text = {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12_288,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [24, 20, 20],
                "rope_theta": 5e6,
            },
        }
        eyes = {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
            "num_position_embeddings": 2304,
        }
        return Qwen3VLConfig(text_config=text, vision_config=eyes, tie_word_embeddings=False)
    from transformers import Qwen2Config

    hidden, layers, heads, key_heads, mlp, vocab, tied = SIZES[name]
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=mlp,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
    )


def skeletons(names: Sequence[str]) -> dict[str, Any]:
    """Return the models by name, without weights."""
    from rl.memory_plan import ModelSkeleton

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            config_of(name).save_pretrained(folder)
            found[name] = ModelSkeleton(folder, None, None)
    return found


# ---------------------------------------------------------------- samplers of several GPUs

TEAM_SIZES = (1, 2, 4, 8)
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
    for size in TEAM_SIZES:
        if size > 1 and (not launch.cuda or min(launch.world, hardware.per_node) % size):
            continue
        try:
            check_tensor_parallel(shape, size)
        except UserError:
            continue
        yield size
