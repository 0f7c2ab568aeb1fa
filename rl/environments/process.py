"""Episodes in processes of their own, forked from one that has imported the environment: what dies
or hangs there costs that episode.

    trainer --socket--> root --fork--> group (where something is shared) --fork--> episode

The root is a fresh interpreter that imports the environment's module and nothing of a model. Each
process serves one socket: frames of pickles come from the trainer, frames of JSON go back. What an
episode prints goes nowhere. This is no sandbox: an environment is code that runs as the same user.
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

from rl.environments.hosts import LocalHost, Task, as_json, from_json, prepared
from rl.environments.registry import EnvironmentSpec, environment_from_address
from rl.episodes import EpisodeFailed
from rl.errors import UserError
from rl.plain import plain_text, says

_LARGEST = 1 << 24  # bytes of a reply
_START_SECONDS = 120.0  # to import the environment's module, which may be heavy
_SET_PARENT_DEATH_SIGNAL = 1


# --------------------------------------------------------------------------------------- both sides


def _send(channel: socket.socket, payload: bytes, fds: list[int] | None = None) -> None:
    head = struct.pack("<I", len(payload))
    if fds:
        socket.send_fds(channel, [head], fds)
        channel.sendall(payload)
    else:
        channel.sendall(head + payload)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """A frame and the descriptors that came with it. Raises EOFError."""
    head, fds, _, _ = socket.recv_fds(channel, 4, 1)
    while 0 < len(head) < 4:
        head += channel.recv(4 - len(head))
    if len(head) < 4:
        raise EOFError
    (size,) = struct.unpack("<I", head)
    if size > _LARGEST:
        raise ValueError(f"a reply of {size} bytes, at most {_LARGEST} are read")
    parts, left = [], size
    while left:
        part = channel.recv(min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts), list(fds)


# ----------------------------------------------------------------------------- in the other process


class _Process:
    """Serves one socket: `fork` makes a child that serves another; the rest is an episode's."""

    def __init__(self, spec: EnvironmentSpec):
        self.spec = spec
        self.shared: Any = None
        self.host: LocalHost | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def serve(self, channel: socket.socket) -> None:
        while True:
            try:
                payload, fds = _receive(channel)
            except (EOFError, OSError):
                return
            asked: dict[str, Any] = pickle.loads(payload)
            if asked["do"] == "fork":
                if os.fork() == 0:
                    channel.close()
                    _quieten()
                    channel = socket.socket(fileno=fds[0])
                    continue
                os.close(fds[0])
                continue
            try:
                reply: dict[str, Any] = {"found": as_json(self._do(asked))}
            except BaseException as error:  # boundary: the environment's code, SystemExit included
                reply = {"raised": says(error, 1000)}
            try:
                text = json.dumps(reply, default=_plain)
            except (TypeError, ValueError, RecursionError) as error:
                text = json.dumps({"raised": f"what is no JSON: {says(error, 300)}"})
            if len(text) > _LARGEST:
                text = json.dumps(
                    {
                        "raised": f"an answer of {len(text)} characters, of which {_LARGEST} at most are read"
                    }
                )
            _send(channel, text.encode("utf-8", "backslashreplace"))

    def _do(self, asked: Mapping[str, Any]) -> Any:
        if asked["do"] == "pid":
            return os.getpid()
        if asked["do"] in ("share", "start"):
            _seed_globals(asked["task"].seed)
        if asked["do"] == "share":
            self.shared = self._waited(prepared(self.spec, asked["task"]).share())
            return None
        if asked["do"] == "start":
            self.host = LocalHost(self.spec, asked["task"], lambda: self.shared, forks=True)
            return self._waited(self.host.start())
        assert self.host is not None
        return self._waited(
            self.host.answer(asked["message"]) if asked["do"] == "answer" else self.host.close()
        )

    def _waited(self, found: Any) -> Any:
        if not inspect.isawaitable(found):
            return found
        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(_awaited(found))


def _seed_globals(seed: int) -> None:
    """The generators that modules share, for environments that draw from these: else forked
    processes draw all alike, or all otherwise.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)


async def _awaited(found: Any) -> Any:
    return await found


def _quieten() -> None:
    """A child: ends with its parent, is the first to go where memory runs out, prints nowhere."""
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy's and the like; TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__float__"):
        return float(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _main(fd: int) -> None:
    """The root: imports the environment, says that it has, and forks."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # those ask the run to stop; it ends this by letting go
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=fd)
    sent = _receive(channel)[0]
    try:
        path, rest = pickle.loads(sent)
        sys.path[:] = path
        # settings may be of modules that are found by this path alone
        address, settings = pickle.loads(rest)
        spec = environment_from_address(address, settings)
    except Exception as error:  # boundary: the environment's module
        _send(channel, json.dumps({"raised": says(error, 2000)}).encode())
        return
    _send(channel, json.dumps({"found": {"value": None}}).encode())
    _Process(spec).serve(channel)


# ----------------------------------------------------------------------------------- in the trainer


class Root:
    """The process that others are forked from, for one environment. `begin` it; `close` ends it and
    all that it forked.
    """

    def __init__(self, spec: EnvironmentSpec):
        self.spec = spec
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen | None = None

    def begin(self) -> None:
        """Starts it, if it does not run (any more): an import's seconds. Raises UserError where it
        cannot.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._channel is None:
                try:
                    self._begin()
                except EpisodeFailed as error:
                    self._end()
                    raise UserError(str(error)) from error

    def fork(self) -> Channel:
        """A new process. Raises EpisodeFailed where the root is gone."""
        with self._lock:
            if self._channel is None:
                raise EpisodeFailed("the process that episodes are forked from is gone")
            return _forked(self._channel)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        one = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        environment = {
            **os.environ,
            **one,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [
            sys.executable,
            "-c",
            f"from rl.environments.process import _main; _main({theirs.fileno()})",
        ]
        none = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=none,
            stdout=none,
            stderr=none,
        )
        theirs.close()
        _send(
            ours,
            pickle.dumps(
                (list(sys.path), pickle.dumps((self.spec.address, dict(self.spec.settings))))
            ),
        )
        ours.settimeout(_START_SECONDS)
        found = _reply(ours, f"the process of environment {self.spec.name}")
        assert found is None
        ours.settimeout(None)
        self._channel = ours


def _forked(channel: socket.socket) -> Channel:
    ours, theirs = socket.socketpair()
    try:
        _send(channel, pickle.dumps({"do": "fork"}), [theirs.fileno()])
    except OSError as error:
        raise EpisodeFailed("the process that episodes are forked from is gone") from error
    finally:
        theirs.close()
    return Channel(ours)


def _reply(channel: socket.socket, who: str) -> Any:
    try:
        payload, _ = _receive(channel)
        reply = json.loads(payload)
        if "raised" in reply:
            raise EpisodeFailed(f"{who} raised {plain_text(str(reply['raised']), 2000)}")
        return from_json(reply["found"])
    except (EOFError, OSError) as error:
        raise EpisodeFailed(f"{who} died: its process ended, or was ended") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EpisodeFailed(f"{who} answered with what is no reply: {says(error, 200)}") from error


class Channel:
    """One process of ours: asked one thing at a time."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._pid: int | None = None
        self._lock = threading.Lock()  # of a group's: its episodes are forked from several threads

    def ask(self, who: str, do: str, **more: Any) -> Any:
        """What it replies. Raises EpisodeFailed where it raised, or died."""
        try:
            if self._pid is None:
                _send(self._channel, pickle.dumps({"do": "pid"}))
                self._pid = int(_reply(self._channel, who))
            _send(self._channel, pickle.dumps({"do": do, **more}))
        except OSError as error:
            raise EpisodeFailed(f"{who} died: its process ended, or was ended") from error
        return _reply(self._channel, who)

    def fork(self) -> Channel:
        with self._lock:
            return _forked(self._channel)

    def end(self) -> None:
        """Kills it, and what it started in its session."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)


class RemoteHost:
    """An episode in a process of its own. See `Host`. `parent`: makes the process."""

    def __init__(self, who: str, task: Task, parent: Any):
        self.who, self.task, self._parent = who, task, parent
        self._channel: Channel | None = None

    def start(self) -> Any:
        self._channel = self._parent()
        return self._channel.ask(self.who, "start", task=self.task)

    def answer(self, message: Mapping[str, Any]) -> Any:
        assert self._channel is not None
        return self._channel.ask(self.who, "answer", message=dict(message))

    def close(self) -> None:
        if self._channel is not None:
            try:
                self._channel.ask(self.who, "close")
            finally:
                self._channel.end()

    def abandon(self) -> None:
        if self._channel is not None:
            self._channel.end()
