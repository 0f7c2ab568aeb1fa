"""Add the action mask to datums that come without a mask, as Tinker's do: 1.0 at each sampled
target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.client.service_context import ServiceContext
from rl.errors import BadRequestError
from rl.losses import MASK_FIELDS, LossSpec, list_enabled_terms
from rl.types import Datum, TensorData


def reads_weights_as_mask(loss: LossSpec) -> bool:
    """Return whether the loss reads `weights` of a datum as its mask: it has a mask and no
    `weights` field.
    """
    return "mask" in loss.known_fields and "weights" not in loss.known_fields


def add_masks(
    data: Sequence[Datum],
    name: str,
    loss: LossSpec,
    config: Mapping[str, Any],
    context: ServiceContext,
) -> Sequence[Datum]:
    """Return the datums, each with the `mask` that the loss called `name` reads. Return the same
    list if no mask has to be added.

    `weights` of 0 and 1 are the mask of a loss that has no `weights` field. A datum with neither
    field takes the recorded samples of this service and the positions with a nonzero advantage; a
    remark reports that once. Malformed fields stay as they are: `check_datum` reports them. Raises
    BadRequestError, which names the datum, if `weights` hold other values than 0 and 1, or differ
    from the datum's mask.
    """
    if reads_weights_as_mask(loss):
        data = [_convert_weights_to_mask(i, datum) for i, datum in enumerate(data)]
    needs = loss.terms and (loss.needs_mask or list_enabled_terms(config))
    if not needs or all(
        any(field in datum.loss_fn_inputs for field in MASK_FIELDS) for datum in data
    ):
        return data
    needed_by = " and ".join(([name] if loss.needs_mask else []) + list_enabled_terms(config))
    context.warn_once(
        f"{needed_by} needs to know which tokens are actions, and datums have no mask: the "
        "recorded sampled tokens and the positions with an advantage are used. Set "
        "loss_fn_inputs['mask'] to override this: 1.0 at each sampled target, 0.0 elsewhere"
    )
    return [_add_mask(datum, context) for datum in data]


def _convert_weights_to_mask(index: int, datum: Datum) -> Datum:
    """Return the datum with `weights` moved to `mask`. Raises BadRequestError if they are not 0 or
    1, or differ from its mask.
    """
    fields = datum.loss_fn_inputs
    weights = fields.get("weights")
    if weights is None or weights.array.shape != (datum.model_input.length,):
        return datum
    invalid = weights.array[(weights.array != 0) & (weights.array != 1)]
    if len(invalid):
        raise BadRequestError(
            f"datum {index}: 'weights' of a policy loss are 0 or 1 and mark which targets are "
            f"actions (as 'mask' does); got {float(invalid[0]):g}. Scale 'advantages' to weigh "
            "tokens"
        )
    for name in MASK_FIELDS:
        mask = fields.get(name)
        if (
            mask is not None
            and mask.array.shape == weights.array.shape
            and ((mask.array != 0) != (weights.array != 0)).any()
        ):
            position = int(np.flatnonzero((mask.array != 0) != (weights.array != 0))[0])
            raise BadRequestError(
                f"datum {index} has 'weights' and {name!r}, which both mark which targets are "
                f"actions, and they differ first at position {position}: remove either field"
            )
    kept_fields = {name: value for name, value in fields.items() if name != "weights"}
    return datum.with_inputs(
        kept_fields
        if any(name in fields for name in MASK_FIELDS)
        else {**kept_fields, "mask": weights}
    )


def _add_mask(datum: Datum, context: ServiceContext) -> Datum:
    """Return the datum with a mask [N] float32: sampled targets and positions with a nonzero
    advantage. Return a datum with a mask, or without usable advantages, unchanged.
    """
    fields = datum.loss_fn_inputs
    advantages = fields.get("advantages")
    if (
        any(name in fields for name in MASK_FIELDS)
        or advantages is None
        or advantages.array.shape != (datum.model_input.length,)
    ):
        return datum
    actions, sampled = (
        advantages.array != 0,
        context.sample_temperatures.find_sampled_targets(datum),
    )
    if sampled is not None and sampled.shape == actions.shape:
        actions = actions | sampled
    return datum.with_inputs({**fields, "mask": TensorData(actions.astype(np.float32), "float32")})
