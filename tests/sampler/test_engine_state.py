"""Test saving and restoring a rollout engine with samples of several players in progress."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from rl.rollout import (
    Env,
    EnvExecutor,
    EnvGroupBuilder,
    EpisodeFailed,
    EventLog,
    PlayerStream,
    RolloutEngine,
    StepResult,
    restore_engine_state,
    save_engine_state,
)
from rl.sampler import SamplingRequest
from rl.seed import derive_seed
from rl.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

TURNS, LENGTH = 4, 5


class DuelEnv(Env):
    """The policy and a rival act in turn; the rival is first in every second member."""

    blocks, several_turns = False, True
    players = (None, "rival")

    def __init__(self, problem: int, member: int):
        self.read, self.turns, self.seat = [problem, member], TURNS, member % 2

    def initial_observation(self):
        return ModelInput.from_ints(list(self.read)), None

    def step(self, action: SampledSequence) -> StepResult:
        self.turns, self.seat = self.turns - 1, 1 - self.seat
        self.read += action.tokens
        reward = float(sum(action.tokens) % 7)
        return StepResult(reward, self.turns == 0, ModelInput.from_ints(list(self.read)))


@dataclass
class DuelGroupBuilder(EnvGroupBuilder):
    problem_index: int

    def make_envs(self):
        return [DuelEnv(self.problem_index, member) for member in range(3)]


class SlowStream:
    """A sampler that takes several slices for a sample. A token depends on player, random stream
    and position.
    """

    def __init__(self, name: str):
        self.name, self.tickets, self.sampled = name, 0, 0
        self.running: dict[int, tuple[SamplingRequest, list[int]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add(self, request: SamplingRequest) -> int:
        self.tickets += 1
        begun = [] if request.resume_from is None else list(request.resume_from.tokens)
        self.running[self.tickets] = (request, begun)
        return self.tickets

    def end_conversation(self, conversation: str) -> None:
        pass

    def recompute_cache(self) -> None:
        pass

    def unfinished(self) -> dict[int, SamplingRequest]:
        return {
            ticket: replace(request, resume_from=self._sequence(tokens) if tokens else None)
            for ticket, (request, tokens) in self.running.items()
        }

    def run_steps(self, steps: int) -> SimpleNamespace:
        finished = {}
        for ticket, (request, tokens) in list(self.running.items()):
            key = (self.name, request.seed, request.problem, request.first_index, len(tokens))
            tokens.append(derive_seed(*key) % 1000)
            self.sampled += 1
            if len(tokens) == LENGTH:
                finished[ticket] = SampleResponse([self._sequence(tokens)])
                del self.running[ticket]
        return SimpleNamespace(finished=finished, counters={})

    @staticmethod
    def _sequence(tokens: list[int]) -> SampledSequence:
        return SampledSequence(list(tokens), [-1.0] * len(tokens), "length", version=0)


def make_engine() -> tuple[RolloutEngine, dict[str | None, SlowStream]]:
    streams: dict[str | None, SlowStream] = {None: SlowStream("us"), "rival": SlowStream("rival")}
    players = {
        player: PlayerStream(stream, {"max_context": None}) for player, stream in streams.items()
    }
    params = SamplingParams(max_tokens=LENGTH)
    return RolloutEngine(players, params, EnvExecutor(4), EventLog(), steps=1), streams


def play_out(engine: RolloutEngine) -> list[list[tuple[list[int], float]]]:
    while len(engine.completed_groups()) < 2:
        engine.tick()
    groups = engine.take_rollouts([0, 1]).groups
    engine.executor.close()
    return [
        [(turn.ac.tokens, turn.reward) for turn in trajectory.transitions]
        for group in groups
        for trajectory in group.trajectories_G
    ]


def test_samples_of_two_players_with_the_same_tickets_are_restored():
    engine, streams = make_engine()
    for problem in range(2):
        engine.start_group(problem, DuelGroupBuilder(problem), seed=3, random_stream=problem)
    for _ in range(LENGTH + 2):  # every episode reaches its second turn
        engine.tick()
    assert streams[None].running.keys() & streams["rival"].running.keys()
    before = {player: stream.sampled for player, stream in streams.items()}
    state = json.loads(json.dumps(save_engine_state(engine)))
    assert len(state["acting"]) == 6

    restored, restored_streams = make_engine()
    assert restore_engine_state(restored, state, DuelGroupBuilder) == []
    assert play_out(restored) == play_out(engine)
    for player, stream in restored_streams.items():  # no token is sampled twice
        assert stream.sampled == streams[player].sampled - before[player] > 0


class UnmadeEnv(Env):
    """Stands in for a group whose environments could not be made, as in rl.integrations."""

    blocks = False

    def initial_observation(self):
        raise EpisodeFailed("no environments")

    def step(self, action):
        """Is never called."""


@pytest.mark.parametrize("fails", [0, 1])
def test_a_group_with_another_number_of_environments_starts_again(fails):
    """A builder fails to make its environments in the run (0) or at the resume (1)."""

    def make_builder(problem: int, launch: int) -> DuelGroupBuilder:
        builder = DuelGroupBuilder(problem)
        if (problem, launch) == (0, fails):
            builder.make_envs = lambda: [UnmadeEnv()]
        return builder

    engine, _ = make_engine()
    for problem in range(2):
        engine.start_group(problem, make_builder(problem, 0), seed=3, random_stream=problem)
    for _ in range(LENGTH + 2):
        engine.tick()
    state = json.loads(json.dumps(save_engine_state(engine)))
    restored, _ = make_engine()
    assert restore_engine_state(restored, state, lambda problem: make_builder(problem, 1)) == [0]
    restored.start_group(0, DuelGroupBuilder(0), seed=3, random_stream=0)
    expected, _ = make_engine()
    for problem in range(2):
        expected.start_group(problem, DuelGroupBuilder(problem), seed=3, random_stream=problem)
    assert play_out(restored) == play_out(expected)
    engine.executor.close()
