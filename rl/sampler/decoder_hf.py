"""Generation with any HF causal LM through its own forward and a DynamicCache. Slower than `decoder_fast`, and its yardstick.

Rows of unequal length are padded on the left, masked, and given explicit positions; rows enter and leave by rebuilding the
batch.
Shapes: P prompts, N rows, H key heads, L cached positions, D head width.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.cache import DecodeState, LogitsReader
from rl.sampler.decoder import Decoder, NamedTensors, prompt_batches
from rl.sampler.weights import refuse_change_of_shared

_PREFILL_TOKENS = 8192  # padded prompt tokens in one forward


class HFDecoder(Decoder):
    """A frozen copy of a HF causal LM (PEFT-wrapped or not), which runs in its own code."""

    def __init__(self, model: Any, dtype: torch.dtype | None = None, device: torch.device | None = None):
        self._init_from(copy.deepcopy(model), {name for name, p in model.named_parameters() if p.requires_grad})
        self.model.to(device=device, dtype=dtype)
        self.device = next(self.model.parameters()).device

    def _init_from(self, model: Any, trainable: set[str]) -> None:
        self.model = model.eval().requires_grad_(False)
        inner = _unwrapped(model)
        if inner.config._attn_implementation == "flash_attention_2":  # it takes no mask of left-padded prompts and a cache
            inner.set_attn_implementation("sdpa")
        self.trainable = trainable
        self.shares_frozen = False
        config = model.config.get_text_config()
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.max_positions = getattr(config, "max_position_embeddings", None)
        forward = inspect.signature(_unwrapped(model).forward).parameters
        self._takes_positions = "position_ids" in forward
        self._takes_logits_to_keep = "logits_to_keep" in forward
        self.device = next(model.parameters()).device

    def load_(self, named_tensors: NamedTensors) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in named_tensors:
            if name not in parameters:
                raise ValueError(f"no parameter {name!r} in the decoder's model; its names are like {next(iter(parameters))!r}")
            own = parameters[name]
            if own.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(own.shape)} in the decoder, got {tuple(tensor.shape)}")
            if self.shares_frozen and name not in self.trainable:
                refuse_change_of_shared(name, own, tensor)
                continue
            own.detach().copy_(tensor.detach())

    def fork(self) -> HFDecoder:
        frozen = {id(p): p for name, p in self.model.named_parameters() if name not in self.trainable}
        other = HFDecoder.__new__(HFDecoder)
        other._init_from(copy.deepcopy(self.model, memo=dict(frozen)), self.trainable)
        self.shares_frozen = other.shares_frozen = bool(frozen)
        return other

    def new_state(self, kv_cache_tokens: int) -> HFState:
        return HFState(self)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, last_only: bool) -> Tensor:
        """Logits [batch, positions or 1, V]."""
        extra: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        if last_only and self._takes_logits_to_keep:
            extra["logits_to_keep"] = 1
        logits = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra).logits
        return logits[:, -1:] if last_only else logits

    def read_prompts(self, prompts: Sequence[Sequence[int]], readers: Sequence[LogitsReader]) -> None:
        for batch in prompt_batches([len(prompt) for prompt in prompts], _PREFILL_TOKENS):
            self.forward_prompts([prompts[i] for i in batch], [readers[i] for i in batch])

    def forward_prompts(self, prompts: Sequence[Sequence[int]], readers: Sequence[LogitsReader | None]) -> tuple[Tensor, Any]:
        """Left-padded forward of a few prompts: logits of the last positions [P, V] and the filled cache."""
        from transformers import DynamicCache

        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0).to(self.device)
        cache = DynamicCache()
        wanted = any(reader is not None for reader in readers)
        logits = self.forward(ids.to(self.device), mask.to(self.device), positions, cache, last_only=not wanted)
        for i, (prompt, reader) in enumerate(zip(prompts, readers, strict=True)):
            if reader is not None:
                reader(0, logits[i, longest - len(prompt) :])
        return logits[:, -1].float(), cache


def _unwrapped(model: Any) -> Any:
    """The HF model inside a PEFT wrapper, whose own forward takes only *args and **kwargs."""
    return model.get_base_model() if type(model).__module__.startswith("peft.") else model


class HFState(DecodeState):
    """Per layer the keys and values of each prompt, and a left-padded batch of the running rows."""

    def __init__(self, decoder: HFDecoder):
        super().__init__()
        self.decoder = decoder
        self.prompts: list[list[tuple[Tensor, Tensor]]] = []  # [prompt][layer] of [H, L, D]
        self.rows: list[tuple[Tensor, Tensor]] = []  # [layer] of [N, H, L, D], the newest token last

    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        return prompts * longest_prompt + rows * (longest_prompt + longest_response)

    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Nothing to do: a DynamicCache grows by itself, within the cost."""

    def prefill(self, prompts: Sequence[Sequence[int]], readers: Sequence[LogitsReader | None]) -> Tensor:
        logits: list[Tensor] = [torch.empty(0)] * len(prompts)
        kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
        for batch in prompt_batches([len(prompt) for prompt in prompts], _PREFILL_TOKENS):
            last, cache = self.decoder.forward_prompts([prompts[i] for i in batch], [readers[i] for i in batch])
            for row, i in enumerate(batch):
                logits[i] = last[row]
                start = cache.get_seq_length() - len(prompts[i])
                kept[i] = [(keys[row, :, start:], values[row, :, start:]) for keys, values in _layers(cache)]
        self.prompts.extend(kept)
        self.prompt_lengths = np.concatenate([self.prompt_lengths, [len(prompt) for prompt in prompts]]).astype(np.int64)
        return torch.stack(logits)

    def lengths(self) -> np.ndarray:
        """Cached positions of each row, prompt and response."""
        return self.prompt_lengths[self.prompt_of_row] + self.response_lengths

    def enter(self, prompt_of_row: np.ndarray) -> None:
        before = len(self.prompt_of_row)
        super().enter(prompt_of_row)
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
                    rows = torch.from_numpy(before + np.flatnonzero(prompt_of_row == prompt)).to(like.device)
                    merged[rows, :, longest - source.shape[1] :] = source
                pair.append(merged)
            self.rows.append((pair[0], pair[1]))

    def decode(self, tokens: np.ndarray) -> Tensor:
        from transformers import DynamicCache

        device = self.decoder.device
        lengths = torch.from_numpy(self.lengths())
        cached = self.rows[0][0].shape[2]
        mask = (torch.arange(cached + 1) >= cached - lengths[:, None]).long().to(device)
        cache = DynamicCache(self.rows)
        ids = torch.from_numpy(tokens)[:, None].to(device)
        logits = self.decoder.forward(ids, mask, lengths[:, None].to(device), cache, last_only=True)
        self.rows = _layers(cache)
        self.response_lengths += 1
        return logits[:, -1]

    def _move_rows(self, source: np.ndarray) -> None:
        if not len(source):
            self.rows = []
            return
        longest = int(self.lengths()[source].max())
        index = torch.from_numpy(source).to(self.decoder.device)
        self.rows = [(keys[index, :, -longest:], values[index, :, -longest:]) for keys, values in self.rows]

    def _move_prompts(self, source: np.ndarray) -> None:
        self.prompts = [self.prompts[slot] for slot in source]


def _layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, [batch, heads, positions, width]."""
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    for keys, _ in layers:
        if not isinstance(keys, Tensor) or keys.dim() != 4:
            raise NotImplementedError(
                "this model keeps more than keys and values of attention between tokens (a recurrent or sliding layer, say), "
                "which the sampler does not support; use an attention-only causal LM"
            )
    return layers
