"""Trajectories to datums (the one place where targets are shifted against inputs), and the check of a datum's form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.episodes import Trajectory
from rl.types import Datum, ModelInput, TensorData


class _Sequence:
    """A growing sequence of tokens with, for each, the sampler's logprob, its advantage and whether it was an action."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[float] = []
        self.advantages: list[float] = []

    def observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.mask += [0.0] * len(tokens)
        self.advantages += [0.0] * len(tokens)

    def act(self, tokens: Sequence[int], logprobs: Sequence[float], advantage: float) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [1.0] * len(tokens)
        self.advantages += [advantage] * len(tokens)

    def datum(self) -> Datum:
        mask = np.asarray(self.mask[1:], dtype=np.float32)
        return Datum(
            model_input=ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": TensorData(self.tokens[1:], "int64"),
                "logprobs": TensorData(self.logprobs[1:], "float32"),
                "advantages": TensorData(np.asarray(self.advantages[1:], dtype=np.float32), "float32"),
                "mask": TensorData(mask, "float32"),
            },
        )


def trajectory_to_datums(trajectory: Trajectory) -> list[Datum]:
    """One datum for a trajectory whose observations each continue what came before; more where they do not.

    The prefix-merge rule: while the next observation starts with everything so far (observations and actions), only
    what is new is appended, so an episode of many turns is one training sequence. Otherwise (a template that drops
    earlier thinking, say) the datum is emitted and a new one starts with the full observation.
    Inputs drop the last token; targets, logprobs, advantages and mask drop the first. Observation positions are 0.
    Each datum says which share of the episode's action tokens it holds: what counts sequences counts episodes by it.
    Raises ValueError for a trajectory without actions or advantage, or an action without logprobs.
    """
    advantage = trajectory.advantage
    if not trajectory.transitions or advantage is None:
        raise ValueError("a trajectory without transitions, or one that was not credited (advantage is None), makes no datum")
    advantages_N = trajectory.advantages_N or [advantage] * len(trajectory.transitions)
    datums: list[Datum] = []
    sequence = _Sequence()
    for transition, own in zip(trajectory.transitions, advantages_N, strict=True):
        observation = transition.ob.to_ints()
        so_far = len(sequence.tokens)
        if so_far and observation[:so_far] == sequence.tokens:
            observation = observation[so_far:]
        elif so_far:
            datums.append(sequence.datum())
            sequence = _Sequence()
        sequence.observe(observation)
        action = transition.ac
        if action.logprobs is None or len(action.logprobs) != len(action.tokens):
            have = None if action.logprobs is None else len(action.logprobs)
            raise ValueError(f"an action of {len(action.tokens)} tokens needs as many logprobs, got {have}")
        sequence.act(action.tokens, action.logprobs, own)
    datums.append(sequence.datum())
    if len(datums) > 1:
        tokens = [action_tokens([datum]) for datum in datums]
        for datum, count in zip(datums, tokens, strict=True):
            datum.episode_share = count / sum(tokens) if any(tokens) else 1 / len(datums)
    return datums


def supervised_datum(tokens: Sequence[int], weights: Sequence[float]) -> Datum:
    """A datum for `cross_entropy`: weights[i] is the weight of predicting tokens[i] (that of the first is dropped)."""
    if len(tokens) != len(weights):
        raise ValueError(f"{len(tokens)} tokens need as many weights, got {len(weights)}")
    if len(tokens) < 2:
        raise ValueError(f"a training sequence has at least two tokens, got {len(tokens)}")
    return Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": TensorData(list(tokens[1:]), "int64"),
            "weights": TensorData(np.asarray(weights[1:]), "float32"),
        },
    )


def action_tokens(datums: Sequence[Datum]) -> int:
    """How many tokens of these datums are trained on: the global count that a token mean divides by."""
    total = 0
    for datum in datums:
        inputs = datum.loss_fn_inputs
        field = inputs["mask"] if "mask" in inputs else inputs.get("weights")
        if field is None:
            raise ValueError(f"the datum has neither 'mask' nor 'weights' (it has {sorted(inputs)}): add the mask of its actions")
        total += int(np.count_nonzero(field.array))
    return total


def check_datum(
    index: int, datum: Datum, *, required: Sequence[str], known: Sequence[str] | None, soft_targets: bool, vocab_size: int
) -> None:
    """Raises ValueError, naming datum `index`, unless the datum fits the loss: fields, lengths, token ids.

    required: fields the loss needs. known: every field it understands (None: any). vocab_size: V, ids lie in [0, V).
    """
    tokens = datum.model_input.to_ints()
    n = len(tokens)
    inputs = datum.loss_fn_inputs
    where = f"datum {index}"
    if n == 0:
        raise ValueError(f"{where} has an empty model_input")
    for name in required:
        if name not in inputs:
            raise ValueError(f"{where} lacks loss_fn_inputs[{name!r}] (it has {sorted(inputs)}); the loss needs {list(required)}")
    for name, data in inputs.items():
        if known is not None and name not in known:
            raise ValueError(f"{where} has the field {name!r}, which this loss does not use; it takes {sorted(known)}")
        soft = soft_targets and name in ("target_tokens", "weights")
        if data.array.ndim != 1 and not (soft and data.array.ndim == 2):
            raise ValueError(f"{where}: {name!r} has shape {data.shape}; it is one value a token{', or (N, K)' if soft else ''}")
        if len(data) != n:
            raise ValueError(_misaligned(where, name, len(data), n))
        if data.dtype == "float32" and name in ("advantages", "weights", "returns") and not np.isfinite(data.array).all():
            raise ValueError(f"{where}: {name!r} holds NaN or infinity: {data.array[~np.isfinite(data.array)][:3].tolist()}")
    if soft_targets and "weights" in inputs and inputs["weights"].shape != inputs["target_tokens"].shape:
        raise ValueError(
            f"{where}: 'weights' of shape {inputs['weights'].shape} for 'target_tokens' of shape {inputs['target_tokens'].shape}"
        )
    targets = inputs["target_tokens"].array
    for name, low, high in (("model_input", min(tokens), max(tokens)), ("target_tokens", targets.min(), targets.max())):
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{where}: {name} holds the id {low if low < 0 else high}; the model's ids are 0 to {vocab_size - 1}")


def _misaligned(where: str, name: str, got: int, n: int) -> str:
    text = f"{where}: {name!r} has {got} values, the model_input has {n} tokens; every field has one value for each input token."
    if got < n:
        pad = n - got
        text += (
            f" If these {got} belong to the completion alone, pad the prompt's positions: "
            f"[0.0] * {pad} + {name} (prompt length - 1 zeros first, since targets are shifted by one)"
        )
    return text
