"""The model's own chat template, token for token: what `tokenizer.apply_chat_template` gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rl.errors import UserError
from rl.images import reader_of
from rl.renderers.base import Renderer, Span, TrainOn, texts, trained_indices, weighted_example
from rl.renderers.call_forms import CallForm, form_of
from rl.renderers.parsing import (
    CALL_BEGIN,
    CHANNEL,
    CHANNEL_TEXT,
    split_calls,
    split_channels,
    split_thoughts,
    thought_marks,
)
from rl.renderers.pictures import expanded, for_template, located, written_texts
from rl.types import Message, ModelInput

_CALL_MARK = "<|call|>"  # what ends a call where messages have channels
_PROBE = "zqPROBEqz"  # a content that no template writes by itself
_NEXT = "zqNEXTqz"
# roles whose contents templates may take apart or quote
_WRITES_ITS_OWN = ("assistant", "tool", "ipython", "function")
# names that a template reads and that are no settings of a request
_NO_SETTINGS = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "role",
    "content",
}


class ChatTemplateRenderer(Renderer):
    """Renders with the tokenizer's jinja template; `template_settings` reach it
    (`enable_thinking=False`, `tools=...`).

    The template writes any BOS itself, so its text is tokenised without adding special tokens.
    Special tokens in messages (and in the descriptions of tools) are text; the assistant's may hold
    what the template itself writes and the tokenizer does not call special, such as <think>.
    A model that thinks aloud: `parse_response` splits "<think>...</think>" off the content into
    `reasoning_content`, the field that such templates read back, and calls in
    "<tool_call>...</tool_call>" into `tool_calls`. A thought or call that never ended, and a call
    that is none, stays in the content; calls are then named in `unparsed_tool_calls`. Other forms
    of calls: see `rl.renderers.call_forms`.
    GLM ends no answer by itself: it writes the mark of who speaks next, <|user|>, or
    <|observation|> after a call. That mark ends an answer here, is learnt with it, and is the
    beginning of the next message at once.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = (), **template_settings: Any):
        super().__init__(tokenizer, eos_token_ids, written=str(tokenizer.chat_template))
        if tokenizer.chat_template is None:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: use the renderer 'role_colon' or 'plain' for "
                "a base model, or set tokenizer.chat_template"
            )
        self.template_settings = template_settings
        outside = ("tools", "documents")  # settings that hold other people's text
        self._settings = {
            name: self.shield.cover(value) if name in outside else value
            for name, value in template_settings.items()
        }
        self._thinks = thought_marks(str(tokenizer.chat_template))
        self._calls_tools = CALL_BEGIN in str(tokenizer.chat_template)
        self._form = form_of(str(tokenizer.chat_template))
        self._channels = f"{CHANNEL}final{CHANNEL_TEXT}" in str(tokenizer.chat_template)
        self._reader = reader_of(tokenizer)
        self._in_parts = self._reader is not None and not self._writes_strings()
        self._end_begins_next = False  # whether an answer ends in the mark of the next message
        self._end_of_turn = self._find_end_of_turn()
        self._end_id: int = tokenizer.convert_tokens_to_ids(self._end_of_turn)
        self._call_mark = (
            _CALL_MARK if self._channels else self._form.end if self._form is not None else None
        )
        known = self._call_mark in self.shield.control
        self._call_id: int | None = (
            tokenizer.convert_tokens_to_ids(self._call_mark) if known else None
        )
        self.ends |= {self._end_id} if self._call_id is None else {self._end_id, self._call_id}
        self._check_read_back()

    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        messages = self._covered(messages)
        return located(self._encode(self._text(messages, generation=True)), messages, self._reader)

    def build_supervised_example(
        self, messages: Sequence[Message], train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        """See `Renderer`. What the template writes after an end-of-turn mark (a line break) has
        weight 0.

        Raises UserError where the template gives a message another text than the model would have
        seen when it wrote it.
        """
        messages = self._covered(messages)
        text = self._text(messages, generation=False)
        if self._end_begins_next:
            text += self._next_mark(messages[-1])
        spans = [self._span(text, messages, index) for index in trained_indices(messages, train_on)]
        cuts = [cut for span in spans for cut in span]
        pieces = self.encode_in_pieces(text, cuts)
        example, weights = weighted_example(
            [(piece, float(number % 2)) for number, piece in enumerate(pieces)]
        )
        return located(example.flat(), messages, self._reader), weights

    def get_stop_sequences(self) -> list[int]:
        return [self._end_id, *sorted(self.ends - {self._end_id})]

    def thought_marks(self) -> tuple[str, str] | None:
        return None if self._channels else self._thinks

    def marks(self) -> tuple[str, ...]:
        if self._channels:
            return (CHANNEL, "<|end|>", "<|start|>assistant")
        call = (
            (self._form.begin,)
            if self._form is not None
            else (CALL_BEGIN,)
            if self._calls_tools
            else ()
        )
        return (*(self._thinks or ()), *call)

    def call_form(self) -> CallForm | None:
        return self._form

    def offered(self) -> Sequence[Mapping[str, Any]]:
        return self.template_settings.get("tools") or ()

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        before, ended = self._until_end(tokens)
        return self._read(self._decode(before)), ended

    def _read(self, content: str) -> Message:
        """What an assistant wrote, its end mark left out, as a message."""
        message: Message = {"role": "assistant", "content": content}
        if self._channels:
            content, thoughts, calls, unparsed = split_channels(content)
            message |= {"content": content} | (
                {"reasoning_content": thoughts} if thoughts is not None else {}
            )
            message |= {"tool_calls": calls} if calls else {}
            return message | ({"unparsed_tool_calls": unparsed} if unparsed else {})
        if self._thinks is not None:
            content, thoughts = split_thoughts(content, self._thinks)
            if thoughts is not None:
                message |= {"content": content, "reasoning_content": thoughts}
        if self._calls_tools or self._form is not None:
            take = split_calls if self._form is None else self._form.take
            content, calls, unparsed = take(content, self.template_settings.get("tools") or ())
            message["content"] = content
            message |= {"tool_calls": calls} if calls else {}
            message |= {"unparsed_tool_calls": unparsed} if unparsed else {}
        return message

    def finished(self, tokens: Sequence[int]) -> list[int]:
        before, ended = self._until_end(tokens)
        if ended and tokens[len(before)] == self._call_id:
            return list(tokens[: len(before) + 1])
        return [*before, self._end_id] if ended else before

    def bridge(
        self,
        messages: Sequence[Message],
        seen: Sequence[int],
        answer: Sequence[int],
        new: Sequence[Message],
    ) -> ModelInput | None:
        """See `Renderer`. What the template writes between the answer and its next one is found
        with another answer in its place.
        """
        if self._channels:
            return None  # gpt-oss leaves thoughts out of history, and ends what is in it otherwise
        said = self.parse_response(answer)[0]
        probe: Message = {**said, "content": _PROBE}
        before = self._covered(messages)
        prompt = self._text(before, generation=True)
        text = self._text([*before, *self._covered([probe, *new])], generation=True)
        at = text.find(_PROBE, len(prompt))
        if not text.startswith(prompt) or at < 0:
            return None
        thoughts = self.shield.cover(
            str(said.get("reasoning_content") or ""), may_write_markup=True
        )
        between = text[len(prompt) : at]
        if (
            self._thinks is not None
            and self._thinks[1] in self._decode(answer)
            and self._thinks[1] not in between
        ):
            return None  # a thought that was empty is left out as well
        if (
            (thoughts not in between)
            if thoughts
            else bool(between.strip()) and "reasoning_content" not in said
        ):
            return None
        if self._form is not None and said.get("tool_calls") and self._form.begin in between:
            # Gemma 4 writes calls and what they gave before the words that were said beside them
            return None
        mark = (
            self._end_of_turn
            if not self._end_begins_next
            else self._next_mark({**said, "role": "assistant"})
        )
        end = text.find(mark, at)
        ended = bool(answer) and answer[-1] in self.ends
        if end < 0 or (self._end_begins_next and not self._goes_on(text[at:end], answer, mark)):
            return None
        tail = text[end + len(mark) :] if ended else text[end:]
        following = located(self._encode(tail, continuing=True), self._covered(new), self._reader)
        begin = len(seen) + len(answer)
        return ModelInput.of(
            [*seen, *answer, *following.flat()],
            [(begin + at, image) for at, image in following.placed()],
        )

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplateRenderer:
        if not tools:
            return self
        if "tools" not in str(self.tokenizer.chat_template):
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path!r} has no place for tools: take a model whose template has one, or "
                "the renderer 'role_colon', which describes them in words"
            )
        made = ChatTemplateRenderer(
            self.tokenizer, self.ends, **{**self.template_settings, "tools": list(tools)}
        )
        # an equal one, whose second tokenizer takes a second to make, for each group of episodes
        # with tools
        made.shield = self.shield
        return made

    def with_settings(self, settings: Mapping[str, Any]) -> ChatTemplateRenderer:
        if not settings:
            return self
        for name in settings:
            if name in _NO_SETTINGS or not re.search(
                rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)
            ):
                model = self.tokenizer.name_or_path
                raise UserError(
                    f"the chat template of {model!r} has no setting {name!r}, so it would change nothing: leave it out"
                )
        made = ChatTemplateRenderer(
            self.tokenizer, self.ends, **{**self.template_settings, **settings}
        )
        made.shield = self.shield
        return made

    def _covered(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as text (and images), with special tokens covered."""
        read = texts(messages, sees=self._reader is not None)
        return [
            self.shield.cover(message, may_write_markup=message["role"] == "assistant")
            for message in read
        ]

    def _text(self, messages: Sequence[Message], generation: bool) -> str:
        if not messages:
            raise UserError("there is no message to render; at least one of the user is needed")
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                for_template(messages, all_in_parts=self._in_parts),
                tokenize=False,
                add_generation_prompt=generation,
                **self._settings,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            roles = [message["role"] for message in messages]
            raise UserError(
                f"the model's chat template cannot render this conversation (roles {roles}): {type(error).__name__}: {error}"
            ) from error
        assert isinstance(text, str)
        for number, message in enumerate(messages):
            missing = [said for said in written_texts(message) if said not in text]
            if message["role"] not in _WRITES_ITS_OWN and missing:
                role, content = message["role"], missing[0][:60]
                raise UserError(
                    f"the model's chat template leaves out message {number}, of role {role!r}: {content!r}; give it a role that the "
                    "template knows (system, user, assistant), or take the renderer 'role_colon'"
                )
        return text if self._reader is None else expanded(text, messages, self._reader)

    def _writes_strings(self) -> bool:
        """Whether the template writes contents that are a text; some that see take lists of parts
        alone.
        """
        from jinja2 import TemplateError

        try:
            said = [{"role": "user", "content": _PROBE}]
            return _PROBE in str(
                self.tokenizer.apply_chat_template(
                    said, tokenize=False, add_generation_prompt=True, **self._settings
                )
            )
        except (TemplateError, TypeError):
            return False

    def _next_mark(self, message: Message) -> str:
        """The mark that an answer ends in which begins the next message at once."""
        return (
            self._call_mark
            if message.get("tool_calls") and self._call_mark is not None
            else self._end_of_turn
        )

    def _goes_on(self, between: str, answer: Sequence[int], mark: str) -> bool:
        """Whether the next message, `between` the answer's content and its `mark`, begins there,
        and as the answer said it would.
        """
        wanted = self.tokenizer.convert_tokens_to_ids(mark)
        said = bool(answer) and answer[-1] in self.ends and answer[-1] != wanted
        return not said and not any(word in between for word in self.shield.control)

    def _find_end_of_turn(self) -> str:
        """The special token that the template writes after an assistant's content; of GLM, before
        the user's next message.
        """
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        after = self._text(conversation, generation=False).partition(_PROBE)[2]
        if (mark := self._first_special(after)) is not None:
            return mark
        if self._form is not None and self._form.name == "glm":
            conversation.append({"role": "user", "content": _NEXT})
            between = (
                self._text(conversation, generation=False).partition(_PROBE)[2].partition(_NEXT)[0]
            )
            if (mark := self._first_special(between)) is not None:
                self._end_begins_next = True
                return mark
        raise UserError(
            f"the chat template of {self.tokenizer.name_or_path!r} ends an assistant's message with {after!r}, which holds no "
            "special token, so nothing tells the sampler to stop; use the renderer 'role_colon'"
        )

    def _first_special(self, text: str) -> str | None:
        special = set(self.tokenizer.all_special_ids) | {
            int(i) for i in self.tokenizer.added_tokens_decoder
        }
        found = next((token for token in self._encode(text) if token in special), None)
        return None if found is None else str(self.tokenizer.convert_ids_to_tokens(found))

    def _check_read_back(self) -> None:
        """UserError where the template writes an answer with more around it than is read here:
        rewards would see its marks.
        """
        asked: list[Message] = [{"role": "user", "content": "a"}]
        prompt, text = (
            self._text(asked, True),
            self._text([*asked, {"role": "assistant", "content": _PROBE}], False),
        )
        written = text[len(prompt) :].partition(self._end_of_turn)[0]
        if text.startswith(prompt) and str(self._read(written)["content"]).strip() != _PROBE:
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path!r} writes an answer as {written!r}, a form that is not known here, so "
                "that rewards would read its marks: use the renderer 'role_colon'"
            )

    @cached_property
    def _ends_history_otherwise(self) -> bool:
        """Whether an answer that is not the last ends in another mark (gpt-oss), which a model is
        not to learn.
        """
        said: list[Message] = [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}, {"role": "user", "content": _NEXT},
        ]  # fmt: skip
        return (
            self._end_of_turn
            not in self._text(said, False).partition(_PROBE)[2].partition(_NEXT)[0]
        )

    def _span(self, text: str, messages: Sequence[Message], index: int) -> Span:
        """Where in `text` the model's own writing of message `index` begins and ends (after its
        end-of-turn mark).
        """
        if index < len(messages) - 1 and self._ends_history_otherwise:
            raise UserError(
                f"the chat template ends an answer that others follow otherwise than with {self._end_of_turn!r}, and a model would learn "
                "that mark: train on 'last_assistant' alone"
            )
        prompt = self._text(messages[:index], generation=True)
        begin = (
            len(prompt)
            if text.startswith(prompt)
            else self._begin_of_content(text, messages, index)
        )
        content = messages[index]["content"].strip()
        at = text.find(content, begin)
        after = at + len(content) if at >= 0 else begin
        calls = bool(messages[index].get("tool_calls"))
        marks = {self._end_of_turn, *([self._call_mark] if calls and self._call_mark else [])}
        ends = sorted((at, mark) for mark in marks if (at := text.find(mark, after)) >= 0)
        end, mark = ends[0] if ends else (-1, self._end_of_turn)
        if end < 0:
            there = text[begin:][:80]
            raise UserError(
                f"the chat template does not end message {index} with {mark!r}: {there!r}"
            )
        return begin, end + len(mark)

    def _begin_of_content(self, text: str, messages: Sequence[Message], index: int) -> int:
        """Where message `index` begins, in a template that writes history otherwise than it prompts
        (without thoughts).
        """
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
            raise UserError(
                f"the chat template mixes message {index} with others: train on 'last_assistant' alone"
            )
        return len(before)
