"""The sections of settings that say what is asked and what scores an answer (see rl.settings.tables
for the others). No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.settings.checks import only_with
from rl.settings.ranges import (
    POSITIVE,
    SIZE,
    NotNegative,
    Positive,
    Range,
    Seconds,
    Size,
    check_ranges,
)

DataFormat = Literal[
    "auto", "columns", "text", "messages", "sharegpt", "alpaca", "gsm8k", "math", "mbpp", "humaneval", "apps", "livecodebench",
    "preferences", "unpaired",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Problems, how they are put to the model, and what scores an answer."""

    dataset: str = "addition"
    """addition (generated), a file (.jsonl, .json, .parquet, .csv, .tsv, .arrow; .gz), a folder of them (a downloaded hub repository, what save_to_disk wrote) or a hub name (openai/gsm8k)."""
    eval_dataset: str | None = None
    """Held-out problems; by default the test split of dataset, or of a single file the last tenth, which is not trained on."""
    more_eval_datasets: tuple[str, ...] = ()
    """Further held-out problems; figures are given for each set as well, under its name."""
    more_datasets: tuple[str, ...] = ()
    """Further data sets, mixed in with all their rows; metrics are given for each as well."""
    dataset_weights: Annotated[tuple[float, ...], POSITIVE] = ()
    """Shares of dataset and of each of more_datasets in what is asked, such as 3 1; by default all their rows are mixed as they are."""
    stream: bool = False
    """Read rows when they are needed, for data larger than memory: bad rows are found as they are met. A .jsonl, .parquet or .arrow file, or a folder of them."""
    dataset_config: str | None = None
    """Configuration of a hub data set that has several."""
    data_format: DataFormat = "auto"
    """Shape of the rows; auto: by the columns of the first."""
    prompt_column: str = "prompt"
    """Column of the prompt in a .jsonl file or hub data set."""
    answer_column: str = "answer"
    """Column of the expected answer; reaches the reward as meta["answer"]."""
    response_column: str | None = None
    """Column of a worked response, for supervised training."""
    image_column: str | None = None
    """Column of a row's images: paths, bytes, base64, one or a list; by default images or image, where a row has them."""
    system_prompt: str | None = None
    """Put before every conversation."""
    prompt_template: str | None = None
    """What the last user message becomes: a text with {prompt} where it stood, and other columns as {name}."""
    prompt_suffix: str | None = None
    """Put after the last user message, such as an instruction how to answer."""
    template: tuple[tuple[str, str], ...] = ()
    """Settings of the model's chat template: --template.enable_thinking false, or --template enable_thinking false; in a recipe a mapping."""
    max_prompt_tokens: Annotated[int | None, SIZE] = None
    """Longest prompt; on_too_long says what becomes of longer ones."""
    max_row_tokens: Annotated[int | None, SIZE] = None
    """Longest row, prompt and answer together; on_too_long says what becomes of longer ones."""
    on_too_long: Literal["auto", "error", "skip", "cut"] = "auto"
    """A row that is too long. skip: left out, counted and named; cut: the prompt loses its beginning, the answer its end; auto: skip beyond a limit given here, on_bad_row beyond the model's context."""
    train_limit: Annotated[int | None, SIZE] = None
    """Use the first so many training rows."""
    eval_limit: Size = 256
    """Use the first so many held-out rows at each evaluation."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used (malformed, too long, refused by the template): stop and name it, or leave it out."""
    renderer: str | None = None
    """chat_template, role_colon or plain; by default the one recommended for the model."""
    reward: str | None = "exact_match"
    """A registered name (exact_match, gsm8k, math_correctness, ...), module:function, or file.py:function. None: answers are not scored, for methods that learn without."""
    rewards: Annotated[tuple[tuple[str, float], ...], Range(-1e6, 1e6)] = ()
    """Several rewards and their weights, added up and each logged, instead of reward: --rewards gsm8k 1 mine.py:style 0.1; in a recipe a mapping."""
    reward_timeout: Seconds = 10.0
    """Seconds one reward may take; a slower one costs its sample."""
    reward_workers: Annotated[int | None, Range(1, 4096)] = None
    """Processes that compute rewards; by default half the cores, from 2 to 16."""
    reward_env: tuple[str, ...] = ()
    """Environment variables that rewards get as well (NAME or PREFIX*): by default PATH, HOME, LANG, PYTHON*, OMP_* and the like, no keys or tokens, no GPU."""
    sandbox: str = "auto"
    """Where code_tests and code_output run programs: bubblewrap, sandlock, a service's URL, or a weaker kind by its name; auto: the strongest that this host has, refused where it has none."""
    sandbox_packages: tuple[str, ...] = ("numpy",)
    """Installed packages that programs may import besides Python's standard library, each with what it requires."""
    code_score: Literal["all", "fraction"] = "all"
    """code_tests: 1 where every test passes, or the share of tests that do."""
    code_block: Literal["fenced", "any"] = "fenced"
    """code_tests, code_output: take the last ``` block of an answer, and 0.1 off where it has none; any: where it has none take the answer as it is."""
    curriculum: Literal["off", "steps", "success"] = "off"
    """Ask easy problems first. steps: a level is added at each of curriculum_steps; success: where answers succeed often, and taken back where they do not."""
    curriculum_column: str = "level"
    """Column of a problem's level: numbers or texts, in ascending order. (addition has level, its number of carries.)"""
    curriculum_steps: Annotated[tuple[int, ...], SIZE] = ()
    """Steps at which the second, third, ... level begins."""
    curriculum_up: Positive = 0.8
    """success: a level up where the mean of the last curriculum_window batches is at least this."""
    curriculum_down: NotNegative = 0.2
    """success: a level down where it is below this."""
    curriculum_window: Annotated[int, Range(1, 10**6)] = 5
    """success: so many batches are looked at, all of the present level."""
    curriculum_mix: Literal["up_to", "only"] = "up_to"
    """Problems asked at a level: its own and all easier ones, or its own only."""

    def __post_init__(self) -> None:
        check_ranges(self)
        steps = self.curriculum_steps
        if self.curriculum == "steps" and (
            not steps or list(steps) != sorted(set(steps)) or steps[0] < 1
        ):
            raise ValueError(
                f"curriculum steps needs curriculum_steps, ascending and from 1 on, such as 10 30; got {steps}"
            )
        if not self.curriculum_down < self.curriculum_up:
            raise ValueError(
                f"curriculum_down lies from 0 to below curriculum_up, got {self.curriculum_down} and {self.curriculum_up}"
            )
        programs = any(
            name.startswith("code_") or ":" in name
            for name in (dict(self.rewards) or {self.reward or "": 1})
        )
        only_with(
            self,
            ("code_score", "code_block", "sandbox_packages"),
            programs,
            "no reward runs programs",
            "set reward to code_tests",
        )
        if self.rewards:
            only_with(
                self,
                ("reward",),
                False,
                "rewards stands in its place",
                "add it to rewards with its weight",
            )
        only_with(
            self,
            ("curriculum_steps",),
            self.curriculum == "steps",
            f"curriculum is {self.curriculum}",
            "set curriculum to steps",
        )
        self._check_sources()

    def _check_sources(self) -> None:
        sets = 1 + len(self.more_datasets)
        if self.dataset_weights and (sets == 1 or len(self.dataset_weights) != sets):
            raise ValueError(
                f"dataset_weights has one weight for dataset and one for each of more_datasets, {sets} in all; got {len(self.dataset_weights)}"
            )
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template holds {{prompt}} where the prompt is to stand, got {self.prompt_template!r}"
            )
        limited = self.max_prompt_tokens is not None or self.max_row_tokens is not None
        if self.on_too_long == "cut" and not limited:
            raise ValueError(
                "on_too_long cut needs to know where: give max_prompt_tokens, max_row_tokens or both"
            )
        if self.stream and self.curriculum != "off":
            raise ValueError(
                "a curriculum needs to know every row's level before the first step: leave out stream or curriculum"
            )


@dataclass(frozen=True, kw_only=True)
class AnswerDataSettings(DataSettings):
    """Answers to learn from; nothing is sampled unless a reward is named."""

    reward: str | None = None
    """Also sample answers to held-out prompts and score them with this (exact_match, module:function, ...); None: nothing is sampled."""


@dataclass(frozen=True, kw_only=True)
class PreferenceDataSettings(DataSettings):
    """Pairs of answers to a prompt, of which one is preferred."""

    data_format: DataFormat = "preferences"
    """preferences: chosen and rejected beside a prompt (or instruction and input), as whole conversations, as HH-RLHF's dialogues; or LLMBar's output_1, output_2 and label."""
    chosen_column: str = "chosen"
    """Column of the preferred answer: text, a message of the assistant, or a whole conversation."""
    rejected_column: str = "rejected"
    """Column of the other answer."""
    reward: str | None = None
    """Also sample answers to held-out prompts and score them with this (exact_match, module:function, ...); None: held-out pairs are ranked, nothing is sampled."""
