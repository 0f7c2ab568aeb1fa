"""Connect environments to the rollout: convert messages to tokens and back, run tool calls, apply
limits, and report failures.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rl.envs.env_runner import EpisodeStart, EpisodeTask, InProcessRunner, make_environment
from rl.envs.environment import TurnResult
from rl.envs.environment_registry import EnvironmentSpec
from rl.envs.fork_server import SubprocessRunner
from rl.envs.problem_env import last_user_text
from rl.envs.step_validation import (
    InvalidResult,
    describe_value,
    is_seat,
    validate_messages,
    validate_turn,
)
from rl.envs.tools import ToolCall
from rl.renderers import Renderer, format_with_calls
from rl.rollout import Env, EnvCall, EnvGroupBuilder, EnvThread, EpisodeFailed, Metrics, StepResult
from rl.sanitize import describe_error
from rl.seed import derive_seed
from rl.types import Message, ModelInput, Problem, SampledSequence

Stop = Sequence[str] | Sequence[int]


@dataclass(frozen=True)
class EpisodeLimits:
    """Limit an episode.

    turns    maximum number of answers of the policy
    tokens   maximum number of tokens in the episode (None: the model's context)
    seconds  maximum time of the environment and its tools together, excluding sampling
    """

    turns: int = 16
    tokens: int | None = None
    seconds: float = 60.0


@dataclass
class _Conversation:
    """Hold a player's conversation: its messages, and the tokens of its last prompt and answer."""

    renderer: Renderer
    messages: list[Message] = field(default_factory=list)
    last_prompt: ModelInput = field(default_factory=ModelInput.empty)
    answer: Sequence[int] = ()
    new_messages: list[Message] = field(default_factory=list)  # received since its last answer

    def next_prompt(self) -> ModelInput:
        """Return the next prompt: the previous prompt and answer plus the new messages, if the
        renderer can extend them; else a new rendering of all messages.
        """
        bridged = None
        if self.answer:
            bridged = self.renderer.extend_prompt(
                self.messages[:-1], self.last_prompt.token_ids(), self.answer, self.new_messages
            )
        self.messages += self.new_messages
        if bridged is None:
            return self.renderer.build_generation_prompt(self.messages)
        return (
            ModelInput.of(
                bridged.token_ids(),
                [*self.last_prompt.images_with_positions(), *bridged.images_with_positions()],
            )
            if self.last_prompt.images_with_positions()
            else bridged
        )


class EnvironmentGroup(EnvGroupBuilder):
    """Make a group's environments for a row and seed.

    `system_prompt`: precedes the conversation of each seat, unless the environment's first message
    is a system message. `renderers`: renderers of players that are other models, by name.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        problem: Problem,
        group_size: int,
        renderer: Renderer,
        *,
        limits: EpisodeLimits | None = None,
        system_prompt: str | None = None,
        renderers: Mapping[str, Renderer] | None = None,
    ):
        self.spec = spec
        self.problem = problem
        self.group_size = group_size
        self.renderer = renderer
        self.limits = limits or EpisodeLimits()
        self.system_prompt = system_prompt
        self.renderers = renderers or {}
        self.tag = problem.tag if problem.tag != "problem" else spec.name
        self.problem_index = problem.index
        # MessageEnv counts turns itself, so the rollout needs no limit.
        self.max_turns = 1_000_000
        self.max_tokens = self.limits.tokens
        self.meta = problem.meta
        self.row: dict[str, Any] = dict(problem.meta)
        if problem.messages:
            self.row |= {"messages": list(problem.messages), "prompt": list(problem.messages)}
        try:
            self.seed = int(problem.meta["seed"])
        except (KeyError, TypeError, ValueError, OverflowError):  # no such column, or no number
            self.seed = derive_seed("environment", spec.seed_stream, problem.index)
        self._first_prompts: dict[Any, ModelInput] = {}
        self._renderers: dict[str, Renderer] = {}

    def make_envs(self) -> list[MessageEnv]:
        """Return an environment for each episode of the group."""
        if self.spec.fork_server is not None:
            self.spec.fork_server.begin()
        shared = SharedGroupData(self)
        return [MessageEnv(self, member, shared) for member in range(self.group_size)]

    def deduplicate_prompt(self, observation: ModelInput) -> ModelInput:
        """Return the first observation equal to this one, so that the group prefills it once."""
        return self._first_prompts.setdefault(
            (tuple(observation.token_ids()), observation.images_with_positions()), observation
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


class SharedGroupData:
    """Hold the result of `Environment.share`, computed once for a group before its episodes begin,
    and the process that the episodes are forked from, if any.
    """

    def __init__(self, group: EnvironmentGroup):
        self.spec, self.task = group.spec, EpisodeTask(group.row, group.seed)
        self._channel: Any = None
        self._users, self._users_lock = 0, threading.Lock()
        name = f"the environment {group.spec.name}, what row {group.problem_index} shares,"
        self._thread = EnvThread(group.limits.seconds, name, self.kill_process)
        self._call = self._thread.submit(self._compute) if self.spec.has_shared_data else None

    def make_runner(self, member: int, label: str) -> InProcessRunner | SubprocessRunner:
        """Return the runner of an episode."""
        self._users += 1
        task = replace(self.task, member=member)
        if self.spec.fork_server is None:
            return InProcessRunner(self.spec, task, self._get)
        return SubprocessRunner(label, task, self._fork)

    def release(self) -> None:
        """Release the shared object for an episode that is closed; the last release ends the shared
        process, and the episodes that were forked from it. Called by the episodes' threads.
        """
        with self._users_lock:
            self._users -= 1
            if self._users <= 0:
                self._thread.finish(self._close_process)

    def kill_process(self) -> None:
        """Kill the shared process, if any."""
        if self._channel is not None:
            self._channel.end()

    def _close_process(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _compute(self) -> Any:
        """Compute the shared object, in the shared process if episodes are forked."""
        if self.spec.fork_server is None:
            return make_environment(self.spec, self.task).share()
        self._channel = self.spec.fork_server.fork()
        return self._channel.ask(self._thread.name, "share", task=self.task)

    def _get(self) -> Any:
        """Wait for the shared object."""
        return None if self._call is None else self._call.result()

    def _fork(self) -> Any:
        """Fork a process for an episode, from the group's process if it exists, else from the root
        process.
        """
        self._get()
        return self.spec.fork_server.fork() if self._channel is None else self._channel.fork()


class MessageEnv(Env):
    """Adapt an `Environment` to the rollout. Tokens are made in the caller's thread; the
    environment's code runs in the episode's thread.
    """

    blocks = False

    def __init__(self, group: EnvironmentGroup, member: int, shared: SharedGroupData):
        self.group, self.shared = group, shared
        name = f"the environment {group.spec.name}, episode {member} of row {group.problem_index},"
        self.runner = shared.make_runner(member, name)
        self.thread = EnvThread(group.limits.seconds, name, self.runner.kill)
        self.tools: Mapping[str, Mapping[str, Any]] = {}
        self.calls: list[ToolCall] = []
        self.turns = 0
        self._is_started = False
        self.conversations: dict[int, _Conversation] = {}

    # ------------------------------------------------------------------------ called by the rollout

    def initial_observation(self) -> EnvCall:
        """Start the environment; the returned call waits for the first prompt."""
        self._is_started = True
        return self.thread.submit(self.runner.start, self._begin)

    def step(self, action: SampledSequence) -> EnvCall:
        """Parse an answer and pass it to the environment; the returned call waits for the
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
        new_messages = conversation.new_messages
        conversation.answer = action.tokens
        conversation.new_messages = []
        self.turns += self.players[self.seat] is None
        return self.thread.submit(
            partial(self.runner.process_answer, answer),
            partial(self._make_step, _ParsedAnswer(answer, ended, new_messages)),
        )

    def on_context_overflow(self) -> StepResult:
        """Return the metrics of an episode that ends because its conversation is too long."""
        return StepResult(0.0, True, metrics=self._episode_metrics(truncated=True))

    def close(self) -> None:
        """Close the environment without waiting, then release the shared object."""
        if self._is_started:
            self.thread.finish(self.runner.close, self.shared.release)
        else:
            self.shared.release()

    # ------------------------------------------------------------------------------ process results

    def _begin(self, start: EpisodeStart) -> tuple[ModelInput, Stop | None]:
        """Return the first prompt and its stop sequences. Raises EpisodeFailed for invalid seats or
        messages.
        """
        self.tools, self.players = start.tools, tuple(start.seats)
        first = start.first_turn
        with self._fail_episode():
            if not all(player is None or isinstance(player, str) for player in self.players):
                raise InvalidResult(
                    f"has the seats {describe_value(self.players)}; each seat is None (the policy) "
                    "or a player's name"
                )
            turn = (
                validate_turn(first, len(self.players))
                if isinstance(first, TurnResult)
                else TurnResult(first)
            )
            if turn.done:
                raise InvalidResult("ended its episode in start(), before any answer")
            observation, stop = self._send_messages(turn)
        return self.group.deduplicate_prompt(observation), stop

    def _make_step(self, answered: _ParsedAnswer, output: Any) -> StepResult:
        """Convert the result of the environment, or of its tool calls, to a StepResult."""
        messages = self.conversations[self.seat].messages
        logs: dict[str, Any] = {
            "prompt": last_user_text(messages[:-1]),
            "response": format_with_calls(answered.message),
            "new_messages": answered.new_messages,
        }
        if isinstance(output, list) and all(isinstance(call, ToolCall) for call in output):
            self.calls += output
            logs["tool_calls"] = [call.as_json() for call in output]
            turn = TurnResult([call.message for call in output], seat=self.seat)
        else:
            with self._fail_episode():
                turn = validate_turn(output, len(self.players))
        result = StepResult(
            turn.reward,
            turn.done or self.turns >= self.group.limits.turns,
            metrics={"ended": float(answered.ended), **turn.metrics},
            logs={**turn.logs, **logs},
            rewards=turn.rewards,
        )
        if not result.episode_done:
            with self._fail_episode():
                result.next_observation, result.next_stop_condition = self._send_messages(turn)
            return result
        result.truncated = turn.truncated or not turn.done
        result.metrics |= self._episode_metrics(result.truncated)
        # Log the players of each game with several seats, so that older versions are rated in games
        # of any author.
        several = len(self.players) > 1
        players = {"players": [name or "policy" for name in self.players]} if several else {}
        result.logs = {**players, **result.logs}
        result.metrics_of = turn.metrics_of
        result.logs_of = {
            seat: {**players, **turn.logs_of.get(seat, {})}
            for seat in range(len(self.players))
            if seat != self.seat or seat in turn.logs_of
        }
        return result

    def _episode_metrics(self, truncated: bool) -> Metrics:
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

    def _send_messages(self, turn: TurnResult) -> tuple[ModelInput, Stop]:
        """Add the TurnResult's messages to the conversation of the seat that acts next. Return its
        prompt and stop sequences. Raises InvalidResult if a field is invalid, or if the messages
        cannot be rendered.
        """
        if not is_seat(turn.seat, len(self.players)):
            raise InvalidResult(
                f"names the seat {describe_value(turn.seat)}; seats are numbered from 0 and their "
                f"count is {len(self.players)}"
            )
        self.seat = turn.seat
        messages, system_prompt = validate_messages(turn.messages), self.group.system_prompt
        if self.seat not in self.conversations and system_prompt:
            if not messages or messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system_prompt}, *messages]
        if not messages:
            raise InvalidResult("returned no messages, but the episode is not done")
        if self.seat not in self.conversations:
            other = self.group.renderers.get(self.players[self.seat] or "")
            self.conversations[self.seat] = _Conversation(
                other or self.group.renderer_with(self.tools)
            )
        conversation = self.conversations[self.seat]
        conversation.new_messages = messages
        try:
            conversation.last_prompt = conversation.next_prompt()
        except ValueError as error:
            raise InvalidResult(f"gave messages that cannot be rendered: {error}") from error
        return conversation.last_prompt, conversation.renderer.get_stop_sequences()

    @contextmanager
    def _fail_episode(self) -> Iterator[None]:
        """Fail the episode, and no other, for what a check of the environment's results raises."""
        try:
            yield
        except InvalidResult as error:
            raise EpisodeFailed(f"{self.thread.name} {error}") from error
        except Exception as error:  # boundary: methods of the environment's objects
            raise EpisodeFailed(
                f"{self.thread.name} returned a result that cannot be read: "
                f"{describe_error(error, 300)}"
            ) from error


@dataclass(frozen=True)
class _ParsedAnswer:
    """Hold an answer, whether it ended by itself, and the messages that its player received before
    it.
    """

    message: Message
    ended: bool
    new_messages: Sequence[Message]
