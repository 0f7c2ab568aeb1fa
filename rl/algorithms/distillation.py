"""Implement distillation: a student learns to answer as its teacher does.

On-policy (learn_from student): the student's samples, with the token advantage -(log student - log
teacher), so that the expected gradient is that of the reverse KL(student || teacher) (Agarwal et
al., arXiv 2306.13649; Gu et al., arXiv 2306.08543). Off-policy (learn_from teacher or data):
answers that the teacher sampled, or that the data holds, with
    alpha T^2 KL(teacher_T || student_T) + (1 - alpha) cross-entropy
per token (Hinton et al., arXiv 1503.02531, section 2), where _T is softmax(logits / T) and the
teacher's distribution is that of its `teacher_top_k` most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np

from rl.algorithms.advantages import compute_returns_to_go
from rl.algorithms.method_interface import Method, MethodSettings, ModelFactory, Models, Progress
from rl.algorithms.ppo import EpisodeTokens
from rl.algorithms.row_datums import truncate_datum
from rl.algorithms.sft import make_response_datum
from rl.algorithms.update import (
    LossCall,
    run_updates,
    train_single_pass,
)
from rl.config import (
    DataSettings,
    LoopSettings,
    OptimSettings,
    Range,
    RolloutSettings,
    SamplingSettings,
    Share,
    check_ranges,
    is_api_address,
    reject_sampling_settings,
    require,
)
from rl.errors import UserError
from rl.judges import FrozenScorer
from rl.renderers import renderer_for_row
from rl.rollout import Metrics, TrajectoryGroup, supervised_datum
from rl.seed import derive_seed
from rl.types import Datum, ModelInput, Problem, SamplingParams

if TYPE_CHECKING:
    from rl.client import SamplingClient


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """Configure the teachers and the way to learn from them."""

    teacher: tuple[str, ...] = ()
    """A run's folder, a folder of weights, a hub name, the name of an earlier stage of the recipe, or (learn_from student, temperature 1) the address of an OpenAI-compatible API whose completions echo prompts with logprobs: http://localhost:8000/v1. With several data sets (more_datasets) either a single teacher for all, or DATASET=TEACHER for each."""
    learn_from: Literal["student", "teacher", "data"] = "student"
    """Source of the answers. student: the student's samples, by reverse KL (on-policy). teacher: the teacher's samples. data: the responses in the data."""
    group_size: Annotated[int, Range(1, 10**6)] = 4
    """Answers sampled for each prompt (student, teacher)."""
    kl_discount: Share = 0.0
    """On-policy: a token's advantage also includes later tokens' divergence, multiplied by this per position. 0: only the token's divergence; 1: the gradient of the whole answer's KL, of higher variance."""
    alpha: Share = 0.5
    """Off-policy: weight of the KL to the teacher; the rest is cross-entropy on the answer's tokens."""
    distill_temperature: Annotated[float, Range(1e-3, 100)] = 2.0
    """Off-policy: temperature of both distributions in the KL, which is scaled by its square."""
    teacher_top_k: Annotated[int, Range(1, 10**6)] = 64
    """Off-policy: the teacher's distribution is that of its most likely tokens at each position, this many, renormalized."""

    def __post_init__(self) -> None:
        check_ranges(self)
        on_policy, reason = self.learn_from == "student", f"learn_from is {self.learn_from}"
        require(self, ("kl_discount",), on_policy, reason, "set learn_from to student")
        require(
            self,
            ("alpha", "distill_temperature", "teacher_top_k"),
            not on_policy,
            reason,
            "set learn_from to teacher or data",
        )
        require(
            self,
            ("group_size",),
            self.learn_from != "data",
            reason,
            "set learn_from to student or teacher",
        )

    @property
    def teacher_names(self) -> list[str]:
        """Return the teachers without the data sets, each once."""
        return list(dict.fromkeys(target for _, target in map(split_teacher, self.teacher)))


@dataclass(frozen=True, kw_only=True)
class DistillSettings(MethodSettings):
    """Distillation: learn to answer as a teacher does, from the student's answers or the teacher's."""

    default_learning_rates = (2e-4, 2e-5)

    data: DataSettings = DataSettings(reward=None)
    distillation: DistillationSettings = DistillationSettings()
    sampling: SamplingSettings = SamplingSettings(temperature=1.0)
    optim: OptimSettings = OptimSettings()
    flow: RolloutSettings = RolloutSettings()
    loop: LoopSettings = LoopSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_api_teachers()
        reason = "it selects groups with different rewards, and distill learns from every answer"
        require(self.sampling, ("dynamic_sampling",), False, reason, "use grpo")
        if self.distillation.learn_from != "student":
            reason = (
                f"learn_from is {self.distillation.learn_from}, so the student plays no episodes"
            )
            require(self.flow, ("episodes",), False, reason, "set learn_from to student")
            reject_sampling_settings(
                self, f"with learn_from {self.distillation.learn_from} the student answers nothing"
            )
        elif self.data.reward is None and not self.data.rewards:
            reject_sampling_settings(self, "without a reward nothing scores them")

    def _check_api_teachers(self) -> None:
        """Raise ValueError if a teacher behind an API cannot give what the settings need."""
        for target in self.distillation.teacher_names:
            if not is_api_address(target):
                continue
            if self.distillation.learn_from != "student":
                raise ValueError(
                    f"the teacher {target} only scores the student's answers: set learn_from to student, or name weights"
                )
            if self.sampling.temperature != 1:
                raise ValueError(
                    f"the teacher {target} scores at temperature 1, and temperature is {self.sampling.temperature:g}: set temperature to 1"
                )


def split_teacher(word: str) -> tuple[str, str]:
    """Return (data set, or "" for all, and teacher) of a word of --teacher. An address, or the path
    of a file or folder, may hold a "=" too.
    """
    tag, equals, target = word.partition("=")
    is_target = not equals or is_api_address(word) or Path(word).exists()
    return ("", word) if is_target else (tag, target)


def parse_teachers(settings: DistillSettings) -> dict[str, str]:
    """Return the teacher of each data set ("": all other data sets). Raises UserError if no teacher
    is named, or if a data set has two.
    """
    teachers: dict[str, str] = {}
    for word in settings.distillation.teacher:
        tag, target = split_teacher(word)
        if tag in teachers:
            raise UserError(
                f"two teachers for {tag or 'all data sets'}: {teachers[tag]} and {target}; with several data sets write DATASET=TEACHER"
            )
        teachers[tag] = target
    if not teachers:
        raise UserError(
            "distill needs a teacher: --teacher with a run's folder, a folder of weights or a hub name"
        )
    return teachers


Item = TypeVar("Item", TrajectoryGroup, Problem)


class Distillation(Method):
    """Implement `distill`."""

    Settings = DistillSettings
    summary = "learn to answer as a teacher does, from the student's answers or the teacher's"
    needs_reward = False

    def __init__(self, settings: DistillSettings):
        super().__init__(settings)
        self.options = settings.distillation
        self.online = self.options.learn_from == "student"
        self.reads = ("response",) if self.options.learn_from == "data" else ()
        self.group_size = self.options.group_size
        self._metrics: Metrics = {}

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Load the teachers by data set, each with the student's vocabulary. A teacher that is
        named twice is loaded once.

        Raises UserError if a data set has no teacher, or a teacher no data set.
        """
        named = parse_teachers(self.settings)
        problems = [
            *(f"no teacher for the data set {t}" for t in factory.tags if not {t, ""} & {*named}),
            *(f"unknown data set {tag}" for tag in sorted({*named} - {"", *factory.tags})),
        ]
        if factory.tags and problems:
            raise UserError(
                f"{problems[0]}: --teacher names teachers for {', '.join(named)}, the data sets are "
                f"{', '.join(factory.tags)}"
            )
        loaded = {
            target: factory.load_matching(target, "teacher")
            for target in dict.fromkeys(named.values())
        }
        return {"teachers": {tag: loaded[target] for tag, target in named.items()}}

    # ------------------------------------------------------------------------------------ on-policy

    def compute_advantages(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]:
        """Return datums with each token's advantage: -(log student - log teacher), both as sampled;
        with kl_discount, plus those of later tokens.
        """
        credited: list[Datum] = []
        gaps: list[np.ndarray] = []  # of each episode
        for teacher, members in _group_by_teacher(models, groups):
            episodes = [
                EpisodeTokens(trajectory)
                for group in members
                for trajectory in group.trajectories_G
            ]
            scores = FrozenScorer(teacher).logprobs(
                [datum for episode in episodes for datum in episode.parts],
                self.settings.sampling.temperature,
            )
            scores_D = iter(scores)
            for episode in episodes:
                gaps.append(
                    episode.gather_actions(
                        [d.loss_fn_inputs["logprobs"].array - next(scores_D) for d in episode.parts]
                    )
                )
                returns = compute_returns_to_go(gaps[-1], self.options.kl_discount)
                advantages = -np.asarray(returns)
                episode.trajectory.advantage = float(advantages.mean())
                credited += episode.make_datums(advantages=advantages)
        all_gaps = np.concatenate(gaps)
        # The sum of the gaps of a sequence is an unbiased estimate of KL(student || teacher) over
        # whole answers.
        self._metrics = {
            "teacher/kl_per_token": float(all_gaps.mean()),
            "teacher/kl_per_answer": float(all_gaps.sum() / len(gaps)),
        }
        return credited

    # ----------------------------------------------------------------------------------- off-policy

    def build_datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Return sequences with soft targets [T, K + 1]: the teacher's most likely tokens and, in
        the last column, the answer's token.
        """
        datums: list[Datum] = []
        for client, members in _group_by_teacher(models, rows):
            if self.options.learn_from == "data":
                plain = [
                    truncate_datum(self.settings.data, make_response_datum(row, renderer))
                    for row in members
                ]
            else:
                plain = self._sample_teacher(members, renderer, client, seed)
            datums += make_soft_targets(
                client,
                plain,
                top_k=self.options.teacher_top_k,
                alpha=self.options.alpha,
                temperature=self.options.distill_temperature,
            )
        return datums

    def _sample_teacher(
        self, rows: Sequence[Problem], renderer: Any, teacher: SamplingClient, seed: int
    ) -> list[Datum]:
        """Sample the teacher's answers to the rows, as supervised datums.

        The random stream of a sample is a function of (seed, problem, index in its group), not of
        the other rows of the batch.
        """
        from rl.rollout import assign_random_streams
        from rl.sampler import SamplingRequest

        sampling = self.settings.sampling
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop=renderer.get_stop_sequences(),
        )
        prompts = [
            renderer_for_row(renderer, row).build_generation_prompt(row.messages) for row in rows
        ]
        # rows of two data sets may have the same index
        streams = assign_random_streams([derive_seed(row.tag, row.index) for row in rows])
        requests = [
            SamplingRequest(
                prompt=prompt.token_ids(),
                images=prompt.images_with_positions(),
                num_samples=self.group_size,
                params=params,
                seed=seed,
                problem=stream,
            )
            for stream, prompt in zip(streams, prompts, strict=True)
        ]
        responses, _ = teacher.sample_many(requests).result()
        return [
            supervised_datum(
                ModelInput.of(
                    [*prompt.token_ids(), *sequence.tokens], prompt.images_with_positions()
                ),
                [0.0] * prompt.length + [1.0] * len(sequence.tokens),
            )
            for prompt, response in zip(prompts, responses, strict=True)
            for sequence in response.sequences
        ]

    # ----------------------------------------------------------------------------------------- both

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
        """Update the policy in a single pass. On-policy: importance sampling, the mean over tokens.
        Off-policy: the mixture, as `optim/loss`, `optim/kl`, `optim/ce`.
        """
        settings = self.settings
        if self.online:
            metrics = train_single_pass(
                models,
                datums,
                settings,
                progress,
                loss="importance_sampling",
                config={"temperature": settings.sampling.temperature},
            )
            return {**metrics, **self._metrics}
        totals = run_updates(models, datums, self._make_calls, settings, progress)
        tokens = _count_weighted(datums)
        alpha, t = self.options.alpha, self.options.distill_temperature
        sums = {name: totals.sums[f"{name}_loss:sum"] for name in self._terms}
        if "kl" in sums:  # cross-entropy to the teacher minus the teacher's entropy
            weights = np.concatenate(
                [d.loss_fn_inputs["weights"].array[:, :-1] for d in datums]
            ).astype(np.float64)
            p = weights / (alpha * t**2)
            sums["kl"] += alpha * t**2 * float((p * np.log(np.where(p > 0, p, 1.0))).sum())
        return {
            **totals.summarize(),
            "optim/loss": sum(sums.values()) / tokens,
            "optim/tokens": tokens,
            **{
                f"optim/{name}": sums[name] / factor / tokens
                for name, (factor, _, _) in self._terms.items()
            },
        }

    @property
    def _terms(self) -> dict[str, tuple[float, slice, float]]:
        """Return the mixture's terms as (factor, columns of the soft targets, temperature), without
        those of factor 0.
        """
        alpha, t = self.options.alpha, self.options.distill_temperature
        terms = {
            "kl": (alpha * t**2, slice(None, -1), t),
            "ce": (1 - alpha, slice(-1, None), 1.0),
        }
        return {name: term for name, term in terms.items() if term[0]}

    def _make_calls(self, datums: Sequence[Datum]) -> list[LossCall]:
        """Return the calls of an optimizer step.

        Two temperatures need two forward passes: the soft columns at T, the answer's token at 1.
        """
        tokens = _count_weighted(datums)
        calls = []
        for name, (_, columns, temperature) in self._terms.items():
            part = [
                Datum(
                    datum.model_input,
                    {field: v.array[:, columns] for field, v in datum.loss_fn_inputs.items()},
                )
                for datum in datums
            ]
            config = {"temperature": temperature}
            calls.append(LossCall(part, "cross_entropy", config, tokens, f"{name}_"))
        return calls


def _count_weighted(datums: Sequence[Datum]) -> int:
    """Return the number of positions with a weight."""
    return sum(int((d.loss_fn_inputs["weights"].array != 0).any(1).sum()) for d in datums)


def make_soft_targets(
    teacher: SamplingClient,
    datums: Sequence[Datum],
    *,
    top_k: int,
    alpha: float,
    temperature: float,
) -> list[Datum]:
    """Return supervised datums with targets and weights [T, K + 1].

    Columns 0 to K - 1: the teacher's K most likely tokens x_k with weight alpha T^2 p_k, p =
    softmax over them of log p / T. Column K: the token itself with weight 1 - alpha. Positions of
    weight 0 keep weight 0. With alpha 0 the teacher is not called (K = 1).
    """
    from rl.sampler import SamplingRequest

    if alpha == 0.0:
        pairs_D: list[Any] = [[[(0, 0.0)]] * d.model_input.length for d in datums]
    else:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        requests = [
            SamplingRequest(
                prompt=d.model_input.token_ids(),
                images=d.model_input.images_with_positions(),
                params=params,
                topk_prompt_logprobs=top_k,
                # not fed: the answer may end where the context does
                next_token=int(d.loss_fn_inputs["target_tokens"].array[-1]),
            )
            for d in datums
        ]
        responses, _ = teacher.sample_many(requests).result()
        pairs_D = [(response.topk_prompt_logprobs or [])[1:] for response in responses]
    labeled = []
    for datum, pairs_T in zip(datums, pairs_D, strict=True):
        mask = datum.loss_fn_inputs["weights"].array != 0
        tokens_TK, logprobs_TK = np.moveaxis(np.asarray(pairs_T, dtype=np.float64), 2, 0)
        scaled_TK = logprobs_TK / temperature
        p_TK = np.exp(scaled_TK - scaled_TK.max(1, keepdims=True))
        p_TK *= (alpha * temperature**2) * mask[:, None] / p_TK.sum(1, keepdims=True)
        targets = np.concatenate(
            [tokens_TK.astype(np.int64), datum.loss_fn_inputs["target_tokens"].array[:, None]],
            axis=1,
        )
        weights = np.concatenate([p_TK, ((1 - alpha) * mask)[:, None]], axis=1)
        labeled.append(
            Datum(
                datum.model_input, {"target_tokens": targets, "weights": weights.astype(np.float32)}
            )
        )
    return labeled


# ----------------------------------------------------------------------------------------- teachers


def find_teacher(models: Models, tag: str) -> str:
    """Return the key of a data set's teacher in `models.others["teachers"]`."""
    return tag if tag in models.others["teachers"] else ""


def _group_by_teacher(
    models: Models, items: Sequence[Item]
) -> list[tuple[SamplingClient, list[Item]]]:
    """Return (teacher, its groups or rows) for each teacher key in the order of first use."""
    by_teacher: dict[str, list[Item]] = {}
    for item in items:
        by_teacher.setdefault(find_teacher(models, item.tag), []).append(item)
    return [(models.others["teachers"][name], members) for name, members in by_teacher.items()]
