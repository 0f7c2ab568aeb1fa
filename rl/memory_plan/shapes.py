"""Define the inputs of a memory plan: the model's sizes, the launch, and the work of a step with
its largest micro-batch and what is sampled at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl.distributed import Launch, ParameterCounts
from rl.errors import UserError
from rl.learner import KEYS_PER_POSITION
from rl.sampler import BLOCK_SIZE, check_shard_counts, choose_pool_size, max_blocks


@dataclass(frozen=True, kw_only=True)
class ModelShape(ParameterCounts):
    """Describe a model by its sizes, besides the counts that its sharding needs.

    adapters         numbers in LoRA matrices
    fast             whether the sampler's fast decoder supports the model
    windowed         some layers have windowed attention, or positions cannot be passed,
                     so rows are padded
    varlen           attention may take the lengths of sequences (rl.learner.varlen_attention)
    caching          number of layers with keys and values (None: all); the other layers of a
                     hybrid model keep a state of constant size
    mlp_divisor      common divisor of the widths of MLPs and experts (0: `mlp`)
    experts_per_token  experts that a token is routed to
    routed_width     columns of all experts that a token uses in a layer
    idle_experts     numbers in the experts that a token is not routed to
    vision_parameters  numbers in the vision tower and its projection to the text model
    vision_trainable  numbers of `vision_parameters` that are trained
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
    varlen: bool = False
    caching: int | None = None
    mlp_divisor: int = 0
    experts_per_token: int = 0
    routed_width: int = 0
    idle_experts: int = 0
    vision_parameters: int = 0
    vision_trainable: int = 0
    unsplit: int = 0
    unsplit_adapters: int = 0

    @property
    def active_parameters(self) -> int:
        """Return how many numbers a text token is multiplied with."""
        return self.parameters - self.idle_experts - self.vision_parameters

    def check_tensor_parallel(self, sampler_tp: int) -> None:
        """Raise UserError if `sampler_tp` ranks cannot share a sampler: the fast decoder does not
        support the model, or its heads and columns are not divisible.
        """
        if sampler_tp == 1:
            return
        if not self.fast:
            raise UserError(
                f"sampler_tp {sampler_tp} requires the fast decoder (docs/models.md lists its "
                f"families), and {self.name} is not supported by it: leave sampler_tp at 1"
            )
        check_shard_counts(sampler_tp, self.heads, self.key_heads, self.mlp_divisor or self.mlp)


@dataclass(frozen=True)
class MicroBatch:
    """Describe the largest micro-batch of a rank: `rows` of `length` positions, of which `tokens`
    are not padding.

    `masked`: an explicit attention mask, see packing. `ranks`: number of ranks that share the
    sequences, of which this rank holds `length` positions each (rl.learner.context_parallel).
    `keys`, `sequences`: numbers of the sequences of a row, of all ranks, and of their keys
    (rl.learner.varlen_attention); 0: attention does not take the lengths of sequences.
    """

    rows: int
    length: int
    tokens: int
    masked: bool = False
    ranks: int = 1
    keys: int = 0
    sequences: int = 0

    def divide(self, ranks: int) -> MicroBatch:
        """Return the part of a rank, if `ranks` ranks share the sequences."""
        length, tokens = -(-self.length // ranks), -(-self.tokens // ranks)
        part = replace(self, length=length, tokens=tokens, ranks=ranks)
        padding = length * ranks - self.length
        if self.keys and padding:  # is a sequence
            part = replace(part, keys=self.keys + padding, sequences=self.sequences + 1)
        return part


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


def largest_micro_batch(
    *,
    groups: int,
    group: int,
    prompt: int,
    answer: int,
    budget: int,
    layout: str,
    world: int,
    hidden: int,
    varlen: bool = False,
) -> MicroBatch:
    """Return a rank's largest micro-batch if all prompts and all answers have the same length.

    `groups`: number of groups in an optimizer step. `group`: answers in a group. `prompt`,
    `answer`: lengths in tokens. `budget`: token budget of a micro-batch. `world`: number of ranks.
    `hidden`: hidden size of the model. `varlen`: see rl.learner.varlen_attention. The rules are
    those of rl.learner and rl.learner.packing for the token budget, a rank's share of the
    positions, and the layout that "auto" selects.
    """
    length = prompt + answer
    # answers that share a prompt in a row
    together = max(1, min(group, (budget - prompt) // answer))
    if varlen:
        together = max(1, min(together, (KEYS_PER_POSITION * budget - prompt) // length))
    row = prompt + together * answer
    rows = groups * -(-group // together)
    if layout == "auto" and varlen:
        layout = "shared"
    if layout == "auto":
        shared = rows * row * (1 + row / (6 * hidden))
        layout = (
            "shared"
            if together > 1
            and shared < 0.9 * groups * group * length * (1 + length / (12 * hidden))
            else "padded"
        )
    if layout == "shared":
        is_shared = together > 1  # otherwise the prompt is no sequence of its own
        keys = together * length + prompt * is_shared
        cost = max(row, -(-keys // KEYS_PER_POSITION)) if varlen else row
        share = min(budget, -(-rows * cost // world))
        fit = max(1, min(rows, share // cost))
        tokens = fit * together * length
        if varlen:
            sequences = fit * (together + is_shared)
            return MicroBatch(1, fit * row, tokens, keys=fit * keys, sequences=sequences)
        return MicroBatch(fit, row, tokens, masked=True)
    share = min(budget, -(-groups * group * length // world))
    fit = max(1, min(groups * group, share // length))
    if layout == "packed":
        tokens = fit * length
        if varlen:
            return MicroBatch(1, tokens, tokens, keys=tokens, sequences=fit)
        return MicroBatch(1, tokens, tokens, masked=True)
    return MicroBatch(fit, length, fit * length)


def compute_concurrent_rows(
    *,
    groups: int,
    group: int,
    prompt: int,
    answer: int,
    kv_cache_tokens: int,
    max_rows: int,
    world: int,
    paged: bool = False,
) -> tuple[int, int]:
    """Return (prompts, rows) that a rank decodes at once within its budgets.

    `paged`: the most rows that are admitted, which are preempted when pages run out.
    """
    if paged:  # each row needs a page to write to
        pages, prompt_pages = kv_cache_tokens // BLOCK_SIZE, -(-prompt // BLOCK_SIZE)
        admitted = count_admitted_rows(pages, prompt_pages, group, 1)
    else:
        admitted = count_admitted_rows(kv_cache_tokens, prompt, group, answer - 1)
    rows = min(admitted, -(-groups // world) * group, max_rows)
    return -(-rows // group), rows


def count_admitted_rows(capacity: int, prompt_size: int, group: int, row_size: int) -> int:
    """Return the most rows that an engine admits at once to a cache of `capacity` pages or tokens.
    A group's prompt counts once.
    """
    full_groups, remaining = divmod(capacity, max(1, prompt_size + group * row_size))
    partial = max(remaining - prompt_size, 0) // max(1, row_size)
    # a single row is known to fit
    return max(full_groups * group + partial, 1)


def count_pool_pages(
    *,
    groups: int,
    group: int,
    prompt: int,
    answer: int,
    kv_cache_tokens: int,
    max_rows: int,
    world: int,
    streams: bool,
) -> int:
    """Return the pages that a rank's sampler allocates for a call with its share of the groups.
    `streams`: allocate the whole pool, since later requests are unknown.
    """
    requests = [(prompt, group, answer)] * -(-groups // world)
    return choose_pool_size(
        max(kv_cache_tokens // BLOCK_SIZE, 1),
        None if streams else max_blocks(requests, BLOCK_SIZE, max_rows),
    )
