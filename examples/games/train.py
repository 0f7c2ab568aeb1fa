"""Train tic-tac-toe by self-play against older versions of the policy.

    python examples/games/train.py

A warm-up on games that a rule played teaches the form of a move. GRPO then plays each batch against
an older version of the policy. The pool of versions grows every 10 steps and is rated by Elo.
Held-out games are against random moves, so that the figures of all steps are comparable.
docs/games.md lists the games and the players.

Seen with seed 0, in 127 s of a CPU core: against random moves, won 0.50 -> 0.47, lost 0.47 -> 0.52.
These sizes show how it works and are too small to improve. With those of
tests/trainer/test_recipes_learn.py, and random moves as opponent, games lost fell from 0.094 to
0.012 (docs/games.md).
"""

import argparse
import json
from pathlib import Path

import rl
from rl.envs import generate_demonstrations, resolve_environment


def write_warm_up(path: Path, games: int) -> None:
    """Write the conversations of games that the rule `careful` plays against random moves."""
    game = resolve_environment("tic_tac_toe", opponent="random", instructions=False)
    with path.open("w") as file:
        for row in generate_demonstrations(game, "careful", games):
            file.write(json.dumps(row) + "\n")


def main(tiny: bool, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_warm_up(folder / "warm_up.jsonl", 20 if tiny else 4000)
    warm_up = rl.train(
        "sft",
        base_model="tiny:ascii",
        dataset=folder / "warm_up.jsonl",
        steps=2 if tiny else 300,
        batch_size=4 if tiny else 32,
        learning_rate=3e-3,
        warmup_steps=2 if tiny else 20,
        schedule="cosine",
        eval_every=0,
        output_dir=folder / "warm_up",
        overwrite=True,
    )
    trained = rl.train(
        "grpo",
        base_model=warm_up.folder,
        environment={"name": "tic_tac_toe", "opponent": "pool", "instructions": False},
        opponents=5,
        opponents_every=10,
        steps=2 if tiny else 40,
        batch_size=2 if tiny else 8,
        group_size=2 if tiny else 16,
        learning_rate=2e-4,
        max_tokens=3,
        temperature=1.0,
        eval_every=2 if tiny else 20,
        eval_limit=4 if tiny else 256,
        rollouts_every=1 if tiny else 39,
        output_dir=folder / "self_play",
        overwrite=True,
    )
    lost = trained.series("test/env/all/lost")
    for step, won in trained.series("test/env/all/won").items():
        print(f"step {step:3d}  against random moves: won {won:.2f}  lost {lost[step]:.2f}")
    print(f"{trained.metrics[-1]['opponents/count']:.0f} older versions in the pool")
    for turn in trained.rollouts[-1].get("turns", []):
        print(f"{turn['role']:9} {turn['text']!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/games"))
    args = parser.parse_args()
    main(args.tiny, args.folder)
