"""Define what each metric of a run's metrics.jsonl means, for docs/reference/metrics.md.

tests/project/test_reference_pages.py compares these names with the names in the code of `rl` and with the
rows of short runs. Words in capital letters stand for a name or a number.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# Prefix of the metrics -> (title, text below it).
SECTIONS: dict[str, tuple[str, str]] = {
    "step": ("Position", ""),
    "env/": (
        "Samples",
        "Of the samples of a step. With several data sets, `env/SET/...` holds the same for each "
        "of them. Held-out samples have the same names under `test/env/`.",
    ),
    "reward/": ("Rewards", ""),
    "test/": ("Held-out problems and rows", "With several held-out sets, also `test/SET/...`."),
    "optim/": ("Update", ""),
    "rewards/": (
        "Preference pairs",
        "Of `dpo`, `orpo`, `simpo`, `kto`, `reward_model` and `online_dpo`. The implicit reward of "
        "an answer is beta times its log ratio to the reference; `reward_model` has its score.",
    ),
    "teacher/": ("Distillation", ""),
    "tool/": ("Tools", "Means over episodes; in rows they are `env/all/tool/...`."),
    "rubric/": ("Rubrics", ""),
    "sampler/": ("Sampler", "Counts of a step."),
    "time/": ("Time", "Seconds, except `time/tokens_per_second`."),
    "async/": ("Asynchronous rollouts", ""),
    "alarm/": (
        "Alarms",
        "1 while the alarm is on. [../report.md](../report.md#alarms) has the remedies.",
    ),
    "curriculum/": ("Curriculum", ""),
    "opponents/": ("Older versions of the policy", ""),
}

METRICS: dict[str, str] = {
    "step": "step of the run, over all stages, from 1; rows of step 0 hold the evaluation before training",
    "stage": "name of the stage",
    "progress/batch": "batch of the stage, from 0",
    "progress/done_frac": "share of the stage's steps that are done",
    "progress/epoch": "passes over the data",
    # samples
    "env/all/reward/total": "mean reward of an episode",
    "env/all/reward/std": "its standard deviation",
    "env/all/reward/min": "the lowest reward",
    "env/all/reward/max": "the highest reward",
    "env/all/reward/NAME": "mean of the part NAME of a reward",
    "env/all/correct": "share of right answers, if the reward or the environment reports it",
    "env/all/format": "share of answers in the right format, if reported",
    "env/all/ended": "share of answers that ended by themselves",
    "env/all/by_group/frac_mixed": "share of groups with different rewards: only these teach grpo",
    "env/all/by_group/frac_all_good": "share of groups with equal rewards above 0",
    "env/all/by_group/frac_all_bad": "share of groups with equal rewards of 0 or below",
    "env/all/total_episodes": "episodes that were scored",
    "env/all/total_groups": "groups of the batch",
    "env/all/distinct_beginnings": "share of answers whose first 50 characters differ from those of all others",
    "env/all/turns_per_episode": "answers in an episode",
    "env/all/ac_tokens_per_turn": "tokens of an answer",
    "env/all/ob_tokens_per_turn": "tokens of a prompt",
    "env/all/frac_truncated": "share of answers cut off by max_tokens",
    "env/all/NAME": "mean of the metric NAME of an environment or a reward",
    # rewards
    "reward/total": "mean reward of the step, as `env/all/reward/total`",
    "reward/failed": "answers that could not be scored, and were dropped",
    "reward/gave_up": "answers that a built-in reward could not evaluate: they scored 0",
    "reward/overlong_penalty": "mean penalty of `overlong_share`",
    "reward/cut_off_penalty": "mean penalty of `cut_off_penalty`",
    "reward/running_mean": "mean that `normalise_rewards` subtracts",
    "reward/running_std": "standard deviation by which `normalise_rewards` divides",
    "reward/kept": "best_of_n: mean reward of the selected answers",
    "reward/learned": "mean score of a model as judge; in rows `env/all/reward/learned`",
    "reward/learned/NAME": "the same of each of several reward models",
    "reward/given": "next to a learned reward: mean of the reward that is only measured",
    "reward/episode": "mean of a reward that scores whole episodes of an environment",
    # held out
    "test/env/all/NAME": "the metrics of `env/all`, of a sample of each held-out problem",
    "test/env/all/correct": "held-out accuracy",
    "test/env/all/reward/total": "held-out reward",
    "test/greedy/all/correct": "accuracy of greedy answers, before the first step and after the last",
    "test/greedy/all/reward/total": "reward of greedy answers",
    "test/loss": "loss on held-out rows (nats a token; a pair; an answer)",
    "test/tokens": "sft: tokens of the held-out answers",
    "test/token_accuracy": "sft: share of tokens that are the most likely",
    "test/rewards/chosen": "mean reward of the preferred answers",
    "test/rewards/rejected": "mean reward of the other answers",
    "test/rewards/margins": "mean difference of the two",
    "test/rewards/accuracies": "share of pairs that are ranked right",
    "test/rewards/calibration_error": "reward_model: expected calibration error of the probability",
    "test/logps/chosen": "mean log probability of the preferred answers",
    "test/logps/rejected": "mean log probability of the other answers",
    "test/comparison/tie": "reward_model that compares: mean probability of a tie",
    "test/comparison/consistent": "reward_model that compares: share of pairs with the same verdict in both orders",
    # update
    "optim/loss": "loss of methods that read rows, ppo and distillation (mean over tokens or pairs)",
    "optim/policy_loss": "policy-gradient loss; its level measures nothing",
    "optim/value_loss": "loss of the value head or the critic",
    "optim/td_loss": "offline ilql: loss of the action values",
    "optim/cql": "offline ilql: term that keeps values of other tokens low",
    "optim/kl": "distill on the teacher's answers: KL to the teacher, nats a token",
    "optim/ce": "distill on the teacher's answers: cross-entropy of its tokens",
    "optim/lr": "learning rate of the step",
    "optim/grad_norm": "largest gradient norm of the step, before clipping",
    "optim/critic_grad_norm": "the same of the critic",
    "optim/skipped_nonfinite": "optimizer steps that were skipped because the gradient was not finite",
    "optim/skipped_no_signal": "optimizer steps at learning rate 0 because nothing had a gradient",
    "optim/substeps": "optimizer steps of the batch",
    "optim/minibatches": "parts of the batch with `stream_minibatches`",
    "optim/epochs": "ppo: passes over the batch, fewer if `target_kl` was reached",
    "optim/tokens": "tokens that were trained on",
    "optim/pairs": "online_dpo: pairs that were trained on",
    "optim/answers_kept": "best_of_n: selected answers",
    "optim/groups_kept": "best_of_n: share of groups with a selected answer",
    "optim/frac_credited": "share of the sampled tokens with an advantage other than 0",
    "optim/entropy": "mean of minus the logprob of the sampled tokens, nats a token",
    "optim/policy_entropy": "entropy of the full distribution, if the loss has an entropy term",
    "optim/clip_frac": "share of tokens with a ratio outside the clip range",
    "optim/value_clip_frac": "share of tokens with a clipped value",
    "optim/kl_sample_train_v1": "KL from sampler to learner: mean difference of logprobs; about 0 if both agree",
    "optim/kl_sample_train_v2": "the same, half of the mean squared difference: never negative",
    "optim/max_logprob_difference": "largest difference of a logprob between sampler and learner",
    "optim/kl_behaviour_v1": "offline: the same KL, from the policy that wrote the answers",
    "optim/kl_behaviour_v2": "offline: half of the mean squared difference",
    "optim/kl_ref_k1": "KL to the reference, nats a token: unbiased, may be negative",
    "optim/kl_ref_k3": "KL to the reference, nats a token: never negative",
    "optim/kl_coef": "coefficient of that KL, which `kl_target` adapts",
    "optim/approx_kl_k1": "ppo: KL of the update, from the policy that sampled",
    "optim/approx_kl_k3": "ppo: the same, never negative; `target_kl` compares with it",
    "optim/value": "ppo: mean value before the update",
    "optim/return": "ppo: mean return, the target of the value",
    "optim/explained_variance": "ppo: share of the variance of returns that the values explain",
    "optim/correction_weight": "mean weight of the importance correction",
    "optim/correction_low": "share of tokens below the bounds of the correction",
    "optim/correction_high": "share of tokens above the bounds",
    "optim/correction_ess": "effective share of the sample under the weights",
    "optim/tis_weight": "`truncated_is`: mean weight",
    "optim/tis_frac_capped": "`truncated_is`: share of capped weights",
    "optim/rerouted": "mixture of experts: share of tokens that sampler and learner route differently",
    "optim/router_aux_loss": "mixture of experts: load-balancing loss",
    # pairs
    "rewards/chosen": "mean reward of the preferred (`kto`: good) answers",
    "rewards/rejected": "mean reward of the other answers",
    "rewards/margins": "mean difference of the two",
    "rewards/accuracies": "share of pairs that are ranked right",
    "logps/chosen": "mean log probability of the preferred answers",
    "logps/rejected": "mean log probability of the other answers",
    "teacher/kl_per_token": "KL from student to teacher, nats a token",
    "teacher/kl_per_answer": "the same, summed over an answer",
    "tool/calls": "calls of tools",
    "tool/failed": "calls that raised or ran out of time",
    "tool/malformed": "calls that are no JSON, name no tool or have wrong arguments",
    "rubric/QUESTION": "mean reading of the question that begins with these words",
    # sampler
    "sampler/temperature": "temperature of the samples",
    "sampler/prefill_tokens": "prompt tokens that were computed",
    "sampler/prefill_prompts": "prompts that were computed, once for a group",
    "sampler/prefix_cached_tokens": (
        "prompt tokens that were not computed, because their keys and values were in the cache"
    ),
    "sampler/fed_tokens": "rows that were passed through the model to decode",
    "sampler/decoded_rows": "rows of logits from which a token was sampled",
    "sampler/emitted_tokens": "tokens of the answers",
    "sampler/finished_samples": "answers",
    "sampler/steps": "decode steps",
    "sampler/peak_rows": "most answers at once",
    "sampler/peak_cache_tokens": "most tokens of the KV cache at once",
    "sampler/drafted_tokens": "draft tokens of speculative decoding",
    "sampler/accepted_tokens": "draft tokens that became tokens of an answer",
    # time
    "time/step": "the whole step, without evaluation",
    "time/sample": "sampling",
    "time/score": "waiting for environments and rewards",
    "time/sync": "giving the new weights to the sampler",
    "time/test": "evaluation by samples, and storing the answers",
    "time/test_rows": "evaluation on rows",
    "time/reward/NAME": "the reward NAME, summed over all workers",
    "time/tokens_per_second": "sampled (else trained) tokens over `time/step`",
    # asynchronous
    "async/age/mean": "mean age of the trained tokens, in updates",
    "async/age/max": "largest age",
    "async/age/N": "share of tokens of age N",
    "async/awaited_groups": "groups that the update waited for because of their age",
    "async/redrawn_groups": "groups that were dropped and sampled again",
    "async/redrawn_tokens": "tokens of these groups, those of unfinished samples included",
    "async/groups_under_way": "groups that are being sampled after the step",
    # alarms
    "alarm/kl_0.01": "sampler and learner differ by more than 0.01",
    "alarm/kl_0.1": "by more than 0.1",
    "alarm/kl_1": "by more than 1: diverged",
    "alarm/grad_norm": "gradient norm above 10 in three steps, or not finite",
    "alarm/zero_advantages": "three batches without an advantage",
    "alarm/reward_flat": "no rise of the reward",
    "alarm/entropy_collapse": "entropy far below its first value",
    "alarm/low_temperature": "temperature below 0.6 and equal rewards",
    "alarm/mode_collapse": "answers begin alike",
    "alarm/length": "answers grow",
    "alarm/format_alone": "the format improves, correctness does not",
    "alarm/rewards_failing": "many answers could not be scored",
    "curriculum/level": "level of the problems",
    "curriculum/problems": "problems at or below the level",
    "opponents/count": "versions in the pool",
    "opponents/own_rating": "Elo rating of the policy",
    "opponents/best_rating": "highest rating in the pool",
}


def make_pattern(name: str, custom_names: Collection[str] = ()) -> str:
    """Return the regular expression of a documented name: N is a number, other capitals are one of
    `custom_names`.
    """
    choices = "|".join(map(re.escape, custom_names)) or "(?!)"  # without names it matches nothing
    return re.sub(
        r"[A-Z]+(?=/|$)",
        lambda match: r"\d+" if match[0] == "N" else f"(?:{choices})",
        re.escape(name),
    )


def is_documented(name: str, custom_names: Collection[str] = ()) -> bool:
    """Return whether the table explains a metric of a run. The metrics of a data set, `env/SET/...`,
    `test/env/SET/...` and `test/SET/...`, are explained under `all`, and without SET.

    `custom_names`: names that a user or a data set gave to metrics, rewards and questions. Every
    other part of a name is compared exactly, so that a misspelt name is not taken for one of these.
    """
    names = {name, re.sub(r"^((?:test/)?(?:env|greedy))/[^/]+/", r"\1/all/", name)}
    if not name.startswith(("test/env/", "test/greedy/")):
        names.add(re.sub(r"^test/[^/]+/", "test/", name))
    # held-out samples have the names of samples
    names |= {item.removeprefix("test/") for item in names if item.startswith("test/env/")}
    patterns = [make_pattern(known, custom_names) for known in METRICS]
    return any(re.fullmatch(pattern, item) for pattern in patterns for item in names)
