"""Trajectories to datums (the one place where targets are shifted against inputs), and the check of
a datum's form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl.episodes.episode import Trajectory
from rl.errors import BadRequestError
from rl.types import Datum, ModelInput, PlacedImage, SampledSequence, TensorData
from rl.types.checked import target_ids


class _Sequence:
    """A growing sequence of tokens with, for each, the sampler's logprob, its advantage and whether
    it was an action.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[float] = []
        self.advantages: list[float] = []
        self.versions: list[int] = []  # -1 where nothing was drawn
        self.temperature: float | None = None
        self.beyond = False
        # of the tokens so far, in parts; none where they were not noted
        self.experts: list[np.ndarray] = []
        self.images: list[PlacedImage] = []
        self.turns: list[int] = []  # whose actions it holds

    def note(self, experts: np.ndarray | None) -> None:
        """Those of a turn: of its prompt and answer but for the last token. Each token keeps those
        of the turn that read it first.
        """
        if experts is not None:
            self.experts.append(experts[sum(map(len, self.experts)) :])

    def is_continued(
        self, tokens: Sequence[int], images: Sequence[PlacedImage], action: SampledSequence
    ) -> bool:
        """Whether an observation begins with all of this, image by image, and the action after it
        was drawn in the same way.
        """
        same, so_far = (
            (action.temperature, action.beyond) == (self.temperature, self.beyond),
            len(self.tokens),
        )
        return (
            same
            and list(tokens[:so_far]) == self.tokens
            and [one for one in images if one[0] < so_far] == self.images
        )

    def observe(self, tokens: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """What is new of an observation, and all of its images."""
        self.images = list(images)
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.mask += [0.0] * len(tokens)
        self.advantages += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def act(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        advantage: float,
        versions: Sequence[int],
    ) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [1.0] * len(tokens)
        self.advantages += [advantage] * len(tokens)
        self.versions += versions

    def datum(self) -> Datum:
        mask = np.asarray(self.mask[1:], dtype=np.float32)
        drew = {*self.versions[1:]} - {-1}
        several = len(drew) > 1  # what one version drew needs no label a token
        versions = (
            {"versions": TensorData(np.asarray(self.versions[1:], dtype=np.float32), "float32")}
            if several
            else {}
        )
        return Datum(
            model_input=ModelInput.of(self.tokens[:-1], self.images),
            loss_fn_inputs={
                "target_tokens": TensorData(self.tokens[1:], "int64"),
                "logprobs": TensorData(self.logprobs[1:], "float32"),
                "advantages": TensorData(
                    np.asarray(self.advantages[1:], dtype=np.float32), "float32"
                ),
                "mask": TensorData(mask, "float32"),
                **versions,
            },
            temperature=self.temperature,
            experts=np.concatenate(self.experts)
            if sum(map(len, self.experts)) == len(self.tokens) - 1
            else None,
            version=None if several else next(iter(drew), None),
        )


def trajectory_to_datums(trajectory: Trajectory) -> list[Datum]:
    """One datum for a trajectory whose observations each continue what came before; more where they
    do not.

    The prefix-merge rule: where the next observation starts with all of an earlier sequence
    (observations and actions), the longest such, only what is new is appended, so an episode of
    many turns is one training sequence, and one of several conversations that take turns is a
    sequence each. Otherwise (a template that drops earlier thinking, say), or where an action was
    drawn at another temperature or by other rotary frequencies (longrope's beyond the original
    length), a new one starts with the full observation. Where several versions of the weights drew
    it, "versions" says which drew each token (-1: none). Inputs drop the last token; targets,
    logprobs, advantages and mask drop the first. Observation positions are 0. Each datum says which
    share of the episode's action tokens it holds: what counts sequences counts episodes by it.
    Raises ValueError for a trajectory without actions or advantage, or an action without logprobs.
    """
    return datums_with_turns(trajectory)[0]


def datums_with_turns(trajectory: Trajectory) -> tuple[list[Datum], list[list[int]]]:
    """Return the datums of `trajectory_to_datums`, and for each the turns (counted from 0) whose
    actions it holds, in order.
    """
    advantage = trajectory.advantage
    if not trajectory.transitions or advantage is None:
        raise ValueError(
            "a trajectory without transitions, or one that was not credited (advantage is None), makes no datum"
        )
    advantages_N = trajectory.advantages_N or [advantage] * len(trajectory.transitions)
    sequences: list[_Sequence] = []
    for turn, (transition, own) in enumerate(
        zip(trajectory.transitions, advantages_N, strict=True)
    ):
        observation, images, action = transition.ob.flat(), transition.ob.placed(), transition.ac
        continued = [one for one in sequences if one.is_continued(observation, images, action)]
        if continued:
            sequence = max(continued, key=lambda one: len(one.tokens))
            observation = observation[len(sequence.tokens) :]
        else:
            sequence = _Sequence()
            sequences.append(sequence)
        sequence.observe(observation, images)
        sequence.temperature, sequence.beyond = action.temperature, action.beyond
        if action.logprobs is None or len(action.logprobs) != len(action.tokens):
            have = None if action.logprobs is None else len(action.logprobs)
            raise ValueError(
                f"an action of {len(action.tokens)} tokens needs as many logprobs, got {have}"
            )
        sequence.act(
            action.tokens,
            action.logprobs,
            own,
            action.versions or [action.version or 0] * len(action.tokens),
        )
        sequence.note(action.experts)
        sequence.turns.append(turn)
    datums = [sequence.datum() for sequence in sequences]
    if len(datums) > 1:
        tokens = [action_tokens([datum]) for datum in datums]
        for datum, count in zip(datums, tokens, strict=True):
            datum.episode_share = count / sum(tokens) if any(tokens) else 1 / len(datums)
    return datums, [sequence.turns for sequence in sequences]


def supervised_datum(sequence: ModelInput | Sequence[int], weights: Sequence[float]) -> Datum:
    """A datum for `cross_entropy`: weights[i] is the weight of predicting token i of the sequence
    (that of the first is dropped).
    """
    tokens, images = (
        (sequence.flat(), sequence.placed()) if isinstance(sequence, ModelInput) else (sequence, ())
    )
    if len(tokens) != len(weights):
        raise ValueError(f"{len(tokens)} tokens need as many weights, got {len(weights)}")
    if len(tokens) < 2:
        raise ValueError(f"a training sequence has at least two tokens, got {len(tokens)}")
    return Datum(
        model_input=ModelInput.of(list(tokens[:-1]), images),
        loss_fn_inputs={
            "target_tokens": TensorData(list(tokens[1:]), "int64"),
            "weights": TensorData(np.asarray(weights[1:]), "float32"),
        },
    )


def action_tokens(datums: Sequence[Datum]) -> int:
    """How many tokens of these datums are trained on: the global count that a token mean divides
    by.
    """
    total = 0
    for datum in datums:
        inputs = datum.loss_fn_inputs
        field = inputs["mask"] if "mask" in inputs else inputs.get("weights")
        if field is None:
            raise ValueError(
                f"the datum has neither 'mask' nor 'weights' (it has {sorted(inputs)}): add the mask of its actions"
            )
        total += int(np.count_nonzero(field.array))
    return total


def check_datum(
    index: int,
    datum: Datum,
    *,
    required: Sequence[str],
    known: Sequence[str] | None,
    soft_targets: bool,
    vocab_size: int,
    max_context: int | None = None,
) -> None:
    """Raises ValueError, naming datum `index`, unless the datum fits the loss and the model:
    fields, lengths, ids, finite numbers.

    required: fields the loss needs. known: every field it understands (None: any). vocab_size: V,
    ids lie in [0, V). max_context: tokens that the model reads at most (None: not limited).
    """
    inputs = datum.loss_fn_inputs
    where = f"datum {index}"
    n = len(checked_ids(f"{where}: model_input", datum.model_input, vocab_size))
    if max_context is not None and n > max_context:
        raise BadRequestError(f"{where} has {n} tokens, the model's context holds {max_context}")
    for name in required:
        if name not in inputs:
            raise BadRequestError(
                f"{where} lacks loss_fn_inputs[{name!r}] (it has {sorted(inputs)}); the loss needs {list(required)}"
            )
    for name, data in inputs.items():
        if known is not None and name not in known:
            raise BadRequestError(
                f"{where} has the field {name!r}, which this loss does not use; it takes {sorted(known)}"
            )
        soft = soft_targets and name in ("target_tokens", "weights")
        if data.array.ndim != 1 and not (soft and data.array.ndim == 2 and data.array.shape[1] > 0):
            raise BadRequestError(
                f"{where}: {name!r} has shape {data.shape}; it is one value a token{', or (N, K)' if soft else ''}"
            )
        if len(data) != n:
            raise BadRequestError(_misaligned(where, name, len(data), n))
    if (
        soft_targets
        and "weights" in inputs
        and inputs["weights"].shape != inputs["target_tokens"].shape
    ):
        raise BadRequestError(
            f"{where}: 'weights' of shape {inputs['weights'].shape} for 'target_tokens' of shape {inputs['target_tokens'].shape}"
        )
    _check_finite(where, inputs)
    target_ids(where, inputs["target_tokens"].array, vocab_size)


def checked_ids(what: str, model_input: ModelInput, vocab_size: int) -> list[int]:
    """The token ids of an input. Raises ValueError where it is none, is empty, or holds what is no
    id of the model's.
    """
    if not isinstance(model_input, ModelInput):
        raise BadRequestError(
            f"{what} is a types.ModelInput, such as ModelInput.from_ints([1, 2, 3]); got {type(model_input).__name__}"
        )
    try:
        tokens = model_input.flat()
    except (TypeError, AttributeError) as error:
        raise BadRequestError(
            f"{what} is made of chunks of token ids (types.EncodedTextChunk), got {model_input!r:.120}"
        ) from error
    if not len(tokens):
        raise BadRequestError(
            f"{what} is empty: a model reads at least one token (a BOS token, say)"
        )
    array = _as_array(tokens)
    if array is None or array.dtype.kind not in "iu" or array.ndim != 1:
        token = next(
            (
                t
                for t in tokens
                if isinstance(t, bool) or not isinstance(t, (int, np.integer)) or abs(t) >= 2**63
            ),
            tokens,
        )
        raise BadRequestError(
            f"{what} holds {token!r} ({type(token).__name__}); token ids are whole numbers from 0 to {vocab_size - 1}"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise BadRequestError(
            f"{what} holds the id {wrong}; the model's ids are 0 to {vocab_size - 1}"
        )
    return tokens


def _as_array(tokens: Sequence[int]) -> np.ndarray | None:
    """None where the tokens make no array (rows of unequal lengths, say)."""
    try:
        return np.asarray(tokens)
    except (ValueError, OverflowError):
        return None


# Fields that count at every position; the others are read where the mask (or, without one, the
# advantage) is not 0.
_EVERYWHERE = ("weights", "advantages", "returns", "mask", "sequence_ratio_mask", "value_weights")


def _check_finite(where: str, inputs: Mapping[str, TensorData]) -> None:
    """Raises ValueError for a NaN or an infinity where it would be read. An upper threshold may be
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
        array = data.array if name in _EVERYWHERE or active is None else data.array[active]
        fine = np.isfinite(array) | ((array == np.inf) & (name == "clip_high_threshold"))
        if not fine.all():
            hint = (
                " (a token of probability 0 cannot have been sampled)"
                if name.endswith("logprobs")
                else ""
            )
            raise BadRequestError(
                f"{where}: {name!r} holds NaN or infinity{hint}: {array[~fine][:3].tolist()}"
            )


def _misaligned(where: str, name: str, got: int, n: int) -> str:
    text = f"{where}: {name!r} has {got} values, the model_input has {n} tokens; every field has one value for each input token."
    if got < n:
        pad = n - got
        text += (
            f" If these {got} belong to the completion alone, pad the prompt's positions: "
            f"[0.0] * {pad} + {name} (prompt length - 1 zeros first, since targets are shifted by one)"
        )
    return text
