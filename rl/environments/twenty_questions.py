"""Twenty questions: one thinks of a thing, the other asks about it. The answerer is a rule or a
model.
"""

from __future__ import annotations

from rl.environments.match import Match
from rl.environments.rules import twenty_questions as rules
from rl.errors import UserError

QUESTIONER, ANSWERER = 0, 1


class TwentyQuestions(Match):
    """Twenty questions about a thing. Reward 1 for naming it within `questions`, else 0; naming a
    wrong one is a question as well.

    things: how many there are to think of (1 to 16). answerer: rule, or a model that answers yes or
    no. Whether the thing was named is settled by the words alone, whoever answers: an answerer can
    be talked into much.
    """

    names = ("questioner", "answerer")
    PLAYERS = {
        "splitting": lambda match: rules.splitting(match.left),
        "any_question": lambda match: match.rng.choice([*rules.WORDS, *match.things]),
    }

    def __init__(self, things: int = 16, questions: int = 20, answerer: str = "rule"):
        super().__init__()
        if not 1 <= things <= len(rules.THINGS):
            raise UserError(f"--environment.things is from 1 to {len(rules.THINGS)}, got {things}")
        if questions < 1:
            raise UserError(f"--environment.questions is at least 1, got {questions}")
        self.things, self.questions = list(rules.THINGS)[:things], questions
        self.sit(
            ANSWERER,
            answerer,
            {"rule": lambda match: rules.rule_answer(match.thing, match.question, match.things)},
        )
        self.thing = self.question = ""
        self.asked = self.unclear = 0
        self.answers: list[tuple[str, str]] = []

    def open(self) -> None:
        self.thing = self.rng.choice(self.things)
        about = ", ".join(
            attribute
            for attribute in rules.WORDS
            if 0 < len(rules.holding(attribute, self.things)) < len(self.things)
        )
        self.tell(
            QUESTIONER,
            f"I think of one of: {', '.join(self.things)}. Ask me about it ({about}), or name it.\n> ",
        )
        self.tell(
            ANSWERER, f"You think of a {self.thing}. Answer each question about it with yes or no."
        )

    def move(self, text: str) -> None:
        if self.turn == ANSWERER:
            said = {rules.YES, rules.NO} & set(rules.words_of(text))
            self._answer(said.pop() if len(said) == 1 else rules.UNKNOWN)
            return
        self.asked += 1
        self.question = " ".join(text.split())
        if rules.read_question(text, self.things) == ("guess", self.thing):
            self._answer(rules.RIGHT)
            return
        self.tell(ANSWERER, f"{self.question}\nYes or no? ")
        self.turn = ANSWERER

    @property
    def left(self) -> frozenset[str]:
        """The things that the answers so far leave, were they all as the rule gives them; all,
        where they leave none.
        """
        left = frozenset(self.things)
        for question, answer in self.answers:
            left = rules.left_after(left, question, answer) if answer != rules.UNKNOWN else left
        return left or frozenset(self.things)

    def _answer(self, answer: str) -> None:
        self.turn = QUESTIONER
        self.answers.append((self.question, answer))
        self.unclear += answer == rules.UNKNOWN
        found = answer == rules.RIGHT
        if not found and self.asked < self.questions:
            self.tell(QUESTIONER, f"{answer}\n> ")
            return
        self.figures[QUESTIONER] = {
            "correct": float(found),
            "questions": float(self.asked),
            "unclear": self.unclear / self.asked,
        }
        self.end({QUESTIONER: float(found)})
