"""reasoning-gym: generated tasks with exact answers, by name, and their curricula."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.environments.environment import Environment, Turn
from rl.environments.wrappers.packages import options, package
from rl.errors import UserError
from rl.seeds import derive_seed
from rl.settings import nearest
from rl.types import Message

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass
class ReasoningGym(Environment):
    """A task of reasoning-gym: its question, and its own score of the answer (0 to 1) as the
    reward.

    The answer is what stands in <answer> tags, or everything where there are none.
    """

    task: str = "chain_sum"
    """Its name (chain_sum, countdown, sudoku, ...), or several with commas between them, asked by turns."""
    level: int = -1
    """Difficulty on the task's own curriculum, from 0; -1: as the task is by itself."""
    levels: int = 0
    """Ask the levels from 0 to one below this, as many questions of each: for --curriculum steps or success."""
    only_level: bool = False
    """At a level, only what is new in it; else a level's ranges begin where those of level 0 do."""
    config: str = "{}"
    """The task's own settings as JSON: {"max_terms": 3}. A level's take their place."""
    suffix: str = ""
    """Put after every question, such as "Answer with the number alone." """

    def __post_init__(self) -> None:
        self.tasks = [name.strip() for name in self.task.split(",") if name.strip()]
        gym = package("reasoning_gym", "reasoning-gym")
        known, curricula = gym.factory.DATASETS, gym.factory.CURRICULA
        for name in self.tasks or [self.task]:
            if name not in known:
                near = nearest(name, known)
                hint = f"did you mean {near}?" if near else f"there are {', '.join(sorted(known))}"
                raise UserError(f"reasoning-gym has no task {name!r}: {hint}")
            if (self.level >= 0 or self.levels) and name not in curricula:
                raise UserError(
                    f"reasoning-gym has no curriculum of {name}: leave out level and levels; config says how hard it is"
                )
        if self.level >= 0 and self.levels:
            raise UserError("level asks one level and levels several: give one of them")
        options(self.config, "config")

    def rows(self, split: str, count: int) -> Sequence[Mapping[str, Any]]:
        """A level's rows are spread over all of them, so that each batch has all the levels there
        are.
        """
        made = []
        for i in range(count):
            level = i % self.levels if self.levels else self.level
            row: dict[str, Any] = {
                "task": self.tasks[i % len(self.tasks)],
                "split": split,
                "index": i,
            }
            made.append({**row, "level": level} if self.levels else row)
        return made

    def start(self) -> str:
        row = self.row
        name, level = row.get("task", self.tasks[0]), row.get("level", self.level)
        seed = derive_seed("reasoning_gym", row.get("split", "train")) % 2**30
        self.data = _dataset(name, level, self.only_level, self.config, seed, 2**20)
        self.entry = self.data[row.get("index", self.seed % 2**20)]
        return (
            f"{self.entry['question']}\n{self.suffix}"
            if self.suffix
            else str(self.entry["question"])
        )

    def step(self, answer: Message) -> Turn:
        text = str(answer["content"])
        tagged = _TAG.findall(text)
        given = (tagged[-1] if tagged else text).strip()
        try:
            score = float(self.data.score_answer(answer=given, entry=self.entry))
        except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, AttributeError):
            score = 0.0  # some tasks' own scoring breaks on what is no answer: a wrong one
        metrics = {"correct": float(score >= 1.0), "score": score}
        return Turn(reward=score, done=True, metrics=metrics, logs={"answer": self.entry["answer"]})


@functools.lru_cache(maxsize=256)
def _dataset(name: str, level: int, only: bool, config: str, seed: int, size: int) -> Any:
    """A task's generator, which makes an item from its number when it is asked for."""
    gym = package("reasoning_gym", "reasoning-gym")
    own = {**options(config, "config"), "seed": seed, "size": size}
    if level < 0:
        return gym.create_dataset(name, **own)
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

    curriculum = gym.factory.create_curriculum(name)
    most = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > most:
        raise UserError(f"reasoning-gym's curriculum of {name} has levels 0 to {most}, got {level}")
    curriculum.set_global_level(level)
    mode = RangeAttributeMode.UPPER_BOUND if only else RangeAttributeMode.INCLUSIVE
    return gym.factory.DATASETS[name][0](
        curriculum.generate_configuration(own, DefaultCurriculumContext(mode=mode))
    )
