"""Convert trajectories to datums (the only place where targets are shifted against inputs), and
check the form of a datum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.errors import BadRequestError
from rl.rollout.rollout_types import Trajectory
from rl.types import Datum, ModelInput, PlacedImage, SampledSequence, TensorData
from rl.types.number_checks import validate_target_ids


class _DatumBuilder:
    """Collect a growing sequence of tokens, with the sampler's logprob, the advantage and the
    action mask of each token, as arrays of each observation and action.
    """

    def __init__(self) -> None:
        self.length = 0  # number of tokens so far
        self._tokens: list[np.ndarray] = []
        # (number of tokens, their values or the value of all) of each observation and action;
        # versions are -1 at tokens that were not sampled
        self._columns: dict[str, list[tuple[int, np.ndarray | float]]] = {
            name: [] for name in ("logprobs", "advantages", "mask", "versions")
        }
        self._versions: set[int] = set()  # of the sampled targets
        self.temperature: float | None = None
        self.long_rope = False
        # experts of the tokens so far, in parts; empty if the sampler did not record them
        self.experts: list[np.ndarray] = []
        self.images: list[PlacedImage] = []
        self.turns: list[int] = []  # indices of the turns with actions in the sequence

    def tokens(self) -> np.ndarray:
        """Return all tokens so far, int64."""
        if len(self._tokens) != 1:
            self._tokens = [np.concatenate([np.zeros(0, np.int64), *self._tokens])]
        return self._tokens[0]

    def is_prefix_of(
        self, tokens: np.ndarray, images: Sequence[PlacedImage], action: SampledSequence
    ) -> bool:
        """Return whether an observation begins with this whole sequence, including the images, and
        the next action was sampled at the same temperature and rotary frequencies.
        """
        same = (action.temperature, action.beyond) == (self.temperature, self.long_rope)
        return (
            same
            and np.array_equal(tokens[: self.length], self.tokens())
            and [image for image in images if image[0] < self.length] == self.images
        )

    def append_observation(self, tokens: np.ndarray, images: Sequence[PlacedImage] = ()) -> None:
        """Append the new tokens of an observation, and replace the images by all images of the
        observation.
        """
        self.images = list(images)
        self._append(tokens, 0.0, -1)

    def append_action(self, action: SampledSequence, turn: int, advantage: float) -> None:
        """Append the action of a turn. Raises ValueError if it lacks logprobs."""
        tokens, logprobs = np.asarray(action.as_array("tokens"), np.int64), action.logprobs_np
        if logprobs is None or len(logprobs) != len(tokens):
            received = None if logprobs is None else len(logprobs)
            raise ValueError(
                f"an action of {len(tokens)} tokens needs as many logprobs, got {received}"
            )
        versions: Any = action.as_array("versions")
        versions = (action.version or 0) if versions is None or not len(versions) else versions
        begin = 0 if self.length else 1  # no target is the first token of a sequence
        if len(tokens) > begin:
            known = isinstance(versions, (int, np.integer))
            self._versions |= {versions} if known else {*np.unique(versions[begin:]).tolist()}
            self._versions.discard(-1)
        self._append(tokens, logprobs, versions, mask=1.0, advantage=advantage)
        self.temperature, self.long_rope = action.temperature, action.beyond
        self.turns.append(turn)
        # `experts` covers the turn's prompt and answer except the last token. Each token keeps
        # the experts of the first turn that read it.
        if action.experts is not None:
            self.experts.append(action.experts[sum(map(len, self.experts)) :])

    def _append(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray | float,
        versions: np.ndarray | int,
        mask: float = 0.0,
        advantage: float = 0.0,
    ) -> None:
        """Append tokens with their values, which are arrays or the same number for all of them."""
        self.length += len(tokens)
        self._tokens.append(tokens)
        values = (logprobs, advantage, mask, versions)
        for parts, value in zip(self._columns.values(), values, strict=True):
            parts.append((len(tokens), value))

    def build(self) -> Datum:
        """Return the datum: inputs without the last token, targets and per-token values without the
        first.
        """
        tokens, columns = self.tokens(), self._columns
        tokens.flags.writeable = False  # the input is a view of it
        several = len(self._versions) > 1  # tokens of a single version need no label each
        if not several:
            columns = {name: parts for name, parts in columns.items() if name != "versions"}
        with np.errstate(over="ignore"):
            values = {
                name: TensorData._of(_fill_float32(parts, self.length)[1:])
                for name, parts in columns.items()
            }
        return Datum(
            model_input=ModelInput.of(tokens[:-1], self.images),
            loss_fn_inputs={"target_tokens": TensorData._of(tokens[1:].copy()), **values},
            temperature=self.temperature,
            experts=np.concatenate(self.experts)
            if sum(map(len, self.experts)) == self.length - 1
            else None,
            version=None if several else next(iter(self._versions), None),
        )


def _fill_float32(parts: Sequence[tuple[int, np.ndarray | float]], length: int) -> np.ndarray:
    """Return the values of parts (number of tokens, values or value) as float32 [length]. Beyond
    its range they become infinite, which the losses check for.
    """
    column, begin = np.empty(length, np.float32), 0
    for count, value in parts:
        column[begin : begin + count] = value
        begin += count
    return column


def record_advantages(trajectory: Trajectory, advantages: float | Sequence[float]) -> None:
    """Record the advantage of all turns, or of each, in a trajectory."""
    if np.ndim(advantages):
        trajectory.advantages_N = [float(advantage) for advantage in advantages]  # type: ignore[union-attr]
        trajectory.advantage = trajectory.advantages_N[0]
    else:
        trajectory.advantage, trajectory.advantages_N = float(advantages), None  # type: ignore[arg-type]


def trajectory_to_datums(
    trajectory: Trajectory, advantages: float | Sequence[float] | None = None
) -> list[Datum]:
    """Return a single datum if each observation continues the preceding tokens, otherwise several
    datums.

    The prefix-merge rule: if the next observation starts with all of an earlier sequence
    (observations and actions; the longest match counts), only the new tokens are appended.
    Therefore an episode of many turns is a single training sequence, and an episode of several
    interleaved conversations is a sequence for each conversation. A new sequence starts with the
    full observation if no earlier sequence matches (e.g. a template that drops earlier thinking),
    or if an action was sampled at another temperature or with other rotary frequencies (those of
    longrope beyond the original length). If several weight versions sampled the actions, "versions"
    holds the version of each token (-1: not sampled). Inputs drop the last token; targets,
    logprobs, advantages and mask drop the first. These values are 0 at observation positions.
    `episode_share` of each datum is its share of the episode's action tokens: losses that count
    sequences count episodes by it.

    `advantages` is a number for all turns or a number for each turn. It is recorded in the
    trajectory, which the rollout files show; by default the recorded advantages are used. So are
    the datums (`Trajectory.datums`), each with the turns whose actions it holds.

    Raises ValueError for a trajectory without actions or advantage, or an action without logprobs.
    """
    if advantages is not None:
        record_advantages(trajectory, advantages)
    advantage = trajectory.advantage
    if not trajectory.transitions or advantage is None:
        raise ValueError(
            "a trajectory without transitions or without an advantage (advantage is None) has no "
            "datum"
        )
    advantages_N = trajectory.advantages_N or [advantage] * len(trajectory.transitions)
    sequences: list[_DatumBuilder] = []
    for turn, (transition, turn_advantage) in enumerate(
        zip(trajectory.transitions, advantages_N, strict=True)
    ):
        observation, images = transition.ob.token_array(), transition.ob.images_with_positions()
        continued = [s for s in sequences if s.is_prefix_of(observation, images, transition.ac)]
        if continued:
            sequence = max(continued, key=lambda candidate: candidate.length)
        else:
            sequence = _DatumBuilder()
            sequences.append(sequence)
        sequence.append_observation(observation[sequence.length :], images)
        sequence.append_action(transition.ac, turn, turn_advantage)
    datums = [sequence.build() for sequence in sequences]
    if len(datums) > 1:
        tokens = [count_action_tokens([datum]) for datum in datums]
        for datum, count in zip(datums, tokens, strict=True):
            datum.episode_share = count / sum(tokens) if any(tokens) else 1 / len(datums)
    turns_D = [sequence.turns for sequence in sequences]
    trajectory.datums = list(zip(datums, turns_D, strict=True))
    return datums


def supervised_datum(
    sequence: ModelInput | Sequence[int],
    weights: Sequence[float] | np.ndarray,
    field: str = "weights",
) -> Datum:
    """Return a datum for `cross_entropy`. weights[i] is the weight of predicting token i of the
    sequence (the weight of the first token is dropped). `field`: the loss input of the weights,
    "mask" for losses that read actions.
    """
    tokens, images = (
        (sequence.token_ids(), sequence.images_with_positions())
        if isinstance(sequence, ModelInput)
        else (sequence, ())
    )
    if len(tokens) != len(weights):
        raise ValueError(f"{len(tokens)} tokens need as many weights, got {len(weights)}")
    if len(tokens) < 2:
        raise ValueError(f"a training sequence has at least two tokens, got {len(tokens)}")
    return Datum(
        model_input=ModelInput.of(list(tokens[:-1]), images),
        loss_fn_inputs={
            "target_tokens": TensorData(list(tokens[1:]), "int64"),
            field: TensorData(np.asarray(weights[1:]), "float32"),
        },
    )


def count_action_tokens(datums: Sequence[Datum]) -> int:
    """Return the number of trained tokens in the datums: the global count that a token mean divides
    by.
    """
    total = 0
    for datum in datums:
        inputs = datum.loss_fn_inputs
        field = inputs["mask"] if "mask" in inputs else inputs.get("weights")
        if field is None:
            raise ValueError(
                f"the datum has neither 'mask' nor 'weights' (it has {sorted(inputs)}): add the "
                f"mask of its actions"
            )
        total += int(np.count_nonzero(field.array))
    return total


def check_datum(
    index: int,
    datum: Datum,
    *,
    required: Sequence[str],
    accepted: Sequence[str] | None,
    soft_targets: bool,
    vocab_size: int,
    max_context: int | None = None,
) -> None:
    """Raise ValueError, naming datum `index`, unless the datum fits the loss and the model: fields,
    lengths, ids, finite numbers.

    required: fields that the loss needs. accepted: every field that the loss accepts (None: any).
    vocab_size: V, ids lie in [0, V). max_context: maximum number of tokens that the model reads
    (None: not limited).
    """
    inputs = datum.loss_fn_inputs
    where = f"datum {index}"
    n = len(_validate_token_array(f"{where}: model_input", datum.model_input, vocab_size))
    if max_context is not None and n > max_context:
        raise BadRequestError(f"{where} has {n} tokens, the model's context holds {max_context}")
    for name in required:
        if name not in inputs:
            raise BadRequestError(
                f"{where} lacks loss_fn_inputs[{name!r}] (it has {sorted(inputs)}); the loss needs "
                f"{list(required)}"
            )
    for name, data in inputs.items():
        if accepted is not None and name not in accepted:
            raise BadRequestError(
                f"{where} has the field {name!r}, which this loss does not use; it takes "
                f"{sorted(accepted)}"
            )
        soft = soft_targets and name in ("target_tokens", "weights")
        if data.array.ndim != 1 and not (soft and data.array.ndim == 2 and data.array.shape[1] > 0):
            raise BadRequestError(
                f"{where}: {name!r} has shape {data.shape}; expected a value for each "
                f"token{', or (N, K)' if soft else ''}"
            )
        if len(data) != n:
            pad = n - len(data)
            hint = (
                f" If these {len(data)} values cover only the completion, pad the prompt's "
                f"positions: [0.0] * {pad} + {name} (prompt length - 1 zeros first, since targets "
                "are shifted by one)"
            )
            raise BadRequestError(
                f"{where}: {name!r} has {len(data)} values, the model_input has {n} tokens; every "
                f"field needs a value for each input token.{hint if pad > 0 else ''}"
            )
    if (
        soft_targets
        and "weights" in inputs
        and inputs["weights"].shape != inputs["target_tokens"].shape
    ):
        raise BadRequestError(
            f"{where}: 'weights' of shape {inputs['weights'].shape} for 'target_tokens' of shape "
            f"{inputs['target_tokens'].shape}"
        )
    _check_finite(where, inputs)
    validate_target_ids(where, inputs["target_tokens"].array, vocab_size)


def validate_token_ids(label: str, model_input: ModelInput, vocab_size: int) -> list[int]:
    """Return the token ids of an input. Raises ValueError if the input is not a ModelInput, is
    empty, or holds a value that is not a token id of the model.
    """
    _validate_token_array(label, model_input, vocab_size)
    return model_input.token_ids()


def _validate_token_array(label: str, model_input: ModelInput, vocab_size: int) -> np.ndarray:
    """Return what `validate_token_ids` returns as an array. Raises the same errors."""
    if not isinstance(model_input, ModelInput):
        raise BadRequestError(
            f"{label} must be a types.ModelInput, such as ModelInput.from_ints([1, 2, 3]); got "
            f"{type(model_input).__name__}"
        )
    try:
        tokens: Any = model_input.held_tokens()
    except (TypeError, AttributeError) as error:
        raise BadRequestError(
            f"{label} must consist of chunks of token ids (types.EncodedTextChunk), got "
            f"{model_input!r:.120}"
        ) from error
    if not len(tokens):
        raise BadRequestError(
            f"{label} is empty: a model reads at least one token (a BOS token, say)"
        )
    array: np.ndarray | None = None
    with contextlib.suppress(ValueError, OverflowError):  # no array, such as rows of other lengths
        array = np.asarray(tokens)
    if array is None or array.dtype.kind not in "iu" or array.ndim != 1:
        token = next(
            (
                t
                for t in tokens
                if isinstance(t, bool)
                or not isinstance(t, (int, np.integer))
                or abs(int(t)) >= 2**63
            ),
            tokens,
        )
        raise BadRequestError(
            f"{label} holds {token!r} ({type(token).__name__}); token ids are whole numbers from 0 "
            f"to {vocab_size - 1}"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise BadRequestError(
            f"{label} holds the id {wrong}; the model's ids are 0 to {vocab_size - 1}"
        )
    return array


# Fields that are read at every position. The other fields are read where the mask (without a mask:
# the advantage) is not 0.
_UNMASKED_FIELDS = (
    "weights",
    "advantages",
    "returns",
    "mask",
    "sequence_ratio_mask",
    "value_weights",
)


def _check_finite(label: str, inputs: Mapping[str, TensorData]) -> None:
    """Raise ValueError for NaN or infinity at a position that is read. An upper threshold may be
    infinite: no bound.
    """
    active = next(
        (
            inputs[name].array != 0
            for name in ("mask", "sequence_ratio_mask", "advantages")
            if name in inputs
        ),
        None,
    )
    for name, data in inputs.items():
        if data.dtype != "float32":
            continue
        array = data.array if name in _UNMASKED_FIELDS or active is None else data.array[active]
        fine = np.isfinite(array)
        if name == "clip_high_threshold":
            fine |= array == np.inf
        if not fine.all():
            hint = (
                " (a token of probability 0 cannot have been sampled)"
                if name.endswith("logprobs")
                else ""
            )
            raise BadRequestError(
                f"{label}: {name!r} holds NaN or infinity{hint}: {array[~fine][:3].tolist()}"
            )
