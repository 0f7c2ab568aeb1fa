"""Implement offline RL: learn from answers that were sampled and rewarded earlier, without
sampling.

loss importance_sampling   off-policy policy gradient: -sum r A, r = policy / behavior
     dro                   DRO, arXiv 2405.19107: -sum [lp A - beta/2 (lp - q)^2]
     bc                    filtered behavior cloning: -sum lp over the best answers
     ilql                  conservative Q-learning on the policy's logits: rl.losses.ilql,
                           arXiv 2206.11871, 2006.04779
lp and q are the logprobs of a token under the policy and under the behavior policy (which sampled
it). A is the answer's reward minus a baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import numpy as np

from rl.algorithms.advantages import ADVANTAGES
from rl.algorithms.method_interface import Method, MethodSettings, ModelFactory, Models, Progress
from rl.algorithms.update import add_loss_inputs, train_single_pass
from rl.config import (
    FINITE,
    DataSettings,
    Inside,
    LoopSettings,
    OptimSettings,
    Range,
    SamplingSettings,
    Share,
    Weight,
    check_ranges,
    reject_sampling_settings,
    require,
)
from rl.data import LengthLimits
from rl.errors import UserError
from rl.renderers import renderer_for_row
from rl.rollout import Metrics, has_signal, supervised_datum
from rl.types import Datum, Problem, StoredAnswer, experts_from_text


@dataclass(frozen=True, kw_only=True)
class RolloutDataSettings(DataSettings):
    """Configure stored answers with rewards, and the problems for tests."""

    dataset: str = ""
    """Stored answers: a run's folder (its rollouts are read), a folder of .jsonl files, a file, or in a recipe an earlier stage's name (its rollouts). Rows as a run writes them, or a prompt with response and reward, or with lists of both."""
    eval_dataset: str | None = None
    """Problems to which the policy samples answers to measure progress (with reward); None: no evaluation."""
    prompt_column: str = "auto"
    """Column of the prompt; auto: prompt, question, problem or instruction, whichever exists."""
    response_column: str | None = None
    """Column of the answer, or of a list of them; by default response, completion, code, output or solution, or their plurals."""
    reward_column: str | None = None
    """Column of the reward, or of a list of them; by default reward, score, is_correct or correct, or their plurals."""
    reward: str | None = None
    """Scores answers to eval_dataset; training uses the rewards of the stored answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_too_long == "cut":
            raise ValueError("stored answers are learned without changes: set on_too_long to skip")
        require(
            self,
            ("stream", "prompt_template", "prompt_suffix"),
            False,
            "stored answers are read without changes",
            "set dataset",
        )
        for name in ("more_datasets", "curriculum"):
            reason = "stored answers are read from a single dataset, without a curriculum"
            require(self, (name,), False, reason, "set dataset")

    def make_prompt_settings(self) -> DataSettings:
        """Return the settings of a data set of prompts, whose columns are not those of the stored
        answers.
        """
        answer_columns = ("prompt_column", "response_column")
        names = {item.name for item in fields(DataSettings)}.difference(answer_columns)
        return DataSettings(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class OfflineLoss:
    """Describe a loss on stored answers.

    name                its entry in `rl.losses.LOSSES`
    options             the settings that only this loss reads
    config              those of them that are also keys of its config
    subtracts_baseline  whether a baseline is subtracted from the rewards
    learns_value        whether it always trains a value head
    selects_answers     whether it learns the best answers, and reads neither rewards nor behavior
                        logprobs of those
    """

    name: str
    options: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    subtracts_baseline: bool = False
    learns_value: bool = False
    selects_answers: bool = False


OFFLINE_LOSSES: dict[str, OfflineLoss] = {
    "dro": OfflineLoss("dro", ("beta",), ("beta",), subtracts_baseline=True),
    "importance_sampling": OfflineLoss("importance_sampling", subtracts_baseline=True),
    "bc": OfflineLoss("cross_entropy", selects_answers=True),
    "ilql": OfflineLoss(
        "ilql",
        ("gamma", "tau", "cql_coef", "expectile"),
        ("tau", "cql_coef", "expectile"),
        learns_value=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """Configure the way stored rewards become gradients."""

    loss: Literal["dro", "importance_sampling", "bc", "ilql"] = "dro"
    """dro: policy gradient with a quadratic pull to the behavior policy (arXiv 2405.19107). importance_sampling: ratios of the policy to the behavior policy. bc: cross-entropy on the best answers. ilql: the logits as a conservative Q-function with a value head (arXiv 2206.11871, 2006.04779)."""
    baseline: Literal["group", "learned", "none"] = "group"
    """Subtracted from rewards (dro, importance_sampling). group: the mean reward of the problem's answers. learned: a value head, trained together with the policy."""
    beta: Weight = 0.05
    """dro: strength of the pull."""
    top_fraction: Annotated[float | None, Range(0, 1, above=True)] = None
    """bc: learn this share of all answers, the best (including answers tied with the worst of them)."""
    reward_threshold: Annotated[float | None, FINITE] = None
    """bc: learn the answers with at least this reward."""
    gamma: Share = 1.0
    """ilql: discount per token."""
    tau: Annotated[float, Range(1e-6, 1e9)] = 0.1
    """ilql: divisor of an advantage of Q that makes it log (policy / behavior policy), in units of reward; smaller values follow Q more sharply."""
    cql_coef: Weight = 0.3
    """ilql: weight of the conservative term, logsumexp Q - Q(a), in units of reward. If it is too small next to a high expectile, answers that are not in the data win."""
    expectile: Inside = 0.7
    """ilql: the value is this expectile of the outcomes of the data's actions: 0.5 their mean, nearer to 1 their best."""
    value_coef: Weight = 0.5
    """Weight of the value loss (baseline learned, ilql)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.loss not in OFFLINE_LOSSES:
            raise ValueError(f"unknown loss {self.loss!r}: expected {', '.join(OFFLINE_LOSSES)}")
        filters = [
            name for name in ("top_fraction", "reward_threshold") if getattr(self, name) is not None
        ]
        if self.loss_spec.selects_answers != (len(filters) == 1):
            raise ValueError(
                f"loss bc needs either top_fraction (such as 0.25) or reward_threshold (such as 1), other losses neither; got loss {self.loss} "
                f"with {' and '.join(filters) or 'neither'}"
            )
        self._check_used()

    def _check_used(self) -> None:
        """Raise ValueError if a setting is set that the loss does not use."""
        reason = f"the loss is {self.loss}"
        with_baseline = [name for name, spec in OFFLINE_LOSSES.items() if spec.subtracts_baseline]
        remedy = f"set loss to {' or '.join(with_baseline)}"
        require(self, ("baseline",), self.loss_spec.subtracts_baseline, reason, remedy)
        for name, spec in OFFLINE_LOSSES.items():
            require(self, spec.options, self.loss == name, reason, f"set loss to {name}")
        require(
            self,
            ("value_coef",),
            self.learns_value,
            f"no value is learned ({reason})",
            "set loss to ilql, or baseline to learned",
        )

    @property
    def loss_spec(self) -> OfflineLoss:
        """Return the description of the loss."""
        return OFFLINE_LOSSES[self.loss]

    @property
    def subtracts_value(self) -> bool:
        """Return whether the baseline of the rewards is a value head."""
        return self.baseline == "learned" and self.loss_spec.subtracts_baseline

    @property
    def learns_value(self) -> bool:
        """Return whether a value head is trained."""
        return self.loss_spec.learns_value or self.subtracts_value

    @property
    def needs_behavior_logprobs(self) -> bool:
        """Return whether the loss uses the behavior logprobs of the answers."""
        return not self.loss_spec.selects_answers


@dataclass(frozen=True, kw_only=True)
class OfflineSettings(MethodSettings):
    """Offline RL: learn from stored answers and their rewards."""

    data: RolloutDataSettings = RolloutDataSettings()
    offline: OfflineOptions = OfflineOptions()
    sampling: SamplingSettings = SamplingSettings(temperature=1.0)
    optim: OptimSettings = OptimSettings()
    loop: LoopSettings = LoopSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_sampling_settings(self, "offline learns from stored answers")


class Offline(Method):
    """Implement `offline`."""

    Settings = OfflineSettings
    summary = "learn from stored answers and their rewards, without sampling"
    reads = ("answers",)
    needs_reward = False

    def __init__(self, settings: OfflineSettings):
        super().__init__(settings)
        self.options = settings.offline
        self.value_head = self.options.learns_value
        self._row_indices: list[int] = []  # the row of each answer of the batch

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the policy as it was at the stage's beginning, at the first answer without
        logprobs. It is then used as the behavior policy.
        """
        if not self.options.needs_behavior_logprobs:
            return {}
        return {"beginning": factory.defer_initial_policy()}

    def describe_data(self, problems: Iterable[Problem], renderer: Any) -> str | None:
        """Return a message about the answers without behavior logprobs, those without recorded
        experts, and the problems whose group baseline leaves no advantage, or None.
        """
        rows = list(problems)
        answers = [answer for row in rows for answer in row.answers]
        messages = []
        unrecorded = sum(answer.experts is None for answer in answers)
        if self.settings.model.router_replay and unrecorded:
            messages.append(
                f"router_replay: {unrecorded} of {len(answers)} stored answers have no "
                "recorded experts and are routed by the router"
            )
        unscored = sum(answer.logprobs is None for answer in answers)
        if self.options.needs_behavior_logprobs and unscored:
            subject = (
                "The stored answers have"
                if unscored == len(answers)
                else f"{unscored} of {len(answers)} stored answers have"
            )
            messages.append(
                f"{subject} no logprobs: the initial policy scores them, as if it had sampled them"
            )
        equal = sum(not has_signal([answer.reward for answer in row.answers]) for row in rows)
        by_group = self.options.baseline == "group" and self.options.loss_spec.subtracts_baseline
        if by_group and equal:
            messages.append(
                f"{equal} of {len(rows)} problems have a single stored answer or equal rewards, so "
                "their advantages are 0 with baseline group: --baseline learned compares answers "
                "to different problems"
            )
        return "; ".join(messages) or None

    def build_datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Return a datum for each stored answer, with the inputs of the loss: `advantages`,
        behavior `logprobs`, `returns`.
        """
        answers = [answer for row in rows for answer in row.answers]
        selects = self.options.loss_spec.selects_answers
        datums = [
            make_stored_answer_datum(row, answer, renderer, "weights" if selects else "mask")
            for row in rows
            for answer in row.answers
        ]
        self._row_indices = [i for i, row in enumerate(rows) for _ in row.answers]
        if selects:
            return datums
        datums = self._add_behavior_logprobs(datums, answers, models)
        if self.options.learns_value:
            values = models.policy.compute_values([d.model_input for d in datums]).result()
            return [
                _set_advantages(d, a.reward - v, a.reward)
                if self.options.subtracts_value
                else self._make_q_datum(d, a.reward, v)
                for d, a, v in zip(datums, answers, values, strict=True)
            ]
        kind = {"group": "mean", "none": "none"}[self.options.baseline]
        credit = [
            float(a)
            for row in rows
            for a in ADVANTAGES[kind].fn([answer.reward for answer in row.answers])
        ]
        return [
            _set_advantages(d, np.full(d.model_input.length, a))
            for d, a in zip(datums, credit, strict=True)
        ]

    def _add_behavior_logprobs(
        self, datums: Sequence[Datum], answers: Sequence[StoredAnswer], models: Models
    ) -> list[Datum]:
        """Add behavior logprobs: those that were stored, else those of the policy as it was at the
        beginning.
        """
        missing = [i for i, answer in enumerate(answers) if answer.logprobs is None]
        scored: dict[int, np.ndarray] = {}
        if missing:
            unscored = [datums[i] for i in missing]
            temperature = self.settings.sampling.temperature
            logprobs_D = models.others["beginning"]().logprobs(unscored, temperature)
            scored = dict(zip(missing, logprobs_D, strict=True))
        completed = []
        for i, (datum, answer) in enumerate(zip(datums, answers, strict=True)):
            active = datum.action_mask
            logprobs = np.zeros(len(active))
            logprobs[active] = scored[i][active] if answer.logprobs is None else answer.logprobs
            completed.append(add_loss_inputs(datum, logprobs=logprobs))
        return completed

    def _make_q_datum(self, datum: Datum, reward: float, values_T: np.ndarray) -> Datum:
        """Return a datum with Q^ = r + gamma V^(next state) at each action as `returns`, and Q^ -
        V^ as `advantages`.
        """
        actions = np.flatnonzero(datum.action_mask)
        values, returns = np.zeros(len(values_T)), np.zeros(len(values_T))
        values[actions] = values_T[actions]
        returns[actions[:-1]] = self.options.gamma * values_T[actions[1:]]
        returns[actions[-1]] = reward
        return add_loss_inputs(datum, advantages=returns - values, returns=returns)

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
        """Update the policy in a single pass over the datums. Return `optim/...` metrics.

        `optim/kl_behaviour_...` compares the behavior policy with the learner. Online methods call
        this metric `optim/kl_sample_train_...` and compare the sampler with the learner.
        """
        settings = self.settings
        metrics = train_single_pass(
            models,
            datums,
            settings,
            progress,
            loss=self.options.loss_spec.name,
            config=self._config(),
            rows=self._row_indices,
        )
        for name in ("optim/max_logprob_difference", "optim/entropy"):
            metrics.pop(name, None)
        return {
            name.replace("kl_sample_train", "kl_behaviour"): value
            for name, value in metrics.items()
        }

    def _config(self) -> dict[str, Any]:
        """Return the config of the loss."""
        options, config = self.options, dict[str, Any]()
        if options.needs_behavior_logprobs:
            config["temperature"] = self.settings.sampling.temperature
        config |= {name: getattr(options, name) for name in options.loss_spec.config}
        if options.learns_value:
            config["value_coef"] = options.value_coef
        return config


def make_stored_answer_datum(
    row: Problem, answer: StoredAnswer, renderer: Any, field: str = "mask"
) -> Datum:
    """Return prompt and answer with the loss input `field` 1 on the answer: the tokens as sampled,
    else the text as the renderer encodes it.
    """
    if answer.tokens is not None and answer.prompt_tokens is not None:
        tokens = [*answer.prompt_tokens, *answer.tokens]
        weights: Any = [0.0] * len(answer.prompt_tokens) + [1.0] * len(answer.tokens)
    else:
        model_input, weights = renderer_for_row(renderer, row).build_supervised_example(
            [*row.messages, {"role": "assistant", "content": answer.text}]
        )
        tokens = model_input.to_ints()
    datum = supervised_datum(tokens, weights, field)
    datum.experts = None if answer.experts is None else experts_from_text(answer.experts)
    return datum


def check_stored_answer(
    settings: OfflineSettings,
    policy_info: Mapping[str, Any],
    renderer: Any,
    row: Problem,
    answer: StoredAnswer,
) -> None:
    """Raise UserError, with file and line, for a stored answer that the policy cannot use."""
    limit, vocabulary = policy_info["max_context"], policy_info["vocab_size"]
    temperature = settings.sampling.temperature
    tokens = [*(answer.prompt_tokens or ()), *(answer.tokens or ())]
    if tokens and max(tokens) >= vocabulary:
        raise UserError(
            f"{answer.place}: token {max(tokens)} is outside the policy's vocabulary of "
            f"{vocabulary} tokens: the answer is from another model"
        )
    reads_logprobs = answer.logprobs is not None and settings.offline.needs_behavior_logprobs
    sampled_at = answer.temperature
    if reads_logprobs and sampled_at is not None and sampled_at != temperature:
        raise UserError(
            f"{answer.place}: its logprobs were sampled at temperature {sampled_at:g}, but this "
            f"run scores at {temperature:g}: set --temperature {sampled_at:g}"
        )
    try:
        length = (
            len(tokens)
            if tokens
            else make_stored_answer_datum(row, answer, renderer).model_input.length + 1
        )
    except UserError as error:
        raise UserError(f"{answer.place}: {error}") from error
    data = settings.data
    limits = LengthLimits.from_settings(data)
    if data.max_prompt_tokens is not None:
        prompt = (
            answer.prompt_tokens
            if answer.prompt_tokens is not None
            else renderer_for_row(renderer, row).build_generation_prompt(row.messages).to_ints()
        )
        if len(prompt) > data.max_prompt_tokens:
            raise limits.limit_error(
                f"{answer.place}: its prompt takes {len(prompt)} tokens, above max_prompt_tokens "
                f"{data.max_prompt_tokens}"
            )
    if data.max_row_tokens is not None and length > data.max_row_tokens:
        raise limits.limit_error(
            f"{answer.place}: prompt and answer take {length} tokens, above max_row_tokens "
            f"{data.max_row_tokens}"
        )
    if limit is not None and length - 1 > limit:
        raise limits.context_error(
            f"{answer.place}: prompt and answer take {length} tokens, but the model's context "
            f"holds {limit}: remove the answer"
        )


def _set_advantages(datum: Datum, advantages_T: np.ndarray, reward: float | None = None) -> Datum:
    """Return the datum with advantages at actions and 0 elsewhere. `reward` is the return of every
    action, if a value is learned.
    """
    active = datum.action_mask
    fields = {"advantages": np.where(active, advantages_T, 0.0)}
    if reward is not None:
        fields["returns"] = np.where(active, reward, 0.0)
    return add_loss_inputs(datum, **fields)
