"""Play "twenty questions": the answerer has an object in mind, the questioner asks about it. The
answerer is a rule or a model.
"""

from __future__ import annotations

from rl.envs.game_env import Game
from rl.envs.rules import twenty_questions_rules as rules
from rl.errors import UserError

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
        "splitting": lambda match: rules.choose_question(match.candidates),
        "any_question": lambda match: match.rng.choice([*rules.WORDS, *match.things]),
    }

    def __init__(self, things: int = 16, questions: int = 20, answerer: str = "rule"):
        super().__init__()
        if not 1 <= things <= len(rules.THINGS):
            raise UserError(
                f"--environment.things must be from 1 to {len(rules.THINGS)}, got {things}"
            )
        if questions < 1:
            raise UserError(f"--environment.questions must be at least 1, got {questions}")
        self.things, self.questions = list(rules.THINGS)[:things], questions
        self.assign(
            ANSWERER,
            answerer,
            {
                "rule": lambda match: rules.answer_by_rule(
                    match.secret, match.question, match.things
                )
            },
        )
        self.secret = self.question = ""
        self.questions_used = self.unclear = 0
        self.answers: list[tuple[str, str]] = []

    def open(self) -> None:
        """Choose the object and send the first texts."""
        self.secret = self.rng.choice(self.things)
        hints = ", ".join(
            attribute
            for attribute in rules.WORDS
            if 0 < len(rules.filter_by_attribute(attribute, self.things)) < len(self.things)
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
            verdicts = {rules.YES, rules.NO} & set(rules.find_words(text))
            self._record_answer(verdicts.pop() if len(verdicts) == 1 else rules.UNKNOWN)
            return
        self.questions_used += 1
        self.question = " ".join(text.split())
        if rules.read_question(text, self.things) == ("guess", self.secret):
            self._record_answer(rules.RIGHT)
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
                rules.filter_by_answer(candidates, question, answer)
                if answer != rules.UNKNOWN
                else candidates
            )
        return candidates or frozenset(self.things)

    def _record_answer(self, answer: str) -> None:
        """Record an answer, and end the match if the object was named or no questions remain."""
        self.turn = QUESTIONER
        self.answers.append((self.question, answer))
        self.unclear += answer == rules.UNKNOWN
        named = answer == rules.RIGHT
        if not named and self.questions_used < self.questions:
            self.observe(QUESTIONER, f"{answer}\n> ")
            return
        self.seat_metrics[QUESTIONER] = {
            "correct": float(named),
            "questions": float(self.questions_used),
            "unclear": self.unclear / self.questions_used,
        }
        self.end({QUESTIONER: float(named)})
