"""Run a real Slurm on this machine, for test_slurm.py: munged, a controller and two node daemons in
a separate folder.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

# The scripts expect nodes of eight GPUs, of which only the count exists here. proctrack/linuxproc
# signals and kills every descendant of a step, like the usual cgroups. A requeued job waits
# cred_expire seconds.
CONFIG = """
ClusterName=whetstone
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=16 RealMemory=1000 Gres=gpu:8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=16 RealMemory=1000 Gres=gpu:8
PartitionName=debug Nodes=n1,n2 Default=YES
"""


class SlurmCluster:
    """`call("sbatch", ...)` runs a client against this cluster and returns its output."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, cwd: Path | None = None, **environment: str) -> str:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}{done.stdout}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Return scontrol's fields of a job: JobState, Restarts, ExitCode ..."""
        text = self.call("scontrol", "--oneliner", "show", "job", job_id)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, job_id: str, deadline: float) -> dict[str, str]:
        """Return the job once it has ended, or its state at `deadline` of time.monotonic()."""
        while True:
            job = self.job(job_id)
            if (
                job["JobState"]
                not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
                or time.monotonic() > deadline
            ):
                return job
            time.sleep(0.3)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-1500:]}"
            for path in sorted(self.folder.glob("slurm*.log"))
        )


@contextmanager
def run_cluster() -> Iterator[SlurmCluster]:
    """Start a cluster, yield it with both nodes idle, and kill all of it, jobs first."""
    # a short path: socket paths have at most 107 characters
    folder = Path(tempfile.mkdtemp(prefix="whetstone-slurm-"))
    folder.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        result = SlurmCluster(folder)
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(3)
        (folder / "slurm.conf").write_text(
            CONFIG.format(
                host=host,
                user=getpass.getuser(),
                folder=folder,
                controller_port=ports[0],
                port_1=ports[1],
                port_2=ports[2],
            )
        )
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-7]\n")
        for number in range(8):
            (folder / f"gpu{number}").symlink_to("/dev/null")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        munge = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "seed",
        }
        words = [f"--{option}={folder / name}" for option, name in munge.items()]
        _start(stack, result, "munged", "--foreground", "--force", *words)
        _until(lambda: (folder / "munge.socket").exists(), "munged made no socket", result)
        _start(stack, result, "slurmctld", "-D")
        for node in ("n1", "n2"):
            _start(stack, result, "slurmd", "-D", "-N", node)
        _until(lambda: _idle(result) == 2, "the nodes did not become idle", result)
        stack.callback(_cancel_all, result)
        yield result


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def _start(stack: ExitStack, result: SlurmCluster, *words: str) -> None:
    """Start a daemon in the foreground, which ends with the stack."""
    log = stack.enter_context(
        (result.folder / f"{words[0]}-{words[-1].rpartition('/')[2]}.out").open("w")
    )
    process = subprocess.Popen(
        words, env=result.environment, stdout=log, stderr=log, start_new_session=True
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _until(holds, what: str, result: SlurmCluster, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}:\n{result.logs()}"
        time.sleep(0.1)


def _idle(result: SlurmCluster) -> int:
    done = subprocess.run(
        ["sinfo", "-hN", "-o", "%T"],
        env=result.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.split().count("idle")


def _cancel_all(result: SlurmCluster) -> None:
    """Cancel every job and wait until their processes have ended."""
    subprocess.run(
        ["scancel", f"--user={getpass.getuser()}"],
        env=result.environment,
        timeout=60,
        capture_output=True,
    )
    deadline = time.monotonic() + 15
    while _idle(result) < 2 and time.monotonic() < deadline:
        time.sleep(0.3)
