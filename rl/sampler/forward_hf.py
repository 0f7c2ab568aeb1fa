"""The forward of any HF causal LM in the ways that a sampler needs it, for `decoder_hf` and for its
caches as they decode.

How rows run together is a `Plan`, which `probe` finds out on the model itself:
  padded     one batch padded on the left, masked, with explicit positions; rows enter and leave by
  rebuilding it slots      the same for models that carry a state, which has a slot a row; prompts
  are read unpadded equal      rows of one length together, in a cache of the model's own
  (recurrent, convolutional, windowed layers) recompute  no cache: the whole sequence again for
  every token
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl.errors import UserError
from rl.images import reader_of
from rl.layers import describe, noted
from rl.sampler.lengths import length_switch
from rl.sampler.precision import LOW, widen_
from rl.sampler.time_steps import limit_time_steps_
from rl.types import PlacedImage

PREFILL_TOKENS = 8192  # padded prompt tokens in one forward


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows decode; how given sequences are read: padded on the right, or only with others of
    their length.

    `together`: whether rows of one length may share a forward at all.
    """

    rows: Literal["padded", "slots", "equal", "recompute"] = "padded"
    reading: Literal["right", "equal"] = "right"
    together: bool = True


class HFForward:
    """A model with its plan; nothing is remembered between calls."""

    def _read_model(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        inner = unwrapped(model)
        # it takes no mask of left-padded prompts and a cache
        if inner.config._attn_implementation == "flash_attention_2":
            inner.set_attn_implementation("sdpa")
        self.name = type(inner).__name__
        self.reader = reader_of(inner)  # of images; None for a model of text alone
        self._inner = inner
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        if head is None:
            raise UserError(
                f"{self.name} has no output head over the vocabulary, so it cannot be sampled from"
            )
        self.vocab_size = head.weight.shape[0]
        positions = getattr(config, "max_position_embeddings", None)
        # XLNet's -1: no limit
        self.max_positions = positions if positions and positions > 0 else None
        self.length_switch = length_switch(model)
        self.plan = Plan()
        self.layers = describe(model)
        forward = inspect.signature(inner.forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in forward
        self._cache_name = "past_key_values" if "past_key_values" in forward else "cache_params"
        self.device, self.dtype = head.weight.device, head.weight.dtype
        self.notes_experts = False
        # of the last forward where they are noted, int16 [batch, positions, B * K]
        self.experts: np.ndarray | None = None
        if self.dtype in LOW:
            widen_(model)
        limit_time_steps_(model)

    def new_cache(self) -> Any:
        """An empty cache with the kinds of layers that the model has."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def whole_cache(self) -> Any:
        """An empty cache like that, whose windows keep every key: rows of different lengths line up
        in it.
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
        """Logits [batch, positions or 1, V] of the model's forward, under autocast where its
        matrices are half precision.
        """
        if last_only and self._takes_logits_to_keep:
            extra["logits_to_keep"] = 1
        low = self.dtype in LOW
        with contextlib.ExitStack() as stack:
            if low:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.dtype))
            chosen = (
                stack.enter_context(noted(self.model, self.layers.experts))
                if self.notes_experts and self.layers.experts
                else None
            )
            logits = self.model(input_ids=ids.to(self.device), **extra).logits
        if chosen is not None:
            self.experts = chosen().flatten(1).unflatten(0, ids.shape).cpu().numpy()
        return logits[:, -1:] if last_only else logits

    def fed(self, ids: Tensor, sees: Tensor) -> Tensor:
        """Tokens [rows, 1] that were drawn, as the model reads them; `sees`: which rows saw images
        (see `ImageReader`).
        """
        return ids if self.reader is None else self.reader.fed(ids, sees)

    def seen(
        self,
        ids: Tensor,
        images: Sequence[Sequence[PlacedImage]],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> dict[str, Tensor]:
        """The forward's arguments for tokens and images of padded rows, each from `starts` on and
        `lengths` long.
        """
        if self.reader is None:
            return {"input_ids": ids}
        return self.reader.inputs(self._inner, ids.to(self.device), images, starts, lengths)

    def padded_forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        cache: Any,
        last_only: bool,
        **seen: Tensor,
    ) -> Tensor:
        """Of a batch padded on the left, on top of what the cache holds. `seen`: of images, as
        `seen` gives them.
        """
        extra: dict[str, Any] = (
            {"position_ids": positions.to(self.device)} if self.layers.takes_positions else {}
        )
        if mask is not None:
            extra["attention_mask"] = mask.to(self.device)
        return self._logits(
            ids, last_only, use_cache=True, **{self._cache_name: cache}, **extra, **seen
        )

    def cached_forward(self, rows: Sequence[Sequence[int]], cache: Any, last_only: bool) -> Tensor:
        """Of the next tokens of rows that are all of one length, on top of what the cache holds."""
        return self._logits(
            torch.tensor(rows), last_only, use_cache=True, **{self._cache_name: cache}
        )

    def plain_forward(
        self,
        rows: Sequence[Sequence[int]],
        last_only: bool,
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        """Of whole sequences, padded on the right where they differ in length; no cache and no
        mask, as a learner's.
        """
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        seen = self.seen(ids, images or [()] * len(rows), [0] * len(rows), list(map(len, rows)))
        return self._logits(seen.pop("input_ids"), last_only, use_cache=False, **seen)

    def equal_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of sequences of one length each, as many together as the plan and the size of a
        forward allow.
        """
        by_length: dict[int, list[int]] = {}
        for i, length in enumerate(lengths):
            by_length.setdefault(int(length), []).append(i)
        found = []
        for length, members in sorted(by_length.items(), reverse=True):
            most = max(PREFILL_TOKENS // length, 1) if self.plan.together else 1
            found += [members[start : start + most] for start in range(0, len(members), most)]
        return found


def unwrapped(model: Any) -> Any:
    """The HF model inside a PEFT wrapper, whose own forward takes only *args and **kwargs."""
    return model.get_base_model() if type(model).__module__.startswith("peft.") else model
