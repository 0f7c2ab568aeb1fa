"""Compute token logprobs inside the model's forward.

The output head returns the logprobs of the requested targets, never the logits. A model with a
value head computes its values in the same place, from the hidden states passed to the output head.

The head is replaced only during a call, and the call runs through the outermost module, so the
hooks of DDP, DeepSpeed and FSDP see an ordinary forward (a sharded head's weight exists only inside
it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.layers import replace_forward, truncated_layers
from rl.models import get_value_head, get_vocab_size, unwrap_model


@dataclass
class HeadRequest:
    """Describe the outputs requested from the output head.

    targets: int64 [T] (or [T, K]). token_index: int64 [T] into the flattened positions, None for
    all of them. All targets lie in [0, V): `Learner.run` has checked them in host memory. The fused
    head does not check, since a GPU's forward would have to wait. logprobs: False skips the
    vocabulary and returns zeros (for callers that need values only). argmax_match: return instead
    of entropies 1 where the target is the most likely token, else 0; targets [T], without a
    gradient.
    entropy_gradient: False returns entropies without a gradient, and the gradient of the logprobs
    is bit for bit that of a request without entropies. active_rows: int64 [N], ascending, the only
    tokens that may have a gradient; the backward of the fused head costs nothing for others. None:
    it finds them, for which it waits for a GPU.
    """

    targets: Tensor
    token_index: Tensor | None
    temperature: float
    entropy: bool
    logprobs: bool = True
    argmax_match: bool = False
    entropy_gradient: bool = True
    active_rows: Tensor | None = None


_SMALL_LOGITS = 1 << 20  # logits of soft targets up to which all are held in memory
_MAX_LOGITS = 1 << 24  # logits held at once when only the largest is needed


def _is_argmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Return 1 if no logit of a row of [T, V] is larger than the target's, else 0."""
    return (logits.gather(-1, targets[:, None])[:, 0] >= logits.max(-1).values).float()


def compute_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return fp32 logprobs [T] (or [T, K]) of `targets` and entropies [T].

    The distribution is softmax(logits [T, V] / temperature). All targets lie in [0, V).
    """
    if logits.is_cuda and targets.ndim == 1:
        return compute_logprobs_with_kernel(logits, targets, temperature, entropy)
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    # log_softmax loses up to 4e-4 over 150,000 tokens in float32 on a CPU; subtracting logsumexp
    # does not.
    lse_T = logits.logsumexp(-1, keepdim=True)
    picked = logits.gather(-1, targets if targets.ndim == 2 else targets[:, None]) - lse_T
    if entropy:
        logp_TV = logits - lse_T
        # p log p of an impossible token (-inf) is 0, not NaN
        entropy_T = -(logp_TV.exp() * logp_TV.clamp(min=-1e30)).sum(-1)
    else:
        entropy_T = picked.new_zeros(len(targets))
    return (picked if targets.ndim == 2 else picked[:, 0]), entropy_T


def compute_logprobs_with_kernel(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Compute `compute_logprobs` of [T] targets in a single pass over logits of any dtype.

    It makes no float32 copy of the logits. The targets are not checked: a GPU would have to wait.
    """
    from kernels import token_logprob

    logp, entropy_T, _ = token_logprob(logits, targets, temperature, checked=True)
    return logp, entropy_T if entropy else torch.zeros_like(logp)


def _augment_for_lora(head: Any, flat: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return the inputs [T, D'] and the weight [V, D'] of one product that includes LoRA, the bias
    and the number of frozen columns of the weight.

    W h + s B A h = [W, s B] [h, A h]: a single head of a slightly larger hidden size, with rows
    still aligned to 16 bytes. Without LoRA, D' = D.
    """
    lora = _unpack_lora_head(head)
    if lora is None:
        return flat, head.weight, head.bias, 0
    base, bias, a, b, scale = lora
    gap = -(base.shape[1] + len(a)) % 16
    frozen = 0 if base.requires_grad else base.shape[1]
    flat = torch.cat([flat, F.pad(F.linear(flat.to(a.dtype), a).to(flat.dtype), (0, gap))], dim=-1)
    weight = torch.cat([base, F.pad((b * scale).to(base.dtype), (0, gap))], dim=-1)
    return flat, weight, bias, frozen


def _unpack_lora_head(
    head: nn.Module,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """Return (W, bias, A, B, scale) of an output head with a single active plain LoRA adapter.

    Return None for any other head.
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


def _select_positions(states: Tensor, request: HeadRequest) -> Tensor:
    """Return the requested positions of [..., D], as [T, D]."""
    flat = states.reshape(-1, states.shape[-1])
    return flat if request.token_index is None else flat[request.token_index]


class LogprobHead:
    """Make `model(...)` return logprobs and entropies for a request instead of logits.

    `fused`: use kernels.linear_logprob, which never holds [T, V] if V is large. It requires a head
    that is a plain linear layer (or one with a LoRA adapter) and a known transformation of its
    logits; otherwise the model's logits are used. `check`: False trusts the transformation, for a
    model without weights, on which it cannot be checked.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fused: bool = True,
        kept_bytes: int | None = None,
        check: bool = True,
    ):
        self.model, self.kept_bytes = model, kept_bytes
        self.inner = unwrap_model(model)
        config = self.inner.config.get_text_config()
        self.softcap = config.to_dict().get("final_logit_softcapping")
        self._config = config
        self.value_head = get_value_head(model)
        self.fused = fused and self._has_linear_head() and (not check or self._matches_model())

    def _has_linear_head(self) -> bool:
        """Return whether the output head is a plain linear layer, or one with a LoRA adapter."""
        layer = self.inner.get_output_embeddings()
        return isinstance(layer, nn.Linear) or _unpack_lora_head(layer) is not None

    def __call__(
        self, wrapped: nn.Module, request: HeadRequest, **model_inputs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (logp [T] or [T, K], entropy [T], values [T] or None), all fp32.

        Values are None without a value head. `wrapped`: the outermost module around this head's
        model.
        """
        values: list[Tensor] = []
        if not self.fused and request.logprobs:
            with self._collect_values(request, values):
                logits = wrapped(**model_inputs, use_cache=False).logits
            selected = _select_positions(logits, request)
            logp, entropy = compute_logprobs(
                selected, request.targets, request.temperature, request.entropy
            )
            entropy = _is_argmax(selected, request.targets) if request.argmax_match else entropy
        else:
            with self._replace_head(request, values):
                out = wrapped(**model_inputs, use_cache=False).logits
            logp, entropy = (out[:, 0] if request.targets.ndim == 1 else out[:, :-1]), out[:, -1]
        entropy = entropy if request.entropy_gradient else entropy.detach()
        return logp, entropy, (values[0] if values else None)

    @contextlib.contextmanager
    def _replace_head(self, request: HeadRequest, values: list[Tensor]) -> Iterator[None]:
        """Replace the output head's forward so that it returns logprobs."""
        head = self.inner.get_output_embeddings()
        if self.softcap is not None:
            # The head applies the softcap instead; some configs do not accept None.
            vars(self._config)["final_logit_softcapping"] = None
        try:
            with replace_forward(
                head, lambda hidden: self._head_forward(head, hidden, request, values)
            ):
                yield
        finally:
            if self.softcap is not None:
                self._config.final_logit_softcapping = self.softcap

    @contextlib.contextmanager
    def _collect_values(self, request: HeadRequest, values: list[Tensor]) -> Iterator[None]:
        """Keep the output head and collect values from its input."""
        if self.value_head is None:
            yield
            return
        value_head, head = self.value_head, self.inner.get_output_embeddings()
        original = head.forward

        def forward(hidden: Tensor) -> Tensor:
            values.append(value_head(_select_positions(hidden, request)))
            return original(hidden)

        with replace_forward(head, forward):
            yield

    def _head_forward(
        self, head: Any, hidden: Tensor, request: HeadRequest, values: list[Tensor]
    ) -> Tensor:
        """Return [T, 2] or [T, K + 1]: the logprobs, then the entropy, from hidden states."""
        flat = _select_positions(hidden, request)
        if self.value_head is not None:
            values.append(self.value_head(flat))
        if not request.logprobs:
            columns = 1 if request.targets.ndim == 1 else request.targets.shape[1]
            zeros = flat.new_zeros(len(flat), columns + 1, dtype=torch.float32)
            # The zeros depend on the values: ZeRO-3 gathers a layer for the backward only if the
            # model's output is in the graph.
            return zeros + 0.0 * values[0][:, None] if values else zeros
        logp, token_stats = self._score_targets(*_augment_for_lora(head, flat), request)
        logp = logp[:, None] if logp.ndim == 1 else logp
        token_stats = torch.zeros_like(logp[:, 0]) if token_stats is None else token_stats
        # Without detach, the last column gets a gradient of zeros, which the head would compute.
        token_stats = token_stats if request.entropy_gradient else token_stats.detach()
        return torch.cat([logp, token_stats[:, None]], dim=-1)

    def _score_targets(
        self,
        flat: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        frozen_columns: int,
        request: HeadRequest,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logprobs of the targets, and the entropies or matches [T]; None without
        either.
        """
        soft = request.targets.ndim == 2
        if soft and len(flat) * len(weight) <= _SMALL_LOGITS:
            logits = F.linear(flat, weight, bias).float()
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            return compute_logprobs(logits, request.targets, request.temperature, request.entropy)
        from kernels import linear_logprob, topk_target_logprob

        compute: Callable[..., Any] = topk_target_logprob if soft else linear_logprob
        logp, token_stats, *_ = compute(
            flat,
            weight,
            request.targets,
            bias,
            request.temperature,
            self.softcap,
            entropy=request.entropy,
            saved_bytes=self.kept_bytes,
            frozen_columns=frozen_columns,
            checked=True,
            active_rows=request.active_rows,
        )
        # The softcap is increasing in the logits, so it does not change their order.
        if request.argmax_match:
            rows = max(1, _MAX_LOGITS // len(weight))
            pieces = zip(flat.split(rows), request.targets.split(rows), strict=True)
            token_stats = torch.cat([_is_argmax(F.linear(x, weight, bias), y) for x, y in pieces])
        return logp, token_stats

    @torch.no_grad()
    def _matches_model(self) -> bool:
        """Return whether the fused head reproduces the model's logprobs on a few tokens.

        Some models scale their logits.
        """
        device = next(self.inner.parameters()).device
        vocabulary = get_vocab_size(self.inner)
        ids = torch.arange(8, device=device)[None] % vocabulary
        request = HeadRequest((ids[0] + 1) % vocabulary, None, 1.0, False)
        with truncated_layers(
            self.model
        ):  # the check does not depend on the layers before the head
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
            expected, _ = compute_logprobs(logits, request.targets, 1.0, False)
            with self._replace_head(request, []):
                got = self.model(input_ids=ids, use_cache=False).logits[:, 0]
        return bool((got - expected).abs().max() < (1e-3 if logits.dtype == torch.float32 else 0.1))
