"""Render with the model's chat template, token for token like `tokenizer.apply_chat_template`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from rl.errors import UserError
from rl.images import get_image_reader
from rl.renderers.image_parts import expand_images, iter_texts, place_images, prepare_for_template
from rl.renderers.renderer import (
    Renderer,
    Span,
    TrainOn,
    build_weighted_example,
    find_trained_messages,
    normalize_messages,
)
from rl.renderers.response_parsing import (
    CALL_BEGIN,
    CHANNEL,
    CHANNEL_TEXT,
    Tools,
    build_answer,
    find_thought_marks,
    make_call,
    parse_arguments,
    split_channels,
)
from rl.renderers.special_token_escaping import SpecialTokenEscaper
from rl.renderers.tool_call_formats import TAGGED_CALLS, ToolCallFormat, find_call_format
from rl.types import Message, Messages, ModelInput

_CALL_MARK = "<|call|>"  # ends a call in formats with channels
_PROBE = "zqPROBEqz"  # a content that no template contains
_NEXT_PROBE = "zqNEXTqz"
# roles with contents that templates may split or quote
_REWRITTEN_ROLES = ("assistant", "tool", "ipython", "function")
# variables of templates that are not settings of a request
_RESERVED_NAMES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "role",
    "content",
}


# The prompt format of Llama 3 as published by Meta (text conversations): contents unchanged, no
# date, no default system message.
_LLAMA3 = (
    "{{ '<|begin_of_text|>' }}"
    "{% for message in messages %}"
    "{% if message.get('tool_calls') %}{{ raise_exception('the template of llama3 for tokenizers "
    "without one writes no tool calls') }}"
    "{% endif %}"
    "{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + "
    "'<|end_header_id|>\n\n' }}"
    "{{ message.content + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
    "endif %}"
)
_LLAMA3_TOKENS = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}


def add_llama3_template(tokenizer: Any) -> Any:
    """Return a copy of the tokenizer with Llama 3's template, if the tokenizer has the special
    tokens of Llama 3 and no template.

    Otherwise return the tokenizer itself.
    """
    if tokenizer.chat_template is not None or not _LLAMA3_TOKENS <= {*tokenizer.get_added_vocab()}:
        return tokenizer
    templated = copy(tokenizer)
    templated.chat_template = _LLAMA3
    return templated


def apply_template(
    tokenizer: Any,
    messages: Messages,
    generation: bool,
    subject: str = "the model's chat template",
    remedy: str = "",
    **settings: Any,
) -> str:
    """Return the text that a chat template renders. Raises UserError, with `subject` and `remedy`,
    if the template fails.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation, **settings
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
            f"{subject} cannot render this conversation (roles {roles}): "
            f"{type(error).__name__}: {error}{remedy}"
        ) from error


def escape_messages(escaper: SpecialTokenEscaper, messages: Messages) -> list[Message]:
    """Return messages with special tokens escaped; the assistant's may contain markup."""
    return [
        escaper.escape(message, may_write_markup=message["role"] == "assistant")
        for message in messages
    ]


class ChatTemplateRenderer(Renderer):
    """Render with the tokenizer's jinja template; `template_settings` are passed to it
    (`enable_thinking=False`, `tools=...`).

    The template writes any BOS itself, so its text is tokenized without added special tokens.
    Special tokens in messages (and in the descriptions of tools) are text; assistant messages may
    contain words such as <think> that the template writes and the tokenizer does not treat as
    special.

    For a model that thinks, `parse_response` moves "<think>...</think>" from the content into
    `reasoning_content`, the field that such templates read, and calls in
    "<tool_call>...</tool_call>" into `tool_calls`. An unfinished thought or call and an invalid
    call stay in the content; such calls are listed in `unparsed_tool_calls`. Other formats of
    calls: see `rl.renderers.tool_call_formats`.

    GLM has no end-of-turn token: it writes the mark of the next role, <|user|>, or <|observation|>
    after a call. That mark ends an answer here, is trained with it, and is also the start of the
    next message.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = (), **template_settings: Any):
        template = str(tokenizer.chat_template)
        super().__init__(tokenizer, eos_token_ids, template_source=template)
        if tokenizer.chat_template is None:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: use the renderer "
                "'role_colon' or 'plain' for a base model, or set tokenizer.chat_template"
            )
        self.template_settings = template_settings
        outside = ("tools", "documents")  # settings with text from outside
        self._settings = {
            name: self.escaper.escape(value) if name in outside else value
            for name, value in template_settings.items()
        }
        self._thought_marks = find_thought_marks(template)
        tagged = TAGGED_CALLS if CALL_BEGIN in template else None
        self._call_format = find_call_format(template) or tagged
        self._has_channels = f"{CHANNEL}final{CHANNEL_TEXT}" in template
        self._image_reader = get_image_reader(tokenizer)
        self._contents_in_parts = self._image_reader is not None and not self._accepts_strings()
        self._end_begins_next = False  # whether an answer ends with the mark of the next message
        self._end_of_turn = self._find_end_of_turn()
        self._end_id = tokenizer.convert_tokens_to_ids(self._end_of_turn)
        form = self._call_format
        self._call_mark = _CALL_MARK if self._has_channels else None if form is None else form.end
        self._call_id: int | None = None
        self.end_tokens |= {self._end_id}
        if self._call_mark in self.escaper.control:
            self._call_id = call_id = int(tokenizer.convert_tokens_to_ids(self._call_mark))
            self.end_tokens |= {call_id}
        self._check_parsing()

    def build_generation_prompt(self, messages: Messages) -> ModelInput:
        """Return the prompt of the next assistant message, with images at their positions."""
        messages = self._escape_messages(messages)
        return place_images(
            self._encode(self._render_text(messages, generation=True)), messages, self._image_reader
        )

    def build_supervised_example(
        self, messages: Messages, train_on: TrainOn = "last_assistant"
    ) -> tuple[ModelInput, np.ndarray]:
        """Return N tokens and N weights; see `Renderer`. Text that the template writes after an
        end-of-turn token (a line break) has weight 0.

        Raises UserError if the template renders a message differently from the text that the model
        would have seen when it wrote the message.
        """
        messages = self._escape_messages(messages)
        text = self._render_example(messages)
        spans = [
            self._find_span(text, messages, index)
            for index in find_trained_messages(messages, train_on)
        ]
        cuts = [cut for span in spans for cut in span]
        pieces = self.encode_in_pieces(text, cuts)
        example, weights = build_weighted_example(
            [(piece, float(number % 2)) for number, piece in enumerate(pieces)]
        )
        return place_images(example.token_ids(), messages, self._image_reader), weights

    def thought_marks(self) -> tuple[str, str] | None:
        return None if self._has_channels else self._thought_marks

    def marks(self) -> tuple[str, ...]:
        if self._has_channels:
            return (CHANNEL, "<|end|>", "<|start|>assistant", *self.stops)
        return super().marks()

    def call_format(self) -> ToolCallFormat | None:
        return self._call_format

    def available_tools(self) -> Tools:
        return self.template_settings.get("tools") or ()

    def _parse_text(self, content: str) -> Message:
        if self._has_channels:
            return build_answer(*split_channels(content))
        return super()._parse_text(content)

    def with_end_mark(self, tokens: Sequence[int]) -> list[int]:
        before, ended = self._split_at_end(tokens)
        if ended and tokens[len(before)] == self._call_id:
            return list(tokens[: len(before) + 1])
        return super().with_end_mark(tokens)

    def extend_prompt(
        self,
        messages: Messages,
        seen: Sequence[int],
        answer: Sequence[int],
        new: Messages,
    ) -> ModelInput | None:
        """Extend the prompt; see `Renderer`. The text between the answer and the next prompt is
        determined with a probe in place of the answer.
        """
        if self._has_channels:
            return None  # gpt-oss removes thoughts from history and ends its messages differently
        message = self.parse_response(answer)[0]
        probe: Message = {**message, "content": _PROBE}
        before = self._escape_messages(messages)
        prompt = self._render_text(before, generation=True)
        text = self._render_text([*before, *self._escape_messages([probe, *new])], generation=True)
        at = text.find(_PROBE, len(prompt))
        if not text.startswith(prompt) or at < 0:
            return None
        thoughts = self.escaper.escape(
            str(message.get("reasoning_content") or ""), may_write_markup=True
        )
        between = text[len(prompt) : at]
        closing = None if self._thought_marks is None else self._thought_marks[1]
        if closing is not None and closing in self.decode(answer) and closing not in between:
            return None  # the template also removes an empty thought
        if thoughts not in between:
            return None
        if between.strip() and "reasoning_content" not in message:
            return None
        if (
            self._call_format is not None
            and message.get("tool_calls")
            and self._call_format.begin in between
        ):
            # Gemma 4 renders calls and their results before the text of the same message
            return None
        mark = self._end_mark(message) if self._end_begins_next else self._end_of_turn
        end = text.find(mark, at)
        ended = bool(answer) and answer[-1] in self.end_tokens
        if end < 0 or (
            self._end_begins_next and not self._next_message_follows(text[at:end], answer, mark)
        ):
            return None
        tail = text[end + len(mark) :] if ended else text[end:]
        following = place_images(
            self._encode(tail, continuing=True), self._escape_messages(new), self._image_reader
        )
        begin = len(seen) + len(answer)
        return ModelInput.of(
            [*seen, *answer, *following.token_ids()],
            [(begin + at, image) for at, image in following.images_with_positions()],
        )

    def with_tools(self, tools: Tools) -> ChatTemplateRenderer:
        if not tools:
            return self
        if "tools" not in str(self.tokenizer.chat_template):
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path!r} has no place for tools: use "
                "a model with a template that has a place for tools, or "
                "the renderer 'role_colon', which describes the tools in text"
            )
        return self._copy_with(tools=list(tools))

    def with_settings(self, settings: Mapping[str, Any]) -> ChatTemplateRenderer:
        if not settings:
            return self
        for name in settings:
            if name in _RESERVED_NAMES or not re.search(
                rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)
            ):
                model = self.tokenizer.name_or_path
                raise UserError(
                    f"the chat template of {model!r} has no setting {name!r}, so it would have no "
                    "effect: leave it out"
                )
        return self._copy_with(**settings)

    def _copy_with(self, **settings: Any) -> ChatTemplateRenderer:
        """Return this renderer with further settings of the template."""
        renderer = ChatTemplateRenderer(
            self.tokenizer, self.end_tokens, **{**self.template_settings, **settings}
        )
        # Reuse the renamed tokenizer: it takes a second to build, and each group of episodes with
        # tools calls `with_tools`.
        renderer.escaper, renderer.stops = self.escaper, self.stops
        return renderer

    def _escape_messages(self, messages: Messages) -> list[Message]:
        """Return the messages as text (and images) with escaped special tokens."""
        read = normalize_messages(messages, allow_images=self._image_reader is not None)
        if any(message.get("tool_calls") for message in read) and self._encodes_arguments:
            read = [parse_arguments(message) for message in read]
        return escape_messages(self.escaper, read)

    @cached_property
    def _encodes_arguments(self) -> bool:
        """Return whether the template encodes the arguments of calls as JSON, even a text, which
        some templates write as it is.
        """
        call: Message = {"role": "assistant", "content": ""}
        call["tool_calls"] = [make_call("f", f'{{"{_PROBE}": 1}}')]
        conversation = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "b"}]
        try:
            return f'"{_PROBE}"' not in self._render_text(conversation, generation=False)
        except UserError:  # the template accepts no texts
            return True

    def _render_text(self, messages: Messages, generation: bool) -> str:
        """Return the rendered text of escaped messages. Raises UserError if the template fails or
        leaves out a message.
        """
        if not messages:
            raise UserError("got no messages to render; at least a user message is required")
        text = apply_template(
            self.tokenizer,
            prepare_for_template(messages, all_in_parts=self._contents_in_parts),
            generation,
            **self._settings,
        )
        for number, message in enumerate(messages):
            missing = [
                content_text for content_text in iter_texts(message) if content_text not in text
            ]
            if message["role"] not in _REWRITTEN_ROLES and missing:
                role, content = message["role"], missing[0][:60]
                raise UserError(
                    f"the model's chat template leaves out message {number}, of role {role!r}: "
                    f"{content!r}; use a role that the "
                    "template supports (system, user, assistant), or the renderer 'role_colon'"
                )
        return (
            text
            if self._image_reader is None
            else expand_images(text, messages, self._image_reader)
        )

    def _render_example(self, messages: Messages) -> str:
        """Return the rendered text of a conversation and the mark that ends its last message."""
        text = self._render_text(messages, generation=False)
        return text + self._end_mark(messages[-1]) if self._end_begins_next else text

    def _accepts_strings(self) -> bool:
        """Return whether the template accepts contents that are strings; some templates of
        vision-language models accept only lists of parts.
        """
        conversation = [{"role": "user", "content": _PROBE}]
        try:
            return _PROBE in apply_template(self.tokenizer, conversation, True, **self._settings)
        except UserError:
            return False

    def _end_mark(self, message: Message) -> str:
        """Return the mark that ends the answer `message`, after calls that of calls."""
        calls = message.get("tool_calls")
        return self._call_mark if calls and self._call_mark is not None else self._end_of_turn

    def _next_message_follows(self, between: str, answer: Sequence[int], mark: str) -> bool:
        """Return whether the next message starts right after the answer with `mark`. `between` is
        the rendered text between the answer's content and `mark`; the answer must not end with
        another mark.
        """
        expected = self.tokenizer.convert_tokens_to_ids(mark)
        announced_other = bool(answer) and answer[-1] in self.end_tokens and answer[-1] != expected
        return not announced_other and not any(word in between for word in self.escaper.control)

    def _find_end_of_turn(self) -> str:
        """Return the special token that the template writes after an assistant's content; for GLM,
        the mark before the next user message. Raises UserError if none exists.
        """
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        after = self._render_text(conversation, generation=False).partition(_PROBE)[2]
        if (mark := self._first_special(after)) is not None:
            return mark
        if self._call_format is not None and self._call_format.name == "glm":
            if (mark := self._first_special(self._text_after_answer)) is not None:
                self._end_begins_next = True
                return mark
        raise UserError(
            f"the chat template of {self.tokenizer.name_or_path!r} ends an assistant's message "
            f"with {after!r}, which holds no "
            "special token, so the sampler could not stop; use the renderer 'role_colon'"
        )

    def _first_special(self, text: str) -> str | None:
        """Return the first special token of a text, or None."""
        special = {*self.tokenizer.all_special_ids, *map(int, self.tokenizer.added_tokens_decoder)}
        special_id = next((token for token in self._encode(text) if token in special), None)
        return None if special_id is None else str(self.tokenizer.convert_ids_to_tokens(special_id))

    def _check_parsing(self) -> None:
        """Raise UserError if the template wraps an answer in marks that this class does not parse,
        because rewards would see the marks.
        """
        question: list[Message] = [{"role": "user", "content": "a"}]
        prompt, text = (
            self._render_text(question, True),
            self._render_text([*question, {"role": "assistant", "content": _PROBE}], False),
        )
        written = text[len(prompt) :].partition(self._end_of_turn)[0]
        if text.startswith(prompt) and str(self._parse_text(written)["content"]).strip() != _PROBE:
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path!r} writes an answer as "
                f"{written!r}, an unsupported form: "
                "rewards would read its marks; use the renderer 'role_colon'"
            )

    @cached_property
    def _text_after_answer(self) -> str:
        """Return the text that the template writes between an answer and the next user's text."""
        conversation: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _PROBE},
            {"role": "user", "content": _NEXT_PROBE},
        ]
        text = self._render_text(conversation, generation=False)
        return text.partition(_PROBE)[2].partition(_NEXT_PROBE)[0]

    def _find_span(self, text: str, messages: Messages, index: int) -> Span:
        """Return the start and end in `text` of the part of message `index` that the model writes,
        including its end-of-turn mark. Raises UserError if the part cannot be located.
        """
        if index < len(messages) - 1 and self._end_of_turn not in self._text_after_answer:
            raise UserError(
                "the chat template ends an answer that other messages follow with another mark "
                f"than {self._end_of_turn!r}, and a model would learn "
                "that mark: train only on 'last_assistant'"
            )
        prompt = self._render_text(messages[:index], generation=True)
        begin = (
            len(prompt)
            if text.startswith(prompt)
            else self._find_content_start(text, messages, index)
        )
        content = messages[index]["content"].strip()
        at = text.find(content, begin)
        after = at + len(content) if at >= 0 else begin
        marks = {self._end_of_turn, self._end_mark(messages[index])}
        if at >= 0 and any(mark in text[begin:at] for mark in marks):
            # The template has changed the content (removed a thought), and a later message has the
            # same text; or it writes the message's calls before its content.
            after = len(text) - len(self._split_at_content(text, messages, index)[1])
        ends = sorted((at, mark) for mark in marks if (at := text.find(mark, after)) >= 0)
        end, mark = ends[0] if ends else (-1, self._end_of_turn)
        if end < 0:
            excerpt = text[begin:][:80]
            raise UserError(
                f"the chat template does not end message {index} with {mark!r}: {excerpt!r}"
            )
        return begin, end + len(mark)

    def _find_content_start(self, text: str, messages: Messages, index: int) -> int:
        """Return the start of message `index` for a template that renders history differently from
        prompts (without thoughts). Raises UserError if the start is ambiguous.
        """
        if index == len(messages) - 1:
            prompt = self._render_text(messages[:-1], generation=True)
            raise UserError(
                "the chat template renders this conversation differently from the prompt of its "
                "last message, so the model would learn from a prompt that it never sees: the "
                f"prompt ends in {prompt[-80:]!r}, the conversation in {text[-160:]!r}. Leave out "
                "thoughts, or pass the template setting that keeps them"
            )
        return len(self._split_at_content(text, messages, index)[0])

    def _split_at_content(self, text: str, messages: Messages, index: int) -> tuple[str, str]:
        """Return the parts of `text` before and after the content of message `index`. Raises
        UserError if they depend on the content.
        """
        probed = [*messages[:index], {**messages[index], "content": _PROBE}, *messages[index + 1 :]]
        before, _, after = self._render_example(probed).partition(_PROBE)
        if not (text.startswith(before) and text.endswith(after)):
            raise UserError(
                f"the chat template mixes message {index} with others: train only on "
                "'last_assistant'"
            )
        return before, after


class ConversationRenderer:
    """Render conversations with `tokenizer`'s chat template, token for token like
    `apply_chat_template`.

    Special tokens in messages are encoded as text, so that an answer cannot imitate another turn
    (`rl.renderers.special_token_escaping`). `name`: the model's name, for errors.
    """

    def __init__(self, tokenizer: Any, name: str):
        self.tokenizer, self.name = tokenizer, name
        self.escaper = SpecialTokenEscaper(tokenizer, str(tokenizer.chat_template))

    def build_conversation(self, messages: Messages) -> list[int]:
        """Return the tokens of the conversation. Raises UserError if the template cannot render it,
        or if it has images.
        """
        text = apply_template(
            self.tokenizer,
            escape_messages(self.escaper, normalize_messages(messages)),
            False,
            f"the chat template of the reward model {self.name}",
            ". Leave out what the template does not support (a system prompt, tools), or use "
            "another reward model",
        )
        return self.escaper.encode(text)
