"""The sections that methods' settings are made of. No torch here: the command line reads this before anything heavy.

Every leaf name is unique over the sections of a method, because on the line and in recipes settings are flat:
`--learning-rate 1e-5`, `learning_rate: 1e-5`. The string under a field is its help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.schedules import SCHEDULES


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise ValueError(f"{name} is at least {low}, got {value}")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What holds for the whole run."""

    name: str | None = None
    """Name of the run; by default the recipe's file name, or the method's."""
    output_dir: Path | None = None
    """Folder of the run; by default runs/<name>. A run writes nowhere else."""
    resume: bool = False
    """Go on with the run in the folder from its newest whole checkpoint."""
    overwrite: bool = False
    """Replace the run that the folder holds."""
    seed: int = 0
    """Of everything: initial weights of tiny models, order of the data, samples."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (WANDB_MODE=offline works)."""
    quiet: bool = False
    """No progress display."""

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ValueError("resume continues a run and overwrite replaces it: give one of them")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The policy."""

    base_model: str = "tiny:addition"
    """A hub name, a model folder, or tiny:<preset> (addition, ascii, chat), built on the spot. A later stage starts from the stage before unless it names one."""
    tokenizer: str | None = None
    """Folder or hub name of a tokenizer to use instead of the model's own."""
    lora_rank: int = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: float | None = None
    """Adapters are scaled by alpha / rank; by default alpha = rank."""
    train_attn: bool = True
    """LoRA on attention."""
    train_mlp: bool = True
    """LoRA on the MLP."""
    train_unembed: bool = True
    """LoRA on the output head."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: fp32 weights, bf16 arithmetic, bf16 sampler. auto: bf16 on a GPU, fp32 on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, about a third more time."""
    fused_logprobs: bool = True
    """Token logprobs without holding the logits (kernels.linear_logprob); off: the plain computation."""

    def __post_init__(self) -> None:
        _at_least("lora_rank", self.lora_rank, 0)
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            raise ValueError(f"lora_alpha is positive, got {self.lora_alpha}")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Problems, how they are put to the model, and what scores an answer."""

    dataset: str = "addition"
    """addition (generated), a .jsonl file, a folder or hub name (openai/gsm8k), ..."""
    eval_dataset: str | None = None
    """Held-out problems; by default the test split of dataset, or of a single file the last tenth, which is not trained on."""
    dataset_config: str | None = None
    """Configuration of a hub data set that has several."""
    data_format: Literal["auto", "columns", "messages", "alpaca", "gsm8k"] = "auto"
    """Shape of the rows; auto: by the columns of the first."""
    prompt_column: str = "prompt"
    """Column of the prompt in a .jsonl file or hub data set."""
    answer_column: str = "answer"
    """Column of the expected answer; reaches the reward as meta["answer"]."""
    response_column: str | None = None
    """Column of a worked response, for supervised training."""
    system_prompt: str | None = None
    """Put before every conversation."""
    train_limit: int | None = None
    """Use the first so many training rows."""
    eval_limit: int = 256
    """Use the first so many held-out rows at each evaluation."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A malformed row: stop and name it, or skip it and count."""
    renderer: str | None = None
    """chat_template, role_colon or plain; by default the one recommended for the model."""
    reward: str = "exact_match"
    """A registered name (exact_match, gsm8k, math_correctness, ...), module:function, or file.py:function."""
    reward_timeout: float = 10.0
    """Seconds one reward may take; a slower one costs its sample."""
    reward_workers: int | None = None
    """Processes that compute rewards; by default one for each spare core, at most 8."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How answers are drawn."""

    max_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 0.8
    """Of training samples; the learner scores at the same one."""
    top_k: int = -1
    """Only -1 (no truncation): top-k samples have logprobs that the learner cannot score."""
    top_p: float = 1.0
    """Only 1 (no truncation), for the same reason."""
    eval_temperature: float | None = None
    """Of held-out samples (0: greedy); by default the training temperature."""
    eval_greedy: bool = True
    """Also decode the held-out problems greedily before the first and after the last step: tells sharpening from new knowledge."""
    kv_cache_tokens: int = 262_144
    """Budget of the KV cache of each device, in tokens; what does not fit waits."""
    max_rows: int = 1024
    """Most sequences decoded at once on each device."""
    sampler: Literal["auto", "fast", "hf"] = "auto"
    """fast: own decoder (Llama and Qwen families); hf: the model's own forward; auto: fast where it is proved equal."""

    def __post_init__(self) -> None:
        _at_least("max_tokens", self.max_tokens, 1)
        if not self.temperature > 0:
            raise ValueError(f"training samples need a temperature above 0 (greedy samples do not differ), got {self.temperature}")
        if self.top_k != -1 or self.top_p != 1:
            raise ValueError(
                f"training samples are not truncated, got top_k {self.top_k} and top_p {self.top_p}: the learner scores the whole "
                "distribution, so every ratio would be wrong; leave them at -1 and 1 (sample.py and evaluate.py take them)"
            )
        if self.eval_temperature is not None:
            _at_least("eval_temperature", self.eval_temperature, 0)


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """AdamW and what surrounds it."""

    learning_rate: float | None = None
    """Peak learning rate; by default the method's, one for full weights and one for LoRA."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls over the steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """AdamW."""
    beta2: float = 0.95
    """AdamW."""
    adam_eps: float = 1e-8
    """AdamW."""
    weight_decay: float = 0.0
    """AdamW, decoupled."""
    grad_clip_norm: float = 1.0
    """Gradients are scaled down to this norm; 0: never. The norm before clipping is always logged."""
    num_substeps: int = 1
    """Optimizer steps a batch is split into."""
    token_budget: int = 16_384
    """Positions in one micro-batch: the knob of activation memory. The gradient does not depend on it."""
    layout: Literal["auto", "padded", "packed", "shared"] = "auto"
    """Micro-batches as rows of like length, end to end in one row, or with a group's prompt computed once; auto: padded or shared, whichever is less work. The gradient does not depend on it."""

    def __post_init__(self) -> None:
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate is positive, got {self.learning_rate}")
        assert self.schedule in SCHEDULES
        for name in ("warmup_steps", "weight_decay", "grad_clip_norm"):
            _at_least(name, getattr(self, name), 0)
        for name in ("num_substeps", "token_budget"):
            _at_least(name, getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How long, how much at once, and what is looked at and kept on the way."""

    steps: int = 100
    """Batches to train on."""
    batch_size: int = 32
    """Problems (or rows) a batch."""
    eval_every: int = 20
    """Held-out evaluation every so many steps, besides before the first and after the last; 0: never."""
    save_every: int = 20
    """Resumable checkpoint every so many steps; 0: at the end alone."""
    keep_last: int = 2
    """Checkpoints kept; older ones are removed."""
    keep_best: str | None = "test/env/all/correct"
    """Metric whose best weights are kept (sampler weights, under best-<step>)."""
    rollouts_every: int = 20
    """Write the rollouts (jsonl and a page to read) every so many steps; 0: never."""

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every", "save_every", "rollouts_every"):
            _at_least(name, getattr(self, name), 0)
        for name in ("batch_size", "keep_last"):
            _at_least(name, getattr(self, name), 1)
