"""Provide ClassifierClient: scores of a published reward model that lives in this process and on
the ranks that serve it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.client.api_future import APIFuture, AwaitableClient
from rl.client.service_context import ServiceContext
from rl.errors import BadRequestError


class ClassifierClient(AwaitableClient):
    """Score token sequences with a reward model (an extension of Tinker's API). Its memory is freed
    when the client is collected.
    """

    def __init__(self, context: ServiceContext, name: str):
        self.model_id = context.next_model_id()
        created = context.driver.submit("load_classifier", self.model_id, name)
        super().__init__(context, created, "free_model", self.model_id)

    @property
    def info(self) -> dict[str, Any]:
        """Return the model's details: base_model, arch, tokenizer, max_context, parameters."""
        return self._future.result()

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
