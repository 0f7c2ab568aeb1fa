"""Token logprobs inside the model's own forward: the output head returns logprobs of given targets,
never the logits.

A model with a value head computes its values there too, from the hidden states that the output head
is given.

The head is swapped only while a call runs, and the call goes through the outermost module, so the
hooks of DDP, DeepSpeed and FSDP see an ordinary forward (a sharded head's weight exists nowhere
else).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.layers import shallow
from rl.models import inner_model, value_head_of, vocabulary_of


@dataclass
class HeadRequest:
    """targets int64 [T] (or [T, K]); token_index int64 [T] into the flattened positions, None for
    all of them.

    All targets lie in [0, V): `Learner.run` has looked at them in host memory. The fused head does
    not, as a GPU's forward would wait. logprobs: False leaves the vocabulary alone and gives zeros
    (who wants values only). likeliest: instead of entropies, 1 where the target is the likeliest
    token, else 0; targets [T], without a gradient.
    """

    targets: Tensor
    token_index: Tensor | None
    temperature: float
    entropy: bool
    logprobs: bool = True
    likeliest: bool = False


_SMALL = 1 << 20  # logits of soft targets that are held whole
_SLAB = 1 << 24  # logits held at once where only the largest is looked for


def _is_likeliest(logits: Tensor, targets: Tensor) -> Tensor:
    """1 where no other of [T, V] is larger than the target's, else 0."""
    return (logits.gather(-1, targets[:, None])[:, 0] >= logits.max(-1).values).float()


def plain_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """fp32 logprobs [T] (or [T, K]) of `targets` and entropies [T] under softmax(logits [T, V] /
    temperature).
    """
    if logits.is_cuda and targets.ndim == 1:
        return kernel_logprobs(logits, targets, temperature, entropy)
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    # Not log_softmax: on a CPU it loses up to 4e-4 over 150,000 tokens in float32, a subtraction of
    # logsumexp does not.
    lse_T = logits.logsumexp(-1, keepdim=True)
    picked = logits.gather(-1, targets if targets.ndim == 2 else targets[:, None]) - lse_T
    if entropy:
        logp_TV = logits - lse_T
        # p log p of an impossible token (-inf) is 0, not NaN
        entropy_T = -(logp_TV.exp() * logp_TV.clamp(min=-1e30)).sum(-1)
    else:
        entropy_T = picked.new_zeros(len(targets))
    return (picked if targets.ndim == 2 else picked[:, 0]), entropy_T


def kernel_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """`plain_logprobs` of [T] targets in one pass over logits of any dtype, without a float32 copy
    of them.
    """
    from kernels import token_logprob

    logp, found, _ = token_logprob(logits, targets, temperature)
    return logp, found if entropy else torch.zeros_like(logp)


def _lora_parts(head: nn.Module) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """(W, bias, A, B, scale) of an output head with one active plain LoRA adapter, None for
    anything else.
    """
    from peft.tuners.lora.layer import Linear as LoraLinear

    if (
        not isinstance(head, LoraLinear)
        or head.disable_adapters
        or len(head.active_adapters) != 1
        or head.merged
    ):
        return None
    name = head.active_adapters[0]
    base: Any = head.get_base_layer()
    parts: Any = head
    if (
        not isinstance(base, nn.Linear)
        or head.use_dora.get(name)
        or not isinstance(head.lora_dropout[name], nn.Identity)
    ):
        return None
    return (
        base.weight,
        base.bias,
        parts.lora_A[name].weight,
        parts.lora_B[name].weight,
        parts.scaling[name],
    )


def _chosen(states: Tensor, request: HeadRequest) -> Tensor:
    """The requested positions of [..., D], as [T, D]."""
    flat = states.reshape(-1, states.shape[-1])
    return flat if request.token_index is None else flat[request.token_index]


@contextlib.contextmanager
def _forward_of(module: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """`module` with another forward inside; its hooks stay."""
    original = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original


class LogprobHead:
    """Makes `model(...)` return logprobs and entropies for a request instead of logits.

    `fused`: through kernels.linear_logprob, which never holds [T, V] where V is large. It is used
    where the head is a plain linear layer (or one with a LoRA adapter) and what the model does to
    its logits afterwards is known; everywhere else the model's own logits are used.
    """

    def __init__(self, model: nn.Module, *, fused: bool = True, kept_bytes: int | None = None):
        self.model, self.kept_bytes = model, kept_bytes
        self.inner = inner_model(model)
        config = self.inner.config.get_text_config()
        self.softcap = config.to_dict().get("final_logit_softcapping")
        self._config = config
        self.value_head = value_head_of(model)
        self.fused = fused and self._agrees()

    @classmethod
    def untried(
        cls, model: nn.Module, *, fused: bool = True, kept_bytes: int | None = None
    ) -> LogprobHead:
        """Without trying the fused head on the model's weights, for models that have none: it is
        used where it fits the head.
        """
        head = cls(model, fused=False, kept_bytes=kept_bytes)
        layer = head.inner.get_output_embeddings()
        head.fused = fused and (isinstance(layer, nn.Linear) or _lora_parts(layer) is not None)
        return head

    def __call__(
        self, wrapped: nn.Module, request: HeadRequest, **model_inputs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(logp [T] or [T, K], entropy [T], values [T] where there is a value head), all fp32.

        `wrapped`: the outermost module around this head's model.
        """
        values: list[Tensor] = []
        if not self.fused and request.logprobs:
            with self._values_beside(request, values):
                logits = wrapped(**model_inputs, use_cache=False).logits
            chosen = _chosen(logits, request)
            logp, entropy = plain_logprobs(
                chosen, request.targets, request.temperature, request.entropy
            )
            entropy = _is_likeliest(chosen, request.targets) if request.likeliest else entropy
        else:
            with self._swapped(request, values):
                out = wrapped(**model_inputs, use_cache=False).logits
            logp, entropy = (out[:, 0] if request.targets.ndim == 1 else out[:, :-1]), out[:, -1]
        return logp, entropy, (values[0] if values else None)

    @contextlib.contextmanager
    def _swapped(self, request: HeadRequest, values: list[Tensor]) -> Iterator[None]:
        head = self.inner.get_output_embeddings()
        if self.softcap is not None:
            # applied inside the head instead; some configs allow no None
            vars(self._config)["final_logit_softcapping"] = None
        try:
            with _forward_of(
                head, lambda hidden: self._head_forward(head, hidden, request, values)
            ):
                yield
        finally:
            if self.softcap is not None:
                self._config.final_logit_softcapping = self.softcap

    @contextlib.contextmanager
    def _values_beside(self, request: HeadRequest, values: list[Tensor]) -> Iterator[None]:
        """The output head as it is, but values are taken on the way."""
        if self.value_head is None:
            yield
            return
        value_head, head = self.value_head, self.inner.get_output_embeddings()
        original = head.forward

        def forward(hidden: Tensor) -> Tensor:
            values.append(value_head(_chosen(hidden, request)))
            return original(hidden)

        with _forward_of(head, forward):
            yield

    def _head_forward(
        self, head: Any, hidden: Tensor, request: HeadRequest, values: list[Tensor]
    ) -> Tensor:
        flat = _chosen(hidden, request)
        if self.value_head is not None:
            values.append(self.value_head(flat))
        if not request.logprobs:
            columns = 1 if request.targets.ndim == 1 else request.targets.shape[1]
            zeros = flat.new_zeros(len(flat), columns + 1, dtype=torch.float32)
            # zeros that hang on the values: ZeRO-3 gathers a layer for the backward only if the
            # model's output is part of it
            return zeros + 0.0 * values[0][:, None] if values else zeros
        lora = _lora_parts(head)
        if lora is not None:
            # W h + s B A h = [W, s B] [h, A h]: one head of a slightly larger hidden size, rows
            # still beginning at 16 bytes
            base, head_bias, a, b, scale = lora
            gap = -(base.shape[1] + len(a)) % 16
            frozen = 0 if base.requires_grad else base.shape[1]
            flat = torch.cat(
                [flat, F.pad(F.linear(flat.to(a.dtype), a).to(flat.dtype), (0, gap))], dim=-1
            )
            weight = torch.cat([base, F.pad((b * scale).to(base.dtype), (0, gap))], dim=-1)
        else:
            weight, head_bias, frozen = head.weight, head.bias, 0
        # soft targets: K logprobs a position
        if request.targets.ndim == 2 and len(flat) * len(weight) > _SMALL:
            from kernels import soft_logprob

            logp, ent = soft_logprob(
                flat, weight, request.targets, head_bias, request.temperature, self.softcap, entropy=request.entropy,
                saved_bytes=self.kept_bytes, frozen_columns=frozen, checked=True,
            )  # fmt: skip
            return torch.cat(
                [logp, (torch.zeros_like(logp[:, 0]) if ent is None else ent)[:, None]], dim=-1
            )
        if request.targets.ndim == 2:
            logits = F.linear(flat, weight, head_bias).float()
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            logp, entropy = plain_logprobs(
                logits, request.targets, request.temperature, request.entropy
            )
            return torch.cat([logp, entropy[:, None]], dim=-1)
        from kernels import linear_logprob

        logp, found, *_ = linear_logprob(
            flat,
            weight,
            request.targets,
            bias=head_bias,
            temperature=request.temperature,
            softcap=self.softcap,
            entropy=request.entropy,
            saved_bytes=self.kept_bytes,
            frozen_columns=frozen,
            checked=True,
        )
        if request.likeliest:  # a rising function of the logits (the softcap) changes no order
            rows = max(1, _SLAB // len(weight))
            pieces = zip(flat.split(rows), request.targets.split(rows), strict=True)
            found = torch.cat([_is_likeliest(F.linear(x, weight, head_bias), y) for x, y in pieces])
        return torch.stack([logp, torch.zeros_like(logp) if found is None else found], dim=-1)

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Whether the fused head gives the model's own logprobs on a few tokens (some models scale
        their logits).
        """
        head = self.inner.get_output_embeddings()
        if head is None or not (isinstance(head, nn.Linear) or _lora_parts(head) is not None):
            return False
        device = next(self.inner.parameters()).device
        vocabulary = vocabulary_of(self.inner)
        ids = torch.arange(8, device=device)[None] % vocabulary
        request = HeadRequest((ids[0] + 1) % vocabulary, None, 1.0, False)
        with shallow(self.model):  # all of its layers come before the head
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
            expected, _ = plain_logprobs(logits, request.targets, 1.0, False)
            with self._swapped(request, []):
                got = self.model(input_ids=ids, use_cache=False).logits[:, 0]
        return bool((got - expected).abs().max() < (1e-3 if logits.dtype == torch.float32 else 0.1))
