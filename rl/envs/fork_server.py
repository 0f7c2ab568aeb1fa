"""Run episodes in separate processes, forked from a process that has imported the environment. A
crash or hang fails only that episode.

    trainer --socket--> root --fork--> group (if something is shared) --fork--> episode

The root is a new interpreter that imports the environment's module and no model code. Each process
serves a single socket: the trainer sends frames of pickles, and receives frames of JSON. The output
of an episode is discarded. This is not a sandbox: the environment's code runs as the same user.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl.envs.env_runner import (
    EpisodeTask,
    InProcessRunner,
    decode_result,
    encode_result,
    make_environment,
)
from rl.envs.environment_registry import EnvironmentSpec, load_spec
from rl.errors import UserError
from rl.rollout import EpisodeFailed
from rl.sanitize import describe_error, sanitize_text

_MAX_FRAME_BYTES = 1 << 24  # bytes of a reply
_START_SECONDS = 120.0  # for the import of the environment's module, which may be slow
_SET_PARENT_DEATH_SIGNAL = 1


# ----------------------------------------------------------------------------------- both processes


def _send_frame(channel: socket.socket, payload: bytes, fds: list[int] | None = None) -> None:
    """Send a frame, with file descriptors if any."""
    head = struct.pack("<I", len(payload))
    if fds:
        socket.send_fds(channel, [head], fds)
        channel.sendall(payload)
    else:
        channel.sendall(head + payload)


def _receive_frame(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Return a frame and the file descriptors sent with it.

    Raises EOFError if the socket is closed, ValueError if the frame is larger than _LARGEST.
    """
    head, fds, _, _ = socket.recv_fds(channel, 4, 1)
    while 0 < len(head) < 4:
        head += channel.recv(4 - len(head))
    if len(head) < 4:
        raise EOFError
    (size,) = struct.unpack("<I", head)
    if size > _MAX_FRAME_BYTES:
        raise ValueError(f"the reply has {size} bytes, at most {_MAX_FRAME_BYTES} are allowed")
    parts, remaining = [], size
    while remaining:
        part = channel.recv(min(remaining, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        remaining -= len(part)
    return b"".join(parts), list(fds)


# ------------------------------------------------------------------------- in the episode's process


class _ForkedProcess:
    """Serve a single socket: `fork` makes a child that serves another socket; other requests run an
    episode.
    """

    def __init__(self, spec: EnvironmentSpec):
        self.spec = spec
        self.shared: Any = None
        self.host: InProcessRunner | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def serve(self, channel: socket.socket) -> None:
        """Process requests until the socket is closed."""
        while True:
            try:
                payload, fds = _receive_frame(channel)
            except (EOFError, OSError):
                return
            request: dict[str, Any] = pickle.loads(payload)
            if request["do"] == "fork":
                if os.fork() == 0:
                    channel.close()
                    _detach_child()
                    channel = socket.socket(fileno=fds[0])
                    continue
                os.close(fds[0])
                continue
            try:
                reply: dict[str, Any] = {"found": encode_result(self._handle(request))}
            except BaseException as error:  # boundary: the environment's code, SystemExit included
                reply = {"raised": describe_error(error, 1000)}
            try:
                text = json.dumps(reply, default=_to_json_value)
            except (TypeError, ValueError, RecursionError) as error:
                text = json.dumps(
                    {"raised": f"a value that is not JSON: {describe_error(error, 300)}"}
                )
            if len(text) > _MAX_FRAME_BYTES:
                text = json.dumps(
                    {
                        "raised": f"a result of {len(text)} characters, at most "
                        f"{_MAX_FRAME_BYTES} are allowed"
                    }
                )
            _send_frame(channel, text.encode("utf-8", "backslashreplace"))

    def _handle(self, request: Mapping[str, Any]) -> Any:
        """Run a request and return its result."""
        if request["do"] == "pid":
            return os.getpid()
        if request["do"] in ("share", "start"):
            _seed_globals(request["task"].seed)
        if request["do"] == "share":
            self.shared = self._await_in_loop(make_environment(self.spec, request["task"]).share())
            return None
        if request["do"] == "start":
            self.host = InProcessRunner(self.spec, request["task"], lambda: self.shared, forks=True)
            return self._await_in_loop(self.host.start())
        assert self.host is not None
        return self._await_in_loop(
            self.host.process_answer(request["message"])
            if request["do"] == "answer"
            else self.host.close()
        )

    def _await_in_loop(self, value: Any) -> Any:
        """Return a value, awaited in this process's event loop if it is awaitable."""
        if not inspect.isawaitable(value):
            return value
        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(_await_value(value))


def _seed_globals(seed: int) -> None:
    """Seed the global generators of `random` and numpy for environments that use them.

    Without this, forked processes would all generate the same numbers, or numbers that differ in
    each run.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)


async def _await_value(value: Any) -> Any:
    """Await any awaitable, as the coroutine that an event loop requires."""
    return await value


def _detach_child() -> None:
    """Prepare a forked child: it ends with its parent, is the first process killed if memory runs
    out, and its output is discarded.
    """
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)


def _to_json_value(value: Any) -> Any:
    """Convert numpy numbers and arrays, sets and mappings for JSON. Raises TypeError for any other
    type.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__float__"):
        return float(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")


def _main(fd: int) -> None:
    """Run the root: import the environment, confirm it, and fork on request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap children automatically
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # These signals stop the run. The run then ends the root by closing its socket.
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=fd)
    frame = _receive_frame(channel)[0]
    try:
        path, pickled_spec = pickle.loads(frame)
        sys.path[:] = path
        # Settings may be objects of modules that only this path can import.
        address, settings = pickle.loads(pickled_spec)
        spec = load_spec(address, settings)
    except Exception as error:  # boundary: the environment's module
        _send_frame(channel, json.dumps({"raised": describe_error(error, 2000)}).encode())
        return
    _send_frame(channel, json.dumps({"found": {"value": None}}).encode())
    _ForkedProcess(spec).serve(channel)


# ------------------------------------------------------------------------- in the trainer's process


class ForkServer:
    """Start and hold the process that episodes of an environment are forked from. `close` kills it
    and all processes forked from it.
    """

    def __init__(self, spec: EnvironmentSpec):
        self.spec = spec
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen | None = None

    def begin(self) -> None:
        """Start the process unless it is running. This takes the seconds of an import. Raises
        UserError if it fails.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._kill_process()
            if self._channel is None:
                try:
                    self._start_process()
                except EpisodeFailed as error:
                    self._kill_process()
                    raise UserError(str(error)) from error

    def fork(self) -> ProcessChannel:
        """Fork a new process. Raises EpisodeFailed if the root has ended."""
        with self._lock:
            if self._channel is None:
                raise EpisodeFailed("the process that episodes are forked from has ended")
            return _fork_process(self._channel)

    def close(self) -> None:
        """Kill the process."""
        with self._lock:
            self._kill_process()

    def _kill_process(self) -> None:
        """Close the socket and kill the process."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None

    def _start_process(self) -> None:
        """Start the interpreter, send it the environment's address, and wait for the import."""
        parent_end, child_end = socket.socketpair()
        single_thread = {
            name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        }
        environment = {
            **os.environ,
            **single_thread,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [
            sys.executable,
            "-c",
            f"from rl.envs.fork_server import _main; _main({child_end.fileno()})",
        ]
        devnull = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            pass_fds=[child_end.fileno()],
            env=environment,
            stdin=devnull,
            stdout=devnull,
            stderr=devnull,
        )
        child_end.close()
        _send_frame(
            parent_end,
            pickle.dumps(
                (list(sys.path), pickle.dumps((self.spec.address, dict(self.spec.settings))))
            ),
        )
        parent_end.settimeout(_START_SECONDS)
        result = _read_reply(parent_end, f"the process of environment {self.spec.name}")
        assert result is None
        parent_end.settimeout(None)
        self._channel = parent_end


def _fork_process(channel: socket.socket) -> ProcessChannel:
    """Request a fork over a socket and return the channel to the new process."""
    parent_end, child_end = socket.socketpair()
    try:
        _send_frame(channel, pickle.dumps({"do": "fork"}), [child_end.fileno()])
    except OSError as error:
        raise EpisodeFailed("the process that episodes are forked from has ended") from error
    finally:
        child_end.close()
    return ProcessChannel(parent_end)


def _read_reply(channel: socket.socket, label: str) -> Any:
    """Return the reply to a request. Raises EpisodeFailed if the process raised, died or sent no
    valid reply.
    """
    try:
        payload, _ = _receive_frame(channel)
        reply = json.loads(payload)
        if "raised" in reply:
            raise EpisodeFailed(f"{label} raised {sanitize_text(str(reply['raised']), 2000)}")
        return decode_result(reply["found"])
    except (EOFError, OSError) as error:
        raise EpisodeFailed(f"{label} died: its process ended, or was killed") from error
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
        try:
            if self._pid is None:
                _send_frame(self._channel, pickle.dumps({"do": "pid"}))
                self._pid = int(_read_reply(self._channel, label))
            _send_frame(self._channel, pickle.dumps({"do": do, **arguments}))
        except OSError as error:
            raise EpisodeFailed(f"{label} died: its process ended, or was killed") from error
        return _read_reply(self._channel, label)

    def fork(self) -> ProcessChannel:
        """Fork a child of this process and return the channel to it."""
        with self._lock:
            return _fork_process(self._channel)

    def end(self) -> None:
        """Kill the process and all processes of its session."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)


class SubprocessRunner:
    """Run an episode in a separate process. See `EnvRunner`. `fork`: function that forks the
    process.
    """

    def __init__(self, label: str, task: EpisodeTask, fork: Any):
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
        """Close the environment, then kill the process."""
        if self._channel is not None:
            try:
                self._channel.ask(self.label, "close")
            finally:
                self._channel.end()

    def kill(self) -> None:
        """Kill the process."""
        if self._channel is not None:
            self._channel.end()
