"""Define the settings of problems, prompts and rewards, and of models that compute rewards.

Other sections: `rl.config.sections`. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from rl.config.check_config import require
from rl.config.fields import check_ranges
from rl.config.number_range import (
    POSITIVE,
    SIZE,
    NotNegative,
    Positive,
    Range,
    Seconds,
    Size,
)

DataFormat = Literal[
    "auto", "columns", "text", "messages", "sharegpt", "alpaca", "gsm8k", "math", "mbpp", "humaneval", "apps", "livecodebench",
    "preferences", "unpaired", "aime", "multiple_choice", "ifeval",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Hold the settings of the data, the prompts and the rewards."""

    dataset: str = "addition"
    """Training problems: addition (generated), a file (.jsonl, .json, .parquet, .csv, .tsv, .arrow; .gz), a folder of such files (a downloaded hub repository, the output of save_to_disk) or a hub name (openai/gsm8k)."""
    eval_dataset: str | None = None
    """Held-out problems; default: the test split of dataset or, for a single file, its last tenth, which is then excluded from training."""
    more_eval_datasets: tuple[str, ...] = ()
    """Additional held-out data sets; metrics are also reported for each set under its name."""
    more_datasets: tuple[str, ...] = ()
    """Additional training data sets, mixed in with all their rows; metrics are also reported for each set."""
    dataset_weights: Annotated[tuple[float, ...], POSITIVE] = ()
    """Sampling weights of dataset and each of more_datasets, such as 3 1; default: all rows are mixed uniformly."""
    stream: bool = False
    """Read rows on demand, for data larger than memory; invalid rows are reported when they are read. For a .jsonl, .parquet or .arrow file, or a folder of such files."""
    dataset_config: str | None = None
    """Configuration of a hub data set that has several."""
    data_format: DataFormat = "auto"
    """Format of the rows; auto: detected from the columns of the first row."""
    prompt_column: str = "prompt"
    """Column of the prompt in a .jsonl file or hub data set."""
    answer_column: str = "answer"
    """Column of the expected answer; the reward receives it as meta["answer"]."""
    response_column: str | None = None
    """Column of a worked response, for supervised training."""
    image_column: str | None = None
    """Column of the images of a row: paths, bytes or base64, a single value or a list; default: images or image, if a row has such a column."""
    system_prompt: str | None = None
    """System message at the start of every conversation."""
    prompt_template: str | None = None
    """Template of the last user message: a text with {prompt} for the original message and {name} for other columns."""
    prompt_suffix: str | None = None
    """Text appended to the last user message, such as an instruction about the form of the answer."""
    template: tuple[tuple[str, str], ...] = ()
    """Settings of the model's chat template: --template.enable_thinking false, or --template enable_thinking false; in a recipe a mapping."""
    max_prompt_tokens: Annotated[int | None, SIZE] = None
    """Maximum length of a prompt, in tokens; on_too_long decides about longer prompts."""
    max_row_tokens: Annotated[int | None, SIZE] = None
    """Maximum length of a row, prompt and answer together, in tokens; on_too_long decides about longer rows."""
    on_too_long: Literal["auto", "error", "skip", "cut"] = "auto"
    """Action for a row that is too long. error: stop. skip: leave the row out, count and name it. cut: remove the start of the prompt or the end of the answer. auto: skip rows beyond max_prompt_tokens or max_row_tokens, and apply on_bad_row to rows beyond the model's context."""
    train_limit: Annotated[int | None, SIZE] = None
    """Number of training rows to use, from the first; default: all."""
    eval_limit: Size = 256
    """Number of held-out rows to use at each evaluation, from the first."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Action for a row that cannot be used (malformed, too long, rejected by the template). error: stop and name the row. skip: leave it out."""
    renderer: str | None = None
    """Renderer of messages: chat_template, role_colon or plain; default: the recommended renderer of the model."""
    reward: str | None = "exact_match"
    """Reward function: a registered name (exact_match, gsm8k, math_correctness, ...), module:function, or file.py:function. None: answers are not scored, for methods without a reward."""
    rewards: Annotated[tuple[tuple[str, float], ...], Range(-1e6, 1e6)] = ()
    """Several reward functions with their weights, instead of reward; they are added up and each is logged: --rewards gsm8k 1 mine.py:style 0.1; in a recipe a mapping."""
    reward_timeout: Seconds = 10.0
    """Seconds that a reward call may take; a slower call drops its sample."""
    reward_workers: Annotated[int | None, Range(1, 4096)] = None
    """Number of processes that compute rewards, on each machine; default: half the CPU cores, from 2 to 16; for rewards that run programs each core, from 2 to 64; for batched and async rewards 1. If each machine scores what it sampled, its ranks that sample divide them, and have at least one each."""
    reward_machines: Literal["auto", "first", "all"] = "auto"
    """Machines of the launch whose processes compute rewards. all: each scores what its ranks sampled, if it can load the reward's file and modules; it also needs the files, programs and services that the reward uses. first: that of rank 0. auto: as all."""
    reward_env: tuple[str, ...] = ()
    """Additional environment variables for rewards (NAME or PREFIX*); default: PATH, HOME, LANG, PYTHON*, OMP_* and similar, without keys, tokens and GPU access."""
    sandbox: str = "auto"
    """Sandbox in which code_tests and code_output run programs: bubblewrap, sandlock, the URL of a service, or a weaker kind by its name. auto: the strongest kind that this host supports; an error if it supports none."""
    sandbox_packages: tuple[str, ...] = ("numpy",)
    """Installed packages that programs may import in addition to Python's standard library, each with its dependencies."""
    code_score: Literal["all", "fraction"] = "all"
    """Score of code_tests. all: 1 if every test passes, else 0. fraction: the share of tests that pass."""
    code_block: Literal["fenced", "any"] = "fenced"
    """Part of an answer that code_tests and code_output run. fenced: the last ``` block of the language, else the last without a label, with a penalty of 0.1 if the answer has neither. any: that block, or the whole answer if it has none."""
    curriculum: Literal["off", "steps", "success"] = "off"
    """Order of difficulty. steps: start with easy problems and add a level at each of curriculum_steps. success: add a level when answers succeed often, and remove it when they do not. off: all levels from the start."""
    curriculum_column: str = "level"
    """Column of the level of a problem: numbers or texts, in ascending order. (addition has level, the number of carries.)"""
    curriculum_steps: Annotated[tuple[int, ...], SIZE] = ()
    """Steps at which the second, third, ... level starts."""
    curriculum_up: Positive = 0.8
    """Mean success of the last curriculum_window batches from which a level is added (curriculum success)."""
    curriculum_down: NotNegative = 0.2
    """Mean success below which a level is removed (curriculum success)."""
    curriculum_window: Annotated[int, Range(1, 10**6)] = 5
    """Number of batches, all of the current level, over which success is averaged (curriculum success)."""
    curriculum_mix: Literal["up_to", "only"] = "up_to"
    """Problems at a level. up_to: those of the level and all easier levels. only: those of the level."""

    def __post_init__(self) -> None:
        check_ranges(self)
        steps = self.curriculum_steps
        if self.curriculum == "steps" and (
            not steps or list(steps) != sorted(set(steps)) or steps[0] < 1
        ):
            raise ValueError(
                f"curriculum steps requires curriculum_steps, ascending and from 1 on, such as 10 30; got {steps}"
            )
        if not self.curriculum_down < self.curriculum_up:
            raise ValueError(
                f"curriculum_down lies from 0 to below curriculum_up, got {self.curriculum_down} and {self.curriculum_up}"
            )
        if len(dict(self.rewards)) < len(self.rewards):
            raise ValueError(
                f"rewards names a reward twice: {', '.join(name for name, _ in self.rewards)}"
            )
        programs = any(
            name.startswith("code_") or ":" in name
            for name in (dict(self.rewards) or {self.reward or "": 1})
        )
        require(
            self,
            ("code_score", "code_block", "sandbox_packages"),
            programs,
            "no reward runs programs",
            "set reward to code_tests",
        )
        require(
            self,
            ("reward",),
            not self.rewards or self.reward is None,  # None is the default of some methods
            "rewards replaces it",
            "add it to rewards with its weight",
        )
        require(
            self,
            ("curriculum_steps",),
            self.curriculum == "steps",
            f"curriculum is {self.curriculum}",
            "set curriculum to steps",
        )
        self._check_sources()

    def make_prompt_settings(self) -> DataSettings:
        """Return the settings of a further data set of which only the prompts are read. Its rows
        need no answers, so a `data_format` of answers becomes auto.
        """
        is_answers = self.data_format in ("preferences", "unpaired")
        return replace(self, data_format="auto") if is_answers else self

    def _check_sources(self) -> None:
        sets = 1 + len(self.more_datasets)
        if self.dataset_weights and (sets == 1 or len(self.dataset_weights) != sets):
            raise ValueError(
                f"dataset_weights has one weight for dataset and one for each of more_datasets, {sets} in all; got {len(self.dataset_weights)}"
            )
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template must contain {{prompt}} at the place of the prompt, got {self.prompt_template!r}"
            )
        limited = self.max_prompt_tokens is not None or self.max_row_tokens is not None
        if self.on_too_long == "cut" and not limited:
            raise ValueError(
                "on_too_long cut requires a limit: set max_prompt_tokens, max_row_tokens or both"
            )
        if self.stream and self.curriculum != "off":
            raise ValueError(
                "curriculum requires the level of every row before the first step, which stream does not read: leave out stream or curriculum"
            )


@dataclass(frozen=True, kw_only=True)
class AnswerDataSettings(DataSettings):
    """Hold the data settings of supervised methods; nothing is sampled unless a reward is set."""

    reward: str | None = None
    """Reward function for sampled answers to held-out prompts (exact_match, module:function, ...); None: nothing is sampled."""


@dataclass(frozen=True, kw_only=True)
class PreferenceDataSettings(DataSettings):
    """Hold the data settings of methods that learn from preference pairs."""

    data_format: DataFormat = "preferences"
    """Format of the rows. preferences: chosen and rejected next to a prompt (or instruction and input), as whole conversations, or as the dialogues of HH-RLHF; or output_1, output_2 and label of LLMBar."""
    chosen_column: str = "chosen"
    """Column of the preferred answer: text, an assistant message, or a whole conversation."""
    rejected_column: str = "rejected"
    """Column of the rejected answer."""
    reward: str | None = None
    """Reward function for sampled answers to held-out prompts (exact_match, module:function, ...); None: held-out pairs are ranked and nothing is sampled."""


def is_api_address(target: str) -> bool:
    """Return whether `target` is the address of an API and not the name of weights."""
    return target.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class LearnedRewardSettings:
    """Hold the settings of models that compute the reward."""

    reward_model: str | None = None
    """Reward model to train against: an earlier stage, the folder of a reward_model run, a checkpoint of such a run, or a published model (folder or hub name) with a ...ForSequenceClassification class and a single output, which reads conversations with its tokenizer and chat template. The reward setting is then only measured (see other_reward_weight)."""
    reward_models: Annotated[tuple[tuple[str, float], ...], Range(-1e6, 1e6)] = ()
    """Several reward models with their weights, instead of reward_model; the scores are added up and each is logged (reward/learned/<name>): --reward-models org/one 1 runs/rm 0.5; in a recipe a mapping."""
    comparison_model: str | None = None
    """Language model that compares answers (an earlier stage, a run's folder, a folder of weights, a hub name). It reads each pair of answers of a group in both orders; the probabilities of A, B and tie are used. Reward: the share of the group's other answers to which an answer is preferred."""
    rubric_model: str | None = None
    """Language model that answers each question of rubric about each answer (specified like comparison_model, or the address of an OpenAI-compatible API: http://localhost:8000/v1, with #MODEL at its end if it has several models; the key is read from OPENAI_API_KEY). Reward: the weighted mean of the results, 0 to 1; each result is logged as rubric/<its first words>."""
    rubric: Annotated[tuple[tuple[str, float], ...], Range(-1e6, 1e6)] = ()
    """Questions with their weights, phrased so that yes is good (or with a negative weight): --rubric "Is it polite?" 1 "Is it right?" 3; in a recipe a mapping."""
    rubric_reading: Literal["yes_no", "score"] = "yes_no"
    """Way to read the rubric model. yes_no: the probability of yes against no; nothing is sampled. score: the model writes a text, and the last "Score: N" is read, N from 0 to rubric_scale; an answer without such a line is left out and counted."""
    rubric_scale: Positive = 10.0
    """Highest score N (rubric_reading score)."""
    rubric_max_tokens: Size = 256
    """Maximum number of tokens that the rubric model writes for a question (rubric_reading score)."""
    rubric_renderer: str | None = None
    """Renderer of the rubric model: chat_template, role_colon or plain; default: the recommended renderer of the model."""
    other_reward_weight: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Weight of reward (or rewards) next to the model's score; 0: measure it without training on it."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.reward_models and self.reward_model is not None:
            raise ValueError(
                f"reward_models replaces reward_model: add {self.reward_model} to reward_models with its weight, or leave reward_model out"
            )
        if len({name for name, _ in self.reward_models}) < len(self.reward_models):
            raise ValueError(
                f"reward_models names a model twice: {', '.join(name for name, _ in self.reward_models)}"
            )
        if self.weighted_reward_models and self.comparison_model is not None:
            name = "reward_models score" if self.reward_models else "reward_model scores"
            raise ValueError(
                f"{name} answers and comparison_model compares them: set reward models or comparison_model, not both"
            )
        if self.rubric_model is not None and len(self.model_names) > 1:
            raise ValueError(
                f"rubric_model computes the reward by itself: leave out {self.model_names[0]} or rubric_model"
            )
        if self.other_reward_weight and not self.model_names:
            raise ValueError(
                "other_reward_weight requires reward_model, reward_models, comparison_model or rubric_model: set any of these, or leave other_reward_weight out"
            )
        if (self.rubric_model is None) != (not self.rubric):
            raise ValueError(
                'rubric and rubric_model go together: --rubric-model NAME --rubric "Is the answer polite?" 1'
            )
        options = ("rubric_reading", "rubric_renderer")
        require(
            self,
            options,
            self.rubric_model is not None,
            "no rubric_model is set",
            "set rubric_model",
        )
        if self.rubric_renderer is not None and is_api_address(self.rubric_model or ""):
            raise ValueError(
                f"rubric_renderer {self.rubric_renderer} has no effect: the server at {self.rubric_model} applies its model's chat template; leave it out"
            )
        for name in self.loaded_model_names:
            if is_api_address(name):
                raise ValueError(
                    f"{name} is an address, which only rubric_model takes: a reward model or a comparison model is loaded here"
                )
        written = self.rubric_reading == "score"
        require(
            self,
            ("rubric_scale", "rubric_max_tokens"),
            written,
            "rubric_reading is yes_no",
            "set rubric_reading to score",
        )

    @property
    def model_names(self) -> list[str]:
        """Return the names of all configured models."""
        return [
            *(name for name, _ in self.weighted_reward_models),
            *(name for name in (self.comparison_model, self.rubric_model) if name is not None),
        ]

    @property
    def loaded_model_names(self) -> list[str]:
        """Return the names of the configured models that the run loads."""
        api = {self.rubric_model} if is_api_address(self.rubric_model or "") else set()
        return [name for name in self.model_names if name not in api]

    @property
    def weighted_reward_models(self) -> tuple[tuple[str, float], ...]:
        """Return the reward models with their weights: reward_models, or reward_model with weight
        1.
        """
        return self.reward_models or (
            () if self.reward_model is None else ((self.reward_model, 1.0),)
        )
