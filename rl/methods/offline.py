"""Offline RL: learn from answers that were sampled and rewarded earlier, without sampling.

loss importance_sampling   -sum r A, r = policy / behaviour                            off-policy policy gradient
     dro                   -sum [lp A - beta/2 (lp - q)^2]                             DRO, arXiv 2405.19107
     bc                    -sum lp over the best answers                               filtered behaviour cloning
     ilql                  conservative Q-learning on the policy's logits              rl.q_losses, arXiv 2206.11871, 2006.04779
lp and q: log probabilities of a token under the policy and under what drew it; A: the answer's reward less a baseline.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rl.advantages import WITHIN_GROUP
from rl.datums import supervised_datum
from rl.errors import UserError
from rl.methods.base import Hosts, Models, Progress, one_pass, with_fields
from rl.setting_checks import only_with, without_samples
from rl.settings import DataSettings, LoopSettings, ModelSettings, OptimSettings, SamplingSettings
from rl.types import Datum, Problem, StoredAnswer


@dataclass(frozen=True, kw_only=True)
class RolloutDataSettings(DataSettings):
    """Stored answers with rewards, and problems to be tested on."""

    dataset: str = ""
    """Stored answers: a run's folder (its rollouts are read), a folder of .jsonl files, one file, or in a recipe an earlier stage's name (its rollouts). Rows as a run writes them, or a prompt with response and reward, or with lists of both."""
    eval_dataset: str | None = None
    """Problems whose answers are sampled to measure what was learnt (with reward); None: nothing is."""
    prompt_column: str = "auto"
    """Column of the prompt; auto: prompt, question, problem or instruction, whichever is there."""
    response_column: str | None = None
    """Column of the answer, or of a list of them; by default response, completion, code, output or solution, or their plurals."""
    reward_column: str | None = None
    """Column of the reward, or of a list of them; by default reward, score, is_correct or correct, or their plurals."""
    reward: str | None = None
    """Scores answers to eval_dataset; the stored answers' own rewards are what is learnt from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("more_datasets", "curriculum"):
            why = "stored answers are read from one dataset, without a curriculum"
            only_with(self, (name,), False, why, "give dataset")


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """How stored rewards become gradients."""

    loss: Literal["dro", "importance_sampling", "bc", "ilql"] = "dro"
    """dro: policy gradient with a quadratic pull to what drew the answers (arXiv 2405.19107). importance_sampling: ratios of the policy to that. bc: cross-entropy on the best answers. ilql: the logits as a conservative Q-function beside a value head (arXiv 2206.11871, 2006.04779)."""
    baseline: Literal["group", "learned", "none"] = "group"
    """Subtracted from rewards (dro, importance_sampling). group: the mean reward of the problem's answers. learned: a value head, trained along with the policy."""
    beta: float = 0.05
    """dro: strength of the pull."""
    top_fraction: float | None = None
    """bc: learn the best such share of all answers (ties with the worst of them included)."""
    reward_threshold: float | None = None
    """bc: learn the answers with at least this reward."""
    gamma: float = 1.0
    """ilql: discount a token."""
    tau: float = 0.1
    """ilql: what an advantage of Q is divided by to become log (policy / what drew the answers), in units of reward; smaller follows Q more sharply."""
    cql_coef: float = 0.3
    """ilql: weight of the conservative term, logsumexp Q - Q(a), in units of reward. Too small beside a high expectile, and answers that are not in the data win."""
    expectile: float = 0.7
    """ilql: the value is this expectile of what the data's actions lead to: 0.5 their mean, nearer to 1 their best."""
    value_coef: float = 0.5
    """Weight of the value's loss (baseline learned, ilql)."""

    def __post_init__(self) -> None:
        filters = [name for name in ("top_fraction", "reward_threshold") if getattr(self, name) is not None]
        if (self.loss == "bc") != (len(filters) == 1):
            raise ValueError(
                f"loss bc needs one of top_fraction (such as 0.25) and reward_threshold (such as 1), other losses neither; got loss {self.loss} "
                f"with {' and '.join(filters) or 'neither'}"
            )
        if self.top_fraction is not None and not 0 < self.top_fraction <= 1:
            raise ValueError(f"top_fraction lies above 0 and up to 1, got {self.top_fraction}")
        for name in ("beta", "cql_coef", "value_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")
        if not self.tau > 0:
            raise ValueError(f"tau is positive, such as 0.1, got {self.tau}")
        if not 0 < self.expectile < 1 or not 0 <= self.gamma <= 1:
            raise ValueError(f"expectile lies between 0 and 1 and gamma from 0 to 1, got {self.expectile} and {self.gamma}")
        self._check_used()

    def _check_used(self) -> None:
        learns_value = self.loss == "ilql" or (self.baseline == "learned" and self.loss != "bc")
        why = f"the loss is {self.loss}"
        only_with(self, ("baseline",), self.loss in ("dro", "importance_sampling"), why, "set loss to dro or importance_sampling")
        only_with(self, ("beta",), self.loss == "dro", why, "set loss to dro")
        only_with(self, ("gamma", "tau", "cql_coef", "expectile"), self.loss == "ilql", why, "set loss to ilql")
        only_with(self, ("value_coef",), learns_value, f"no value is learnt ({why})", "set loss to ilql, or baseline to learned")

    @property
    def needs_behaviour(self) -> bool:
        """Whether it matters how likely the answers were to whoever gave them."""
        return self.loss != "bc"


@dataclass(frozen=True, kw_only=True)
class OfflineSettings:
    """Offline RL: learn from stored answers and their rewards."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: RolloutDataSettings = field(default_factory=RolloutDataSettings)
    offline: OfflineOptions = field(default_factory=OfflineOptions)
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(temperature=1.0))
    optim: OptimSettings = field(default_factory=OptimSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        if self.loop.batch_size % self.optim.num_substeps:
            raise ValueError(f"batch_size {self.loop.batch_size} is no multiple of num_substeps {self.optim.num_substeps}")
        without_samples(self, "offline learns from stored answers")

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (4e-5 if self.model.lora_rank else 1e-6)


def has_value_head(settings: OfflineSettings) -> bool:
    how = settings.offline
    return how.loss == "ilql" or (how.loss != "bc" and how.baseline == "learned")


def clients(settings: OfflineSettings, hosts: Hosts) -> dict[str, Any]:
    """The policy as it was at the stage's beginning, made where answers without logprobs are met: it stands for what drew them."""
    return {"beginning": functools.cache(hosts.beginning)}


class Offline:
    """The hooks of `offline`."""

    online = False

    def __init__(self, settings: OfflineSettings):
        self.settings, self.how = settings, settings.offline

    def datums(self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int) -> list[Datum]:
        """A datum for each stored answer, with what the loss needs: `advantages`, behaviour `logprobs`, `returns`."""
        answers = [answer for row in rows for answer in row.answers]
        datums = [answer_datum(row, answer, renderer) for row in rows for answer in row.answers]
        if self.how.loss == "bc":
            return [_renamed(datum, "mask", "weights") for datum in datums]
        datums = self._with_behaviour(datums, answers, models)
        if self.how.loss == "ilql":
            values = models.policy.compute_values([d.model_input for d in datums]).result()
            return [self._q_datum(d, a.reward, v) for d, a, v in zip(datums, answers, values, strict=True)]
        if self.how.baseline == "learned":
            values = models.policy.compute_values([d.model_input for d in datums]).result()
            return [_credited(d, a.reward - v, a.reward) for d, a, v in zip(datums, answers, values, strict=True)]
        kind = {"group": "mean", "none": "none"}[self.how.baseline]
        credit = [float(a) for row in rows for a in WITHIN_GROUP[kind]([answer.reward for answer in row.answers])]
        return [_credited(d, np.full(d.model_input.length, a)) for d, a in zip(datums, credit, strict=True)]

    def _with_behaviour(self, datums: Sequence[Datum], answers: Sequence[StoredAnswer], models: Models) -> list[Datum]:
        """The logprobs that were stored; where there are none, those of the policy as it was at the beginning."""
        missing = [i for i, answer in enumerate(answers) if answer.logprobs is None]
        scored: dict[int, np.ndarray] = {}
        if missing:
            beginning = models.others["beginning"]()
            scored = dict(zip(missing, beginning.logprobs([datums[i] for i in missing], self.settings.sampling.temperature), strict=True))
        found = []
        for i, (datum, answer) in enumerate(zip(datums, answers, strict=True)):
            active = datum.loss_fn_inputs["mask"].array != 0
            logprobs = np.zeros(len(active))
            logprobs[active] = scored[i][active] if answer.logprobs is None else answer.logprobs
            found.append(with_fields(datum, logprobs=logprobs))
        return found

    def _q_datum(self, datum: Datum, reward: float, values_T: np.ndarray) -> Datum:
        """Q^ = r + gamma V^(next state) at each action, as `returns`, and Q^ - V^ as `advantages`."""
        actions = np.flatnonzero(datum.loss_fn_inputs["mask"].array)
        own, returns = np.zeros(len(values_T)), np.zeros(len(values_T))
        own[actions] = values_T[actions]
        returns[actions[:-1]] = self.how.gamma * values_T[actions[1:]]
        returns[actions[-1]] = reward
        return with_fields(datum, advantages=returns - own, returns=returns)

    def learn(self, models: Models, datums: Sequence[Datum], progress: Progress) -> dict[str, float]:
        """One pass. Metrics that compare sampler and learner elsewhere compare here what drew the answers: `optim/kl_behaviour_...`."""
        settings, how = self.settings, self.how
        metrics = one_pass(
            models,
            datums,
            loss="cross_entropy" if how.loss == "bc" else how.loss,
            config=self._config(),
            normalise="tokens",
            optim=settings.optim,
            loop=settings.loop,
            progress=progress,
            peak=settings.learning_rate,
        )
        for name in ("optim/max_logprob_difference", "optim/entropy"):
            metrics.pop(name, None)
        return {name.replace("kl_sample_train", "kl_behaviour"): value for name, value in metrics.items()}

    def _config(self) -> dict[str, Any]:
        how = self.how
        config: dict[str, Any] = {"temperature": self.settings.sampling.temperature} if how.loss != "bc" else {}
        if how.loss == "ilql":
            return {**config, "tau": how.tau, "cql_coef": how.cql_coef, "expectile": how.expectile, "value_coef": how.value_coef}
        if how.loss == "dro":
            config["beta"] = how.beta
        if how.baseline == "learned" and how.loss != "bc":
            config["value_coef"] = how.value_coef
        return config

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


def answer_datum(row: Problem, answer: StoredAnswer, renderer: Any) -> Datum:
    """Prompt and answer with `mask` 1 on the answer: the tokens as they were drawn, else the text as the renderer writes it."""
    if answer.tokens is not None and answer.prompt_tokens is not None:
        tokens = [*answer.prompt_tokens, *answer.tokens]
        weights: Any = [0.0] * len(answer.prompt_tokens) + [1.0] * len(answer.tokens)
    else:
        model_input, weights = renderer.build_supervised_example([*row.messages, {"role": "assistant", "content": answer.text}])
        tokens = model_input.to_ints()
    return _renamed(supervised_datum(tokens, weights), "weights", "mask")


def check_answers(settings: OfflineSettings, problems: Iterable[Problem], policy_info: Mapping[str, Any], renderer: Any) -> None:
    """Raises UserError naming, by file and line, the first stored answer that the policy cannot learn."""
    limit, vocabulary, temperature = policy_info["max_context"], policy_info["vocab_size"], settings.sampling.temperature
    for row in problems:
        for answer in row.answers:
            tokens = [*(answer.prompt_tokens or ()), *(answer.tokens or ())]
            if tokens and max(tokens) >= vocabulary:
                raise UserError(f"{answer.place}: token {max(tokens)} is none of the policy's {vocabulary}: the answer is another model's")
            drawn_at = answer.temperature if answer.logprobs is not None and settings.offline.needs_behaviour else None
            if drawn_at is not None and drawn_at != temperature:
                raise UserError(
                    f"{answer.place}: drawn at temperature {drawn_at:g}, which its logprobs are of, and this run scores at "
                    f"{temperature:g}: give --temperature {drawn_at:g}"
                )
            length = len(tokens) if tokens else answer_datum(row, answer, renderer).model_input.length + 1
            if limit is not None and length - 1 > limit:
                raise UserError(f"{answer.place}: prompt and answer take {length} tokens, the model's context holds {limit}: leave it out")


def remark(settings: OfflineSettings, problems: Iterable[Problem]) -> str | None:
    """What stands for the probabilities of answers that came without them."""
    without = [answer.logprobs is None for row in problems for answer in row.answers]
    if not settings.offline.needs_behaviour or not any(without):
        return None
    which = "The stored answers have" if all(without) else f"{sum(without)} of {len(without)} stored answers have"
    return f"{which} no logprobs: the policy as it is at the beginning scores them, as if it had drawn them"


def _renamed(datum: Datum, old: str, new: str) -> Datum:
    return Datum(datum.model_input, {new if name == old else name: data for name, data in datum.loss_fn_inputs.items()})


def _credited(datum: Datum, advantages_T: np.ndarray, reward: float | None = None) -> Datum:
    """With advantages at actions and 0 elsewhere; `reward`: the return of every action, where a value is learnt."""
    active = datum.loss_fn_inputs["mask"].array != 0
    fields = {"advantages": np.where(active, advantages_T, 0.0)}
    if reward is not None:
        fields["returns"] = np.where(active, reward, 0.0)
    return with_fields(datum, **fields)
