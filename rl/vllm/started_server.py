"""Start a vLLM server on this machine, restart it if it dies or hangs, and end it with the run."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl.errors import UserError
from rl.processes import SupervisedProcess
from rl.vllm.transfer_validation import FolderManifest
from rl.vllm.vllm_server import VllmServer, VllmServerError

MAX_RESTARTS = 3  # for the same weights
_WATCH_SECONDS = 0.5  # between two looks at the process
_HEALTH_SECONDS = 10.0  # between two requests that show whether the server hangs
_PROGRESS_SECONDS = 15.0  # between two lines that show that a server is starting
# Variables that tell a process its place in this launch. A server is a launch of its own.
_LAUNCH_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_APPEND_OUTPUT = 'exec "$@" >>"$0" 2>&1'


@dataclass(frozen=True)
class ServerLaunch:
    """Hold how to start a server.

    `command`: with options of the user, before the model. `dtype`: such as "float32". `memory`:
    share of the device's memory. `log`: file for its output. `cuda`: whether it shares a GPU with
    the learner, and sleeps while the learner works.
    """

    command: tuple[str, ...]
    dtype: str
    max_rows: int
    memory: float
    log: Path
    cuda: bool

    def build_command(self, model: Path, port: int) -> list[str]:
        """Return the command line of a server of the model in a folder."""
        line = [*self.command, str(model), "--host", "127.0.0.1", "--port", str(port)]
        line += ["--dtype", self.dtype, "--max-model-len", "auto"]
        line += ["--max-num-seqs", str(self.max_rows)]
        line += ["--gpu-memory-utilization", f"{self.memory:g}"]
        line += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
        line += ["--uvicorn-log-level", "warning"]
        if self.cuda:
            return [*line, "--enable-sleep-mode"]
        # on a CPU a tied head is not updated, and compilation takes longer than a short run
        return [*line, "--enforce-eager", "--hf-overrides", '{"tie_word_embeddings": false}']


def find_command(command: str | None) -> tuple[str, ...]:
    """Return the command that starts a server, by default vLLM's. Raises UserError without vLLM."""
    words = tuple(shlex.split(command or ""))
    if words:
        if shutil.which(words[0]) is None:
            raise UserError(f"sampler_command: there is no program {words[0]}")
        return words
    if (program := shutil.which("vllm")) is not None:
        return program, "serve"
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"
    raise UserError(
        "sampler vllm starts a vLLM server, and there is no program vllm: set sampler_command, such "
        "as '/opt/vllm/bin/vllm serve', or start a server and set sampler_url (docs/vllm.md)"
    )


def find_free_port() -> int:
    """Return a port of the loopback interface that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class StartedServer(VllmServer):
    """Hold a server of this run. `launch`: None on ranks other than 0, which only send samples.

    It starts with the first weights, from their folder. A thread restarts it if it ends or hangs,
    and loads the current weights before it gets samples.
    """

    def __init__(self, port: int, request_seconds: float, launch: ServerLaunch | None, cuda: bool):
        super().__init__(f"http://127.0.0.1:{port}", request_seconds)
        self.max_context = sys.maxsize  # until it has started
        self.tied_head, self.sleeps = cuda, cuda
        self.is_asleep, self.is_checked = False, False
        self.hangs = False  # a sample exceeded the time limit
        self._port, self._launch = port, launch
        if launch is not None:
            self.dtype = f"torch.{launch.dtype}"
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._process: SupervisedProcess | None = None
        self._weights: tuple[Path, str, FolderManifest] | None = None
        self._num_restarts, self._next_health = 0, 0.0
        self._error: Exception | None = None  # after which it is not started again
        self._watcher: threading.Thread | None = None

    def load_weights(self, folder: Path, weights_id: str, manifest: FolderManifest) -> None:
        """Load weights, after a start where the server does not run.

        Raises VllmServerError if that fails, also after `MAX_RESTARTS` restarts.
        """
        with self._lock:
            self._weights, self._num_restarts = (folder, weights_id, manifest), 0
            self._error = None
            self._load_current()

    def _load_current(self, failure: str | None = None) -> None:
        """Load the current weights. `failure`: why the server has to be restarted before."""
        assert self._weights is not None
        while True:
            try:
                if failure is not None:
                    self._prepare_restart(failure)
                if self._process is None:
                    self._start(self._weights[0])
                super().load_weights(*self._weights)
                return
            except VllmServerError as error:
                limit = self._num_restarts >= MAX_RESTARTS or self._watcher is None
                if error.has_wrong_weights or limit or self._closed.is_set():
                    raise
                failure = str(error)

    def _prepare_restart(self, failure: str) -> None:
        """End the server and count a restart. Raises VllmServerError if there were enough."""
        state = "" if self._process is None else f" ({self._process.describe_end()})"
        self._stop_process()
        if self._num_restarts >= MAX_RESTARTS:
            raise VllmServerError(self.url, f"failed after {MAX_RESTARTS} restarts: {failure}")
        self._num_restarts += 1
        warnings.warn(
            f"{failure}{state}: it is started again, restart {self._num_restarts} of at most "
            f"{MAX_RESTARTS} for these weights. Its output: {self._log}",
            stacklevel=2,
        )

    @property
    def _log(self) -> Path:
        assert self._launch is not None
        return self._launch.log

    def _start(self, model: Path) -> None:
        """Start the server and wait until it answers. Raises VllmServerError if it does not within
        the time limit of a call, UserError if it has settings that cannot work.
        """
        assert self._launch is not None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = self._launch.build_command(model, self._port)
        line = ["/bin/sh", "-c", _APPEND_OUTPUT, str(self._log), *command]
        self._process = SupervisedProcess(line, _make_environment(os.environ))
        try:
            self._wait_until_healthy()
            self.check()
        except BaseException:
            self._stop_process()
            raise
        self.is_checked, self.is_asleep, self.hangs = True, False, False
        self._next_health = time.monotonic() + _HEALTH_SECONDS
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="vllm-watch", daemon=True)
            self._watcher.start()

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        begin = shown = time.monotonic()
        while True:
            if self._closed.is_set() or not self._process.read_output():
                state = self._process.describe_end()
                last = _read_last_line(self._log)
                raise VllmServerError(
                    self.url, f"did not start ({state}; {last}). Its output: {self._log}"
                )
            try:
                self.call("/health")
                return
            except VllmServerError as error:
                now = time.monotonic()
                if now - begin > self.request_seconds:
                    raise VllmServerError(
                        self.url,
                        f"did not start within {self.request_seconds:g} s (sampler_timeout). Its "
                        f"output: {self._log}",
                    ) from error
            if now - shown >= _PROGRESS_SECONDS:
                shown, last = now, _read_last_line(self._log)
                text = f"vLLM is starting, {now - begin:.0f} s: {last}"
                print(text, file=sys.stderr, flush=True)
            self._closed.wait(_WATCH_SECONDS)

    def _watch(self) -> None:
        """Restart the server whenever it ends or hangs, until `close`."""
        while not self._closed.wait(_WATCH_SECONDS):
            with self._lock:
                if self._error is not None or self._weights is None or self.is_asleep:
                    continue
                if not self._weights[0].is_dir():  # the next weights are loaded soon
                    continue
                failure = self._find_failure()
                if failure is None or self._closed.is_set():
                    continue
                try:
                    self._load_current(failure)
                except Exception as error:  # noqa: BLE001  (raised where a sample is requested)
                    self._error = error

    def _find_failure(self) -> str | None:
        """Return why the server has to be restarted, None if it works."""
        if self._process is None or not self._process.read_output():
            return f"the vLLM server {self.url} has ended"
        if self.hangs:
            return f"the vLLM server {self.url} hangs"
        if time.monotonic() >= self._next_health:
            try:
                self.call("/health")
            except VllmServerError as error:
                return str(error)
            self._next_health = time.monotonic() + _HEALTH_SECONDS
        return None

    def wait_for_weights(self, weights_id: str) -> bool:
        """Wait until the server has these weights, after a restart if it failed. Return whether it
        has them within the time limit of a call.
        """
        deadline = time.monotonic() + self.request_seconds
        while not self._closed.is_set() and time.monotonic() < deadline:
            if self._error is not None:
                raise UserError(str(self._error)) from self._error
            if not self.hangs:
                try:
                    if self.call("/weight_info").get("weight_version") == weights_id:
                        return True
                except (VllmServerError, AttributeError):
                    pass  # it is being restarted
            self._closed.wait(_WATCH_SECONDS)
        return False

    def sleep(self) -> None:
        """Free the server's GPU memory for the learner. Running samples wait."""
        with self._lock:
            self.is_asleep = True
            if self._process is not None:
                try:
                    self.call("/sleep?level=1&mode=keep", {}, self.request_seconds)
                except VllmServerError:
                    self._stop_process()  # `wake_up` starts it again

    def wake_up(self) -> None:
        """Continue after `sleep`. Raises VllmServerError if the server cannot be restarted."""
        with self._lock:
            self.is_asleep = False
            try:
                self.call("/wake_up", {}, self.request_seconds)
            except VllmServerError as error:
                if self._weights is not None and self._weights[0].is_dir():
                    self._load_current(str(error))  # otherwise the next load restarts it

    def close(self) -> None:
        """End the server and all its processes; idempotent."""
        self._closed.set()
        if (process := self._process) is not None:
            process.request_end()  # calls that hold the lock then fail
        with self._lock:
            self._stop_process()

    def _stop_process(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


def _make_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _LAUNCH_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return {**kept, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


def _read_last_line(log: Path) -> str:
    """Return the last line of a log, shortened."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][-200:] if lines else "no output yet"
