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
def test_two_steps_and_two_resumed_are_four_to_the_bit_with_the_pool(tmp_path, monkeypatch):
    """The run is interrupted in the third step, after the pool has dropped a version that the
    checkpoint of the second step still names.
    """
    played: dict[str, list[str]] = {}
    load = opponents_room.OpponentModels._load

    def noted(self, name):
        played.setdefault(self.folder.name, []).append(name)
        return load(self, name)

    monkeypatch.setattr(opponents_room.OpponentModels, "_load", noted)
    rows = two_and_two(f"{POOL} --opponents-by elo --eval-every 0", tmp_path)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert len(played["whole"]) == 4 and played["cut"] == played["whole"][2:]
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
    run = tmp_path / "run"
    words = f"{POOL} --opponents-by age --eval-every 3 --eval-limit 4 --save-every 1 --keep-last 1 --steps 3"
    rows = train(words, run)
    assert all("opponents/own_rating" in row for row in rows[1:])
    assert "test/env/all/lost" in rows[0] and "test/env/all/lost" in rows[-1]
    # two in the pool, and those of one earlier checkpoint
    assert len(list_versions(run)) <= 4
    step = state(run, "grpo-000002")["opponents"][-1]["step"]
    version = run / "sampler_weights" / f"grpo-opponent-step-{step:06d}"
    (version / "model.safetensors").write_bytes(b"")
    (run / "checkpoints" / "grpo-final").rename(tmp_path / "aside")
    damaged = "an older version that the run plays against is damaged"
    with pytest.raises(RunFolderError, match=damaged):
        train(f"{words} --resume", run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        # O has no episode in a game that ended with X's first move, which may be invalid
        ("tic_tac_toe --environment.opponent policy", 8, 16),
        ("tic_tac_toe --environment.opponent tiny:ascii", 4, 8),
        (f"{example_address('twenty_questions')} --environment.questions 2 "
         "--environment.answerer tiny:ascii-small", 8, 8),
        (f"{example_address('debate')} --environment.judge tiny:ascii", 16, 16),
    ],
    ids=["itself", "a model", "an answerer", "a judge"],
)  # fmt: skip
def test_seats_are_played_by_whoever_is_named(words, least, most, tmp_path):
    sampled = f"{SMALL} --eval-every 1 --eval-limit 2 --save-every 0 --steps 1"
    rows = train(f"grpo --environment {words} {sampled}", tmp_path / "run")
    assert any(key.startswith("test/env/") for key in rows[-1])
    assert least <= rows[-1]["env/all/total_episodes"] <= most
    assert rows[-1]["optim/max_logprob_difference"] < 1e-4


def test_another_model_keeps_its_temperature_in_calls_and_in_streams(tmp_path):
    """It samples greedily although the policy's parameters do not, and vice versa."""

    def make_requests(temperature):
        params = SamplingParams(max_tokens=8, temperature=temperature, stop=[])
        return [
            SamplingRequest(prompt=[5 + i, 9], params=params, seed=3, problem=i) for i in range(4)
        ]

    def text(responses):
        return [response.sequences[0].tokens for response in responses]

    with ServiceClient(output_dir=tmp_path, seed=1) as service:
        client = service.create_full_training_client("tiny:ascii", seed=1)
        sampler = client.save_weights_and_get_sampling_client()
        results = {t: text(sampler.sample_many(make_requests(t)).result()[0]) for t in (0.0, 1.0)}
        assert results[0.0] != results[1.0]
        for reference, other in ((0.0, 1.0), (1.0, 0.0)):
            player = opponents_room.FixedTemperatureSampler(sampler, reference)
            requests = make_requests(other)
            assert text(player.sample_many(requests).result()[0]) == results[reference]
            with player.open_stream() as stream:
                tickets, finished = [stream.add(request) for request in requests], {}
                while stream.busy:
                    finished |= stream.run_steps().finished
            assert text([finished[ticket] for ticket in tickets]) == results[reference]


def test_a_player_that_is_not_there_is_named_before_anything_is_written(tmp_path):
    words = f"--environment tic_tac_toe --environment.opponent nowhere/at/all {SMALL} --steps 1"
    with pytest.raises(UserError, match="no folder nowhere/at/all"):
        train(f"grpo {words}", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_saved_weights_are_evaluated_against_whoever_is_named(tmp_path):
    train(f"{POOL} --eval-every 0 --steps 1", tmp_path / "run")
    # a version of the pool may end a game at its first move
    for opponent, least in (("perfect", 6), ("pool", 3)):
        output = tmp_path / f"{opponent}.json"
        words = f"--limit 6 --environment.held_out_opponent {opponent} --output {output}"
        done = run_script("evaluate.py", tmp_path / "run", *words.split(), cwd=REPO)
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads(output.read_text())
        assert least <= result["answers"] <= 6
        assert {frozenset(row["players"]) for row in result["rows"]} == {
            frozenset({opponent, "policy"})
        }
