"""Define the settings sections that most methods share (data and rewards: `rl.config.data_config`).

This module imports no torch, because the command line loads it first.

Every leaf name is unique over the sections of a method, because settings are flat on the command
line and in recipes: `--learning-rate 1e-5`, `learning_rate: 1e-5`. The string under a field is its
help text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rl.config.check_config import require
from rl.config.fields import check_ranges
from rl.config.number_range import (
    MANY,
    POSITIVE,
    RATE,
    SIZE,
    WEIGHT,
    BelowOne,
    Count,
    NotNegative,
    Positive,
    Range,
    Seconds,
    Share,
    Size,
)
from rl.errors import UnusedSettingError
from rl.lr_schedule import SCHEDULES
from rl.types.feature_table import find_conflict, find_sampler_features

if TYPE_CHECKING:
    from rl.types import LoraConfig

TEMPERATURE = Range(1e-3, 100, why="greedy samples are all the same")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Hold the settings of the whole run."""

    name: str | None = None
    """Name of the run; default: the recipe's file name, or the method's name."""
    output_dir: Path | None = None
    """Folder of the run; default: runs/<name>. The run writes to no other place."""
    resume: bool = False
    """Resume the run in output_dir from its newest complete checkpoint."""
    auto_resume: bool = False
    """Resume the run in output_dir, or start it if the folder holds no run: for jobs that are restarted with the same command."""
    change: tuple[str, ...] = ()
    """With --resume: change settings that affect training, NAME=VALUE ... (or STAGE.NAME=VALUE), from the checkpoint on. Each change is recorded with its step in config.json. Settings that do not affect the result, and a larger number of steps, need no --change."""
    trust_run: bool = False
    """With --resume in another folder than the run's: import the code (method, rewards, environment) that the run's config.json names outside of the current folder."""
    overwrite: bool = False
    """Replace the run in output_dir."""
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] = 0
    """Seed of the whole run: initial weights of tiny models, order of the data, samples."""
    tracker: tuple[Literal["wandb", "tensorboard", "trackio", "mlflow"], ...] = ()
    """Trackers to log metrics and rollouts to as well, NAME ... Their files are in the run's folder, unless wandb has a key or the environment names a server. A tracker that fails never ends the run."""
    tracker_project: str = "whetstone"
    """Project of the run in wandb and trackio, and experiment in mlflow."""
    wandb_project: str | None = None
    """Short for --tracker wandb --tracker-project NAME."""
    quiet: bool = False
    """Show no progress display."""
    timeout: Seconds = 1800.0
    """Seconds that a process may wait for another process in a collective operation; a longer wait ends the run with an error that names the other process."""
    stop_grace: Seconds = 90.0
    """Seconds to finish the step and save a checkpoint after SIGTERM, SIGUSR1 or Ctrl-C. After that time, or at a second signal, the run ends at once. An update that would not fit into the time is not started, except off policy."""
    self_test: bool = True
    """Check the pipeline before the first step of each stage that samples: sample a few answers, then check that learner and sampler agree, that changed weights reach the sampler, that the trained tokens are the sampled ones, and that gradients reach the weights. The check changes nothing."""
    profile: Annotated[int, Range(0, 1000)] = 0
    """Profile up to this many steps of each stage, from its second step on, without the evaluations between them: torch's profiler writes traces for Perfetto and a table of the time of each part of a step to RUN/profile/. 0: none."""
    reward_check: bool = True
    """Check what the reward pays for before the first step, in about two seconds: right answers of the data and mutants of them, as check_reward.py. A trick that pays as much as a right answer is a warning. Rewards that are slow or run programs are skipped. The check changes nothing."""
    replay: Path | None = None
    """Repeat the run in this folder bit for bit: with the same settings, every scheduling decision (the order in which groups became ready, the step at which new weights arrived) is read from its decisions.jsonl."""
    plan: bool = False
    """Print the memory that each GPU would need and whether it fits, and train nothing. No weights are loaded; a hub model needs only its config."""
    plan_gpus: Annotated[int | None, Range(1, 10**6)] = None
    """Number of GPUs to plan for; default: the number of processes of this launch."""
    plan_gpu_memory: Annotated[float | None, Range(0, 1e6, above=True)] = None
    """Memory of each planned GPU, in GiB; default: that of the GPU in this machine, or 80 with --plan-gpus. Without either, and without a GPU, the plan is for a CPU process."""
    plan_zero: Literal["none", "1", "2", "3"] | None = None
    """ZeRO stage to plan for (none: a single process or DDP); default: that of this launch."""
    plan_prompt_tokens: Size = 512
    """Prompt length that the plan assumes, in tokens."""

    @property
    def tracker_names(self) -> tuple[str, ...]:
        """Return the names of the trackers, each once."""
        implied = ("wandb",) if self.wandb_project else ()
        return tuple(dict.fromkeys((*self.tracker, *implied)))

    def __post_init__(self) -> None:
        check_ranges(self)
        # A shell expands ~ on the command line; in a recipe nothing does.
        if self.output_dir is not None and str(self.output_dir).startswith("~"):
            try:
                object.__setattr__(self, "output_dir", self.output_dir.expanduser())
            except RuntimeError as error:
                raise ValueError(f"output_dir {self.output_dir}: {error}") from error
        if (self.resume or self.auto_resume) and self.overwrite:
            raise ValueError(
                "resume and auto_resume continue a run and overwrite replaces it: set only resume, auto_resume or overwrite"
            )
        if self.change and not (self.resume or self.auto_resume):
            raise ValueError(
                "change alters a run that is resumed: use it with resume (a new run takes its settings as flags)"
            )


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Hold the settings of the policy model."""

    base_model: str = "tiny:addition"
    """Model to train: a hub name, a model folder, tiny:<preset> (a small model with random weights, see docs/models.md), or an earlier result: a run's folder (its newest checkpoint), a checkpoint, an export. A later stage starts from the previous stage unless it names a model or, by name, another earlier stage."""
    tokenizer: str | None = None
    """Folder or hub name of a tokenizer to use instead of the model's."""
    lora_rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of the LoRA adapters; 0 trains all weights."""
    lora_alpha: Annotated[float | None, Range(0, 1e6, above=True)] = None
    """Scale of the LoRA adapters: their output is multiplied by alpha / rank. Default: alpha = rank."""
    lora_start: Literal["auto", "continue", "merge"] = "auto"
    """Treatment of an adapter that base_model (a run, an adapter) or the previous stage holds. continue: train that adapter further. merge: merge it into its base model, in fp32, then train what lora_rank requests. auto: continue if lora_rank is 0 or every LoRA setting matches the adapter's, else merge."""
    train_attn: bool = True
    """Train LoRA on the attention layers."""
    train_mlp: bool = True
    """Train LoRA on the MLP layers."""
    train_unembed: bool | None = None
    """Train LoRA on the output head. Default: yes, except for a head that the model ties to its embedding: with such a head in the adapter, other engines (vLLM, PEFT's merge) cannot use the adapter, and export.py --merge has to write the head as a separate matrix."""
    train_vision: bool = False
    """Train LoRA on the vision tower of a vision-language model and on its projection to the text model. (Full training, --lora-rank 0, always includes both.)"""
    train_experts: bool = False
    """Train LoRA on the experts of a model that stores each expert matrix for all experts in a single tensor, as transformers does (PEFT's target_parameters; each expert gets a separate adapter of the given rank)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the arithmetic. bf16: fp32 weights (frozen weights: base_dtype), bf16 arithmetic, bf16 sampler. auto: bf16 on a GPU, fp32 on a CPU."""
    base_dtype: Literal["auto", "fp32", "bf16", "4bit"] = "auto"
    """Data type of the frozen matrices under a LoRA adapter; adapters, norms and biases stay fp32. auto: bf16 if the arithmetic is bf16 (this changes no product), else fp32. 4bit: NF4 of the package bitsandbytes with double quantization (QLoRA, arXiv 2305.14314); the sampler's copy is bf16."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    offload_activations: bool = False
    """Hold what gradient_checkpointing keeps (the input of each layer) in CPU memory between the forward and the backward pass, for long sequences. Copies from the GPU run beside the forward pass; the backward pass waits for the copies to the GPU."""
    router_replay: bool = False
    """Replay the sampler's expert choices in the learner (mixture-of-experts models): each token goes to the experts that it used when it was sampled, so rounding does not change its route; the routers still train. optim/rerouted is the share of tokens whose route would have differed."""
    router_aux_loss_coef: Annotated[float, WEIGHT] = 0.0
    """Coefficient of the load-balancing loss of mixture-of-experts models (Switch Transformer, arXiv 2101.03961, as transformers computes it; 0.001 in the configs of Mixtral and Qwen3), over the trained tokens of each micro-batch. optim/router_aux_loss is the loss itself: with a uniform load it equals the number of experts per token; its maximum is the number of experts."""
    fused_logprobs: bool = True
    """Compute token logprobs without storing the logits (kernels.linear_logprob); off: the plain computation."""
    kept_logits_gib: Annotated[float | None, Range(0, 1e6)] = None
    """Memory, in GiB, in which the output head may keep the logits of a micro-batch (tokens x vocabulary, two bytes each on a GPU), so that its backward pass does not recompute them; 0: never. Default: a quarter of the GPU memory that remains after the model, its gradients, its optimizer state and another copy of the weights, rounded down to a power of two; 1/16 GiB on a CPU."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError(
                "offload_activations moves what gradient_checkpointing keeps: set gradient_checkpointing too"
            )
        if self.precision == "fp32" and self.base_dtype in ("bf16", "4bit"):
            raise ValueError(
                f"base_dtype {self.base_dtype} requires bf16 arithmetic, and precision is fp32: set precision to bf16"
            )

    def make_lora(self, seed: int | None = None) -> LoraConfig | None:
        """Return the adapter that the settings request, None if all weights are trained."""
        from rl.types import LoraConfig  # loads numpy, which the command line does not wait for

        parts = (self.train_mlp, self.train_attn, self.train_unembed, self.lora_alpha)
        extensions = (self.train_vision, self.train_experts)
        return LoraConfig(self.lora_rank, seed, *parts, *extensions) if self.lora_rank else None

    def with_lora(self, lora: LoraConfig) -> ModelSettings:
        """Return the settings that request this adapter."""
        values = asdict(lora)
        rank, alpha, _ = values.pop("rank"), values.pop("alpha"), values.pop("seed")
        return replace(self, lora_rank=rank, lora_alpha=alpha, **values)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Hold the settings of sampling."""

    max_tokens: Size = 256
    """Maximum length of an answer, in tokens."""
    temperature: Annotated[float, TEMPERATURE] = 0.8
    """Temperature of training samples; the learner computes logprobs at the same temperature."""
    top_k: Annotated[int, Range(-1, MANY)] = -1
    """Must be -1 (no truncation): the learner cannot compute the logprobs of top-k samples."""
    top_p: Share = 1.0
    """Must be 1 (no truncation), for the same reason as top_k."""
    dynamic_sampling: Annotated[int, Range(0, 10**6)] = 0
    """Maximum number of extra sampling rounds for a batch (DAPO, arXiv 2503.14476, section 3.2): groups in which all answers earn the same reward are replaced by groups of further problems until batch_size groups have different rewards; 0: none."""
    eval_temperature: Annotated[float | None, Range(0, 100)] = None
    """Temperature of held-out samples (0: greedy); default: the training temperature."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the model's end-of-turn tokens; the reward sees the text before them."""
    eval_greedy: bool = True
    """Also decode the held-out problems greedily before the first and after the last step: a gain in samples without a gain in greedy answers is sharpening, not new knowledge."""
    kv_cache_tokens: Annotated[int | None, SIZE] = None
    """Size of the KV cache of each device, in tokens; sequences that do not fit wait. Default: 262,144; on a GPU more or less, as its memory allows (docs/memory.md)."""
    max_rows: Annotated[int, Range(1, 10**6)] = 1024
    """Maximum number of sequences decoded at once on each device."""
    sampler: Literal["auto", "fast", "hf", "vllm"] = "auto"
    """Sampler implementation. fast: the built-in decoder (families: docs/models.md). hf: the model's forward of transformers. auto: fast if a check shows that both agree. vllm: a vLLM server that the run starts, or the servers of sampler_url (docs/vllm.md)."""
    sampler_url: tuple[str, ...] = ()
    """Addresses of the vLLM servers that sample, such as http://localhost:8000; a sample goes to the server with the fewest unfinished samples. Only with sampler vllm. Default: the run starts a server."""
    sampler_command: str | None = None
    """Command that starts a vLLM server, with options for it, such as "/opt/vllm/bin/vllm serve --tensor-parallel-size 2". Default: the program vllm."""
    sampler_memory: Annotated[float, Range(0, 1, above=True, below=True)] = 0.3
    """Share of each GPU's memory (on a CPU: of the machine's) for the vLLM server that the run starts, weights and KV cache."""
    sampler_folder: str | None = None
    """Folder in which the weights for the vLLM servers are written, which all servers see under the same path. Default: a temporary folder of this machine, in shared memory if they fit."""
    sampler_timeout: Seconds = 600.0
    """Time limit of one call to a vLLM server, in seconds."""
    sampler_cache: Literal["auto", "plain", "paged"] = "auto"
    """Layout of the KV cache. paged: block tables, and on a GPU CUDA graphs of several steps (fast decoder only). plain: a contiguous tensor for each batch. auto: on a GPU paged if a trial returns the same samples, else plain."""
    sampler_tp: Annotated[int, Range(1, 1024, why="1 is a whole copy on each process")] = 1
    """Tensor-parallel size of the sampler: this many processes of a machine, with consecutive ranks, share a copy of the weights and a KV cache, split by heads and columns, and sample together (fast decoder only). kv_cache_tokens and max_rows then count for the whole group. 1: each process holds a full copy. For models that do not fit into a single GPU."""

    num_speculative_tokens: Annotated[
        int, Range(0, 64, why="draft tokens of each row in a step; 0 is off")
    ] = 0
    """Speculative decoding: maximum number of draft tokens of each answer in a decode step, copied from earlier in its prompt and answer (n-gram prompt lookup). The sampled tokens are the same; logprobs differ by rounding. Faster if answers repeat text and few sequences are decoded at once; drafting pauses where it does not pay (docs/throughput.md). Fast decoder only; without CUDA graphs. 0: off."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.top_k != -1 or self.top_p != 1:
            raise ValueError(
                f"training samples must not be truncated, got top_k {self.top_k} and top_p {self.top_p}: the learner computes logprobs of the full "
                "distribution, so every ratio would be wrong; leave them at -1 and 1 (sample.py and evaluate.py accept other values)"
            )
        if self.eval_temperature is not None and 0 < self.eval_temperature < TEMPERATURE.low:
            raise ValueError(
                f"eval_temperature is 0 (greedy) or at least {TEMPERATURE.low:g}, got {self.eval_temperature}"
            )
        features = find_sampler_features(
            self.sampler, self.sampler_cache, self.sampler_tp, self.num_speculative_tokens
        )
        for name, feature in features.items():
            if (reason := find_conflict((features["sampler"], feature))) is not None:
                raise UnusedSettingError(name, f"{reason} (got {name} {getattr(self, name)})")
        require(
            self,
            ("sampler_url", "sampler_folder", "sampler_timeout"),
            self.sampler == "vllm",
            f"sampler is {self.sampler}",
            "set sampler to vllm",
        )
        require(
            self,
            ("sampler_command", "sampler_memory"),
            self.sampler == "vllm" and not self.sampler_url,
            "they are of a vLLM server that the run starts"
            if self.sampler == "vllm"
            else f"sampler is {self.sampler}",
            "leave sampler_url out" if self.sampler == "vllm" else "set sampler to vllm",
        )
        for url in self.sampler_url:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"sampler_url {url} is no address: expected such as http://localhost:8000"
                )
        if self.kv_cache_tokens is not None and self.max_tokens > self.kv_cache_tokens:
            raise ValueError(
                f"an answer of max_tokens {self.max_tokens} does not fit into kv_cache_tokens {self.kv_cache_tokens}: lower max_tokens or raise kv_cache_tokens"
            )


@dataclass(frozen=True, kw_only=True)
class ShapingSettings:
    """Hold the transformations of rewards before they become advantages, in order of application.
    Metrics show the rewards before these transformations.
    """

    overlong_share: Annotated[
        float, Range(0, 1, below=True, why="a share of max_tokens, such as 0.2; 0 is off")
    ] = 0.0
    """Share of max_tokens at the end of which answers are penalized: the penalty grows linearly up to overlong_penalty (DAPO, arXiv 2503.14476, equation 13); 0: off."""
    overlong_penalty: NotNegative = 1.0
    """Penalty of an answer of max_tokens tokens."""
    cut_off_penalty: NotNegative = 0.0
    """Penalty of an episode if max_tokens cut off its last answer (TRL's missing_eos_penalty). Reward models are trained on complete answers and may score an incomplete answer too high."""
    normalise_rewards: bool = False
    """Divide rewards by the standard deviation of all rewards so far (running statistics, saved with the run). The mean is subtracted first if each answer gets a single total reward (grpo and reinforce with step_rewards sum). Rewards of single steps are not centered (ppo, rlhf, step_rewards to_go), so that a longer episode earns no extra reward."""
    reward_scale: Positive = 1.0
    """Factor on all rewards."""
    reward_clip: Annotated[float | None, POSITIVE] = None
    """Clip rewards to plus and minus this value, such as 10."""

    def __post_init__(self) -> None:
        check_ranges(self)
        require(
            self,
            ("overlong_penalty",),
            self.overlong_share > 0,
            "overlong_share is 0, which is off",
            "set overlong_share, such as 0.2",
        )


@dataclass(frozen=True, kw_only=True)
class KlSettings:
    """Hold the settings of the KL penalty to a reference model."""

    kl_coef: Annotated[float | None, WEIGHT] = None
    """Coefficient of KL(policy || reference); default: that of the method. If it is 0 and kl_target is not set, no reference model is loaded."""
    reference_model: str | None = None
    """Reference model: an earlier stage, a run's folder, a folder of weights or a hub name; default: the policy at the start of the stage."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """Place of the KL penalty. reward: subtracted from the reward, which gives the gradient of the KL of whole answers. loss: added to the loss for each token."""
    kl_kind: Literal["k1", "k2", "k3", "k3_pathwise"] = "k3"
    """KL estimator for kl_placement loss. k1, k2 and k3 report different estimates of the same KL and have its gradient: each token is weighted by its current probability over its probability when it was sampled (DeepSeek-V3.2, arXiv 2512.02556; 1 on policy). k3_pathwise differentiates the k3 expression itself without this weight (as in the GRPO paper), which is the gradient of a different KL."""
    kl_target: Annotated[float | None, Range(0, 1e6, above=True)] = None
    """Target KL per token: kl_coef is adapted to keep the KL near it (arXiv 1909.08593); kl_coef may start at 0."""
    kl_rate: Annotated[
        float, Range(0, 1, above=True, why="from 5 on kl_coef could fall below 0")
    ] = 0.1
    """Adaptation rate of kl_coef: it changes by at most a fifth of this rate per batch."""

    def __post_init__(self) -> None:
        check_ranges(self)
        require(
            self,
            ("kl_kind",),
            self.kl_placement == "loss",
            "kl_placement is reward",
            "set kl_placement to loss",
        )
        require(
            self,
            ("kl_rate",),
            self.kl_target is not None,
            "without kl_target the coefficient kl_coef is constant",
            "set kl_target",
        )


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """Hold the settings of the optimizer, the learning-rate schedule and the micro-batches."""

    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """Optimizer: AdamW with its moments in fp32 (8 bytes for each trained weight) or in 8 bit (2 bytes; package bitsandbytes; a single process or DDP). paged: the 8-bit moments move to CPU memory when the GPU is full."""

    learning_rate: Annotated[float | None, RATE] = None
    """Peak learning rate; default: that of the method, which differs between full training and LoRA."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate over the steps."""
    warmup_steps: Count = 0
    """Number of steps of linear warm-up."""
    beta1: BelowOne = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: BelowOne = 0.95
    """Decay rate of AdamW's second moment."""
    adam_eps: Annotated[
        float,
        Range(
            1e-30,
            1,
            why="smaller values are 0 in fp32, and a weight without a gradient becomes NaN",
        ),
    ] = 1e-8
    """Epsilon of AdamW."""
    weight_decay: Annotated[float, Range(0, 1000)] = 0.0
    """Decoupled weight decay of AdamW."""
    grad_clip_norm: NotNegative = 1.0
    """Maximum norm of the gradient: larger gradients are scaled down to it; 0: no clipping. The norm before clipping is always logged."""
    num_substeps: Annotated[int, Range(1, 10**6)] = 1
    """Number of optimizer steps into which a batch is split."""
    token_budget: Size = 16_384
    """Number of token positions in a micro-batch, which sets the activation memory. The gradient does not depend on it."""
    layout: Literal["auto", "padded", "packed", "shared"] = "auto"
    """Layout of a micro-batch. padded: rows of similar length. packed: sequences end to end in a single row. shared: the prompt of a group is computed once. auto: packed if flash attention runs the model, else padded or shared, whichever needs less work; only layouts that are exact for the model. The gradient does not depend on it."""
    context_parallel_size: Annotated[int, Range(1, 1024, why="1 divides no sequence")] = 1
    """Number of processes that share each micro-batch of the learner, for long sequences: each holds this part of its token positions and activations, and attention exchanges them for heads (DeepSpeed-Ulysses, arXiv 2309.14509). It divides the number of processes that learn; consecutive ranks form a group. The gradient does not depend on it. Only for models with attention in every layer."""
    expert_parallel_size: Annotated[int, Range(1, 1024, why="1 divides no experts")] = 1
    """Number of processes that divide the experts of each layer of the learner, for large mixtures of experts: tokens go to the ranks of their experts (all-to-all, arXiv 2006.16668), so no rank gathers experts that another rank of its group holds. It divides the number of processes that learn and the number of experts; consecutive ranks form a group. The gradient does not depend on it. Only with accelerate_configs/fsdp2.yaml, and without train_experts."""

    def __post_init__(self) -> None:
        check_ranges(self)
        assert self.schedule in SCHEDULES


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Hold the settings of the training loop: length, batch size, evaluation, checkpoints."""

    steps: Count = 100
    """Number of batches to train on."""
    batch_size: Annotated[int, Range(1, 10**7)] = 32
    """Number of problems (or rows) in a batch."""
    eval_every: Count = 20
    """Steps between held-out evaluations, in addition to those before the first and after the last step; 0: none."""
    save_every: Count = 20
    """Steps between resumable checkpoints; 0: only at the end."""
    keep_last: Size = 2
    """Number of checkpoints to keep; older checkpoints are removed."""
    keep_best: str | None = "test/env/all/correct"
    """Metric that selects the best weights to keep (sampler weights, under best-<step>; for a reward model with its value head). A method that samples nothing uses its held-out metric instead of the default."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Whether the best value of keep_best is the highest or the lowest (for a metric with a name that ends in loss, always the lowest)."""
    rollouts_every: Count = 20
    """Steps between rollout files (jsonl and an HTML page), besides that of the last step. 0: none, also of the answers to held-out problems, which are otherwise stored at every evaluation."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def get_best_mode(self, metric: str) -> Literal["max", "min"]:
        """Return whether the highest or the lowest value of `metric` is the best."""
        return "min" if metric.endswith("loss") else self.keep_best_mode


@dataclass(frozen=True, kw_only=True)
class RowLoopSettings(LoopSettings):
    """Hold the settings of the training loop of a method that learns from a finite set of rows."""

    epochs: Annotated[float | None, Range(1e-6, 1e6)] = None
    """Number of passes over all rows. If it is set, steps is computed from it and batch_size, and the value of steps is ignored."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Hold the settings of scheduling between sampling, environments and rewards."""

    rollout_mode: Literal["lockstep", "async"] = "lockstep"
    """Scheduling of rollouts. lockstep: all episodes of a batch take each turn together. async: each episode continues as soon as its turn, tool call or reward is ready, while other episodes decode; for slow rewards and episodes of uneven length. Both sample the same tokens. Evaluation is always async."""
    max_waiting: Annotated[int, Range(1, 100_000)] = 256
    """Maximum number of environment and reward calls at once (rollout_mode async)."""
    slice_steps: Size = 16
    """Number of tokens that each running sequence decodes before new sequences join (rollout_mode async)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        require(
            self,
            ("max_waiting", "slice_steps"),
            self.is_async,
            "rollout_mode is lockstep",
            "set rollout_mode to async",
        )

    @property
    def is_async(self) -> bool:
        """Return whether episodes advance independently of each other, because rollout_mode is
        async or another setting requires it.
        """
        return self.rollout_mode == "async" or self.gradient_parts > 1 or self.steps_off_policy > 0

    @property
    def gradient_parts(self) -> int:
        """Return the number of parts over which the gradient of a batch is accumulated."""
        return 1

    @property
    def steps_off_policy(self) -> int:
        """Return the maximum staleness of a trained token, in updates."""
        return 0


@dataclass(frozen=True, kw_only=True)
class AsyncRolloutSettings(RolloutSettings):
    """Hold the settings of scheduling between sampling, environments, rewards and training."""

    stream_minibatches: Annotated[int, Range(1, 10**6)] = 1
    """Number of parts in which a batch is trained: the gradient of each part is computed as soon as its groups are complete, while the remaining groups are still sampled. A single optimizer step follows, equal to that of the whole batch. 1: train after all groups are complete."""
    max_steps_off_policy: Annotated[int, Range(0, 10_000)] = 0
    """Maximum staleness, in updates, of the weights that sample a trained token: sampling continues while the learner updates. 0: sampling and training alternate."""
    on_stale: Literal["wait", "resample"] = "wait"
    """Action for a group that would exceed max_steps_off_policy before it is complete. wait: delay the update until the group is complete (the newest weights sample the remaining tokens). resample: drop the group and sample it again with the newest weights; other groups fill the batch. Both are counted."""
    sampler_ranks: Annotated[int, Range(0, 4096)] = 0
    """Number of launched processes, the last ranks, that only sample while the other ranks train; with max_steps_off_policy both run at the same time. 0: every process samples and trains in turn."""
    recompute_cache: bool = False
    """Recompute the KV cache of running sequences when new weights arrive; off: keep the entries that the older weights computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        late = self.max_steps_off_policy > 0
        require(
            self,
            ("on_stale", "recompute_cache"),
            late,
            "max_steps_off_policy is 0",
            "set max_steps_off_policy, such as 2",
        )

    @property
    def gradient_parts(self) -> int:
        """Return `stream_minibatches`."""
        return self.stream_minibatches

    @property
    def steps_off_policy(self) -> int:
        """Return `max_steps_off_policy`."""
        return self.max_steps_off_policy


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """Hold the settings of the importance correction for tokens that were sampled by older weights
    or at another precision.
    """

    correction: Literal["none", "truncate", "icepop", "mask"] = "none"
    """Importance correction by the ratio of learner probability (before the step) to sampler probability. truncate: weight by the ratio, clipped to the bounds (TIS, Yao et al. 2025). icepop: weight by the ratio within the bounds, by 0 outside (arXiv 2510.18855). mask: drop what is outside the bounds, without weights (Liu, Li et al. 2025, "When speed kills stability"). Each needs an extra forward pass."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Level of the ratio. token: the ratio of each token. sequence: the product over the answer. geometric: the geometric mean over the answer (GSPO's ratio, arXiv 2507.18071), which can mask answers but not weight them."""
    correction_low: Annotated[float, Range(0, 1, why="a ratio, such as 0.5")] = 0.0
    """Lower bound of the ratio, such as 0.5 for tokens or 0.99 for geometric means."""
    correction_high: Annotated[float, Range(1, 1e6, why="a ratio, such as 2")] = 2.0
    """Upper bound of the ratio, such as 2 for tokens or 1.01 for geometric means."""
    proximal: Literal["sampler", "learner", "interpolated"] | None = None
    """Denominator of the ratios in the loss, around which the loss clips. sampler: the sampler's logprobs. learner: the learner's logprobs before the step (decoupled PPO, arXiv 2110.00641; AReaL, 2505.24298). interpolated: an estimate of the learner's logprobs without a forward pass, between the sampler's and the current ones by the age of the token (AReaL's log-linear approximation). Default: learner if the correction weights tokens, interpolated under max_steps_off_policy with the loss ppo and no correction (docs/corrections.md), else sampler."""

    def __post_init__(self) -> None:
        check_ranges(self)
        on = self.correction != "none"
        why, remedy = "correction is none", "set correction to truncate, icepop or mask"
        require(self, ("correction_level", "correction_low", "correction_high"), on, why, remedy)
        if self.weights_tokens and self.correction_level == "geometric":
            raise ValueError(
                "correction_level geometric is not an importance weight: set correction to mask, or correction_level to token or sequence"
            )
        if on and self.proximal == "interpolated":
            raise ValueError(
                f"correction {self.correction} computes the learner's logprobs before the step anyway: set proximal to learner"
            )
        if self.weights_tokens and self.proximal == "sampler":
            raise ValueError(
                f"correction {self.correction} weights by learner / sampler, a factor that ratios against the sampler contain already: "
                "leave proximal out, or set it to learner"
            )

    @property
    def weights_tokens(self) -> bool:
        """Return whether the correction weights tokens."""
        return self.correction in ("truncate", "icepop")

    @property
    def against_learner(self) -> bool:
        """Return whether the ratios of the loss are taken against the learner's logprobs."""
        return self.proximal == "learner" or (self.proximal is None and self.weights_tokens)

    @property
    def active(self) -> bool:
        """Return whether the learner's logprobs before the step are needed."""
        return self.correction != "none" or self.against_learner


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """Hold the settings of multi-turn episodes: tools, conversations, games."""

    environment: str | None = None
    """Environment: a registered name (calculator, ...), module:Class or file.py:Class; None: each problem is a single question. --environment NAME --help shows its settings."""
    environment_settings: tuple[tuple[str, str], ...] = ()
    """Settings of the environment, written --environment.NAME VALUE; in a recipe environment is a mapping, {name: calculator, digits: 4}."""
    environment_rows: Size = 1000
    """Number of different episodes (seeds) of an environment without a data set; held-out evaluation uses eval_limit other seeds."""
    max_turns: Size = 16
    """Maximum number of answers in an episode; an episode that has not ended by then is truncated."""
    episode_tokens: Annotated[int | None, Range(1, 10**9)] = None
    """Maximum number of tokens in an episode, over all turns; the episode is truncated if the next answer of max_tokens could exceed it. Default: the model's context length."""
    environment_isolation: Literal["auto", "thread", "process"] = "auto"
    """Isolation of episodes. process: each episode runs in a separate process, so that a hang or crash costs only that episode. thread: episodes run in this process. auto: process for module:Class and file.py:Class."""
    episode_seconds: Seconds = 60.0
    """Seconds that the environment and its tools may take in an episode, without the time of sampling; a slower episode is dropped and named."""
    opponents: Size = 5
    """Number of older versions of the policy to keep as opponents, for environments with an opponent player (pool)."""
    opponents_every: Size = 20
    """Steps between additions of the current policy to the opponents; the first addition is before the first step."""
    opponents_by: Literal["elo", "age", "any"] = "elo"
    """Selection of the opponent of a batch. elo: prefer an opponent of about the policy's strength. age: prefer a newer version. any: choose uniformly."""
    players_temperature: Annotated[float, Range(0, 100)] = 0.0
    """Temperature of other models that play (a judge, an answerer, an opponent); older versions of the policy sample at the policy's temperature."""

    def __post_init__(self) -> None:
        check_ranges(self)
        settings = [name for name in vars(self) if name != "environment"]
        require(
            self, settings, self.environment is not None, "no environment is set", "set environment"
        )
