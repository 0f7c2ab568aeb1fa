"""Start a vLLM server on this machine, restart it if it dies or hangs, and end it with the run."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.errors import UserError
from rl.processes import SupervisedProcess, get_environment_without_launch
from rl.vllm.sample_reply import VllmServerError
from rl.vllm.transfer_validation import ServerWeights
from rl.vllm.vllm_server import VllmServer

MAX_RESTARTS = 3  # for the same weights
_POLL_SECONDS = 0.5  # between two looks at the process or the server
_HEALTH_SECONDS = 10.0  # between two requests that show whether the server hangs
_HEALTH_LIMIT = 20.0  # time limit of such a request
# rl.startup sets it. vLLM's sums over GPUs end the server with "invalid argument" under it
# (vllm#42609).
_ALLOCATOR_SETTING = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
_APPEND_OUTPUT = 'exec "$@" >>"$0" 2>&1'


@dataclass(frozen=True)
class ServerLaunch:
    """Hold how to start a server.

    `command`: the program and options of the user. `dtype`: such as "float32". `max_rows`: number
    of sequences decoded in a batch. `memory`: share of the device's memory. `cuda`: whether the
    device is a GPU. `returns_experts`: samples hold the experts of their tokens. `sleeps`: it can
    free its memory while the learner works.
    """

    command: tuple[str, ...]
    dtype: str
    max_rows: int
    memory: float
    cuda: bool
    returns_experts: bool = False
    sleeps: bool = False

    def build_command(self, model: Path, port: int, lora_rank: int = 0) -> list[str]:
        """Return the command line of a server of the model in a folder. An option of the user takes
        the place of the same option here. `lora_rank`: of the adapters that it gets.
        """
        options = {
            "--enable-scale-out": [],
            "--logprobs-mode": ["processed_logprobs"],
            "--dtype": [self.dtype],
            "--max-model-len": ["auto"],
            "--max-num-seqs": [str(self.max_rows)],
            "--gpu-memory-utilization": [f"{self.memory:g}"],
            "--disable-uvicorn-access-log": [],
        }
        # On a CPU vLLM does not update a tied head, fails at a seeded sample whose prompt is split
        # (a generator of a CPU has no offset), and compiles for longer than a short run takes.
        if not self.cuda:
            options["--enforce-eager"] = []
            options["--no-enable-chunked-prefill"] = []
            options["--hf-overrides"] = ['{"tie_word_embeddings": false}']
        if self.returns_experts:
            options["--enable-return-routed-experts"] = []
        if self.sleeps:
            options["--enable-sleep-mode"] = []
        if lora_rank:
            options["--max-lora-rank"] = [str(min(r for r in _LORA_RANKS if r >= lora_rank))]
            options["--max-loras"], options["--max-cpu-loras"] = ["2"], ["4"]
        line = [*self.command, str(model), "--host", "127.0.0.1", "--port", str(port)]
        flags = _read_flags(self.command)
        for flag, values in options.items():
            line += [] if flag in flags else [flag, *values]
        return line


def find_command(command: str | None) -> tuple[str, ...]:
    """Return the command that starts a server, by default vLLM's. It may begin with assignments to
    variables, as in a shell. Raises UserError if there is no such program.
    """
    words = _split_command(command)
    if "--config" in _read_flags(words):
        raise UserError(
            "sampler_command has --config, and the options of the run would replace those of its"
            " file: pass the file's options in sampler_command"
        )
    if words:
        after_serve = words[-words[::-1].index("serve") :] if "serve" in words[:-1] else ()
        if after_serve and not after_serve[0].startswith("-"):
            raise UserError(
                f"sampler_command names the model {after_serve[0]}: leave it out, since the server "
                "gets the weights of the run"
            )
        first = next((i for i, word in enumerate(words) if "=" not in word), 0)
        words[first] = os.path.expanduser(words[first])
        if shutil.which(words[first]) is None:
            raise UserError(f"sampler_command: there is no program {words[first]}")
        return (*["env"] * (first > 0), *words)
    if (program := shutil.which("vllm")) is not None:
        return program, "serve"
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"
    raise UserError(
        "sampler vllm starts a vLLM server, and there is no program vllm: set sampler_command, "
        "such as '/opt/vllm/bin/vllm serve', or start a server and set sampler_url (docs/vllm.md)"
    )


def enables_adapters(command: str | None) -> bool:
    """Return whether a command starts a server that loads LoRA adapters."""
    return "--enable-lora" in _read_flags(_split_command(command))


def enables_sleep(command: str | None, cuda: bool) -> bool:
    """Return whether a server that a command starts can free its memory between samples. vLLM can
    on a GPU.
    """
    flags = _read_flags(_split_command(command))
    return "--no-enable-sleep-mode" not in flags and (cuda or "--enable-sleep-mode" in flags)


def _split_command(command: str | None) -> list[str]:
    """Return the words of a command, as a shell splits it. Raises UserError if it is malformed."""
    try:
        return shlex.split(command or "")
    except ValueError as error:
        raise UserError(f"sampler_command {command!r} is no command line: {error}") from error


def _read_flags(words: Sequence[str]) -> set[str]:
    """Return the options of a command, which vLLM takes with dashes or underscores."""
    return {word.partition("=")[0].replace("_", "-") for word in words}


def find_free_port() -> int:
    """Return a port of this machine that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class StartedServer(VllmServer):
    """Hold a server that this run starts. `launch`: None on ranks other than 0, which only send
    samples. `loads_adapters`: it is started with --enable-lora. `lora_rank`: the largest of the
    adapters that it will get, as far as it is known.

    The server starts with the first weights, from their folder. A thread restarts it if it ends or
    hangs, and loads the current weights. Its folder holds its output and its sockets.
    """

    def __init__(
        self,
        port: int,
        request_seconds: float,
        launch: ServerLaunch | None,
        loads_adapters: bool = False,
        lora_rank: int = 0,
    ):
        super().__init__(f"http://127.0.0.1:{port}", request_seconds)
        self.max_context = sys.maxsize  # until it has started
        self.max_lora_rank = _LORA_RANKS[-1] if loads_adapters else 0  # until it has started
        self._lora_rank = lora_rank if loads_adapters else 0  # adapters are merged otherwise
        self._port, self._launch = port, launch
        self._lock = threading.Lock()  # held by starts and loads
        self._wait_lock = threading.Lock()
        self._closed = threading.Event()
        self._process: SupervisedProcess | None = None
        self._watcher: threading.Thread | None = None
        self._weights: ServerWeights | None = None
        self._num_restarts, self._has_failed = 0, False
        self._hangs = False  # a sample exceeded the time limit
        self._sleeps = False  # its memory is free until it loads weights
        self._error: Exception | None = None  # after which it is not restarted
        if launch is not None:
            self.dtype, self.tied_head = f"torch.{launch.dtype}", launch.cuda
            self._folder = Path(tempfile.mkdtemp(prefix="whetstone-server-"))
            self._log = self._folder / "server.log"
            self.remedy = f"its output is in {self._log}; continue a run with --resume"

    def check_lora_rank(self, rank: int) -> None:
        """Raise UserError if the server does not load adapters of this rank. It is started for the
        largest known rank, which may be that of a later stage.
        """
        super().check_lora_rank(rank)
        self._lora_rank = max(self._lora_rank, rank)

    def load_weights(self, weights: ServerWeights) -> None:
        """Load weights as `VllmServer` does, after a start if the server does not run.

        Raises VllmServerError if the first start fails, or a load after `MAX_RESTARTS` restarts.
        Raises UserError if the server has settings that cannot work.
        """
        with self._lock:
            self._weights, self._num_restarts = weights, 0
            self._error = None
            self._load_current()

    def _load_current(self, failure: str | None = None) -> None:
        """Load the current weights. `failure`: why the server has to be restarted first."""
        assert self._weights is not None
        while True:
            if failure is not None:
                self._prepare_restart(failure)
            try:
                if self._process is None:
                    self._start()
                elif self._sleeps:
                    self.call("/wake_up", {}, self.request_seconds)
                    self._sleeps = False
                super().load_weights(self._weights)
                return
            except VllmServerError as error:
                if self._watcher is None or error.has_wrong_weights or self._closed.is_set():
                    raise
                failure = str(error)

    def sleep(self) -> None:
        """Free the server's memory until it loads weights. No sample may be in flight. A server
        that fails is ended, which frees its memory too, and starts with the next weights.

        A LoRA server keeps its model in the memory of the CPU; others load all weights again.
        """
        if self._launch is None:
            return
        level = 1 if self.max_lora_rank else 2
        with self._lock:
            try:
                self.call(f"/sleep?level={level}", {}, self.request_seconds)
            except VllmServerError as error:
                self._has_failed = True
                warnings.warn(f"{error}: it is ended, and started again to sample", stacklevel=2)
                self._stop_process()
            self._sleeps = True

    def _prepare_restart(self, failure: str) -> None:
        """End the server and count a restart. Raises VllmServerError if there were enough."""
        end = "" if self._process is None else f" ({self._process.describe_end()})"
        self._stop_process()
        if self._num_restarts == MAX_RESTARTS:
            raise VllmServerError(
                self.url, f"failed again after {MAX_RESTARTS} restarts: {failure}{end}"
            )
        self._num_restarts += 1
        self._has_failed = True
        warnings.warn(
            f"{failure}{end}: it is restarted ({self._num_restarts} of at most {MAX_RESTARTS} "
            f"restarts with these weights), and its samples are requested again. Its output is in "
            f"{self._log}",
            stacklevel=2,
        )

    def _start(self) -> None:
        """Start the server and wait until it answers, at most `request_seconds`."""
        assert self._launch is not None and self._weights is not None
        folder = self._weights.model.folder
        command = self._launch.build_command(folder, self._port, self._lora_rank)
        line = ["/bin/sh", "-c", _APPEND_OUTPUT, str(self._log), *command]
        environment = dict(get_environment_without_launch().items() - {_ALLOCATOR_SETTING})
        # Python must not import packages from the current folder in place of the server's.
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONSAFEPATH": "1"}
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        environment.setdefault("VLLM_NO_USAGE_STATS", "1")
        environment.setdefault("VLLM_RPC_BASE_PATH", str(self._folder))
        if not self._launch.cuda:
            # On a CPU vLLM moves the model to a separate process otherwise, and both processes
            # wait for each other in busy loops, which take the cores of the learner.
            environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        text = f"vLLM starts on {self.url}; its output is in {self._log}"
        print(text, file=sys.stderr, flush=True)
        self._process = SupervisedProcess(line, environment)
        try:
            self._wait_until_healthy(self._process)
            if self._watcher is None:
                self.check()
                if self._lora_rank:
                    super().check_lora_rank(self._lora_rank)
        except BaseException:
            self._has_failed |= not self._closed.is_set()
            self._stop_process()
            raise
        self._hangs = self._sleeps = False
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="vllm-watch", daemon=True)
            self._watcher.start()

    def _wait_until_healthy(self, process: SupervisedProcess) -> None:
        """Raise VllmServerError if the server ends or does not answer in time."""
        deadline = time.monotonic() + self.request_seconds
        while True:
            text = ""
            if not process.read_output():
                text = f"ended at its start ({process.describe_end()})"
            elif time.monotonic() > deadline:
                text = f"did not start within {self.request_seconds:g} s (sampler_timeout)"
            if text:
                raise VllmServerError(
                    self.url, f"{text}; its last line of output: {_read_last_line(self._log)}"
                )
            try:
                self.call("/health")
                return
            except VllmServerError:
                if self._closed.wait(_POLL_SECONDS):
                    raise

    def _watch(self) -> None:
        """Restart the server whenever it ends or hangs, until `close`."""
        next_health = time.monotonic() + _HEALTH_SECONDS
        while not self._closed.wait(_POLL_SECONDS):
            with self._lock:
                if self._error is not None or self._closed.is_set() or self._sleeps:
                    continue
                try:
                    if self._process is None or not self._process.read_output():
                        raise VllmServerError(self.url, "has ended")
                    if self._hangs:
                        raise VllmServerError(self.url, "hangs")
                    if time.monotonic() > next_health:
                        self.call("/health", seconds=_HEALTH_LIMIT)
                        next_health = time.monotonic() + _HEALTH_SECONDS
                except VllmServerError as failure:
                    try:
                        self._load_current(str(failure))
                    except Exception as error:  # noqa: BLE001  (raised where samples are awaited)
                        self._error = error

    def wait_for_recovery(self, failure: VllmServerError, weights_ids: Collection[str]) -> None:
        """Wait until the server works with one of these weights, after a restart if it failed.

        Raises UserError if it is not restarted any more.
        """
        if failure.timed_out and self._launch is not None:
            self._hangs = True
        with self._wait_lock:
            deadline = time.monotonic() + 2 * self.request_seconds  # a start and a load
            failed = False
            while self._hangs or not self._is_ready(weights_ids):
                failed = True
                if self._error is not None:
                    raise UserError(f"{self._error}; {self.remedy}") from self._error
                if self._closed.wait(_POLL_SECONDS) or time.monotonic() > deadline:
                    return
            self.num_failures += failed

    def _is_ready(self, weights_ids: Collection[str]) -> bool:
        try:
            self.call("/health")
            return self.call("/weight_info").get("weight_version") in weights_ids
        except (VllmServerError, AttributeError):
            return False

    def close(self) -> None:
        """End the server and all its processes. Its output is kept if it failed."""
        self._closed.set()
        if (process := self._process) is not None:
            process.request_end()  # calls that hold the lock then fail
        with self._lock:
            self._stop_process()
            if self._launch is not None and not self._has_failed:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _stop_process(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None
        super().close()


def _read_last_line(log: Path) -> str:
    """Return the last line of a log, shortened."""
    lines = log.read_bytes()[-4096:].decode(errors="replace").split("\n") if log.is_file() else []
    return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "none")
