"""The sections that methods' settings are made of (those of data: rl.settings.data_tables; of
judges: rl.settings.judge_tables). No torch: the command line reads this first.

Every leaf name is unique over the sections of a method, because on the line and in recipes settings
are flat: `--learning-rate 1e-5`, `learning_rate: 1e-5`. The string under a field is its help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rl.schedules import SCHEDULES
from rl.settings.checks import only_with
from rl.settings.ranges import (
    MANY,
    POSITIVE,
    RATE,
    WEIGHT,
    BelowOne,
    Count,
    NotNegative,
    Positive,
    Range,
    Seconds,
    Share,
    Size,
    check_ranges,
)

TEMPERATURE = Range(1e-3, 100, why="greedy samples do not differ")


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
    change: tuple[str, ...] = ()
    """With --resume: settings that change what is learnt, NAME=VALUE ... (or STAGE.NAME=VALUE), from the checkpoint on; noted with its step in config.json. What changes no result needs no --change, nor do steps that are added."""
    overwrite: bool = False
    """Replace the run that the folder holds."""
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] = 0
    """Of everything: initial weights of tiny models, order of the data, samples."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (WANDB_MODE=offline works)."""
    quiet: bool = False
    """No progress display."""
    timeout: Seconds = 1800.0
    """Seconds that one process may wait for another in a collective; longer ends the run with an error that names the other."""
    stop_grace: Seconds = 90.0
    """Seconds to finish the step and save in after SIGTERM, SIGUSR1 or Ctrl-C; then, or at a second signal, the run ends at once. A step that would not fit is left out."""
    self_test: bool = True
    """Before the first step of a stage that samples: draw a few answers and check that learner and sampler agree, that changed weights reach the sampler, that what is trained is what was drawn, and that gradients reach it. Leaves no trace."""
    replay: Path | None = None
    """Repeat the run in this folder bit for bit: with the same settings, what its decisions.jsonl says is decided again (who was ready when, where new weights came)."""
    plan: bool = False
    """Print what each GPU would hold and whether it fits, and train nothing. No weights are loaded; of a hub model the config alone is needed."""
    plan_gpus: Annotated[int | None, Range(1, 10**6)] = None
    """Plan for so many GPUs; by default the processes of this launch."""
    plan_gpu_memory: Annotated[float | None, Range(0, 1e6, above=True)] = None
    """GiB of each GPU planned for; by default those of the GPU that is there, or 80 with --plan-gpus. Without both, and without a GPU, a CPU process is planned."""
    plan_zero: Literal["none", "1", "2", "3"] | None = None
    """Plan for this ZeRO stage (none: one process or DDP); by default that of this launch."""
    plan_prompt_tokens: Size = 512
    """Length of prompts that the plan assumes."""

    def __post_init__(self) -> None:
        check_ranges(self)
        # a shell does so on the line; nobody in a recipe
        if self.output_dir is not None and str(self.output_dir).startswith("~"):
            try:
                object.__setattr__(self, "output_dir", self.output_dir.expanduser())
            except RuntimeError as error:
                raise ValueError(f"output_dir {self.output_dir}: {error}") from error
        if (self.resume or self.auto_resume) and self.overwrite:
            raise ValueError(
                "resume and auto_resume continue a run and overwrite replaces it: give one of them"
            )
        if self.change and not (self.resume or self.auto_resume):
            raise ValueError(
                "change alters a run that goes on: give it with resume (a new run takes its settings as flags)"
            )


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The policy."""

    base_model: str = "tiny:addition"
    """A hub name, a model folder, tiny:<preset> (addition, ascii, vision, chat), built on the spot, or what was trained before: a run's folder (its newest checkpoint), a checkpoint, an export. A later stage starts from the stage before, unless it names a model or, by its name, a stage before that."""
    tokenizer: str | None = None
    """Folder or hub name of a tokenizer to use instead of the model's own."""
    lora_rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: Annotated[float | None, Range(0, 1e6, above=True)] = None
    """Adapters are scaled by alpha / rank; by default alpha = rank."""
    lora_start: Literal["auto", "continue", "merge"] = "auto"
    """Where base_model (a run, an adapter), or the stage before, is a LoRA result. continue: go on with its adapter; merge: merge it into its base, in fp32, and train what lora_rank asks for on that; auto: continue where lora_rank is 0 or all of the adapter's shape, else merge."""
    train_attn: bool = True
    """LoRA on attention."""
    train_mlp: bool = True
    """LoRA on the MLP."""
    train_unembed: bool = True
    """LoRA on the output head."""
    train_vision: bool = False
    """LoRA on the vision tower of a model that sees, and on what joins it to the text. (All weights, --lora-rank 0, are always all.)"""
    train_experts: bool = False
    """LoRA on the experts of a model that holds each of their matrices for all experts in one tensor, as transformers does (PEFT's target_parameters; a rank of its own for every expert)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: fp32 weights (frozen ones: base_dtype), bf16 arithmetic, bf16 sampler. auto: bf16 on a GPU, fp32 on a CPU."""
    base_dtype: Literal["auto", "fp32", "bf16", "4bit"] = "auto"
    """What the frozen matrices under a LoRA adapter are held in; adapters, norms, biases and heads of one's own stay fp32. auto: bf16 where the arithmetic is bf16 (no product changes by it), else fp32. 4bit: NF4 of the package bitsandbytes, double quantised (QLoRA, arXiv 2305.14314); the sampler's copy is bf16."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, about a third more time."""
    router_replay: bool = False
    """Of models with experts: the learner sends each token to the experts that it went to when it was sampled (their routers learn all the same), so that rounding does not route it elsewhere; optim/rerouted is the share of tokens that would have gone elsewhere."""
    router_aux_loss_coef: Annotated[float, WEIGHT] = 0.0
    """Of models with experts: this times the load-balancing loss of the Switch Transformer (arXiv 2101.03961), as transformers computes it, over the trained tokens of each micro-batch, is added to the loss (0.001 in Mixtral's and Qwen3's configs); optim/router_aux_loss is that loss: as many as a token goes to where all experts get the same, at most their number."""
    fused_logprobs: bool = True
    """Token logprobs without holding the logits (kernels.linear_logprob); off: the plain computation."""
    kept_logits_gib: Annotated[float | None, Range(0, 1e6)] = None
    """GiB that the output head may keep of a micro-batch (tokens x vocabulary, two bytes each on a GPU) so that its backward need not compute the scores again; 0: never. By default a quarter of what the model, its gradients, its optimizer's state and one more copy of the weights leave of a GPU's memory, down to a power of two; 1/16 GiB on a CPU."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.precision == "fp32" and self.base_dtype in ("bf16", "4bit"):
            raise ValueError(
                f"base_dtype {self.base_dtype} goes with bf16 arithmetic, and precision is fp32: set precision to bf16"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How answers are drawn."""

    max_tokens: Size = 256
    """Longest answer, in tokens."""
    temperature: Annotated[float, TEMPERATURE] = 0.8
    """Of training samples; the learner scores at the same one."""
    top_k: Annotated[int, Range(-1, MANY)] = -1
    """Only -1 (no truncation): top-k samples have logprobs that the learner cannot score."""
    top_p: Share = 1.0
    """Only 1 (no truncation), for the same reason."""
    dynamic_sampling: Annotated[int, Range(0, 10**6)] = 0
    """Where groups of answers that all earn the same leave a batch short of batch_size groups that differ, sample further problems, at most so many times (DAPO, arXiv 2503.14476, section 3.2); 0: never."""
    eval_temperature: Annotated[float | None, Range(0, 100)] = None
    """Of held-out samples (0: greedy); by default the training temperature."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the model's own end marks; what a reward reads ends before them."""
    eval_greedy: bool = True
    """Also decode the held-out problems greedily before the first and after the last step: tells sharpening from new knowledge."""
    kv_cache_tokens: Size = 262_144
    """Budget of the KV cache of each device, in tokens; what does not fit waits."""
    max_rows: Annotated[int, Range(1, 10**6)] = 1024
    """Most sequences decoded at once on each device."""
    sampler: Literal["auto", "fast", "hf"] = "auto"
    """fast: own decoder (Llama and Qwen families); hf: the model's own forward; auto: fast where it is proved equal."""
    sampler_cache: Literal["auto", "plain", "paged"] = "auto"
    """paged: the cache in pages, and on a GPU graphs of several steps (fast decoder alone); plain: a rectangle a batch; auto: on a GPU paged where a trial gave the same samples, else plain."""
    sampler_tp: Annotated[int, Range(1, 1024, why="1 is a whole copy on each process")] = 1
    """So many processes of a machine, one after the other in rank, hold the sampler's copy of the weights and its cache together, each its heads and columns (fast decoder alone), and sample together; kv_cache_tokens and max_rows are then of all of them. 1: each holds a whole copy. For a model whose copy fits no single GPU."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.top_k != -1 or self.top_p != 1:
            raise ValueError(
                f"training samples are not truncated, got top_k {self.top_k} and top_p {self.top_p}: the learner scores the whole "
                "distribution, so every ratio would be wrong; leave them at -1 and 1 (sample.py and evaluate.py take them)"
            )
        if self.eval_temperature is not None and 0 < self.eval_temperature < TEMPERATURE.low:
            raise ValueError(
                f"eval_temperature is 0 (greedy) or at least {TEMPERATURE.low:g}, got {self.eval_temperature}"
            )
        if self.sampler_cache == "paged" and self.sampler == "hf":
            raise ValueError(
                "sampler_cache paged is of the fast decoder, and sampler is hf, the model's own forward: leave sampler_cache at auto, or sampler at auto or fast"
            )
        if self.sampler_tp > 1 and self.sampler == "hf":
            raise ValueError(
                f"sampler_tp {self.sampler_tp} splits what the fast decoder samples, and sampler is hf, the model's own forward: leave sampler_tp at 1, or sampler at auto or fast"
            )
        if self.sampler_tp > 1 and self.sampler_cache == "paged":
            raise ValueError(
                f"sampler_cache paged goes by itself, and the processes of sampler_tp {self.sampler_tp} wait for each other at every step: leave sampler_cache at auto, or sampler_tp at 1"
            )
        if self.max_tokens > self.kv_cache_tokens:
            raise ValueError(
                f"an answer of max_tokens {self.max_tokens} takes more than kv_cache_tokens {self.kv_cache_tokens}: lower the one or raise the other"
            )


@dataclass(frozen=True, kw_only=True)
class ShapingSettings:
    """What rewards go through before they become advantages, in this order. Metrics show rewards as
    they were given.
    """

    overlong_share: Annotated[
        float, Range(0, 1, below=True, why="a share of max_tokens, such as 0.2; 0 is off")
    ] = 0.0
    """An answer in the last such share of max_tokens loses reward, linearly up to overlong_penalty (DAPO, arXiv 2503.14476, equation 13); 0: off."""
    overlong_penalty: NotNegative = 1.0
    """What an answer of max_tokens loses."""
    cut_off_penalty: NotNegative = 0.0
    """What an episode loses whose last answer max_tokens cut off. A reward model has read answers that end, and may like one that does not (TRL's missing_eos_penalty)."""
    normalise_rewards: bool = False
    """Divide by the standard deviation of all rewards so far (running statistics, saved with the run). Their mean is subtracted first where an answer is credited with one total (grpo and reinforce with step_rewards sum); rewards of single steps are not centred (ppo, rlhf, step_rewards to_go), so that a longer episode earns no more."""
    reward_scale: Positive = 1.0
    """Multiply by this."""
    reward_clip: Annotated[float | None, POSITIVE] = None
    """Cut off at plus and minus this, such as 10."""

    def __post_init__(self) -> None:
        check_ranges(self)
        only_with(
            self,
            ("overlong_penalty",),
            self.overlong_share > 0,
            "overlong_share is 0, which is off",
            "give overlong_share, such as 0.2",
        )


@dataclass(frozen=True, kw_only=True)
class KlSettings:
    """How the policy is held near a reference."""

    kl_coef: Annotated[float | None, WEIGHT] = None
    """Price of KL(policy || reference); by default the method's. Where it is 0 and kl_target is not set there is no reference."""
    reference_model: str | None = None
    """The reference: an earlier stage, a run's folder, a folder of weights or a hub name; by default the policy as it was at the stage's beginning."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """Where the price is paid. reward: the gradient of the KL of whole answers. loss: each token's own."""
    kl_kind: Literal["k1", "k2", "k3", "k3_pathwise"] = "k3"
    """kl_placement loss: the estimator. k1, k2, k3 report different estimates of the same KL and have its gradient, each token weighted by its probability now over that when it was drawn (DeepSeek-V3.2, arXiv 2512.02556; 1 on policy); k3_pathwise is k3 differentiated as it stands and not weighted (GRPO's paper), whose gradient is another KL's."""
    kl_target: Annotated[float | None, Range(0, 1e6, above=True)] = None
    """Adapt kl_coef so that the KL a token stays about here (arXiv 1909.08593); it may start from 0."""
    kl_rate: Annotated[
        float, Range(0, 1, above=True, why="from 5 on the price could fall below 0")
    ] = 0.1
    """How fast kl_coef adapts: by at most a fifth of this a batch."""

    def __post_init__(self) -> None:
        check_ranges(self)
        only_with(
            self,
            ("kl_kind",),
            self.kl_placement == "loss",
            "kl_placement is reward",
            "set kl_placement to loss",
        )
        only_with(
            self,
            ("kl_rate",),
            self.kl_target is not None,
            "without a kl_target kl_coef stays as it is",
            "give kl_target",
        )


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """AdamW and what surrounds it."""

    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """How AdamW keeps its moments: in fp32, 8 bytes a trained weight; in 8 bit, 2 bytes (package bitsandbytes; one process or DDP); paged: those in memory that a GPU that is full leaves to the CPU."""

    learning_rate: Annotated[float | None, RATE] = None
    """Peak learning rate; by default the method's, one for full weights and one for LoRA."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls over the steps."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    beta1: BelowOne = 0.9
    """AdamW."""
    beta2: BelowOne = 0.95
    """AdamW."""
    adam_eps: Annotated[
        float, Range(1e-30, 1, why="in fp32 less is 0, and a weight without a gradient becomes NaN")
    ] = 1e-8
    """AdamW."""
    weight_decay: Annotated[float, Range(0, 1000)] = 0.0
    """AdamW, decoupled."""
    grad_clip_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm; 0: never. The norm before clipping is always logged."""
    num_substeps: Annotated[int, Range(1, 10**6)] = 1
    """Optimizer steps a batch is split into."""
    token_budget: Size = 16_384
    """Positions in one micro-batch: the knob of activation memory. The gradient does not depend on it."""
    layout: Literal["auto", "padded", "packed", "shared"] = "auto"
    """Micro-batches as rows of like length, end to end in one row, or with a group's prompt computed once; auto: padded or shared, whichever is less work, of those exact for the model. The gradient does not depend on it."""

    def __post_init__(self) -> None:
        check_ranges(self)
        assert self.schedule in SCHEDULES


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How long, how much at once, and what is looked at and kept on the way."""

    steps: Count = 100
    """Batches to train on."""
    batch_size: Annotated[int, Range(1, 10**7)] = 32
    """Problems (or rows) a batch."""
    eval_every: Count = 20
    """Held-out evaluation every so many steps, besides before the first and after the last; 0: never."""
    save_every: Count = 20
    """Resumable checkpoint every so many steps; 0: at the end alone."""
    keep_last: Size = 2
    """Checkpoints kept; older ones are removed."""
    keep_best: str | None = "test/env/all/correct"
    """Metric whose best weights are kept (sampler weights, under best-<step>; a reward model's with its value head). Where nothing is sampled, what the method measures on held-out rows instead of the default."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Whether the best is the highest or the lowest (of a metric whose name ends in loss always the lowest)."""
    rollouts_every: Count = 20
    """Write the rollouts (jsonl and a page to read) every so many steps; 0: never."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def best_is(self, metric: str) -> Literal["max", "min"]:
        """Which value of a metric is the best one."""
        return "min" if metric.endswith("loss") else self.keep_best_mode


@dataclass(frozen=True, kw_only=True)
class RowLoopSettings(LoopSettings):
    """The same for a method that learns from rows, which come to an end."""

    epochs: Annotated[float | None, Range(1e-6, 1e6)] = None
    """Train so many times on every row: steps follows from it and from batch_size, and what is given as steps does not count."""
