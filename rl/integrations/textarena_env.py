"""Run the games of textarena, for a single player or several, by their names in textarena."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import dataclass
from typing import Any

from rl.config import nearest_name
from rl.envs import Environment, TurnResult
from rl.errors import UserError
from rl.integrations.optional_packages import import_package, parse_json_options, to_float
from rl.types import Message

_MAX_CONSECUTIVE_MOVES = 1000  # consecutive moves of random players


class _ThreadLocalRandom:
    """Replace the module `random` in textarena's modules: all its games use the global generator.

    Each thread (an episode has a thread) gets a separate generator, so that a game depends only on
    its seed, not on concurrent games.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        if name in ("Random", "SystemRandom"):
            return getattr(random, name)
        if not hasattr(self._local, "generator"):
            self._local.generator = random.Random(0)
        return getattr(self._local.generator, name)


_thread_local_random = _ThreadLocalRandom()


@dataclass
class TextArena(Environment):
    """Play a game of textarena. The reward of each player is textarena's final reward (-1 to 1 with
    several players, 0 to 1 with a single player).
    """

    game: str = "GuessTheNumber-v0"
    """Name in textarena; its plain form (-raw) is used if it exists, since the conversation has a
    history.
    """
    players: int = 0
    """Number of players; 0: as few as the game allows."""
    seat: int = -1
    """Seat of the policy with several players; -1: a different seat for each member of a group."""
    others: str = "policy"
    """Players of the other seats: policy (self-play), random (among moves), or the name of a
    player.
    """
    moves: str = ""
    """Moves of a random player, separated by spaces: "[0] [1] [2]"."""
    rules: bool = True
    """Begin with the game's explanation; without it the model only receives the events of the game.
    """
    brackets: bool = False
    """Put brackets around an answer that has none, as many games require for moves."""
    wins_only: bool = False
    """Reward 1 for a win and 0 otherwise, instead of the game's reward, which may also pay a near
    miss.
    """
    config: str = "{}"
    """Settings of the game as JSON: {"max_number": 8}."""

    def __post_init__(self) -> None:
        self.arena = import_package("textarena", "textarena")
        known = self.arena.envs.registration.ENV_REGISTRY
        if self.game not in known:
            near = nearest_name(self.game, known)
            hint = f"did you mean {near}?" if near else f"it has {len(known)}, such as Wordle-v0"
            raise UserError(f"textarena has no game {self.game!r}: {hint}")
        if f"{self.game}-raw" in known:
            self.game = f"{self.game}-raw"
        if self.others == "random" and not self.moves.split():
            raise UserError(
                'a random player needs moves: give them, such as --environment.moves "[0] [1] [2]"'
            )
        parse_json_options(self.config, "config")

    acting_player = 0

    @property
    def models(self) -> list[str]:
        """Return the player of the other seats, unless it is the policy or random."""
        return [] if self.others in ("policy", "random") else [self.others]

    def start(self) -> TurnResult:
        """Reset the game and return the first observation of the policy."""
        self.wrapped_env = self.arena.make(self.game, **parse_json_options(self.config, "config"))
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "textarena" and vars(module).get("random") is random:
                vars(module)["random"] = _thread_local_random
        count = self._reset()
        mine = (self.seat if self.seat >= 0 else self.member) % count
        if self.others == "random":
            self.policy_player: int | None = mine
        else:
            self.policy_player = None
            self.seats = tuple(
                None if self.others == "policy" or i == mine else self.others for i in range(count)
            )
        return self._advance(False)

    def _reset(self) -> int:
        """Reset the game and return the number of players: the setting, or with 0 the fewest that
        the game allows. Raises UserError if the game refuses.
        """
        counts = [self.players] if self.players else range(1, 16)
        for count in counts:
            try:
                self.wrapped_env.reset(num_players=count, seed=self.seed % 2**31)
                return count
            except (AssertionError, ValueError) as error:
                refusal = error
        raise UserError(
            f"textarena's {self.game} does not take {self.players or 'up to 15'} players: {refusal}"
        )

    def step(self, answer: Message) -> TurnResult:
        """Process a move."""
        return self._advance(self._move(str(answer["content"])))

    def _move(self, text: str) -> bool:
        """Make a move and return whether it ended the game."""
        if self.brackets and "[" not in text:
            text = f"[{text.strip()}]"
        done, _ = self.wrapped_env.step(action=text)
        return bool(done)

    def _advance(self, done: bool) -> TurnResult:
        """Make the moves of random players, and return the next observation of a model, or the
        result of the game if it is `done`. Raises RuntimeError after _MAX_CONSECUTIVE_MOVES moves.
        """
        for _ in range(_MAX_CONSECUTIVE_MOVES):
            if done:
                return self._finish()
            player, seen = self.wrapped_env.get_observation()
            if self.policy_player is None or player == self.policy_player:
                self.acting_player = player
                return TurnResult(
                    messages=self._observation_text(player, seen),
                    seat=player if self.policy_player is None else 0,
                )
            done = self._move(self.rng.choice(self.moves.split()))
        raise RuntimeError(
            f"{self.game}: {_MAX_CONSECUTIVE_MOVES} consecutive moves of random players"
        )

    def _observation_text(self, player: int, seen: Any) -> str:
        """Return the new part of a player's observation, without the player's moves, which are
        already in its conversation.
        """
        if isinstance(seen, str):
            return seen
        lines = []
        for sender, text, kind in seen:
            kind = getattr(kind, "name", str(kind))
            if (kind == "PLAYER_ACTION" and sender == player) or (
                kind == "PROMPT" and not self.rules
            ):
                continue
            lines.append(
                f"Player {sender}: {text}" if isinstance(sender, int) and sender >= 0 else str(text)
            )
        return "\n".join(lines) or "Your move."

    def _finish(self) -> TurnResult:
        """Return the final TurnResult with the rewards of all players."""
        rewards, info = self.wrapped_env.close()
        earned = {int(player): float(reward) for player, reward in (rewards or {}).items()}
        # The player of the last answer; the game may have advanced to another player.
        acted = self.acting_player
        details = (info or {}).get(acted, {})
        won = {player: float(reward >= 1.0) for player, reward in earned.items()}
        paid = won if self.wins_only else earned
        metrics = {
            "won": won.get(acted, 0.0),
            "invalid_move": float(bool(details.get("invalid_move"))),
        }
        turns = to_float(details.get("turn_count"))
        metrics |= {} if turns is None else {"moves": turns}
        logs = {"rewards": {str(player): reward for player, reward in earned.items()}}
        reward = paid.pop(acted, 0.0)
        others = paid if self.policy_player is None else {}
        return TurnResult(reward=reward, done=True, metrics=metrics, rewards=others, logs=logs)

    def close(self) -> None:
        """Do nothing: textarena's close was already called, since it returns the rewards."""
