"""DPO: learn from pairs of answers which of two is preferred, without a reward model (Rafailov et
al., arXiv 2305.18290).

The losses, DPO with its conservative form and IPO, stand in rl.losses.pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from rl.episodes import action_tokens, largest, supervised_datum
from rl.judges import FrozenScorer, check_vocabulary, full_input
from rl.methods.base import EvaluatesRows, Hosts, Models, Progress
from rl.methods.rows import by_tag, cut_to
from rl.methods.steps import adam_params, expert_metrics, substeps
from rl.settings import (
    ModelSettings,
    OptimSettings,
    PreferenceDataSettings,
    Range,
    RowLoopSettings,
    SamplingSettings,
    check_ranges,
    check_substeps,
    only_with,
    without_samples,
)
from rl.types import AdamParams, Datum, Problem, TensorData

ACCURACY = "test/rewards/accuracies"
_AT_ONCE = 512  # datums scored in one call when the reference is precomputed


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """How a preference becomes a gradient."""

    beta: Annotated[float, Range(1e-6, 1e6, why="such as 0.1")] = 0.1
    """How strongly the policy is held to the reference; implicit rewards are beta (log policy - log reference). For ipo the regularisation tau."""
    loss: Literal["dpo", "ipo"] = "dpo"
    """dpo: -log sigmoid of the reward margin (arXiv 2305.18290). ipo: squared distance of the margin to 1 / (2 beta), which does not overfit certain preferences (arXiv 2310.12036)."""
    label_smoothing: Annotated[
        float, Range(0, 0.5, below=True, why="the chance of a wrong label")
    ] = 0.0
    """Chance that a label is wrong, below 0.5 (conservative DPO); with loss dpo."""
    length_normalise: bool | None = None
    """Margins of means over an answer's tokens instead of sums; by default with ipo alone, as its authors do."""
    reference_model: str | None = None
    """A run's folder, model folder, hub name or earlier stage of the recipe to hold the policy to; by default the policy as it was before the first step (under a fresh LoRA adapter: the base with the adapter off, which takes no memory)."""
    reference_free: bool = False
    """No reference: rewards are beta log policy."""
    precompute_reference: bool = False
    """Score every row by the reference once, before the first step, and give its memory back; else each batch as it comes."""

    def __post_init__(self) -> None:
        check_ranges(self)
        only_with(
            self,
            ("label_smoothing",),
            self.loss == "dpo",
            f"the loss is {self.loss}",
            "set loss to dpo",
        )
        if self.reference_free and (self.precompute_reference or self.reference_model):
            other = "reference_model" if self.reference_model else "precompute_reference"
            raise ValueError(
                f"reference_free means no reference, and {other} asks for one: give one of them"
            )


def _loop() -> RowLoopSettings:
    return RowLoopSettings(keep_best=ACCURACY)


@dataclass(frozen=True, kw_only=True)
class DpoSettings:
    """Direct preference optimization: learn which of two answers is preferred."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: PreferenceDataSettings = field(default_factory=PreferenceDataSettings)
    preference: PreferenceSettings = field(default_factory=PreferenceSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    loop: RowLoopSettings = field(default_factory=_loop)

    def __post_init__(self) -> None:
        check_substeps(self)
        without_samples(self, "dpo learns from the data's answers")

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (5e-6 if self.model.lora_rank else 5e-7)


class Dpo(EvaluatesRows):
    """Method class of `dpo`: its training hooks and the models that a run loads for them.
    Subclasses inherit both.
    """

    online = False
    headline = ACCURACY
    reads: Any = staticmethod(lambda settings: ("response", "rejected"))
    needs_reward = False
    ranks_held_out = True

    @staticmethod
    def clients(settings: Any, hosts: Hosts) -> dict[str, Any]:
        """Make the reference, unless there is none."""
        preference = settings.preference
        if preference.reference_free:
            return {}
        if preference.reference_model is None:
            return {"reference": hosts.beginning()}
        reference = hosts.load(preference.reference_model)
        check_vocabulary(hosts.policy, reference, f"reference {preference.reference_model}")
        return {"reference": FrozenScorer(reference)}

    @staticmethod
    def keeps_beginning(settings: Any) -> bool:
        return (
            not settings.preference.reference_free and settings.preference.reference_model is None
        )

    @staticmethod
    def weights(settings: Any) -> list[str]:
        named = settings.preference.reference_model
        return [] if named is None else [named]

    def __init__(self, settings: Any):
        self.settings = settings
        self._reference: dict[Any, np.ndarray] = {}  # precomputed, by prompt and answer

    def begin(self, rows: Iterable[Problem], renderer: Any, models: Models) -> None:
        """With precompute_reference: scores all rows in an order that a resume does not change, and
        lets the reference go.
        """
        if not self.settings.preference.precompute_reference:
            return
        pairs = {
            key: datum
            for row in rows
            for datum in pair_datums(row, renderer, self.settings.data)
            if (key := _key(datum))
        }
        keys, datums = list(pairs), list(pairs.values())
        for i in range(0, len(keys), _AT_ONCE):
            found = models.reference.logprobs(datums[i : i + _AT_ONCE])
            self._reference.update(zip(keys[i : i + _AT_ONCE], found, strict=True))
        models.others.pop("reference").release()

    def datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Two datums a row, the preferred answer's first, with the reference's logprobs of their
        tokens.
        """
        pairs = [datum for row in rows for datum in pair_datums(row, renderer, self.settings.data)]
        settings = self.settings.preference
        if settings.reference_free:
            return pairs
        if settings.precompute_reference:
            scored = [self._precomputed(datum) for datum in pairs]
        else:
            scored = models.reference.logprobs(pairs)
        for datum, logprobs in zip(pairs, scored, strict=True):
            datum.loss_fn_inputs["ref_logprobs"] = TensorData(logprobs, "float32")
        return pairs

    def _precomputed(self, datum: Datum) -> np.ndarray:
        found = self._reference.get(_key(datum))
        if found is None:
            raise ValueError(
                "a row is trained on that was not to be foreseen: leave out precompute_reference"
            )
        return found

    def learn(
        self, models: Models, datums: Sequence[Datum], progress: Progress
    ) -> dict[str, float]:
        """One pass over the pairs; `optim/loss` and `rewards/...` are means over them, taken before
        each update.
        """
        settings, params = self.settings, self._params(progress)
        pairs = [datums[i : i + 2] for i in range(0, len(datums), 2)]
        sums: dict[str, float] = {}
        norms, watched = [], {}
        for i, part in enumerate(substeps(pairs, settings.optim.num_substeps)):
            flat = [datum for pair in part for datum in pair]
            forward = models.policy.forward_backward(
                flat, self._loss(), self._config(), divisor=len(part)
            )
            update = models.policy.optim_step(params).result().metrics or {}
            if i == 0:
                watched = self._watched(
                    flat, [one["logprobs"].array for one in forward.result().loss_fn_outputs]
                )
            for name, value in forward.result().metrics.items():
                sums[name] = sums.get(name, 0.0) + value
            norms.append(update["grad_norm"])
            sums["skipped"] = sums.get("skipped", 0.0) + update.get("skipped_nonfinite", 0.0)
        found = pair_metrics(sums)
        metrics = {
            "optim/lr": params.learning_rate,
            "optim/loss": found.pop("loss"),
            **found,
            "optim/grad_norm": largest(norms),
        }
        metrics |= {"optim/tokens": action_tokens(datums), **expert_metrics(sums), **watched}
        if sums["skipped"]:
            metrics["optim/skipped_nonfinite"] = sums["skipped"]
        return metrics

    def _params(self, progress: Progress) -> AdamParams:
        settings = self.settings
        return adam_params(settings.optim, settings.loop, progress.batch, settings.learning_rate)

    def _watched(self, datums: Sequence[Datum], logprobs: Sequence[Any]) -> dict[str, float]:
        """What the first substep's logprobs tell beside the loss."""
        return {}

    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> dict[str, float]:
        """The same means on held-out pairs, as `test/loss` and `test/rewards/...`."""

        def measured(members: Sequence[Problem]) -> dict[str, float]:
            pairs = self.datums(members, renderer, models, 0)
            return pair_metrics(
                models.policy.forward(pairs, self._loss(), self._config()).result().metrics
            )

        return by_tag(rows, measured)

    def _loss(self) -> str:
        return self.settings.preference.loss

    def _config(self) -> dict[str, float]:
        settings = self.settings.preference
        config = {"beta": settings.beta}
        if settings.length_normalise is not None:
            config["length_normalise"] = float(settings.length_normalise)
        if settings.loss == "dpo":
            config["label_smoothing"] = settings.label_smoothing
        return config

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


def _key(datum: Datum) -> Any:
    whole = full_input(datum)
    return tuple(whole.flat()), whole.placed()


def pair_datums(row: Problem, renderer: Any, data: Any = None) -> list[Datum]:
    """The preferred answer and the other as two datums, whose `mask` is 1 on the tokens of the
    answer and its end.
    """
    datums = []
    for answer in (row.response, row.rejected):
        if answer is None:
            raise ValueError(
                f"row {row.index} of {row.tag} is no pair: it has {'no rejected' if row.response else 'no preferred'} answer"
            )
        model_input, weights = renderer.build_supervised_example(
            [*row.messages, {"role": "assistant", "content": answer}]
        )
        datum = supervised_datum(model_input, weights)
        datum.loss_fn_inputs["mask"] = datum.loss_fn_inputs.pop("weights")
        datums.append(datum if data is None else cut_to(data, datum, row))
    return datums


def pair_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """A pair loss's sums as means over pairs: loss, `rewards/chosen`, `rejected`, `margins`,
    `accuracies`, `logps/...`.
    """
    pairs = max(1.0, sums.get("pairs:sum", 0.0))
    mean = {
        name: sums.get(f"{name}:sum", 0.0) / pairs
        for name in ("loss", "chosen_rewards", "rejected_rewards", "ranked_right")
    }
    return {
        "loss": mean["loss"],
        "rewards/chosen": mean["chosen_rewards"],
        "rewards/rejected": mean["rejected_rewards"],
        "rewards/margins": mean["chosen_rewards"] - mean["rejected_rewards"],
        "rewards/accuracies": mean["ranked_right"],
        "logps/chosen": sums.get("chosen_logps:sum", 0.0) / pairs,
        "logps/rejected": sums.get("rejected_logps:sum", 0.0) / pairs,
    }
