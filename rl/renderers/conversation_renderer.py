"""Render a whole conversation for a published reward model with its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.errors import UserError
from rl.renderers.renderer import normalize_messages
from rl.renderers.special_token_escaping import SpecialTokenEscaper
from rl.types import Message


class ConversationRenderer:
    """Render conversations with `tokenizer`'s chat template, token for token like
    `apply_chat_template`.

    Special tokens in messages are encoded as text, so that an answer cannot imitate another turn
    (`rl.renderers.special_token_escaping`). `name`: the model's name, for errors.
    """

    def __init__(self, tokenizer: Any, name: str):
        self.tokenizer, self.name = tokenizer, name
        self.escaper = SpecialTokenEscaper(tokenizer, str(tokenizer.chat_template))

    def build_conversation(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the conversation. Raises UserError if the template cannot render it,
        or if it has images.
        """
        from jinja2 import TemplateError

        read = normalize_messages(messages)
        covered = [
            self.escaper.escape(message, may_write_markup=message["role"] == "assistant")
            for message in read
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                covered, tokenize=False, add_generation_prompt=False
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            roles = [message["role"] for message in read]
            raise UserError(
                f"the chat template of the reward model {self.name} cannot render this "
                f"conversation (roles {roles}): "
                f"{type(error).__name__}: {error}. Leave out what the template does not support (a "
                "system prompt, tools), or use another reward model"
            ) from error
        return self.escaper.encode(text)
