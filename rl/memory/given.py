"""What a plan is made from: a model in numbers, the micro-batch and what it holds, the launch, the
work of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl.learner import Sharing

FP32, BF16 = 4, 2


@dataclass(frozen=True)
class ModelShape:
    """A model in numbers. `small`: numbers in parameters that ZeRO-3 does not shard; `largest`: of
    one parameter.

    `adapters`: numbers in LoRA's matrices; `fast`: whether the sampler's own decoder serves it;
    `layer`: numbers in a layer, which FSDP2 puts together as one; `matrices`, `linears`: numbers in
    frozen matrices, which a base in bf16 has in bf16, and in those that a base in 4 bit has in 4
    bit; `windowed`: some layers do not look at everything, or positions cannot be given, so that
    rows are padded; `caching`: layers that keep keys and values (None: all), the others of a hybrid
    keep a state of one size; `idle`: numbers in the experts that a token does not go to; `seeing`:
    in the vision tower and what joins it to the text, of which `seeing_trained` are trained;
    `unsplit`, `unsplit_adapters`: numbers, of the model and of its adapters, that each rank of a
    team holds all of (rl.sampler.split).
    """

    name: str
    parameters: int
    trainable: int
    adapters: int
    small: int
    largest: int
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    mlp: int
    vocab: int
    max_context: int | None
    fast: bool
    windowed: bool
    layer: int = 0
    matrices: int = 0
    linears: int = 0
    caching: int | None = None
    idle: int = 0
    seeing: int = 0
    seeing_trained: int = 0
    unsplit: int = 0
    unsplit_adapters: int = 0

    @property
    def active(self) -> int:
        """Numbers that a token of text is multiplied with."""
        return self.parameters - self.idle - self.seeing


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a rank: `rows` of `length` positions, of which `tokens` are real;
    `masked`: see packing.
    """

    rows: int
    length: int
    tokens: int
    masked: bool = False


@dataclass(frozen=True)
class Held:
    """Bytes at the moment of a micro-batch's peak, besides weights and accumulated gradients.

    activations  kept for the backward, and what the layer at work needs
    logits       tensors as wide as the vocabulary
    casts        the weights in the dtype of the arithmetic (autocast)
    weight_sized gradients on their way, and other tensors of a weight's shape
    """

    activations: float = 0.0
    logits: float = 0.0
    casts: float = 0.0
    weight_sized: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.casts + self.weight_sized


@dataclass(frozen=True, kw_only=True)
class Launch(Sharing):
    """Where a run runs. `memory`: bytes of each GPU; 0 where it is not known.

    `base`: what frozen matrices are held in, as the settings call it;
    `in_parts`: a sharded model is read so (rl.models.may_stay_unread); `team`: so many ranks hold a
    sampler together (`sampler_tp`).
    """

    cuda: bool
    bf16: bool
    per_node: int = 1
    memory: float = 0.0
    base: str = "fp32"
    in_parts: bool = False
    team: int = 1

    @property
    def compute_bytes(self) -> int:
        return BF16 if self.bf16 else FP32

    @property
    def weight_bytes(self) -> int:
        """Of one weight as the learner keeps it: fp32 but under DeepSpeed in bf16, where the
        optimizer has the fp32 copy.
        """
        return BF16 if self.zero is not None and self.bf16 else FP32


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank does in a step. `rows` answers of `answer` tokens to `prompts` prompts of
    `prompt` tokens are sampled at once.

    `pages`: of the pool that the sampler takes from the beginning; 0: its cache is not in pages.
    """

    batch: MicroBatch
    samples: bool
    prompts: int = 0
    prompt: int = 0
    rows: int = 0
    answer: int = 0
    pages: int = 0
