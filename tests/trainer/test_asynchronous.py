"""Test whole runs in which sampling does not wait for learning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from sampler_models import reference_logprobs
from transformers import AutoModelForCausalLM
from whole_runs import (
    RECIPE,
    train,
    updates_end_while_answers_are_drawn,
)
from whole_runs import read_metrics as metrics

from rl.algorithms import METHODS
from rl.algorithms.grpo import variant_settings
from rl.client import SamplingClient
from rl.config import AsyncRolloutSettings, RunSettings, SettingsError, parse_run
from rl.distributed import RunStopped
from rl.errors import UserError
from rl.rollout import RolloutBatch, Trajectory, TrajectoryGroup, Transition
from rl.trainer.batch_source import AsyncSource
from rl.trainer.execute import execute
from rl.trainer.stage_sampling import AllRewardsFailed, StageSampler
from rl.trainer.trainer import Trainer
from rl.types import ModelInput, SampledSequence

ENVIRONMENT = '''
import asyncio, random
from rl.envs import Environment, TurnResult

class Uneven(Environment):
    """One to three answers, each of which takes a while; rewards differ."""

    def start(self):
        self.left = 1 + self.rng.randrange(3)
        return f"{self.seed % 7}+{self.seed % 5}="

    async def step(self, answer):
        await asyncio.sleep(random.random() * 0.04)
        self.left -= 1
        text = answer["content"] or ""
        return TurnResult(f"{len(text)}+1=", reward=sum(map(ord, text)) % 5 / 4 + 0.1 * self.member, done=self.left == 0)
'''
LINE = (
    "grpo --steps 4 --batch-size 4 --group-size 2 --max-tokens 5 --eval-every 0 --save-every 2 "
    "--keep-last 9 --rollouts-every 1 --quiet"
)


def execute_words(words: str) -> None:
    execute(parse_run(words.split(), METHODS, RECIPE, options=RunSettings))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains with the words of a command line, and returns the folder."""
    home = tmp_path_factory.mktemp("runs")
    (home / "uneven.py").write_text(ENVIRONMENT)
    played = (
        f"--environment {home}/uneven.py:Uneven --environment-isolation thread --renderer plain"
    )
    common = f"{LINE} {played} --learning-rate 1e-3 --no-self-test"

    def go(name: str, words: str = "") -> Path:
        execute_words(f"{common} --output-dir {home / name} {words}")
        return home / name

    return go


def weights(folder: Path, name: str = "grpo-final") -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = {}
    for file in (folder / "checkpoints" / name / "model").glob("*.safetensors"):
        weights |= load_file(str(file))
    assert weights
    return weights


def same(a: Path, b: Path) -> bool:
    first, other = weights(a), weights(b)
    assert first.keys() == other.keys()
    return all((first[name] == other[name]).all() for name in first)


def read_episodes(folder: Path) -> Iterator[tuple[str, dict]]:
    """Yield (name of the file, row) of each episode that was trained on."""
    for path in sorted((folder / "rollouts").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            yield path.stem, json.loads(line)


def read_trained_rows(folder: Path) -> list:
    """Return what each step trained on: problem, member, tokens of each turn."""
    results = []
    for name, row in read_episodes(folder):
        text = [turn["token_ids"] for turn in row.get("turns", ()) if turn["sampled"]]
        results.append((name, row["problem"], row["index"], text or [row["response_tokens"]]))
    return results


def remove_checkpoints(folder: Path, kept: str) -> None:
    """Remove all checkpoints but one, as if the run had been killed after it."""
    for path in (folder / "checkpoints").iterdir():
        if path.name != kept:
            shutil.rmtree(path)


LATE = "--max-steps-off-policy 2 --slice-steps 2"


@pytest.mark.slow
def test_a_batch_in_parts_is_the_update_of_the_whole_batch(trained):
    # A smaller epsilon turns rounding errors of gradients near 0 into whole steps.
    whole = trained("whole", "--steps 2 --adam-eps 1e-3")
    for name, words in (
        ("continuous", "--rollout-mode async"),
        ("parts", "--stream-minibatches 4"),
        ("halves", "--stream-minibatches 2"),
    ):
        result = trained(name, f"--steps 2 --adam-eps 1e-3 {words}")
        assert read_trained_rows(result) == read_trained_rows(whole)
        for key, value in weights(whole).items():
            np.testing.assert_allclose(weights(result)[key], value, atol=1e-6)
        keys = ("policy_loss", "grad_norm", "tokens", "kl_sample_train_v1")
        for got, expected in zip(metrics(result), metrics(whole), strict=True):
            for key in (*(f"optim/{key}" for key in keys), "reward/total"):
                assert got[key] == pytest.approx(expected[key], abs=1e-5), key


METHODS_THAT_SAMPLE = {
    "ppo": "ppo --kl-coef 0 --group-size 2 --epochs 2 --num-substeps 2 --target-kl None",
    "online_dpo": "online_dpo --group-size 3 --pairs all",
    "best_of_n": "best_of_n --group-size 4 --keep 2",
    "distill": "distill --teacher tiny:addition --group-size 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS_THAT_SAMPLE)
def test_episodes_that_go_on_by_themselves_train_every_method_alike(method, tmp_path):
    """Continuous sampling trains on the same tokens with the same update, also with settings of
    PPO, online DPO, best-of-n and distillation. A replay is bit for bit equal.
    """
    (tmp_path / "uneven.py").write_text(ENVIRONMENT)
    played = f"--environment {tmp_path}/uneven.py:Uneven --environment-isolation thread"
    common = (
        f"{METHODS_THAT_SAMPLE[method]} --base-model tiny:addition --lora-rank 0 --steps 2 "
        "--batch-size 4 --max-tokens 5 --eval-every 0 --save-every 2 --rollouts-every 1 --quiet "
        "--renderer plain --learning-rate 1e-3 --adam-eps 1e-3 --no-self-test --temperature 1 "
        f"{'--dataset addition' if method == 'distill' else played}"
    )

    def go(name: str, words: str = "") -> Path:
        execute_words(f"{common} --output-dir {tmp_path / name} {words}")
        return tmp_path / name

    def trained(folder: Path) -> dict[str, np.ndarray]:
        return weights(folder, f"{method}-final")

    whole, single = go("whole"), go("alone", "--rollout-mode async --slice-steps 2")
    assert read_trained_rows(single) == read_trained_rows(whole)
    for key, value in trained(whole).items():
        np.testing.assert_allclose(trained(single)[key], value, atol=1e-6)
    again = go("again", f"--rollout-mode async --slice-steps 2 --replay {single}")
    assert all((trained(again)[key] == value).all() for key, value in trained(single).items())


@pytest.mark.slow
def test_asynchronous_runs_hold_their_bound_train_each_group_once_and_repeat_bit_for_bit(trained):
    with updates_end_while_answers_are_drawn():
        first = trained("async", LATE)
    rows = metrics(first)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["async/age/max"] for row in rows) in (1, 2)
    for row in rows:
        assert sum(row[f"async/age/{age}"] for age in range(3)) == pytest.approx(1.0)
    problems = [(problem, index) for _, problem, index, _ in read_trained_rows(first)]
    assert len(problems) == len(set(problems)) == 4 * 4 * 2
    turns = [turn for _, row in read_episodes(first) for turn in row.get("turns", ())]
    assert any("versions" in turn for turn in turns)
    again = trained("again", f"{LATE} --replay {first}")
    assert same(first, again) and metrics(again) == metrics(first)
    assert (again / "decisions.jsonl").read_text() == (first / "decisions.jsonl").read_text()
    # Killed after its second step and resumed: equal to the undisturbed run, with no answer lost or
    # sampled twice.
    cut = first.parent / "cut"
    shutil.copytree(first, cut)
    remove_checkpoints(cut, "grpo-000002")
    gone_on = trained("cut", f"{LATE} --resume --replay {first}")
    assert same(first, gone_on) and metrics(gone_on) == metrics(first)
    assert read_trained_rows(gone_on) == read_trained_rows(first)


@pytest.mark.slow
def test_answers_that_are_too_old_are_drawn_again(trained):
    words = "--max-steps-off-policy 1 --slice-steps 2 --on-stale resample"
    rows = metrics(trained("on-stale", words))
    assert len(rows) == 4 and max(row["async/age/max"] for row in rows) <= 1


@pytest.mark.slow
def test_with_a_cache_that_is_read_again_every_logprob_is_that_of_the_weights_it_names(trained):
    """Each logprob equals a recomputation under the checkpoint of its version, in a plain forward
    pass over prompt and answer. Many answers span two versions.
    """
    with updates_end_while_answers_are_drawn():
        folder = trained(
            "exact",
            "--max-steps-off-policy 2 --slice-steps 2 --recompute-cache --save-every 1 "
            "--learning-rate 1e-2",
        )
    # version 0 has no checkpoint
    load = AutoModelForCausalLM.from_pretrained
    names = {version: f"checkpoints/grpo-{version:06d}/model" for version in (1, 2)}
    models = {v: load(folder / name, dtype=torch.float32) for v, name in names.items()}
    compared, of_several, apart = 0, 0, 0.0
    for name, row in read_episodes(folder):
        tokens = row["prompt_tokens"], row["response_tokens"]
        drew = np.array(row.get("versions") or [row["version"]] * len(tokens[1]))
        of_several += len(set(drew.tolist())) > 1
        for version, model in models.items():
            result = reference_logprobs(model, *tokens, row["temperature"]).numpy()
            gaps = np.abs(result - np.array(row["logprobs"]))
            assert gaps[drew == version].max(initial=0) < 1e-4, (name, row["problem"])
            compared += int((drew == version).sum())
            apart = max(apart, gaps[drew == 3 - version].max(initial=0))
    assert compared > 20 and of_several > 0 and apart > 0.01


def test_a_token_older_than_the_bound_or_of_a_version_yet_to_come_ends_the_run():
    """A stale version label, or a scheduler that lost count, raises an error before training."""
    inputs = SimpleNamespace(settings=SimpleNamespace(), environment=None)
    samples = StageSampler(inputs, None)

    def rollouts(*versions):
        episodes = []
        for v in versions:
            action = SampledSequence([1, 2], [-1.0, -1.0], version=min(v), versions=list(v))
            episodes.append(Trajectory([Transition(ModelInput.from_ints([1]), action, 1.0, True)]))
        group = TrajectoryGroup(episodes, [0.0] * len(episodes), [{}] * len(episodes))
        return RolloutBatch([group], [], {}, 0.0, 0.0)

    samples.check_rollouts(rollouts((5, 5), (4, 5), (3, 4)), 5, 2)
    for wrong, oldest in (((3, 4), 1), ((2, 5), 2), ((5, 6), 2), ((4, 4), 0)):
        with pytest.raises(RuntimeError, match="samples come from weight versions"):
            samples.check_rollouts(rollouts((5, 5), wrong), 5, oldest)
    with pytest.raises(AllRewardsFailed, match="the policy had no turn in any episode"):
        samples.check_rollouts(RolloutBatch([], [], {}, 0.0, 0.0), 5, 2)


@pytest.mark.parametrize(("inputs", "says"), [
    ({"stream_minibatches": 2, "advantage": "batch", "group_size": 1},
     "advantage batch .* whole batch"),
    ({"stream_minibatches": 2, "num_substeps": 2}, "num_substeps"),
    ({"stream_minibatches": 64}, "is larger than batch_size"),
    ({"max_steps_off_policy": 1, "dynamic_sampling": 2}, "dynamic_sampling"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(inputs, says):
    with pytest.raises(SettingsError, match=says):
        variant_settings("dr_grpo", **inputs)
    for single in ({"max_waiting": 3}, {"on_stale": "resample"}, {"recompute_cache": True}):
        with pytest.raises(ValueError, match="no effect"):
            AsyncRolloutSettings(**single)


def attach_weights(source, result):
    """Return the result of an update that sends its weights to ranks that only sample."""
    policy = source.trainer.models.policy
    return result._replace(new_weights=policy.save_weights_and_get_sampling_client())


@pytest.mark.slow
def test_an_update_begins_while_the_weights_of_the_one_before_are_on_their_way(
    trained, monkeypatch
):
    """As with ranks that only sample, no weights arrive before the next update has begun. A replay
    in which all weights arrive at once repeats the run.
    """
    present, calls, begun, credit = set(), {}, [], AsyncSource.update_and_send

    def arrive(client):
        present.add(client)
        for call in calls.pop(client, ()):
            call()

    def learn(source, batch, before):
        begun.append((batch.number, before is not None))
        if before is not None:
            arrive(before)
        return attach_weights(source, credit(source, batch, before))

    with monkeypatch.context() as patched:
        patched.setattr(AsyncSource, "update_and_send", learn)
        patched.setattr(SamplingClient, "ready", property(lambda client: client in present))
        patched.setattr(
            SamplingClient,
            "on_ready",
            lambda client, call: calls.setdefault(client, []).append(call),
        )
        first = trained("far", f"{LATE} --steps 6 --save-every 3")
    # The save after batch 2 waits for the weights.
    assert begun == [(0, False), (1, True), (2, True), (3, False), (4, True), (5, True)]
    rows = [json.loads(line) for line in (first / "decisions.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows if row.get("weights") == "under way"] == [0, 1, 3, 4]
    assert sum(row.get("landed", False) for row in rows) == 4
    assert max(row["async/age/max"] for row in metrics(first)) == 2
    again = trained("far-again", f"{LATE} --steps 6 --save-every 3 --replay {first}")
    assert same(first, again) and metrics(again) == metrics(first)
    assert read_trained_rows(again) == read_trained_rows(first)
    assert (again / "decisions.jsonl").read_text() == (first / "decisions.jsonl").read_text()
    remove_checkpoints(again, "grpo-000003")
    gone_on = trained("far-again", f"{LATE} --steps 6 --save-every 3 --resume --replay {first}")
    assert same(first, gone_on) and metrics(gone_on) == metrics(first)


@pytest.mark.slow
def test_a_checkpoint_where_weights_were_on_their_way_is_said_to_go_on_otherwise(
    trained, monkeypatch, capsys
):
    def learn(source, batch, before):
        return attach_weights(source, credit(source, batch, before))

    credit = AsyncSource.update_and_send
    with monkeypatch.context() as patched:
        patched.setattr(AsyncSource, "update_and_send", learn)
        first = trained("whole-way", f"{LATE} --save-every 0")
    capsys.readouterr()
    again = trained("saved-on-the-way", f"{LATE} --save-every 1 --replay {first}")
    text = " ".join(capsys.readouterr().out.split())
    assert "the replayed run had a weight sync in flight" in text
    differs = "will not be bit-identical, because settings differ: save_every 0 -> 1"
    assert f"this replay of {first} {differs}" in text
    assert read_trained_rows(again)[:8] == read_trained_rows(first)[:8]
    trained("as-before", f"{LATE} --save-every 0 --keep-last 3 --replay {first}")
    assert "bit-identical" not in capsys.readouterr().out
    # No weights are in flight here, although the log of decisions says that they land.
    remove_checkpoints(again, "grpo-000002")
    try:
        trained("saved-on-the-way", f"{LATE} --save-every 1 --resume --replay {first}")
    except UserError as error:  # recomputed caches may end other answers sooner
        assert "the log of decisions belongs to another run" in str(error)
    assert max(row["async/age/max"] for row in metrics(again)) <= 2


@pytest.mark.slow
def test_a_run_that_was_stopped_between_two_checkpoints_is_repeated(trained, monkeypatch):
    """Caches were recomputed at the step where the run was stopped."""
    real = Trainer.end_batch

    def stopping(stage, batch, *inputs):
        if batch.number == 1:
            stage.stop_request.exit_code = 143
        real(stage, batch, *inputs)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "end_batch", stopping)
        with pytest.raises(RunStopped):
            trained("stopped", f"{LATE} --steps 4 --save-every 0")
    first = trained("stopped", f"{LATE} --steps 4 --save-every 0 --resume")
    again = trained("stopped-again", f"{LATE} --steps 4 --save-every 0 --replay {first}")
    assert same(first, again) and metrics(again) == metrics(first)
    rows = [json.loads(line) for line in (again / "decisions.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows if "stopped" in row] == [1]


def test_evaluations_of_other_settings_are_not_replayed(trained):
    words = "--rollout-mode async --slice-steps 2 --steps 1 --eval-every 1 --save-every 0"
    first = trained("evaluated", f"{words} --eval-limit 6")
    assert '"part": "test before"' in (first / "decisions.jsonl").read_text()
    again = trained("evaluated-again", f"{words} --eval-limit 6 --replay {first}")
    assert metrics(again) == metrics(first)
    assert (again / "decisions.jsonl").read_text() == (first / "decisions.jsonl").read_text()
    fewer = trained("evaluated-fewer", f"{words} --eval-limit 3 --replay {first}")
    assert same(first, fewer)


def test_what_is_to_be_replayed_is_looked_for_first(trained, tmp_path):
    with pytest.raises(UserError, match=r"the folder has no decisions.jsonl"):
        trained("nothing-there", f"{LATE} --base-model no-such-model --replay {tmp_path}")


@pytest.mark.parametrize("size", [1, 4])
def test_a_run_goes_on_with_batches_of_another_size(size, tmp_path):
    """It trains on the problems of the run that samples on policy, each once."""
    words = (
        "grpo --dataset addition --base-model tiny:ascii-small --group-size 2 --max-tokens 3 "
        "--eval-every 0 --rollouts-every 1 --no-self-test"
    )
    problems = []
    for flow in ("--max-steps-off-policy 0", "--max-steps-off-policy 1"):
        folder = tmp_path / flow[-1]
        train(f"{words} {flow} --batch-size 2 --steps 2", folder)
        change = f"--resume --change batch_size={size}"
        train(f"{words} {flow} --batch-size {size} --steps 4 {change}", folder)
        rows = [row for row in read_trained_rows(folder) if int(row[0][-6:]) > 2]
        assert len(rows) == 2 * size * 2
        problems.append(sorted((problem, index) for _, problem, index, _ in rows))
    assert problems[0] == problems[1]
