"""Run the commands of the pages in a bash in which `python`, `accelerate`, `make`, `pip` and others
are programs of this file.

These programs send their arguments to the test over a socket. Scripts of this project start as
forks of tests/rank_server.py, with small sizes (tests/small_runs.py). What is not run is checked
instead: the requirement file of an installation, the flags of a measurement, the script of a batch
job.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rank_server import Ranks

REPO = Path(__file__).resolve().parent.parent
# Read by tests/small_runs.py; its value is "whole", or "part" of a command. Reward workers inherit
# it.
ONLY_PARSED = "PYTHON_WHETSTONE_ONLY_PARSED"
PROGRAMS = "python python3 accelerate make pip uv sbatch srun whetstone lm_eval docker".split()
PROGRAM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    order = dict(words=words, cwd=os.getcwd(), pid=os.getpid(), env=dict(os.environ))
    connection.sendall(json.dumps(order).encode() + b"\\n")
    sys.exit(int(connection.makefile().readline()))
"""
RUN_SCRIPTS = (
    "train.py", "sample.py", "evaluate.py", "export.py", "plot.py", "watch.py", "check_reward.py",
    "why.py", "minimal_loop.py",
)  # fmt: skip
MORE_WORDS = {  # for scripts that small_runs.py does not shrink
    "evaluate.py": ["--limit", "2", "--max-tokens", "8"],
    "sample.py": ["--max-tokens", "8"],
    "minimal_loop.py": ["--sft-steps", "2", "--steps", "1"],
}
FOREIGN_MODULES = {"tinker_cookbook"}  # of `python -m`: packages that the tests do not install
# Environments with packages that requirements.txt does not install (test_wrapped_packages.py runs
# them).
OTHER_ENVIRONMENTS = {
    "endpoint", "mcp", "openenv", "reasoning_gym", "search", "skyrl_gym", "textarena", "tinker",
}  # fmt: skip
SECONDS = 120


# with these flags, train.py does not write a new run into the folder of an earlier command
KEPT_RUN = {"--resume", "--auto-resume", "--plan", "--help", "--overwrite"}


class CommandError(Exception):
    """Raised with the reason why a command of a page cannot work."""


def check_install(words: list[str], folder: Path) -> None:
    """Check that the files and the extras that `pip` would install exist."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        if flag == "-r" and not (folder / value).is_file():
            raise CommandError(f"no file {value}")
        if extras := re.fullmatch(r"\.\[(.*)\]", flag):
            if missing := set(extras[1].split(",")) - project["optional-dependencies"].keys():
                raise CommandError(f"pyproject.toml has no extras {missing}")


def check_image(words: list[str], folder: Path) -> None:
    """Check that the file of `docker build -f FILE` exists."""
    for flag, value in zip(words, words[1:], strict=False):
        if words[0] == "build" and flag in ("-f", "--file") and not (folder / value).is_file():
            raise CommandError(f"no file {value}")


def split_launcher(words: list[str]) -> list[str]:
    """Return the script and its arguments from an `accelerate launch` line. Raises CommandError if
    the launcher would refuse its flags.
    """
    from accelerate.commands.launch import launch_command_parser

    try:
        options = launch_command_parser().parse_args(words)
    except SystemExit as error:
        raise CommandError(f"accelerate launch refuses {shlex.join(words)}") from error
    if options.config_file and not Path(options.config_file).is_file():
        raise CommandError(f"no file {options.config_file}")
    return [options.training_script, *options.training_script_args]


def runs_here(words: list[str]) -> bool:
    """Return whether a script is run, as opposed to only parsing its arguments."""
    if "--help" in words:
        return True
    if (REPO / words[0]).is_file() and words[0] not in RUN_SCRIPTS:
        return False
    names = {
        word.partition(":")[0]
        for flag, word in zip(words, words[1:], strict=False)
        if flag == "--environment"
    }
    return not (names & OTHER_ENVIRONMENTS or {"...", "--sampler-tp"} & {*words})


class DocShell:
    """Run bash text in a folder. `problems` collects the commands that failed, with the reason.

    `only`: "" runs commands; "part" parses them, and each may lack what its parser requires.
    """

    def __init__(self, home: Path, ranks: Ranks):
        self.ranks, self.home, self.only = ranks, home, ""
        self.problems: list[str] = []
        self.parsed: set[str] = set()
        self.programs = home / "programs"
        self.programs.mkdir()
        address = f"\0doc-shell-{os.getpid()}-{time.monotonic_ns()}"  # abstract: not in any folder
        text = PROGRAM.format(python=sys.executable, address=address)
        for name in PROGRAMS:
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(address)
        self.socket.listen()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                order = json.loads(connection.makefile().readline())
                connection.sendall(f"{self.run_command(order)}\n".encode())

    def run_command(self, order: dict) -> int:
        """Return the exit code of a command, and record its problem."""
        try:
            code, output = self.dispatch(order["words"], order)
        except Exception as error:  # the page's bash waits for an answer
            code, output = 2, repr(error)
        if code:
            self.problems.append(f"{shlex.join(order['words'])}\n{output[-3000:]}")
        return code

    def dispatch(self, words: list[str], order: dict) -> tuple[int, str]:
        program, rest, folder = words[0], words[1:], Path(order["cwd"])
        if program in ("pip", "uv") or rest[:2] == ["-m", "pip"]:
            check_install(rest, folder)
        elif program == "make":
            return self.make(rest, order)
        elif program == "docker":
            check_image(rest, folder)
        elif program == "lm_eval":
            pass
        elif program == "srun":
            return self.dispatch(rest, order)
        elif program == "sbatch":
            place = next(i for i, word in enumerate(rest) if not word.startswith("-"))
            if not (folder / rest[place]).is_file():
                raise CommandError(f"no file {rest[place]}")
            return self.script(["train.py", *rest[place + 1 :]], order)
        elif program == "accelerate":
            if rest[:1] != ["launch"]:
                raise CommandError("accelerate is used to launch")
            return self.script(split_launcher(rest[1:]), order) if rest[1:] else (0, "")
        elif program == "whetstone":
            (folder / "whetstone_main.py").write_text("import whetstone\nexit(whetstone.main())\n")
            return self.script(["whetstone_main.py", *rest], order)
        elif rest[:2] == ["-m", "venv"]:
            (folder / rest[2] / "bin").mkdir(parents=True, exist_ok=True)
            (folder / rest[2] / "bin" / "activate").touch()
        else:
            return self.script(rest, order)
        return 0, ""

    def make(self, words: list[str], order: dict) -> tuple[int, str]:
        """Check the targets of a `make` command and run the scripts that `make` would run."""
        done = subprocess.run(
            ["make", "-n", "-o", ".venv/installed", *words],
            cwd=order["cwd"], capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            return done.returncode, done.stderr
        for line in done.stdout.splitlines():
            words = [word for word in shlex.split(line) if "=" not in word or "--" in word]
            program = words[0].removeprefix(".venv/bin/")
            if program in ("accelerate", "python") and "pytest" not in words:
                code, output = self.dispatch([program, *words[1:]], order)
                if code:
                    return code, output
        return 0, ""

    def script(self, words: list[str], order: dict) -> tuple[int, str]:
        """Run a script of the page's folder, or parse its arguments if it cannot run here."""
        folder, name = Path(order["cwd"]), words[0]
        if name == "-c":
            (folder / "typed.py").write_text(words[1])
            name, words = "typed.py", ["typed.py", *words[2:]]
        if name == "-m" and words[1].partition(".")[0] in FOREIGN_MODULES:
            return 0, ""
        if name != "-m" and not (folder / name).is_file():
            raise CommandError(f"no file {name}")
        env = {**order["env"], "PATH": os.environ["PATH"]}
        if self.only or not runs_here(words):
            env[ONLY_PARSED] = self.only or "whole"
            source = (folder / name).read_text() if name.startswith("bench/") else "argparse"
            if not re.search("argparse|make_parser", source):
                if words[1:]:
                    raise CommandError(f"{name} takes no words")
                return 0, ""
        words = [word for word in words if word != "..."]
        if name == "train.py" and not KEPT_RUN & {*words}:
            words.append("--overwrite")
        if ONLY_PARSED not in env:
            words += MORE_WORDS.get(name, [])
        launch = self.ranks.start(
            *words[1:], cwd=folder, script=name, stdout=f"/proc/{order['pid']}/fd/1", **env
        )
        (code,) = launch.wait(SECONDS)
        return code, launch.output()

    def run(self, text: str, folder: Path, only: str = "") -> None:
        """Run a block. Raises AssertionError with the problems if a command fails."""
        self.only, self.problems = only, []
        path = f"{self.programs}:{os.environ['PATH']}"
        log = folder / "bash.log"
        with log.open("ab") as output:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text], cwd=folder, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, env={**os.environ, "PATH": path}, timeout=SECONDS,
            )  # fmt: skip
        problems = "\n".join([text, *self.problems, log.read_text()[-2000:]])
        assert not self.problems and done.returncode == 0, problems

    def parse(self, text: str, folder: Path) -> None:
        """Check a part of a command, once for all pages."""
        if text not in self.parsed:
            self.run(text, folder, only="part")
        self.parsed.add(text)

    def close(self) -> None:
        self.socket.close()
        shutil.rmtree(self.programs)


@contextmanager
def make_shell(home: Path, prepare: Callable[[Ranks], None] | None = None) -> Iterator[DocShell]:
    """Yield a shell with its rank server. `prepare` is called before the first command."""
    ranks = Ranks("small_runs")
    try:
        if prepare is not None:
            prepare(ranks)
        shell = DocShell(home, ranks)
        yield shell
        shell.close()
    finally:
        ranks.close()


def link_checkout(folder: Path, shell: DocShell) -> Path:
    """Return a new folder with links to the checkout's files, in which commands may write."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").touch()
    for program in shell.programs.iterdir():
        (programs / program.name).symlink_to(program)
    for path in REPO.iterdir():
        if path.name not in ("runs", "tests") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder
