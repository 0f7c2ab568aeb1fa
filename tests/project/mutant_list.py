"""List thirty subtle faults: (file, the quick tests that should detect it, what it breaks, exact
old text, new text). test_mutant_list.py injects them.

An old text occurs exactly once in its file. Tests are files below tests/, without test_ and .py.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    tests: str
    breaks: str
    old: str
    new: str


# fmt: off
MUTANTS = [Mutant(*fields) for fields in (
    ("rl/rollout/rollout_engine.py", "rollout", "one random stream for every turn",
     "seed=derive_seed(group.seed, turn),",
     "seed=group.seed,"),
    ("rl/trainer/evaluator.py", "loop_parts", "the held-out streams' constancy",
     'result = self._sample(sampler, derive_seed(context.seed, "test"), greedy=False)',
     'result = self._sample(sampler, derive_seed(context.seed, "test", '
     "sampler.version), greedy=False)"),
    ("rl/learner/learner_checkpoint.py", "backends", "rank RNG on resume",
     'torch.set_rng_state(rng[f"rank{rank}"])',
     "torch.set_rng_state(rng['rank0'])"),
    ("rl/losses/loss_terms.py", "loss_terms", "the KL estimators' gradient",
     "estimate_T = value_T.detach() + (k2_T - k2_T.detach())",
     "estimate_T = value_T"),
    ("rl/algorithms/advantages.py", "advantages grpo", "the sample's std for the population's",
     "return subtract_mean(rewards_G) / (rewards.std() + eps)",
     "return subtract_mean(rewards_G) / (rewards.std(ddof=1) + eps)"),
    ("rl/algorithms/importance_correction.py", "corrections", "the geometric mean",
     "gaps_E = gaps_E / np.maximum(counts_E, 1)",
     "gaps_E = gaps_E"),
    ("rl/sampler/cpu_kernels.cpp", "sampler_cpu_kernels",
     "the draw inside a block as if it were the first",
     "target - (block ? sums[block - 1] : 0.0)",
     "target"),
    ("rl/sampler/forward_fast.py", "sampler_decoders",
     "the last layer at what lies behind shorter prompts",
     "attended, x = attended[last], x[last]",
     "attended, x = attended[:, -1], x[:, -1]"),
    ("rl/data/problem_set.py", "data", "each epoch the same order",
     "return np.random.Generator(np.random.Philox([seed, epoch])).permutation(len(self))",
     "return np.random.Generator(np.random.Philox([seed, 0])).permutation(len(self))"),
    ("rl/learner/learner_checkpoint.py", "clients", "merging in bf16",
     "copy.deepcopy(model, copies).float().cpu()",
     "copy.deepcopy(model, copies).bfloat16().cpu()"),
    ("kernels/linear_logprob_torch.py", "kernel_linear_logprob", "the running expectation",
     "mean.mul_(decay).addmm_(e if slope is None else e.mul_(slope), w)",
     "mean.addmm_(e if slope is None else e.mul_(slope), w)"),
    ("rl/learner/layout_probe.py", "probe", "a faint leak is let through",
     "if not result.other_gradient_norm <= MAX_LEAK * size:",
     "if not result.other_gradient_norm <= self.tolerances[0] * size:"),
    ("rl/sampler/rope_switch.py", "architectures",
     "the longrope kind of a row of just the original length",
     "return length > self.threshold",
     "return length >= self.threshold"),
    ("rl/sampler/running_rows.py", "sampler_streams", "the high half of a problem's number is lost",
     "counter = (position & _LOW, index & _LOW, problem & _LOW, problem >> _HALF)",
     "counter = (position & _LOW, index & _LOW, problem & _LOW, problem & _LOW)"),
    ("rl/losses/losses.py", "loss_terms", "gspo's mean over all tokens",
     "mean_T = average_per_datum(gap_T, active_T, cu_seqlens)",
     "mean_T = average_per_datum(gap_T, torch.ones_like(gap_T), cu_seqlens)"),
    ("rl/losses/loss_terms.py", "loss_terms",
     "the KL term weighted by the batch's logprobs, not by those drawn",
     "behavior_key = next(\n"
     '            (name for name in ("behavior_logprobs", "logprobs") if name in inputs), None\n'
     "        )",
     "behavior_key = next((name for name in ('logprobs', 'behavior_logprobs') if name "
     "in inputs), None)"),
    ("rl/algorithms/ppo.py", "ppo setting_pairs_ppo",
     "GAE in the order of the datums, not of the turns",
     "self.positions = np.array([place for turn in ranges for place in turn], dtype=np.int64)",
     "self.positions = np.arange(self.count)"),
    ("rl/algorithms/advantages.py", "ppo", "a token's own KL charge is discounted",
     "total = float(reward) + discount * total",
     "total = discount * (float(reward) + total)"),
    ("rl/rollout/datum_builder.py", "temperatures datums", "turns at two temperatures in one datum",
     "same = (action.temperature, action.beyond) == (self.temperature, self.long_rope)",
     "same = action.beyond == self.long_rope"),
    ("rl/renderers/special_token_escaping.py", "renderer_specials",
     "tokens that only look special are control tokens in a user's text",
     "self.control = {\n"
     "            word\n"
     "            for word, special in added.items()\n"
     '            if special or word in named or re.fullmatch(r"<\\|.+\\|>", word)\n'
     "        }",
     "self.control = {word for word, special in added.items() if special or (word in "
     "named and re.fullmatch('<\\\\|.+\\\\|>', word))}"),
    ("rl/runtime/sample_temperatures.py", "temperatures",
     "a short sample that ends alike is taken for the datum's",
     "for length in sorted(self._length_counts.get(tail, ()), reverse=True):",
     "for length in sorted(self._length_counts.get(tail, ())):"),
    ("rl/processes/run_lock.py", "run_lock", "who lost the folder removes the new owner's lock",
     'if owner is not None and owner.get("nonce") == self._record["nonce"]:',
     "if owner is not None:"),
    ("rl/reporting/alarm_monitor.py", "alarms_windows alarms",
     "the first and last batches of a trend overlap",
     "return (first[:count], list(last)) if len(first) >= 2 * count else None",
     "return (first[:count], list(last)) if len(first) >= count else None"),
    ("rl/serve/served_models.py", "serve_durable",
     "an update whose write failed after the rename has happened",
     'if saved is not None and saved["next_seq"] == model.last_started_seq + 1:',
     "if saved is None:"),
    ("rl/sampler/block_manager.py", "block_tables", "a row writes to a page that others hold",
     "if pool.ref_counts[block] > 1:",
     "if pool.ref_counts[block] > 2:"),
    ("rl/trainer/batch_source.py", "staleness", "a redrawn group has the random numbers of before",
     'seed = derive_seed(seed, "again", attempt)',
     "pass"),
    ("rl/sampler/running_rows.py", "token_versions",
     "a reused buffer keeps the versions of the row before",
     'self._versions[new["buffer"]] = _NEWEST',
     "pass"),
    ("rl/algorithms/kto.py", "kto", "kto's z of the prompt's own answer",
     "others = [*answers[1:], *answers[:1]]",
     "others = answers"),
    ("rl/rollout/episode_state.py", "rollout continuous",
     "what was earned before there was no room",
     "last.reward, last.metrics = last.reward + reward, {**last.metrics, **metrics}",
     "last.reward, last.metrics = (reward, {**last.metrics, **metrics})"),
    ("rl/distributed/collectives.py", "backends", "DDP sums: a mean",
     "dist.all_reduce(piece)",
     "dist.all_reduce(piece)\n        piece /= world()"),
)]
