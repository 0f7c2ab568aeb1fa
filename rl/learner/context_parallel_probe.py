"""Check on a few tokens that a group of ranks computes what a single rank computes.

The architecture's name plays no role: attention that is not looked up by name, or a layer that
mixes positions in another way, shows as a difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rl.distributed import collectives
from rl.errors import UserError
from rl.layers import truncated_layers
from rl.learner.context_parallel import ContextParallel
from rl.learner.layout_probe import (
    BF16_TOLERANCES,
    FP32_TOLERANCES,
    ProbeSequences,
    preserve_state,
)
from rl.learner.packing import PackedBatch, collate, make_units
from rl.models import (
    get_vocab_size,
    skip_packing_search,
    unwrap_model,
    uses_flash_attention,
)


def check_on_all_ranks(
    model: Any | None, parallel: ContextParallel, layouts: Collection[str], name: str
) -> None:
    """Raise UserError on every rank if a group computes other hidden states than a single rank.

    `model`: None on the ranks of a group that does not check.
    """
    fault = None if model is None else _find_fault(model, parallel, layouts)
    faults = torch.tensor([0.0 if fault is None else 1.0], device=parallel.device)
    collectives.all_sum_([faults])
    if float(faults):
        raise UserError(
            f"context_parallel_size {parallel.group.size} is not exact for {name}: "
            f"{fault or 'another rank reported this fault'}. Its attention has to use the "
            "AttentionInterface of transformers. Set it to 1"
        )


def _find_fault(model: Any, parallel: ContextParallel, layouts: Collection[str]) -> str | None:
    """Return the difference between a group and a single rank, None if they agree."""
    sequences = ProbeSequences.make(get_vocab_size(unwrap_model(model)), 0).datums
    device = next(model.parameters()).device
    sharp = next(model.parameters()).dtype == torch.float32 and not uses_flash_attention(model)
    tolerance = (FP32_TOLERANCES if sharp else BF16_TOLERANCES)[0]
    plainly = torch.autocast(device.type, enabled=False) if sharp else contextlib.nullcontext()
    fault = None
    with torch.no_grad(), preserve_state(model), truncated_layers(model), plainly:
        model.eval()
        for layout in sorted(layouts):
            units = make_units(sequences, layout, 10**6)
            plain, shared = (
                collate(sequences, units, layout, device, group) for group in (None, parallel.group)
            )
            expected = _run(model, parallel, plain)
            # Every rank of the group finishes all layouts: otherwise the others would wait.
            try:
                states = _run(model, parallel, shared)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                if collectives.is_communication_error(error):
                    raise
                return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            errors = (states - expected).norm(dim=-1) / expected.norm(dim=-1)
            size = float(errors.max() if sharp else errors.median())
            if not size <= tolerance:
                fault = f"layout {layout} gives hidden states that differ by {size:.1g}"
    return fault


def _run(model: Any, parallel: ContextParallel, batch: PackedBatch) -> Tensor:
    """Return the hidden states [T, D] of a batch, which the group shares if it has a shard."""
    shard = batch.shard
    source = batch if shard is None else shard
    inner, states = unwrap_model(model), list[Tensor]()  # the inputs of the output head
    head = inner.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    try:
        with contextlib.ExitStack() as stack:
            if shard is not None:
                stack.enter_context(parallel.split_attention(inner, shard))
            stack.enter_context(skip_packing_search(batch.sequences))
            model(**batch.make_model_inputs(model), use_cache=False)
    finally:
        hook.remove()
    flat = states[0].flatten(0, -2)
    flat = flat if source.token_index is None else flat[source.token_index]
    return flat if shard is None else parallel.gather_tokens(flat, shard)
