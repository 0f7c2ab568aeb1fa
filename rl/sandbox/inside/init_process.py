"""Run init, the first process of a run's namespaces.

Init starts the candidate on request of the monitor and removes the remains of the candidate.

Init knows neither the nonce nor expected values. A fork of init therefore holds no secret.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import tempfile

from rl.sandbox.inside import candidate, isolation, message_framing, seccomp
from rl.sandbox.inside.message_framing import JsonObject

HOME = "/tmp"
_NICE = 5  # lets the monitor run next to many busy processes


def serve(monitor: socket.socket, layers: set[str], user: int, group: int) -> None:
    """Serve the monitor's requests until the monitor closes the socket. Never returns."""
    code, init = 1, None
    try:
        isolation.die_with_parent()
        isolation.map_user(layers, user, group)
        if "pid" not in layers:
            isolation.adopt_orphans()
        init = Init(monitor, layers)
        init.serve()
    except message_framing.ConnectionClosedError:
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            message_framing.send(monitor, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        kill_descendants(layers, os.getpid())
        if init is not None and init.folder != HOME:
            shutil.rmtree(init.folder, ignore_errors=True)
        os._exit(code)


class Init:
    """Start and end candidates for a monitor."""

    def __init__(self, monitor: socket.socket, layers: set[str]):
        self.monitor, self.layers = monitor, layers
        self.job: JsonObject = {}
        self.folder = HOME

    def serve(self) -> None:
        while True:
            message, fds = message_framing.receive_with_fds(self.monitor)
            if message["do"] == "begin":
                self._begin(message)
            elif message["do"] == "clean":
                self._clean()
            else:
                self._run(message, fds)

    def _begin(self, job: JsonObject) -> None:
        """Set up the job's mounts and files before any program of the job runs."""
        self.job = job
        limits = job["limits"]
        isolation.mount_private(self.layers, int(limits["file_mb"]), int(limits["files"]))
        if "mounts" not in self.layers:
            self.folder = tempfile.mkdtemp(prefix="run-")
        os.chdir(self.folder)
        if "cores" in self.layers and job["cores"]:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, job["cores"])
        self._write_files()
        message_framing.send(self.monitor, {"begun": os.getpid()})

    def _write_files(self) -> None:
        for name, text in self.job["files"].items():
            place = os.path.normpath(os.path.join(self.folder, name))
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "wb") as file:
                file.write(message_framing.encode_text(text))

    def _clean(self) -> None:
        """Restore the initial content of the folder, and keep the compiled program."""
        for place in [HOME, "/dev/shm"] if "mounts" in self.layers else [self.folder]:
            for entry in list(os.scandir(place)):
                if entry.name == "program" and place == self.folder:
                    continue
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)
        self._write_files()
        message_framing.send(self.monitor, {"cleaned": True})

    def _run(self, message: JsonObject, fds: list[int]) -> None:
        """Run a candidate from start to end and report it to the monitor."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        pid = os.fork()
        if pid == 0:
            _become_candidate(self.job, message, fds, self.layers)
        for descriptor in fds:
            os.close(descriptor)
        message_framing.send(self.monitor, {"started": pid})
        process = os.pidfd_open(pid)
        select.select([process, self.monitor.fileno()], [], [])
        os.close(process)
        # Either the candidate ended, or the monitor requests its end (by a single message, which is
        # received below).
        status = kill_descendants(self.layers, os.getpid(), pid)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        message_framing.send(
            self.monitor, {"ended": status, "cpu_s": cpu, "memory_mb": after.ru_maxrss / 1024}
        )
        answer, _ = message_framing.receive_with_fds(self.monitor)
        if answer["do"] == "end":  # the request crossed the report of the candidate's end
            message_framing.send(self.monitor, {"settled": True})


def kill_descendants(layers: set[str], me: int, first: int | None = None) -> int:
    """End all descendants of this process and wait for them. Return the wait status of `first`, 0
    if it has none.
    """
    status = 0
    if first is not None:
        # A process that has ended keeps its status: a later kill does not change it.
        done, ended = os.waitpid(first, os.WNOHANG)
        if done:
            status, first = ended, None
    while True:
        try:
            if "pid" in layers:
                if me != 1:
                    # outside a PID namespace, -1 would signal every process
                    raise RuntimeError("init is not the first process of a PID namespace")
                os.kill(-1, signal.SIGKILL)
            else:
                for child in list_descendants(me):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            done, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if done == first:
            status, first = ended, None


def list_descendants(root: int) -> list[int]:
    """Return the process ids of all descendants of `root`."""
    tree = [root]
    for pid in tree:  # grows in the loop
        with contextlib.suppress(OSError):  # a process that has ended meanwhile
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    tree += map(int, file.read().split())
    return tree[1:]


def _become_candidate(
    job: JsonObject, message: JsonObject, fds: list[int], layers: set[str]
) -> None:
    """Drop every right in the new process, then run the program. Never returns."""
    code = 1
    try:
        os.setsid()
        if "cores" in layers:
            os.nice(_NICE)
        for number, descriptor in enumerate(fds):
            # first to unused numbers: a descriptor may be 0, 1 or 2
            os.dup2(descriptor, 100 + number)
        for number in range(len(fds)):
            os.dup2(100 + number, number)
        os.closerange(len(fds), 65536)
        if "limits" in layers:
            isolation.set_limits(
                job["limits"],
                address_space=message.get("address_space", True),
                extensible_cpu=message["mode"] == "serve",
            )
        if "capabilities" in layers:
            isolation.drop_capabilities()
        if "landlock" in layers:
            isolation.confine_files(os.getcwd())
        if "seccomp" in layers:
            seccomp.install(network="network" in layers)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        candidate.fresh_streams()
        code = _run(job, message)
    except BaseException:
        candidate._print_traceback()
    finally:
        os._exit(code)


def _run(job: JsonObject, message: JsonObject) -> int:
    mode = message["mode"]
    if mode == "script":
        return candidate.run_script(job["program"])
    if mode == "serve":
        return candidate.Server(job["program"], 3, 4).serve()
    argv = [word.replace("{here}", os.getcwd()) for word in message["argv"]]
    os.execve(argv[0], argv, {**os.environ, "HOME": os.getcwd(), "TMPDIR": os.getcwd()})
