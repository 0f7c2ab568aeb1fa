"""Test the trackers: logged values are read back by each library, runs resume, and tracker failures
do not end a run.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from listener import MessageRecorder

from rl.config import RunSettings
from rl.errors import RunFolderError
from rl.jsonl import read_jsonl
from rl.reporting import Logbook, check_trackers
from rl.reporting.tracker_process import TRACKER_MODULES, RunTrackers, build_table

CONFIG = {
    "name": "sorting",
    "options": {"seed": 0, "name": None},
    "stages": [{"name": "grpo", "method": "grpo", "settings": {"learning_rate": 1e-5}}],
}
REPO = Path(__file__).resolve().parents[2]
HOSTILE = "<script>x</script>\x1b[2J | a\nb\ud800"


@pytest.fixture(autouse=True)
def no_remote_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unset the user's stores, and redirect HOME and TMPDIR to detect writes outside the run
    folder.
    """
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("WANDB_MODE", "offline")


# ------------------------------------------------------------------- reading back with each library


READERS = {
    "wandb": """
        from wandb.proto import wandb_internal_pb2
        stored = {"ids": [], "rows": {}, "tables": []}
        for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
            data, place, record = path.read_bytes(), 7, b""
            while place + 7 <= len(data):  # blocks of 32 KiB, as in LevelDB's log
                if 32768 - place % 32768 < 7:
                    place += 32768 - place % 32768
                    continue
                size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
                record = (b"" if kind in (1, 2) else record) + data[place + 7 : place + 7 + size]
                place += 7 + size
                if kind not in (1, 4) or not size:
                    continue
                parsed = wandb_internal_pb2.Record.FromString(record)
                if parsed.WhichOneof("record_type") == "run":
                    stored["ids"].append(parsed.run.run_id)
                if parsed.WhichOneof("record_type") == "history":
                    row = {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in parsed.history.item
                    }
                    stored["rows"][row["_step"]] = row.get("reward/total")
            for table in path.parent.glob("files/media/table/rollouts_*"):
                stored["tables"] += json.loads(table.read_text())["data"]
    """,
    "tensorboard": """
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        stored = {"rows": {e.step: e.value for e in events.Scalars("reward/total")}, "ids": []}
        texts = events.Tensors("rollouts/text_summary")
        stored["tables"] = [text.tensor_proto.string_val[0].decode() for text in texts]
    """,
    "trackio": """
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
        names = [run.name for run in trackio.Api().runs("p")]
        rows = SQLiteStorage.get_logs("p", names[0])
        stored = {"ids": names, "rows": {r["step"]: r.get("reward/total") for r in rows if "stage" in r}}
        tables = [row["rollouts"]["_value"] for row in rows if "rollouts" in row]
        stored["tables"] = [list(cells.values()) for table in tables for cells in table]
    """,
    "mlflow": """
        import mlflow
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow/mlflow.db")
        mlflow.set_experiment("p")
        runs = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("p").experiment_id])
        stored = {"ids": [run.info.run_id for run in runs]}
        history = mlflow.MlflowClient().get_metric_history(stored["ids"][0], "reward/total")
        stored["rows"] = {point.step: point.value for point in history}
        stored["tables"] = mlflow.load_table("rollouts/step_000001.json").values.tolist()
        assert runs[0].data.params["grpo.learning_rate"] == "1e-05", runs[0].data.params
        assert runs[0].info.status == "FINISHED"
    """,
}


def skip_without(names: list[str]) -> None:
    """Skip a test if the package of a tracker is missing."""
    try:
        check_trackers(names)
    except RunFolderError as error:
        pytest.skip(str(error))


def read_back(name: str, folder: Path) -> dict[str, Any]:
    """Return `ids`, `rows` (step to reward) and `tables` of a tracker, read in a subprocess."""
    lines = READERS[name].replace("\n        ", "\n")
    code = f"import json, pathlib\nfolder = pathlib.Path({str(folder)!r})\n{lines}\n"
    command = [sys.executable, "-c", f"{code}print(json.dumps(stored))"]
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    stored = json.loads(result.stdout.splitlines()[-1])
    stored["rows"] = {int(step): value for step, value in stored["rows"].items()}
    return stored


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_is_read_back_under_a_single_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without([name])
    monkeypatch.setenv("RANK", "0")  # a multi-rank launch, which the tracker must not join
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.chdir(tmp_path)
    folder, warnings = tmp_path / "my run", MessageRecorder()
    for resume_step, steps in ((None, (0, 1, 2)), (2, (3, 4))):
        options = {"trackers": [name], "tracker_project": "p", "config": CONFIG}
        with Logbook(folder, resume_step=resume_step, console=warnings, **options) as logbook:
            for step in steps:
                reward = float("nan") if step == 3 else step / 8
                values = {"reward/total": reward, "env/all/a $%é": 1.0}
                logbook.log(step, {"stage": "grpo", **values})
                if step == 1:
                    row = {"prompt": HOSTILE, "response": "42", "reward": 1.0, "advantage": None}
                    logbook.write_rollouts(step, [row])
    assert warnings.warnings == []
    stored = read_back(name, folder)
    rows = {step: value for step, value in stored["rows"].items() if value is not None}
    assert rows == {0: 0.0, 1: 0.125, 2: 0.25, 4: 0.5}
    text = json.dumps(stored["tables"], ensure_ascii=False)
    assert "<script>x</script>" in text and "42" in text and "\\u001b" not in text
    if name != "tensorboard":
        recorded = (folder / f"{name}_id.txt").read_text().strip()
        assert set(stored["ids"]) == {recorded}
    # nothing is written outside the run folder
    outside = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [p for p in outside if folder not in p.parents and "matplotlib" not in str(p)] == []


SLOW_REWARD = """
import pathlib, time

def reward(prompt, response, meta):
    if not pathlib.Path(__file__).with_name("fast").exists():
        time.sleep(1)
    return len(response) / 100
"""


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_resumes_in_every_tracker(stop: signal.Signals, tmp_path: Path) -> None:
    """Stop `train.py` at an arbitrary step and resume it: each tracker has a single run with the
    steps and values of metrics.jsonl.
    """
    names = [*READERS]
    skip_without(names)
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    folder, last = tmp_path / "run", 40
    words = (
        "grpo --base-model tiny:addition-small --dataset addition --batch-size 1 --group-size 2 "
        f"--max-tokens 4 --steps {last} --save-every 2 --eval-every 0 --rollouts-every 1 "
        "--learning-rate 1e-5 --no-self-test --no-reward-check --quiet --tracker-project p"
    )
    command = [sys.executable, str(REPO / "train.py"), *words.split(), "--tracker", *names]
    command += ["--reward", f"{tmp_path / 'slow_reward.py'}:reward", "--output-dir", str(folder)]
    settings: dict[str, Any] = {"env": with_paths(), "text": True}
    settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ids = [folder / f"{name}_id.txt" for name in names if name != "tensorboard"]

    def count_rows() -> int:
        path = folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    with subprocess.Popen(command, **settings) as process:
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if count_rows() >= 3 and all(path.exists() for path in ids):
                break
            time.sleep(0.05)
        stopped_at = count_rows()
        process.send_signal(stop)
        output = process.communicate(timeout=180)[0]
    assert 3 <= stopped_at < last and process.returncode == {15: 75, 9: -9}[stop], output
    assert "the tracker" not in output
    recorded = [path.read_text().strip() for path in ids]

    (tmp_path / "fast").touch()
    result = subprocess.run([*command, "--resume"], **settings, timeout=300)
    assert result.returncode == 0 and "the tracker" not in result.stdout, result.stdout
    assert [path.read_text().strip() for path in ids] == recorded
    rows = read_jsonl(folder / "metrics.jsonl")
    expected = {row["step"]: row["reward/total"] for row in rows if "reward/total" in row}
    assert sorted(expected) == list(range(1, last + 1))
    for name in names:
        stored = read_back(name, folder)
        values = {step: value for step, value in stored["rows"].items() if value is not None}
        assert values == pytest.approx(expected, rel=1e-6), name
        if name != "tensorboard":
            assert set(stored["ids"]) == {(folder / f"{name}_id.txt").read_text().strip()}, name


# ---------------------------------------------------------------------------------------- failures

FAKE_WANDB = """
import os, sys, time, types
MODE = {mode!r}
Settings = dict
Table = types.SimpleNamespace
class Run:
    def log(self, values, step=None):
        with open({log!r}, "a") as file:
            file.write(f"{{step}}\\n")
        if MODE == "log":
            raise ConnectionResetError("the server went away")
        if MODE == "crash":
            os._exit(3)
    def finish(self):
        if MODE == "finish":
            self.log(None, "finished")
        if MODE == "log":
            raise KeyError("x")
        if MODE == "hang":
            time.sleep(1000)
def init(**settings):
    print("chatter of a library")
    if MODE == "init":
        raise AttributeError("of its own")
    return Run()
"""


def with_paths() -> dict[str, str]:
    """Return the environment of a process that imports from the same folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def install_fake(mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake package wandb that fails at `mode` on the path; return the file of its calls."""
    packages = folder / "packages"
    packages.mkdir()
    log = folder / "calls.txt"
    log.touch()
    (packages / "wandb.py").write_text(FAKE_WANDB.format(mode=mode, log=str(log)))
    monkeypatch.syspath_prepend(str(packages))
    return log


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["init", "log", "crash", "hang"])
def test_a_failing_tracker_costs_one_warning(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = install_fake(mode, tmp_path, monkeypatch)
    warnings, folder = MessageRecorder(), tmp_path / "run"
    folder.mkdir()
    seconds = 1.0 if mode == "hang" else 60.0
    trackers = RunTrackers(["wandb"], "p", folder, CONFIG, console=warnings, finish_seconds=seconds)
    for step in (1, 2):
        trackers.log(step, {"reward/total": 0.5})
    deadline = time.monotonic() + 120
    while mode == "hang" and calls.read_text().count("\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    trackers.finish()
    expected = {
        "init": "did not start: AttributeError: of its own",
        "log": "did not accept the metrics of step 1: ConnectionResetError",
        "crash": "exit code 3",
        "hang": "did not finish in time",
    }
    assert len(warnings.warnings) == 1 and expected[mode] in warnings.warnings[0], warnings.warnings
    logged = {"init": [], "crash": ["1"]}.get(mode, ["1", "2"])
    assert calls.read_text().split() == logged
    assert "chatter" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_killed_run_keeps_what_it_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install_fake("never", tmp_path, monkeypatch)
    code = (
        "import os, pathlib, time; from rl.reporting.tracker_process import RunTrackers\n"
        f"trackers = RunTrackers(['wandb'], 'p', pathlib.Path({str(tmp_path)!r}), {{}})\n"
        "for step in (1, 2, 3): trackers.log(step, {'x': 0.5})\n"
        "time.sleep(1); os.kill(os.getpid(), 9)"
    )
    result = subprocess.run([sys.executable, "-c", code], env=with_paths(), cwd=REPO)
    assert result.returncode == -9
    deadline = time.monotonic() + 120
    while calls.read_text().count("\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert calls.read_text().split() == ["1", "2", "3"]


@pytest.mark.slow
def test_a_message_that_a_killed_run_did_not_finish_ends_its_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install_fake("finish", tmp_path, monkeypatch)
    setup = {"tracker": "wandb", "folder": str(tmp_path), "project": "p", "run": "r", "id": "a"}
    messages = (
        {**setup, "config": {}, "resume_step": None, "parent": os.getpid()},
        {"kind": "metrics", "arguments": [{"x": 0.5}, 1]},
    )
    text = "".join(f"{json.dumps(message)}\n" for message in messages) + '{"kind": "rollouts \u00e9'
    command = [sys.executable, "-P", "-m", "rl.reporting.tracker_worker"]
    subprocess.run(command, input=text.encode()[:-1], env=with_paths(), cwd=tmp_path, check=True)
    assert calls.read_text().split() == ["1", "finished"]


@pytest.mark.slow
def test_a_run_continues_without_its_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake("init", tmp_path, monkeypatch)
    words = "sft --base-model tiny:addition-small --dataset addition:noise=0.5 --steps 2 --quiet"
    command = [sys.executable, str(REPO / "train.py"), *words.split(), "--eval-every", "0"]
    folder = tmp_path / "run"
    command += ["--batch-size", "2", "--output-dir", str(folder), "--tracker", "wandb"]
    result = subprocess.run(command, env=with_paths(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the tracker wandb did not start") == 1
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2]


def test_a_missing_package_is_reported_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(RunFolderError, match=r'trackio.*pip install -e "\.\[trackio\]"'):
        Logbook(tmp_path / "run", trackers=["trackio"])
    from rl.algorithms import METHODS
    from rl.config import read_run
    from rl.trainer.execute import execute

    words = f"sft --tracker trackio --output-dir {tmp_path / 'second'} --base-model tiny:ascii"
    run = read_run(words.split(), METHODS, REPO / "recipes" / "addition.yaml", RunSettings)
    with pytest.raises(RunFolderError, match="trackio needs the package trackio"):
        execute(run)
    assert not (tmp_path / "second").exists()


# ---------------------------------------------------------------------------------------- settings


def test_the_former_flag_implies_wandb() -> None:
    settings = RunSettings(tracker=("mlflow", "wandb", "mlflow"), wandb_project="p")
    assert settings.tracker_names == ("mlflow", "wandb")
    assert RunSettings(wandb_project="p").tracker_names == ("wandb",)
    assert RunSettings().tracker_names == ()


def test_a_table_is_bounded() -> None:
    rows = [{"prompt": "p" * 10**6, "response": HOSTILE, "reward": i} for i in range(1000)]
    table = build_table(7, rows)
    assert len(table) == 50 and [line[5] for line in table[:2]] == [0, 20]
    assert all(len(line[2]) < 2100 and "\x1b" not in line[3] for line in table)
    turns = [{"text": "a", "sampled": True, "tokens": ["a"]}, {"text": "b", "tokens": ["b"]}]
    assert build_table(1, [{"turns": turns}])[0][3] == "[1] a\n\n[2] b"


def test_a_folder_of_files_is_no_installed_tracker(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKER_MODULES, "wandb", ("files_of_runs",))
    (tmp_path / "files_of_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunFolderError, match="needs the package files_of_runs"):
        check_trackers(["wandb"])
    (tmp_path / "files_of_runs" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    check_trackers(["wandb"])
