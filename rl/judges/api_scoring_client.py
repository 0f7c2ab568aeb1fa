"""Score tokens with a model behind an OpenAI-compatible API, such as a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rl.errors import UserError
from rl.judges.openai_client import OpenAIClient
from rl.types import ModelInput

if TYPE_CHECKING:
    from rl.client import TrainingClient

_SAMPLE_SIZE = 100  # tokens of the vocabulary that are compared


class APIScoringClient:
    """Compute logprobs of given tokens, as a sampling client does (`compute_logprobs_many`).

    The server echoes prompts of token ids with their logprobs (`/completions`), which are those of
    temperature 1.
    """

    def __init__(self, client: OpenAIClient):
        self.client = client

    def check_vocabulary(self, student: TrainingClient, name: str) -> None:
        """Raise UserError unless the server reads up to 100 token ids, spread over the student's
        vocabulary, as the same texts.
        """
        tokenizer = student.info["tokenizer"]
        if tokenizer is None:
            raise UserError(
                f"the {name} is behind an API, which is asked about sample tokens, and the policy "
                "has no tokenizer: set --tokenizer"
            )
        size = len(tokenizer)
        ids = [i for i in range(size) if i not in tokenizer.all_special_ids]
        # ASCII, since servers show a token that is a part of a character in different ways
        texts = {i: tokenizer.decode([i]).strip() for i in ids[:: max(1, size // _SAMPLE_SIZE)]}
        expected = {i: text for i, text in texts.items() if text and text.isascii()}
        ((received, _),) = self.client.score_many([list(expected)])
        for (token, text), other in zip(expected.items(), received, strict=True):
            if other.strip() != text:
                raise UserError(
                    f"the {name} has another vocabulary than the policy: token {token} is "
                    f"{text!r} in the policy's and {other[:50]!r} in the other. Choose a model of "
                    "the policy's family"
                )

    def compute_logprobs_many(
        self, inputs: Sequence[ModelInput], temperature: float = 1.0
    ) -> Future[list[list[float | None]]]:
        """Return a future of the logprobs of each input's tokens, None for its first. Raises
        UserError for another temperature than 1.
        """
        if temperature != 1:
            raise UserError(
                f"the server at {self.client.url} returns logprobs at temperature 1, and "
                f"temperature {temperature:g} is set: set --temperature 1"
            )
        scores = self.client.score_many([tokens.to_ints() for tokens in inputs])
        future: Future[list[list[float | None]]] = Future()
        future.set_result([[None, *logprobs[1:]] for _, logprobs in scores])
        return future

    def release(self) -> None:
        """Do nothing: the server holds the weights."""
