"""Test minimal_loop.py, the first example of the clients in docs/own_loop.md."""

import re
from pathlib import Path

import learning
import pytest
from rank_server import run_script

REPO = Path(__file__).resolve().parents[2]


def test_it_stays_short_and_knows_the_public_face_alone():
    text = (REPO / "minimal_loop.py").read_text()
    assert len(text.splitlines()) <= 100
    imports = re.findall(r"^(?:from|import) .*", text, re.M)
    assert imports == [
        "import argparse", "import random", "from rl import ServiceClient, renderers, types",
    ]  # fmt: skip


def rewards_of(folder, sft_steps, steps):
    """Run minimal_loop.py; return the reward that it prints for each step."""
    words = ["--sft-steps", sft_steps, "--steps", steps, "--seed", learning.seed()]
    done = run_script("minimal_loop.py", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert len(rewards) == steps
    return rewards


@pytest.mark.slow
def test_it_runs(tmp_path):
    assert all(0 <= reward <= 1 for reward in rewards_of(tmp_path, sft_steps=10, steps=2))
    assert not list(tmp_path.iterdir())  # nothing was saved, so nothing is written


@pytest.mark.slow
@pytest.mark.campaign
def test_it_learns(tmp_path):
    rewards = rewards_of(tmp_path, sft_steps=400, steps=16)
    learning.check_figure("mean reward of the first step", rewards[0], above=0.05)
    learning.check_figure(
        "last four steps over the first four, in sum",
        sum(rewards[-4:]) - sum(rewards[:4]),
        above=0.0,
    )
