"""Deny system calls to programs by a filter in the kernel (seccomp, classic BPF)."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from rl.sandbox.inside.isolation import check, libc

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Calls that later kernels add are not reviewed; the filter returns ENOSYS for them.
_NEWEST_CALL = 462
# name, number on x86_64, number on aarch64; - if the architecture lacks the call
_TABLE = """
# namespaces and mounts
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51
open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432
fspick 433 433, mount_setattr 442 442, quotactl 179 60, quotactl_fd 443 443
name_to_handle_at 303 264, open_by_handle_at 304 265, fanotify_init 300 262
# other processes
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440
kcmp 312 272, pidfd_getfd 438 438, perf_event_open 298 241
# memory that no limit counts
memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195
semget 64 190, msgget 68 186, mq_open 240 180, add_key 248 217, request_key 249 218
keyctl 250 219
# large attack surface of the kernel
bpf 321 280, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426
io_uring_register 427 427, personality 135 92, modify_ldt 154 -
# the machine
init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104
kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89
sethostname 170 161, setdomainname 171 162, syslog 103 116, settimeofday 164 170
clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, iopl 172 -, ioperm 173 -
vhangup 153 58
# a larger share of the machine
sched_setaffinity 203 122, sched_setattr 314 274, sched_setscheduler 144 119
sched_setparam 142 118
move_pages 279 239, mbind 237 235, set_mempolicy 238 237, migrate_pages 256 238
"""
_NUMBERS: dict[str, list[str]] = {
    name: numbers
    for line in _TABLE.splitlines()
    if not line.startswith("#")
    for name, *numbers in map(str.split, filter(None, line.split(",")))
}
_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, TIME, CGROUP, UTS, IPC, USER, PID, NET
_FAMILIES = (1, 2, 10)  # unix, and IP within the run's network namespace, which has no route
_TIOCSTI = 0x5412
_Instruction = tuple[int, int, int, int]  # operation, jumps if true and if false, operand
_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH, _ARGUMENT = 0, 4, 16


def build_filter(network: bool = True) -> bytes:
    """Return the filter for this machine.

    `network`: allow IP sockets, because the program runs in a separate network namespace. Raises
    OSError if the system call numbers of the machine are unknown.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers are known for {machine}")
    column = list(_ARCHITECTURES).index(machine)
    refuse, allow = (_RET, 0, 0, _ERRNO | errno.EPERM), (_RET, 0, 0, _ALLOW)
    unknown = (_RET, 0, 0, _ERRNO | errno.ENOSYS)
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCH), (_JEQ, 1, 0, _ARCHITECTURES[machine]), (_RET, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR), (_JGE, 0, 1, 0x40000000), (_RET, 0, 0, _KILL),
        (_JGE, 0, 1, _NEWEST_CALL + 1), unknown,
        # the flags of clone3 are in memory, which the filter cannot read; libraries use clone then
        *_if_equal(_CLONE3[column], unknown),
    ]  # fmt: skip
    for numbers in _NUMBERS.values():
        if numbers[column] != "-":
            code += _if_equal(int(numbers[column]), refuse)
    flags = (_LOAD, 0, 0, _ARGUMENT), (_JSET, 0, 1, _NEW_NAMESPACES), refuse
    code += _if_equal(_CLONE[column], *flags, allow)
    families = _FAMILIES if network else ()
    known = [(_JEQ, len(families) - i, 0, family) for i, family in enumerate(families)]
    other = (_RET, 0, 0, _ERRNO | errno.EAFNOSUPPORT)
    code += _if_equal(_SOCKET[column], (_LOAD, 0, 0, _ARGUMENT), *known, other, allow)
    request = (_LOAD, 0, 0, _ARGUMENT + 8), *_if_equal(_TIOCSTI, refuse)
    code += [*_if_equal(_IOCTL[column], *request, allow), allow]
    return b"".join(struct.pack("HBBI", *line) for line in code)


def _if_equal(value: int, *body: _Instruction) -> list[_Instruction]:
    """Return the instructions that run `body` only if the loaded number is `value`."""
    return [(_JEQ, 0, len(body), value), *body]


def install(network: bool = True) -> None:
    """Install the filter irrevocably for this process and its children. Sets no_new_privs, which
    the filter requires.
    """
    lines = build_filter(network)
    buffer = ctypes.create_string_buffer(lines, len(lines))
    pointer = struct.pack("HxxxxxxQ", len(lines) // 8, ctypes.addressof(buffer))
    result = libc.prctl(38, ctypes.c_ulong(1), 0, 0, 0) or libc.prctl(
        22, ctypes.c_ulong(2), ctypes.c_char_p(pointer), 0, 0
    )
    check(result, "cannot install the seccomp filter")
