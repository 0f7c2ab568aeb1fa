"""Run episodes in separate processes, forked from a process that has imported the environment. A
crash or hang fails only that episode.

    trainer --socket--> root --fork--> group (if something is shared) --fork--> episode

The root is a new interpreter under a reaper (rl.processes). It imports the environment's module and
no model code. Each process serves a single socket: the trainer sends messages of pickles, and
receives messages of JSON. The output of an episode is discarded. This is not a sandbox: the
environment's code runs as the same user.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import json
import os
import pickle
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl.envs.env_runner import (
    EpisodeTask,
    InProcessRunner,
    decode_result,
    encode_result,
    make_environment,
)
from rl.envs.environment_registry import EnvironmentSpec, load_spec, resolve_spec
from rl.errors import UserError
from rl.images import make_image_chunk
from rl.processes import (
    InvalidReply,
    WorkerDiedError,
    WorkerProcess,
    detach_from,
    encode_frame,
    kill_tree,
    read_message,
)
from rl.rollout import EpisodeFailed, await_value
from rl.sanitize import describe_error, sanitize_text

_MAX_REPLY_BYTES = 1 << 24
_START_SECONDS = 120.0  # for the import of the environment's module, which may be slow


# ------------------------------------------------------------------------- in the episode's process


class _ForkedProcess:
    """Serve a single socket: `fork` makes a child that serves another socket; other requests run an
    episode.
    """

    spec: EnvironmentSpec | None = None
    shared: Any = None
    runner: InProcessRunner | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def serve(self, channel: socket.socket) -> None:
        """Process requests until the socket is closed."""
        while True:
            fds: list[int] = []
            try:
                payload = read_message(channel, limit=None, fds=fds)
            except OSError:
                return
            if not payload:
                return
            request: dict[str, Any] = pickle.loads(payload)
            if request["do"] != "fork":
                channel.sendall(encode_frame(self._reply(request)))
                continue
            parent = os.getpid()
            try:
                child = os.fork()
            except OSError:  # too many processes: the end of its socket fails this episode alone
                os.close(fds[0])
                continue
            if child == 0:
                channel.close()
                _set_up_child(parent)
                self.loop = None  # its selector is shared with the parent
                channel = socket.socket(fileno=fds[0])
                channel.sendall(encode_frame(_encode_reply(os.getpid())))
            else:
                os.close(fds[0])

    def _reply(self, request: Mapping[str, Any]) -> bytes:
        """Run a request and return the reply in JSON."""
        try:
            return _encode_reply(self._handle(request))
        except BaseException as error:  # boundary: the environment's code, SystemExit included
            return json.dumps({"raised": describe_error(error, 1000)}).encode()

    def _handle(self, request: Mapping[str, Any]) -> Any:
        """Run a request and return its result."""
        if request["do"] == "load":
            self.spec = load_spec(*pickle.loads(request["spec"]))
            # Reap children automatically. The import may start children and wait for them.
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            return None
        assert self.spec is not None
        if request["do"] in ("share", "start"):
            _seed_globals(request["task"].seed)
        if request["do"] == "share":
            self.shared = self._await_in_loop(make_environment(self.spec, request["task"]).share())
            return None
        if request["do"] == "start":
            self.runner = InProcessRunner(
                self.spec, request["task"], lambda: self.shared, forks=True
            )
            return self._await_in_loop(self.runner.start())
        assert self.runner is not None
        return self._await_in_loop(
            self.runner.process_answer(request["message"])
            if request["do"] == "answer"
            else self.runner.close()
        )

    def _await_in_loop(self, value: Any) -> Any:
        """Return a value, awaited in this process's event loop if it is awaitable."""
        if not inspect.isawaitable(value):
            return value
        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(await_value(value))


def _seed_globals(seed: int) -> None:
    """Seed the global generators of `random` and numpy for environments that use them.

    Without this, forked processes would all generate the same numbers, or numbers that differ in
    each run.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _set_up_child(parent: int) -> None:
    """Set up a forked child: it ends with its parent, is the first process killed if memory runs
    out, and its output is discarded.
    """
    detach_from(parent)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)


def _encode_reply(result: Any) -> bytes:
    """Return a result as a reply in JSON. Raises ValueError if it has no JSON or is too long."""
    value = encode_result(result)
    try:
        encoded = json.dumps({"found": _with_text_keys(value)}, default=_to_json_value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a value that is not JSON: {describe_error(error, 300)}") from error
    if len(encoded) > _MAX_REPLY_BYTES:
        raise ValueError(
            f"a result of {len(encoded)} characters, at most {_MAX_REPLY_BYTES} are allowed"
        )
    return encoded


def _with_text_keys(value: Any) -> Any:
    """Return a value with the keys of its mappings as texts, as in an episode in a thread."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, (list, tuple)) else value


def _to_json_value(value: Any) -> Any:
    """Convert numpy numbers and arrays, sets, paths and images for JSON. Raises TypeError for any
    other type.
    """
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        return value.tolist()
    if hasattr(value, "__float__"):
        return float(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    try:
        image = make_image_chunk(value)
    except UserError as error:
        raise TypeError(f"{type(value).__name__} cannot be converted to JSON") from error
    return f"data:image/{image.format};base64,{base64.b64encode(image.data).decode()}"


def serve_root(fd: int) -> None:
    """Run the root: import the environment and fork on request.

    `fd`: file descriptor of the socket to the trainer.
    """
    _ForkedProcess().serve(socket.socket(fileno=fd))


# ------------------------------------------------------------------------- in the trainer's process


class ForkServer:
    """Start and hold the process that episodes of an environment are forked from. `close` kills it
    and all processes below it.
    """

    def __init__(self, spec: EnvironmentSpec):
        self.spec = spec
        self._lock = threading.Lock()
        self._root: WorkerProcess | None = None

    def begin(self) -> None:
        """Start the process unless it is running. This takes the seconds of an import. Raises
        UserError if it fails.
        """
        with self._lock:
            if self._root is not None and self._root.has_ended():
                self._stop_root()
            if self._root is None:
                self._start_root()

    def fork(self) -> ProcessChannel:
        """Fork a new process. Raises EpisodeFailed if the root has ended."""
        with self._lock:
            if self._root is None:
                raise EpisodeFailed("the process that episodes are forked from has ended")
            return _fork_process(self._root.channel)

    def close(self) -> None:
        """Kill the process and all processes below it."""
        with self._lock:
            self._stop_root()

    def _stop_root(self) -> None:
        if self._root is not None:
            self._root.stop()
        self._root = None

    def _start_root(self) -> None:
        """Start the interpreter, send it the environment's address, and wait for the import."""
        single_thread = {
            name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        }
        environment = {
            **os.environ,
            **single_thread,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        label = f"the process of environment {self.spec.name}"
        self._root = WorkerProcess(
            "rl.envs.fork_server:serve_root", environment, limit=_MAX_REPLY_BYTES
        )
        try:
            spec = pickle.dumps((self.spec.address, dict(self.spec.settings)))
            self._root.send(pickle.dumps({"do": "load", "spec": spec}), _START_SECONDS)
            _decode_reply(self._root.receive(_START_SECONDS), label)
        except (TimeoutError, WorkerDiedError, InvalidReply, EpisodeFailed) as error:
            self._stop_root()
            reasons = {
                TimeoutError: f"{label} was not ready after {_START_SECONDS:g} s",
                InvalidReply: f"{label} sent an invalid reply: {error}",
                WorkerDiedError: f"{label} died: {error}",
            }
            raise UserError(reasons.get(type(error), str(error))) from error
        self._root.channel.setblocking(True)


def _fork_process(channel: socket.socket) -> ProcessChannel:
    """Request a fork over a socket and return the channel to the new process."""
    parent_end, child_end = socket.socketpair()
    try:
        request = encode_frame(pickle.dumps({"do": "fork"}))
        socket.send_fds(channel, [request], [child_end.fileno()])
    except OSError as error:
        raise EpisodeFailed("the process that episodes are forked from has ended") from error
    finally:
        child_end.close()
    return ProcessChannel(parent_end)


def _decode_reply(payload: bytes, label: str) -> Any:
    """Return the result in a reply. Raises EpisodeFailed if the process raised or the reply is
    invalid.
    """
    try:
        reply = json.loads(payload)
        if "raised" in reply:
            raise EpisodeFailed(f"{label} raised {sanitize_text(str(reply['raised']), 2000)}")
        return decode_result(reply["found"])
    except (ValueError, KeyError, TypeError) as error:
        raise EpisodeFailed(
            f"{label} sent an invalid reply: {describe_error(error, 200)}"
        ) from error


class ProcessChannel:
    """Connect to a forked process, with a single request at a time."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._pid: int | None = None
        # Several threads fork episodes from a group's process.
        self._lock = threading.Lock()

    def ask(self, label: str, do: str, **arguments: Any) -> Any:
        """Send a request and return its result. Raises EpisodeFailed if the process raised or
        died.
        """
        if self._pid is None:
            self._pid = int(self._read_reply(label))
        with contextlib.suppress(OSError):  # the process has ended, which the reply tells
            self._channel.sendall(encode_frame(pickle.dumps({"do": do, **arguments})))
        return self._read_reply(label)

    def _read_reply(self, label: str) -> Any:
        """Return the next result. Raises EpisodeFailed if the process raised or died."""
        payload, reason = b"", None
        try:
            payload = read_message(self._channel, _MAX_REPLY_BYTES)
        except OSError as error:
            reason = error
        except InvalidReply as error:
            raise EpisodeFailed(f"{label} sent an invalid reply: {error}") from error
        if not payload:
            raise EpisodeFailed(f"{label} died: its process ended, or was killed") from reason
        return _decode_reply(payload, label)

    def fork(self) -> ProcessChannel:
        """Fork a child of this process and return the channel to it."""
        with self._lock:
            return _fork_process(self._channel)

    def end(self) -> None:
        """Kill the process and its descendants. Those that it left to the reaper end with the
        root.
        """
        pid, self._pid = self._pid, None  # later the number may be that of another process
        if pid is not None:
            kill_tree(pid)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process and close the socket, in the thread that reads it. Garbage collection
        would close it much later.
        """
        self.end()
        self._channel.close()


CLOSE_SECONDS = 30.0  # time limit of an environment's `close`: nothing waits for it


class SubprocessRunner:
    """Run an episode in a separate process. See `InProcessRunner`. `fork`: function that forks the
    process.
    """

    def __init__(self, label: str, task: EpisodeTask, fork: Callable[[], ProcessChannel]):
        self.label, self.task, self._fork = label, task, fork
        self._channel: ProcessChannel | None = None

    def start(self) -> Any:
        """Fork the process and start the episode in it."""
        self._channel = self._fork()
        return self._channel.ask(self.label, "start", task=self.task)

    def process_answer(self, message: Mapping[str, Any]) -> Any:
        """Send an answer and return the result."""
        assert self._channel is not None
        return self._channel.ask(self.label, "answer", message=dict(message))

    def close(self) -> None:
        """Close the environment within `CLOSE_SECONDS`, then kill the process."""
        if self._channel is not None:
            timer = threading.Timer(CLOSE_SECONDS, self._channel.end)
            timer.daemon = True
            timer.start()
            try:
                self._channel.ask(self.label, "close")
            finally:
                timer.cancel()
                self._channel.close()

    def kill(self) -> None:
        """Kill the process."""
        if self._channel is not None:
            self._channel.end()


# ----------------------------------------------------------------------- where episodes run

ISOLATIONS = ("auto", "thread", "process")  # see apply_isolation


def resolve_environment(
    spec: str | type | EnvironmentSpec, *, environment_isolation: str = "auto", **settings: Any
) -> EnvironmentSpec:
    """Return the environment that `spec` names, with its settings. Setting values are used as they
    are.

      spec                   a registered name, "module:Class", "path/to/file.py:Class", or a class
      environment_isolation  where its episodes run, as `train.py --environment-isolation`: see
                             `apply_isolation`

    Raises UserError for an unknown name, and for an unknown setting, with the nearest known
    setting.
    """
    resolved = resolve_spec(spec, settings)
    if isinstance(spec, EnvironmentSpec) and environment_isolation == "auto":
        return resolved  # it was already resolved, including its isolation
    return apply_isolation(replace(resolved, fork_server=None), environment_isolation)


def apply_isolation(spec: EnvironmentSpec, isolation: str) -> EnvironmentSpec:
    """Return the environment with its episodes run as `isolation` requires (one of ISOLATIONS).

      process  each episode in a separate process: a crash or hang fails only that episode, and no
               module state outlives an episode
      thread   in threads of this process
      auto     process for an environment that is named by its module or file, thread for built-in
               environments and classes of the script

    Raises UserError for any other value.
    """
    if isolation not in ISOLATIONS:
        raise UserError(
            f"environment_isolation is one of {', '.join(ISOLATIONS)}; got {isolation!r}"
        )
    by_location = (
        ":" in spec.name and spec.address is not None and not spec.address.startswith("__main__:")
    )
    return (
        isolate_environment(spec)
        if isolation == "process" or (isolation == "auto" and by_location)
        else spec
    )


def isolate_environment(spec: EnvironmentSpec) -> EnvironmentSpec:
    """Return a copy of the spec that runs each episode in a separate process.

    Raises UserError if the class or a setting cannot be sent to that process.
    """
    if spec.address is None:
        raise UserError(
            f"the environment {spec.name} is a class of this script, which no other process can"
            " import: name it as 'path/to/file.py:Class'"
        )
    for name, value in spec.settings.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # boundary: pickling of any object
            raise UserError(
                f"the environment {spec.name}: its setting {name!r} cannot be sent to another "
                f"process, where its episodes run ({describe_error(error, 200)}). Give a value "
                "that can be pickled, or environment_isolation='thread'"
            ) from error
    return replace(spec, fork_server=ForkServer(spec))
