"""Offline RL: learn from answers that were sampled and rewarded earlier, without sampling.

loss importance_sampling   -sum r A, r = policy / behaviour                            off-policy
policy gradient
     dro                   -sum [lp A - beta/2 (lp - q)^2]                             DRO, arXiv 2405.19107
     bc                    -sum lp over the best answers                               filtered behaviour cloning
     ilql                  conservative Q-learning on the policy's logits              rl.losses.q, arXiv 2206.11871, 2006.04779
lp and q: log probabilities of a token under the policy and under what drew it; A: the answer's
reward less a baseline.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl.credit import ADVANTAGES
from rl.data import Limits
from rl.episodes import supervised_datum
from rl.errors import UserError
from rl.methods.base import Hosts, Models, Progress
from rl.methods.offline_settings import OfflineSettings
from rl.methods.steps import one_pass, with_fields
from rl.types import Datum, Problem, StoredAnswer, experts_from_text


class Offline:
    """Method class of `offline`: its training hooks and the models that a run loads for them.
    Subclasses inherit both.
    """

    online = False
    reads = staticmethod(lambda settings: ("answers",))
    needs_reward = False

    @staticmethod
    def clients(settings: OfflineSettings, hosts: Hosts) -> dict[str, Any]:
        """Make the policy as it was at the stage's beginning, once answers without logprobs are
        met: it stands for what drew them.
        """
        return {"beginning": functools.cache(hosts.beginning)}

    @staticmethod
    def value_head(settings: OfflineSettings) -> bool:
        how = settings.offline
        return how.loss == "ilql" or (how.loss != "bc" and how.baseline == "learned")

    @staticmethod
    def keeps_beginning(settings: OfflineSettings) -> bool:
        return settings.offline.needs_behaviour

    @staticmethod
    def remark(settings: OfflineSettings, problems: Iterable[Problem]) -> str | None:
        """Say what stands for the logprobs of answers that came without them, and how many answers
        do not tell their experts.
        """
        said = []
        untold = (
            [answer.experts is None for row in problems for answer in row.answers]
            if settings.model.router_replay
            else []
        )
        if any(untold):
            said.append(
                f"router_replay: {sum(untold)} of {len(untold)} stored answers do not say their experts, and are routed as any text"
            )
        without = [answer.logprobs is None for row in problems for answer in row.answers]
        if not settings.offline.needs_behaviour or not any(without):
            return "; ".join(said) or None
        which = (
            "The stored answers have"
            if all(without)
            else f"{sum(without)} of {len(without)} stored answers have"
        )
        said.append(
            f"{which} no logprobs: the policy as it is at the beginning scores them, as if it had drawn them"
        )
        return "; ".join(said)

    def __init__(self, settings: OfflineSettings):
        self.settings, self.how = settings, settings.offline
        self._rows: list[int] = []  # the row of each answer of the batch

    def datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """A datum for each stored answer, with what the loss needs: `advantages`, behaviour
        `logprobs`, `returns`.
        """
        answers = [answer for row in rows for answer in row.answers]
        datums = [answer_datum(row, answer, renderer) for row in rows for answer in row.answers]
        self._rows = [i for i, row in enumerate(rows) for _ in row.answers]
        if self.how.loss == "bc":
            return [_renamed(datum, "mask", "weights") for datum in datums]
        datums = self._with_behaviour(datums, answers, models)
        if self.how.loss == "ilql":
            values = models.policy.compute_values([d.model_input for d in datums]).result()
            return [
                self._q_datum(d, a.reward, v)
                for d, a, v in zip(datums, answers, values, strict=True)
            ]
        if self.how.baseline == "learned":
            values = models.policy.compute_values([d.model_input for d in datums]).result()
            return [
                _credited(d, a.reward - v, a.reward)
                for d, a, v in zip(datums, answers, values, strict=True)
            ]
        kind = {"group": "mean", "none": "none"}[self.how.baseline]
        credit = [
            float(a)
            for row in rows
            for a in ADVANTAGES[kind].fn([answer.reward for answer in row.answers])
        ]
        return [
            _credited(d, np.full(d.model_input.length, a))
            for d, a in zip(datums, credit, strict=True)
        ]

    def _with_behaviour(
        self, datums: Sequence[Datum], answers: Sequence[StoredAnswer], models: Models
    ) -> list[Datum]:
        """The logprobs that were stored; where there are none, those of the policy as it was at the
        beginning.
        """
        missing = [i for i, answer in enumerate(answers) if answer.logprobs is None]
        scored: dict[int, np.ndarray] = {}
        if missing:
            beginning = models.others["beginning"]()
            scored = dict(
                zip(
                    missing,
                    beginning.logprobs(
                        [datums[i] for i in missing], self.settings.sampling.temperature
                    ),
                    strict=True,
                )
            )
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

    def learn(
        self, models: Models, datums: Sequence[Datum], progress: Progress
    ) -> dict[str, float]:
        """One pass. Metrics that compare sampler and learner elsewhere compare here what drew the
        answers: `optim/kl_behaviour_...`.
        """
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
            rows=self._rows,
        )
        for name in ("optim/max_logprob_difference", "optim/entropy"):
            metrics.pop(name, None)
        return {
            name.replace("kl_sample_train", "kl_behaviour"): value
            for name, value in metrics.items()
        }

    def _config(self) -> dict[str, Any]:
        how = self.how
        config: dict[str, Any] = (
            {"temperature": self.settings.sampling.temperature} if how.loss != "bc" else {}
        )
        if how.loss == "ilql":
            return {
                **config,
                "tau": how.tau,
                "cql_coef": how.cql_coef,
                "expectile": how.expectile,
                "value_coef": how.value_coef,
            }
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
    """Prompt and answer with `mask` 1 on the answer: the tokens as they were drawn, else the text
    as the renderer writes it.
    """
    if answer.tokens is not None and answer.prompt_tokens is not None:
        tokens = [*answer.prompt_tokens, *answer.tokens]
        weights: Any = [0.0] * len(answer.prompt_tokens) + [1.0] * len(answer.tokens)
    else:
        model_input, weights = renderer.build_supervised_example(
            [*row.messages, {"role": "assistant", "content": answer.text}]
        )
        tokens = model_input.to_ints()
    datum = _renamed(supervised_datum(tokens, weights), "weights", "mask")
    datum.experts = None if answer.experts is None else experts_from_text(answer.experts)
    return datum


def check_answer(
    settings: OfflineSettings,
    policy_info: Mapping[str, Any],
    renderer: Any,
    row: Problem,
    answer: StoredAnswer,
) -> None:
    """Raises UserError naming, by file and line, a stored answer that the policy cannot learn."""
    limit, vocabulary, temperature = (
        policy_info["max_context"],
        policy_info["vocab_size"],
        settings.sampling.temperature,
    )
    tokens = [*(answer.prompt_tokens or ()), *(answer.tokens or ())]
    if tokens and max(tokens) >= vocabulary:
        raise UserError(
            f"{answer.place}: token {max(tokens)} is none of the policy's {vocabulary}: the answer is another model's"
        )
    drawn_at = (
        answer.temperature
        if answer.logprobs is not None and settings.offline.needs_behaviour
        else None
    )
    if drawn_at is not None and drawn_at != temperature:
        raise UserError(
            f"{answer.place}: drawn at temperature {drawn_at:g}, which its logprobs are of, and this run scores at "
            f"{temperature:g}: give --temperature {drawn_at:g}"
        )
    try:
        length = (
            len(tokens) if tokens else answer_datum(row, answer, renderer).model_input.length + 1
        )
    except UserError as error:
        raise UserError(f"{answer.place}: {error}") from error
    data = settings.data
    limits = Limits.of(data)
    if data.max_prompt_tokens is not None:
        asked = (
            answer.prompt_tokens
            if answer.prompt_tokens is not None
            else renderer.build_generation_prompt(row.messages).to_ints()
        )
        if len(asked) > data.max_prompt_tokens:
            raise limits.refuse(
                f"{answer.place}: its prompt takes {len(asked)} tokens, more than max_prompt_tokens {data.max_prompt_tokens}"
            )
    if data.max_row_tokens is not None and length > data.max_row_tokens:
        raise limits.refuse(
            f"{answer.place}: prompt and answer take {length} tokens, more than max_row_tokens {data.max_row_tokens}"
        )
    if limit is not None and length - 1 > limit:
        raise limits.beyond_context(
            f"{answer.place}: prompt and answer take {length} tokens, the model's context holds {limit}: leave it out"
        )


def _renamed(datum: Datum, old: str, new: str) -> Datum:
    return datum.with_inputs(
        {new if name == old else name: data for name, data in datum.loss_fn_inputs.items()}
    )


def _credited(datum: Datum, advantages_T: np.ndarray, reward: float | None = None) -> Datum:
    """With advantages at actions and 0 elsewhere; `reward`: the return of every action, where a
    value is learnt.
    """
    active = datum.loss_fn_inputs["mask"].array != 0
    fields = {"advantages": np.where(active, advantages_T, 0.0)}
    if reward is not None:
        fields["returns"] = np.where(active, reward, 0.0)
    return with_fields(datum, **fields)
