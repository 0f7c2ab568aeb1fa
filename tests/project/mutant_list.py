"""List thirty subtle faults: (file, exact old text, new text, what it breaks, the quick tests that
should detect it). test_mutant_list.py injects them.

An old text occurs exactly once in its file.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    breaks: str
    tests: str  # files below tests/, without test_ and .py


M = Mutant
MUTANTS = [
    M(
        "rl/rollout/rollout_engine.py",
        "            seed=derive_seed(group.seed, turn),\n",
        "            seed=group.seed,\n",
        "one random stream for every turn",
        "rollout",
    ),
    M(
        "rl/trainer/evaluator.py",
        '        result = self._sample(sampler, derive_seed(context.seed, "test"), greedy=False)\n',
        '        result = self._sample(sampler, derive_seed(context.seed, "test", sampler.version), greedy=False)\n',
        "the held-out streams' constancy",
        "loop_parts",
    ),
    M(
        "rl/learner/learner_checkpoint.py",
        '            torch.set_rng_state(rng[f"rank{rank}"])\n',
        "            torch.set_rng_state(rng['rank0'])\n",
        "rank RNG on resume",
        "backends",
    ),
    M(
        "rl/losses/loss_terms.py",
        "    estimate_T = value_T.detach() + (k2_T - k2_T.detach())\n",
        "    estimate_T = value_T\n",
        "the KL estimators' gradient",
        "loss_terms",
    ),
    M(
        "rl/algorithms/advantages.py",
        "    return subtract_mean(rewards_G) / (rewards.std() + eps)\n",
        "    return subtract_mean(rewards_G) / (rewards.std(ddof=1) + eps)\n",
        "the sample's std for the population's",
        "advantages grpo",
    ),
    M(
        "rl/algorithms/importance_correction.py",
        "            gaps_E = gaps_E / np.maximum(counts_E, 1)\n",
        "            gaps_E = gaps_E\n",
        "the geometric mean",
        "corrections",
    ),
    M(
        "rl/sampler/cpu_kernels.cpp",
        "target - (block ? sums[block - 1] : 0.0)",
        "target",
        "the draw inside a block as if it were the first",
        "sampler_cpu_kernels",
    ),
    M(
        "rl/sampler/forward_fast.py",
        "                attended, x = attended[rows, last_B], x[rows, last_B]\n",
        "                attended, x = (attended[rows, -1], x[rows, -1])\n",
        "the last layer at what lies behind shorter prompts",
        "sampler_decoders",
    ),
    M(
        "rl/data/problem_set.py",
        "        return np.random.Generator(np.random.Philox([seed, epoch])).permutation(len(self))\n",
        "        return np.random.Generator(np.random.Philox([seed, 0])).permutation(len(self))\n",
        "each epoch the same order",
        "data",
    ),
    M(
        "rl/learner/learner_checkpoint.py",
        "copy.deepcopy(model, copies).float().cpu()",
        "copy.deepcopy(model, copies).bfloat16().cpu()",
        "merging in bf16",
        "clients",
    ),
    M(
        "kernels/linear_logprob_torch.py",
        "            mean.mul_(decay).addmm_(e if slope is None else e.mul_(slope), w)\n",
        "            mean.addmm_(e if slope is None else e.mul_(slope), w)\n",
        "the running expectation",
        "kernel_linear_logprob",
    ),
    M(
        "rl/learner/layout_probe.py",
        "        if not result.other_gradient_norm <= MAX_LEAK * size:\n",
        "        if not result.other_gradient_norm <= self.tolerances[0] * size:\n",
        "a faint leak is let through",
        "probe",
    ),
    M(
        "rl/sampler/rope_switch.py",
        "        return length > self.threshold\n",
        "        return length >= self.threshold\n",
        "the longrope kind of a row of just the original length",
        "architectures",
    ),
    M(
        "rl/sampler/running_rows.py",
        "    counter = (position & _LOW, index & _LOW, problem & _LOW, problem >> _HALF)\n",
        "    counter = (position & _LOW, index & _LOW, problem & _LOW, problem & _LOW)\n",
        "the high half of a problem's number is lost",
        "sampler_streams",
    ),
    M(
        "rl/losses/losses.py",
        "    mean_T = average_per_datum(gap_T, active_T, cu_seqlens)\n",
        "    mean_T = average_per_datum(gap_T, torch.ones_like(gap_T), cu_seqlens)\n",
        "gspo's mean over all tokens",
        "loss_terms",
    ),
    M(
        "rl/losses/loss_terms.py",
        '        behavior_key = next(\n            (name for name in ("behavior_logprobs", "logprobs") if name in inputs), None\n        )\n',
        "        behavior_key = next((name for name in ('logprobs', 'behavior_logprobs') if name in inputs), None)\n",
        "the KL term weighted by the batch's logprobs, not by those drawn",
        "loss_terms",
    ),
    M(
        "rl/algorithms/ppo.py",
        "        self.positions = np.array([place for turn in ranges for place in turn], dtype=np.int64)\n",
        "        self.positions = np.arange(self.count)\n",
        "GAE in the order of the datums, not of the turns",
        "ppo setting_pairs_ppo",
    ),
    M(
        "rl/algorithms/advantages.py",
        "        total = float(reward) + discount * total\n",
        "        total = discount * (float(reward) + total)\n",
        "a token's own KL charge is discounted",
        "ppo",
    ),
    M(
        "rl/rollout/datum_builder.py",
        "        same = (action.temperature, action.beyond) == (self.temperature, self.long_rope)\n",
        "        same = action.beyond == self.long_rope\n",
        "turns at two temperatures in one datum",
        "temperatures datums",
    ),
    M(
        "rl/renderers/special_token_escaping.py",
        '        self.control = {\n            word\n            for word, special in added.items()\n            if special or word in named or re.fullmatch(r"<\\|.+\\|>", word)\n        }\n',
        "        self.control = {word for word, special in added.items() if special or (word in named and re.fullmatch('<\\\\|.+\\\\|>', word))}\n",
        "tokens that only look special are control tokens in a user's text",
        "renderer_specials",
    ),
    M(
        "rl/runtime/sample_temperatures.py",
        "            for length in sorted(self._length_counts.get(tail, ()), reverse=True):\n",
        "            for length in sorted(self._length_counts.get(tail, ())):\n",
        "a short sample that ends alike is taken for the datum's",
        "temperatures",
    ),
    M(
        "rl/run_lock.py",
        '            if owner is not None and owner.get("nonce") == self._record["nonce"]:\n',
        "            if owner is not None:\n",
        "who lost the folder removes the new owner's lock",
        "run_lock",
    ),
    M(
        "rl/reporting/alarm_monitor.py",
        "        return (self._first, list(self._last)) if self._num_values >= 2 * self._count else None\n",
        "        return (self._first, list(self._last)) if self._num_values >= self._count else None\n",
        "the first and last batches of a trend overlap",
        "alarms_windows alarms",
    ),
    M(
        "rl/serve/served_models.py",
        '            if saved is not None and saved["next_seq"] == model.last_started_seq + 1:\n',
        "            if saved is None:\n",
        "an update whose write failed after the rename has happened",
        "serve_durable",
    ),
    M(
        "rl/sampler/block_manager.py",
        "            if self.pool.ref_counts[block] > 1:\n",
        "            if self.pool.ref_counts[block] > 2:\n",
        "a row writes to a page that others hold",
        "block_tables",
    ),
    M(
        "rl/trainer/batch_source.py",
        '            seed = derive_seed(seed, "again", attempt)\n',
        "            pass\n",
        "a redrawn group has the random numbers of before",
        "staleness",
    ),
    M(
        "rl/sampler/running_rows.py",
        "            self._version_ends.pop(buffer, None)\n",
        "            pass\n",
        "a reused buffer keeps the versions of the row before",
        "token_versions",
    ),
    M(
        "rl/algorithms/kto.py",
        "        others = [*answers[1:], *answers[:1]]\n",
        "        others = answers\n",
        "kto's z of the prompt's own answer",
        "kto",
    ),
    M(
        "rl/rollout/episode_state.py",
        "        last.reward, last.metrics = last.reward + reward, {**last.metrics, **metrics}\n",
        "        last.reward, last.metrics = (reward, {**last.metrics, **metrics})\n",
        "what was earned before there was no room",
        "rollout continuous",
    ),
    M(
        "rl/distributed/collectives.py",
        "            dist.all_reduce(flat)\n",
        "            dist.all_reduce(flat)\n            flat /= world()\n",
        "DDP sums: a mean",
        "backends",
    ),
]
