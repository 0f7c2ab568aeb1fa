"""Test that methods, games, images and an agent's program learn: each case, with seeds 0, 1 and 2,
passes a bar, which most models miss before.

    make campaign ARGS="--only learning"       # all, about three hours on two idle cores
    python -m pytest -m campaign tests/trainer/test_recipes_learn.py -k 0-dpo

reinforce, ppo and dpo start from the same taught model per seed, trained by the first stage of
recipes/addition.yaml (the recipe of dpo teaches for 450 steps instead of 750); from their recipes
only the later stages are run. A game has a warm-up on games that an imperfect rule plays, then
GRPO. `blind` is recipes/shapes.yaml with the pixels of every image permuted: it must stay below the
bar that `images` passes. `endpoint` trains a two-turn agent, written as a plain program.

With WHETSTONE_TABLES, a folder, each run replaces its rows of learning.csv there: `before` at the
first evaluation of the stage (distill: of the student), `after` at its last, held out; `passed` if
the bar lies between them (images: if `after` is above it, blind: below it). `seconds` is the wall
clock of the run, start-up included, without the training of a shared model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.harness import (
    HELD_OUT,
    REPO,
    REWARD,
    SEEDS,
    Run,
    describe_machine,
    replace_rows,
    select_stages,
    taught_model,
    train,
)

TEST = "tests/trainer/test_recipes_learn.py::test_a_run_passes_its_bar"
PAIRS = "test/rewards/accuracies"
LEARNED = "test/env/all/reward/learned"


@dataclass(frozen=True)
class Check:
    """Hold a figure of a stage and its bar, a number or a function of the run, which the figure
    must reach at the stage's end (stay below, if `at_most`).

    `since`: the stage at the start of which the figure must miss the bar; by default the same
    stage; None: the figure may be past the bar before.
    """

    stage: str
    metric: str
    bar: float | Callable[[Run], float]
    since: str | None = ""
    at_most: bool = False


# ------------------------------------------------------------------------------------------- recipes


def whole(recipe: str) -> Callable[[int, Path], list[str]]:
    return lambda seed, work: [str(REPO / "recipes" / f"{recipe}.yaml")]


def after_teaching(recipe: str) -> Callable[[int, Path], list[str]]:
    """Start from the shared model instead of the recipe's first stage."""
    return lambda seed, work: [
        str(select_stages(recipe, 1, None, work)), "--base-model", str(taught_model(seed, work))
    ]  # fmt: skip


def blind(seed: int, work: Path) -> list[str]:
    """Permute the pixels of every image of recipes/shapes.yaml, in training and held out."""
    content = yaml.safe_load((REPO / "recipes" / "shapes.yaml").read_text())
    for part in (content, *content["stages"]):
        if "dataset" in part:
            name, _, options = part["dataset"].partition(":")
            part["dataset"] = f"{name}:{','.join(filter(None, [options, 'blind=1']))}"
    return [str(write_recipe(work, content))]


def write_recipe(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / f"recipe-{len(list(folder.glob('recipe-*')))}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


# --------------------------------------------------------------------------------------------- games


@dataclass(frozen=True)
class Game:
    """Hold the settings of a game. `player`: the rule that plays the games of the warm-up."""

    name: str
    settings: dict[str, Any]
    player: str
    max_tokens: int
    steps: int = 60
    batch_size: int = 8
    held_out: int = 128
    rows: int = 1000
    episodes: int = 4000  # played by the rule
    warm_up: int = 800
    warm_up_batch: int = 64
    model: str = "tiny:ascii-small"
    learning_rate: float = 1e-3

    def __call__(self, seed: int, work: Path) -> list[str]:
        """Write the games of the warm-up and the recipe of both stages."""
        words = ["-m", "rl.envs.demo_generator", self.name, self.player]
        words += ["--episodes", str(self.episodes), "--seed", str(seed)]
        for key, value in self.settings.items():
            words += [f"--environment.{key}", str(value)]
        data = work / f"{Path(self.name).stem}-{seed}.jsonl"
        data.write_text(subprocess.check_output([sys.executable, *words], text=True, cwd=REPO))
        warm_up = dict(
            method="sft", base_model=self.model, dataset=str(data), learning_rate=3e-3,
            schedule="cosine", warmup_steps=20, beta2=0.99, steps=self.warm_up,
            batch_size=self.warm_up_batch, eval_every=0, save_every=0,
        )  # fmt: skip
        grpo = dict(
            method="grpo", environment={"name": self.name, **self.settings},
            environment_rows=self.rows, advantage="mean_std", rollout_mode="async",
            learning_rate=self.learning_rate, schedule="linear", warmup_steps=5, steps=self.steps,
            batch_size=self.batch_size, group_size=16, eval_every=self.steps,
            eval_limit=self.held_out, save_every=0, rollouts_every=0,
        )  # fmt: skip
        shared = {"max_tokens": self.max_tokens, "temperature": 1.0}
        return [str(write_recipe(work, {"stages": [warm_up, grpo], **shared}))]


# The share of digits in two answers of a conversation, posted as the reward.
AGENT = """
import http.client, json, os

host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")


def post(path, body):
    client = http.client.HTTPConnection(host, timeout=600)
    client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return json.loads(client.getresponse().read())


messages, answers = [{"role": "user", "content": "digits:"}], ""
for turn in range(2):
    reply = post(f"/{path}/chat/completions", {"model": "policy", "messages": messages})
    message = reply["choices"][0]["message"]
    answers += message["content"]
    messages += [message, {"role": "user", "content": "more:"}]
post(f"/{path}/reward", {"reward": sum(c.isdigit() for c in answers) / max(1, len(answers))})
"""


def endpoint(seed: int, work: Path) -> list[str]:
    (work / "agent.py").write_text(AGENT)
    settings = (
        "--base-model tiny:ascii-small --batch-size 4 --group-size 6 --max-tokens 6 --steps 30 "
        "--learning-rate 3e-3 --eval-every 30 --eval-limit 16 --environment-rows 64"
    )
    program = f"endpoint:{sys.executable} -S {work / 'agent.py'}"
    return ["grpo", "--environment", program, *settings.split()]


# --------------------------------------------------------------------------------------------- cases


def nearly_right_sums(run: Run) -> float:
    """Return the score three quarters of the way from the reward model's mean score of held-out
    wrong sums to that of right sums.
    """
    sides = (f"test/rewards/{side}" for side in ("chosen", "rejected"))
    right, wrong = (run.values(side, "reward_model")[-1] for side in sides)
    return wrong + 0.75 * (right - wrong)


def as_the_teacher(run: Run) -> float:
    """Return the teacher's accuracy minus 0.02: two standard errors of the difference of two shares
    near 0.97 of 512 answers.
    """
    return run.values(HELD_OUT, "teacher")[-1] - 0.02


def better_than_its_data(run: Run) -> float:
    """Return the share of stored answers that are right, or the held-out accuracy of the policy
    that sampled the last of them, whichever is larger.
    """
    stored = run.values("env/all/correct", "grpo")
    return max(sum(stored) / len(stored), run.values(HELD_OUT, "grpo")[-1])


# name -> (function of (seed, folder) that returns the words of the run, its checks)
CASES: dict[str, tuple[Callable[[int, Path], list[str]], tuple[Check, ...]]] = {
    "dpo": (after_teaching("addition_dpo"), (Check("dpo", PAIRS, 0.9),)),
    "reinforce": (after_teaching("addition_reinforce"), (Check("reinforce", HELD_OUT, 0.95),)),
    "ppo": (after_teaching("addition_ppo"), (Check("ppo", HELD_OUT, 0.95),)),
    # The reward model first, then the policy trained on it: the reward model's scores, and the true
    # reward, which the policy never sees.
    "rlhf": (
        whole("addition_rlhf"),
        (
            Check("reward_model", PAIRS, 0.9),
            Check("rlhf", LEARNED, nearly_right_sums),
            Check("rlhf", HELD_OUT, 0.8),
        ),
    ),
    "code": (whole("oneliners"), (Check("grpo", HELD_OUT, 0.9),)),
    "offline": (whole("addition_offline"), (Check("offline", HELD_OUT, better_than_its_data),)),
    "distill": (
        whole("addition_distill"),
        (
            Check("student", HELD_OUT, as_the_teacher),
            Check("student-on-policy", HELD_OUT, as_the_teacher, since="student"),
        ),
    ),
    # Supervised training alone passes the bar; the images are what the blind run lacks.
    "images": (whole("shapes"), (Check("grpo", HELD_OUT, 0.7, since=None),)),
    "blind": (blind, (Check("grpo", HELD_OUT, 0.7, since=None, at_most=True),)),
    "endpoint": (endpoint, (Check("grpo", REWARD, 0.9),)),
    # solvable within floor(log2 8) + 1 guesses, the environment's limit
    "guess_number": (
        Game("guess_number", {"high": 8}, "careless", 3, steps=250),
        (Check("grpo", HELD_OUT, 0.95),),
    ),
    # Three operators and two tries: exclusion is enough for the rule's 0.93; reading the failing
    # test is better.
    "debugging": (
        Game(
            "examples/games/debugging.py:DebuggingEnv", {}, "careful", 18, held_out=256,
            episodes=5000, warm_up=1200, warm_up_batch=32, model="tiny:ascii", learning_rate=5e-4,
        ),
        (Check("grpo", HELD_OUT, 0.95),),
    ),
    # The rule plays a move of ten imperfectly (it loses 0.03), so that GRPO can still improve on
    # it.
    "tic_tac_toe": (
        Game(
            "tic_tac_toe", {"opponent": "random", "instructions": "False"}, "careful", 3, steps=120,
            batch_size=16, held_out=512, rows=2000, episodes=40_000, warm_up=1400,
            model="tiny:ascii", learning_rate=2e-4,
        ),
        (Check("grpo", "test/env/all/lost", 0.05, at_most=True),),
    ),
}  # fmt: skip


def judge(name: str, seed: int, check: Check, run: Run) -> dict[str, Any]:
    """Return the row of a check."""
    number = os.environ.get("OMP_NUM_THREADS")
    threads = f"OMP_NUM_THREADS={number} " if number else ""
    before = run.values(check.metric, check.since or check.stage)[0]
    after = run.values(check.metric, check.stage)[-1]
    bar = check.bar if isinstance(check.bar, float) else check.bar(run)
    reached, early = (value <= bar if check.at_most else value >= bar for value in (after, before))
    return {
        "case": name,
        "seed": seed,
        "stage": check.stage,
        "metric": check.metric,
        "before": round(before, 4),
        "after": round(after, 4),
        "bar": f"{'at most ' if check.at_most else ''}{bar:.4g}",
        "passed": reached and (check.since is None or not early),
        "seconds": round(run.seconds, 1),
        "machine": describe_machine(),
        "command": f"{threads}python -m pytest -m campaign {TEST}[{seed}-{name}]",
    }


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs, in which a taught model is made once per seed."""
    return tmp_path_factory.mktemp("learning")


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_passes_its_bar(name: str, seed: int, work: Path) -> None:
    words, checks = CASES[name]
    run = train([*words(seed, work), "--seed", str(seed)], work / f"{name}-{seed}")
    rows = [judge(name, seed, check, run) for check in checks]
    if folder := os.environ.get("WHETSTONE_TABLES"):
        order = lambda row: (list(CASES).index(row["case"]), int(row["seed"]))  # noqa: E731
        replace_rows(Path(folder) / "learning.csv", rows, ("case", "seed"), order)
    assert all(row["passed"] for row in rows), rows
