"""Judge an answer with a language model by a rubric: several questions with weights.

`reading` selects the way to read an answer to a question. "yes_no": the question is phrased so that
yes is good, and the probability of "yes" against "no" is read; nothing is sampled. "score": the
judge writes its reasoning, and the last "Score: N" in it is read, N from 0 to a scale. In both ways
all questions about all answers of a batch form a single batch for the judge.

The judge is a model of this process, or one behind an OpenAI-compatible API.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rl.errors import UserError
from rl.judges.comparison_judge import drop_thoughts, format_conversation
from rl.judges.episode_rewards import make_episode
from rl.judges.openai_client import APIRequestError, OpenAIClient
from rl.judges.reward_scores import (
    check_length,
    compute_answer_logprobs,
    iter_batches,
    split_by_group,
)
from rl.renderers import (
    THOUGHT_BEGIN,
    parse_partial_answer,
    prompt_opens_thoughts,
    split_thoughts,
)
from rl.rewards import Score
from rl.rollout import TrajectoryGroup
from rl.seed import derive_seed
from rl.types import Message, SamplingParams

if TYPE_CHECKING:
    from rl.client import SamplingClient

RubricReading = Literal["yes_no", "score"]
_TOP_LOGPROBS = 20  # OpenAI's limit, and vLLM's default limit
YES_NO_LABELS = ("yes", "no")
# The word may be quoted, bold or the end of TotalScore, the number also boxed.
_SCORE_PATTERN = re.compile(
    r"""(?:(?<![a-z])score|(?<=[a-z])(?-i:Score))["'*]*\s*(?:is|:|=)?[\s"'*$]*(?:\\boxed\{)?(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)""",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RubricQuestion:
    """Hold a line of a rubric. `name` is its metric (rubric/<name>)."""

    text: str
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Rubric:
    """Hold the questions and the way their answers are read. The score of an answer is the weighted
    mean over questions, 0 to 1.

    A negative weight marks a fault: (sum of w * reading) / (sum of |w|), so the score is from -1 to
    1 with negative weights. `scale` is the best N of "score".
    """

    questions: tuple[RubricQuestion, ...]
    reading: RubricReading = "yes_no"
    scale: float = 10.0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if not self.questions or not sum(abs(question.weight) for question in self.questions):
            raise UserError(
                "a rubric needs a question with a weight other than 0, such as "
                "{'Is the answer polite?': 1}"
            )
        for question in self.questions:
            if not question.text.strip():
                raise UserError("a rubric's question must be a non-empty text, got ''")

    @classmethod
    def from_weights(
        cls,
        weights: Sequence[tuple[str, float]],
        reading: RubricReading = "yes_no",
        **settings: Any,
    ) -> Rubric:
        """Create a rubric from texts and weights. A name consists of the text's first words, with a
        number if names coincide.
        """
        questions: list[RubricQuestion] = []
        for text, weight in weights:
            words = "_".join(re.findall(r"\w+", text.lower())[:5]) or "question"
            taken = sum(question.name.split("-")[0] == words for question in questions)
            questions.append(
                RubricQuestion(text, float(weight), f"{words}-{taken + 1}" if taken else words)
            )
        return cls(tuple(questions), reading, **settings)


def make_rubric_prompt(
    messages: Sequence[Message], answer: str, question: RubricQuestion, rubric: Rubric
) -> list[Message]:
    """Return the prompt to which a judge answers. The answer is shown without its thoughts and
    surrounding whitespace.
    """
    instruction = "Say yes or no."
    if rubric.reading == "score":
        instruction = (
            'Think, then end with "Score: N", where N is a number from 0 (not at all) to '
            f"{rubric.scale:g} (entirely)."
        )
    text = (
        f"[Conversation]\n{format_conversation(messages)}\n\n[Answer]\n{drop_thoughts(answer)}\n\n"
        f"[Question]\n{question.text.strip()} {instruction}\n"
    )
    return [{"role": "user", "content": text}]


def parse_score(text: str, scale: float) -> float | None:
    """Return the last "Score: N" of a judge's text as a share of the scale; None without a score,
    or if N is not on the scale.

    "Score: 7/10" counts as 7. Text in thoughts does not count, even if they never end.
    """
    answer = split_thoughts(text)[0].partition(THOUGHT_BEGIN)[0]
    matches = _SCORE_PATTERN.findall(answer)
    if not matches:
        return None
    value = float(matches[-1])
    return value / scale if 0 <= value <= scale else None


class RubricJudge:
    """Score episodes by a rubric: a `Score` for each, without a reward if a reading failed.

    `renderer` is the judge's renderer. `seed` is the seed of samples (reading "score"). A sampled
    text is a function of the seed and the prompt, so equal answers get equal scores.
    """

    scores_single_answers = True

    def __init__(self, client: SamplingClient, renderer: Any, rubric: Rubric, seed: int = 0):
        self.client, self.renderer, self.rubric, self.seed = client, renderer, rubric, seed

    def _read_score(self, text: str) -> float | str:
        """Return the score in a judge's text, or what the error of an answer without one says."""
        score = parse_score(text, self.rubric.scale)
        if score is None:
            return f"the judge wrote no score from 0 to {self.rubric.scale:g}"
        return score

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[Score]]:
        """Return the score of each episode, [P][G]."""
        episodes: list[tuple[Sequence[Message], str]] = []
        # The conversation up to the last answer, with the answers of earlier turns, and that answer
        for group in groups:
            for trajectory in group.trajectories_G:
                *messages, answer = make_episode(trajectory).messages
                episodes.append((messages, str(answer["content"])))
        # equal answers to the same conversation are read once
        keys = [(repr(messages), answer) for messages, answer in episodes]
        distinct = dict(zip(keys, episodes, strict=True))
        questions = self.rubric.questions
        prompts = [
            make_rubric_prompt(*episode, question, self.rubric)
            for episode in distinct.values()
            for question in questions
        ]
        read = (
            self._yes_probabilities(prompts)
            if self.rubric.reading == "yes_no"
            else self._sample_scores(prompts)
        )
        count = len(questions)
        readings = {key: read[i * count : (i + 1) * count] for i, key in enumerate(distinct)}
        return split_by_group(groups, (self._weighted_score(readings[key]) for key in keys))

    def _weighted_score(self, readings: Sequence[float | str]) -> Score:
        """Return an answer's score from the readings of all questions. A str says why
        a question has no reading.
        """
        pairs = list(zip(self.rubric.questions, readings, strict=True))
        failed = [(question.name, text) for question, text in pairs if isinstance(text, str)]
        if failed:
            names = ", ".join(name for name, _ in failed)
            return Score(None, {}, f"{failed[0][1]} for {names}", "error")
        total = sum(q.weight * float(value) for q, value in pairs) / sum(
            abs(q.weight) for q in self.rubric.questions
        )
        return Score(total, {f"rubric/{q.name}": float(value) for q, value in pairs})

    def _yes_probabilities(self, prompts: Sequence[list[Message]]) -> list[float | str]:
        """Return P(yes) / (P(yes) + P(no)) of each prompt, each word with its end token."""
        examples = [
            self.renderer.build_supervised_example(
                [*prompt, {"role": "assistant", "content": word}]
            )
            for prompt in prompts
            for word in YES_NO_LABELS
        ]
        logp = compute_answer_logprobs(self.client, examples, **self._length_error)
        pairs = np.asarray(logp, dtype=np.float64).reshape(-1, 2)
        return [
            float(p) if np.isfinite(p) else "the judge's probability of yes is not finite"
            for p in 1 / (1 + np.exp(pairs[:, 1] - pairs[:, 0]))
        ]

    def _sample_scores(self, prompts: Sequence[list[Message]]) -> list[float | str]:
        """Return the scores in texts that the judge samples at temperature 1: a stream for each
        prompt, a function of its tokens.
        """
        from rl.sampler import SamplingRequest  # imports torch, which settings avoid

        params = SamplingParams(
            max_tokens=self.rubric.max_tokens,
            temperature=1.0,
            stop=self.renderer.get_stop_sequences(),
        )
        requests = []
        for prompt in prompts:
            tokens = self.renderer.build_generation_prompt(prompt).to_ints()
            length = len(tokens) + self.rubric.max_tokens - 1
            check_length(self.client, length, **self._length_error)
            requests.append(
                SamplingRequest(
                    prompt=tokens,
                    num_samples=1,
                    params=params,
                    seed=self.seed,
                    problem=derive_seed("rubric", *tokens),
                    first_index=0,
                )
            )
        values: list[float | str] = []
        for batch in iter_batches(requests):
            responses, _ = self.client.sample_many(batch).result()
            for request, response in zip(batch, responses, strict=True):
                within_thoughts = prompt_opens_thoughts(self.renderer, request.prompt)
                message = parse_partial_answer(
                    self.renderer, response.sequences[0].tokens, within_thoughts, ended=True
                )
                values.append(self._read_score(str(message["content"])))
        return values

    @property
    def _length_error(self) -> dict[str, str]:
        """Return the texts of the error of a prompt that exceeds the judge's context."""
        return {
            "judge": f"the rubric's judge {self.client.info['base_model']}",
            "text": "a conversation with its answer and a question",
            "remedy": "lower max_tokens or rubric_max_tokens, or use a judge",
        }


class APIRubricJudge(RubricJudge):
    """Score episodes by a rubric with the model of `client`.

    "yes_no" reads the probabilities of the reply's first token, of which the server returns the 20
    highest. "score" samples at temperature 1, with a seed that depends on the prompt. Whether equal
    requests get equal replies depends on the server. An answer with a failed request has no
    reward.
    """

    def __init__(self, client: OpenAIClient, rubric: Rubric, seed: int = 0):
        self.api_client, self.rubric, self.seed = client, rubric, seed

    def probe(self) -> None:
        """Read a sample answer. Raises UserError if the server cannot be used with this rubric."""
        example: Message = {"role": "user", "content": "Which number is greater, 2 or 3?"}
        prompt = make_rubric_prompt([example], "3", self.rubric.questions[0], self.rubric)
        if self.rubric.reading == "score":
            self._sample_scores([prompt])
            return
        (reading,) = self._yes_probabilities([prompt])
        if isinstance(reading, str):
            raise UserError(
                f"the model {self.api_client.model} at {self.api_client.url} cannot be read as yes "
                f"or no: {reading}. Use --rubric-reading score, or another model"
            )

    def _yes_probabilities(self, prompts: Sequence[list[Message]]) -> list[float | str]:
        """Return P(yes) / (P(yes) + P(no)) of the first token of each reply, or a reason."""
        replies = self.api_client.complete_many(
            prompts,
            self._seeds(prompts),
            max_tokens=1,
            temperature=1.0,
            logprobs=True,
            top_logprobs=_TOP_LOGPROBS,
        )
        return [
            str(reply) if isinstance(reply, APIRequestError) else _read_yes_probability(reply)
            for reply in replies
        ]

    def _sample_scores(self, prompts: Sequence[list[Message]]) -> list[float | str]:
        """Return the scores in the texts that the model writes, or why there is none."""
        replies = self.api_client.complete_many(
            prompts, self._seeds(prompts), max_tokens=self.rubric.max_tokens, temperature=1.0
        )
        return [
            str(reply)
            if isinstance(reply, APIRequestError)
            else self._read_score(str((reply.get("message") or {}).get("content") or ""))
            for reply in replies
        ]

    def _seeds(self, prompts: Sequence[list[Message]]) -> list[int]:
        return [derive_seed(self.seed, "rubric", json.dumps(prompt)) % 2**31 for prompt in prompts]


def _read_yes_probability(choice: Mapping[str, Any]) -> float | str:
    """Return P(yes) / (P(yes) + P(no)) of a choice's first token; a text if it has neither."""
    try:
        top_logprobs = choice["logprobs"]["content"][0]["top_logprobs"]
        logprobs = [(str(entry["token"]), float(entry["logprob"])) for entry in top_logprobs]
    except (KeyError, IndexError, TypeError, ValueError):
        return "the reply has no top_logprobs of its first token"
    yes, no = (
        sum(math.exp(logp) for token, logp in logprobs if token.strip().lower() == label)
        for label in YES_NO_LABELS
    )
    if not yes + no > 0:
        tokens = ", ".join(repr(token) for token, _ in logprobs[:5])
        return f"the most likely first tokens are {tokens}, neither yes nor no"
    return yes / (yes + no)
