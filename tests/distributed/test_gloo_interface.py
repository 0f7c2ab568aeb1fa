"""Test rendezvous of two machines with hosts files that map their host names to 127.0.1.1, as in
Debian. Each machine is a network namespace with a separate host name and hosts file; a veth pair
connects them.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Sums the ranks over the process group that the product creates.
PROGRAM = """
import torch
from rl.distributed import end_process_at_exit, make_accelerator
end_process_at_exit()
make_accelerator(bf16=False, timeout_seconds=60)
total = torch.tensor([torch.distributed.get_rank() + 1.0])
torch.distributed.all_reduce(total)
print("total", total.item())
"""
# Makes the second rank a sampler, so that each side of the launch is on one machine.
ROLES = """
import os
from rl.distributed import assign_role
assign_role(1, 60)
print("interface", os.environ.get("GLOO_SOCKET_IFNAME"))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_machines(prefix: str):
    """Yield the names of two network namespaces with ADDRESSES, connected by a veth pair."""
    names = [f"{prefix}{i}" for i in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "link", "set", name, "name", "eth7")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth7")
            for device in ("lo", "eth7"):
                ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "route", "add", "default", "dev", "eth7")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("master", "program", "expected"),
    [
        ("address", PROGRAM, "total 3.0"),
        ("name", PROGRAM, "total 3.0"),
        ("address", ROLES, "interface eth7"),
    ],
    ids=["address", "name", "sampler ranks"],
)
def test_machines_find_each_other_though_their_names_are_loopback(
    master, program, expected, tmp_path
):
    """For `name`, MASTER_ADDR is the first machine's host name, which it resolves to loopback."""
    with two_machines(f"w{os.getpid() % 100_000}-") as names:
        machines = []
        for rank, name in enumerate(names):
            hosts = tmp_path / f"hosts{rank}"
            hosts.write_text(
                f"127.0.0.1 localhost\n127.0.1.1 machine{rank}\n"
                + f"{ADDRESSES[1 - rank]} machine{1 - rank}\n"
            )
            command = (
                f"hostname machine{rank} && mount --bind {hosts} /etc/hosts && "
                f'exec "{sys.executable}" -c "$PROGRAM"'
            )
            env = {**os.environ, "PROGRAM": program, "PYTHONPATH": str(REPO), "RANK": str(rank)}
            env |= {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            env["MASTER_ADDR"] = ADDRESSES[0] if master == "address" else "machine0"
            env |= {"MASTER_PORT": "29511", "ACCELERATE_USE_CPU": "true"}
            env.pop("GLOO_SOCKET_IFNAME", None)
            words = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "bash", "-c"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            machines.append(subprocess.Popen([*words, command], env=env, **pipes))
        outputs = [machine.communicate(timeout=240)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(outputs)
    assert all(expected in output for output in outputs)
