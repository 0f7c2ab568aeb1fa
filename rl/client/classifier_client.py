"""Provide ClassifierClient: scores of a published reward model that lives in this process and on
the ranks that serve it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.client.api_future import APIFuture
from rl.client.service_context import ServiceContext, free_when_collected
from rl.errors import BadRequestError


class ClassifierClient:
    """Score token sequences with a reward model (an extension of Tinker's API). Its memory is freed
    when the client is collected.
    """

    def __init__(self, context: ServiceContext, name: str):
        self._driver, self.model_id = context.driver, context.next_model_id()
        self._created = context.driver.submit("load_classifier", self.model_id, name)
        self._finalizer = free_when_collected(self, context.driver, "free_model", self.model_id)

    @property
    def info(self) -> dict[str, Any]:
        """Return the model's details: base_model, arch, tokenizer, max_context, parameters."""
        return self._created.result()

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self.info["tokenizer"]

    def compute_scores(self, inputs: Sequence[Sequence[int]]) -> APIFuture[list[float]]:
        """Return the score of each token sequence. Raises BadRequestError if a sequence is empty,
        or longer than the model's context.
        """
        limit = self.info["max_context"]
        for number, tokens in enumerate(inputs):
            if not len(tokens) or (limit is not None and len(tokens) > limit):
                name, most = self.info["base_model"], limit or "any number of"
                raise BadRequestError(
                    f"the reward model {name} reads 1 to {most} tokens, input {number} has "
                    f"{len(tokens)}"
                )
        return APIFuture(
            self._driver.submit(
                "classify", self.model_id, [[int(token) for token in tokens] for tokens in inputs]
            )
        )

    def release(self) -> None:
        """Free the model's memory now, not when the client is collected."""
        self._finalizer()
