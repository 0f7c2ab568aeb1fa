"""Map names of settings in other libraries (TRL, verl, Hugging Face), and former names of settings
here, to the current names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

# (setting here, difference, names elsewhere); ("", replacement, names elsewhere) if no such setting
# exists. verl's names are without actor_rollout_ref in front. Of several rows of a name, the first
# one counts whose setting the run has.
_ROWS = (
    ("learning_rate", "", "lr actor.optim.lr"),
    (
        "steps",
        "number of batches; each takes num_substeps optimizer steps (1 by default)",
        "max_steps",
    ),
    ("steps", "", "num_steps total_steps trainer.total_training_steps"),
    (
        "steps",
        "number of batches; rows / batch_size of them are an epoch. sft and the methods "
        "on preferences have epochs",
        "num_train_epochs",
    ),
    ("steps", "number of batches; rows / batch_size of them are an epoch", "epochs"),
    ("steps", "rows / batch_size steps are an epoch", "trainer.total_epochs"),
    (
        "group_size",
        "batch_size counts problems, not answers",
        "num_generations n_samples_per_prompt rollout_n",
    ),
    ("group_size", "", "rollout.n"),
    (
        "max_tokens",
        "",
        "max_completion_length max_new_tokens max_response_length response_length "
        "data.max_response_length",
    ),
    (
        "token_budget",
        "token positions in a micro-batch; a batch is split into as many as needed, and "
        "the gradient does not depend on it",
        "gradient_accumulation_steps",
    ),
    (
        "token_budget",
        "token positions in a micro-batch",
        "ppo_micro_batch_size micro_batch_size actor.ppo_micro_batch_size_per_gpu",
    ),
    (
        "batch_size",
        "problems a step, over all GPUs; memory is set by token_budget",
        "per_device_train_batch_size train_batch_size",
    ),
    ("batch_size", "problems a step, over all GPUs", "generation_batch_size"),
    ("batch_size", "problems a step", "data.train_batch_size"),
    (
        "num_substeps",
        "number of optimizer steps into which a batch is split",
        "ppo_mini_batch_size steps_per_generation actor.ppo_mini_batch_size",
    ),
    ("kl_coef", "", "beta"),
    ("kl_coef", "with kl_placement loss", "kl_loss_coef actor.kl_loss_coef"),
    ("kl_coef", "with kl_placement reward", "init_kl_coef algorithm.kl_ctrl.kl_coef"),
    (
        "clip_low",
        "a ratio: 1 - epsilon, such as 0.8; clip_high is 1 + epsilon",
        "epsilon clip_range cliprange",
    ),
    ("clip_low", "a ratio: 1 - clip_ratio_low", "actor.clip_ratio_low"),
    ("clip_high", "a ratio: 1 + epsilon, such as 1.28", "epsilon_high"),
    ("clip_high", "a ratio: 1 + clip_ratio_high", "actor.clip_ratio_high"),
    ("variant", "dr_grpo, dapo, gspo, ...; or set loss and normalise directly", "loss_type"),
    (
        "advantage",
        "mean_std divides by the group's standard deviation, mean does not",
        "scale_rewards",
    ),
    ("advantage", "the method is the first word: grpo, ppo", "algorithm.adv_estimator"),
    ("max_prompt_tokens", "", "max_prompt_length data.max_prompt_length"),
    ("max_row_tokens", "prompt and answer together; see on_too_long", "max_length max_seq_length"),
    (
        "eval_limit",
        "held-out rows of an evaluation; memory is set by token_budget",
        "per_device_eval_batch_size",
    ),
    (
        "loss",
        "gspo takes a ratio for each sequence, ppo for each token",
        "importance_sampling_level",
    ),
    ("loss", "TRL's sigmoid is dpo", "loss_type"),
    ("layout", "packed; the gradient does not depend on it", "packing padding_free"),
    ("train_on", "a prompt is never trained", "assistant_only_loss completion_only_loss"),
    ("cut_off_penalty", "", "missing_eos_penalty"),
    ("precompute_reference", "", "precompute_ref_log_probs"),
    ("gamma", "", "simpo_gamma"),
    ("teacher", "", "teacher_model_name_or_path"),
    ("template", "as in --template.enable_thinking false", "chat_template_kwargs"),
    ("tokenizer", "", "processing_class"),
    ("rollouts_every", "answers are written to rollouts/", "log_completions"),
    ("reward", "several: rewards NAME WEIGHT ...", "reward_funcs"),
    (
        "reward",
        "as in --reward FILE.py:FUNCTION",
        "custom_reward_function.path custom_reward_function.name",
    ),
    ("rewards", "rewards NAME WEIGHT NAME WEIGHT ...", "reward_weights"),
    ("base_model", "", "model model_name model_name_or_path model.path"),
    ("reference_model", "", "ref_model"),
    ("dataset", "", "dataset_name train_dataset data.train_files"),
    ("lora_rank", "", "lora_r model.lora_rank"),
    ("lora_rank", "above 0", "use_peft peft_config"),
    (
        "train_attn",
        "train_attn, train_mlp and train_unembed are switches",
        "target_modules lora_target_modules",
    ),
    ("base_dtype", "4bit, with lora_rank", "load_in_4bit"),
    ("optimizer", "adamw, adamw_8bit, paged_adamw_8bit", "optim"),
    ("precision", "auto, fp32 or bf16", "dtype torch_dtype"),
    ("precision", "bf16", "bf16"),
    ("precision", "bf16 or fp32", "fp16"),
    ("schedule", "constant, linear, cosine", "lr_scheduler_type"),
    ("warmup_steps", "a number of steps", "warmup_ratio"),
    ("grad_clip_norm", "", "max_grad_norm"),
    ("beta1", "", "adam_beta1"),
    ("beta2", "", "adam_beta2"),
    ("adam_eps", "", "adam_epsilon"),
    ("save_every", "", "save_steps trainer.save_freq"),
    ("save_every", "a number of steps; 0: only at the end", "save_strategy"),
    ("eval_every", "a number of steps; 0: never", "eval_strategy"),
    ("eval_every", "", "eval_steps trainer.test_freq"),
    ("keep_last", "", "save_total_limit"),
    (
        "tracker",
        "wandb tensorboard trackio mlflow; metrics.jsonl and curves.png are always written",
        "report_to",
    ),
    ("tracker", "wandb tensorboard trackio mlflow", "log_with trainer.logger"),
    ("tracker", "wandb", "wandb use_wandb"),
    ("name", "", "wandb_run_name run_name trainer.experiment_name"),
    ("resume", "with --output-dir; from the newest checkpoint", "resume_from_checkpoint"),
    ("sampler", "vllm (docs/vllm.md)", "use_vllm"),
    ("sampler_memory", "with sampler vllm", "vllm_gpu_memory_utilization"),
    ("sampler_tp", "for the sampler; the launch shards the learner", "tensor_parallel_size"),
    ("sampler_tp", "", "vllm_tensor_parallel_size rollout.tensor_model_parallel_size"),
    (
        "context_parallel_size",
        "",
        "cp_size sp_size sequence_parallel_size ulysses_sequence_parallel_size "
        "actor.ulysses_sequence_parallel_size",
    ),
    ("expert_parallel_size", "", "ep_size expert_model_parallel_size"),
    ("sampler_cache", "plain uses no CUDA graphs", "enforce_eager"),
    ("temperature", "", "rollout.temperature"),
    ("top_p", "", "rollout.top_p"),
    ("kv_cache_tokens", "the KV cache in tokens", "rollout.gpu_memory_utilization"),
    ("entropy_coef", "", "actor.entropy_coeff"),
    ("kl_placement", "loss, with kl_coef", "actor.use_kl_loss"),
    ("kl_placement", "reward, with kl_coef", "algorithm.use_kl_in_reward"),
    ("kl_kind", "k1, k2, k3, with kl_placement loss", "actor.kl_loss_type"),
    ("tracker_project", "", "trainer.project_name"),
    (
        "",
        "each batch is used once, in num_substeps optimizer steps; ppo has epochs",
        "num_iterations",
    ),
    (
        "",
        "cut_off_penalty and overlong_share treat answers that max_tokens cut off",
        "mask_truncated_completions",
    ),
    ("", "every step is logged, to metrics.jsonl", "logging_steps"),
    ("", "dropout is never used here", "lora_dropout disable_dropout"),
    ("", "a recipe is named without a flag, as in train.py RECIPE.yaml", "config"),
    ("", "accelerate launch --num_processes sets it", "trainer.n_gpus_per_node"),
    ("", "accelerate launch --num_machines sets it", "trainer.nnodes"),
)
_FOREIGN_NAMES: dict[str, list[tuple[str, str]]] = {}
for _here, _more, _names in _ROWS:
    for _name in _names.split():
        _FOREIGN_NAMES.setdefault(_name, []).append((_here, _more))

# Former names of settings and former words of their values; both are still accepted.
_FORMER_NAMES = {"episodes": "rollout_mode", "over_age": "on_stale", "kl_in": "kl_placement"}
_FORMER_VALUES = {
    "rollout_mode": {"in_step": "lockstep", "continuous": "async"},
    "on_stale": {"finish": "wait", "redraw": "resample"},
}


def current_name(key: str, known: Collection[str] = ()) -> str:
    """Return the current name of a setting, or `key` itself if it is not a former name.

    `key` may begin with a stage ("grpo.kl_in"). Settings of an environment or of a chat template
    ("environment.episodes") are not renamed, and neither are the `known` settings: a user's method
    may have a setting with such a name.
    """
    section, dot, name = key.rpartition(".")
    if section.rpartition(".")[2] in ("environment", "template") or name in known:
        return key
    return section + dot + _FORMER_NAMES.get(name, name)


def current_value(name: str, word: str) -> str:
    """Return the current word for a value of the setting `name`."""
    return _FORMER_VALUES.get(name, {}).get(word, word)


def current_settings(settings: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """Return saved settings (flat name to JSON value) under their current names and values.
    `known`: see `current_name`.
    """
    current = {}
    for key, value in settings.items():
        name = current_name(key, known)
        current[name] = current_value(name, value) if isinstance(value, str) else value
    for name in ("environment_settings", "template"):
        if isinstance(pairs := current.get(name), list):
            last: dict[str, Any] = {}
            with contextlib.suppress(TypeError, ValueError):  # damaged, reported later
                for key, value in pairs:  # older versions also kept the pairs that a flag replaces
                    last.pop(key, None)
                    last[key] = value
                current[name] = [list(pair) for pair in last.items()]
    return current


def find_alias_hint(
    word: str,
    known: Collection[str] | None = None,
    owners: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Return a hint for a setting of another library, or of another method: its name here if
    `known` (the settings of this run; None: any) has it, or the methods that have it. Returns None
    for an unknown word.

    `owners`: the methods that have a setting, by setting.
    """
    name = word.removeprefix("actor_rollout_ref.")
    matches = _FOREIGN_NAMES.get(name, [])
    for here, more in matches:
        if not here:
            return f": {more}"
        if known is None or here in known:
            return f"; it is called --{here.replace('_', '-')} here" + (
                f" ({more})" if more else ""
            )
    if word in owners:
        return f" (it is a setting of {owners[word]})"
    for here, _ in matches:
        if here in owners:
            flag = f"--{here.replace('_', '-')}"
            return f" (it is called {flag} here, a setting of {owners[here]})"
    return None
