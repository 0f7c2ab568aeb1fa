"""Games that rules play, as conversations to learn the form of an answer from.

    python -m rl.environments.played guess_number any_number --episodes 2000 --environment.high 8 > guesses.jsonl

writes a row for each of the policy's seats in each game, {"messages": [...]}: the whole of what it
heard and said, as `train.py sft --dataset guesses.jsonl` reads it (every move is trained on, and
once).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rl.environments.match import Match
from rl.environments.registry import EnvironmentSpec, environment_from_words
from rl.errors import UserError
from rl.seeds import derive_seed
from rl.types import Message


def played(
    spec: EnvironmentSpec, player: str, episodes: int, seed: int = 0
) -> Iterator[dict[str, list[Message]]]:
    """The conversations of the policy's seats in `episodes` games; the rule `player` makes their
    moves. Each ends with a move.
    """
    for episode in range(episodes):
        match = spec.make()
        if not isinstance(match, Match) or player not in match.PLAYERS:
            known = ", ".join(match.PLAYERS) if isinstance(match, Match) else "none"
            raise UserError(
                f"the environment {spec.name} has no rule {player!r} to play the policy's part: it has {known}"
            )
        if match.models:
            raise UserError(
                f"rules play without a model, and {', '.join(match.models)} has a seat: give the environment other settings"
            )
        match.seed, match.member, match.row = derive_seed("played", seed, episode), 0, {}
        match.rng = random.Random(match.seed)
        yield from _seats(match, player)


def _seats(match: Match, player: str) -> Iterator[dict[str, list[Message]]]:
    heard: dict[int, list[Message]] = {}
    turn = match.start()
    while not turn.done:
        said: Message = {"role": "assistant", "content": match.PLAYERS[player](match)}
        heard.setdefault(turn.seat, []).extend(
            ({"role": "user", "content": str(turn.messages)}, said)
        )
        turn = match.step(said)
    yield from ({"messages": heard[seat]} for seat in sorted(heard))


def main(words: Sequence[str]) -> None:
    """Writes rows to the standard output."""
    import argparse

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "environment", help="guess_number, twenty_questions, debugging, tic_tac_toe, debate"
    )
    parser.add_argument("player", help="a rule that plays the policy's part, such as any_number")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args, rest = parser.parse_known_args(words)
    settings: list[tuple[str, Any]] = []
    while rest:
        name, value = rest.pop(0), rest.pop(0) if rest else "True"
        if not name.startswith("--environment."):
            parser.error(
                f"{name} is unknown: an environment's settings are --environment.NAME VALUE"
            )
        settings.append((name.removeprefix("--environment."), value))
    for row in played(
        environment_from_words(args.environment, settings), args.player, args.episodes, args.seed
    ):
        print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
