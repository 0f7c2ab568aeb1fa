"""Play "twenty questions": the answerer has an object in mind, the questioner asks about it. The
answerer is a rule or a model.

    python train.py grpo --environment examples/games/twenty_questions.py:TwentyQuestionsEnv

The words of a question decide its answer: the name of an object is a guess, a word of an attribute
asks for that attribute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

from rl.envs import Game
from rl.errors import UserError

# Attributes of each object. Each attribute splits the remaining objects in half, so that four
# questions identify each of sixteen objects.
THINGS: dict[str, frozenset[str]] = {
    "dog": frozenset({"alive", "big"}),
    "horse": frozenset({"alive", "big", "plants"}),
    "cat": frozenset({"alive"}),
    "rabbit": frozenset({"alive", "plants"}),
    "eagle": frozenset({"alive", "flies", "big"}),
    "goose": frozenset({"alive", "flies", "big", "plants"}),
    "bat": frozenset({"alive", "flies"}),
    "bee": frozenset({"alive", "flies", "plants"}),
    "car": frozenset({"big", "metal"}),
    "house": frozenset({"big"}),
    "spoon": frozenset({"metal"}),
    "book": frozenset(),
    "plane": frozenset({"flies", "big", "metal"}),
    "balloon": frozenset({"flies", "big"}),
    "drone": frozenset({"flies", "metal"}),
    "kite": frozenset({"flies"}),
}
# Words that ask for an attribute, including the name of the attribute.
WORDS: dict[str, tuple[str, ...]] = {
    "alive": ("alive", "living", "live", "lives", "animal", "creature"),
    "flies": ("flies", "fly", "flying", "wings", "air"),
    "big": ("big", "large", "bigger", "larger", "huge"),
    "plants": ("plants", "plant", "grass", "herbivore", "vegetarian"),
    "metal": ("metal", "iron", "steel"),
}
YES, NO, RIGHT, UNKNOWN = "yes", "no", "right", "unclear"


def find_words(text: str) -> list[str]:
    """Split a text into lower-case words."""
    return re.findall(r"[a-z]+", text.lower())


def read_question(text: str, things: Iterable[str]) -> tuple[str, str] | None:
    """Return ("guess", object) or ("ask", attribute); None if the words name nothing known, or
    several different objects.
    """
    words = find_words(text)
    named = {item for item in things if item in words}
    if named:
        return ("guess", named.pop()) if len(named) == 1 else None
    attributes = {
        attribute for attribute, known in WORDS.items() if any(word in known for word in words)
    }
    return ("ask", attributes.pop()) if len(attributes) == 1 else None


def answer_by_rule(secret: str, text: str, things: Iterable[str]) -> str:
    """Return YES or NO to a question about `secret`, RIGHT or NO to a guess, UNKNOWN to any other
    text.
    """
    parsed = read_question(text, things)
    if parsed is None:
        return UNKNOWN
    kind, target = parsed
    if kind == "guess":
        return RIGHT if target == secret else NO
    return YES if target in THINGS[secret] else NO


def filter_by_attribute(attribute: str, things: Iterable[str]) -> frozenset[str]:
    """Return the objects that have an attribute."""
    return frozenset(item for item in things if attribute in THINGS[item])


def filter_by_answer(things: Iterable[str], text: str, answer: str) -> frozenset[str]:
    """Return the objects for which the question has this answer."""
    things = frozenset(things)
    return frozenset(item for item in things if answer_by_rule(item, text, THINGS) == answer)


@cache
def find_best_attribute(things: frozenset[str]) -> str | None:
    """Return the attribute that splits the objects most evenly (the first by name among equals);
    None if no attribute splits them.
    """
    halves = {attribute: len(filter_by_attribute(attribute, things)) for attribute in sorted(WORDS)}
    splitting = [attribute for attribute, count in halves.items() if 0 < count < len(things)]
    return min(
        splitting, key=lambda attribute: abs(2 * halves[attribute] - len(things)), default=None
    )


def choose_question(candidates: Sequence[str] | frozenset[str]) -> str:
    """Return the next question of the optimal questioner: an attribute, or the name of an object if
    no attribute splits the candidates.
    """
    attribute = find_best_attribute(frozenset(candidates)) if len(candidates) > 1 else None
    return attribute if attribute is not None else sorted(candidates)[0]


QUESTIONER, ANSWERER = 0, 1


class TwentyQuestionsEnv(Game):
    """Play twenty questions about an object. Reward 1 for naming it within `questions`, else 0. A
    wrong name counts as a question.

    things: number of possible objects (1 to 16). answerer: rule, or a model that answers yes or no.
    Only the words of the questioner decide whether the object was named, with any answerer, because
    a model that answers can be persuaded.
    """

    names = ("questioner", "answerer")
    PLAYERS = {
        "splitting": lambda match: choose_question(match.candidates),
        "any_question": lambda match: match.rng.choice([*WORDS, *match.things]),
    }

    def __init__(self, things: int = 16, questions: int = 20, answerer: str = "rule"):
        super().__init__()
        if not 1 <= things <= len(THINGS):
            raise UserError(f"--environment.things must be from 1 to {len(THINGS)}, got {things}")
        if questions < 1:
            raise UserError(f"--environment.questions must be at least 1, got {questions}")
        self.things, self.questions = list(THINGS)[:things], questions
        self.assign(
            ANSWERER,
            answerer,
            {"rule": lambda match: answer_by_rule(match.secret, match.question, match.things)},
        )
        self.secret = self.question = ""
        self.questions_used = self.unclear = 0
        self.answers: list[tuple[str, str]] = []

    def open(self) -> None:
        """Choose the object and send the first texts."""
        self.secret = self.rng.choice(self.things)
        hints = ", ".join(
            attribute
            for attribute in WORDS
            if 0 < len(filter_by_attribute(attribute, self.things)) < len(self.things)
        )
        self.observe(
            QUESTIONER,
            f"I think of one of: {', '.join(self.things)}. Ask me about it ({hints}), or name"
            " it.\n> ",
        )
        self.observe(
            ANSWERER, f"You think of a {self.secret}. Answer each question about it with yes or no."
        )

    def move(self, text: str) -> None:
        """Process a question or an answer."""
        if self.turn == ANSWERER:
            verdicts = {YES, NO} & set(find_words(text))
            self._record_answer(verdicts.pop() if len(verdicts) == 1 else UNKNOWN)
            return
        self.questions_used += 1
        self.question = " ".join(text.split())
        if read_question(text, self.things) == ("guess", self.secret):
            self._record_answer(RIGHT)
            return
        self.observe(ANSWERER, f"{self.question}\nYes or no? ")
        self.turn = ANSWERER

    @property
    def candidates(self) -> frozenset[str]:
        """Return the objects that agree with all answers, assuming that each follows the rule; all
        objects if none agrees.
        """
        candidates = frozenset(self.things)
        for question, answer in self.answers:
            candidates = (
                filter_by_answer(candidates, question, answer) if answer != UNKNOWN else candidates
            )
        return candidates or frozenset(self.things)

    def _record_answer(self, answer: str) -> None:
        """Record an answer, and end the match if the object was named or no questions remain."""
        self.turn = QUESTIONER
        self.answers.append((self.question, answer))
        self.unclear += answer == UNKNOWN
        named = answer == RIGHT
        if not named and self.questions_used < self.questions:
            self.observe(QUESTIONER, f"{answer}\n> ")
            return
        self.seat_metrics[QUESTIONER] = {
            "correct": float(named),
            "questions": float(self.questions_used),
            "unclear": self.unclear / self.questions_used,
        }
        self.end({QUESTIONER: float(named)})
