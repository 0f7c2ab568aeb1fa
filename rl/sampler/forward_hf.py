"""Compute the forward of any HF causal LM, for `decoder_hf` and its caches.

A `BatchingPlan` describes the batching of rows. `verify_decoder.find_batching` determines it on
the model itself:
  padded     a single left-padded batch with a mask and explicit positions; the batch is rebuilt
             when rows are added or removed
  slots      the same for models that carry a recurrent state, with a slot per row; prompts are
             prefilled unpadded
  equal      rows of equal length together, in the model's native cache (recurrent, convolutional,
             windowed layers)
  recompute  no cache: the whole sequence is recomputed for every token
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rl.errors import UserError
from rl.images import get_image_reader
from rl.layers import (
    describe_layers,
    find_max_context,
    record_experts,
    replace_forward,
    unwrap_model,
)
from rl.sampler.decode_state import LogitsReader, Prompt, pad_right
from rl.sampler.decoder import MAX_LOGITS_PER_SLICE, batch_prompts
from rl.sampler.precision import LOW_PRECISION, output_float32_
from rl.sampler.rope_switch import find_rope_switch
from rl.types import PlacedImage

PREFILL_TOKENS = 8192  # padded prompt tokens per forward


@dataclass(frozen=True, slots=True)
class BatchingPlan:
    """Describe the decoding of rows and the reading of whole sequences.

    `rows`: see the module. `reading`: sequences are padded on the right, or batched only with
    sequences of equal length. `together`: whether rows of equal length may share a forward.
    """

    rows: Literal["padded", "slots", "equal", "recompute"] = "padded"
    reading: Literal["right", "equal"] = "right"
    together: bool = True


class HFForward:
    """Hold a model and its plan; nothing is cached between calls."""

    def _read_model(self, model: Any) -> None:
        """Initialize the fields from the model.

        Raises UserError if the model has no output head.
        """
        self.model = model.eval().requires_grad_(False)
        inner = unwrap_model(model)  # a PEFT wrapper's forward takes only *args and **kwargs
        # flash_attention_2 does not support a mask of left-padded prompts with a cache
        if inner.config._attn_implementation == "flash_attention_2":
            inner.set_attn_implementation("sdpa")
        self.name = type(inner).__name__
        self.image_reader = get_image_reader(inner)  # image reader; None for a text-only model
        self._hf_model = inner
        head = model.get_output_embeddings()
        if head is None:
            raise UserError(
                f"{self.name} has no output head over the vocabulary, so the sampler cannot use it"
            )
        self.vocab_size = head.weight.shape[0]
        self.max_positions = find_max_context(model)
        self.length_switch = find_rope_switch(model)
        self.plan = BatchingPlan()
        self.layers = describe_layers(model)
        forward = inspect.signature(inner.forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in forward
        self._cache_name = "past_key_values" if "past_key_values" in forward else "cache_params"
        self.device, self.dtype = head.weight.device, head.weight.dtype
        self._long_reader: LogitsReader | None = None  # of the next forward
        self.records_experts = False
        # experts of the last forward if recording is on, int16 [batch, positions, B * K]
        self.experts: np.ndarray | None = None
        if self.dtype in LOW_PRECISION:
            output_float32_(model)
        limit_time_steps_(model)

    def new_cache(self) -> Any:
        """Return an empty cache with the model's kinds of layers."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def new_full_cache(self) -> Any:
        """Return an empty cache with windows that keep every key, so that rows of different lengths
        align.
        """
        from transformers import cache_utils as kinds

        cache = self.new_cache()
        for i, layer in enumerate(cache.layers):
            if type(layer) is kinds.DynamicSlidingWindowLayer:
                cache.layers[i] = kinds.DynamicLayer()
            elif type(layer) is kinds.LinearAttentionAndSlidingWindowAttentionLayer:
                cache.layers[i] = kinds.LinearAttentionAndFullAttentionLayer(
                    number_of_states=layer.number_of_states
                )
        return cache

    def _logits(self, ids: Tensor, last_only: bool, **extra: Any) -> Tensor:
        """Return the logits [batch, positions or 1, V] of the model's forward.

        Runs under autocast if the model's matrices are in half precision.
        """
        if last_only and self._takes_logits_to_keep:
            extra["logits_to_keep"] = 1
        low = self.dtype in LOW_PRECISION
        with contextlib.ExitStack() as stack:
            if low:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.dtype))
            record = (
                stack.enter_context(record_experts(self.model, self.layers.experts))
                if self.records_experts and self.layers.experts
                else None
            )
            forward = partial(self.model, input_ids=ids.to(self.device), **extra)
            reader, self._long_reader = self._long_reader, None
            logits = (
                forward().logits
                if reader is None
                else self._read_slices(forward, ids.shape[1], reader)
            )
        if record is not None:
            self.experts = record().flatten(1).unflatten(0, ids.shape).cpu().numpy()
        return logits[:, -1:] if last_only else logits

    @contextlib.contextmanager
    def slice_logits(self, prompts: Sequence[Prompt]) -> Iterator[bool]:
        """Yield whether the next forward in the context, of these prompts, passes the logits to
        their reader.

        This is so for a single long prompt: its logits are computed in slices.
        """
        prompt = prompts[0]
        is_long = len(prompt.tokens) > self.max_batch_tokens(reads_all=True)
        sliced = is_long and prompt.reader is not None and self._can_slice
        self._long_reader = prompt.reader if sliced else None
        try:
            yield sliced
        finally:  # also if the forward failed before it took the reader
            self._long_reader = None

    @cached_property
    def _can_slice(self) -> bool:
        """Return whether the model's forward computes selected logits, from the output of its base
        model.
        """
        passes: list[Any] = []
        if not self._takes_logits_to_keep:
            return False
        with self._hf_model.base_model.register_forward_hook(lambda *call: passes.append(call)):
            kept = torch.zeros(1, dtype=torch.int64, device=self.device)
            logits = self._logits(pad_right([[0, 0]]), False, use_cache=False, logits_to_keep=kept)
        return len(passes) == 1 and passes[0][0] is not self._hf_model and logits.shape[1] == 1

    def _read_slices(
        self, forward: Callable[..., Any], length: int, reader: LogitsReader
    ) -> Tensor:
        """Pass the logits of a sequence to `reader` in slices; return the last slice.

        The base model runs once: the further calls of the model's forward reuse its output.
        """
        body, step = self._hf_model.base_model, self.max_batch_tokens(reads_all=True)
        run_base, outputs = body.forward, list[Any]()

        def run_once(*args: Any, **kwargs: Any) -> Any:
            if not outputs:
                outputs.append(run_base(*args, **kwargs))
            return outputs[0]

        with replace_forward(body, run_once):
            for start in range(0, length, step):
                kept = torch.arange(start, min(start + step, length), device=self.device)
                logits = forward(logits_to_keep=kept).logits
                reader(start, logits[0])
        return logits

    def replace_image_tokens(self, ids: Tensor, has_images: Tensor) -> Tensor:
        """Return sampled tokens [rows, 1] as the model's input.

        `has_images`: which rows contain images (see `ImageReader`).
        """
        return (
            ids
            if self.image_reader is None
            else self.image_reader.replace_image_tokens(ids, has_images)
        )

    def model_inputs(
        self,
        ids: Tensor,
        images: Sequence[Sequence[PlacedImage]],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> dict[str, Tensor]:
        """Return the forward's arguments for the tokens and images of padded rows.

        Each row starts at its entry of `starts` and is `lengths` long.
        """
        if self.image_reader is None:
            return {"input_ids": ids}
        return self.image_reader.model_inputs(
            self._hf_model, ids.to(self.device), images, starts, lengths
        )

    def padded_forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        cache: Any,
        last_only: bool,
        **image_inputs: Tensor,
    ) -> Tensor:
        """Return the logits of a left-padded batch, appended to the cache.

        `image_inputs`: the arguments for images that `model_inputs` returns.
        """
        extra: dict[str, Any] = (
            {"position_ids": positions.to(self.device)} if self.layers.takes_positions else {}
        )
        if mask is not None:
            extra["attention_mask"] = mask.to(self.device)
        return self._logits(
            ids, last_only, use_cache=True, **{self._cache_name: cache}, **extra, **image_inputs
        )

    def cached_forward(self, rows: Sequence[Sequence[int]], cache: Any, last_only: bool) -> Tensor:
        """Return the logits of the next tokens of rows of equal length, appended to the cache."""
        return self._logits(
            torch.tensor(rows), last_only, use_cache=True, **{self._cache_name: cache}
        )

    def plain_forward(
        self,
        rows: Sequence[Sequence[int]],
        last_only: bool,
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        """Return the logits of whole sequences, without a cache or a mask, as a learner computes
        them.

        Sequences are padded on the right if their lengths differ.
        """
        inputs = self.model_inputs(
            pad_right(rows), images or [()] * len(rows), [0] * len(rows), list(map(len, rows))
        )
        return self._logits(inputs.pop("input_ids"), last_only, use_cache=False, **inputs)

    def max_batch_tokens(self, reads_all: bool) -> int:
        """Return the limit on the padded tokens of a batch of several sequences.

        `reads_all`: whether logits of all their positions are needed, not only of the last. Some
        models compute all of them in any case.
        """
        if not reads_all and self._takes_logits_to_keep:
            return PREFILL_TOKENS
        return min(PREFILL_TOKENS, MAX_LOGITS_PER_SLICE // self.vocab_size)

    def batch_by_length(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Return batches of indices of sequences of equal length.

        A batch is as large as the plan and `max_tokens` allow.
        """
        kinds = [-length for length in lengths]  # the longest first
        return batch_prompts(lengths, max_tokens if self.plan.together else 0, kinds)


class TimeStepLimit:
    """Clamp d in the output of a mixer's `in_proj`, as a forward hook.

    The last columns of the output are d, a column for each head. The hook is an object, so that a
    copied model gets a separate hook.
    """

    def __init__(self, mixer: Any):
        low, high = mixer.time_step_limit
        self.mixer = mixer
        self.low, self.high = inverse_softplus(low), inverse_softplus(high)

    def __call__(self, module: nn.Module, args: Any, projected: Tensor) -> Tensor:
        bias = self.mixer.dt_bias.to(projected.dtype)
        rest, d = projected.split([projected.shape[-1] - len(bias), len(bias)], dim=-1)
        return torch.cat([rest, d.clamp(self.low - bias, self.high - bias)], dim=-1)


def inverse_softplus(value: float) -> float:
    """Return the x with log(1 + exp(x)) = value, for a value of 0 (minus infinity) to infinity."""
    return -math.inf if value <= 0 else value + math.log(-math.expm1(-value))


def limit_time_steps_(model: nn.Module) -> None:
    """Make single-token steps of state-space layers apply the limits of a scan over a sequence.

    A Mamba-2 layer discretises with dt = softplus(d + bias), clamped to [low, high]
    (`time_step_limit`; Dao & Gu 2024, arXiv:2405.21060, their `dt_limit`). The scan over a sequence
    clamps, the single step of a cached decode does not (transformers 5, as `mamba_ssm`'s kernel for
    a step). So a token's logits would depend on the way it was read: for Zamba2 and Nemotron-H,
    with a lower limit of 0.001, by 1e-4 nats and more. Softplus is increasing, so clamping d itself
    to softplus^-1(limit) - bias is equivalent. The output of the projection is clamped so.

    Repeated calls for a model have no effect; copies of the model keep the hooks.
    """
    for mixer in model.modules():
        limit = getattr(mixer, "time_step_limit", None)
        if (
            limit is None
            or tuple(limit) == (0.0, math.inf)
            or not isinstance(getattr(mixer, "dt_bias", None), Tensor)
        ):
            continue
        projection = getattr(mixer, "in_proj", None)
        if isinstance(projection, nn.Module) and not any(
            type(hook) is TimeStepLimit for hook in projection._forward_hooks.values()
        ):
            projection.register_forward_hook(TimeStepLimit(mixer))
