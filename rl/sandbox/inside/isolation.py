"""Set up the isolation that a run's processes apply to themselves: namespaces, mounts,
capabilities, limits.

The module `seccomp` holds the system call filter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import sys
from typing import Any

# The isolation layers of a candidate under bubblewrap: "user", which the next four need; rights
# that the process drops; limits that the monitor and the scheduler enforce; the outer three.
ALL_LAYERS = (
    "user",
    "pid",
    "ipc",
    "mounts",
    "proc",
    "capabilities",
    "seccomp",
    "limits",
    "watch",
    "cores",
    "network",
    "root",
    "environment",
)
USER_NAMESPACE_LAYERS = ("pid", "ipc", "mounts", "proc")
_CLONE = {"mounts": 0x00020000, "ipc": 0x08000000, "user": 0x10000000, "pid": 0x20000000}
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MNT_DETACH = 1, 2, 4, 8, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SUBREAPER = (
    1,
    4,
    24,
    38,
    36,
)
libc: Any = ctypes.PyDLL(None, use_errno=True)


def check(result: int, failure: str) -> None:
    """Raise OSError with the reason of the system if a call of `libc` returned -1."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{failure}: {os.strerror(code)}")


def prctl(option: int, value: int = 0) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


def die_with_parent() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    prctl(_PR_SET_SUBREAPER, 1)


def switch_user(user: int) -> None:
    """Switch irrevocably from root to a user without rights; /proc/self stays accessible."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    prctl(_PR_SET_DUMPABLE, 1)


def fork_into(layers: set[str]) -> int:
    """Fork a child into new namespaces: the namespaces among `layers`. The child has to call
    `map_user` next.
    """
    flags = sum(flag for layer, flag in _CLONE.items() if layer in layers)
    if not flags:
        return os.fork()
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = int(
        libc.syscall(
            _SYS_CLONE[platform.machine()], ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0
        )
    )
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    check(pid, f"no new namespaces ({' '.join(sorted(layers & set(_CLONE)))})")
    return pid


def map_user(layers: set[str], user: int, group: int) -> None:
    """Write the map of the new user namespace: only the same user."""
    if "user" in layers:
        with contextlib.suppress(FileNotFoundError):
            _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    prctl(_PR_SET_DUMPABLE, 0)


def mount_private(layers: set[str], megabytes: int, files: int) -> None:
    """Mount a private /proc, /tmp and /dev/shm. The latter two are in memory, for this run."""
    if "mounts" not in layers:
        return
    options = f"size={megabytes}m,nr_inodes={files + 1},mode=0700"
    for place in ("/tmp", "/dev/shm"):
        mount(place, options)
    if "proc" not in layers:
        return
    # Read-only, with only the program's processes: /dev/stdin and /dev/fd point there. An empty
    # tmpfs if the kernel refuses a new /proc because other mounts cover a part of every visible one.
    try:
        mount("/proc", "hidepid=ptraceable,subset=pid", _MS_RDONLY | _MS_NOEXEC, "proc")
    except OSError:
        mount("/proc", "size=4k,nr_inodes=1,mode=0500", _MS_RDONLY)


def unmount_proc_covers() -> None:
    """Unmount the mounts of bubblewrap on top of /proc, which allows a run to mount a private
    /proc. Needs CAP_SYS_ADMIN.
    """
    with open("/proc/self/mountinfo") as file:
        places = [line.split()[4] for line in file]
    for place in [place for place in places if place.startswith("/proc/")]:
        check(libc.umount2(place.encode(), _MNT_DETACH), f"{place} cannot be unmounted")


def mount(place: str, options: str, flags: int = 0, kind: str = "tmpfs") -> None:
    flags |= _MS_NOSUID | _MS_NODEV
    source, target, text = kind.encode(), place.encode(), options.encode()
    result = libc.mount(source, target, source, ctypes.c_ulong(flags), text)
    check(result, f"no {kind} at {place}")


def drop_capabilities() -> None:
    """Drop all capabilities, and prevent gaining new capabilities."""
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break  # past the last capability of the kernel, or no capability to drop
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    check(libc.capset(head, none), "capset")
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_limits(
    limits: dict[str, Any], address_space: bool = True, extensible_cpu: bool = False
) -> None:
    """Set the limits of each process. `limits`: fields of rl.sandbox.SandboxLimits. The monitor counts the
    total use of a run's processes. `extensible_cpu`: `extend_cpu_limit` raises the CPU time at each
    request, so the hard limit stays that of the host.
    """
    memory = int(limits["memory_mb"]) << 20
    table = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: int(limits["file_mb"]) << 20,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_MEMLOCK: 64 << 10,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NPROC: int(limits["processes"]) + 1,  # plus init
        resource.RLIMIT_CPU: _round_cpu(limits["cpu_s"]),
    }
    if address_space:
        # 64 MB: addresses that an interpreter maps before it runs a program
        table[resource.RLIMIT_AS] = memory + (64 << 20)
    for kind, limit in table.items():
        hard = resource.getrlimit(kind)[1]
        top = limit + (kind == resource.RLIMIT_CPU)  # a second between SIGXCPU and SIGKILL
        if kind == resource.RLIMIT_CPU and extensible_cpu:
            top = hard
        if hard != resource.RLIM_INFINITY:
            limit, top = min(limit, hard), min(top, hard)
        resource.setrlimit(kind, (limit, top))


def extend_cpu_limit(pid: int, seconds: float) -> None:
    """Let a process have `seconds` of CPU time in all, within its hard limit. Raises OSError."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
    if soft != resource.RLIM_INFINITY:
        limit = _round_cpu(seconds)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.prlimit(pid, resource.RLIMIT_CPU, (limit, hard))


def _round_cpu(seconds: float) -> int:
    return max(1, int(seconds + 0.999))


def _write(place: str, text: str) -> None:
    with open(place, "w") as file:
        file.write(text)


_READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/dev/null", "/dev/zero",
             "/dev/urandom")  # fmt: skip


def load_landlock(folder: str) -> None:
    """Import sandlock (Landlock, for hosts that refuse namespaces) from its installation folder, before the first fork. Raises ImportError."""
    sys.path.append(folder)
    try:
        import sandlock  # noqa: F401
    finally:
        sys.path.remove(folder)


def confine_files(folder: str) -> None:
    """Confine this process and its children irrevocably: read access to the system and the
    interpreter, write access to `folder`.
    """
    sandlock: Any = sys.modules["sandlock"]
    packages = os.environ["PYTHONPATH"]
    importable = [packages, *(os.path.realpath(entry.path) for entry in os.scandir(packages))]
    readable = [
        place
        for place in (*_READABLE, *importable, os.path.realpath(sys.base_prefix))
        if os.path.exists(place)
    ]
    sandlock.confine(sandlock.Sandbox(fs_readable=readable, fs_writable=[folder]))
