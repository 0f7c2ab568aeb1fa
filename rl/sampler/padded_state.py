"""Decode rows of any lengths in a single left-padded batch.

For models that cache only keys and values of attention. Shapes: P prompts, N rows, H key heads, L
cached positions, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.decode_state import DecodeState, LogitsReader
from rl.sampler.decoder import batch_prompts
from rl.sampler.forward_hf import PREFILL_TOKENS, HFForward
from rl.types import PlacedImage


class PaddedState(DecodeState):
    """Store the keys and values of each prompt, and a left-padded batch of the running rows, per
    layer.
    """

    def __init__(self, decoder: HFForward):
        super().__init__()
        self.decoder = decoder
        self.prompts: list[list[tuple[Tensor, Tensor]]] = []  # [prompt][layer] of [H, L, D]
        # [layer] of [N, H, L, D], the newest token last
        self.rows: list[tuple[Tensor, Tensor]] = []
        # [P]: offset of the positions after a prompt with images from the count of its tokens
        self.position_shifts = np.zeros(0, np.int64)
        self.has_images = np.zeros(0, np.bool_)  # [P]: whether the prompt has images

    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        return prompts * longest_prompt + rows * (longest_prompt + longest_response)

    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Do nothing: a DynamicCache grows as needed and stays within `cost`."""

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        logits: list[Tensor] = [torch.empty(0)] * len(prompts)
        prompt_kv: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
        experts: dict[int, np.ndarray] = {}
        shifts = np.zeros(len(prompts), np.int64)
        sees = np.array([bool(images and images[i]) for i in range(len(prompts))], np.bool_)
        for batch in batch_prompts([len(prompt) for prompt in prompts], PREFILL_TOKENS, sees):
            placed = [images[i] if images else () for i in batch]
            last, cache, shifts[batch] = self._prefill_into(
                [prompts[i] for i in batch], [readers[i] for i in batch], placed
            )
            for row, i in enumerate(batch):
                logits[i] = last[row]
                start = cache.get_seq_length() - len(prompts[i])
                if self.decoder.experts is not None:
                    experts[i] = self.decoder.experts[row, start:]
                prompt_kv[i] = [
                    (keys[row, :, start:], values[row, :, start:])
                    for keys, values in _read_layers(cache)
                ]
        self.prompts.extend(prompt_kv)
        self._record_prompts(experts)
        self.position_shifts, self.has_images = (
            np.concatenate([self.position_shifts, shifts]),
            np.concatenate([self.has_images, sees]),
        )
        self.prompt_lengths = np.concatenate(
            [self.prompt_lengths, [len(prompt) for prompt in prompts]]
        ).astype(np.int64)
        return torch.stack(logits)

    def _prefill_into(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        images: Sequence[Sequence[PlacedImage]],
    ) -> tuple[Tensor, Any, list[int]]:
        """Run the left-padded forward of a few prompts.

        Returns the logits of the last positions [P, V], the filled cache, and the position shift of
        each prompt.
        """
        from transformers import DynamicCache

        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        cache = DynamicCache()
        needs_all_logits = any(reader is not None for reader in readers)
        inputs = self.decoder.model_inputs(
            ids,
            images,
            [longest - len(prompt) for prompt in prompts],
            [len(prompt) for prompt in prompts],
        )
        positions = inputs.pop("position_ids", (mask.cumsum(-1) - 1).clamp_min(0))
        shifts = [
            int(positions[..., row, :].max()) + 1 - len(prompt)
            for row, prompt in enumerate(prompts)
        ]
        logits = self.decoder.padded_forward(
            inputs.pop("input_ids"),
            mask,
            positions,
            cache,
            last_only=not needs_all_logits,
            **inputs,
        )
        for i, (prompt, reader) in enumerate(zip(prompts, readers, strict=True)):
            if reader is not None:
                reader(0, logits[i, longest - len(prompt) :])
        return logits[:, -1].float(), cache, shifts

    def lengths(self) -> np.ndarray:
        """Return the cached positions of each row, prompt and response."""
        return self.prompt_lengths[self.prompt_of_row] + self.response_lengths

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        before = len(self.prompt_of_row)
        super().add_rows(prompt_of_row)
        longest = int(self.lengths().max())
        old, self.rows = self.rows, []
        for layer, (key, value) in enumerate(self.prompts[prompt_of_row[0]]):
            pair = []
            for which, like in enumerate((key, value)):
                heads, _, width = like.shape
                merged = like.new_zeros(len(self.prompt_of_row), heads, longest, width)
                if before:
                    merged[:before, :, longest - old[layer][which].shape[2] :] = old[layer][which]
                for prompt in np.unique(prompt_of_row):
                    source = self.prompts[prompt][layer][which]
                    rows = torch.from_numpy(before + np.flatnonzero(prompt_of_row == prompt)).to(
                        like.device
                    )
                    merged[rows, :, longest - source.shape[1] :] = source
                pair.append(merged)
            self.rows.append((pair[0], pair[1]))

    def decode(self, tokens: np.ndarray) -> Tensor:
        from transformers import DynamicCache

        lengths = torch.from_numpy(self.lengths())
        cached = self.rows[0][0].shape[2]
        mask = (torch.arange(cached + 1) >= cached - lengths[:, None]).long()
        cache = DynamicCache(self.rows)
        positions = lengths + torch.from_numpy(self.position_shifts[self.prompt_of_row])
        ids = self.decoder.replace_image_tokens(
            torch.from_numpy(tokens)[:, None], torch.from_numpy(self.has_images[self.prompt_of_row])
        )
        logits = self.decoder.padded_forward(ids, mask, positions[:, None], cache, last_only=True)
        self.rows = _read_layers(cache)
        experts = self.decoder.experts
        self.record_experts(None if experts is None else experts[:, 0])
        self.response_lengths += 1
        return logits[:, -1]

    def _move_rows(self, source: np.ndarray) -> None:
        if not len(source):
            self.rows = []
            return
        longest = int(self.lengths()[source].max())
        index = torch.from_numpy(source).to(self.decoder.device)
        self.rows = [
            (keys[index, :, -longest:], values[index, :, -longest:]) for keys, values in self.rows
        ]

    def _move_prompts(self, source: np.ndarray) -> None:
        self.prompts = [self.prompts[slot] for slot in source]
        self.position_shifts, self.has_images = (
            self.position_shifts[source],
            self.has_images[source],
        )


def _read_layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of each layer, [batch, heads, positions, width].

    Raises NotImplementedError if a layer caches something else; `probe` determines which models do.
    """
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    for keys, _ in layers:
        if not isinstance(keys, Tensor) or keys.dim() != 4:
            raise NotImplementedError(
                "the model caches more than keys and values of attention between tokens"
            )
    return layers
