"""Test each isolation mechanism: an escape succeeds when the mechanism is disabled, and fails when
it is enabled.
"""

import os
import socket
import threading
from typing import NamedTuple

import pytest

from rl.sandbox import Sandbox, SandboxLimits

SYSCALL = "import ctypes\nl = ctypes.CDLL(None)\n"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]


class SandboxEscape(NamedTuple):
    """`program` prints "through" if the mechanism is disabled. `first`: program that runs before it
    in the same sandbox. `covers`: mechanisms that block the same escape, disabled in both halves.
    """

    program: str
    first: str = ""
    covers: tuple[str, ...] = ()


LEAVE = "open('/tmp/wsx-left', 'w').write('x')"
ESCAPES = {
    "user": SandboxEscape("import os\nif os.path.exists('/tmp/wsx-left'): print('through')", LEAVE),
    "mounts": SandboxEscape("import os\nif os.path.exists('/tmp/wsx-left'): print('through')", LEAVE),
    "pid": SandboxEscape("import os\ntry: os.kill(1, 0)\nexcept PermissionError: print('through')\nif os.getpid() > 2: print('through')"),
    "ipc": SandboxEscape(SYSCALL + "if l.shmget(4711, 100, 0o666) >= 0: print('through')", SYSCALL + "l.shmget(4711, 100, 0o1666)", ("seccomp",)),
    "proc": SandboxEscape("import os\nif os.path.exists('/proc/1') or os.path.exists('/proc/meminfo'): print('through')", "", ()),
    "capabilities": SandboxEscape(SYSCALL + "if l.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0: print('through')", "", ("seccomp",)),
    "seccomp": SandboxEscape(SYSCALL + "if l.unshare(0x10000000) == 0: print('through')"),
    "limits": SandboxEscape("x = []\ntry:\n    for _ in range(600): x.append(open('/dev/null'))\nexcept OSError: pass\nelse: print('through')"),
    "watch": SandboxEscape("import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        x = b'x' * (60 << 20)\n        time.sleep(0.7)\n"
                    "        os._exit(0)\nfor _ in range(4): os.wait()\nprint('through')"),
    "cores": SandboxEscape("import os\nif len(os.sched_getaffinity(0)) > 1: print('through')"),
    "network": SandboxEscape("import socket\nprint(socket.create_connection(('127.0.0.1', {PORT}), 2).recv(20).decode())", "", ("seccomp",)),
    "root": SandboxEscape("if open('/etc/passwd').read(): print('through')"),
    "environment": SandboxEscape("import os\nif 'WSX_SECRET' in os.environ: print('through')"),
}  # fmt: skip


@pytest.fixture(scope="module")
def port():
    listener = socket.create_server(("127.0.0.1", 0))

    def tell() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"through")

    threading.Thread(target=tell, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def try_escape(escape: SandboxEscape, without: tuple[str, ...], port: int) -> bool:
    with Sandbox(
        "bubblewrap", SandboxLimits(wall_s=10, memory_mb=128), workers=1, without=without
    ) as sandbox:
        assert all(wall in sandbox.kind for wall in without)
        if escape.first:
            first = sandbox.run(escape.first)
            assert first.ok, first
        run = sandbox.run(escape.program.replace("{PORT}", str(port)))
        assert run.ended_by != "lost", run
        return "through" in run.stdout


@pytest.mark.parametrize("wall", ESCAPES)
def test_a_wall_taken_down_lets_its_escape_through(wall, port, monkeypatch):
    if wall == "cores" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core: there is no other to escape to")
    monkeypatch.setenv("WSX_SECRET", "x")
    escape = ESCAPES[wall]
    assert not try_escape(escape, escape.covers, port)
    assert try_escape(escape, (*escape.covers, wall), port)


def test_every_wall_has_its_escape():
    from rl.sandbox.inside import isolation

    assert set(ESCAPES) == set(isolation.ALL_LAYERS)
