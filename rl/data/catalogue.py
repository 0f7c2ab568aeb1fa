"""Data sets by a short name: where they lie on the hub, which splits they have, what scores an
answer. `docs/datasets.md` is the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl.errors import UserError


@dataclass(frozen=True)
class Known:
    """A published data set. `splits`: ours ("train", "test") to the hub's. `format`: of its rows.
    `reward`: what scores an answer.
    """

    hub: str
    config: str | None
    splits: Mapping[str, str]
    format: str
    reward: str
    instead: str = ""  # where there is nothing to train on: what there is

    def split(self, name: str, split: str) -> str:
        if split not in self.splits:
            instead = f"; {self.instead}" if self.instead else ""
            raise UserError(
                f"{name} has no split {split!r}, only {', '.join(self.splits)}: it is there to evaluate with{instead}"
            )
        return self.splits[split]


_BOTH, _TEST = {"train": "train", "test": "test"}, {"test": "test"}
CATALOGUE: dict[str, Known] = {
    "gsm8k": Known("openai/gsm8k", "main", _BOTH, "gsm8k", "gsm8k"),
    "math": Known("DigitalLearningGmbH/MATH-lighteval", None, _BOTH, "math", "math_correctness"),
    "math500": Known(
        "HuggingFaceH4/MATH-500",
        None,
        _TEST,
        "math",
        "math_correctness",
        "train on math, with --eval-dataset math500",
    ),
    "mbpp": Known(
        "google-research-datasets/mbpp",
        "full",
        {**_BOTH, "validation": "validation"},
        "mbpp",
        "code_tests",
    ),
    "mbpp_sanitized": Known(
        "google-research-datasets/mbpp",
        "sanitized",
        {**_BOTH, "validation": "validation"},
        "mbpp",
        "code_tests",
    ),
    "humaneval": Known(
        "openai/openai_humaneval",
        None,
        _TEST,
        "humaneval",
        "code_tests",
        "train on mbpp, with --eval-dataset humaneval",
    ),
}
# Published as files that no reader of hub data sets takes any more (they came with a script).
_FILES = {
    "apps": "train.jsonl and test.jsonl of huggingface.co/datasets/codeparrot/apps into a folder, and give the folder",
    "livecodebench": "test.jsonl of huggingface.co/datasets/livecodebench/code_generation_lite, and give the file as --eval-dataset",
}
GENERATED_REWARDS = {
    "addition": "exact_match",
    "countdown": "countdown",
    "oneliners": "code_tests",
    "shapes": "exact_match",
}


def known(source: str) -> Known | None:
    """What is known of a short name or of its hub name; UserError for one that is to be had as
    files alone.
    """
    name = source.lower().replace("-", "_")
    if name in _FILES:
        raise UserError(f"{source} is not read from the hub: download {_FILES[name]}")
    aliases = {
        "math_500": "math500",
        "sanitized_mbpp": "mbpp_sanitized",
        "openai_humaneval": "humaneval",
    }
    found = CATALOGUE.get(aliases.get(name, name))
    return found or next((one for one in CATALOGUE.values() if one.hub == source), None)
