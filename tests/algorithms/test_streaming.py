"""Test that a batch trained in parts equals the batch trained at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from algorithm_helpers import make_method, off_the_policy, score_sequences

from rl import ServiceClient
from rl.algorithms import Models, Progress, StreamedStep
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.types import ModelInput, SampledSequence

# test_setting_pairs compares other losses and corrections of streamed batches with float64.
LOSSES = {
    "ppo-entropy": {"entropy_coef": 0.02, "normalise": "sequence_means"},
    "ppo-to_go": {"step_rewards": "to_go", "reward_discount": 0.9},
    "importance_sampling": {"loss": "importance_sampling", "advantage": "leave_one_out",
                            "normalise": "sequences"},
    "cispo": {"loss": "cispo", "clip_low": 0.0, "clip_high": 5.0},
    "gspo": {"loss": "gspo", "normalise": "sequence_means", "advantage": "none"},
}  # fmt: skip
CORRECTIONS = {
    "none": {},
    "truncated_is": {"truncated_is": 1.3},
    "truncate-against_the_learner": {"correction": "truncate", "proximal": "learner"},
    "icepop-sequence": {"correction": "icepop", "correction_level": "sequence",
                        "correction_low": 0.7},
    "mask-geometric": {"correction": "mask", "correction_level": "geometric", "correction_low": 0.9,
                       "correction_high": 1.1},
}  # fmt: skip
OFTEN = {
    "kl_coef": 0.0, "max_tokens": 6, "group_size": 3, "learning_rate": 1e-3, "adam_eps": 1e-3,
    "batch_size": 6, "steps": 1,
}  # fmt: skip
PARTS = (2, 4, 6)  # the second part is groups 2 and 3


def method_of(loss: str, correction: str):
    return make_method(**OFTEN, **LOSSES[loss], **CORRECTIONS[correction])


def episodes_of(rng: np.random.Generator, silent: set[int]) -> list[TrajectoryGroup]:
    groups = []
    for problem in range(PARTS[-1]):
        members = []
        for _ in range(3):
            seen, turns = rng.integers(0, 12, 2).tolist(), []
            for turn in range(int(rng.integers(1, 3))):
                tokens = rng.integers(0, 12, int(rng.integers(1, 7))).tolist()
                label = {"temperature": 1.0, "version": 0}
                action = SampledSequence(tokens, [0.0] * len(tokens), "stop", **label)
                reward = (1.0 if problem in silent else float(rng.normal())) / (turn + 1)
                turns.append(Transition(ModelInput.from_ints(list(seen)), action, reward, False))
                # a second turn continues the first, or starts a new context and makes a separate
                # datum
                continues = rng.random() < 0.5
                seen = [*seen, *tokens, 12] if continues else [int(rng.integers(0, 12))] * 3
            turns[-1].episode_done = True
            members.append(Trajectory(turns))
        final = [0.0] * 3
        if problem in silent:
            final = [2.0 - sum(turn.reward for turn in member.transitions) for member in members]
        groups.append(TrajectoryGroup(members, final, [{}] * 3, problem_index=problem))
    return groups


@pytest.fixture(scope="module")
def client_pair(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=1) as service:
        made = [
            service.create_full_training_client("tiny:addition-small", seed=1) for _ in range(2)
        ]
        yield made, made[0].save_state("beginning").result().path


@pytest.fixture
def clients(client_pair):
    """Reset two clients to their initial state, whatever other tests did with them."""
    made, path = client_pair
    for client in made:
        client.load_state_with_optimizer(path).result()
    return made


def compare(clients, loss: str, correction: str, seed: int, silent: set[int]) -> dict[str, float]:
    """Update both clients once; check equal metrics and weights; return the metrics."""
    at_once, in_parts = clients
    groups, progress = episodes_of(np.random.default_rng(seed), silent), Progress(0, 1)
    off_the_policy(at_once, groups, np.random.default_rng(seed + 1))
    whole, method = Models(at_once), method_of(loss, correction)
    shaped = method.shape_rewards(groups)
    update = method.update(whole, method.compute_advantages(shaped, whole), progress)
    expected = {**update, **method.shaping_metrics}
    step = StreamedStep(method_of(loss, correction), Models(in_parts), progress)
    for low, high in zip((0, *PARTS[:-1]), PARTS, strict=True):
        step.add(groups[low:high])
    metrics = step.finish()
    probe = np.random.default_rng(0).integers(0, 13, (4, 12)).tolist()
    first, other = (np.concatenate(score_sequences(client, probe)) for client in clients)
    np.testing.assert_allclose(first, other, atol=2e-5, err_msg=f"{loss}, {correction}")
    assert metrics.pop("optim/minibatches") >= 1 and metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-4, abs=2e-6), (loss, correction)
    return expected


def each_once() -> list[tuple[str, str]]:
    """Return every loss and every correction once."""
    return list(zip(LOSSES, [*CORRECTIONS][1:] + [*CORRECTIONS][:1], strict=True))


@pytest.mark.parametrize(("loss", "correction"), each_once())
def test_parts_are_the_whole_batch(clients, loss, correction):
    metrics = compare(clients, loss, correction, 10, silent={2, 3})
    assert metrics["optim/grad_norm"] > 1e-3 and "optim/skipped_no_signal" not in metrics


def test_the_length_penalty_is_the_mean_over_the_whole_batch(clients, monkeypatch):
    """The parts have 2, 2 and 2 groups of three answers of different lengths."""
    monkeypatch.setitem(LOSSES, "ppo-overlong", {"overlong_share": 0.8, "overlong_penalty": 2.0})
    metrics = compare(clients, "ppo-overlong", "none", 10, silent=set())
    assert metrics["reward/overlong_penalty"] > 0.1


@pytest.mark.campaign
@pytest.mark.parametrize(("loss", "correction"), list(itertools.product(LOSSES, CORRECTIONS)))
def test_parts_are_the_whole_batch_whichever_groups_are_silent(clients, loss, correction):
    for seed, silent in enumerate((set(), {0, 1}, {2, 3}, {4, 5}, {0, 1, 2, 3}, {1, 5})):
        compare(clients, loss, correction, 100 * seed, silent)


@pytest.mark.parametrize("loss", ["cispo", "importance_sampling"])
def test_a_batch_without_signal_moves_nothing(clients, loss):
    """AdamW has state from earlier updates, which would otherwise change the weights."""
    compare(clients, loss, "none", 20, silent=set())
    probe = np.random.default_rng(0).integers(0, 13, (4, 12)).tolist()
    before = [np.concatenate(score_sequences(client, probe)) for client in clients]
    metrics = compare(clients, loss, "none", 30, silent=set(range(6)))
    assert metrics["optim/skipped_no_signal"] == 1.0 and metrics["optim/tokens"] > 0
    for client, reference in zip(clients, before, strict=True):
        np.testing.assert_array_equal(np.concatenate(score_sequences(client, probe)), reference)
