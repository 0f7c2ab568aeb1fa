"""textarena: games in text for one player or several, by the names that textarena gives them."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import dataclass
from typing import Any

from rl.environments.environment import Environment, Turn
from rl.environments.wrappers.packages import options, package, plain_number
from rl.errors import UserError
from rl.settings import nearest
from rl.types import Message

_MOST_IN_A_ROW = 1000  # moves of others before the policy is asked again


class _OwnRandom:
    """Stands for the module `random` in textarena's modules, whose games all draw from the one
    global generator.

    Each thread (an episode has its own) has a generator of its own, so that a game is a function of
    its seed, whatever else is played.
    """

    def __init__(self) -> None:
        self._of = threading.local()

    def __getattr__(self, name: str) -> Any:
        if name in ("Random", "SystemRandom"):
            return getattr(random, name)
        if not hasattr(self._of, "generator"):
            self._of.generator = random.Random(0)
        return getattr(self._of.generator, name)


_own_random = _OwnRandom()


@dataclass
class TextArena(Environment):
    """A game of textarena; each player's reward is textarena's at the end (-1 to 1 of several
    players, 0 to 1 of one).
    """

    game: str = "GuessTheNumber-v0"
    """Its name there; the plain form (-raw) is taken where there is one, since this conversation keeps its own history."""
    players: int = 0
    """How many play; 0: as few as the game takes."""
    seat: int = -1
    """Which of several players the policy is; -1: by turns, another in each member of a group."""
    others: str = "policy"
    """Who plays the other seats: policy (self-play), random (among moves), or the name of a player."""
    moves: str = ""
    """What a random player chooses from, with spaces between: "[0] [1] [2]"."""
    rules: bool = True
    """Begin with the game's own explanation; without it a model that knows the game is told what happens alone."""
    brackets: bool = False
    """Put brackets around an answer that has none, as many games want their moves."""
    wins_only: bool = False
    """1 for a game won and 0 for any other, instead of the game's own reward, which may pay a lost one nearly as well for coming near."""
    config: str = "{}"
    """The game's own settings as JSON: {"max_number": 8}."""

    def __post_init__(self) -> None:
        self.arena = package("textarena", "textarena")
        known = self.arena.envs.registration.ENV_REGISTRY
        if self.game not in known:
            near = nearest(self.game, known)
            hint = f"did you mean {near}?" if near else f"it has {len(known)}, such as Wordle-v0"
            raise UserError(f"textarena has no game {self.game!r}: {hint}")
        if f"{self.game}-raw" in known:
            self.game = f"{self.game}-raw"
        if self.others == "random" and not self.moves.split():
            raise UserError(
                'a random player chooses from moves: give them, such as --environment.moves "[0] [1] [2]"'
            )
        options(self.config, "config")

    acts = 0

    def start(self) -> Turn:
        self.made = self.arena.make(self.game, **options(self.config, "config"))
        for module in [
            found for name, found in list(sys.modules.items()) if name.split(".")[0] == "textarena"
        ]:
            if vars(module).get("random") is random:
                vars(module)["random"] = _own_random
        count = self._begin()
        mine = (self.seat if self.seat >= 0 else self.member) % count
        if self.others == "random":
            self.mine: int | None = mine
        else:
            self.mine = None
            self.seats = tuple(
                None if self.others == "policy" or i == mine else self.others for i in range(count)
            )
        return self._next({})

    def _begin(self) -> int:
        """Resets the game; with 0 players with as few as it takes. Returns how many there are."""
        tried = [self.players] if self.players else range(1, 16)
        for count in tried:
            try:
                self.made.reset(num_players=count, seed=self.seed % 2**31)
                return count
            except (AssertionError, ValueError) as error:
                refused = error
        raise UserError(
            f"textarena's {self.game} does not take {self.players or 'up to 15'} players: {refused}"
        )

    def step(self, answer: Message) -> Turn:
        return self._next(self._move(str(answer["content"])))

    def _move(self, text: str) -> dict[str, Any]:
        if self.brackets and "[" not in text:
            text = f"[{text.strip()}]"
        done, info = self.made.step(action=text)
        return {"done": done, "info": info}

    def _next(self, came: dict[str, Any]) -> Turn:
        """On to the next answer of a model: random players move by themselves."""
        for _ in range(_MOST_IN_A_ROW):
            if came.get("done"):
                return self._end()
            player, seen = self.made.get_observation()
            if self.mine is None or player == self.mine:
                self.acts = player
                return Turn(
                    messages=self._text(player, seen), seat=player if self.mine is None else 0
                )
            came = self._move(self.rng.choice(self.moves.split()))
        raise RuntimeError(f"{self.game}: {_MOST_IN_A_ROW} moves of others in a row")

    def _text(self, player: int, seen: Any) -> str:
        """What a player has not seen yet, without its own moves, which stand in its conversation."""
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

    def _end(self) -> Turn:
        rewards, info = self.made.close()
        earned = {int(player): float(reward) for player, reward in (rewards or {}).items()}
        # whose answer was the last: the game itself may have gone on to another player
        acted = self.acts
        won = {player: float(reward >= 1.0) for player, reward in earned.items()}
        paid = won if self.wins_only else earned
        metrics = {
            "won": won.get(acted, 0.0),
            "invalid_move": float(bool((info or {}).get(acted, {}).get("invalid_move"))),
        }
        turns = plain_number((info or {}).get(acted, {}).get("turn_count"))
        metrics |= {} if turns is None else {"moves": turns}
        others = {
            player: reward
            for player, reward in paid.items()
            if player != acted and self.mine is None
        }
        logs = {"rewards": {str(player): reward for player, reward in earned.items()}}
        return Turn(
            reward=paid.get(acted, 0.0), done=True, metrics=metrics, rewards=others, logs=logs
        )

    def close(self) -> None:
        """Nothing is held: textarena's own close gives the rewards."""
