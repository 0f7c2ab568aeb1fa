"""Sample what a stage learns from: enough answers to problems, without those that cannot be learned
from. The timing decisions are recorded in the run's folder, so that a replay is bit-identical. A
replay that differs in more than settings without an effect is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS, Models
from rl.client import SampleScorerHandle, SampleStream, SamplingClient, ServiceClient
from rl.config import (
    CHANGEABLE_OPTIONS,
    CHANGEABLE_SETTINGS,
    DataSettings,
    RolloutSettings,
    RunConfig,
    RunSettings,
    diff_configs,
    resolve_config,
)
from rl.data import Curriculum, ProblemSet
from rl.envs import EnvironmentSpec, ProblemGroupBuilder
from rl.errors import UserError
from rl.jsonl import format_json_line, read_jsonl, write_jsonl
from rl.judges import add_episode_rewards, apply_learned_rewards
from rl.renderers import Renderer
from rl.reporting import Console, Logbook, load_saved_config
from rl.rewards import RankScores, Scorer, get_reward_machines
from rl.rollout import (
    ActionSampler,
    EnvGroupBuilder,
    EventLog,
    ReplayedEventLog,
    RolloutBatch,
    RolloutEngine,
    RolloutSchedule,
    ScorerSettings,
    is_mixed,
    list_turns,
    open_engine,
    rollout,
)
from rl.sanitize import describe_error
from rl.seed import derive_seed
from rl.trainer.checkpoint_manager import CheckpointManager
from rl.trainer.resume import use_current_names
from rl.trainer.stage_data import PreparedStage, build_episode_groups, spreads_rewards
from rl.trainer.stage_models import OpponentModels
from rl.types import Problem, SamplingParams
from rl.types.feature_table import check_features

# The members of CHANGEABLE_SETTINGS that affect rounding: they determine the order of sums, and
# after a checkpoint caches are computed again.
ROUNDING_SETTINGS = (
    "token_budget",
    "layout",
    "context_parallel_size",
    "expert_parallel_size",
    "gradient_checkpointing",
    "fused_logprobs",
    "kept_logits_gib",
    "kv_cache_tokens",
    "max_rows",
    "sampler_tp",
    "num_speculative_tokens",
    "save_every",
)
DECISIONS_FILE = "decisions.jsonl"
EVALUATION_PARTS = ("test ", "greedy ")  # begin the names of the parts that are evaluations


def check_replay_sampler(run: RunConfig) -> None:
    """Raise UserError for a replay with a sampler whose samples cannot be repeated."""
    kinds = {stage.settings.sampling.sampler for stage in run.stages}
    if run.options.replay is not None and "vllm" in kinds:
        check_features(("vllm", "replay"))


def check_replay(run: RunConfig, warn: Callable[[str], None]) -> None:
    """Check a replay before anything is loaded.

    Raises UserError if the folder has no event log. Warns if settings differ, so that the replay
    cannot be bit-identical.
    """
    if differs := list_replay_differences(run):
        warn(
            f"this replay of {find_event_log(run.options.replay).parent} will not be "
            f"bit-identical, because settings differ: {'; '.join(differs)}"
        )


def list_replay_differences(run: RunConfig) -> list[str]:
    """Return the settings that keep a replay from being bit-identical, a line for each; [] if `run`
    replays none.
    """
    if run.options.replay is None:
        return []
    config = load_saved_config(find_event_log(run.options.replay).parent)
    flows = [getattr(stage.settings, "flow", None) for stage in run.stages]
    ignored = {*CHANGEABLE_OPTIONS, *CHANGEABLE_SETTINGS} - {*ROUNDING_SETTINGS}
    if not any(getattr(flow, "max_steps_off_policy", 0) for flow in flows):
        ignored.add("save_every")
    config = {**config, "stages": use_current_names(config, run)}
    return diff_configs(
        config, resolve_config(run), ignore=tuple(ignored), methods=METHODS, options=RunSettings
    )


def find_event_log(replay: str | Path) -> Path:
    """Return the path of the event log in a run's folder. Raises UserError if it has none."""
    path = Path(os.path.expanduser(replay)) / DECISIONS_FILE
    if not path.is_file():
        raise UserError(
            f"replay {replay}: the folder has no {DECISIONS_FILE}, which runs write with "
            "--rollout-mode async or settings that require it"
        )
    return path


class ReplayLog:
    """Hold the event log of a stage.

    `done` is the number of its batches that are trained already; recorded events of later batches
    belong to no checkpoint and are removed. `replay` is the folder of the run to
    replay. `replays_evaluations`: its evaluations too, which have to be of the same settings.
    Raises UserError if that folder has no event log.
    """

    def __init__(
        self,
        folder: Path,
        stage: str,
        done: int,
        replay: Path | None = None,
        *,
        replays_evaluations: bool = True,
    ):
        self.path, self.stage = folder / DECISIONS_FILE, stage
        self.batch = done
        # written even if all rows stay: the last line may be unfinished
        write_jsonl(
            self.path,
            [row for row in read_jsonl(self.path) if row["stage"] != stage or row["batch"] < done],
        )
        self._recorded_events: list[dict[str, Any]] | None = None
        if replay is not None:
            self._recorded_events = [
                row
                for row in read_jsonl(find_event_log(replay))
                if row["stage"] == stage
                and (replays_evaluations or not row.get("part", "").startswith(EVALUATION_PARTS))
            ]

    def create_event_log(
        self, tick: int = 0, *, whole_stage: bool = False, part: str = ""
    ) -> EventLog:
        """Return the event log of batch `self.batch` (ticks begin at 0), or of the `whole_stage`
        stage.

        `part` names a further rollout of the batch. The first tick is `tick`. The log replays
        recorded events if the run is a replay.
        """
        write = partial(self._write, {"part": part} if part else {})
        if self._recorded_events is None:
            return EventLog(write, tick)
        return ReplayedEventLog(
            [
                row
                for row in self._recorded_events
                if row.get("part", "") == part and (whole_stage or row["batch"] == self.batch)
            ],
            write,
            tick,
        )

    def _write(self, part: dict[str, str], row: dict[str, Any]) -> None:
        """Append an event to the log."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(format_json_line({"stage": self.stage, "batch": self.batch, **part, **row}))


@dataclass(kw_only=True, eq=False)
class StageContext:
    """Hold the inputs of a stage, which stay the same.

    `first_step` is the run's step count before the stage. `identity` is what the stage's
    checkpoints record of the run (see rl.trainer.resume).
    """

    name: str
    index: int
    method: Any
    models: Models
    problems: ProblemSet | Curriculum
    test_problems: ProblemSet | None
    renderer: Renderer
    scorer: Scorer | None
    run_seed: int
    first_step: int
    logbook: Logbook
    console: Console
    checkpoints: CheckpointManager
    identity: Mapping[str, Any] = field(default_factory=dict)
    environment: EnvironmentSpec | None = None
    replay_log: ReplayLog | None = None
    # the scorers that the ranks have opened for their samples, if they score them
    rank_scores: RankScores | None = None

    @property
    def seed(self) -> int:
        """Return the stage's seed."""
        return derive_seed(self.run_seed, self.index)

    @property
    def has_rewards(self) -> bool:
        """Return whether episodes are scored, by a reward function or by an environment."""
        return self.scorer is not None or self.environment is not None

    @property
    def opponents(self) -> OpponentModels | None:
        """Return the opponents that play against the policy in an environment, if any."""
        return self.models.opponents

    @property
    def settings(self) -> Any:
        """Return the settings of the stage's method."""
        return self.method.settings

    @property
    def flow(self) -> RolloutSettings:
        """Return the settings of episode scheduling; the defaults if the method has none."""
        return getattr(self.settings, "flow", RolloutSettings())

    @property
    def loop(self) -> Any:
        """Return the settings of the training loop."""
        return self.settings.loop

    @property
    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of training samples."""
        sampling = self.settings.sampling
        return SamplingParams(max_tokens=sampling.max_tokens, temperature=sampling.temperature)

    @property
    def eval_params(self) -> SamplingParams:
        """Return the sampling parameters of held-out samples."""
        sampling = self.settings.sampling
        held_out = (
            sampling.temperature if sampling.eval_temperature is None else sampling.eval_temperature
        )
        return SamplingParams(max_tokens=sampling.max_tokens, temperature=held_out)


class AllRewardsFailed(UserError):
    """Raised if no sample of a batch could be scored: the reward is broken, and training would
    continue on nothing.
    """


class WarnOnce:
    """Record which kinds of warnings were printed."""

    def __init__(self, console: Console):
        self._console = console
        self.printed_kinds: set[str] = set()

    def warn(self, kind: str, text: str, *, max_kinds: int | None = None) -> None:
        """Print `text` unless its kind was printed before, at most `max_kinds` kinds."""
        if kind not in self.printed_kinds and (
            max_kinds is None or len(self.printed_kinds) < max_kinds
        ):
            self.printed_kinds.add(kind)
            self._console.warn(text)


class StageSampler:
    """Choose the players, sample the rollouts, and select those to train on."""

    def __init__(self, context: StageContext, warn_once: WarnOnce):
        self.context, self._warn_once = context, warn_once

    def build_groups(
        self, problems: Sequence[Problem], group_size: int
    ) -> Sequence[EnvGroupBuilder]:
        context, renderer, opponents = self.context, self.context.renderer, self.context.opponents
        if context.environment is None:
            return [
                ProblemGroupBuilder(
                    problem, group_size, renderer, context.scorer, context.rank_scores
                )
                for problem in problems
            ]
        renderers = None if opponents is None else opponents.renderers
        return build_episode_groups(
            context.environment, context.settings, problems, group_size, renderer, renderers
        )

    def load_players(self, batch: int | None) -> Mapping[str, ActionSampler]:
        """Return the samplers of the players other than the policy, for a training batch or (None)
        for an evaluation.
        """
        opponents = self.context.opponents
        return {} if opponents is None else opponents.players(batch, self.context.seed)

    def sample(
        self,
        problems: Sequence[Problem],
        sampler: SamplingClient,
        seed: int,
        *,
        batch: int | None = None,
        params: SamplingParams | None = None,
        part: str = "",
        consume: Callable[[RolloutBatch], None] | None = None,
    ) -> RolloutBatch:
        """Run the groups of problems to their end and judge them, for a training batch or (None)
        for an evaluation, which samples an answer to each problem.

        `consume` is called with each of `gradient_parts` parts of the batch as soon as its groups
        have ended, in the order of parts and of groups.

        The episodes of a batch are in lockstep. In an evaluation and with an event log no episode
        waits for a slow one. The log records the events as this `part` of the batch.
        """
        context, replay_log = self.context, self.context.replay_log
        if replay_log is not None and batch is not None:
            replay_log.batch = batch
        is_lockstep = replay_log is None and batch is not None
        group_size = 1 if batch is None else context.method.group_size

        def judge(rollouts: RolloutBatch) -> RolloutBatch:
            rollouts = self.add_judgements(rollouts, ungrouped=batch is None)
            if consume is not None:
                consume(rollouts)
            return rollouts

        return rollout(
            self.build_groups(problems, group_size),
            sampler,
            params or context.sampling_params,
            seed=seed,
            players=self.load_players(batch),
            schedule=RolloutSchedule() if is_lockstep else self.schedule,
            event_log=None if replay_log is None else replay_log.create_event_log(part=part),
            parts=1 if consume is None else context.flow.gradient_parts,
            process=judge,
        )

    def start_engine(
        self, samplers: Mapping[str | None, Any], event_log: EventLog
    ) -> AbstractContextManager[RolloutEngine]:
        """Run episodes with separate sample streams, which close with the context."""
        return open_engine(samplers, self.context.sampling_params, self.schedule, event_log)

    @property
    def schedule(self) -> RolloutSchedule:
        """Return the schedule of episodes that continue independently. A blocking environment has
        the seconds of an episode for each turn.
        """
        flow, env = self.context.flow, getattr(self.context.settings, "env", None)
        return RolloutSchedule(
            make_stream=SampleStream,
            steps=flow.slice_steps,
            max_environments=flow.max_waiting,
            env_timeout=float(env.episode_seconds) if env is not None else 600.0,
        )

    def add_judgements(self, rollouts: RolloutBatch, *, ungrouped: bool = False) -> RolloutBatch:
        """Add the rewards of whole episodes (besides the environment's), and the judgement of a
        model. `ungrouped`: the answers form no group.
        """
        context = self.context
        if context.environment is not None:
            rollouts = add_episode_rewards(rollouts, context.scorer)
        return apply_learned_rewards(rollouts, context.models.rewards, ungrouped=ungrouped)

    def fill_mixed_groups(
        self, rollouts: RolloutBatch, batch: int, sampler: SamplingClient
    ) -> RolloutBatch:
        """Sample further problems until batch_size groups are mixed, within a bound (dynamic
        sampling: DAPO, arXiv 2503.14476, section 3.2).

        Without dynamic sampling, return the same rollouts. Groups without signal and groups beyond
        batch_size are left out of training, but not of metrics. If no group is mixed, the first
        batch_size groups are used. Each round shuffles its problems differently. A round in which
        every reward failed is the last: more samples would only fail again (`check_rollouts`
        reports the reason if nothing remains).
        """
        context = self.context
        bound, batch_size = context.settings.sampling.dynamic_sampling, context.loop.batch_size
        rounds, more = 0, rollouts
        while rounds < bound and more.groups and sum(map(is_mixed, rollouts.groups)) < batch_size:
            rounds += 1
            problems = context.problems.batch(
                batch, batch_size, derive_seed(context.seed, "extra", rounds)
            )
            seed = derive_seed(context.seed, "sample", batch, rounds)
            more = self.sample(problems, sampler, seed, batch=batch, part=f"extra {rounds}")
            rollouts = rollouts.merge(more)
        if not bound:
            return rollouts
        rollouts.counters["extra_rounds"] = rounds
        selected = ([group for group in rollouts.groups if is_mixed(group)] or rollouts.groups)[
            :batch_size
        ]
        chosen = {id(group) for group in selected}
        return replace(
            rollouts,
            groups=selected,
            untrained_groups=[group for group in rollouts.groups if id(group) not in chosen],
        )

    def check_rollouts(
        self, rollouts: RolloutBatch, learner_version: int, max_staleness: int = 0
    ) -> None:
        """Warn about failed rewards (each kind once). End the run if no reward worked, or samples
        come from other weights.

        `learner_version`: weight version that learns from the samples; `max_staleness`: allowed
        staleness in updates.

        Raises AllRewardsFailed, or RuntimeError for samples of unexpected weight versions.
        """
        if rollouts.errors:
            # texts that differ in a number would be printed at every step: 20 at most
            kind = rollouts.errors[0].split(" (prompt")[0]
            self._warn_once.warn(
                kind,
                f"{len(rollouts.errors)} samples were left out of this batch: {rollouts.errors[0]}",
                max_kinds=20,
            )
        versions: set[int | None] = set()
        for turn in list_turns(rollouts.groups):
            versions.update(turn.ac.versions or [turn.ac.version])
        oldest = learner_version - max_staleness
        if versions - {*range(oldest, learner_version + 1)}:
            expected = f"{oldest} to {learner_version}" if max_staleness else f"{learner_version}"
            raise RuntimeError(
                f"samples come from weight versions {sorted(map(str, versions))}, expected "
                f"version {expected}"
            )
        if not rollouts.groups:
            source = "the reward" if self.context.environment is None else "the environment"
            raise AllRewardsFailed(
                f"{source} failed on every sample of the batch: {rollouts.errors[0]}"
                if rollouts.errors
                else "the policy had no turn in any episode of the batch"
            )
        pg = getattr(self.context.settings, "policy_gradient", None)
        single = all(len(t.transitions) == 1 for g in rollouts.groups for t in g.trajectories_G)
        if pg is not None and pg.step_rewards != "sum" and single:
            text = "every episode has one turn, so its reward is the whole reward to go"
            self._warn_once.warn("to_go", f"step_rewards {pg.step_rewards} has no effect: {text}")


def open_sample_scorers(
    service: ServiceClient,
    prepared: PreparedStage,
    renderer: Renderer,
    judge: Any,
    note: Callable[[str], None],
) -> SampleScorerHandle | None:
    """Return the scorers that the ranks open for the samples of a stage; None if rank 0 has them
    scored.

    `judge`: the model that judges the answers, if any. `note` receives what the ranks cannot do: a
    line for the stage, or for each machine.
    """
    data: DataSettings = prepared.plan.settings.data
    scorer = prepared.scorer
    if scorer is None or get_reward_machines().address is None or not spreads_rewards(data):
        return None  # all ranks are on this machine, or its workers alone score
    reason = _find_obstacle(prepared, judge)
    settings = ScorerSettings(
        renderer, scorer.reward, scorer.timeout, scorer.workers, scorer.variables
    )
    if reason is None:
        sampling, machines = service.count_machines()
        if 2 * sampling < machines:  # all machines together score sooner
            reason = f"only {sampling} of the {machines} machines have processes that sample"
    if reason is None:
        try:
            packed = settings.pack()
        except Exception as error:  # boundary: pickling runs code of the renderer and the reward
            reason = f"it cannot be sent to other processes ({describe_error(error)})"
    if reason is not None:
        note(f"reward {scorer.reward.name}: rank 0 reads every answer and has it scored: {reason}")
        return None
    handle = service.open_scorer(packed)
    for machine, refusal in handle.refusals.items():
        note(f"reward {scorer.reward.name}: rank 0 has the answers of {machine} scored: {refusal}")
    return handle


def _find_obstacle(prepared: PreparedStage, judge: Any) -> str | None:
    """Return why a rank cannot score its own samples of a stage; None if it can."""
    scorer = prepared.scorer
    assert scorer is not None
    if prepared.environment is not None:
        return f"the episodes of {prepared.environment.name} are played on rank 0"
    if scorer.reward.batched:
        return "it takes many answers at once"
    if scorer.place == "thread":
        return "it is no function of a file or module that another process can load"
    if judge is not None:
        return "a judge reads the answers as well"
    return None
