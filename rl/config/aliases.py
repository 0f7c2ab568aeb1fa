"""Map names of settings in other libraries (TRL, verl, Hugging Face), and former names of settings
here, to the current names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

# A line: names elsewhere = setting here: difference; "-" if no such setting exists. verl's names
# are without actor_rollout_ref in front. Of several lines of a name, the first one counts whose
# setting the run has; with "!other" only if the run has no setting `other` (ppo's epochs are passes
# over a batch).
_TABLE = """
lr actor.optim.lr = learning_rate
max_steps = steps: number of batches; each takes num_substeps optimizer steps (1 by default)
num_steps total_steps trainer.total_training_steps = steps
num_train_epochs = epochs !value_clip: passes over the rows; methods that sample have steps instead
num_train_epochs epochs = steps: number of batches; rows / batch_size of them are an epoch
trainer.total_epochs = steps: rows / batch_size steps are an epoch
num_generations n_samples_per_prompt rollout_n = group_size: batch_size counts problems, not answers
rollout.n = group_size
max_completion_length max_new_tokens max_response_length response_length data.max_response_length =
    max_tokens
gradient_accumulation_steps = token_budget: token positions in a micro-batch; a batch is split into
    as many as needed, and the gradient does not depend on it
ppo_micro_batch_size micro_batch_size actor.ppo_micro_batch_size_per_gpu = token_budget: token
    positions in a micro-batch
per_device_train_batch_size train_batch_size = batch_size: problems a step, over all GPUs; memory is
    set by token_budget
generation_batch_size = batch_size: problems a step, over all GPUs
data.train_batch_size = batch_size: problems a step
ppo_mini_batch_size steps_per_generation actor.ppo_mini_batch_size = num_substeps: number of
    optimizer steps into which a batch is split
beta = kl_coef
kl_loss_coef actor.kl_loss_coef = kl_coef: with kl_placement loss
init_kl_coef algorithm.kl_ctrl.kl_coef = kl_coef: with kl_placement reward
epsilon clip_range cliprange = clip_low: a ratio: 1 - epsilon, such as 0.8; clip_high is 1 + epsilon
epsilon clip_range cliprange = clip: an epsilon, such as 0.2
actor.clip_ratio_low = clip_low: a ratio: 1 - clip_ratio_low
epsilon_high = clip_high: a ratio: 1 + epsilon, such as 1.28
actor.clip_ratio_high = clip_high: a ratio: 1 + clip_ratio_high
loss_type = variant: dr_grpo, dapo, gspo, ...; or set loss and normalise directly
scale_rewards = advantage: mean_std divides by the group's standard deviation, mean does not
algorithm.adv_estimator = advantage: the method is the first word: grpo, ppo
max_prompt_length data.max_prompt_length = max_prompt_tokens
max_length max_seq_length = max_row_tokens: prompt and answer together; see on_too_long
per_device_eval_batch_size = eval_limit: held-out rows of an evaluation; memory is set by
    token_budget
importance_sampling_level = loss: gspo takes a ratio for each sequence, ppo for each token
loss_type = loss: TRL's sigmoid is dpo
packing padding_free = layout: packed; the gradient does not depend on it
assistant_only_loss completion_only_loss = train_on: a prompt is never trained
missing_eos_penalty = cut_off_penalty
vf_coef = value_coef
cliprange_value = value_clip
lam algorithm.lam = gae_lambda
num_ppo_epochs actor.ppo_epochs = epochs
num_mini_batches = num_substeps
center_rewards_coefficient = centre_coef
precompute_ref_log_probs = precompute_reference
simpo_gamma = gamma
teacher_model_name_or_path = teacher
chat_template_kwargs = template: as in --template.enable_thinking false
processing_class = tokenizer
log_completions = rollouts_every: answers are written to rollouts/
reward_funcs = reward: several: rewards NAME WEIGHT ...
custom_reward_function.path custom_reward_function.name = reward: as in --reward FILE.py:FUNCTION
reward_weights = rewards: rewards NAME WEIGHT NAME WEIGHT ...
model model_name model_name_or_path model.path = base_model
ref_model = reference_model
dataset_name train_dataset data.train_files = dataset
lora_r model.lora_rank = lora_rank
use_peft peft_config = lora_rank: above 0
target_modules lora_target_modules = train_attn: train_attn, train_mlp and train_unembed are
    switches
load_in_4bit = base_dtype: 4bit, with lora_rank
optim = optimizer: adamw, adamw_8bit, paged_adamw_8bit
dtype torch_dtype = precision: auto, fp32 or bf16
bf16 = precision: bf16
fp16 = precision: bf16 or fp32
lr_scheduler_type = schedule: constant, linear, cosine
warmup_ratio = warmup_steps: a number of steps
max_grad_norm = grad_clip_norm
adam_beta1 = beta1
adam_beta2 = beta2
adam_epsilon = adam_eps
save_steps trainer.save_freq = save_every
save_strategy = save_every: a number of steps; 0: only at the end
eval_strategy = eval_every: a number of steps; 0: never
eval_steps trainer.test_freq = eval_every
save_total_limit = keep_last
report_to = tracker: wandb tensorboard trackio mlflow; metrics.jsonl and curves.png are always
    written
log_with trainer.logger = tracker: wandb tensorboard trackio mlflow
wandb use_wandb = tracker: wandb
wandb_run_name run_name trainer.experiment_name = name
resume_from_checkpoint = resume: with --output-dir; from the newest checkpoint
use_vllm = sampler: vllm (docs/vllm.md)
vllm_gpu_memory_utilization = sampler_memory: with sampler vllm
tensor_parallel_size = sampler_tp: for the sampler; the launch shards the learner
vllm_tensor_parallel_size rollout.tensor_model_parallel_size = sampler_tp
cp_size sp_size sequence_parallel_size ulysses_sequence_parallel_size
    actor.ulysses_sequence_parallel_size = context_parallel_size
ep_size expert_model_parallel_size = expert_parallel_size
enforce_eager = sampler_cache: plain uses no CUDA graphs
rollout.temperature = temperature
rollout.top_p = top_p
rollout.gpu_memory_utilization = kv_cache_tokens: the KV cache in tokens
actor.entropy_coeff = entropy_coef
actor.use_kl_loss = kl_placement: loss, with kl_coef
algorithm.use_kl_in_reward = kl_placement: reward, with kl_coef
actor.kl_loss_type = kl_kind: k1, k2, k3, with kl_placement loss
trainer.project_name = tracker_project
num_iterations = -: each batch is used once, in num_substeps optimizer steps; ppo has epochs
mask_truncated_completions = -: cut_off_penalty and overlong_share treat answers that max_tokens cut
    off
logging_steps = -: every step is logged, to metrics.jsonl
push_to_hub hub_model_id = -: export.py RUN OUT --push REPO uploads the weights of a run
vllm_mode = -: with sampler vllm the run starts a server, or uses those of sampler_url
remove_unused_columns = -: a reward receives all columns of its row
lora_dropout disable_dropout = -: dropout is never used here
config = -: a recipe is named without a flag, as in train.py RECIPE.yaml
trainer.n_gpus_per_node = -: accelerate launch --num_processes sets it
trainer.nnodes = -: accelerate launch --num_machines sets it
"""
_FOREIGN_NAMES: dict[str, list[tuple[str, str, str]]] = {}
for _line in _TABLE.strip().replace("\n    ", " ").splitlines():
    _names, _, _setting = _line.partition(" = ")
    _place, _, _more = _setting.partition(": ")
    _here, _, _without = _place.removeprefix("-").partition(" !")
    for _name in _names.split():
        _FOREIGN_NAMES.setdefault(_name, []).append((_here, _without, _more))

# Former names of settings and former words of their values; both are still accepted.
_FORMER_NAMES = {"episodes": "rollout_mode", "over_age": "on_stale", "kl_in": "kl_placement"}
_FORMER_VALUES = {
    "rollout_mode": {"in_step": "lockstep", "continuous": "async"},
    "on_stale": {"finish": "wait", "redraw": "resample"},
}


def current_name(key: str, known: Collection[str]) -> str:
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
    return drop_replaced_pairs(current)


def drop_replaced_pairs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved settings in which each key of a list of pairs has its last value. Older versions
    also saved the values that it replaces.
    """
    current = dict(settings)
    for name in ("environment_settings", "template", "rewards"):
        if isinstance(pairs := current.get(name), list):
            last: dict[str, Any] = {}
            with contextlib.suppress(TypeError, ValueError):  # damaged, reported later
                for key, value in pairs:
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
    for here, without, more in matches:
        if not here:
            return f": {more}"
        if known is None or (here in known and without not in known):
            return f"; it is called --{here.replace('_', '-')} here" + (
                f" ({more})" if more else ""
            )
    if word in owners:
        return f" (it is a setting of {owners[word]})"
    for here, *_ in matches:
        if here in owners:
            flag = f"--{here.replace('_', '-')}"
            return f" (it is called {flag} here, a setting of {owners[here]})"
    return None
