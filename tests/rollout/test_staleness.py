"""Test that asynchronous runs train on no token older than the bound, under random schedules.

The training loop, its group admission, episodes and checkpoints are real. The sampler is a
stand-in: its tokens encode the weights and random numbers that sampled them, so labels are compared
with the truth. Updates and weight transfers take a random number of slices.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rl.rollout import (
    Env,
    EnvExecutor,
    EnvGroupBuilder,
    EventLog,
    PlayerStream,
    RolloutEngine,
    StepResult,
)
from rl.sampler import SamplingRequest
from rl.seed import derive_seed
from rl.trainer.stage_sampling import StageSampler
from rl.trainer.training_loop import train
from rl.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

STAGE_SEED, CODES = 11, 1 << 20


class SimulatedKill(Exception):
    """Ends the process after a checkpoint."""


def token(version: int, seed: int, problem: int, index: int, position: int) -> int:
    """Return a token that encodes the weight version and the random number."""
    return version * CODES + derive_seed("token", seed, problem, index, position) % CODES


class ConversationEnv(Env):
    """Answers every action with a mark until its turns are over."""

    blocks = False

    def __init__(self, problem: int, turns: int):
        self.read, self.turns = [problem], turns

    def initial_observation(self):
        return ModelInput.from_ints(list(self.read)), None

    def step(self, action: SampledSequence) -> StepResult:
        self.turns -= 1
        self.read = [*self.read, *action.tokens, 1]
        return StepResult(1.0, self.turns == 0, ModelInput.from_ints(list(self.read)))


class ConversationGroupBuilder(EnvGroupBuilder):
    def __init__(self, problem: int, turns: list[int]):
        self.problem_index, self.turns = problem, turns

    def make_envs(self):
        return [ConversationEnv(self.problem_index, turns) for turns in self.turns]


class Client:
    """Weights of a version. `wait` blocks until they have arrived."""

    def __init__(self, version: int, wait=None):
        self._version, self.ready, self._wait = version, wait is None, wait
        self.info = {"max_context": None}

    @property
    def version(self) -> int:
        if not self.ready:
            self._wait()
            self.ready = True
        return self._version

    def on_ready(self, call) -> None:
        def arrive():
            _ = self.version
            call()

        call() if self.ready else threading.Thread(target=arrive, daemon=True).start()

    def release(self) -> None:
        pass


class FakeStream:
    """Samples a few tokens of every request in each slice. A request's length is a function of its
    random stream.
    """

    def __init__(self, client: Client, plan: Plan):
        self.version, self.plan = client.version, plan
        self.running: dict[int, tuple[SamplingRequest, SampledSequence, int]] = {}
        self.tickets = self.slices = 0
        self.first_seeds: dict[str, list[int]] = {}  # of the first turn of each conversation

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add(self, request: SamplingRequest) -> int:
        self.tickets += 1
        begun = request.resume_from or SampledSequence([], [], "length")
        versions = list(begun.versions or [begun.version] * len(begun.tokens))
        length = self.plan.length(request.seed, request.problem, request.first_index)
        labels = {"version": begun.version, "versions": versions}
        sequence = SampledSequence(list(begun.tokens), list(begun.logprobs), "length", **labels)
        if len(request.prompt) == 1 and request.resume_from is None:
            self.first_seeds.setdefault(request.conversation, []).append(request.seed)
        self.running[self.tickets] = (request, sequence, length)
        return self.tickets

    def drop(self, ticket: int) -> None:
        self.running.pop(ticket, None)

    def end_conversation(self, conversation: str) -> None:
        pass

    def recompute_cache(self) -> None:
        pass

    def switch_weights(self, client: Client, *, recompute: bool) -> None:
        assert recompute == self.plan.recompute_cache
        self.version = client.version

    def unfinished(self) -> dict[int, SamplingRequest]:
        results = {}
        for ticket, (request, sequence, _) in self.running.items():
            begun = self._labelled(sequence) if sequence.tokens else None
            fields = {f: getattr(request, f) for f in SamplingRequest.__slots__}
            results[ticket] = SamplingRequest(**{**fields, "resume_from": begun})
        return results

    @staticmethod
    def _labelled(sequence: SampledSequence) -> SampledSequence:
        versions = list(sequence.versions)
        several = versions if len(set(versions)) > 1 else None
        labels = {"version": min(versions), "versions": several}
        return SampledSequence(list(sequence.tokens), list(sequence.logprobs), "length", **labels)

    def run_steps(self, steps: int) -> SimpleNamespace:
        self.slices += 1
        finished = {}
        for ticket, (request, sequence, length) in list(self.running.items()):
            for _ in range(min(steps, length - len(sequence.tokens))):
                stream = request.seed, request.problem, request.first_index
                sequence.tokens.append(token(self.version, *stream, len(sequence.tokens)))
                sequence.logprobs.append(-1.0)
                sequence.versions.append(self.version)
            if len(sequence.tokens) >= length:
                finished[ticket] = SampleResponse([self._labelled(sequence)])
                del self.running[ticket]
        return SimpleNamespace(finished=finished, counters={})


class Plan:
    """A random schedule: sizes, bounds, lengths, durations of updates and transfers, and the kills
    of the process.
    """

    def __init__(self, seed: int):
        chance = self.chance = random.Random(seed)
        self.size, self.group = chance.randint(1, 4), chance.randint(1, 3)
        self.bound, self.steps = chance.choice([0, 1, 2, 3, 3]), chance.randint(1, 8)
        likely = (0.5, 0.4, 0.5)
        self.redraw, self.far, self.recompute_cache = (chance.random() < p for p in likely)
        self.slice_steps, self.longest = chance.randint(1, 4), chance.choice([3, 12, 90])
        self.slow_update = chance.choice([0, 2, 6])
        self.save_every = chance.choice([0, 1, 1, 2])
        self.kills = {
            done for done in range(1, self.steps) if self.due(done) and chance.random() < 0.6
        }
        self.turns = [
            [chance.randint(1, 3) for _ in range(self.group)] for _ in range(self.size * self.steps)
        ]

    def due(self, done: int) -> bool:
        return done == self.steps or bool(self.save_every and done % self.save_every == 0)

    def length(self, seed: int, problem: int, index: int) -> int:
        """Return a mostly short length, and sometimes the maximum."""
        drawn = random.Random(derive_seed("length", seed, problem, index)).random()
        return 1 + int(self.longest * drawn**2)


class Loop:
    """Replaces the trainer in a run of a plan. `batches_seen` has the number, token versions and
    problems of each batch.
    """

    def __init__(self, plan: Plan, done: int = 0, state=None):
        self.plan, self.done, self.seed, self.name = plan, done, STAGE_SEED, "grpo"
        flow = SimpleNamespace(
            max_steps_off_policy=plan.bound,
            on_stale="resample" if plan.redraw else "wait",
            recompute_cache=plan.recompute_cache,
            sampler_ranks=int(plan.far),
        )
        self.loop = SimpleNamespace(batch_size=plan.size, steps=plan.steps)
        self.settings = SimpleNamespace(flow=flow)
        self.replay_log = SimpleNamespace(
            batch=0, create_event_log=lambda tick, whole_stage: EventLog(tick=tick)
        )
        self.flow = SimpleNamespace(steps_off_policy=max(1, plan.bound))
        self.in_flight, self.is_save_due, self.get_engine_state = state, plan.due, None
        checks = StageSampler(SimpleNamespace(settings=SimpleNamespace(), environment=None), None)
        self.stage_sampler = SimpleNamespace(
            load_players=lambda batch: {},
            build_groups=self.build_groups,
            start_engine=self.start_engine,
            add_judgements=lambda rollouts: rollouts,
            check_rollouts=checks.check_rollouts,
        )
        self.policy = SimpleNamespace(
            version=done, save_weights_and_get_sampling_client=self._client
        )
        self.models = SimpleNamespace(policy=self.policy)
        self.method = SimpleNamespace(
            online=True,
            group_size=plan.group,
            shape_rewards=lambda groups: groups,
            compute_advantages=lambda groups, models: [],
            update=self.update,
        )
        self.stop_request = SimpleNamespace(exit_code=None)
        self.evaluator = SimpleNamespace(samples_held_out=False)
        self.problems = SimpleNamespace(batch=self._problems)
        self.stream: FakeStream | None = None
        self.saved = None
        self.batches_seen: list[tuple[int, list[int], list[int]]] = []
        self.redrawn = 0

    # methods in the order in which the loop calls them
    def start(self) -> Client:
        return Client(self.done)

    @contextmanager
    def start_engine(self, samplers, clock) -> Iterator[RolloutEngine]:
        waiters, self.stream = EnvExecutor(4), FakeStream(samplers[None], self.plan)
        yield RolloutEngine(
            {None: PlayerStream(self.stream, {"max_context": None})},
            SamplingParams(max_tokens=99),
            waiters,
            clock,
            steps=self.plan.slice_steps,
        )
        waiters.close()

    def batches(self) -> Iterator[int]:
        yield from range(self.done, self.plan.steps)

    def _problems(self, batch: int, size: int, seed: int):
        return [SimpleNamespace(index=batch * size + i) for i in range(size)]

    def build_groups(self, problems, group_size):
        return [
            ConversationGroupBuilder(problem.index, self.plan.turns[problem.index])
            for problem in problems
        ]

    def progress(self, batch: int) -> int:
        return batch

    def _slices(self, most: int) -> None:
        """Wait for a random number of slices, or until the stream is idle."""
        until = self.stream.slices + self.plan.chance.randint(0, most)
        while self.stream.slices < until and self.stream.busy:
            time.sleep(0)

    def update(self, models, datums, progress) -> dict[str, float]:
        self._slices(self.plan.slow_update)
        self.policy.version += 1
        return {}

    def _client(self) -> Client:
        return Client(
            self.policy.version,
            (lambda: self._slices(self.plan.slow_update)) if self.plan.far else None,
        )

    def next_sampler(self, old, fresh=None) -> Client:
        return fresh or self._client()

    def end_batch(self, batch, metrics, sampler) -> None:
        self.redrawn += metrics["async/redrawn_groups"]
        versions, problems = [], []
        for group in batch.rollouts.groups:
            problems.append(group.problem_index)
            for index, episode in enumerate(group.trajectories_G):
                assert len(episode.transitions) == self.plan.turns[group.problem_index][index]
                for turn in episode.transitions:
                    labels = turn.ac.versions or [turn.ac.version] * len(turn.ac.tokens)
                    assert labels == [drawn // CODES for drawn in turn.ac.tokens], (
                        "a label names other weights than drew the token"
                    )
                    versions += labels
        self.batches_seen.append((batch.number, versions, problems))
        self.done = batch.number + 1
        if self.plan.due(self.done) and self.done < self.plan.steps:
            self.saved = json.loads(json.dumps(self.get_engine_state()))
            if self.done in self.plan.kills:
                self.plan.kills.discard(self.done)
                raise SimulatedKill

    def end(self) -> None:
        for seeds in self.stream.first_seeds.values():
            assert len(set(seeds)) == len(seeds), (
                "a group that began again has the random numbers of before"
            )


def play(seed: int) -> tuple[Plan, list[tuple[int, list[int], list[int]]], int]:
    """Return the plan, its batches in order, and the number of resampled groups."""
    plan, batches, redrawn = Plan(seed), [], 0
    loop = Loop(plan)
    while True:
        try:
            train(loop)
        except SimulatedKill:
            batches, redrawn = batches + loop.batches_seen, redrawn + loop.redrawn
            loop = Loop(plan, loop.done, loop.saved)
            continue
        return plan, batches + loop.batches_seen, redrawn + loop.redrawn


def check_population(seeds: range) -> None:
    ages, redrawn, killed = set(), 0, 0
    for seed in seeds:
        kills = len(Plan(seed).kills)
        plan, batches, again = play(seed)
        assert [batch for batch, _, _ in batches] == list(range(plan.steps))
        assert sorted(problem for _, _, problems in batches for problem in problems) == list(
            range(plan.size * plan.steps)
        )
        for batch, versions, problems in batches:
            assert len(problems) == plan.size
            if plan.bound == 0:  # synchronous: each batch has the problems of its step, in order
                assert problems == list(range(batch * plan.size, (batch + 1) * plan.size))
            ok = all(0 <= batch - version <= plan.bound for version in versions)
            assert ok, (seed, batch, set(versions), plan.bound)
            ages |= {batch - version for version in versions}
        redrawn, killed = redrawn + again, killed + kills
    exercised = ages == {0, 1, 2, 3} and redrawn > len(seeds) / 20 and killed > len(seeds) / 10
    assert exercised, (ages, redrawn, killed)


def test_no_token_is_older_than_the_bound_and_every_label_is_true():
    check_population(range(250))


@pytest.mark.campaign
def test_no_token_is_older_than_the_bound_under_four_thousand_schedules():
    check_population(range(10_000, 14_000))
