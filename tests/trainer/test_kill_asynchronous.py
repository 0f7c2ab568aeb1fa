"""Kill an asynchronous run at random moments and resume it until it ends."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
KILLS, STEPS, GROUPS, MEMBERS, BOUND = 20, 60, 4, 2, 2
# Turns take random times: at a kill some groups have ended, some are being sampled and some wait.
ENVIRONMENT = """
import asyncio, random
from rl.envs import Environment, TurnResult

class Uneven(Environment):
    def start(self):
        self.left = 1 + self.rng.randrange(4)
        return f"{self.seed % 7}+{self.seed % 5}="

    async def step(self, answer):
        await asyncio.sleep(random.random() * 0.3)
        self.left -= 1
        reward = len(answer["content"] or "") + 0.1 * self.member
        return TurnResult("1+1=", reward=reward, done=self.left == 0)
"""


def steps_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_each_group_is_trained_once_over_twenty_kills(tmp_path):
    rng, folder = random.Random(0), tmp_path / "run"
    (tmp_path / "uneven.py").write_text(ENVIRONMENT)
    words = f"""train.py grpo --steps {STEPS} --batch-size {GROUPS} --group-size {MEMBERS} --max-tokens 5
        --quiet --eval-every 0 --save-every 1 --rollouts-every 1 --environment {tmp_path}/uneven.py:Uneven
        --environment-isolation thread --renderer plain --no-self-test --slice-steps 2
        --max-steps-off-policy {BOUND} --auto-resume --output-dir {folder}"""
    kills, code = 0, None
    while code != 0:
        run = subprocess.Popen(
            [sys.executable, *words.split()], cwd=REPO, stdout=subprocess.DEVNULL
        )
        if kills < KILLS:
            steps = steps_of(folder)
            while run.poll() is None and steps_of(folder) == steps:
                time.sleep(0.02)
            time.sleep(rng.random() * 1.5)
            run.send_signal(signal.SIGKILL)
            kills += run.wait() == -signal.SIGKILL
        code = run.wait()
        assert code in (0, -signal.SIGKILL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    episodes = [
        (row["problem"], row["index"])
        for path in sorted((folder / "rollouts").glob("step_*.jsonl"))
        for row in map(json.loads, path.read_text().splitlines())
    ]
    assert len(episodes) == len(set(episodes)) == STEPS * GROUPS * MEMBERS
    assert max(row["async/age/max"] for row in rows) <= BOUND
