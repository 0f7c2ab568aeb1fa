"""Sessions: the turns that one agent took, as a graph of exact id prefixes, and the `Trajectory`
that they come to.

A turn is what the model read (ids), what it drew (ids, logprobs) and, where it was a chat, the
messages that stood for it. The next request of a session that continues a turn's messages is
written as those ids and the new messages behind them (`Renderer.bridge`): what was drawn is never
decoded and tokenised again. A request that rewrites history begins a branch.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl.episodes import Trajectory, Transition
from rl.renderers import Renderer, with_calls
from rl.serve.chat_fields import Refused
from rl.types import Message, ModelInput, SampledSequence, SampleResponse, SamplingParams


class Desk(Protocol):
    """What draws: the models of a server, as far as these routes ask. Errors: UserError and
    ValueError are the caller's fault.
    """

    async def sample(
        self,
        model: str | None,
        prompt_ids: list[int],
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        owner: str,
        **what: Any,
    ) -> SampleResponse: ...

    def models(self, owner: str) -> Sequence[Any]: ...

    def tokenizer(self, model: str | None, owner: str) -> Any: ...

    def renderer(self, model: str | None, owner: str) -> Renderer: ...


@dataclass(slots=True)
class Turn:
    """One draw. `messages`: what was asked, None where ids were; `answer`: as it was parsed;
    `text`: for people and rewards.
    """

    prompt: list[int]
    sequence: SampledSequence
    answer: Message
    ended: bool
    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    told: Sequence[Message] = ()  # what of the messages is new to the model


@dataclass
class Session:
    """One episode. Requests that came again after a lost answer are answered from `once`. `owner`:
    whose it is.
    """

    owner: str = ""
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    touched: float = field(default_factory=time.monotonic)
    _by_chain: dict[bytes, Turn] = field(default_factory=dict)
    _once: dict[bytes, asyncio.Future[Any]] = field(default_factory=dict)
    _lost: set[bytes] = field(default_factory=set)

    # whether answers may be read once more, for the likeliest tokens beside them
    reads_again = True

    async def renderer(self, desk: Desk, model: str | None) -> Renderer:
        # the model may have to be loaded
        return await asyncio.to_thread(desk.renderer, model, self.owner)

    async def tokenizer(self, desk: Desk, model: str | None) -> Any:
        return await asyncio.to_thread(desk.tokenizer, model, self.owner)

    async def draw(
        self,
        desk: Desk,
        model: str | None,
        prompt: list[int],
        n: int,
        params: SamplingParams,
        **what: Any,
    ) -> SampleResponse:
        return await desk.sample(model, prompt, n, params, owner=self.owner, **what)

    # --------------------------------------------------------------------------------- what is read

    def prompt(
        self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """The ids that a chat stands for: those of the longest turn that it continues, and what is
        new; else it is written anew.

        Answers come back without what clients drop (thoughts): they are put back in, for the
        template to keep or leave out.
        """
        known, k, turn = self._continued(messages, tools)
        if turn is not None and k < len(known):
            bridged = renderer.bridge(known[: k - 1], turn.prompt, turn.sequence.tokens, known[k:])
            if bridged is not None:
                return bridged.to_ints()
        return renderer.build_generation_prompt(known).to_ints()

    def _continued(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], int, Turn | None]:
        """The messages with answers as they were drawn, how many of them the longest turn that they
        continue stands for, and that turn.
        """
        known, count, last = list(messages), 0, None
        for k, chain in enumerate(_chains(messages, tools)):
            turn = self._by_chain.get(chain)
            if turn is not None:
                known[k], count, last = turn.answer, k + 1, turn
        return known, count, last

    def note(self, turn: Turn, back: Message | None = None) -> None:
        """Keeps a turn, to be continued. `back`: its answer as a client has it, and sends it again."""
        self.turns.append(turn)
        self.touched = time.monotonic()
        if turn.messages is None:
            return
        clean = {key: value for key, value in turn.answer.items() if key != "unparsed_tool_calls"}
        turn.answer = clean
        turn.told = list(turn.messages)[self._continued(turn.messages, turn.tools)[1] :]
        for answer in (clean, *([] if back is None else [back])):
            for said in (
                answer,
                {key: value for key, value in answer.items() if key != "reasoning_content"},
            ):
                *_, chain = _chains([*turn.messages, said], turn.tools)
                self._by_chain[chain] = turn

    async def once(
        self, key: bytes, repeated: bool, do: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """What `do` gives; for a request that is sent again, what it gave (or is about to give) the
        first time.

        It is done to its end, whoever waits. `key`: of the request's body. A request of a
        connection that was `lost` counts as repeated.
        """
        task = self._once.get(key) if repeated or key in self._lost else None
        if task is None:
            task = asyncio.ensure_future(do())
            self._once[key] = task
            done = [old for old, work in self._once.items() if work.done()]
            for old in done[:-8]:
                del self._once[old]
        self._lost.discard(key)
        return await asyncio.shield(task)

    def lost(self, key: bytes) -> None:
        """Whoever asked is gone, unanswered."""
        self._lost.add(key)

    # ----------------------------------------------------------------------------- what comes of it

    def trajectory(self) -> Trajectory:
        """The turns as transitions, in the order they were drawn; the reward is the last one's.
        `trajectory_to_datums` merges them.
        """
        made = [
            Transition(
                ModelInput.from_ints(turn.prompt),
                turn.sequence,
                0.0,
                False,
                {"ended": float(turn.ended)},
                logs_of(turn),
            )
            for turn in self.turns
        ]
        if made:
            made[-1].reward, made[-1].episode_done = self.reward or 0.0, self.reward is not None
            made[-1].metrics |= self.metrics
        return Trajectory(made)

    def as_json(self) -> dict[str, Any]:
        """Everything that is needed to train on it elsewhere."""
        turns = []
        for turn in self.turns:
            sequence = turn.sequence
            drawn: dict[str, Any] = {
                "token_ids": sequence.tokens,
                "logprobs": sequence.logprobs,
                "temperature": sequence.temperature,
            }
            drawn |= {"stop_reason": sequence.stop_reason, "version": sequence.version}
            turns.append(
                {
                    "prompt_token_ids": turn.prompt,
                    **drawn,
                    "parent": self._parent(turn),
                    **logs_of(turn),
                }
            )
        return {
            "turns": turns,
            "reward": self.reward,
            "metrics": self.metrics,
            "done": self.reward is not None,
        }

    def _parent(self, turn: Turn) -> int | None:
        """Which earlier turn it continues, by exact ids: the longest; None for the beginning of a
        conversation or branch.
        """
        best: int | None = None
        length = 0
        for i, other in enumerate(self.turns):
            if other is turn:
                break
            whole = [*other.prompt, *other.sequence.tokens]
            if len(whole) > length and turn.prompt[: len(whole)] == whole:
                best, length = i, len(whole)
        return best


def logs_of(turn: Turn) -> dict[str, Any]:
    """A turn's texts, as rollouts show them."""
    said: dict[str, Any] = {"response": with_calls(turn.answer), "told": list(turn.told)}
    return said | (
        {"tool_calls": [call["function"] for call in turn.answer["tool_calls"]]}
        if turn.answer.get("tool_calls")
        else {}
    )


def _chains(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """For each message, a digest of it, of all before it, and of the tools that the model was told
    of.
    """
    found = []
    digest = hashlib.blake2b(
        json.dumps(list(tools), sort_keys=True).encode("utf-8", "backslashreplace"), digest_size=16
    )
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        parts = [
            message["role"],
            message["content"],
            message.get("name"),
            message.get("reasoning_content"),
            calls,
        ]
        digest.update(json.dumps(parts, sort_keys=True).encode("utf-8", "backslashreplace") + b"\0")
        found.append(digest.copy().digest())
    return found


class Sessions:
    """Sessions by their owner and name, at most `most`: of the owner that has most, the one that
    was used longest ago is forgotten.
    """

    def __init__(self, most: int = 10_000, longest: int = 10_000):
        self.most, self.longest = most, longest
        self._by_name: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def open(self, owner: str, name: str) -> Session:
        """The session of that name, made where there is none. Raises Refused."""
        check_name(name)
        session = self._by_name.setdefault((owner, name), Session(owner))
        self._by_name.move_to_end((owner, name))
        while len(self._by_name) > self.most:
            counts = Counter(whose for whose, _ in self._by_name)
            most = max(counts.values())
            del self._by_name[next(key for key in self._by_name if counts[key[0]] == most)]
        if len(session.turns) >= self.longest:
            raise Refused(
                f"the session {name!r} has {len(session.turns)} turns, the most that are kept",
                code="session_full",
            )
        return session

    def find(self, owner: str, name: str) -> Session:
        session = self._by_name.get((owner, name))
        if session is None:
            raise Refused(
                f"there is no session {name[:80]!r}", status=404, code="session_not_found"
            )
        return session

    def names(self, owner: str) -> list[str]:
        return [name for whose, name in self._by_name if whose == owner]

    def drop(self, owner: str, name: str) -> None:
        self.find(owner, name)
        del self._by_name[owner, name]


def check_name(name: str) -> None:
    if not 0 < len(name) <= 200 or not name.isprintable() or "/" in name:
        raise Refused(
            "a session's name has 1 to 200 printable characters and no slash", "X-Session-ID"
        )
