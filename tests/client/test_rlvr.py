"""Test the RLVR interface: a script learns, saves and resumes; what `update` reports."""

import json
import re
import runpy
import statistics
from pathlib import Path

import learning
import numpy as np
import pytest
from safetensors.numpy import load_file

from rl import LoRAConfig, ServiceClient, TrainingConfig, UserError
from rl.distributed import checkpoint_folder
from rl.rlvr import (
    PPO,
    REINFORCE,
    PPOConfig,
    REINFORCEConfig,
    RolloutSampler,
    ScoredTrajectory,
    TrajectoryBatch,
    register_reward,
    resolve_reward,
)
from rl.rollout import Trajectory, Transition
from rl.types import Datum, ModelInput, SampledSequence

SUMS = ["12+34=", "50+7=", "9+9=", "81+10="]
ADAPTER = TrainingConfig(model_ref="tiny:addition", lora_config=LoRAConfig(rank=4, alpha=8), seed=3)
WHOLE = TrainingConfig(model_ref="tiny:addition", lora_config=None, seed=3)


@pytest.fixture
def service(tmp_path):
    with ServiceClient(output_dir=tmp_path / "out", seed=5) as service:
        yield service


def score_batch(sampler, prompts=SUMS):
    """Return a batch with the number of sevens as reward."""
    batch = sampler.generate_trajectories(prompts)
    batch.rewards = [float(trajectory.response.count("7")) for trajectory in batch]
    return batch


def datums_of(batch):
    """Return each trajectory as a datum, shifted by hand."""
    results = []
    for trajectory in batch:
        turn = trajectory.episode.transitions[0]
        prompt = turn.ob.to_ints()
        tokens, zeros = prompt + turn.ac.tokens, [0.0] * (len(prompt) - 1)
        ones = zeros + [1.0] * len(turn.ac.tokens)
        fields = {"target_tokens": tokens[1:], "logprobs": zeros + turn.ac.logprobs}
        fields |= {"advantages": ones, "mask": ones}
        results.append(Datum(ModelInput.from_ints(tokens[:-1]), fields))
    return results


def at_actions(client, batch, name):
    """Return the client's output `name` for each response token, in float64."""
    data, config = datums_of(batch), {"temperature": batch.temperature}
    result = client.forward(data, "importance_sampling", config, entropy=True).result()
    results = [
        output[name].array[datum.loss_fn_inputs["mask"].array != 0]
        for output, datum in zip(result.loss_fn_outputs, data, strict=True)
    ]
    return np.concatenate(results).astype(np.float64)


def drawn_logprobs(batch):
    return np.concatenate([t.episode.transitions[0].ac.logprobs for t in batch])


# ------------------------------------------------------------------------------------ whole scripts


@register_reward("has_letter_e")
def has_letter_e(prompt: str, response: str, meta=None) -> float:
    return float("e" in response.lower())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "updates"),
    [
        (REINFORCE(REINFORCEConfig(learning_rate=1e-2)), 20),
        (PPO(PPOConfig(learning_rate=3e-3, target_kl=0.05)), 16),
    ],
    ids=["REINFORCE", "PPO"],
)
def test_a_script_learns(tmp_path, algorithm, updates):
    """From random weights, the share of answers with an e rises from a fifth to nearly all."""
    prompts = ["Why is the sky blue?", {"prompt": "Name a river.", "meta": {"kind": "fact"}},
               "Count to ten.", "What is rain?"]  # fmt: skip
    config = TrainingConfig(model_ref="tiny:ascii", lora_config=LoRAConfig(rank=8, alpha=16))
    reward = resolve_reward("has_letter_e")
    with ServiceClient(output_dir=tmp_path, seed=learning.seed(1)) as service:
        client = service.create_training_client(config)
        sampler = RolloutSampler(client, max_new_tokens=12, samples_per_prompt=8)
        means, best = [], None
        for update in range(updates):
            batch = sampler.generate_trajectories(prompts)
            for trajectory in batch:
                trajectory.reward = reward(trajectory.prompt, trajectory.response, trajectory.meta)
            result = algorithm.update(batch, client)
            means.append(batch.mean_reward)
            values = [result.policy_loss, result.value_loss, result.entropy, result.kl_divergence]
            assert np.isfinite([*values, result.grad_norm]).all()
            if best is None or means[-1] > max(means[:-1]):
                best = client.save_state(metadata={"update": update, "reward": means[-1]})
        learning.check_figure("mean reward at first", means[0], below=0.4)
        last = statistics.fmean(means[-4:])
        learning.check_figure("mean reward of the last four updates", last, above=0.9)
        saved = checkpoint_folder.read_verified_state(best.artifact_id)
        assert saved["metadata"]["reward"] == max(means)
        assert saved["version"] >= saved["metadata"]["update"] + 1
        again = service.create_training_client(config, checkpoint_id=best.artifact_id)
        sampler = RolloutSampler(again, max_new_tokens=12, samples_per_prompt=32)
        shown = [reward(t.prompt, t.response) for t in sampler.generate_trajectories(prompts)]
        name = "mean reward of the best, loaded again"
        learning.check_figure(name, statistics.fmean(shown), above=0.75)


REMEMBERS = {
    "REINFORCE": lambda: REINFORCE(
        REINFORCEConfig(learning_rate=3e-3, normalize_advantages=False, kl_penalty_coef=0.2)
    ),
    "PPO": lambda: PPO(
        PPOConfig(
            learning_rate=3e-3, target_kl=None, ppo_epochs=2, minibatches=2, kl_penalty_coef=0.2
        )
    ),
}


@pytest.mark.parametrize("name", REMEMBERS)
def test_resumed_is_uninterrupted(tmp_path, name):
    """Check that 2 + 2 updates, the second two from files only, equal 4 updates."""

    def go(client, algorithm, updates):
        sampler = RolloutSampler(client, max_new_tokens=5, temperature=0.9)
        seen = []
        for _ in range(updates):
            batch = score_batch(sampler)
            seen.append(([t.tokens for t in batch], algorithm.update(batch, client).metrics))
        return seen

    def service(folder):
        return ServiceClient(output_dir=tmp_path / folder, seed=5)

    def weights(artifact):
        files = ("model/adapter_model.safetensors", "value_head.safetensors")
        return {
            key: value for file in files for key, value in load_file(f"{artifact}/{file}").items()
        }

    with service("whole") as item:
        client, algorithm = item.create_training_client(ADAPTER), REMEMBERS[name]()
        whole = go(client, algorithm, 4)
        expected, state = weights(client.save_state().artifact_id), algorithm.get_state()
    with service("halves") as first:
        client, algorithm = first.create_training_client(ADAPTER), REMEMBERS[name]()
        halves = go(client, algorithm, 2)
        artifact = client.save_state(metadata={"updates": 2}).artifact_id
        text = json.dumps(algorithm.get_state())
    with service("halves") as second:
        client = second.create_training_client(ADAPTER, checkpoint_id=artifact)
        algorithm = type(algorithm).from_state(json.loads(text))
        halves += go(client, algorithm, 2)
        saved = client.save_state()
        assert saved.artifact_id.endswith("state-000002")
        assert saved.result().path == saved.artifact_id
        actual = weights(saved.artifact_id)
    assert [tokens for tokens, _ in halves] == [tokens for tokens, _ in whole]
    assert [metrics for _, metrics in halves] == [metrics for _, metrics in whole]
    assert algorithm.get_state() == state and state["updates"] == 4
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(actual[key], value, key)


# ------------------------------------------------------------------------ what update does and says


def test_reinforce_reports_what_can_be_worked_out(service):
    client = service.create_training_client(WHOLE)
    sampler = RolloutSampler(client, max_new_tokens=6, temperature=0.8, samples_per_prompt=3)
    batch = score_batch(sampler)
    entropy = at_actions(client, batch, "entropy").mean()
    result = REINFORCE(REINFORCEConfig(learning_rate=1e-3)).update(batch, client)
    rewards = np.array(batch.rewards)
    advantages = (rewards - rewards.mean()) / rewards.std()
    lengths = np.array([len(trajectory.tokens) for trajectory in batch])
    loss = -(advantages * lengths).sum() / lengths.sum()
    assert result.policy_loss == pytest.approx(loss, abs=1e-5)
    assert result.entropy == pytest.approx(entropy, abs=1e-5)
    gap = drawn_logprobs(batch) - at_actions(client, batch, "logprobs")
    assert result.kl_divergence == pytest.approx((np.exp(-gap) - 1 + gap).mean(), rel=1e-4)
    assert result.kl_divergence > 1e-4
    assert result.value_loss == 0 and result.grad_norm > 0
    expected = rewards.mean(), rewards.std()
    assert (batch.mean_reward, batch.std_reward) == pytest.approx(expected)


def test_the_baseline_is_the_running_mean_of_earlier_batches(service):
    """A constant reward of 2 follows a reward of 0."""
    client = service.create_training_client(WHOLE)
    sampler = RolloutSampler(client, max_new_tokens=3)
    algorithm = REINFORCE(REINFORCEConfig(normalize_advantages=False, entropy_coef=0.0))
    losses = []
    for reward in (0.0, 2.0, 2.0):
        batch = sampler.generate_trajectories(SUMS)
        batch.rewards = [reward] * len(batch)
        losses.append(algorithm.update(batch, client).policy_loss)
    assert losses == [0.0, pytest.approx(-2.0, abs=1e-4), pytest.approx(-1.8, abs=1e-4)]
    assert algorithm.get_state()["method"]["baseline"] == pytest.approx(0.9 * 0.2 + 0.1 * 2.0)


def test_ppo_of_one_epoch_without_a_value_is_reinforce(service):
    """With lambda 1 and no value each advantage is the reward; a ratio of 1 is not clipped."""
    results = []
    plain = dict(learning_rate=1e-3, normalize_advantages=False)
    options = dict(ppo_epochs=1, gae_lambda=1.0, value_coef=0.0, reward_normalization=False)
    reinforce = REINFORCE(REINFORCEConfig(use_baseline=False, **plain))
    for algorithm in (reinforce, PPO(PPOConfig(**options, **plain))):
        client = service.create_training_client(WHOLE)
        batch = score_batch(RolloutSampler(client, max_new_tokens=6))
        result = algorithm.update(batch, client)
        results.append([result.policy_loss, result.grad_norm, result.kl_divergence,
                      *at_actions(client, batch, "logprobs")])  # fmt: skip
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def test_ppo_reports_its_value_loss(service):
    """A new head returns 0: the return at t is lambda^(remaining tokens) times the reward."""
    client = service.create_training_client(WHOLE)
    batch = score_batch(RolloutSampler(client, max_new_tokens=6, samples_per_prompt=3))
    result = PPO(PPOConfig(ppo_epochs=1)).update(batch, client)
    returns = [
        r / batch.std_reward * 0.95 ** np.arange(len(t.tokens))[::-1]
        for r, t in zip(batch.rewards, batch, strict=True)
    ]
    assert result.value_loss == pytest.approx((np.concatenate(returns) ** 2 / 2).mean(), rel=1e-5)
    assert result.policy_loss == pytest.approx(0, abs=1e-5)  # normalised advantages at ratio 1
    assert result.metrics["optim/epochs"] == 1


def test_target_kl_ends_the_epochs(service):
    client = service.create_training_client(WHOLE)
    batch = score_batch(RolloutSampler(client, max_new_tokens=6))
    result = PPO(PPOConfig(learning_rate=1e-2, target_kl=1e-6)).update(batch, client)
    assert result.metrics["optim/epochs"] == 1 and result.kl_divergence > 1e-6


def test_the_penalty_is_taken_against_the_base_or_a_given_reference(service):
    """Under a LoRA adapter the base is the reference."""
    price = PPOConfig(learning_rate=3e-3, kl_penalty_coef=0.1)
    client = service.create_training_client(ADAPTER)
    base = service.create_sampling_client(base_model="tiny:addition", seed=3)
    sampler, algorithm = RolloutSampler(client, max_new_tokens=5), PPO(price)
    first = algorithm.update(score_batch(sampler), client).metrics["optim/kl_ref_k3"]
    assert first == pytest.approx(0, abs=1e-6)
    batch = score_batch(sampler)
    prompts = [t.episode.transitions[0].ob.to_ints() for t in batch]
    full = [ModelInput.from_ints([*p, *t.tokens]) for p, t in zip(prompts, batch, strict=True)]
    scores = base.compute_logprobs_many(full).result()
    scores = [s[-len(t.tokens) :] for s, t in zip(scores, batch, strict=True)]
    gap = drawn_logprobs(batch) - np.concatenate(scores)
    assert (gap != 0).any()
    # at the same version
    twin = service.create_training_client(ADAPTER, checkpoint_id=client.save_state().artifact_id)
    for method, policy in ((algorithm, client), (PPO(price, reference=base), twin)):
        metrics = method.update(batch, policy).metrics
        assert metrics["optim/kl_ref_k1"] == pytest.approx(gap.mean(), abs=1e-5)
    with pytest.raises(UserError, match="reference=service.create_sampling_client"):
        whole = service.create_training_client(WHOLE)
        PPO(price).update(score_batch(RolloutSampler(whole, max_new_tokens=2)), whole)


# -------------------------------------------------------------------------------------- the sampler


def test_trajectories_stand_in_the_order_of_the_prompts_with_their_meta(service):
    client = service.create_training_client(WHOLE)
    sampler = RolloutSampler(client, max_new_tokens=4, samples_per_prompt=2)
    batch = sampler.generate_trajectories(["1+1=", {"prompt": "2+2=", "meta": {"answer": 4}}])
    assert [(t.prompt, t.meta) for t in batch] == [("1+1=", {})] * 2 + [("2+2=", {"answer": 4})] * 2
    assert batch[3] is batch.trajectories[3]
    assert len({id(t.episode) for t in batch}) == len(batch) == 4
    tokenizer = client.get_tokenizer()
    for trajectory in batch:
        tokens = trajectory.tokens
        ended = tokens[-1] == tokenizer.eos_token_id
        assert trajectory.truncated == (not ended) and len(tokens) <= 4
        assert trajectory.response == tokenizer.decode(tokens[:-1] if ended else tokens)
    paired = sampler.generate_trajectories(["1+1=", "2+2="], [{"answer": 2}, {"answer": 4}])
    assert [t.meta["answer"] for t in paired] == [2, 2, 4, 4]


def test_it_draws_from_the_weights_as_they_are(service):
    """Another call draws new samples; after an update the logprobs are those of the new weights."""
    client = service.create_training_client(WHOLE)
    sampler = RolloutSampler(client, max_new_tokens=6)
    first, second = score_batch(sampler), score_batch(sampler)
    assert [t.tokens for t in first] != [t.tokens for t in second]
    twin = RolloutSampler(client, max_new_tokens=6).generate_trajectories(SUMS)
    # repeats the first call at this version
    assert [t.tokens for t in twin] == [t.tokens for t in first]
    REINFORCE(REINFORCEConfig(learning_rate=1e-2)).update(second, client)
    for batch, agrees in ((score_batch(sampler), True), (second, False)):
        gap = drawn_logprobs(batch) - at_actions(client, batch, "logprobs")
        assert (np.abs(gap).max() < 1e-4) == agrees


# ----------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(("make", "says"), [
    (lambda: PPOConfig(clip_rnge=0.1),
     "PPOConfig has no setting 'clip_rnge': did you mean 'clip_range'"),
    (lambda: REINFORCEConfig(learningrate=0.1), "did you mean 'learning_rate'"),
    (lambda: TrainingConfig(model_ref="tiny:ascii", lora_cfg=LoRAConfig()),
     "did you mean 'lora_config'"),
    (lambda: LoRAConfig(ranks=4), "did you mean 'rank'"),
    (lambda: LoRAConfig(rank=0), "lora_config=None trains all weights"),
    (lambda: LoRAConfig(rank=2.5), "rank is at least 1"),
    (lambda: LoRAConfig(alpha=None), "alpha is positive"),
    (lambda: TrainingConfig(model_ref="tiny:ascii", lora_config={"rank": 4}),
     "lora_config is a LoRAConfig"),
    (lambda: PPOConfig(ppo_epochs=0), "ppo_epochs is at least 1, got 0"),
    (lambda: PPOConfig(target_kl=-0.1), "target_kl is positive, got -0.1"),
    (lambda: REINFORCEConfig(entropy_coef=float("nan")), "entropy_coef is at least 0, got nan"),
    (lambda: PPO(REINFORCEConfig()), "PPO takes a PPOConfig"),
    (lambda: PPO.from_state(REINFORCE().get_state()), "of REINFORCE, not of PPO"),
    (lambda: PPO.from_state({"epoch": 3}), "lacks algorithm, config, updates, method"),
    (lambda: TrajectoryBatch([]).mean_reward, "no trajectories"),
    (lambda: PPO().update(TrajectoryBatch([]), None), "no trajectories"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_the_defaults_are_the_published_ones():
    published = {"learning_rate": 1e-5, "entropy_coef": 0.01, "normalize_advantages": True}
    for config, values in (
        (PPOConfig(), {**published, "clip_range": 0.2, "ppo_epochs": 4, "target_kl": 0.01,
                       "value_coef": 0.5, "reward_normalization": True, "kl_penalty_coef": 0.0}),
        (REINFORCEConfig(), {**published, "use_baseline": True}),
        (LoRAConfig(), {"rank": 16, "alpha": 32}),
    ):  # fmt: skip
        assert {name: getattr(config, name) for name in values} == values


def test_batches_that_cannot_be_learnt_from_are_refused(service):
    client = service.create_training_client(WHOLE)
    sampler, algorithm = RolloutSampler(client, max_new_tokens=3), REINFORCE()
    batch = sampler.generate_trajectories(SUMS)
    with pytest.raises(UserError, match=r"trajectory 0 has no reward yet \(prompt '12\+34='"):
        algorithm.update(batch, client)
    message = "4 trajectories need as many rewards, in their order; got 3"
    with pytest.raises(UserError, match=message):
        batch.rewards = [1.0, 2.0, 3.0]
    batch.rewards = [1.0, 2.0, float("nan"), 0.0]
    with pytest.raises(UserError, match="trajectory 2 has the reward nan"):
        algorithm.update(batch, client)
    greedy = score_batch(RolloutSampler(client, max_new_tokens=3, temperature=0.0))
    with pytest.raises(UserError, match="sampled greedily"):
        algorithm.update(greedy, client)
    for prompts, metas, says in (
        ("12+34=", None, "a list of at least 1 prompt"),
        ([], None, "a list of at least 1 prompt"),
        (SUMS, [{}], "4 prompts need as many metas, in their order; got 1"),
        ([{"text": "1+1="}], None, "got the keys"),
        ([""], None, "prompt 0 must be a text that is not empty"),
        ([{"prompt": "a", "meta": 4}], None, "the meta of prompt 0 must be a mapping, got 4"),
        (["1+1=", "1" * 600], None, "problem 1 has 600 tokens, .* context of 512: shorten the"),
    ):
        with pytest.raises(UserError, match=says):
            sampler.generate_trajectories(prompts, metas)
    assert algorithm.updates == 0 and client.save_weights_and_get_sampling_client().version == 0
    headless = service.create_full_training_client("tiny:addition")
    with pytest.raises(UserError, match="no value head: create it with"):
        PPO().update(score_batch(sampler), headless)


def test_a_part_of_a_batch_keeps_its_temperature(service):
    client = service.create_training_client(WHOLE)
    batch, other = (
        score_batch(RolloutSampler(client, max_new_tokens=3, temperature=temperature))
        for temperature in (0.7, 1.0)
    )
    part = TrajectoryBatch([t for t in batch if t.prompt != SUMS[0]])
    assert len(part) == 3 and part.temperature == 0.7
    for mixed, given in (([*batch, *other], {}), (list(batch), {"temperature": 1.0})):
        with pytest.raises(UserError, match="were sampled at the temperatures 0.7, 1: "):
            TrajectoryBatch(mixed, **given)
    metrics = REINFORCE().update(part, client).metrics
    assert metrics["optim/max_logprob_difference"] < 1e-4


def test_ppo_learns_from_answers_that_end_where_the_context_does(service):
    """The last token of an answer is never fed, so prompt and answer may exceed the context by it."""
    client = service.create_training_client(WHOLE)
    prompt = ModelInput.from_ints([3] * (client.info["max_context"] - 5))
    trajectories = []
    for length, reason in ((6, "length"), (5, "stop")):
        answer = SampledSequence([4] * length, [-2.0] * length, reason, temperature=1.0)
        episode = Trajectory([Transition(prompt, answer, 0.0, True)])
        trajectories.append(ScoredTrajectory("", "", episode, reward=1.0))
    result = PPO(PPOConfig(ppo_epochs=1)).update(TrajectoryBatch(trajectories), client)
    assert result.metrics["optim/tokens"] == 11 and client.version == 1


def test_a_batch_of_weights_that_were_updated_since_is_refused(service):
    client = service.create_training_client(WHOLE)
    sampler, algorithm = RolloutSampler(client, max_new_tokens=3), REINFORCE()
    first, second = score_batch(sampler), score_batch(sampler)
    algorithm.update(first, client)
    message = "from weight version 0, expected the current version 1.*generate_trajectories"
    with pytest.raises(UserError, match=message):
        algorithm.update(second, client)
    fresh = score_batch(sampler)
    with pytest.raises(UserError, match="trajectory 4 was sampled from weight version 0"):
        algorithm.update(TrajectoryBatch([*fresh, *second]), client)
    assert client.version == 1 == algorithm.updates
    algorithm.update(fresh, client)
    assert client.version == 2 == algorithm.updates


@pytest.mark.parametrize("chosen", [{}, {"seed": 5, "train_attn": False}])
def test_an_adapter_of_a_config_is_the_one_of_tinkers_call(service, chosen):
    lora = LoRAConfig(rank=2, alpha=6, **chosen)
    config = TrainingConfig(model_ref="tiny:addition", lora_config=lora, seed=3)
    settings = {"rank": 2, "alpha": 6, "seed": 3, "model_seed": 3, "value_head": True, **chosen}
    saved = []
    for client in (
        service.create_training_client(config),
        service.create_lora_training_client("tiny:addition", **settings),
    ):
        folder = Path(client.save_state(f"saved-{len(saved)}").result().path)
        spec = json.loads((folder / "state.json").read_text())["spec"]
        saved.append((spec, (folder / "model" / "adapter_model.safetensors").read_bytes()))
    assert saved[0] == saved[1]


def test_checkpoints_are_named_in_turn_and_belong_to_their_config(service):
    client = service.create_training_client(ADAPTER)
    names = [client.save_state(metadata={"n": n}).artifact_id.rsplit("/", 1)[1] for n in range(2)]
    client.save_state("mine").result()
    assert names == ["state-000001", "state-000002"]
    assert service.create_training_client(ADAPTER, checkpoint_id="mine").info["lora_rank"] == 4
    lora = LoRAConfig(rank=8, alpha=8)
    other = TrainingConfig(model_ref="tiny:addition", lora_config=lora, seed=3)
    message = r"another model: .*'rank': 4.* in the checkpoint and .*'rank': 8"
    with pytest.raises(UserError, match=message):
        service.create_training_client(other, checkpoint_id=names[0])
    with pytest.raises(UserError, match="no checkpoint at"):
        service.create_training_client(ADAPTER, checkpoint_id="state-000009")
    with pytest.raises(UserError, match=r"takes a TrainingConfig\(model_ref"):
        service.create_training_client("tiny:addition")


def test_checkpoints_without_a_name_are_numbered_in_the_folder_they_are_written_to(
    service, tmp_path
):
    first, second = (service.create_training_client(ADAPTER) for _ in range(2))
    for client in (first, second):
        client.save_state("a").result()  # the second is written below model-1 from now on
    saved = [second.save_state().artifact_id for _ in range(2)]
    saved += [first.save_state(folder=tmp_path / "other").artifact_id for _ in range(2)]
    parents = ("out/model-1/checkpoints", "other")
    numbers = ("state-000001", "state-000002")
    assert saved == [str(tmp_path / parent / number) for parent in parents for number in numbers]


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with ServiceClient(output_dir="~/out") as service:
        client = service.create_training_client(ADAPTER)
        paths = [client.save_state("a").result().path]
        service.output_dir = "~/next"
        paths.append(client.save_state("a").result().path)
        paths.append(client.save_state("a", folder="~/folder").result().path)
        expected = ("out/checkpoints/a", "next/checkpoints/a", "folder/a")
        assert paths == [str(tmp_path / place) for place in expected]
        client.load_state("~/folder/a").result()
        resumed = service.create_training_client_from_state_with_optimizer("~/folder/a")
        assert resumed.info["lora_rank"] == 4
        sampled = client.save_weights_for_sampler("s", folder="~/folder").result().path
        assert sampled == str(tmp_path / "folder" / "s")
        assert service.create_sampling_client("~/folder/s").info["lora_rank"] == 4
        rest = service.create_rest_client()
        assert rest.get_weights_info_by_tinker_path("~/folder/a").result().lora_rank == 4
        rest.delete_checkpoint_from_tinker_path("~/folder/a").result()
    assert not (tmp_path / "folder" / "a").exists()


@pytest.mark.slow
def test_the_cookbooks_script_runs_with_other_imports_and_a_real_sampler(
    shared_data, tmp_path, monkeypatch, capsys
):
    """The guide's complete script runs with its imports, the mock sampler and the model's name
    replaced, and with 2 epochs instead of 50.
    """
    guide = shared_data.parent / "guide" / "rlvr-cookbook.md"
    if not guide.is_file():
        pytest.skip(f"no guide at {guide}")
    text = guide.read_text().split("## Step 7", 1)[1]
    text = text.split("```python\n", 1)[1].split("\n```", 1)[0]
    for old, new in (
        ("from tg_tinker import", "from rl import"),
        ("from tensafe.rlvr import", "from rl.rlvr import"),
        ("    MockRolloutSampler,", "    RolloutSampler,"),
        ("MockRolloutSampler(", "RolloutSampler(tc, "),
        ("meta-llama/Llama-3-8B", "tiny:ascii"),
        ("max_new_tokens=128", "max_new_tokens=16"),
        ("range(50)", "range(2)"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "script.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("script.py", run_name="__main__")
    printed = capsys.readouterr().out
    output = re.findall(r"New best! Reward: (-?[\d.]+), Checkpoint: (\S+)", printed)
    assert output and printed.rstrip().endswith("Training complete!")
    for reward, where in output:
        state = checkpoint_folder.read_verified_state(tmp_path / where)
        assert state["metadata"]["reward"] == pytest.approx(float(reward), abs=6e-4)


def test_the_mock_sampler_of_a_guide_is_answered():
    with pytest.raises(ImportError, match=r"RolloutSampler\(client, ...\) in place of"):
        from rl.rlvr import MockRolloutSampler  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        from rl.rlvr import NoSuchName  # noqa: F401
