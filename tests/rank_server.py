"""Start runs of train.py on several gloo processes quickly: this server imports everything once and
forks the ranks. Other scripts, and modules as `-m` runs them, start in the same way.

`Ranks` below sends orders as lines of JSON. {"argv", "cwd", "world", "env", "log"} starts a run and
returns {"pids"}; "stdout" names a separate file for the output, and "launched" is false for a
script that runs without a launcher. {"wait": pid} returns {"code"}, null while the process runs.
Other features of accelerate's launcher are tested with the launcher itself.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Reward workers inherit it too: from the environment they get little except PYTHON*.
TAG = "PYTHON_WHETSTONE_TAG"
REPO = Path(__file__).resolve().parent.parent
TRAIN = str(REPO / "train.py")
EARLY = (
    "rl.trainer", "rl.trainer.entry_point", "accelerate", "safetensors.torch", "huggingface_hub",
    "torch._dynamo", "torch.nn.parallel",
)  # fmt: skip
EARLY += ("transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.modeling_auto")
EARLY += ("peft",)
# Imports of launches under DeepSpeed and FSDP2. Importing DeepSpeed compiles its Muon.
SHARDED = ("deepspeed", "torch.distributed.fsdp", "torch._inductor.compile_fx")


def become_rank(order: dict, rank: int, port: int) -> int:
    """Run the script of an order in a forked rank, in the environment that accelerate's launcher
    would set. Return the exit code.
    """
    world = order["world"]
    if order["launched"]:
        sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(size) for name, size in sizes.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    os.environ.update(order.get("env", {}))
    os.setpgid(0, 0)
    os.chdir(order["cwd"])
    log = os.open(f"{order['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = log
    if order.get("stdout"):
        output = os.open(order["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, nothing), (1, output), (2, log)):
        os.dup2(source, target)
    is_module = order["argv"][0] == "-m"
    sys.argv = order["argv"][is_module:]
    folder = "." if is_module else Path(sys.argv[0]).resolve().parent
    sys.path.insert(0, str(folder))
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(*modules: str) -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects what libraries print

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    for name in (*EARLY, *modules):
        importlib.import_module(name)
    # Each run reads the table of all settings and renders pages: a fifth of a small run's time.
    for method in sys.modules["rl.algorithms"].METHODS.values():
        sys.modules["rl.config.fields"].get_fields(method.Settings)
    pages = sys.modules["rl.reporting.html_report"]._make_environment()
    for name in pages.list_templates(["html"]):
        pages.get_template(name)
    # DeepSpeed runs the garbage collector twice per model: exclude the objects imported here
    gc.collect()
    gc.freeze()
    # A run would search them all once it has unfrozen them, and copy their pages by that.
    gc.freeze = gc.unfreeze = lambda: None
    # saves the seconds of drawing a plot that no test looks at
    sys.modules["rl.reporting.metric_plots"].draw_curves = lambda source, out, *labels: out.touch()
    answer(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            pid, status = os.waitpid(order["wait"], os.WNOHANG)
            answer(code=os.waitstatus_to_exitcode(status) if pid else None)
            continue
        port, pids = free_port(), []
        for rank in range(order["world"]):
            pid = os.fork()
            if pid == 0:
                code = become_rank(order, rank, port)
                atexit._run_exitfuncs()
                sys.stdout.flush()
                os._exit(code)  # skips the slow teardown of thousands of modules
            pids.append(pid)
        answer(pids=pids)


class Launch:
    """A running launch: a process id per rank, and the rank's exit code after it has ended."""

    def __init__(self, server: "Ranks", pids: list[int], log: Path):
        self.server, self.pids, self.log = server, pids, log
        self.codes: list[int | None] = [None] * len(pids)

    def poll(self) -> bool:
        """Return whether every rank has ended."""
        for i, pid in enumerate(self.pids):
            if self.codes[i] is None:
                self.codes[i] = self.server.ask({"wait": pid})["code"]
        return None not in self.codes

    def kill(self, rank: int, options: int = signal.SIGKILL) -> None:
        if self.codes[rank] is None:
            os.kill(self.pids[rank], options)

    def wait(self, seconds: float) -> list[int | None]:
        """Return the exit codes. If a rank runs for longer than `seconds`, kill all running ranks
        and raise AssertionError with the logs.
        """
        deadline = time.monotonic() + seconds
        while not self.poll():
            if time.monotonic() > deadline:
                late = [i for i, code in enumerate(self.codes) if code is None]
                for rank in late:
                    os.kill(self.pids[rank], signal.SIGKILL)
                raise AssertionError(
                    f"ranks {late} have not ended after {seconds} s:\n{self.output()}"
                )
            time.sleep(0.01)
        return self.codes

    def output(self, rank: int | None = None) -> str:
        ranks = range(len(self.pids)) if rank is None else [rank]
        logs = {r: Path(f"{self.log}.{r}") for r in ranks}
        return "\n".join(f"[{r}] {log.read_text()}" for r, log in logs.items() if log.exists())


class Ranks:
    """The server in a separate process. `tag` is in the environment of every process that its runs
    start, to find leftover processes.
    """

    def __init__(self, *modules: str):
        self.tag, self.runs = f"rank-server-{os.getpid()}-{time.monotonic_ns()}", 0
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env = {**os.environ, **env, TAG: self.tag}
        words = [sys.executable, __file__, *modules]
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        self.process = subprocess.Popen(words, cwd=REPO, env=env, text=True, **pipes)
        answer = json.loads(self.process.stdout.readline() or "{}")
        assert answer.get("ready"), "the server of ranks did not start"

    def ask(self, order: dict) -> dict:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self,
        *words: str | Path,
        cwd: Path,
        world: int = 1,
        script: str = TRAIN,
        stdout: str | None = None,
        logs: Path | None = None,
        launched: bool = True,
        **env: str,
    ) -> Launch:
        """Start a script on `world` ranks in `cwd`; their logs are in `logs`, or else in `cwd`.
        `launched` sets the environment of a launcher, which a plain `python SCRIPT` does not have.
        """
        self.runs += 1
        log = (logs or cwd) / f"log-{self.runs}"
        if world > 1 and not {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"} & env.keys():
            env["ACCELERATE_USE_CPU"] = "true"
        order = {"argv": [script, *map(str, words)], "cwd": str(cwd), "world": world, "env": env}
        order |= {"log": str(log), "stdout": stdout, "launched": launched}
        return Launch(self, self.ask(order)["pids"], log)

    def left_behind(self) -> list[str]:
        """Return command lines of leftover processes that runs started, such as reward workers."""
        results = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) in (os.getpid(), self.process.pid):
                continue
            try:
                if self.tag.encode() in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    results.append(words.decode(errors="replace"))
            except OSError:
                pass  # it ended in the meantime, or belongs to another user
        return results

    def nothing_left(self, seconds: float = 5.0) -> list[str]:
        """Return the leftover processes after a grace period of at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (remaining := self.left_behind()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return remaining

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


@functools.cache
def shared_ranks() -> Ranks:
    """Return this process's server for launches of every backend. It is closed at exit."""
    ranks = Ranks(*SHARDED)
    atexit.register(ranks.close)
    return ranks


def run_script(
    script: str, *words: object, cwd: Path, seconds: float = 300.0, **env: str
) -> subprocess.CompletedProcess:
    """Run `python SCRIPT WORDS` in `cwd` to its end, in a fork of the shared server."""
    with tempfile.TemporaryDirectory() as name:
        logs, output = Path(name), Path(name) / "output"
        launch = shared_ranks().start(
            *words, cwd=cwd, script=str(REPO / script), launched=False, logs=logs,
            stdout=str(output), **env
        )  # fmt: skip
        (code,) = launch.wait(seconds)
        log = Path(f"{launch.log}.0")
        return subprocess.CompletedProcess(
            [script, *words], code or 0, output.read_text(), log.read_text()
        )


def make_launch_command(config: str, script: object, *words: object) -> list[str]:
    """Return the command with which accelerate's launcher starts `script` on two processes."""
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2"]
    launch += ["--config_file", str(REPO / f"accelerate_configs/{config}.yaml")]
    return [sys.executable, *launch, "--main_process_port", "0", str(script), *map(str, words)]


def make_launch_environment(*words: str) -> dict[str, str]:
    """Return the variables that `accelerate launch WORDS` sets for all its ranks."""
    from unittest import mock

    from accelerate.commands import launch
    from torch.distributed import run

    variables: dict[str, str] = {}
    options = launch.launch_command_parser().parse_args([*words, "script"])
    with mock.patch.object(run, "run", lambda args: variables.update(os.environ)):
        launch.launch_command(options)
    assert variables, f"accelerate launch {words} starts no ranks"
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}


if __name__ == "__main__":
    tests = Path(__file__).resolve().parent
    sys.path[:0] = [str(REPO), *map(str, [tests, *sorted(filter(Path.is_dir, tests.iterdir()))])]
    serve(*sys.argv[1:])
