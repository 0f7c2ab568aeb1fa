"""Run tasks of reasoning-gym: generated questions with exact answers, by name, and their
curricula.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.config import nearest_name
from rl.envs import Environment, TurnResult
from rl.errors import UserError
from rl.integrations.optional_packages import import_package, parse_json_options
from rl.seed import derive_seed
from rl.types import Message

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Number of items of a task for a row that names none. Some tasks make all items at the start, or
# refuse larger numbers.
_DEFAULT_ITEMS = 1000


@dataclass
class ReasoningGym(Environment):
    """Ask a question of a reasoning-gym task. The reward is the task's score of the answer (0 to
    1).

    The answer is the text in <answer> tags, or the complete reply if it has no tags.
    """

    task: str = "chain_sum"
    """Name of a task (chain_sum, sudoku, ...), or several separated by commas, used alternately."""
    level: int = -1
    """Difficulty on the task's curriculum, from 0; -1: the task's default difficulty."""
    levels: int = 0
    """Number of levels, equally many questions of each: for --curriculum steps or success."""
    only_level: bool = False
    """Ask only questions that are new at a level; by default its ranges begin at those of level 0.
    """
    config: str = "{}"
    """Settings of the task as JSON: {"max_terms": 3}. Settings of a level replace them."""
    suffix: str = ""
    """Text appended to each question, such as "Answer with only the number." """

    def __post_init__(self) -> None:
        self.tasks = [name.strip() for name in self.task.split(",") if name.strip()]
        gym = import_package("reasoning_gym", "reasoning-gym")
        known, curricula = gym.factory.DATASETS, gym.factory.CURRICULA
        for name in self.tasks or [self.task]:
            if name not in known:
                near = nearest_name(name, known)
                hint = f"did you mean {near}?" if near else f"it has {', '.join(sorted(known))}"
                raise UserError(f"reasoning-gym has no task {name!r}: {hint}")
            if (self.level >= 0 or self.levels) and name not in curricula:
                raise UserError(
                    f"reasoning-gym has no curriculum of {name}: remove level and levels, and set"
                    " the difficulty in config"
                )
            if (highest := max(self.level, self.levels - 1)) >= 0:
                curriculum = gym.factory.create_curriculum(name)
                most = max(len(item.levels) for item in curriculum.attributes.values()) - 1
                if highest > most:
                    raise UserError(
                        f"reasoning-gym's curriculum of {name} has levels 0 to {most}, got level"
                        f" {highest}"
                    )
        if self.level >= 0 and self.levels:
            raise UserError(
                "level selects a single level and levels several: set only level or levels"
            )
        parse_json_options(self.config, "config")

    def rows(self, split: str, count: int) -> Sequence[Mapping[str, Any]]:
        """Return rows with the tasks in turn, and each task's rows with the levels in turn."""
        rows: list[dict[str, Any]] = []
        for i in range(count):
            turn, task = divmod(i, len(self.tasks))
            row = {"task": self.tasks[task], "split": split, "index": i, "num_items": count}
            rows.append({**row, "level": turn % self.levels} if self.levels else row)
        return rows

    def start(self) -> str:
        """Return the question of the row."""
        row = self.row
        name, level = row.get("task", self.tasks[0]), row.get("level", self.level)
        seed = derive_seed("reasoning_gym", row.get("split", "train")) % 2**30
        index = row.get("index")
        size = row.get("num_items", max(_DEFAULT_ITEMS, (index or 0) + 1))
        self.data = _make_dataset(name, level, self.only_level, self.config, seed, size)
        self.entry = self.data[self.seed % size if index is None else index]
        return (
            f"{self.entry['question']}\n{self.suffix}"
            if self.suffix
            else str(self.entry["question"])
        )

    def step(self, answer: Message) -> TurnResult:
        """Return the task's score of the answer."""
        text = str(answer["content"])
        tagged = _TAG.findall(text)
        response = (tagged[-1] if tagged else text).strip()
        try:
            score = float(self.data.score_answer(answer=response, entry=self.entry))
        except ImportError:
            raise
        except Exception:  # noqa: BLE001  (any error of a parser, such as SyntaxError or TokenError)
            score = 0.0  # the scorers of some tasks raise for malformed answers, which are wrong
        metrics = {"correct": float(score >= 1.0), "score": score}
        return TurnResult(
            reward=score, done=True, metrics=metrics, logs={"answer": self.entry["answer"]}
        )


@functools.lru_cache(maxsize=256)
def _make_dataset(name: str, level: int, only: bool, config: str, seed: int, size: int) -> Any:
    """Return a task's generator, which makes an item from its index on demand."""
    gym = import_package("reasoning_gym", "reasoning-gym")
    settings = {**parse_json_options(config, "config"), "seed": seed, "size": size}
    if level < 0:
        return gym.create_dataset(name, **settings)
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

    curriculum = gym.factory.create_curriculum(name)
    curriculum.set_global_level(level)
    mode = RangeAttributeMode.UPPER_BOUND if only else RangeAttributeMode.INCLUSIVE
    return gym.factory.DATASETS[name][0](
        curriculum.generate_configuration(settings, DefaultCurriculumContext(mode=mode))
    )
