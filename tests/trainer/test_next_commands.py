"""Test that every command that a run prints under "Next:" works as printed."""

import json
import sys
from pathlib import Path

import pytest
from doc_shell import link_checkout, make_shell

import rl
from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.trainer.execute import execute

REPO = Path(__file__).resolve().parents[2]
SMALL = "--steps 1 --batch-size 4 --save-every 0 --eval-limit 4"
SAMPLED = f"{SMALL} --group-size 2 --max-tokens 4"
JUDGE, ODD = "reward_model --base-model tiny:ascii", "{here}/odd.py:score"
REWARD = "def score(prompt, response, meta=None):\n    return float(len(response) % 2)\n"
ENVIRONMENT = """
from rl.envs import Environment, TurnResult

class Guess(Environment):
    def start(self):
        return "1+1="

    def step(self, answer):
        return TurnResult(reward=float(len(answer["content"]) % 2), done=True)
"""
STAGES = """
stages:
  - {method: sft, steps: 1}
  - {method: reward_model, steps: 1, dataset: PAIRS}
base_model: tiny:addition
dataset: addition
batch_size: 4
eval_limit: 4
"""
# (command of a run, with {here} for a folder outside the current folder; number of commands that
# the run must print)
RUNS = {
    "reward of a file": (f"grpo --dataset {{here}}/sums.jsonl --reward {ODD} {SAMPLED}", 5),
    "scalar reward model": (
        f"{JUDGE} --dataset {{here}}/named.jsonl --chosen-column good {SMALL}",
        4,
    ),
    "comparison": (f"{JUDGE} --form comparison --dataset {{here}}/pairs.jsonl {SMALL}", 4),
    "adapter": (f"grpo --lora-rank 2 {SAMPLED}", 5),
    "two rewards": (f"grpo --rewards exact_match 1 {ODD} 0.5 {SAMPLED}", 5),
    "environment of a file": (f"grpo --environment {{here}}/guess.py:Guess {SAMPLED}", 5),
    "game": (f"grpo --base-model tiny:ascii --environment guess_number {SAMPLED}", 5),
    "sft": (f"sft {SMALL}", 4),
    "dpo": (f"dpo --dataset {{here}}/pairs.jsonl {SMALL}", 4),
    "ppo": (f"ppo {SMALL} --max-tokens 4", 5),
    "distill": (f"distill --teacher tiny:addition {SAMPLED}", 4),
    "two stages": ("{here}/stages.yaml", 4),
}
ALWAYS = ("reward of a file", "scalar reward model")


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    with make_shell(tmp_path_factory.mktemp("shell")) as shell:
        yield shell


def write_inputs(here: Path) -> None:
    here.mkdir()
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "9"} for i in range(10, 30)]
    named = [{"prompt": row["prompt"], "good": row["chosen"], "rejected": "9"} for row in pairs]
    sums = [{"prompt": row["prompt"], "answer": row["chosen"]} for row in pairs]
    for name, rows in (("pairs", pairs), ("named", named), ("sums", sums)):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "odd.py").write_text(REWARD)
    (here / "guess.py").write_text(ENVIRONMENT)
    (here / "stages.yaml").write_text(STAGES.replace("PAIRS", str(here / "pairs.jsonl")))


def extract_commands(text: str) -> list[str]:
    lines = text[text.index("Next:") :].splitlines()[1:]
    return [line.strip(" \u2502") for line in lines if "python " in line or "accelerate " in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [kind if kind in ALWAYS else pytest.param(kind, marks=pytest.mark.campaign) for kind in RUNS],
)
def test_printed_commands_run_as_printed(kind, shell, tmp_path, capsys, monkeypatch):
    checkout = link_checkout(tmp_path / "checkout", shell)
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    # Terminals may wrap lines; a copied command is not wrapped.
    monkeypatch.setenv("COLUMNS", "1000")
    here = tmp_path / "here"
    write_inputs(here)
    words, count = RUNS[kind]
    words = [*words.format(here=here).split(), "--output-dir", "runs/it"]
    execute(parse_run(words, METHODS, REPO / "recipes" / "addition.yaml", options=RunSettings))
    commands = extract_commands(capsys.readouterr().out)
    assert len(commands) == count
    for command in commands:
        if "#" not in command:  # it names a package to install first
            shell.run(command, checkout)


@pytest.mark.slow
def test_a_function_as_reward_is_evaluated_from_its_file(shell, tmp_path, capsys, monkeypatch):
    checkout = link_checkout(tmp_path / "checkout", shell)
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("COLUMNS", "1000")

    def score(prompt, response, meta=None):
        return float(len(response) % 2)

    small = {"base_model": "tiny:addition", "dataset": "addition", "steps": 1, "batch_size": 4}
    small |= {"group_size": 2, "max_tokens": 4, "save_every": 0, "eval_limit": 4}
    rl.train("grpo", reward=score, output_dir="runs/it", **small)
    commands = extract_commands(capsys.readouterr().out)
    (line,) = [command for command in commands if "evaluate" in command]
    (checkout / "odd.py").write_text(REWARD)
    shell.run(line.replace("FILE.py", "odd.py"), checkout)
