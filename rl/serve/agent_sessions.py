"""Record the turns of an agent's session as a graph of exact token prefixes, and build their
`Trajectory`.

A turn holds the prompt (ids), the sample (ids, logprobs) and, for a chat, the messages. If the next
request of a session continues the messages of a turn, its prompt is the ids of that turn followed
by the new messages (`Renderer.extend_prompt`). Sampled tokens are never decoded and tokenized
again. A request that rewrites the history begins a branch.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl.renderers import Renderer, format_with_calls
from rl.rollout import Trajectory, Transition
from rl.serve.http_errors import HttpError
from rl.serve.scheduler import choose_evictions
from rl.types import Message, ModelInput, SampledSequence, SampleResponse, SamplingParams


class SamplingBackend(Protocol):
    """Sample from the models of a server: the interface that the OpenAI-style routes use.

    `tokenizer` and `renderer` wait until the model is loaded. UserError and ValueError are errors
    of the caller.
    """

    async def sample(
        self,
        model: str | None,
        prompt_ids: list[int],
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        owner: str,
        **options: Any,
    ) -> SampleResponse: ...

    def models(self, owner: str) -> Sequence[Any]: ...

    async def tokenizer(self, model: str | None, owner: str) -> Any: ...

    async def renderer(self, model: str | None, owner: str) -> Renderer: ...


@dataclass(slots=True)
class SampledTurn:
    """Hold a sample and its prompt.

    `messages`: the messages of the request, None for a prompt of ids; `answer`: the parsed message.
    """

    prompt: list[int]
    sequence: SampledSequence
    answer: Message
    is_complete: bool
    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    new_messages: Sequence[Message] = ()  # the messages since the turn that this turn continues

    @property
    def num_ids(self) -> int:
        """Return the number of ids of the prompt and the sample."""
        return len(self.prompt) + len(self.sequence.tokens)


@dataclass
class AgentSession:
    """Hold the turns of an episode. `run_once` returns the result of a request to its retries."""

    owner: str = ""
    turns: list[SampledTurn] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    num_ids: int = 0  # of the prompts and samples of all turns
    _turns_by_digest: dict[bytes, SampledTurn] = field(default_factory=dict)
    _results: dict[bytes, asyncio.Future[Any]] = field(default_factory=dict)
    _disconnected: set[bytes] = field(default_factory=set)

    # whether responses may go through a second forward pass, for top-k logprobs
    allows_rescoring = True

    def choose_backend(self, backend: SamplingBackend) -> Any:
        """Return what samples for the session, here the server's `backend`."""
        return backend

    # -------------------------------------------------------------------------------------- prompts

    def build_prompt(
        self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return the prompt ids of a chat: those of the longest turn that it continues, then the
        new messages; without such a turn, all messages rendered from the start.

        Clients drop the thoughts of assistant messages. They are restored here; the template
        decides whether to include them.
        """
        known, k, turn = self._find_continued_turn(messages, tools)
        if turn is not None and k < len(known):
            bridged = renderer.extend_prompt(
                known[: k - 1], turn.prompt, turn.sequence.tokens, known[k:]
            )
            if bridged is not None:
                return bridged.to_ints()
        return renderer.build_generation_prompt(known).to_ints()

    def _find_continued_turn(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], int, SampledTurn | None]:
        """Return the messages with the sampled assistant messages restored, the number of messages
        of the longest turn that they continue, and that turn.
        """
        full_messages, count, last = list(messages), 0, None
        for k, chain in enumerate(_digest_prefixes(messages, tools)):
            turn = self._turns_by_digest.get(chain)
            if turn is not None:
                full_messages[k], count, last = turn.answer, k + 1, turn
        return full_messages, count, last

    def record_turn(self, turn: SampledTurn, returned_message: Message | None = None) -> None:
        """Record a turn. `returned_message`: its message in the form in which a client sends it
        again.
        """
        if turn.messages is not None:
            turn.answer = _omit(turn.answer, "unparsed_tool_calls")
            _, count, _ = self._find_continued_turn(turn.messages, turn.tools)
            turn.new_messages = list(turn.messages)[count:]
            for answer in filter(None, (turn.answer, returned_message)):
                for variant in (answer, _omit(answer, "reasoning_content")):
                    *_, chain = _digest_prefixes([*turn.messages, variant], turn.tools)
                    self._turns_by_digest[chain] = turn
        self.turns.append(turn)  # last: `to_json` may run in another thread
        self.num_ids += turn.num_ids

    async def run_once(
        self, key: bytes, is_retry: bool, do: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Return the result of `do`; for a retried request, the result of the first run, which may
        still be running. A failed run is repeated.

        A run completes even if the caller is cancelled. `key`: digest of the request's path and
        body. A request whose earlier connection was `mark_disconnected` counts as repeated.
        """
        task = self._results.get(key) if is_retry or key in self._disconnected else None
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.ensure_future(do())
            self._results[key] = task
            done = [old for old, work in self._results.items() if work.done()]
            for old in done[:-8]:
                del self._results[old]
            self._disconnected.intersection_update(self._results)
        self._disconnected.discard(key)
        return await asyncio.shield(task)

    def mark_disconnected(self, key: bytes) -> None:
        """Note that the client of a request disconnected before the response."""
        self._disconnected.add(key)

    # ----------------------------------------------------------------------------------- trajectory

    def make_trajectory(self) -> Trajectory:
        """Return the turns as transitions in sampling order; the last transition has the reward.

        `trajectory_to_datums` merges turns that continue each other.
        """
        transitions = [
            Transition(
                ModelInput.from_ints(turn.prompt),
                turn.sequence,
                0.0,
                False,
                {"ended": float(turn.is_complete)},
                make_turn_logs(turn),
            )
            for turn in self.turns
        ]
        if transitions:
            last = transitions[-1]
            last.reward, last.episode_done = self.reward or 0.0, self.reward is not None
            last.metrics |= self.metrics
        return Trajectory(transitions)

    def to_json(self) -> dict[str, Any]:
        """Return the session as JSON, with all that another trainer needs. `parent` of a turn:
        index of the longest earlier turn that it continues by exact ids; None at the start of a
        conversation or branch.

        May run in another thread than the one that adds turns.
        """
        turns: list[dict[str, Any]] = []
        turn_ids: list[bytes] = []  # of prompt and sample: bytes are compared without a copy
        longest_first: list[int] = []  # indices of turns: the first match is the parent
        for turn in list(self.turns):
            prompt = array("i", turn.prompt).tobytes()
            parent = next((i for i in longest_first if prompt.startswith(turn_ids[i])), None)
            turn_ids.append(prompt + array("i", turn.sequence.tokens).tobytes())
            insort(longest_first, len(turns), key=lambda i: -len(turn_ids[i]))
            turns.append(
                {
                    "prompt_token_ids": turn.prompt,
                    "token_ids": turn.sequence.tokens,
                    "logprobs": turn.sequence.logprobs,
                    "temperature": turn.sequence.temperature,
                    "stop_reason": turn.sequence.stop_reason,
                    "version": turn.sequence.version,
                    "parent": parent,
                    **make_turn_logs(turn),
                }
            )
        return {
            "turns": turns,
            "reward": self.reward,
            "metrics": dict(self.metrics),
            "done": self.reward is not None,
        }


def make_turn_logs(turn: SampledTurn) -> dict[str, Any]:
    """Return the texts of a turn for the rollout logs."""
    logs: dict[str, Any] = {
        "response": format_with_calls(turn.answer),
        "new_messages": list(turn.new_messages),
    }
    if calls := turn.answer.get("tool_calls"):
        logs["tool_calls"] = [call["function"] for call in calls]
    return logs


def _omit(message: Message, name: str) -> Message:
    """Return a message without a field."""
    return {key: value for key, value in message.items() if key != name}


def _digest_prefixes(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[bytes]:
    """Return for each message a digest of the tools and of the messages up to and including it."""
    digests = []
    digest = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16)
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        parts = [
            message["role"],
            message["content"],
            message.get("name"),
            message.get("reasoning_content"),
            calls,
        ]
        digest.update(json.dumps(parts, sort_keys=True).encode() + b"\0")
        digests.append(digest.copy().digest())
    return digests


class AgentSessions:
    """Hold sessions by owner and name.

    Above `max_sessions` sessions, or above `max_ids` token ids in all of their turns, the least
    recently used session of the owner with the most sessions is removed. `max_turns`: the most
    turns of a session.
    """

    def __init__(self, max_sessions: int = 10_000, max_turns: int = 10_000, max_ids: int = 2**28):
        self.max_sessions, self.max_turns, self.max_ids = max_sessions, max_turns, max_ids
        self._by_name: OrderedDict[tuple[str, str], AgentSession] = OrderedDict()

    def get_or_create(self, owner: str, name: str) -> AgentSession:
        """Return the session of that name, and create it if it does not exist.

        Raises HttpError for an invalid name or a full session.
        """
        if not 0 < len(name) <= 200 or not name.isprintable() or "/" in name:
            raise HttpError(
                400,
                "a session name must have 1 to 200 printable characters and no slash",
                "X-Session-ID",
            )
        session = self._by_name.setdefault((owner, name), AgentSession(owner))
        self._by_name.move_to_end((owner, name))
        sessions = self._by_name
        for limit, get_size in (
            (self.max_sessions, lambda key: 1),
            (self.max_ids, lambda key: sessions[key].num_ids),
        ):
            excess = sum(map(get_size, sessions)) - limit
            owners = {key: key[0] for key in sessions} if excess > 0 else {}
            for key in choose_evictions(owners, excess, get_size):
                if sessions[key] is session:  # it continues
                    break
                del sessions[key]
        if len(session.turns) >= self.max_turns:
            raise HttpError(
                400,
                f"the session {name!r} has {len(session.turns)} turns, the limit of a session: "
                "start a new session",
                code="session_full",
            )
        return session

    def find(self, owner: str, name: str) -> AgentSession:
        """Return the session of that name. Raises HttpError (404) if it does not exist."""
        session = self._by_name.get((owner, name))
        if session is None:
            raise HttpError(
                404,
                f"unknown session {name[:80]!r}",
                code="session_not_found",
                kind="invalid_request_error",
            )
        return session

    def list_names(self, owner: str) -> list[str]:
        """Return the names of an owner's sessions."""
        return [name for session_owner, name in self._by_name if session_owner == owner]

    def delete(self, owner: str, name: str) -> None:
        """Delete a session. Raises HttpError (404) if it does not exist."""
        self.find(owner, name)
        del self._by_name[owner, name]
