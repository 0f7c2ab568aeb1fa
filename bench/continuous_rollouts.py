"""Compare turn-by-turn rollouts of a step with continuous rollouts: wall clock with slow rewards
and uneven episodes, and with neither.

    python bench/continuous_rollouts.py --out bench/results/continuous_rollouts.csv

Slow: each answer of the environment takes a log-normal time (mean 1 s, sigma 1), and episodes have
1 to 12 turns. Instant: the same episodes of 12 turns each, and no answer takes any time. Both loops
play the same episodes with the same weights and sample the same tokens. `longest_episode_waits_s`
is the lower bound of any loop: the total time of the environment's answers in the longest episode.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl import ServiceClient
from rl.client import SampleStream
from rl.rollout import Env, EnvGroupBuilder, RolloutSchedule, StepResult, rollout
from rl.types import ModelInput, SampledSequence, SamplingParams


class Later:
    """Hold a step's result that becomes available after some seconds, as with a reward computed in
    another process.
    """

    def __init__(self, result: StepResult, seconds: float):
        self.extract_answer, self.at = result, time.monotonic() + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))

    def result(self) -> StepResult:
        self.wait()
        return self.extract_answer


class Turns(Env):
    """Simulate an episode with `len(seconds)` turns, each with its duration in seconds."""

    blocks = False

    def __init__(self, first: ModelInput, seconds: list[float]):
        self.first, self.seconds, self.read, self.taken = first, seconds, first.to_ints(), 0

    def initial_observation(self) -> Any:
        return self.first, None

    def step(self, action: SampledSequence) -> StepResult | Later:
        self.read = [*self.read, *action.tokens, 13]
        seconds = self.seconds[self.taken]
        self.taken += 1
        result = StepResult(1.0, self.taken >= len(self.seconds), ModelInput.from_ints(self.read))
        return Later(result, seconds) if seconds else result


class Group(EnvGroupBuilder):
    def __init__(self, index: int, seconds: list[list[float]]):
        self.problem_index, self.seconds, self.first = (
            index,
            seconds,
            ModelInput.from_ints([3 + index % 9, 4, 12]),
        )

    def make_envs(self) -> list[Turns]:
        return [Turns(self.first, seconds) for seconds in self.seconds]


def episodes(groups: int, size: int, slow: bool, seed: int) -> list[Group]:
    chance, sigma = random.Random(seed), 1.0
    found = []
    for index in range(groups):
        turns = [chance.randint(1, 12) if slow else 12 for _ in range(size)]
        found.append(
            Group(
                index,
                [
                    [
                        chance.lognormvariate(-(sigma**2) / 2, sigma) if slow else 0.0
                        for _ in range(n)
                    ]
                    for n in turns
                ],
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes", nargs="+", default=["8x8", "8x16", "16x16"], help="groups x episodes of a group"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    params = SamplingParams(max_tokens=6, temperature=1.0, stop=[])
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ServiceClient(output_dir=folder, seed=1) as service,
    ):
        sampler = service.create_full_training_client(
            "tiny:addition", seed=1
        ).save_weights_and_get_sampling_client()
        for work, shape in itertools.product(("slow", "instant"), args.shapes):
            n_groups, size = map(int, shape.split("x"))
            times: dict[str, list[float]] = {"turn by turn": [], "continuous": []}
            tokens: dict[str, Any] = {}
            for repeat in range(1 if work == "slow" else args.repeats + 1):
                for name in times:
                    make_stream = SampleStream if name == "continuous" else None
                    schedule = RolloutSchedule(make_stream=make_stream)
                    groups = episodes(n_groups, size, work == "slow", seed=0)
                    start = time.perf_counter()
                    found = rollout(groups, sampler, params, seed=0, schedule=schedule)
                    if repeat or work == "slow":
                        times[name].append(time.perf_counter() - start)
                    tokens[name] = [
                        [[t.ac.tokens for t in e.transitions] for e in g.trajectories_G]
                        for g in found.groups
                    ]
            assert tokens["turn by turn"] == tokens["continuous"]
            before, after = (statistics.median(seconds) for seconds in times.values())
            drawn = [
                seconds
                for group in episodes(n_groups, size, work == "slow", seed=0)
                for seconds in group.seconds
            ]
            rows.append(
                {
                    "work": work,
                    "groups": n_groups,
                    "size": size,
                    "turn_by_turn_s": round(before, 3),
                    "continuous_s": round(after, 3),
                    "times_faster": round(before / after, 3),
                    "longest_episode_waits_s": round(max(map(sum, drawn)), 3),
                }
            )
            print(rows[-1], flush=True)
    if args.out:
        with args.out.open("w", newline="") as file:
            file.write(f"# python {' '.join(sys.argv)}\n")
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
