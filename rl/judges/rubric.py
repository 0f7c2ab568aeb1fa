"""A language model as the judge of one answer by a rubric: several questions, each with its weight.

Two ways to read an answer to a question. "yes_no": the question is put so that yes is good, and the
probability of "yes" against "no" is read; nothing is sampled. "score": the judge writes what it
thinks, and the last "Score: N" in it is read, N from 0 to a scale. Either way all questions about
all answers of a batch are one batch for the judge.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rl.episodes import Trajectory, TrajectoryGroup
from rl.errors import UserError
from rl.judges.comparison import conversation_text
from rl.judges.episode_rewards import episode_of
from rl.judges.reward_scores import AT_ONCE
from rl.renderers import split_thoughts
from rl.rewards import Score
from rl.seeds import derive_seed
from rl.types import Message, SamplingParams

if TYPE_CHECKING:
    from rl.clients import SamplingClient

Reading = Literal["yes_no", "score"]
YES_NO = ("yes", "no")
_SCORE = re.compile(r"score\s*(?:is|:|=)?\s*\**\s*(-?\d+(?:\.\d+)?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Question:
    """One line of a rubric. `name`: in metrics (rubric/<name>)."""

    text: str
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Rubric:
    """Questions and how their answers are read. The score of an answer is the weighted mean over
    questions, 0 to 1.

    A negative weight counts what is bad: (sum of w * reading) / (sum of |w|), so from -1 to 1 with
    such. `scale`: the best N of "score".
    """

    questions: tuple[Question, ...]
    reading: Reading = "yes_no"
    scale: float = 10.0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if not self.questions or not sum(abs(question.weight) for question in self.questions):
            raise UserError(
                "a rubric has at least one question with a weight other than 0, such as {'Is the answer polite?': 1}"
            )
        for question in self.questions:
            if not question.text.strip():
                raise UserError("a rubric's question is a text, got an empty one")

    @classmethod
    def of(
        cls, weights: Sequence[tuple[str, float]], reading: Reading = "yes_no", **settings: Any
    ) -> Rubric:
        """From texts and weights; their names are made from their first words, and are told apart
        by a number where they meet.
        """
        questions: list[Question] = []
        for text, weight in weights:
            words = "_".join(re.findall(r"\w+", text.lower())[:5]) or "question"
            taken = sum(question.name.split("-")[0] == words for question in questions)
            questions.append(
                Question(text, float(weight), f"{words}-{taken + 1}" if taken else words)
            )
        return cls(tuple(questions), reading, **settings)


def rubric_messages(
    messages: Sequence[Message], answer: str, question: Question, rubric: Rubric
) -> list[Message]:
    """The prompt to which a judge answers. The answer stands without its thoughts and the space
    around it.
    """
    how = "Say yes or no."
    if rubric.reading == "score":
        how = f'Think, then end with "Score: N", where N is a number from 0 (not at all) to {rubric.scale:g} (entirely).'
    shown = split_thoughts(answer)[0].strip()
    text = f"[Conversation]\n{conversation_text(messages)}\n\n[Answer]\n{shown}\n\n[Question]\n{question.text.strip()} {how}\n"
    return [{"role": "user", "content": text}]


def read_score(text: str, scale: float) -> float | None:
    """The last "Score: N" of a judge's text as a share of the scale; None where there is none, or N
    is not on the scale.

    "Score: 7/10" counts as 7. What stands in thoughts does not count.
    """
    found = _SCORE.findall(split_thoughts(text)[0])
    if not found:
        return None
    value = float(found[-1])
    return value / scale if 0 <= value <= scale else None


class RubricJudge:
    """Scores episodes by a rubric: a `Score` for each, without a reward where a reading failed.
    `renderer`: the judge's own.

    `seed`: of what is sampled (reading "score"); a text is a function of it and of the prompt, so
    equal answers read alike.
    """

    scores_alone = True

    def __init__(self, client: SamplingClient, renderer: Any, rubric: Rubric, seed: int = 0):
        self.client, self.renderer, self.rubric, self.seed = client, renderer, rubric, seed

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[Score]]:
        asked = [_asked(trajectory) for group in groups for trajectory in group.trajectories_G]
        questions = self.rubric.questions
        unlike: dict[tuple[str, str], int] = {}  # equal answers to one conversation are read once
        places = [
            unlike.setdefault((repr(messages), answer), len(unlike)) for messages, answer in asked
        ]
        first = {place: one for place, one in reversed(list(zip(places, asked, strict=True)))}
        prompts = [
            rubric_messages(*first[i], question, self.rubric)
            for i in range(len(unlike))
            for question in questions
        ]
        read = self._yes_no(prompts) if self.rubric.reading == "yes_no" else self._written(prompts)
        scores = iter(
            [self._score(read[i * len(questions) : (i + 1) * len(questions)]) for i in places]
        )
        return [[next(scores) for _ in group.trajectories_G] for group in groups]

    def _score(self, readings: Sequence[float | None]) -> Score:
        questions = self.rubric.questions
        if any(reading is None for reading in readings):
            missed = [
                q.name for q, reading in zip(questions, readings, strict=True) if reading is None
            ]
            return Score(
                None,
                {},
                f"the judge wrote no score from 0 to {self.rubric.scale:g} for {', '.join(missed)}",
                "error",
            )
        values = [float(reading) for reading in readings if reading is not None]
        total = sum(q.weight * value for q, value in zip(questions, values, strict=True)) / sum(
            abs(q.weight) for q in questions
        )
        return Score(
            total, {f"rubric/{q.name}": value for q, value in zip(questions, values, strict=True)}
        )

    def _yes_no(self, prompts: Sequence[list[Message]]) -> list[float | None]:
        """P(yes) / (P(yes) + P(no)), each word with its end mark."""
        examples = [
            self.renderer.build_supervised_example(
                [*prompt, {"role": "assistant", "content": word}]
            )
            for prompt in prompts
            for word in YES_NO
        ]
        logp: list[float] = []
        for start in range(0, len(examples), AT_ONCE):
            part = examples[start : start + AT_ONCE]
            self._check_length(max(tokens.length for tokens, _ in part))
            found = self.client.compute_logprobs_many([tokens for tokens, _ in part]).result()
            for values, (_, weights) in zip(found, part, strict=True):
                logp.append(
                    sum(
                        lp
                        for lp, w in zip(values[1:], weights[1:], strict=True)
                        if w and lp is not None
                    )
                )
        pairs = np.asarray(logp, dtype=np.float64).reshape(-1, 2)
        return [
            float(p) if np.isfinite(p) else None
            for p in 1 / (1 + np.exp(pairs[:, 1] - pairs[:, 0]))
        ]

    def _written(self, prompts: Sequence[list[Message]]) -> list[float | None]:
        """What is read of texts that the judge samples at temperature 1: one stream for each
        prompt, a function of its tokens.
        """
        from rl.sampler import Request  # with torch, which the settings do without

        params = SamplingParams(
            max_tokens=self.rubric.max_tokens,
            temperature=1.0,
            stop=self.renderer.get_stop_sequences(),
        )
        requests = []
        for prompt in prompts:
            tokens = self.renderer.build_generation_prompt(prompt).to_ints()
            self._check_length(len(tokens) + self.rubric.max_tokens - 1)
            asked = Request(
                prompt=tokens,
                num_samples=1,
                params=params,
                seed=self.seed,
                problem=derive_seed("rubric", *tokens),
                first_index=0,
            )
            requests.append(asked)
        found: list[float | None] = []
        for start in range(0, len(requests), AT_ONCE):
            responses, _ = self.client.sample_many(requests[start : start + AT_ONCE]).result()
            for response in responses:
                message, _ = self.renderer.parse_response(response.sequences[0].tokens)
                found.append(read_score(str(message["content"]), self.rubric.scale))
        return found

    def _check_length(self, length: int) -> None:
        limit = self.client.info["max_context"]
        if limit is not None and length > limit:
            raise UserError(
                f"the rubric's judge {self.client.info['base_model']} reads at most {limit} tokens, a conversation with its answer and a "
                f"question has {length}: lower max_tokens or rubric_max_tokens, or take a judge of a longer context"
            )


def _asked(trajectory: Trajectory) -> tuple[Sequence[Message], str]:
    """Return the conversation up to the last answer, with the answers of earlier turns, and that
    answer.
    """
    messages = episode_of(trajectory).messages
    return messages[:-1], str(messages[-1]["content"])
