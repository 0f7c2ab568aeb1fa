"""Check the arguments of a learner call before it runs: losses, their settings, datums. Every error
is a ValueError at the call.

Datums that come without an action mask, as Tinker's do, get one: 1.0 at each sampled target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.client.service_context import ServiceContext
from rl.errors import BadRequestError
from rl.images import get_image_reader, make_no_images_error
from rl.losses import (
    KL_KINDS,
    MASK_FIELDS,
    LossSpec,
    check_term_config,
    get_loss,
    list_enabled_terms,
)
from rl.rollout import check_datum
from rl.types import Datum, ImageAssetPointerChunk, ImageChunk, ModelInput, TensorData
from rl.types.number_checks import shorten, validate_number

_POSITIVE = {"minimum": 0.0, "open_ends": True}
# by key of a loss_fn_config: the expected value in words, and its bounds
_RANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature": (
        "a positive number of at least 0.001, at which the learner scores",
        {"minimum": 1e-3},
    ),
    "clip_low_threshold": ("a ratio of at least 0, such as 0.8", {"minimum": 0.0}),
    "clip_high_threshold": ("a ratio of at least 0, such as 1.2", {"minimum": 0.0}),
    "label_smoothing": (
        "at least 0 and below 0.5",
        {"minimum": 0.0, "maximum": math.nextafter(0.5, 0.0)},
    ),
    "length_normalise": ("0 or 1", {"minimum": 0.0, "maximum": 1.0}),
    "tau": ("a number of at least 1e-6, which the loss is divided by", {"minimum": 1e-6}),
    "expectile": ("above 0 and below 1", {"minimum": 0.0, "maximum": 1.0, "open_ends": True}),
    "value_clip": (
        "positive (the largest change of a value from values_old), or omitted",
        _POSITIVE,
    ),
}
_FINITE_NUMBER: tuple[str, dict[str, Any]] = ("a finite number", {})


def check_loss_config(name: str, loss: LossSpec, config: Mapping[str, Any]) -> None:
    """Check the settings of a loss. Raises ValueError for a key that the loss does not have, or a
    value out of range.
    """
    for key, value in config.items():
        if key not in loss.known_config:
            raise BadRequestError(
                f"loss_fn_config has the key {key!r}; {name} takes {', '.join(loss.known_config)}"
            )
        if key == "kl_kind":
            if value not in KL_KINDS:
                raise BadRequestError(
                    f"loss_fn_config has kl_kind {value!r}: choose from {', '.join(KL_KINDS)}"
                )
        elif key == "beta":
            allows_zero = name == "dro"  # DPO and IPO divide by it or have no gradient without
            validate_number(
                "beta",
                value,
                f"a {'non-negative' if allows_zero else 'positive'} number, such as 0.1",
                minimum=0.0,
                open_ends=not allows_zero,
            )
        elif key == "clip_high_threshold" and isinstance(value, float) and value == math.inf:
            continue  # no upper bound
        elif not (key == "value_clip" and value is None):
            expected, limits = _RANGES.get(key, _FINITE_NUMBER)
            validate_number(
                key, float(value) if isinstance(value, bool) else value, expected, **limits
            )
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if low > high and "clip_low_threshold" in loss.known_config:
        raise BadRequestError(
            f"clip_low_threshold {low} is above clip_high_threshold {high}: both are ratios, such "
            "as 0.8 and 1.2"
        )
    check_term_config(config)


def check_call(
    data: Sequence[Datum],
    name: str,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    context: ServiceContext | None = None,
) -> tuple[LossSpec, Sequence[Datum]]:
    """Return the loss of that name and the datums, with images read and (with a service's
    `context`) with masks.

    Raises ValueError, which names what does not fit the loss or the model (`info`: the client's).
    """
    if not isinstance(name, str):
        raise BadRequestError(
            f"loss_fn is the name of a loss, got {name!r}: pass a function to "
            "forward_backward_custom"
        )
    loss = get_loss(name)
    check_loss_config(name, loss, config)
    data = resolve_datum_images(data, info)
    if len(data) % loss.group:
        raise BadRequestError(
            f"{name} takes datums in groups of {loss.group}, in consecutive order; got "
            f"{len(data)} datums"
        )
    if loss.needs_values(config):
        require_value_head(info, f"the loss {name!r}" if loss.values else "value_coef")
    known = loss.known_fields
    reads_weights_as_mask = "mask" in known and "weights" not in known
    if reads_weights_as_mask:
        known = (*known, "weights")
    if context is not None:
        if reads_weights_as_mask:
            data = [_convert_weights_to_mask(i, datum) for i, datum in enumerate(data)]
        data = add_masks(data, name, loss, config, context)
    for i, datum in enumerate(data):
        check_datum(
            i,
            datum,
            required=loss.required,
            accepted=known,
            soft_targets=loss.soft_targets,
            vocab_size=info["vocab_size"],
            max_context=info["max_context"],
        )
        loss.check_terms(i, datum.loss_fn_inputs, config)
        if datum.temperature is not None:
            expected = "0 (greedy) or at least 0.001: logits are divided by it"
            label, value = f"datum {i}: temperature", datum.temperature
            if validate_number(label, value, expected, minimum=0.0) != 0:
                validate_number(label, value, expected, minimum=1e-3)
        if i % loss.group:
            _check_alike(data, i - i % loss.group, i, name)
        labels = {*datum.loss_fn_inputs["labels"].tolist()} if "labels" in loss.required else {1}
        if labels not in ({1}, {-1}):
            raise BadRequestError(
                f"datum {i}: 'labels' are 1 throughout a good answer's datum and -1 throughout a "
                f"bad answer's, got {shorten(sorted(labels), 80)}"
            )
    return loss, data


def _check_alike(data: Sequence[Datum], first: int, other: int, name: str) -> None:
    """Raise BadRequestError unless both or neither of two datums that belong together have images
    and each field: the loss reads the fields of the first.
    """
    parts = [
        {*data[i].loss_fn_inputs, *(["images"] * bool(data[i].model_input.images_with_positions()))}
        for i in (first, other)
    ]
    if parts[0] != parts[1]:
        raise BadRequestError(
            f"datums {first} and {other} belong together ({name}) and only one of them has "
            f"{sorted(parts[0] ^ parts[1])}: give it to both or to neither"
        )


def resolve_images(model_input: Any, info: Mapping[str, Any]) -> Any:
    """Return a ModelInput with the tokens of its images filled in, as the model of `info` reads
    them. Return any other input unchanged.

    Raises UserError for images if the model reads text only, or if it reads an image as another
    number of tokens than expected.
    """
    kinds = (ImageChunk, ImageAssetPointerChunk)
    if not isinstance(model_input, ModelInput) or not any(
        isinstance(chunk, kinds) for chunk in model_input.chunks
    ):
        return model_input
    reader = get_image_reader(info["tokenizer"])
    if reader is None:
        raise make_no_images_error(info["base_model"])
    return reader.resolve_tokens(model_input)


def resolve_datum_images(data: Sequence[Datum], info: Mapping[str, Any]) -> list[Datum]:
    """Return the datums, those that hold images with inputs resolved by `resolve_images`. Raises
    BadRequestError unless `data` is a list of datums.
    """
    if not isinstance(data, Sequence) or any(not isinstance(datum, Datum) for datum in data):
        raise BadRequestError(f"data is a list of types.Datum, got {_describe_type(data)}")
    resolved = []
    for datum in data:
        model_input = resolve_images(datum.model_input, info)
        if model_input is not datum.model_input:
            datum = datum.with_inputs(datum.loss_fn_inputs)
            datum.model_input = model_input
        resolved.append(datum)
    return resolved


def require_value_head(info: Mapping[str, Any], caller: str) -> None:
    """Raise BadRequestError if the model has no value head. `caller`: the caller that reads values
    (used in the message).
    """
    if not info["value_head"]:
        raise BadRequestError(
            f"{caller} reads values, and this model has no value head: create the client with "
            "value_head=True"
        )


def _describe_type(data: Any) -> str:
    """Return a description of the wrong type of `data`, for an error message."""
    if not isinstance(data, Sequence):
        return f"a {type(data).__name__}"
    others = [type(datum).__name__ for datum in data if not isinstance(datum, Datum)]
    return f"a list that holds a {others[0]}" if others else "a list"


def check_target_logprobs(targets: Any, prompt_tokens: int, vocabulary: int) -> np.ndarray | None:
    """Return the ids of target_prompt_logprobs, int64 [prompt tokens - 1, K], -1 for none; None if
    `targets` is None. Raises ValueError for another type, shape or range.
    """
    if targets is None:
        return None
    name = "target_prompt_logprobs"
    if not isinstance(targets, TensorData) or targets.dtype != "int64":
        raise BadRequestError(
            f"{name} is a types.TensorData of token ids (int64), got {_describe_type(targets)}"
        )
    if targets.array.ndim != 2 or len(targets.array) != prompt_tokens - 1:
        raise BadRequestError(
            f"{name} has the shape [prompt tokens - 1, K], here [{prompt_tokens - 1}, K]; got "
            f"{targets.shape}"
        )
    low, high = targets.array.min(initial=-1), targets.array.max(initial=-1)
    if low < -1 or high >= vocabulary:
        raise BadRequestError(
            f"{name} holds ids from 0 to {vocabulary - 1}, or -1 for none; got {low} to {high}"
        )
    return targets.array


def add_masks(
    data: Sequence[Datum],
    name: str,
    loss: LossSpec,
    config: Mapping[str, Any],
    context: ServiceContext,
) -> Sequence[Datum]:
    """Return the datums, each with the `mask` that the loss called `name` reads. Return the same
    list if no mask has to be added.

    A datum without a mask takes the recorded samples of this service and the positions with a
    nonzero advantage; a remark reports that once. Malformed fields stay as they are: `check_datum`
    reports them.
    """
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
    """Return the datum with `weights` of 0 and 1 moved to `mask`, for a loss that has a mask and no
    `weights` field. Malformed weights stay as they are: `check_datum` reports them. Raises
    BadRequestError if weights are not 0 or 1, or differ from the datum's mask.
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
        if mask is None or mask.array.shape != weights.array.shape:
            continue
        differences = np.flatnonzero((mask.array != 0) != (weights.array != 0))
        if len(differences):
            raise BadRequestError(
                f"datum {index} has 'weights' and {name!r}, which both mark which targets are "
                f"actions, and they differ first at position {differences[0]}: remove either field"
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
