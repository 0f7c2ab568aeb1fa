"""Generate games played by rules as conversations, for supervised training on the form of an
answer.

    python -m rl.envs.demo_generator guess_number any_number --episodes 2000 > guesses.jsonl

The command writes a row for each seat of the policy in each game, {"messages": [...]}: the complete
conversation of the seat, as `train.py sft --dataset guesses.jsonl` reads it. Each move is trained
on exactly once.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence

from rl.config import split_environment_flags
from rl.envs.environment_registry import EnvironmentSpec, parse_environment
from rl.envs.game_env import Game
from rl.errors import UserError
from rl.seed import derive_seed
from rl.types import Message


def generate_demonstrations(
    spec: EnvironmentSpec, player: str, episodes: int, seed: int = 0
) -> Iterator[dict[str, list[Message]]]:
    """Yield the conversations of the policy's seats in `episodes` games, with moves by the rule
    `player`.

    Each conversation ends with a move. Raises UserError if the environment has no such rule, or if
    a model has a seat.
    """
    for episode in range(episodes):
        match = spec.make()
        if not isinstance(match, Game) or player not in match.PLAYERS:
            known = ", ".join(match.PLAYERS) if isinstance(match, Game) else "none"
            raise UserError(
                f"the environment {spec.name} has no rule {player!r} to play the policy's seat: it"
                f" has {known}"
            )
        if match.models:
            raise UserError(
                f"only rules may play here, but {', '.join(match.models)} has a seat: change the"
                " environment's settings"
            )
        match.seed, match.member, match.row = derive_seed("played", seed, episode), 0, {}
        match.rng = random.Random(match.seed)
        yield from _play_game(match, player)


def _play_game(match: Game, player: str) -> Iterator[dict[str, list[Message]]]:
    """Yield the conversation of each seat of a match."""
    conversations: dict[int, list[Message]] = {}
    turn = match.start()
    while not turn.done:
        answer: Message = {"role": "assistant", "content": match.PLAYERS[player](match)}
        conversations.setdefault(turn.seat, []).extend(
            ({"role": "user", "content": str(turn.messages)}, answer)
        )
        turn = match.step(answer)
    yield from ({"messages": conversations[seat]} for seat in sorted(conversations))


def main(words: Sequence[str]) -> None:
    """Write rows to the standard output."""
    import argparse

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "environment", help="guess_number, tic_tac_toe, or file.py:Class of another game"
    )
    parser.add_argument("player", help="rule that plays the policy's seat, such as any_number")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args, rest = parser.parse_known_args(words)
    settings, others = split_environment_flags(rest)
    if others:
        parser.error(
            f"{others[0]} is unknown: an environment's settings are --environment.NAME VALUE"
        )
    try:
        spec = parse_environment(args.environment, settings)
        for row in generate_demonstrations(spec, args.player, args.episodes, args.seed):
            print(json.dumps(row))
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
