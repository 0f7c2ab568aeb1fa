"""Play a debate between two seats before a judge, which is a rule or a model.

    python train.py grpo --environment examples/games/debate.py:DebateEnv

The rule counts the points of a small table that a side makes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rl.envs import Game, check_choice
from rl.errors import UserError

SIDES = ("for", "against")


@dataclass(frozen=True, slots=True)
class Motion:
    """Hold a motion, and the words that count as points for each side."""

    text: str
    points: dict[str, tuple[str, ...]]


MOTIONS = (
    Motion(
        "cats are better than dogs",
        {
            "for": ("clean", "quiet", "small", "calm"),
            "against": ("loyal", "guard", "walk", "train"),
        },
    ),
    Motion(
        "tea is better than coffee",
        {"for": ("mild", "calm", "leaf", "cheap"), "against": ("strong", "awake", "bean", "taste")},
    ),
    Motion(
        "towns are better than farms",
        {"for": ("jobs", "shops", "near", "music"), "against": ("air", "space", "food", "peace")},
    ),
    Motion(
        "trains are better than cars",
        {"for": ("fast", "read", "safe", "clean"), "against": ("door", "free", "near", "load")},
    ),
)


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words."""
    return re.findall(r"[a-z]+", text.lower())


def find_points(
    motion: Motion, side: str, speech: str, previous: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return the side's points that appear in a speech and not in `previous`."""
    return frozenset(motion.points[side]) & frozenset(split_words(speech)) - previous


def count_points(motion: Motion, speeches: list[tuple[str, str]]) -> dict[str, int]:
    """Return the points of each side after these (side, speech) pairs; each point counts once."""
    made: dict[str, frozenset[str]] = {side: frozenset() for side in SIDES}
    for side, speech in speeches:
        made[side] |= find_points(motion, side, speech)
    return {side: len(points) for side, points in made.items()}


def judge_by_points(motion: Motion, speeches: list[tuple[str, str]]) -> float:
    """Return 1 if "for" made more points, -1 if "against" did, 0 if both made equally many."""
    score = count_points(motion, speeches)
    return float((score["for"] > score["against"]) - (score["for"] < score["against"]))


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
        self.set_opponents(opponent, held_out_opponent)
        if rounds < 1:
            raise UserError(f"--environment.rounds must be at least 1, got {rounds}")
        self.plays = check_choice("plays", plays, ("for", "against", "either"))
        self.rounds = rounds
        self.assign(
            JUDGE,
            judge,
            {"rule": lambda match: _VERDICTS[judge_by_points(match.motion, match.speeches)]},
        )
        self.speeches: list[tuple[str, str]] = []

    def open(self) -> None:
        """Assign the seats, choose the motion and send the first texts."""
        self.seat_opponent(self.plays)
        self.motion = self.rng.choice(MOTIONS)
        for seat, side in enumerate(SIDES):
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
        points = count_points(self.motion, self.speeches)
        for seat, sign in ((0, 1.0), (1, -1.0)):
            won, side_points = float(sign * verdict > 0), float(points[self.names[seat]])
            self.seat_metrics[seat] = {
                "won": won,
                "drawn": float(verdict == 0),
                "points": side_points,
                "judge_unclear": float(unclear),
            }
        self.end({0: verdict, 1: -verdict})
