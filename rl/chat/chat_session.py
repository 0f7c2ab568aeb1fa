"""Hold a conversation with a model, and sample its answers a few tokens at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl.client import SampleStream, SamplingClient
from rl.data import PromptTemplate
from rl.errors import UserError
from rl.renderers import Renderer, parse_partial_answer, prompt_opens_thoughts
from rl.types import Message, ModelInput, SampledSequence, SamplingParams

_STEPS = 4  # engine steps between two looks at an answer


@dataclass
class ChatTurn:
    """Hold a message of the user and the answer to it, which may still be sampled.

    message_id    number of the message, the same in all sessions of a chat
    text          the message as it was typed
    user          the message of the prompt: `text` in the prompt template
    system        the system prompt before the conversation; None: none
    first_turn    index of the oldest turn that the prompt includes
    sequence      the tokens sampled so far
    visible       the certain part of the answer so far
    answer        the parsed answer; None while it is sampled
    outcome       "", or why the answer is incomplete: "cut off" or "stopped"
    """

    message_id: int
    text: str
    user: Message
    system: str | None
    first_turn: int
    prompt: list[int]
    within_thoughts: bool
    ticket: int
    sequence: SampledSequence = field(default_factory=lambda: SampledSequence([], []))
    visible: Message = field(default_factory=lambda: {"role": "assistant", "content": ""})
    answer: Message | None = None
    outcome: str = ""


class ChatSession:
    """Hold a conversation with a model.

    The prompt of a turn is the exact tokens of the previous turn plus the new message, if the
    renderer can extend them, as in training. Prompts that leave too little room in the model's
    context omit the oldest turns. `template` is applied to each message of the user, and has the
    system prompt. `params.max_tokens` must be set.
    """

    _names = itertools.count()  # of conversations in the sampler's cache

    def __init__(
        self,
        name: str,
        client: SamplingClient,
        renderer: Renderer,
        params: SamplingParams,
        template: PromptTemplate,
    ):
        self.name, self.client, self.renderer = name, client, renderer
        self.params, self.template = params, template
        self.turns: list[ChatTurn] = []
        self._stream = SampleStream(client)
        self._cache_name = f"chat-{next(ChatSession._names)}"

    def start_turn(self, text: str, message_id: int) -> ChatTurn:
        """Submit the message `text`; call `advance` until the turn has an answer.

        If the last turn has the same id, the new turn replaces it once it has an answer. Raises
        ValueError if the message cannot be rendered, or exceeds the model's context.
        """
        user = self.template([{"role": "user", "content": text}], {})[-1]
        prompt, first_turn = self._build_prompt(self._list_turns_before(message_id), user)
        limit = self.client.info["max_context"]
        assert self.params.max_tokens is not None
        # the last sampled token is never read, so it may exceed the context
        room = self.params.max_tokens if limit is None else limit + 1 - len(prompt)
        params = replace(self.params, max_tokens=min(self.params.max_tokens, room))
        request = self.client.make_request(ModelInput.from_ints(prompt), 1, params)
        return ChatTurn(
            message_id,
            text,
            user,
            self.template.system,
            first_turn,
            prompt,
            prompt_opens_thoughts(self.renderer, prompt),
            self._stream.add(replace(request, conversation=self._cache_name)),
        )

    def advance(self, turn: ChatTurn) -> None:
        """Sample a few more tokens of the answer. Raises the error of a sample that failed."""
        output = self._stream.run_steps(_STEPS, partial_tickets=[turn.ticket])
        response = output.finished.get(turn.ticket)
        if isinstance(response, Exception):
            raise response
        if response is not None:
            (turn.sequence,) = response.sequences
            self._finish(turn)
        elif turn.ticket in output.partial_output:
            turn.sequence = output.partial_output[turn.ticket][0]
            turn.visible = self._parse_visible(turn, ended=False)

    def stop_turn(self, turn: ChatTurn) -> None:
        """Stop sampling; the tokens so far are the answer.

        Raises ValueError if there are none: then the conversation is unchanged.
        """
        self.drop_turn(turn)
        if not turn.sequence.tokens:
            raise ValueError("stopped before the first token: the conversation is unchanged")
        self._finish(turn, stopped=True)

    def drop_turn(self, turn: ChatTurn) -> None:
        """Stop sampling, and forget the message."""
        self._stream.drop(turn.ticket)

    def undo(self, message_id: int) -> None:
        """Remove the turn of this message, if it is the last."""
        self.turns = self._list_turns_before(message_id)

    def reset(self) -> None:
        """Begin a new conversation. The system prompt stays."""
        self.turns.clear()
        self._stream.end_conversation(self._cache_name)

    def close(self) -> None:
        """Free what the sampler holds of the conversation."""
        self._stream.close()

    def get_messages(self) -> list[Message]:
        """Return the conversation so far as it was typed, without template and suffix. It begins
        with the system prompt of its first turn.
        """
        messages = _start_messages(self.turns[0].system if self.turns else self.template.system)
        for turn in self.turns:
            assert turn.answer is not None
            messages += [{"role": "user", "content": turn.text}, turn.answer]
        return messages

    def to_row(self) -> dict[str, Any]:
        """Return the conversation as a row of a data set: the model's name and `messages`."""
        return {"model": self.name, "messages": self.get_messages()}

    def _finish(self, turn: ChatTurn, stopped: bool = False) -> None:
        """Parse the whole answer, and add the turn to the conversation."""
        turn.answer, is_complete = self.renderer.parse_response(turn.sequence.tokens)
        turn.visible = self._parse_visible(turn, ended=True)
        turn.outcome = "stopped" if stopped else "" if is_complete else "cut off"
        self.turns = [*self._list_turns_before(turn.message_id), turn]

    def _list_turns_before(self, message_id: int) -> list[ChatTurn]:
        """Return the turns without the last, if that is the turn of this message."""
        is_last = bool(self.turns) and self.turns[-1].message_id == message_id
        return self.turns[:-1] if is_last else list(self.turns)

    def _parse_visible(self, turn: ChatTurn, ended: bool) -> Message:
        return parse_partial_answer(
            self.renderer, turn.sequence.tokens, turn.within_thoughts, ended=ended
        )

    def _build_prompt(self, turns: list[ChatTurn], user: Message) -> tuple[list[int], int]:
        """Return (the tokens of `user` after `turns`, the index of the oldest turn in them).

        At least half of the context, or `max_tokens`, is left to the answer while turns can be
        omitted. Raises UserError if the message alone exceeds the context.
        """
        limit = self.client.info["max_context"]
        assert self.params.max_tokens is not None
        longest = None if limit is None else limit + 1 - min(self.params.max_tokens, limit // 2)
        first_turn = 0
        if turns:
            first_turn = turns[-1].first_turn
            prompt = self._extend_prompt(turns, user)
            if prompt is not None and (longest is None or len(prompt) <= longest):
                return prompt, first_turn
        while True:
            messages = [*_join_messages(self.template.system, turns[first_turn:]), user]
            prompt = self.renderer.build_generation_prompt(messages).to_ints()
            if longest is None or len(prompt) <= longest:
                return prompt, first_turn
            if first_turn == len(turns):
                break
            first_turn += 1
        if len(prompt) > limit:
            raise UserError(
                f"the message makes a prompt of {len(prompt)} tokens with the system prompt, and "
                f"the context of {self.name} holds {limit}: send a shorter message"
            )
        return prompt, first_turn

    def _extend_prompt(self, turns: list[ChatTurn], user: Message) -> list[int] | None:
        """Return the tokens of the last turn and the new message; None if that is impossible, or if
        the system prompt has changed.
        """
        previous = turns[-1]
        if previous.system != self.template.system or not previous.sequence.tokens:
            return None
        messages = _join_messages(previous.system, turns[previous.first_turn :])[:-1]
        prompt = self.renderer.extend_prompt(
            messages, previous.prompt, previous.sequence.tokens, [user]
        )
        return None if prompt is None else prompt.to_ints()


def _start_messages(system: str | None) -> list[Message]:
    return [] if system is None else [{"role": "system", "content": system}]


def _join_messages(system: str | None, turns: Sequence[ChatTurn]) -> list[Message]:
    """Return the messages of prompts after the system prompt."""
    messages = _start_messages(system)
    for turn in turns:
        assert turn.answer is not None
        messages += [turn.user, turn.answer]
    return messages
