"""The model's own chat template, token for token: what `tokenizer.apply_chat_template` gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.errors import UserError
from rl.renderers.base import Renderer, Span, TrainOn, trained_indices, weighted_example
from rl.types import Message, ModelInput

_PROBE = "zqPROBEqz"  # a content that no template writes by itself
_THOUGHT_BEGIN, _THOUGHT_END = "<think>", "</think>"


class ChatTemplateRenderer(Renderer):
    """Renders with the tokenizer's jinja template; `template_settings` reach it (`enable_thinking=False`, `tools=...`).

    The template writes any BOS itself, so its text is tokenised without adding special tokens.
    A model that thinks aloud: `parse_response` splits "<think>...</think>" off the content into `reasoning_content`, the field
    that such templates read back. A thought that never ended stays in the content.
    """

    def __init__(self, tokenizer: Any, **template_settings: Any):
        super().__init__(tokenizer)
        if tokenizer.chat_template is None:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: use the renderer 'role_colon' or 'plain' for "
                "a base model, or set tokenizer.chat_template"
            )
        self.template_settings = template_settings
        self._thinks = _THOUGHT_END in str(tokenizer.chat_template)
        self._end_of_turn = self._find_end_of_turn()

    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        return ModelInput.from_ints(self.encode(self._text(messages, generation=True)))

    def build_supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        """See `Renderer`. What the template writes after an end-of-turn mark (a line break) has weight 0.

        Raises UserError where the template gives a message another text than the model would have seen when it wrote it.
        """
        text = self._text(messages, generation=False)
        spans = [self._span(text, messages, index) for index in trained_indices(messages, train_on)]
        cuts = [cut for span in spans for cut in span]
        pieces = self.encode_in_pieces(text, cuts)
        return weighted_example([(piece, float(number % 2)) for number, piece in enumerate(pieces)])

    def get_stop_sequences(self) -> list[int]:
        ids = [self.tokenizer.convert_tokens_to_ids(self._end_of_turn)]
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or eos in ids else [*ids, eos]

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        stops = set(self.get_stop_sequences())
        end = next((position for position, token in enumerate(tokens) if token in stops), len(tokens))
        # clean-up would change spaces before punctuation: the text of the tokens is wanted as it is
        text = self.tokenizer.decode(list(tokens[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        message: Message = {"role": "assistant", "content": text}
        if self._thinks and _THOUGHT_END in text:
            thought, _, content = text.partition(_THOUGHT_END)
            message["content"] = content.lstrip("\n")
            message["reasoning_content"] = thought.strip().removeprefix(_THOUGHT_BEGIN).strip("\n")
        return message, end < len(tokens)

    def _text(self, messages: Sequence[Message], generation: bool) -> str:
        if not messages:
            raise UserError("there is no message to render; at least one of the user is needed")
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation, **self.template_settings
        )
        assert isinstance(text, str)
        return text

    def _find_end_of_turn(self) -> str:
        """The special token that the template writes after an assistant's content."""
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        after = self._text(conversation, generation=False).partition(_PROBE)[2]
        special = set(self.tokenizer.all_special_ids) | {int(i) for i in self.tokenizer.added_tokens_decoder}
        for token in self.encode(after):
            if token in special:
                return str(self.tokenizer.convert_ids_to_tokens(token))
        raise UserError(
            f"the chat template of {self.tokenizer.name_or_path!r} ends an assistant's message with {after!r}, which holds no "
            "special token, so nothing tells the sampler to stop; use the renderer 'role_colon'"
        )

    def _span(self, text: str, messages: Sequence[Message], index: int) -> Span:
        """Where in `text` the model's own writing of message `index` begins and ends (after its end-of-turn mark)."""
        prompt = self._text(messages[:index], generation=True)
        begin = len(prompt) if text.startswith(prompt) else self._begin_of_content(text, messages, index)
        content = messages[index].get("content")
        at = text.find(content.strip(), begin) if isinstance(content, str) else -1
        after = at + len(content.strip()) if at >= 0 and isinstance(content, str) else begin
        end = text.find(self._end_of_turn, after)
        if end < 0:
            mark, there = self._end_of_turn, text[begin:][:80]
            raise UserError(f"the chat template does not end message {index} with {mark!r}: {there!r}")
        return begin, end + len(self._end_of_turn)

    def _begin_of_content(self, text: str, messages: Sequence[Message], index: int) -> int:
        """Where message `index` begins, in a template that writes history otherwise than it prompts (without thoughts)."""
        if index == len(messages) - 1:
            prompt = self._text(messages[:-1], generation=True)
            raise UserError(
                "the chat template renders this conversation otherwise than the prompt of its last message, so the model would "
                f"learn from a prompt that it never sees: the prompt ends in {prompt[-80:]!r}, "
                f"the conversation in {text[-160:]!r}. Leave out thoughts, or pass the template setting that keeps them"
            )
        probed = [*messages[:index], {**messages[index], "content": _PROBE}, *messages[index + 1 :]]
        before, _, after = self._text(probed, generation=False).partition(_PROBE)
        if not (text.startswith(before) and text.endswith(after)):
            raise UserError(f"the chat template mixes message {index} with others: train on 'last_assistant' alone")
        return len(before)
