"""List data sets by short name: hub name, splits and reward. `docs/datasets.md` has the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl.config import DataFormat
from rl.errors import UserError


@dataclass(frozen=True)
class DatasetEntry:
    """Describe a published data set.

    splits: our split names ("train", "test") to the hub's. format: the format of its rows.
    reward: the name of the reward that scores an answer.
    alternative: what to do if the data set has no train split.
    access: what the hub requires before it sends the data set.
    """

    hub: str
    config: str | None
    splits: Mapping[str, str]
    format: DataFormat
    reward: str
    alternative: str = ""
    access: str = ""

    def hub_split(self, name: str, split: str) -> str:
        """Return the hub's name of a split. Raises UserError if the data set lacks it."""
        if split not in self.splits:
            instead = f"; {self.alternative}" if self.alternative else ""
            raise UserError(
                f"{name} has no split {split!r}, only {', '.join(self.splits)}: it is there to "
                f"evaluate with{instead}"
            )
        return self.splits[split]


_BOTH, _TEST = {"train": "train", "test": "test"}, {"test": "test"}
DATASET_REGISTRY: dict[str, DatasetEntry] = {
    "gsm8k": DatasetEntry("openai/gsm8k", "main", _BOTH, "gsm8k", "gsm8k"),
    "math": DatasetEntry(
        "DigitalLearningGmbH/MATH-lighteval", None, _BOTH, "math", "math_correctness"
    ),
    "math500": DatasetEntry(
        "HuggingFaceH4/MATH-500",
        None,
        _TEST,
        "math",
        "math_correctness",
        "train on math, with --eval-dataset math500",
    ),
    "mbpp": DatasetEntry(
        "google-research-datasets/mbpp",
        "full",
        {**_BOTH, "validation": "validation"},
        "mbpp",
        "code_tests",
    ),
    "mbpp_sanitized": DatasetEntry(
        "google-research-datasets/mbpp",
        "sanitized",
        {**_BOTH, "validation": "validation"},
        "mbpp",
        "code_tests",
    ),
    "humaneval": DatasetEntry(
        "openai/openai_humaneval",
        None,
        _TEST,
        "humaneval",
        "code_tests",
        "train on mbpp, with --eval-dataset humaneval",
    ),
    # the hub calls the only split of these "train"
    "aime": DatasetEntry(
        "HuggingFaceH4/aime_2024",
        None,
        {"test": "train"},
        "aime",
        "math_correctness",
        "train on math, with --eval-dataset aime",
    ),
    "aime25": DatasetEntry(
        "math-ai/aime25",
        None,
        _TEST,
        "aime",
        "math_correctness",
        "train on math, with --eval-dataset aime25",
    ),
    **{
        name: DatasetEntry(
            "Idavidrein/gpqa",
            config,
            {"test": "train"},
            "multiple_choice",
            "multiple_choice",
            access=(
                "the data set is gated: accept its conditions at "
                "huggingface.co/datasets/Idavidrein/gpqa, then log in with `hf auth login`"
            ),
        )
        for name, config in (("gpqa", "gpqa_diamond"), ("gpqa_main", "gpqa_main"))
    },
    "ifeval": DatasetEntry("google/IFEval", None, {"test": "train"}, "ifeval", "ifeval"),
}
# Published as files with a loading script, which hub readers no longer support.
_FILES = {
    "apps": (
        "train.jsonl and test.jsonl of huggingface.co/datasets/codeparrot/apps into a folder, and "
        "give the folder"
    ),
    "livecodebench": (
        "test.jsonl of huggingface.co/datasets/livecodebench/code_generation_lite, and give the "
        "file as --eval-dataset"
    ),
}
GENERATED_REWARDS = {
    "addition": "exact_match",
    "countdown": "countdown",
    "oneliners": "code_tests",
    "shapes": "exact_match",
    "sorting": "exact_match",
}


def find_dataset(source: str) -> DatasetEntry | None:
    """Return the entry of a short name or hub name; None if unknown.

    Raises UserError for a data set that is available only as files.
    """
    name = source.lower().replace("-", "_")
    if name in _FILES:
        raise UserError(f"{source} is not read from the hub: download {_FILES[name]}")
    aliases = {
        "math_500": "math500",
        "sanitized_mbpp": "mbpp_sanitized",
        "openai_humaneval": "humaneval",
        "aime24": "aime",
        "aime_2024": "aime",
        "aime_2025": "aime25",
        "gpqa_diamond": "gpqa",
    }
    entry = DATASET_REGISTRY.get(aliases.get(name, name))
    return entry or next(
        (candidate for candidate in DATASET_REGISTRY.values() if candidate.hub == source), None
    )


def split_named_file(source: str) -> tuple[DatasetEntry, str] | None:
    """Return the entry and the file of NAME:FILE, a local file with the columns of a listed data
    set; None for any other source.
    """
    name, colon, file = source.partition(":")
    if not colon or not file or name in GENERATED_REWARDS or Path(source).expanduser().exists():
        return None
    entry = find_dataset(name)
    return None if entry is None else (entry, file)
