"""Define the inputs of a memory plan: the model's sizes, the micro-batch and what it holds, the
launch, the work of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl.distributed import Launch, ParameterCounts


@dataclass(frozen=True, kw_only=True)
class ModelShape(ParameterCounts):
    """Describe a model by its sizes, besides the counts that its sharding needs.

    adapters         numbers in LoRA matrices
    fast             whether the sampler's fast decoder supports the model
    windowed         some layers have windowed attention, or positions cannot be passed,
                     so rows are padded
    caching          number of layers with keys and values (None: all); the other layers of a
                     hybrid model keep a state of constant size
    mlp_divisor      common divisor of the widths of MLPs and experts (0: `mlp`)
    experts_per_token  experts that a token is routed to
    routed_width     columns of all experts that a token uses in a layer
    idle             numbers in the experts that a token is not routed to
    seeing           numbers in the vision tower and its projection to the text model
    seeing_trained   numbers of `seeing` that are trained
    unsplit          numbers of the model that each rank of a tensor-parallel group holds
                     completely (rl.sampler.tensor_parallel)
    unsplit_adapters the same for adapters
    """

    name: str
    adapters: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    mlp: int
    vocab: int
    max_context: int | None
    fast: bool
    windowed: bool
    caching: int | None = None
    mlp_divisor: int = 0
    experts_per_token: int = 0
    routed_width: int = 0
    idle_experts: int = 0
    seeing: int = 0
    seeing_trained: int = 0
    unsplit: int = 0
    unsplit_adapters: int = 0

    @property
    def active_parameters(self) -> int:
        """Return how many numbers a text token is multiplied with."""
        return self.parameters - self.idle_experts - self.seeing


@dataclass(frozen=True)
class MicroBatch:
    """Describe the largest micro-batch of a rank: `rows` of `length` positions, of which `tokens`
    are not padding.

    `masked`: an explicit attention mask, see packing. `ranks`: number of ranks that share the
    sequences, of which this rank holds `length` positions each (rl.learner.context_parallel).
    """

    rows: int
    length: int
    tokens: int
    masked: bool = False
    ranks: int = 1

    def divide(self, ranks: int) -> MicroBatch:
        """Return the part of a rank, if `ranks` ranks share the sequences."""
        length, tokens = -(-self.length // ranks), -(-self.tokens // ranks)
        return replace(self, length=length, tokens=tokens, ranks=ranks)


@dataclass(frozen=True)
class MicroBatchMemory:
    """Hold the bytes at the memory peak of a micro-batch, besides weights and accumulated
    gradients.

        activations  kept for the backward, and working memory of the current layer
        logits       tensors as wide as the vocabulary
        casts        the weights in the dtype of the computation (autocast)
        weight_sized gradients before accumulation, and other tensors of a weight's shape
    """

    activations: float = 0.0
    logits: float = 0.0
    casts: float = 0.0
    weight_sized: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.casts + self.weight_sized


@dataclass(frozen=True, kw_only=True)
class LaunchShape(Launch):
    """Describe the processes of a run and how they load and sample.

    `loads_in_shards`: a sharded model is loaded shard by shard (rl.models.supports_lazy_loading);
    `sampler_tp`: number of ranks that share a sampler (`sampler_tp`).
    """

    loads_in_shards: bool = False
    sampler_tp: int = 1


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Describe a rank's work in a step. `rows` answers of `answer` tokens to `prompts` prompts of
    `prompt` tokens are sampled at once.

    `pages`: size of the sampler's page pool, allocated at the beginning; 0: no paged KV cache.
    """

    batch: MicroBatch
    samples: bool
    prompts: int = 0
    prompt: int = 0
    rows: int = 0
    answer: int = 0
    pages: int = 0
