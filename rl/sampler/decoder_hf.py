"""Generate with any HF causal LM through the model's forward.

It is slower than `decoder_fast`, and the reference that `decoder_fast` is compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rl.errors import UserError
from rl.images import make_no_images_error
from rl.sampler.decode_state import DecodeState, Prompt
from rl.sampler.decoder import Decoder, NamedTensors, batch_prompts
from rl.sampler.decoder_weights import check_shared_unchanged
from rl.sampler.forward_hf import HFForward
from rl.sampler.hf_states import EqualLengthState, PaddedState, RecomputeState, RecurrentState
from rl.sampler.precision import LOW_PRECISION, iter_matrices
from rl.types import PlacedImage


class HFDecoder(HFForward, Decoder):
    """Hold a frozen copy of a HF causal LM (PEFT-wrapped or not), which runs the model's code."""

    def __init__(
        self, model: Any, dtype: torch.dtype | None = None, device: torch.device | None = None
    ):
        # Each parameter is cast while it is copied: a copy in the model's dtype may not fit.
        pairs = iter_matrices(model) if dtype in LOW_PRECISION else model.named_parameters()
        cast = {id(p) for _, p in pairs}
        memo: dict[int, Any] = {
            id(p): nn.Parameter(
                p.detach().to(device=device, dtype=dtype if id(p) in cast else None, copy=True),
                requires_grad=False,
            )
            for p in model.parameters()
            if type(p) is nn.Parameter
        }
        model_copy = copy.deepcopy(model, memo).to(device=device)
        for p, copied in zip(model.parameters(), model_copy.parameters(), strict=True):
            if dtype is not None and id(p) in cast:  # parameters of a subclass; no-op for others
                copied.data = copied.data.to(dtype)
        named = model.named_parameters(remove_duplicate=False)
        self._init_from(model_copy, {name for name, p in named if p.requires_grad})

    @classmethod
    def sharing_weights_of(cls, model: Any) -> HFDecoder:
        """Return a decoder that reads the model's weights without a copy, for a short trial of the
        model.
        """
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()
        }
        decoder = cls.__new__(cls)
        decoder._init_from(copy.deepcopy(model, memo), set())
        return decoder

    def _init_from(self, model: Any, trainable: set[str]) -> None:
        self._read_model(model)
        self.trainable = trainable
        self.shares_frozen = False

    def load_(self, named_tensors: NamedTensors) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in named_tensors:
            if name not in parameters:
                raise ValueError(
                    f"no parameter {name!r} in the decoder's model; "
                    f"its names are like {next(iter(parameters))!r}"
                )
            parameter = parameters[name]
            if parameter.shape != tensor.shape:
                raise ValueError(
                    f"{name} has shape {tuple(parameter.shape)} in the decoder, "
                    f"got {tuple(tensor.shape)}"
                )
            if self.shares_frozen and name not in self.trainable:
                check_shared_unchanged(name, parameter, tensor)
                continue
            parameter.detach().copy_(tensor.detach())

    def dtype_of(self, name: str) -> torch.dtype | None:
        try:
            return self.model.get_parameter(name).dtype
        except AttributeError:
            return None

    def fork(self) -> HFDecoder:
        frozen = {
            id(p): p for name, p in self.model.named_parameters() if name not in self.trainable
        }
        other = HFDecoder.__new__(HFDecoder)
        other._init_from(copy.deepcopy(self.model, memo=dict(frozen)), self.trainable)
        other.plan = self.plan
        other.records_experts = self.records_experts
        self.shares_frozen = other.shares_frozen = bool(frozen)
        return other

    def new_state(self, kv_cache_tokens: int) -> DecodeState:
        kinds: dict[str, Callable[[HFDecoder], DecodeState]] = {
            "padded": PaddedState,
            "slots": RecurrentState,
            "equal": EqualLengthState,
            "recompute": RecomputeState,
        }
        return kinds[self.plan.rows](self)

    def read_prompts(self, prompts: Sequence[Prompt]) -> None:
        lengths = [len(prompt.tokens) for prompt in prompts]
        max_tokens, switch = self.max_batch_tokens(reads_all=True), self.length_switch
        if self.plan.reading == "equal":
            batches = self.batch_by_length(lengths, max_tokens)
        else:  # no batch has sequences on both sides of a length at which frequencies change
            beyond = [switch is not None and length > switch.threshold for length in lengths]
            kinds = [(b, bool(prompt.images)) for b, prompt in zip(beyond, prompts, strict=True)]
            batches = batch_prompts(lengths, max_tokens, kinds)
        for members in ([prompts[i] for i in batch] for batch in batches):
            with self.slice_logits(members) as sliced:
                logits = self.plain_forward(
                    [prompt.tokens for prompt in members],
                    last_only=False,
                    images=[prompt.images for prompt in members],
                )
            for row, prompt in enumerate(members):
                if prompt.reader is not None and not sliced:
                    prompt.reader(0, logits[row, : len(prompt.tokens)])

    def check_images(self, prompt: Sequence[int], images: Sequence[PlacedImage]) -> None:
        if not images:
            return
        if self.image_reader is None:
            raise make_no_images_error(self.name)
        if self.plan.rows != "padded":
            raise UserError(
                f"the sampler decodes {self.name} with rows {self.plan.rows}, which does not "
                "support images: train it on text only"
            )
