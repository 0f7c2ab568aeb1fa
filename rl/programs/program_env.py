"""Provide --environment endpoint: an episode is a program whose calls of OPENAI_BASE_URL are
answered with samples of the policy.
"""

from __future__ import annotations

import json
import queue
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rl.envs import Environment, EpisodeLimits, grade_answer, last_user_text
from rl.errors import UserError
from rl.jsonl import replace_nonfinite
from rl.programs.program_rollout import (
    POLICY_MODEL,
    ActionRequest,
    LiveEndpoint,
    ProgramEpisode,
    ProgramExit,
    get_live_endpoint,
)
from rl.renderers import Renderer
from rl.rewards import build_worker_environment, resolve_reward
from rl.rollout import Env, EnvGroupBuilder, EnvThread, EpisodeFailed, StepResult
from rl.sanitize import sanitize_text
from rl.seed import derive_seed
from rl.types import ModelInput, Problem, SampledSequence

Stop = Sequence[str] | Sequence[int] | None


@dataclass
class Endpoint(Environment):
    """Run your program, a process per episode, which calls the policy at $OPENAI_BASE_URL."""

    colon_setting = "program"

    program: str
    """The program and its fixed arguments, as in a shell: "python agent.py"."""
    arguments: tuple[str, ...] = ()
    """More arguments. Replaced in each episode: {seed}, {prompt}, {row} (a file with the row as JSON) and {COLUMN} of the row."""  # noqa: E501
    grader: str | None = None
    """Reward (name or file.py:function) of the last response and the --dataset row. None: the program posts a score."""  # noqa: E501
    dataset_rows: bool = False
    """Whether each episode uses a row of --dataset; always true with a grader."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables that the program gets in addition to PATH, HOME and the like; PREFIX* selects several."""  # noqa: E501
    strict: bool = False
    """Refuse requests with sampling parameters (temperature, seed, ...) instead of replacing these by the run's settings."""  # noqa: E501

    def __post_init__(self) -> None:
        try:
            self.command = [*shlex.split(self.program), *self.arguments]
        except ValueError as error:
            raise UserError(
                f"program={self.program!r} is not a valid command line: {error}"
            ) from error
        if not self.command:
            raise UserError(
                "program is empty: pass the program of an episode, such as 'python agent.py'"
            )
        if shutil.which(self.command[0]) is None:
            raise UserError(
                f"program={self.program!r}: there is no program {self.command[0]!r}, neither as a "
                "file nor on PATH"
            )
        if self.grader is not None:
            resolve_reward(self.grader)

    @property
    def needs_rows(self) -> bool:  # type: ignore[override]
        return self.dataset_rows or self.grader is not None

    def make_token_level_group(  # type: ignore[override]
        self,
        problem: Problem,
        group_size: int,
        renderer: Renderer,
        *,
        limits: EpisodeLimits,
        system_prompt: str | None,
    ) -> ProgramGroup:
        return ProgramGroup(self, problem, group_size, renderer, limits, system_prompt)


@dataclass(eq=False)
class ProgramGroup(EnvGroupBuilder):
    """Build the environments of a group: programs with the same row and seed."""

    settings: Endpoint
    problem: Problem
    group_size: int
    renderer: Renderer
    limits: EpisodeLimits
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        problem = self.problem
        self.tag, self.problem_index, self.meta = problem.tag, problem.index, problem.meta
        # `ProgramEpisode` counts and limits the turns
        self.max_turns, self.max_tokens = 1_000_000, self.limits.tokens
        self.question = last_user_text(problem.messages) if problem.messages else ""
        try:
            self.seed = int(problem.meta["seed"])
        except (KeyError, TypeError, ValueError, OverflowError):  # no such column, or no number
            self.seed = derive_seed("environment", "endpoint", problem.index)
        messages = {"messages": list(problem.messages)} if problem.messages else {}
        self.row: dict[str, Any] = _to_json({**problem.meta, **messages})

    def make_envs(self) -> Sequence[Env]:
        return [ProgramEnv(self, member, get_live_endpoint()) for member in range(self.group_size)]

    def make_command(self, row_file: str) -> list[str]:
        """Return the command line of the program, filled in for this row."""
        fillers = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in self.row.items()
        }
        fillers |= {"seed": str(self.seed), "row": row_file, "prompt": self.question}
        # inserted texts are not searched again
        pattern = "|".join(re.escape(f"{{{name}}}") for name in fillers)
        return [
            re.sub(pattern, lambda match: fillers[match[0][1:-1]], word)
            for word in self.settings.command
        ]


def _to_json(value: Any) -> Any:
    """Return the JSON value of a column; text for each value that JSON lacks, such as a date."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    try:
        return replace_nonfinite(value)
    except (TypeError, ValueError):
        return str(value)


class ProgramEnv(Env):
    """Step through the episode of a program.

    Each request of the program is an observation. The episode ends when the program ends. The
    rollout waits for a step by calling its `result()`.
    """

    def __init__(self, group: ProgramGroup, member: int, endpoint: LiveEndpoint):
        self.group, self.endpoint = group, endpoint
        self.name = f"the program of episode {member} of row {group.problem_index}"
        self.episode = ProgramEpisode(
            group.renderer, group.limits, group.system_prompt, group.settings.strict
        )
        self.folder: str | None = None
        self.request: ActionRequest | None = None
        self.last_request: ActionRequest | None = None
        self._is_closed = False

    def initial_observation(self) -> SimpleNamespace:
        """Start the program; the result is its first request. Raises EpisodeFailed without any."""
        self.folder = tempfile.mkdtemp(prefix="whetstone-row-")
        row = Path(self.folder) / "row.json"
        row.write_text(json.dumps(self.group.row), encoding="utf-8", errors="backslashreplace")
        self.endpoint.begin(
            self.episode, self.group.make_command(str(row)), self._make_variables(str(row))
        )
        if self._is_closed:  # another thread discarded the episode meanwhile
            self.close()
        return SimpleNamespace(result=self._get_first_observation)

    def step(self, action: SampledSequence) -> SimpleNamespace:
        """Answer the request with an action; the result is the next request or the end."""
        request = self.last_request = self.request
        assert request is not None
        self.endpoint.server.call_soon(request.resolve, action)
        return SimpleNamespace(result=lambda: self._get_step_result(request, action))

    def on_context_overflow(self) -> SimpleNamespace:
        """Refuse all requests after one that does not fit the context; the result is the end of
        the episode.
        """
        assert self.request is not None
        reason = (
            "the conversation and a response exceed the model's context or the episode's tokens: "
            f"the prompt already has {len(self.request.prompt)} tokens"
        )
        self.endpoint.server.call_soon(self.episode.refuse, reason)
        return SimpleNamespace(result=lambda: self._finish(self._wait_for_exit()))

    def close(self) -> None:
        """End the program and remove its files."""
        self._is_closed = True
        self.endpoint.end(self.episode)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    # -------------------------------------------------------------------------------------- results

    def _make_variables(self, row: str) -> dict[str, str]:
        """Return the environment variables of the program. `row`: the file with its row."""
        session_url = f"{self.endpoint.server.url}/session/{self.episode.name}"
        return {
            "PYTHONHASHSEED": "0",
            **build_worker_environment(self.group.settings.pass_env),
            "OPENAI_BASE_URL": f"{session_url}/v1",
            "OPENAI_API_BASE": f"{session_url}/v1",
            "OPENAI_API_KEY": self.episode.name,
            "OPENAI_MODEL": POLICY_MODEL,
            "WHETSTONE_REWARD_URL": f"{session_url}/reward",
            "WHETSTONE_SEED": str(self.group.seed),
            "WHETSTONE_ROW": row,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def _wait_for_event(self) -> ActionRequest | ProgramExit:
        """Wait for the program's next pending request, or its end."""
        while True:
            try:
                event = self.episode.events.get(timeout=5.0)
            except queue.Empty:
                if not self.endpoint.server.is_alive:
                    raise EpisodeFailed(
                        f"{self.name} lost its endpoint: the server ended"
                    ) from None
                continue
            if isinstance(event, ProgramExit) or not event.is_dead:
                return event

    def _wait_for_exit(self) -> ProgramExit:
        """Wait for the program's end. Concurrent requests, which are refused, may come first."""
        while not isinstance(event := self._wait_for_event(), ProgramExit):
            pass
        return event

    def _get_first_observation(self) -> tuple[ModelInput, Stop]:
        """Return the first observation. Raises EpisodeFailed if the program made no request."""
        event = self._wait_for_event()
        if isinstance(event, ProgramExit):
            raise EpisodeFailed(
                f"{self.name} never called the model: it {self._describe_exit(event)}"
            )
        return self._observe(event)

    def _observe(self, request: ActionRequest) -> tuple[ModelInput, Stop]:
        """Return a request as an observation with its stops, and keep it as the current request."""
        self.request, self.max_action_tokens = request, request.params.max_tokens
        return ModelInput.from_ints(request.prompt), request.params.stop  # type: ignore[return-value]  # texts and ids, mixed

    def _get_step_result(self, request: ActionRequest, action: SampledSequence) -> StepResult:
        """Return the result of the step that answered `request`."""
        event = self._wait_for_event()
        metrics = {"ended": float(action.stop_reason == "stop")}
        if isinstance(event, ActionRequest):
            observation, stop = self._observe(event)
            return StepResult(0.0, False, observation, stop, metrics, request.logs)
        result = self._finish(event)
        result.metrics, result.logs = {**metrics, **result.metrics}, request.logs
        return result

    def _finish(self, event: ProgramExit) -> StepResult:
        """Return the last step result, after the end of the program.

        Raises EpisodeFailed if the program exceeded its time, failed, or posted no score.
        """
        episode, cut = self.episode, self.episode.end_reason
        if event.timed_out or (event.code != 0 and cut is None):
            raise EpisodeFailed(f"{self.name} {self._describe_exit(event)}")
        reward, metrics = self._score(cut)
        figures = {
            "truncated": float(cut is not None),
            "program/seconds": event.seconds,
            "program/requests": float(episode.request_count),
        }
        if self.request is not None and episode.replaced_settings:
            self.request.logs["overruled"] = dict(episode.replaced_settings)
        return StepResult(reward, True, metrics={**figures, **metrics}, truncated=cut is not None)

    def _score(self, end_reason: str | None) -> tuple[float, Mapping[str, float]]:
        """Return reward and metrics. `end_reason`: why the episode was truncated."""
        posted, metrics = self.episode.reward, self.episode.metrics
        grader = self.group.settings.grader
        if grader is None:
            if posted is None and end_reason is None:
                raise EpisodeFailed(
                    f'{self.name} posted no score: post {{"reward": 1.0}} to '
                    "$WHETSTONE_REWARD_URL, or set a grader"
                )
            return posted or 0.0, metrics
        last_answer = self.last_request.logs.get("answer_text", "") if self.last_request else ""
        thread = EnvThread(self.group.limits.seconds, f"the environment {self.name}, its grader,")
        call = thread.submit(
            lambda: grade_answer(grader, self.group.question, last_answer, self.group.row)
        )
        thread.finish()  # also after a grader that raises or hangs
        reward, graded_metrics = call.result()
        posted_metrics = {} if posted is None else {"posted": posted}
        return reward, {**graded_metrics, **posted_metrics, **metrics}

    def _describe_exit(self, event: ProgramExit) -> str:
        """Describe the end of the program, as the end of a sentence."""
        output = sanitize_text(event.output, 300)
        if event.timed_out:
            end = f"did not finish within its {self.group.limits.seconds:g} s"
        elif event.code is None:
            return f"did not start: {output}"
        elif event.code < 0:
            end = f"was killed by signal {-event.code}"
        else:
            end = f"ended with exit code {event.code}"
        return end + (f"; it last printed: {output}" if output else "")
