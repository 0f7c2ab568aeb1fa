"""Play a debate between two seats before a judge, which is a rule or a model."""

from __future__ import annotations

import re
from typing import Any

from rl.envs.game_env import Game, check_choice
from rl.envs.rules import debate_rules as rules
from rl.errors import UserError

JUDGE = 2
_VERDICTS = {1.0: "for", -1.0: "against", 0.0: "neither"}
MAX_SPEECH_CHARACTERS = 2000  # characters of a speech that other seats receive


class DebateEnv(Game):
    """Debate a motion: two seats speak in turn, `rounds` times each; then the judge decides.
    Rewards: 1 and -1, or 0 for both if neither side was better.

    opponent: policy (both sides are trained), pool (an older version of the policy), points or
    any_words (rules), or a model. held_out_opponent: the opponent in held-out episodes. plays: for,
    against, or either (the same within a group): the policy's side, if the opponent is not the
    policy. judge: rule (it counts the points of a small table that a side makes), or a model, which
    receives the complete debate; the side that its reply names first wins. A speech is shown as a
    single line, so that a speech cannot imitate lines of the other side.
    """

    names = ("for", "against", "judge")
    PLAYERS = {
        "points": lambda match: " ".join(match.motion.points[match.names[match.turn]][:2]),
        "any_words": lambda match: " ".join(
            match.rng.sample(sorted(w for side in match.motion.points.values() for w in side), 2)
        ),
    }

    def __init__(
        self,
        opponent: str = "policy",
        plays: str = "either",
        held_out_opponent: str = "any_words",
        judge: str = "rule",
        rounds: int = 1,
    ):
        super().__init__()
        self.held_out_opponent = held_out_opponent
        self.assign(1, held_out_opponent, self.PLAYERS)
        if rounds < 1:
            raise UserError(f"--environment.rounds must be at least 1, got {rounds}")
        self.opponent, self.plays, self.rounds = (
            opponent,
            check_choice("plays", plays, ("for", "against", "either")),
            rounds,
        )
        self.assign(1, opponent, self.PLAYERS)
        self.assign(
            JUDGE,
            judge,
            {"rule": lambda match: _VERDICTS[rules.judge_by_points(match.motion, match.speeches)]},
        )
        self.speeches: list[tuple[str, str]] = []

    def rows(self, split: str, count: int) -> list[dict[str, Any]]:
        """Return empty rows for training, and rows with the held-out opponent for tests."""
        return [
            {"opponent": self.held_out_opponent} if split == "test" else {} for _ in range(count)
        ]

    def open(self) -> None:
        """Assign the seats, choose the motion and send the first texts."""
        self.opponent = self.row.get("opponent", self.opponent)
        self.assign(1, self.opponent, self.PLAYERS)
        if self.plays == "against" or (self.plays == "either" and self.rng.random() < 0.5):
            self.assign(1, "policy")
            self.assign(0, self.opponent, self.PLAYERS)
        self.motion = self.rng.choice(rules.MOTIONS)
        for seat, side in enumerate(rules.SIDES):
            self.observe(seat, f"Debate: {self.motion.text}. You speak {side} it.")
        self.observe(0, "You: ")

    def move(self, text: str) -> None:
        """Process a speech or the judge's reply."""
        if self.turn == JUDGE:
            verdict = re.search(r"\b(for|against|neither)\b", text.lower())
            self._finish(
                {"for": 1.0, "against": -1.0}.get(verdict[1], 0.0) if verdict else 0.0,
                unclear=verdict is None,
            )
            return
        seat, speech = self.turn, " ".join(text.split())[:MAX_SPEECH_CHARACTERS]
        self.speeches.append((self.names[seat], speech))
        if len(self.speeches) < 2 * self.rounds:
            self.turn = 1 - seat
            self.observe(self.turn, f"{self.names[seat]}: {speech}\nYou: ")
            return
        transcript = "\n".join(f"{side}: {words}" for side, words in self.speeches)
        self.observe(
            JUDGE, f"Debate: {self.motion.text}.\n{transcript}\nWho argued better, for or against? "
        )
        self.turn = JUDGE

    def _finish(self, verdict: float, *, unclear: bool) -> None:
        """End the match. `verdict`: 1 for the first side, -1 for the second, 0 for neither."""
        points = rules.count_points(self.motion, self.speeches)
        for seat, sign in ((0, 1.0), (1, -1.0)):
            won, side_points = float(sign * verdict > 0), float(points[self.names[seat]])
            self.seat_metrics[seat] = {
                "won": won,
                "drawn": float(verdict == 0),
                "points": side_points,
                "judge_unclear": float(unclear),
            }
        self.end({0: verdict, 1: -verdict})
