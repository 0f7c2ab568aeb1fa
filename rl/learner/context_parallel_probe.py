"""Check on a few tokens that a group of ranks computes what a single rank computes.

The architecture's name plays no role: attention that is not looked up by name, or a layer that
mixes positions in another way, shows as a difference.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rl.distributed import collectives
from rl.layers import truncated_layers
from rl.learner.context_parallel import ContextParallel
from rl.learner.layout_probe import (
    BF16_TOLERANCES,
    FP32_TOLERANCES,
    ProbeSequences,
    preserve_state,
)
from rl.learner.packing import PackedBatch, collate, make_units
from rl.learner.varlen_attention import VarlenAttention
from rl.models import (
    get_vocab_size,
    skip_packing_search,
    unwrap_model,
    uses_flash_attention,
)


def find_group_fault_on_all_ranks(
    model: Any | None,
    parallel: ContextParallel,
    layouts: Collection[str],
    varlen: VarlenAttention | None,
) -> str | None:
    """Return, on every rank, how the hidden states of a group differ from those of a single rank;
    None if they agree.

    `model`: None on the ranks of a group that does not check. `varlen`: set if attention takes the
    lengths of sequences.
    """
    fault = None if model is None else _find_fault(model, parallel, layouts, varlen)
    faults = torch.tensor([0.0 if fault is None else 1.0], device=parallel.device)
    collectives.all_sum_([faults])
    return (fault or "another rank reported this fault") if float(faults) else None


def attend_batch(
    model: Any,
    batch: PackedBatch,
    varlen: VarlenAttention | None,
    parallel: ContextParallel | None,
) -> AbstractContextManager[None]:
    """Return a context of a batch's forward and backward, in which attention takes the lengths of
    its sequences (if it has bounds) and the ranks of a group compute it together (if they share
    it).
    """
    if parallel is None or batch.shard is None:
        return contextlib.nullcontext() if varlen is None else varlen.use(model, batch.bounds)
    attend = None
    if varlen is not None and batch.bounds is not None:
        attend = functools.partial(varlen.attend_row, batch.bounds)
    return parallel.split_attention(unwrap_model(model), batch.shard, attend)


def _find_fault(
    model: Any,
    parallel: ContextParallel,
    layouts: Collection[str],
    varlen: VarlenAttention | None,
) -> str | None:
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
                collate(sequences, units, layout, device, group, varlen=varlen is not None)
                for group in (None, parallel.group)
            )
            expected = _run(model, parallel, plain, varlen)
            # Every rank of the group finishes all layouts: otherwise the others would wait.
            try:
                states = _run(model, parallel, shared, varlen)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                if collectives.is_communication_error(error):
                    raise
                return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            errors = (states - expected).norm(dim=-1) / expected.norm(dim=-1)
            size = float(errors.max() if sharp else errors.median())
            if not size <= tolerance:
                fault = f"layout {layout} gives hidden states that differ by {size:.1g}"
    return fault


def _run(
    model: Any, parallel: ContextParallel, batch: PackedBatch, varlen: VarlenAttention | None
) -> Tensor:
    """Return the hidden states [T, D] of a batch, which the group shares if it has a shard."""
    shard = batch.shard
    source = batch if shard is None else shard
    inner, states = unwrap_model(model), list[Tensor]()  # the inputs of the output head
    head = inner.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    try:
        with attend_batch(model, batch, varlen, parallel), skip_packing_search(batch.sequences):
            model(**batch.make_model_inputs(model), use_cache=False)
    finally:
        hook.remove()
    flat = states[0].flatten(0, -2)
    flat = flat if source.token_index is None else flat[source.token_index]
    return flat if shard is None else parallel.gather_tokens(flat, shard)
