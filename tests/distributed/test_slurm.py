"""Test the batch scripts of slurm/, without Slurm and, if WHETSTONE_TEST_SLURM=1, with an installed
Slurm.

The scripts pass a command line from level to level (job, node, rank). Stub versions of scontrol,
srun and accelerate come first on PATH and print what each level receives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm_cluster

from rl.config import RunSettings
from rl.errors import RunFolderError
from rl.reporting import check_claim_folder, claim_folder

REPO = Path(__file__).resolve().parents[2]
BATCH = ["one_node.sbatch", "many_nodes.sbatch"]
BASH = shutil.which("bash")


# ------------------------------------------------------------------------------------ without Slurm


@pytest.mark.parametrize("name", [*BATCH, "job.sh", "node.sh", "rank.sh"])
def test_scripts_parse(name):
    done = subprocess.run([BASH, "-n", REPO / "slurm" / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", BATCH)
def test_a_user_changes_account_and_partition_alone(name):
    """Directives precede the first command (Slurm stops reading there), each occurs once, and only
    two need to be changed.
    """
    head, command, _ = (REPO / "slurm" / name).read_text().partition("\nconfig=")
    assert command and all(line.startswith("#") or not line for line in head.splitlines())
    inputs = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, flags=re.M))
    assert len(inputs) == head.count("#SBATCH")
    changed = [option for option, value in inputs.items() if value.startswith("my-")]
    assert changed == ["account", "partition"] and inputs["open-mode"] == "append"
    assert inputs.keys() >= {"nodes", "gpus-per-node", "time", "requeue", "signal", "output"}
    warning = int(re.fullmatch(r"B:USR1@(\d+)", inputs["signal"])[1])
    # the margin in job.sh
    assert warning > int(re.search(r"^save_seconds=(\d+)", command + _, flags=re.M)[1]) + 15


STAND_INS = {
    # In Slurm's output format, with an address that differs from the node's name.
    "scontrol": """case "$*" in
        "show hostnames"*) echo gpu-7; echo gpu-12 ;;
        *"show node gpu-7") echo "NodeName=gpu-7 Arch=x86_64 NodeAddr=10.1.2.7 NodeHostName=gpu-7 Version=22" ;;
        "requeue Incomplete"*) echo "requeued $3" ;;
    esac""",
    "srun": """while [[ $1 == --* ]]; do shift; done
        [[ -n ${STUCK:-} ]] && exec sleep 60
        for SLURM_NODEID in ${NODES:-0 1}; do SLURM_NODEID=$SLURM_NODEID "$@" || exit; done""",
    "accelerate": """echo "launched $* OMP_NUM_THREADS=${OMP_NUM_THREADS:-}"
        while [[ $1 != --no_python ]]; do shift; done; shift
        RANK=$SLURM_NODEID "$@" || exit 1""",
    "python": f"""echo "trained $*"; [[ -n ${{LISTEN:-}} ]] && exec {sys.executable} -c "$LISTEN"; exit "${{EXIT_CODE:-0}}" """,
}
LISTEN = (
    "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); "
    "print('ready', flush=True); time.sleep(60)"
)


def start(
    tmp_path: Path, *words: str, script: str = "many_nodes.sbatch", **environment: str
) -> subprocess.Popen:
    """Start a batch script with the stubs, as Slurm would on two nodes."""
    root, programs = tmp_path / "root", tmp_path / "programs"
    for folder in (root, programs):
        folder.mkdir(exist_ok=True)
    for name in ("slurm", "accelerate_configs"):
        if not (root / name).exists():
            (root / name).symlink_to(REPO / name)
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!{BASH}\n{body}\n")
        (programs / name).chmod(0o755)
    slurm = {"JOB_ID": "70012", "JOB_NAME": "whetstone", "JOB_NODELIST": "gpu-[7,12]"}
    slurm |= {"JOB_NUM_NODES": "2", "GPUS_ON_NODE": "4", "CPUS_ON_NODE": "48"}
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        **{f"SLURM_{k}": v for k, v in slurm.items()},
        **environment,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [BASH, REPO / "slurm" / script, *words], cwd=root, env=env, text=True, **pipes
    )


def job(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a batch script to completion."""
    process = start(tmp_path, *words, **environment)
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def test_every_process_gets_the_rendezvous_of_the_first_node_and_the_line(tmp_path):
    done = job(tmp_path, "recipes/x.yaml", "--system-prompt", "two words")
    assert done.returncode == 0, done.stderr
    launched = [line for line in done.stdout.splitlines() if line.startswith("launched")]
    assert len(launched) == 2
    for node, line in enumerate(launched):
        for piece in (
            f"--machine_rank {node} ", "--num_machines 2 ", "--num_processes 8 ", "--main_process_ip 10.1.2.7 ",
            "--main_process_port 20012 ", "--config_file accelerate_configs/multi_node.yaml ", "--deepspeed_multinode_launcher standard ", "OMP_NUM_THREADS=12",
        ):  # fmt: skip
            assert piece in line
    logs = tmp_path / "root" / "runs" / "whetstone-70012" / "logs" / "70012-0"
    line = (
        "train.py recipes/x.yaml --system-prompt two words --output-dir runs/whetstone-70012 "
        "--auto-resume --stop-grace 240"
    )
    assert [(logs / f"rank-{rank}.log").read_text() for rank in (0, 1)] == [f"trained {line}\n"] * 2


def test_the_runs_folder_is_the_one_asked_for_and_logs_of_each_start_are_apart(tmp_path):
    assert "done: runs/mine\n" in job(tmp_path, "sft", "--output-dir", "runs/mine").stdout
    again = job(tmp_path, "sft", "--output-dir=runs/mine", SLURM_RESTART_COUNT="3")
    assert "done: runs/mine\n" in again.stdout
    logs = tmp_path / "root" / "runs" / "mine" / "logs"
    assert {path.name for path in logs.iterdir()} == {"70012-0", "70012-3"}


GIVEN_UP = "not requeued after 2 restarts; to go on, submit again with --output-dir runs/whetstone-"


@pytest.mark.parametrize(
    ("code", "starts", "requeued", "text"),
    [
        ("75", "0", True, "requeuing"),
        ("75", "2", False, f"{GIVEN_UP}70012"),
        ("2", "0", False, "failed with code 1"),
    ],
)
def test_only_a_run_that_saved_is_requeued_and_not_for_ever(tmp_path, code, starts, requeued, text):
    done = job(tmp_path, EXIT_CODE=code, SLURM_RESTART_COUNT=starts, WHETSTONE_MAX_RESTARTS="2")
    assert done.returncode == (75 if code == "75" else 1) and text in done.stdout
    assert ("requeued 70012" in done.stdout) == requeued
    # the end of rank 0's log, which contains the reason
    assert ("trained train.py" in done.stdout) == (code == "2")


@pytest.mark.parametrize("started", [True, False])
def test_a_warning_reaches_rank_0_and_one_that_comes_too_early_ends_the_job(tmp_path, started):
    process = start(tmp_path, **({"LISTEN": LISTEN, "NODES": "0"} if started else {"STUCK": "1"}))
    log = tmp_path / "root" / "runs" / "whetstone-70012" / "logs" / "70012-0" / "rank-0.log"
    first = process.stdout.readline()
    deadline = time.monotonic() + 30
    while (
        started and not (log.exists() and "ready" in log.read_text())
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # until srun has started, which no output reports
    process.send_signal(signal.SIGUSR1)
    rest, _ = process.communicate(timeout=30)
    assert first.startswith("start 0 on gpu-[7,12], rank 0 at 10.1.2.7:20012, 8 processes")
    assert process.returncode == (75 if started else 137)
    assert ("requeued 70012" in rest) == started and ("more --time" in rest) != started


def test_outside_of_slurm_or_of_the_project_a_script_says_what_to_do(tmp_path):
    outside = job(tmp_path, script="one_node.sbatch", SLURM_JOB_ID="")
    assert "sbatch slurm/one_node.sbatch" in outside.stderr
    done = subprocess.run(
        [BASH, REPO / "slurm" / "one_node.sbatch"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "project's root" in done.stderr


def test_logs_are_no_run_and_survive_one(tmp_path):
    """The batch script creates RUN/logs before the run exists. A kill may also leave an incomplete
    config.json.
    """
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("hello")
    (tmp_path / "config.json.tmp").write_text('{"na')
    check_claim_folder(tmp_path)
    claim_folder(tmp_path, {"name": "x", "stages": []})
    check_claim_folder(tmp_path)  # the run never took a step
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunFolderError, match="holds a run"):
        check_claim_folder(tmp_path)
    (tmp_path / "rollouts").mkdir()
    claim_folder(tmp_path, {"name": "y", "stages": []}, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "config.json"}
    assert (tmp_path / "logs" / "rank-0.log").exists()


def test_auto_resume_and_overwrite_exclude_each_other():
    with pytest.raises(ValueError, match="auto_resume"):
        RunSettings(auto_resume=True, overwrite=True)


# -------------------------------------------------------------------------------- with a real Slurm

RECIPE = """
method: grpo
base_model: tiny:addition
dataset: addition
reward: {folder}/slow_reward.py:digits
learning_rate: 1e-3
steps: 16
batch_size: 4
group_size: 4
max_tokens: 4
eval_every: 8
eval_limit: 8
save_every: 5
rollouts_every: 0
"""

# Slow, so that the warning arrives mid-run; graded, so that groups of an untrained model have a
# signal.
REWARD = """
import time
def digits(prompt, response, meta):
    time.sleep(0.03)
    return sum(c.isdigit() for c in response) / 4 + (response[:1] == "1")
"""


def rows(folder: Path) -> list[dict]:
    """Return the metrics rows without the fields that depend on the clock."""
    parsed = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in parsed]


def submit(cluster: slurm_cluster.SlurmCluster, folder: Path, run: str) -> str:
    """Submit the project's script with what a user must change (account and partition), and with
    settings for a machine without GPUs.
    """
    words = ["--account=any", "--partition=debug", f"--output={folder}/{run}.out"]
    words += ["slurm/many_nodes.sbatch", str(folder / "recipe.yaml")]
    words += ["--output-dir", str(folder / run)]
    cpus = {
        "WHETSTONE_ACCELERATE_CONFIG": "accelerate_configs/ddp.yaml",
        "WHETSTONE_PROCESSES_PER_NODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return cluster.call("sbatch", "--parsable", *words, cwd=REPO, **cpus).strip()


def collect_logs(cluster: slurm_cluster.SlurmCluster, folder: Path, run: str) -> str:
    """Return all output of a run, for the message of a failed test."""
    files = [folder / f"{run}.out", *sorted((folder / run).glob("logs/*/rank-*.log"))]
    return (
        "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in files if path.exists())
        + cluster.logs()
    )


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.skipif(
    os.environ.get("WHETSTONE_TEST_SLURM") != "1",
    reason="WHETSTONE_TEST_SLURM=1 runs it, with slurm-wlm and munge installed",
)
def test_a_job_that_slurm_warns_and_requeues_ends_as_if_undisturbed(tmp_path):
    for name in slurm_cluster.PROGRAMS:
        installed = shutil.which(name, path=slurm_cluster.PATH)
        assert installed, f"WHETSTONE_TEST_SLURM=1 needs {name}: apt-get install slurm-wlm munge"
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "slow_reward.py").write_text(REWARD)
    deadline = time.monotonic() + 240  # for three starts on a busy machine; usually half of it
    with slurm_cluster.run_cluster() as cluster:
        whole = cluster.wait(submit(cluster, tmp_path, "whole"), deadline)
        assert (whole["JobState"], whole["Restarts"]) == ("COMPLETED", "0"), collect_logs(
            cluster, tmp_path, "whole"
        )
        disturbed = submit(cluster, tmp_path, "disturbed")
        metrics = tmp_path / "disturbed" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 4:
            assert time.monotonic() < deadline, collect_logs(cluster, tmp_path, "disturbed")
            time.sleep(0.1)
        # the same signal as --signal=B:USR1@300
        cluster.call("scancel", "--batch", "--signal=USR1", disturbed)
        ended = cluster.wait(disturbed, deadline)
        messages = collect_logs(cluster, tmp_path, "disturbed")
        end = ended["JobState"], ended["Restarts"], ended["NumNodes"]
        assert end == ("COMPLETED", "1", "2"), messages
    logs = tmp_path / "disturbed" / "logs"
    first, second = ((logs / f"{disturbed}-{start}" / "rank-0.log").read_text() for start in (0, 1))
    assert "2 processes" in first and "--resume continues from grpo-" in first, messages
    assert 3 <= int(re.search(r"resuming from grpo-(\d+)", second)[1]) < 16, messages
    whole_rows = rows(tmp_path / "whole")
    assert len(whole_rows) == 17 and rows(tmp_path / "disturbed") == whole_rows
