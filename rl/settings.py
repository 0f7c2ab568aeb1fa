"""The sections that methods' settings are made of. No torch here: the command line reads this before anything heavy.

Every leaf name is unique over the sections of a method, because on the line and in recipes settings are flat:
`--learning-rate 1e-5`, `learning_rate: 1e-5`. The string under a field is its help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.schedules import SCHEDULES
from rl.setting_checks import at_least, only_with


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What holds for the whole run."""

    name: str | None = None
    """Name of the run; by default the recipe's file name, or the method's."""
    output_dir: Path | None = None
    """Folder of the run; by default runs/<name>. A run writes nowhere else."""
    resume: bool = False
    """Go on with the run in the folder from its newest whole checkpoint."""
    auto_resume: bool = False
    """Go on with the run that the folder holds, or start it if there is none: for a job that is restarted with the same line."""
    overwrite: bool = False
    """Replace the run that the folder holds."""
    seed: int = 0
    """Of everything: initial weights of tiny models, order of the data, samples."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (WANDB_MODE=offline works)."""
    quiet: bool = False
    """No progress display."""
    timeout: float = 1800.0
    """Seconds that one process may wait for another in a collective; longer ends the run with an error that names the other."""
    stop_grace: float = 90.0
    """Seconds to finish the step and save in after SIGTERM, SIGUSR1 or Ctrl-C; then, or at a second signal, the run ends at once. A step that would not fit is left out."""
    plan: bool = False
    """Print what each GPU would hold and whether it fits, and train nothing. No weights are loaded; of a hub model the config alone is needed."""
    plan_gpus: int | None = None
    """Plan for so many GPUs; by default the processes of this launch."""
    plan_gpu_memory: float | None = None
    """GiB of each GPU planned for; by default those of the GPU that is there, or 80 with --plan-gpus. Without both, and without a GPU, a CPU process is planned."""
    plan_zero: Literal["none", "1", "2", "3"] | None = None
    """Plan for this ZeRO stage (none: one process or DDP); by default that of this launch."""
    plan_prompt_tokens: int = 512
    """Length of prompts that the plan assumes."""

    def __post_init__(self) -> None:
        for name in ("plan_gpus", "plan_gpu_memory", "plan_prompt_tokens"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} is positive, got {value}")
        for name in ("timeout", "stop_grace"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is a positive number of seconds, got {getattr(self, name)}")
        if (self.resume or self.auto_resume) and self.overwrite:
            raise ValueError("resume and auto_resume continue a run and overwrite replaces it: give one of them")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The policy."""

    base_model: str = "tiny:addition"
    """A hub name, a model folder, or tiny:<preset> (addition, ascii, chat), built on the spot. A later stage starts from the stage before, unless it names a model or, by its name, a stage before that."""
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
        at_least("lora_rank", self.lora_rank, 0)
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            raise ValueError(f"lora_alpha is positive, got {self.lora_alpha}")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Problems, how they are put to the model, and what scores an answer."""

    dataset: str = "addition"
    """addition (generated), a .jsonl file, a folder or hub name (openai/gsm8k), ..."""
    eval_dataset: str | None = None
    """Held-out problems; by default the test split of dataset, or of a single file the last tenth, which is not trained on."""
    more_datasets: tuple[str, ...] = ()
    """Further data sets, mixed in with all their rows; metrics are given for each as well."""
    dataset_config: str | None = None
    """Configuration of a hub data set that has several."""
    data_format: Literal["auto", "columns", "messages", "alpaca", "gsm8k", "preferences"] = "auto"
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
    reward: str | None = "exact_match"
    """A registered name (exact_match, gsm8k, math_correctness, ...), module:function, or file.py:function. None: answers are not scored, for methods that learn without."""
    rewards: tuple[tuple[str, float], ...] = ()
    """Several rewards and their weights, added up and each logged, instead of reward: --rewards gsm8k 1 mine.py:style 0.1; in a recipe a mapping."""
    reward_timeout: float = 10.0
    """Seconds one reward may take; a slower one costs its sample."""
    reward_workers: int | None = None
    """Processes that compute rewards; by default one for each spare core, at most 8."""
    curriculum: Literal["off", "steps", "success"] = "off"
    """Ask easy problems first. steps: a level is added at each of curriculum_steps; success: where answers succeed often, and taken back where they do not."""
    curriculum_column: str = "level"
    """Column of a problem's level: numbers or texts, in ascending order. (addition has level, its number of carries.)"""
    curriculum_steps: tuple[int, ...] = ()
    """Steps at which the second, third, ... level begins."""
    curriculum_up: float = 0.8
    """success: a level up where the mean of the last curriculum_window batches is at least this."""
    curriculum_down: float = 0.2
    """success: a level down where it is below this."""
    curriculum_window: int = 5
    """success: so many batches are looked at, all of the present level."""
    curriculum_mix: Literal["up_to", "only"] = "up_to"
    """Problems asked at a level: its own and all easier ones, or its own only."""

    def __post_init__(self) -> None:
        steps = self.curriculum_steps
        if self.curriculum == "steps" and (not steps or list(steps) != sorted(set(steps)) or steps[0] < 1):
            raise ValueError(f"curriculum steps needs curriculum_steps, ascending and from 1 on, such as 10 30; got {steps}")
        if not 0 <= self.curriculum_down < self.curriculum_up:
            raise ValueError(f"curriculum_down lies from 0 to below curriculum_up, got {self.curriculum_down} and {self.curriculum_up}")
        at_least("curriculum_window", self.curriculum_window, 1)
        only_with(self, ("curriculum_steps",), self.curriculum == "steps", f"curriculum is {self.curriculum}", "set curriculum to steps")


@dataclass(frozen=True, kw_only=True)
class PreferenceDataSettings(DataSettings):
    """Pairs of answers to a prompt, of which one is preferred."""

    data_format: Literal["auto", "columns", "messages", "alpaca", "gsm8k", "preferences"] = "preferences"
    """preferences: chosen and rejected beside a prompt (or instruction and input), as whole conversations, as HH-RLHF's dialogues; or LLMBar's output_1, output_2 and label."""
    chosen_column: str = "chosen"
    """Column of the preferred answer: text, a message of the assistant, or a whole conversation."""
    rejected_column: str = "rejected"
    """Column of the other answer."""
    reward: str | None = None
    """Also sample answers to held-out prompts and score them with this (exact_match, module:function, ...); None: held-out pairs are ranked, nothing is sampled."""


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
    dynamic_sampling: int = 0
    """Where groups of answers that all earn the same leave a batch short of batch_size groups that differ, sample further problems, at most so many times (DAPO, arXiv 2503.14476, section 3.2); 0: never."""
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
        at_least("max_tokens", self.max_tokens, 1)
        if not self.temperature > 0:
            raise ValueError(f"training samples need a temperature above 0 (greedy samples do not differ), got {self.temperature}")
        if self.top_k != -1 or self.top_p != 1:
            raise ValueError(
                f"training samples are not truncated, got top_k {self.top_k} and top_p {self.top_p}: the learner scores the whole "
                "distribution, so every ratio would be wrong; leave them at -1 and 1 (sample.py and evaluate.py take them)"
            )
        at_least("dynamic_sampling", self.dynamic_sampling, 0)
        if self.eval_temperature is not None:
            at_least("eval_temperature", self.eval_temperature, 0)


@dataclass(frozen=True, kw_only=True)
class ShapingSettings:
    """What rewards go through before they become advantages, in this order. Metrics show rewards as they were given."""

    overlong_share: float = 0.0
    """An answer in the last such share of max_tokens loses reward, linearly up to overlong_penalty (DAPO, arXiv 2503.14476, equation 13); 0: off."""
    overlong_penalty: float = 1.0
    """What an answer of max_tokens loses."""
    cut_off_penalty: float = 0.0
    """What an episode loses whose last answer max_tokens cut off. A reward model has read answers that end, and may like one that does not (TRL's missing_eos_penalty)."""
    normalise_rewards: bool = False
    """Divide by the standard deviation of all rewards so far (running statistics, saved with the run). Their mean is subtracted first where an answer is credited with one total (grpo and reinforce with step_rewards sum); rewards of single steps are not centred (ppo, rlhf, step_rewards to_go), so that a longer episode earns no more."""
    reward_scale: float = 1.0
    """Multiply by this."""
    reward_clip: float | None = None
    """Cut off at plus and minus this, such as 10."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlong_share < 1:
            raise ValueError(f"overlong_share is a share of max_tokens from 0 (off) to below 1, such as 0.2, got {self.overlong_share}")
        at_least("overlong_penalty", self.overlong_penalty, 0)
        at_least("cut_off_penalty", self.cut_off_penalty, 0)
        only_with(self, ("overlong_penalty",), self.overlong_share > 0, "overlong_share is 0, which is off", "give overlong_share, such as 0.2")
        for name in ("reward_scale", "reward_clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is positive, got {value}")


@dataclass(frozen=True, kw_only=True)
class KlSettings:
    """How the policy is held near a reference."""

    kl_coef: float | None = None
    """Price of KL(policy || reference); by default the method's. Where it is 0 and kl_target is not set there is no reference."""
    reference_model: str | None = None
    """The reference: an earlier stage, a run's folder, a folder of weights or a hub name; by default the policy as it was at the stage's beginning."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the price is paid. reward: the gradient of the KL of whole answers. loss: each token's own."""
    kl_kind: Literal["k1", "k2", "k3", "k3_pathwise"] = "k3"
    """kl_in loss: the estimator. k1, k2, k3 report different estimates of the same KL and have its gradient, each token weighted by its probability now over that when it was drawn (DeepSeek-V3.2, arXiv 2512.02556; 1 on policy); k3_pathwise is k3 differentiated as it stands and not weighted (GRPO's paper), whose gradient is another KL's."""
    kl_target: float | None = None
    """Adapt kl_coef so that the KL a token stays about here (arXiv 1909.08593); it may start from 0."""
    kl_rate: float = 0.1
    """How fast kl_coef adapts: by at most a fifth of this a batch."""

    def __post_init__(self) -> None:
        if self.kl_coef is not None:
            at_least("kl_coef", self.kl_coef, 0)
        for name in ("kl_target", "kl_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is positive, got {value}")
        only_with(self, ("kl_kind",), self.kl_in == "loss", "kl_in is reward", "set kl_in to loss")
        only_with(self, ("kl_rate",), self.kl_target is not None, "without a kl_target kl_coef stays as it is", "give kl_target")


@dataclass(frozen=True, kw_only=True)
class LearnedRewardSettings:
    """A model in the loop whose judgement is the reward."""

    reward_model: str | None = None
    """Learn from a reward model's scores: an earlier stage, the folder of a reward_model run, or a checkpoint of one. What reward says is then only measured (see other_reward_weight)."""
    comparison_model: str | None = None
    """Learn from comparisons instead: a language model (an earlier stage, a run's folder, a folder of weights, a hub name) is shown the answers of a group two by two, in both orders, and the probabilities of A, B and tie are read. Reward: the share of its group that an answer is preferred to."""
    other_reward_weight: float = 0.0
    """Of what reward (or rewards) says, beside the model's judgement: 0 measures it and learns nothing from it."""

    def __post_init__(self) -> None:
        if self.reward_model is not None and self.comparison_model is not None:
            raise ValueError("reward_model scores answers and comparison_model compares them: name one of the two")
        if self.other_reward_weight and not self.named:
            raise ValueError("other_reward_weight stands beside a reward_model or comparison_model: name one, or leave it out")

    @property
    def named(self) -> list[str]:
        """The model that was named, if one was."""
        return [name for name in (self.reward_model, self.comparison_model) if name is not None]


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
            at_least(name, getattr(self, name), 0)
        for name in ("num_substeps", "token_budget"):
            at_least(name, getattr(self, name), 1)


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
    """Metric whose best weights are kept (sampler weights, under best-<step>; a reward model's with its value head)."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Whether the best is the highest or the lowest."""
    rollouts_every: int = 20
    """Write the rollouts (jsonl and a page to read) every so many steps; 0: never."""

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every", "save_every", "rollouts_every"):
            at_least(name, getattr(self, name), 0)
        for name in ("batch_size", "keep_last"):
            at_least(name, getattr(self, name), 1)
