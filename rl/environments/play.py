"""Connect environments to the rollout: convert messages to tokens and back, run tool calls, apply
limits, and report failures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rl.environments.checked import Checked, says_of
from rl.environments.environment import Turn
from rl.environments.hosts import (
    MOST_CHARACTERS,
    Begun,
    Host,
    LocalHost,
    Task,
    characters,
    prepared,
)
from rl.environments.problem import prompt_text
from rl.environments.process import RemoteHost
from rl.environments.registry import EnvironmentSpec
from rl.environments.tools import Call
from rl.environments.work import EpisodeThread, Work
from rl.episodes import Env, EnvGroupBuilder, EpisodeFailed, StepResult
from rl.plain import plain_text
from rl.renderers import Renderer, with_calls
from rl.seeds import derive_seed
from rl.types import Message, ModelInput, Problem, SampledSequence

Stop = Sequence[str] | Sequence[int]


@dataclass(frozen=True)
class Limits:
    """Limit an episode.

    turns    maximum number of answers of the policy
    tokens   maximum number of tokens in the episode (None: the model's context)
    seconds  maximum time of the environment and its tools together, excluding sampling
    """

    turns: int = 16
    tokens: int | None = None
    seconds: float = 60.0


@dataclass
class _Seat:
    """Hold a player's conversation: its messages, and the tokens of its last prompt and answer."""

    renderer: Renderer
    messages: list[Message] = field(default_factory=list)
    seen: ModelInput = field(default_factory=ModelInput.empty)
    answer: Sequence[int] = ()
    new: list[Message] = field(default_factory=list)  # received since its last answer

    def prompt(self) -> ModelInput:
        """Return the next prompt: the previous prompt and answer plus the new messages, if the
        renderer can extend them; else a new rendering of all messages.
        """
        bridged = None
        if self.answer:
            bridged = self.renderer.bridge(
                self.messages[:-1], self.seen.flat(), self.answer, self.new
            )
        self.messages += self.new
        if bridged is None:
            return self.renderer.build_generation_prompt(self.messages)
        return (
            ModelInput.of(bridged.flat(), [*self.seen.placed(), *bridged.placed()])
            if self.seen.placed()
            else bridged
        )


class EnvironmentGroup(EnvGroupBuilder):
    """Make a group's environments for a row and seed.

    `system_prompt`: precedes the conversation of each seat. `renderers`: renderers of players that
    are other models, by name.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        problem: Problem,
        group_size: int,
        renderer: Renderer,
        *,
        limits: Limits | None = None,
        system_prompt: str | None = None,
        renderers: Mapping[str, Renderer] | None = None,
    ):
        self.spec, self.problem, self.group_size, self.renderer = (
            spec,
            problem,
            group_size,
            renderer,
        )
        self.limits, self.system_prompt, self.renderers = (
            limits or Limits(),
            system_prompt,
            renderers or {},
        )
        self.tag = problem.tag if problem.tag != "problem" else spec.name
        self.problem_index = problem.index
        # MessageEnv counts turns itself, so the rollout needs no limit.
        self.max_turns = 1_000_000
        self.max_tokens = self.limits.tokens
        self.row: dict[str, Any] = dict(problem.meta)
        if problem.messages:
            self.row |= {"messages": list(problem.messages), "prompt": list(problem.messages)}
        self.seed = int(
            problem.meta.get("seed", derive_seed("environment", spec.stream, problem.index))
        )
        self._first: dict[Any, ModelInput] = {}
        self._renderers: dict[str, Renderer] = {}

    def make_envs(self) -> list[MessageEnv]:
        """Return an environment for each episode of the group."""
        if self.spec.root is not None:
            self.spec.root.begin()
        task = Task(self.row, self.seed)
        shared = Shared(
            self.spec,
            task,
            self.limits.seconds,
            f"{self.spec.name}, what row {self.problem_index} shares,",
        )
        return [MessageEnv(self, member, shared) for member in range(self.group_size)]

    def the_same(self, observation: ModelInput) -> ModelInput:
        """Return the first observation equal to this one, so that the group prefills it once."""
        return self._first.setdefault(
            (tuple(observation.flat()), observation.placed()), observation
        )

    def renderer_with(self, tools: Mapping[str, Mapping[str, Any]]) -> Renderer:
        """Return the renderer that describes these tools (schemas by name), created once for the
        group.
        """
        schemas = [dict(schema) for schema in tools.values()]
        key = repr(schemas)
        if key not in self._renderers:
            self._renderers[key] = self.renderer.with_tools(schemas) if schemas else self.renderer
        return self._renderers[key]


class Shared:
    """Hold the result of `Environment.share`, computed once for a group before its episodes begin,
    and the process that the episodes are forked from, if any.
    """

    def __init__(self, spec: EnvironmentSpec, task: Task, seconds: float, name: str):
        self.spec, self.task, self.name, self.asked = spec, task, name, spec.shares
        self._channel: Any = None
        self._users = 0
        self._thread = EpisodeThread(seconds, name, self.end)
        self._work = self._thread.do(self._make) if self.asked else None

    def host(self, member: int, who: str) -> Host:
        """Return the runner of an episode."""
        self._users += 1
        task = Task(self.task.row, self.task.seed, member)
        return (
            LocalHost(self.spec, task, self._get)
            if self.spec.root is None
            else RemoteHost(who, task, self._fork)
        )

    def let_go(self) -> None:
        """Release the shared object for an ended episode; the last release ends the shared
        process.
        """
        self._users -= 1
        if self._users <= 0:
            self._thread.end(self.end)

    def end(self) -> None:
        """Kill the shared process, if any."""
        if self._channel is not None:
            self._channel.end()

    def _make(self) -> Any:
        """Compute the shared object, in the shared process if episodes are forked."""
        if self.spec.root is None:
            return prepared(self.spec, self.task).share()
        self._channel = self.spec.root.fork()
        return self._channel.ask(f"the environment {self.name}", "share", task=self.task)

    def _get(self) -> Any:
        """Wait for the shared object."""
        return None if self._work is None else self._work.wait()

    def _fork(self) -> Any:
        """Fork a process for an episode, from the group's process if it exists, else from the root
        process.
        """
        self._get()
        return self.spec.root.fork() if self._channel is None else self._channel.fork()


class MessageEnv(Checked, Env):
    """Adapt an `Environment` to the rollout. Tokens are made in the caller's thread; the
    environment's code runs in the episode's thread.
    """

    blocks = False

    def __init__(self, group: EnvironmentGroup, member: int, shared: Shared):
        self.group, self.shared = group, shared
        name = f"{group.spec.name}, episode {member} of row {group.problem_index},"
        self.host = shared.host(member, f"the environment {name}")
        self.thread = EpisodeThread(group.limits.seconds, name, self.host.abandon)
        self.tools: Mapping[str, Mapping[str, Any]] = {}
        self.calls: list[Call] = []
        self.turns = 0
        self.conversations: dict[int, _Seat] = {}

    # ------------------------------------------------------------------------ called by the rollout

    def initial_observation(self) -> _FirstObservation:
        """Start the environment; the returned object waits for the first prompt."""
        return _FirstObservation(self, self.thread.do(self.host.start))

    def step(self, action: SampledSequence) -> _Step:
        """Parse an answer and pass it to the environment; the returned object waits for the
        result.
        """
        conversation = self.conversations[self.seat]
        answer, ended = conversation.renderer.parse_response(action.tokens)
        if not ended:
            answer["cut_off"] = True
        conversation.messages.append(
            {
                key: value
                for key, value in answer.items()
                if key not in ("cut_off", "unparsed_tool_calls")
            }
        )
        new_messages, conversation.answer, conversation.new = conversation.new, action.tokens, []
        self.turns += self.players[self.seat] is None
        return _Step(
            self,
            _Answered(answer, ended, new_messages),
            self.thread.do(partial(self.host.answer, answer)),
        )

    def close(self) -> None:
        """Close the environment without waiting, and release the shared object."""
        self.thread.end(self.host.close)
        self.shared.let_go()

    # ------------------------------------------------------------------------------ process results

    def begun(self, given: Begun) -> tuple[ModelInput, Stop | None]:
        """Return the first prompt and its stop sequences. Raises EpisodeFailed for invalid seats or
        messages.
        """
        self.tools, self.players = given.tools, tuple(given.seats)
        if not all(player is None or isinstance(player, str) for player in self.players):
            raise self.failed(
                f"has the seats {plain_text(says_of(self.players), 100)}; each seat is None (the"
                " policy) or a player's name"
            )
        self._say(self._checked(given.said) if isinstance(given.said, Turn) else Turn(given.said))
        observation, stop = self._prompt()
        return self.group.the_same(observation), stop

    def result(self, answered: _Answered, given: Any) -> StepResult:
        """Convert the result of the environment, or of its tool calls, to a StepResult."""
        messages = self.conversations[self.seat].messages
        logs: dict[str, Any] = {
            "prompt": prompt_text(messages[:-1]),
            "response": with_calls(answered.message),
            "told": answered.told,
        }
        if isinstance(given, list) and all(isinstance(call, Call) for call in given):
            self.calls += given
            logs["tool_calls"] = [call.as_json() for call in given]
            turn = Turn([call.message for call in given], seat=self.seat)
        else:
            turn = self._checked(given)
        metrics = {"ended": float(answered.ended), **turn.metrics}
        done, truncated = turn.done, turn.done and turn.truncated
        if not done and self.turns >= self.group.limits.turns:
            done = truncated = True
        logs = {**turn.logs, **logs}
        if done:
            metrics |= self._totals(truncated)
            # Log the players of each game with several seats, so that older versions are rated in
            # games of any author.
            players = (
                {"players": [name or "policy" for name in self.players]}
                if len(self.players) > 1
                else {}
            )
            other_seats = [
                seat
                for seat in range(len(self.players))
                if seat != self.seat or seat in turn.logs_of
            ]
            logs_of = {seat: {**players, **turn.logs_of.get(seat, {})} for seat in other_seats}
            seats: dict[str, Any] = {
                "rewards": turn.rewards,
                "metrics_of": turn.metrics_of,
                "logs_of": logs_of,
            }
            return StepResult(
                turn.reward,
                True,
                metrics=metrics,
                logs={**players, **logs},
                truncated=truncated,
                **seats,
            )
        self._say(turn)
        observation, stop = self._prompt()
        return StepResult(
            turn.reward, False, observation, stop, metrics, logs, rewards=turn.rewards
        )

    def _totals(self, truncated: bool) -> dict[str, float]:
        """Return the metrics of the complete episode."""
        metrics = {"truncated": float(truncated)}
        if self.tools:
            failed = sum(call.error is not None and not call.malformed for call in self.calls)
            malformed = sum(call.malformed for call in self.calls)
            metrics |= {
                "tool/calls": len(self.calls),
                "tool/failed": failed,
                "tool/malformed": malformed,
            }
        return metrics

    def _say(self, turn: Turn) -> None:
        """Add the Turn's messages to the conversation of the seat that acts next."""
        if not isinstance(turn.seat, int) or not 0 <= turn.seat < len(self.players):
            raise self.failed(
                f"names the seat {plain_text(says_of(turn.seat), 100)}; seats are numbered from 0"
                f" and their count is {len(self.players)}"
            )
        self.seat = turn.seat
        messages = self._messages(turn.messages)
        if self.seat not in self.conversations:
            system_prompt = self.group.system_prompt
            system = [{"role": "system", "content": system_prompt}] if system_prompt else []
            other = self.group.renderers.get(self.players[self.seat] or "")
            self.conversations[self.seat] = _Seat(other or self.group.renderer_with(self.tools))
            messages = [*system, *messages]
        conversation = self.conversations[self.seat]
        conversation.new = messages
        if not messages:
            raise self.failed("returned no messages, but the episode is not done")

    def _messages(self, given: Any) -> list[Message]:
        """Return messages as a list. Raises EpisodeFailed if they are invalid or too long."""
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if not isinstance(given, Sequence) or not all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in given
        ):
            raise self.failed(
                f"gave {plain_text(says_of(given), 200)}, which is neither a text nor a list of"
                " messages"
            )
        size = characters(given)
        if size > MOST_CHARACTERS:
            raise self.failed(
                f"gave {size} characters in a turn; at most {MOST_CHARACTERS} are allowed"
            )
        return [dict(message) for message in given]

    def _prompt(self) -> tuple[ModelInput, Stop]:
        """Return the next prompt and its stop sequences. Raises EpisodeFailed if the messages
        cannot be rendered.
        """
        conversation = self.conversations[self.seat]
        try:
            conversation.seen = conversation.prompt()
        except ValueError as error:
            raise self.failed(f"gave messages that cannot be rendered: {error}") from error
        return conversation.seen, conversation.renderer.get_stop_sequences()

    def failed(self, what: str) -> EpisodeFailed:
        """Return the error of this episode with `what` as its message."""
        return EpisodeFailed(f"the environment {self.thread.name} {what}")


@dataclass(frozen=True)
class _Answered:
    """Hold an answer, whether it ended by itself, and the messages that its player received before
    it.
    """

    message: Message
    ended: bool
    told: Sequence[Message]


class _FirstObservation:
    """Wait for an environment's first messages."""

    def __init__(self, env: MessageEnv, work: Work):
        self.env, self.work = env, work

    def wait(self) -> None:
        self.work.until_done()

    def result(self) -> tuple[ModelInput, Stop | None]:
        return self.env.begun(self.work.wait())


class _Step:
    """Wait for an environment's result of an answer."""

    def __init__(self, env: MessageEnv, answered: _Answered, work: Work):
        self.env, self.answered, self.work = env, answered, work

    def wait(self) -> None:
        self.work.until_done()

    def result(self) -> StepResult:
        return self.env.result(self.answered, self.work.wait())
