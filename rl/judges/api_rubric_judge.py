"""Judge answers by a rubric with a model behind an OpenAI-compatible API."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl.errors import UserError
from rl.judges.openai_client import APIRequestError, OpenAIClient
from rl.judges.rubric_judge import (
    YES_NO_LABELS,
    Rubric,
    RubricJudge,
    make_rubric_prompt,
    parse_score,
)
from rl.seed import derive_seed
from rl.types import Message

_TOP_LOGPROBS = 20  # OpenAI's limit, and vLLM's default limit


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
        readings: list[float | str] = []
        for reply in replies:
            if isinstance(reply, APIRequestError):
                readings.append(str(reply))
                continue
            message = reply.get("message") or {}
            score = parse_score(str(message.get("content") or ""), self.rubric.scale)
            readings.append(self.missing_score_reason if score is None else score)
        return readings

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
