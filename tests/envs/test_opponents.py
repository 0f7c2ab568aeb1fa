"""Test older versions of the policy as opponents: kept in the run's folder, bounded, chosen, rated,
and resumed bit for bit.
"""

import json
from pathlib import Path

import pytest
import torch
from games import example_address
from rank_server import run_script
from safetensors.torch import load_file
from whole_runs import train, two_and_two

from rl import ServiceClient
from rl.errors import RunFolderError, UserError
from rl.sampler import SamplingRequest
from rl.trainer import stage_models as opponents_room
from rl.types import SamplingParams

REPO = Path(__file__).resolve().parents[2]
SMALL = (
    "--base-model tiny:ascii-small --batch-size 4 --group-size 2 --max-tokens 3 --learning-rate "
    "1e-2 --rollouts-every 0"
)
POOL = (
    f"grpo --environment tic_tac_toe --environment.opponent pool {SMALL} --opponents 2 "
    f"--opponents-every 1"
)


def list_versions(folder: Path) -> set[str]:
    return {path.name for path in (folder / "sampler_weights").glob("*-opponent-*")}


def state(folder: Path, name: str) -> dict:
    return json.loads((folder / "checkpoints" / name / "state.json").read_text())["metadata"][
        "opponents"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["elo", "age"])
def test_two_steps_and_two_resumed_are_four_to_the_bit_with_the_pool(by, tmp_path, monkeypatch):
    """The run is interrupted in the third step, after the pool has dropped a version that the
    checkpoint of the second step still names.
    """
    played: dict[str, list[str]] = {}
    load = opponents_room.OpponentModels._load

    def noted(self, name):
        played.setdefault(self.folder.name, []).append(name)
        return load(self, name)

    monkeypatch.setattr(opponents_room.OpponentModels, "_load", noted)
    rows = two_and_two(f"{POOL} --opponents-by {by} --eval-every 0", tmp_path)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert len(played["whole"]) == 4 and played["cut"] == played["whole"][:3] + played["whole"][2:]
    assert [row["opponents/count"] for row in rows if "opponents/count" in row] == [2, 2, 2, 2]
    finals = [state(folder, "grpo-final") for folder in (whole, cut)]
    assert finals[0] == finals[1] and sum(item["games"] for item in finals[0]["opponents"]) > 0
    assert state(whole, "grpo-000002") == state(cut, "grpo-000002")
    assert list_versions(whole) == list_versions(cut)
    for name in list_versions(whole):  # both runs have the same weights for each version
        a, b = (
            load_file(str(folder / "sampler_weights" / name / "model.safetensors"))
            for folder in (whole, cut)
        )
        assert all(torch.equal(a[key], b[key]) for key in a)
    named = {f"grpo-opponent-step-{item['step']:06d}" for item in finals[0]["opponents"]}
    named |= {
        f"grpo-opponent-step-{item['step']:06d}"
        for item in state(whole, "grpo-000002")["opponents"]
    }
    assert list_versions(whole) == named, "those that the pool or a checkpoint names, and no others"


@pytest.mark.slow
def test_the_folder_is_bounded_and_a_lost_version_is_named(tmp_path):
    words = f"{POOL} --eval-every 3 --eval-limit 4 --save-every 1 --keep-last 1 --steps 3"
    rows = train(words, tmp_path / "run")
    assert all("opponents/own_rating" in row for row in rows[1:]) and all(
        "test/env/all/lost" in row for row in (rows[0], rows[-1])
    )
    # two in the pool, and those of one earlier checkpoint
    assert len(list_versions(tmp_path / "run")) <= 4
    step = state(tmp_path / "run", "grpo-000002")["opponents"][-1]["step"]
    (
        tmp_path
        / "run"
        / "sampler_weights"
        / f"grpo-opponent-step-{step:06d}"
        / "model.safetensors"
    ).write_bytes(b"")
    final = tmp_path / "run" / "checkpoints" / "grpo-final"
    final.rename(tmp_path / "aside")
    with pytest.raises(
        RunFolderError, match="an older version that the run plays against is damaged"
    ):
        train(f"{words} --resume", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--environment tic_tac_toe --environment.opponent policy",
        "--environment tic_tac_toe --environment.opponent tiny:ascii",
        f"--environment {example_address('twenty_questions')} --environment.questions 2 --environment.answerer "
        "tiny:ascii-small",
        f"--environment {example_address('debate')} --environment.judge tiny:ascii",
    ],
    ids=["itself", "a model", "an answerer", "a judge"],
)
def test_seats_are_played_by_whoever_is_named(words, tmp_path):
    sampled = f"{SMALL} --eval-every 1 --eval-limit 2 --save-every 0 --steps 1"
    rows = train(f"grpo {words} {sampled}", tmp_path / "run")
    assert any(key.startswith("test/env/") for key in rows[-1])
    # O has no episode in a game that ended with X's first move, which may be invalid
    episodes = rows[-1]["env/all/total_episodes"]
    least, most = (
        (8, 16)
        if "policy" in words
        else (16, 16)
        if "debate" in words
        else (4, 8)
        if "tic_tac_toe" in words
        else (8, 8)
    )
    assert least <= episodes <= most
    assert rows[-1]["optim/max_logprob_difference"] < 1e-4


def test_another_model_keeps_its_temperature_in_calls_and_in_streams(tmp_path):
    """It samples greedily although the policy's parameters do not, and vice versa."""
    with ServiceClient(output_dir=tmp_path, seed=1) as service:
        client = service.create_full_training_client("tiny:ascii", seed=1)
        sampler = client.save_weights_and_get_sampling_client()
        requests = {
            temperature: [
                SamplingRequest(
                    prompt=[5 + i, 9],
                    params=SamplingParams(max_tokens=8, temperature=temperature, stop=[]),
                    seed=3,
                    problem=i,
                )
                for i in range(4)
            ]
            for temperature in (0.0, 1.0)
        }

        def text(responses):
            return [response.sequences[0].tokens for response in responses]

        results = {t: text(sampler.sample_many(r).result()[0]) for t, r in requests.items()}
        assert results[0.0] != results[1.0]
        for reference, other in ((0.0, 1.0), (1.0, 0.0)):
            player = opponents_room.FixedTemperatureSampler(sampler, reference)
            assert text(player.sample_many(requests[other]).result()[0]) == results[reference]
            with player.open_stream() as stream:
                tickets, finished = [stream.add(request) for request in requests[other]], {}
                while stream.busy:
                    finished |= stream.run_steps().finished
            assert text([finished[ticket] for ticket in tickets]) == results[reference]


def test_a_player_that_is_not_there_is_named_before_anything_is_written(tmp_path):
    words = (
        f"grpo --environment tic_tac_toe --environment.opponent nowhere/at/all {SMALL} --steps 1"
    )
    with pytest.raises(UserError, match="no folder nowhere/at/all"):
        train(words, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_saved_weights_are_evaluated_against_whoever_is_named(tmp_path):
    train(f"{POOL} --eval-every 0 --steps 1", tmp_path / "run")
    results = {}
    for opponent in ("perfect", "pool"):
        words = (
            f"{tmp_path / 'run'} --limit 6 --environment.held_out_opponent {opponent} "
            f"--output {tmp_path}/{opponent}.json"
        )
        done = run_script("evaluate.py", *words.split(), cwd=REPO)
        assert done.returncode == 0, done.stdout + done.stderr
        results[opponent] = json.loads((tmp_path / f"{opponent}.json").read_text())
    # a version of the pool may end a game at its first move
    assert results["perfect"]["answers"] == 6 and 3 <= results["pool"]["answers"] <= 6
    players = {
        name: {tuple(sorted(row["players"])) for row in first["rows"]}
        for name, first in results.items()
    }
    assert players == {"perfect": {("perfect", "policy")}, "pool": {("policy", "pool")}}
