"""Test the GPU campaign without a GPU: a failure becomes a row, other parts continue, and dry runs
work.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import (
    gpu,
    gpu_compile,
    gpu_decode,
    gpu_kernels,
    gpu_models,
    gpu_runs,
    gpu_verdict,
    harness,
    kernels,
)

REPO = Path(__file__).resolve().parents[2]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def table(tmp_path) -> gpu.Table:
    return gpu.Table("part", tmp_path / "part.csv")


def select(table: gpu.Table, metric: str, *columns: str) -> list:
    """Return columns of the rows of a metric: a text a row, or a tuple of several."""
    rows = [row for row in rows_of(table.path) if row["metric"] == metric]
    if len(columns) == 1:
        return [row[columns[0]] for row in rows]
    return [tuple(row[column] for column in columns) for row in rows]


def set_limits(monkeypatch, table: gpu.Table, **limits: float) -> None:
    """Let the limits of this machine be these. What is not named takes no time."""
    path = table.path.with_name("floors.json")
    path.write_text(json.dumps({"tflops": 1e9, "tb_per_s": 1e9, "launch_ms": 0.0} | limits))
    monkeypatch.setenv("WHETSTONE_GPU_FLOORS", str(path))


def select_failed(table: gpu.Table) -> list[tuple[str, str, str]]:
    return select(table, "failed", "case", "provider", "value")


def raise_no_room(*inputs):
    raise MemoryError("no room\nand much more")


def test_what_fails_is_a_row_and_the_rest_is_there(table):
    def half():
        table.row("first", "ours", "time", 1.5, "ms")
        raise_no_room()

    def absent():
        import a_peer_that_nobody_has  # noqa: F401

    assert table.attempt("first", "ours", half) is None
    assert table.attempt("second", "ours", lambda: 7) == 7
    table.attempt("second", "peer", absent)
    table.row("third", "ours", "time", 2.0)
    assert select(table, "time", "case", "value") == [("first", "1.5"), ("third", "2")]
    assert select(table, "failed", "value", "note") == [("MemoryError", "no room")]
    # what this machine has not did not fail
    assert select(table, "left out", "provider", "value") == [("peer", "ModuleNotFoundError")]


def test_parts_of_an_earlier_run_are_merged_and_those_of_a_killed_one_are_not(tmp_path):
    for part in ("floors", "tests"):  # a run per part
        (working := tmp_path / f"working of {part}").mkdir()
        folder = gpu.unpack_parts(tmp_path, working)
        gpu.Table(part, folder / f"{part}.csv").row("whole part", "", "status", "done")
        rows = gpu.collect(tmp_path, folder)
        # the run is killed here, so the draw part has no end row
        gpu.Table("draw", folder / "draw.csv").row("any", "ours", "time", 1.0)
    assert [row["part"] for row in rows] == ["floors", "tests"]
    assert [row["part"] for row in rows_of(tmp_path / "gpu.csv")] == ["floors", "tests"]
    (working := tmp_path / "third").mkdir()
    assert not (gpu.unpack_parts(tmp_path, working) / "draw.csv").exists()


def test_large_traces_and_logs_do_not_take_the_small_files_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ARCHIVE_BYTES", 6_000)
    (folder := tmp_path / "parts").mkdir()
    for name, size in (("large", 9_000), ("small", 900), ("smaller", 90)):
        (folder / f"trace_{name}.json.gz").write_bytes(b"." * size)
    (folder / "tests.log").write_text("what was printed")
    (folder / "step.log").write_text("endless" * 20_000)
    for _ in range(2):  # the second time, what was left out is named once
        gpu.collect(tmp_path, folder)
        with tarfile.open(tmp_path / "parts.tar") as file:
            names = file.getnames()
            left_out = file.extractfile("parts/left_out.txt").read().decode()
        kept = ["tests.log", "trace_smaller.json.gz", "trace_small.json.gz", "left_out.txt"]
        assert names == [f"parts/{name}" for name in kept]
        assert [line.split(":")[0] for line in left_out.splitlines()] == [
            "step.log", "trace_large.json.gz"
        ]  # fmt: skip
        assert (tmp_path / "parts.tar").stat().st_size <= 10_240


def replace_part(monkeypatch, folder, code, *arguments) -> list[float]:
    """Let every part run `code` with its results in a new `folder`; return the clock, in seconds."""
    folder.mkdir()
    words = [sys.executable, "-c", code, *map(str, arguments)]
    monkeypatch.setattr(gpu, "command_of", lambda *inputs: words)
    monkeypatch.setattr(gpu, "WATCH_SECONDS", 0.05)
    now = [0.0]
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: now[0])
    return now


def test_a_part_that_is_killed_leaves_its_rows_and_they_are_there_while_it_runs(
    tmp_path, monkeypatch
):
    """The part is killed while its last row and the last character of its log are half written. Its
    time is over once its first row has been seen.
    """
    code = """import sys, time
sys.stdout.buffer.write("begun \u00e9".encode()[:-1]); sys.stdout.flush()
with open(sys.argv[1], "a") as file:
    file.write("draw,first,ours,time,1.5,ms,,\\ndraw,sec")
time.sleep(60)"""
    folder = tmp_path / "parts"
    looks, now = [], replace_part(monkeypatch, folder, code, folder / "draw.csv")

    def watch():
        looks.append(gpu.merge_rows(tmp_path, folder))
        now[0] = 50.0 * any(looks)

    gpu.run_part("draw", folder, True, 40.0, watch)
    assert [row["case"] for row in looks[-1]] == ["first"]
    rows = gpu.collect(tmp_path, folder)
    assert rows == rows_of(tmp_path / "gpu.csv") and len(rows) == 3
    first, status, seconds = rows
    assert first["value"] == "1.5" and seconds["metric"] == "seconds"
    assert (status["metric"], status["value"]) == ("status", "stopped after 40 s")
    assert status["note"].startswith("begun")


def test_every_part_has_its_seconds_and_what_is_left_over_goes_to_the_next_ones():
    assert sum(seconds for seconds, _ in gpu.PARTS.values()) <= gpu.LIMIT
    # imports of torch and the start of CUDA take up to ten seconds
    assert min(seconds for seconds, _ in gpu.PARTS.values()) >= 10
    assert gpu.seconds_for("floors", [*gpu.PARTS][1:], float(gpu.LIMIT)) >= 20
    assert all(callable(gpu.function_of(part)) for part in gpu.PARTS)
    names = list(gpu.PARTS)
    remaining = float(gpu.LIMIT)
    for i, part in enumerate(names):  # each part uses its maximum: all get their share
        mine = gpu.seconds_for(part, names[i + 1 :], remaining)
        assert gpu.PARTS[part][0] <= mine <= 2 * gpu.PARTS[part][0]
        remaining -= mine
    assert remaining >= 0
    after = names[names.index("decode") + 1 :]
    assert gpu.seconds_for("decode", after, float(gpu.LIMIT)) == 2 * gpu.PARTS["decode"][0]
    assert gpu.seconds_for("decode", names, 7.0) == 7.0  # a run with a shorter limit


# -------------------------------------------------------------------------------------- the tests

# Stands in for pytest: it writes its words to a file, and hangs after a test of the second command.
STUB_PYTEST = """import json, pathlib, sys, time
with open("commands.txt", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + chr(10))
if sys.argv[-1].endswith("test_kernel_gpu.py"):
    print("[gw0] [ 50%] PASSED tests/kernels/test_kernel_gpu.py::test_a ")
    print("[gw1] [100%] FAILED tests/kernels/test_kernel_gpu.py::test_b[x] ")
    print("FAILED tests/kernels/test_kernel_gpu.py::test_b[x] - assert 1 == 2")
else:
    print("[gw0] [  1%] PASSED tests/other/test_other.py::test_c ", flush=True)
    pathlib.Path("hangs").touch()
    time.sleep(60)
"""
TESTS_PART = """import pathlib, sys
from bench import gpu, gpu_kernels
gpu_kernels.REPO = pathlib.Path(sys.argv[1])
gpu_kernels.importlib.util.find_spec = lambda name: name  # as with all plugins installed
gpu.execute_part("tests", pathlib.Path(sys.argv[2]), False)
"""


def test_tests_that_hang_leave_the_rows_of_those_before_and_a_log(tmp_path, monkeypatch):
    """Kill the part that runs the tests while a test of the second command hangs."""
    for name in ("kernels/test_kernel_gpu", "kernels/test_more", "other/test_other", "a/test_none"):
        (path := tmp_path / "tests" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "none" in name else "pytestmark = pytest.mark.gpu")
    (tmp_path / "pytest.py").write_text(STUB_PYTEST)
    folder = tmp_path / "parts"
    looks, now = [], replace_part(monkeypatch, folder, TESTS_PART, tmp_path, folder)

    def watch():
        looks.append(gpu.merge_rows(tmp_path, folder))
        now[0] = 100.0 * ((tmp_path / "hangs").exists() and looks[-1][-1]["metric"] == "passed")

    gpu.run_part("tests", folder, False, 89.0, watch)
    rows = [(row["case"].split("/")[-1], row["metric"], row["value"]) for row in looks[-1]]
    kernel = "test_kernel_gpu.py::test_"
    assert rows == [
        (f"{kernel}a", "passed", "1"),
        (f"{kernel}b[x]", "failed", "1"),
        (f"{kernel}b[x]", "reason", "1"),
        ("test_kernel_gpu", "all passed", "1"),
        ("test_kernel_gpu", "all failed", "1"),
        ("test_other.py::test_c", "passed", "1"),  # of the command that hangs
    ]
    *before, status, seconds = gpu.collect(tmp_path, folder)
    assert before == looks[-1] and status["value"] == "stopped after 89 s"
    with tarfile.open(tmp_path / "parts.tar") as archive:
        log = archive.extractfile("parts/tests.log").read().decode()
    assert "test_other.py::test_c" in log and "assert 1 == 2" in log
    commands = [json.loads(line) for line in (tmp_path / "commands.txt").open()]
    for command in commands:
        assert (
            command[command.index("-n") + 1] == "12" and command[command.index("-m") + 1] == "gpu"
        )
    files = [[word for word in command if word.startswith("tests/")] for command in commands]
    others = ["tests/kernels/test_more.py", "tests/other/test_other.py"]
    assert files == [["tests/kernels/test_kernel_gpu.py"], others]
    verdict = gpu_verdict.format_verdict(looks[-1], "a card")
    assert "tests: 2 passed, 1 failed" in verdict


def test_the_parts_run_in_the_order_of_what_is_worth_most(tmp_path, monkeypatch):
    """The command itself runs them, here with stand-ins for the parts."""
    done = []

    def run_part(part, folder, dry, seconds, watch):
        done.append(part)
        gpu.Table(part, folder / f"{part}.csv").row("whole part", "", "status", "done")
        (folder / f"profile_{part}.json.gz").write_bytes(b".")

    monkeypatch.setattr(gpu, "run_part", run_part)
    output = tmp_path / "results"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry", "--output", str(output)])
    gpu.main()
    first = ["tests", "agreement", "step", "decode", "host", "kernels", "learner", "peers"]
    assert done[0] == "floors" and [part for part in done if part in first] == first
    assert done.index("compile") == 1  # nothing else waits for Triton
    assert done[: len(first) + 2] == ["floors", "compile", *first]  # the rest follows
    assert sorted(path.name for path in output.iterdir()) == ["gpu.csv", "parts.tar", "verdict.md"]
    assert [row["part"] for row in rows_of(output / "gpu.csv")] == done
    # Some of the parts run in the same order, after the limits unless an earlier run measured them.
    words = ["--part", "peers", "decode"]
    for folder, expected in ((output, ["floors", "decode", "peers"]), (None, ["decode", "peers"])):
        done.clear()
        if folder is None:
            working = gpu.unpack_parts(output, tmp_path)
            (working / "floors.json").write_text("{}")
            gpu.collect(output, working)
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry", "--output", str(output), *words])
        gpu.main()
        assert done == expected


def test_the_limits_of_the_card_are_the_floors_of_all_figures(table, monkeypatch):
    gpu_kernels.part_floors(table, True)
    values = {row["metric"]: float(row["value"]) for row in rows_of(table.path)}
    assert np.isnan([*kernels.read_limits().values(), kernels.floor_ms(1e9, 1e9)]).all()
    monkeypatch.setenv("WHETSTONE_GPU_FLOORS", str(table.path.with_name("floors.json")))
    expected = {"tflops": values["TFLOP/s"], "tb_per_s": values["TB/s"]}
    expected["launch_ms"] = values["launch"] / 1e3
    assert kernels.read_limits() == pytest.approx(expected, rel=1e-4)
    set_limits(monkeypatch, table, tflops=2.0, tb_per_s=0.5, launch_ms=3.0)
    assert kernels.floor_ms(8e9) == 4.0 and kernels.floor_ms(8e9, 1e10) == 20.0
    assert kernels.floor_ms(2e9, 1e8) == 3.0  # nothing takes less than a launch


# ----------------------------------------------------------------------------------------- decoding


def test_every_row_is_some_prompts():
    for rows, prompts in ((1, 1), (4, 1), (7, 3), (1024, 128)):
        assert len(gpu_models.split_rows(rows, prompts)) == prompts
        assert sum(gpu_models.split_rows(rows, prompts)) == rows


def test_the_engine_that_the_product_takes_is_timed():
    assert gpu_models.get_cache_settings(False) == {"ours": "auto", "plain": "plain"}
    assert gpu_models.get_cache_settings(True)["ours"] == "paged"


def test_a_model_that_cannot_be_made_costs_its_own_rows(table, monkeypatch):
    """Building the second of three models fails. The first and third are still measured with every
    number of rows, with full weights and with LoRA.
    """
    made, make = [], gpu_models.make_model

    def make_model(size, device):
        made.append(size)
        return raise_no_room() if size == "1.7B" else make("tiny", device)

    def measure(table, case, name, *inputs):
        table.row(case, name, "done", 1)

    for module in (gpu_decode, gpu_models):
        monkeypatch.setattr(module, "make_model", make_model)
    monkeypatch.setattr(gpu_decode, "device_of", lambda dry: "cpu")
    monkeypatch.setattr(gpu_decode, "SIZES_TIMED", ("0.5B", "1.7B", "8B"))
    sizes = dict.fromkeys(("tiny", "0.5B", "1.7B", "8B"), harness.SIZES["tiny"])
    monkeypatch.setattr(harness, "SIZES", sizes)
    for name in ("measure_speed", "peer_speed"):
        monkeypatch.setattr(gpu_decode, name, measure)
    monkeypatch.setattr(gpu_decode, "measure_kernels", lambda *inputs, ours: None)
    monkeypatch.delitem(gpu_models.PEERS, "vllm")
    gpu_decode.part_decode(table, False)
    assert set(select(table, "done", "provider")) == {"paged", "plain"}  # no peer
    gpu_decode.part_peers(table, False)
    assert made == ["0.5B", "1.7B", "8B"] * 3
    failed = [("1.7B", name, "MemoryError") for name in ("ours", "generate", "continuous batching")]
    assert select_failed(table) == failed
    expected = set()
    for size in ("0.5B", "8B"):
        for name in ("paged", "plain", "generate", "continuous batching"):
            expected |= {(f"{size}, {rows} rows", name) for rows in (1, 64, 256, 1024)}
        for name in ("paged", "plain"):
            expected |= {(f"{size} LoRA, {rows} rows", name) for rows in (64, 256, 1024)}
    assert set(select(table, "done", "case", "provider")) == expected
    trials = [row["value"] for row in rows_of(table.path) if row["provider"] == "trial"]
    assert trials == ["the same samples"] * 4


@pytest.fixture(scope="module")
def decoder():
    from rl.sampler import make_decoder

    return make_decoder(gpu_models.make_model("tiny", "cpu"), kind="fast")


def last_for(seconds):
    """Return a stand-in of `seconds_of`, which runs the work and says that it took `seconds`."""

    def seconds_of(run, device):
        result = run()
        return seconds, result

    return seconds_of


@pytest.mark.parametrize("name", ["paged", "plain"])
def test_tokens_are_counted_as_the_engine_drew_them(table, monkeypatch, decoder, name):
    monkeypatch.setattr(gpu_decode, "seconds_of", last_for(2.0))
    gpu_decode.measure_speed(table, "tiny", name, decoder, 24, True)
    first, speed, step = rows_of(table.path)
    metrics = [row["metric"] for row in (first, speed, step)]
    assert metrics == ["first_two_calls", "tokens_per_s", "step"]
    assert float(speed["value"]) == 24 * 16 / 2.0  # two calls of eight steps
    assert (float(step["value"]), step["unit"]) == (2e3 / 16, "ms")
    # the limits of this machine were not measured, and nothing else takes their place
    assert {row["floor"] for row in (speed, step)} == {""}
    assert step["note"] == "floor not measured" and speed["note"].endswith("floor not measured")
    set_limits(monkeypatch, table, launch_ms=6.0)
    gpu_decode.measure_speed(table, "tiny", name, decoder, 24, True)
    *_, speed, step = rows_of(table.path)
    assert (float(speed["floor"]), float(step["floor"])) == (24e3 / 6.0, 6.0)

    def fewer(decoder, cache, rows, *inputs):
        engine = gpu_models.engine_of(decoder, cache, rows, *inputs)
        engine.max_rows = rows - 1
        return engine

    monkeypatch.setattr(gpu_decode, "engine_of", fewer)
    measure = gpu_decode.measure_speed
    table.attempt("fewer", name, lambda: measure(table, "fewer", name, decoder, 24, True))
    assert select_failed(table) == [("fewer", name, "RuntimeError")]


@pytest.mark.parametrize("size", ["tied", "untied"])
def test_the_floor_of_a_step_counts_what_it_reads(table, monkeypatch, size):
    """The floor of an untied model leaves out the embedding. It counts adapters, and the prompt of
    a group only once.
    """
    shape = harness.SIZES["tiny"][1] | {"tie_word_embeddings": size == "tied"}
    monkeypatch.setitem(harness.SIZES, size, ("Qwen3", shape))
    decoders = gpu_decode.make_decoders(table, size, "cpu")
    assert list(decoders) == [size, f"{size} LoRA"]
    set_limits(monkeypatch, table, tb_per_s=1e-9)  # a byte a millisecond
    empty = SimpleNamespace(prompt_lengths=np.array([0]), response_lengths=np.array([0]))
    full = SimpleNamespace(prompt_lengths=np.array([100]), response_lengths=np.array([3, 4]))
    floors = [gpu_decode.step_floor_ms(d, empty, 1) for d in decoders.values()]
    cached = gpu_decode.step_floor_ms(decoders[size], full, 1) - floors[0]
    model = gpu_models.make_model(size, "cpu")
    # Buffers are aligned to a multiple of several bytes.
    assert floors[0] == pytest.approx(2 * (model.num_parameters() - (size != "tied") * 600 * 64))
    assert cached == pytest.approx(
        107 * 2 * 2 * 2 * 2 * 16
    )  # keys and values, bytes, layers, heads, width
    ranks = 16 * 2 * (64 * 4 + 64 + 32 * 2 + 64 + 3 * (64 + 128))  # q, k, v, o, gate, up, down
    assert floors[1] - floors[0] >= 2 * ranks
    # With many rows the products take longer: two operations for each row and weight of a matrix.
    set_limits(monkeypatch, table, tflops=1e-9)  # an operation a millisecond
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    matrices -= (size != "tied") * 600 * 64
    floor = gpu_decode.step_floor_ms(decoders[size], empty, 1000)
    assert floor == pytest.approx(2e3 * matrices, rel=1e-3)


@pytest.mark.parametrize(("name", "profiled"), [("paged", 8), ("plain", 1)])
def test_the_host_has_what_the_device_does_not_work(table, monkeypatch, decoder, name, profiled):
    """In each profiled call the device is busy for a quarter of a second, and each step takes one
    second.
    """
    monkeypatch.setattr(gpu_decode, "seconds_of", last_for(16.0))
    monkeypatch.setattr(gpu_decode, "busy_seconds", lambda *inputs: last_for(0.25)(*inputs)[0])
    gpu_decode.measure_host_share(table, "tiny", name, decoder, 24, True)
    (share,) = select(table, "host_share", "value")
    assert float(share) == pytest.approx(1 - 0.25 / profiled)


def test_a_peer_is_timed_without_its_prompts_and_has_to_give_every_token(table, monkeypatch):
    requests = []

    def peer(prompts, new):
        requests.append((len(prompts), new))
        return len(prompts) * new

    def seconds_of(run, device):
        result = run()
        return 5.0 + 0.25 * requests[-1][1], result

    monkeypatch.setattr(gpu_decode, "seconds_of", seconds_of)
    gpu_decode.peer_speed(table, "tiny, 20 rows", "peer", peer, 20, 600, True)
    speeds = {row["metric"]: float(row["value"]) for row in rows_of(table.path)}
    assert requests == [(20, 34), (20, 2), (20, 34)]
    assert speeds == {
        "tokens_per_s": 20 / 0.25,
        "tokens_per_s_with_prompts": pytest.approx(20 * 34 / (5 + 0.25 * 34), rel=1e-5),
    }
    with pytest.raises(RuntimeError, match="67 tokens, not 20 x 2"):
        gpu_decode.peer_speed(table, "tiny", "peer", lambda prompts, new: 67, 20, 600, True)


# -------------------------------------------------------------------------------- kernels and setup


def test_a_kernel_that_fails_costs_one_row(table, monkeypatch):
    from kernels.tile_config import HOPPER_TILES

    class Scores:
        def __init__(self, special):
            self.special, self.tiles = special, HOPPER_TILES

        def statistics(self, entropy, keep=None):
            if entropy and self.special:
                raise RuntimeError("too much shared memory")

        def dlogits(self, *inputs):
            pass

    monkeypatch.setattr(gpu_kernels, "scores_of", lambda operands, special: Scores(special))
    monkeypatch.setattr(gpu_kernels, "_compare", lambda *inputs: None)
    gpu_kernels.part_branches(table, True)
    broken = ("tiny, forward and entropy", "warp-specialised")
    assert select_failed(table) == [(*broken, "RuntimeError")]
    whats = ("forward", "forward and entropy", "forward that keeps [T, V]", "dlogits of a slab")
    every = {(f"tiny, {what}", name) for what in whats for name in ("older", "warp-specialised")}
    done = {cell for cell in select(table, "TFLOP/s", "case", "provider") if cell[1] != "cuBLAS"}
    assert done == every - {broken}
    chosen = set(select(table, "chosen", "case", "provider"))
    assert {case for case, _ in chosen} == {"bfloat16", "float16", "float32"} and len(chosen) == 6


def test_the_attention_that_the_product_chooses_is_a_row(table):
    gpu_kernels._ways(table, "tiny", gpu_kernels._make(gpu_kernels.DRY[0], True))
    assert select(table, "way", "value") == ["triton"]


def test_providers_that_fail_are_rows_and_so_are_calls(table, monkeypatch):
    def absent(problem):
        raise kernels.CannotRun("not installed")

    def broken(*inputs):
        raise RuntimeError("no kernel image")

    providers = tuple(
        kernels.Provider(run.__name__, "flat", 8, run) for run in (absent, broken, kernels._torch)
    )
    ours = kernels.Provider("ours_plain", "flat", 8, kernels._torch)
    monkeypatch.setattr(kernels, "PROVIDERS", (*providers, ours))
    for name in ("bench_logits", "bench_tokens"):
        monkeypatch.setattr(kernels, name, broken)
    monkeypatch.setattr(gpu_decode, "PEERS", {})
    gpu_kernels.part_kernels(table, True)
    measured = set(select(table, "both", "provider"))
    failed = ["tiny 64 tokens, token_logprob", "policy_loss"]
    assert measured == {"ours_plain"} and select(table, "failed", "case") == failed
    gpu_decode.part_peers(table, True)
    assert select(table, "left out", "provider", "note") == [("absent", "not installed")]
    failed += ["tiny 64 tokens", "tiny 64 tokens, token_logprob"]
    assert select(table, "failed", "case") == failed
    measured = {row["metric"] for row in rows_of(table.path) if row["provider"] == "_torch"}
    assert measured == {"forward", "backward", "both"}


def test_token_logprob_is_compared_with_torch_at_the_same_case(table, monkeypatch):
    monkeypatch.setattr(gpu_decode, "PEERS", {})
    monkeypatch.setattr(kernels, "PROVIDERS", ())
    for part in (gpu_kernels.part_kernels, gpu_decode.part_peers):
        part(table, True)
    case = "tiny 64 tokens, token_logprob"
    both = {row["provider"]: row for row in rows_of(table.path) if row["case"] == case}
    assert set(both) == {"ours", "torch"}


def test_every_timed_model_is_compiled():
    jobs = gpu_compile.list_jobs(False)
    shapes = [shape.model for shape in gpu_kernels.shapes(False)]
    whats = (*gpu_compile.PROVIDERS, "older branch", "draw")
    expected = {f"{size}, decode" for size in gpu_decode.SIZES_TIMED}
    assert set(jobs) == expected | {f"{shape}, {what}" for shape in shapes for what in whats}


@pytest.mark.slow
def test_what_does_not_compile_is_a_row(table, monkeypatch):
    some = {"bad": (int, ("no number",)), "good": (int, ("1",))}
    monkeypatch.setattr(gpu_compile, "list_jobs", lambda dry: some)
    gpu_compile.part_compile(table, True)
    results = {row["case"]: (row["metric"], row["unit"]) for row in rows_of(table.path)}
    assert results == {"bad": ("failed", ""), "good": ("compiled_in", "s")}


@pytest.mark.parametrize("part", ["group", "agreement", "learner"])
def test_a_part_whose_model_cannot_be_made_says_so(table, monkeypatch, part):
    for module in (gpu_models, gpu_runs):
        monkeypatch.setattr(module, "make_model", raise_no_room)
    gpu.function_of(part)(table, True)
    assert set(select(table, "failed", "value")) == {"MemoryError"}


@pytest.mark.parametrize(("part", "package"), [("step", "tyro"), ("sharded", "deepspeed")])
def test_a_package_that_is_not_installed_is_left_out_before_a_model_is_made(
    table, monkeypatch, part, package
):
    def find_spec(name):
        return None if name == package else object()

    monkeypatch.setattr(gpu_runs.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(gpu_runs, "save", lambda *inputs: pytest.fail("a model was made"))
    gpu.function_of(part)(table, True)
    assert select(table, "left out", "note") == [f"No module named '{package}'"] * 2
    assert len(rows_of(table.path)) == 2


WITHOUT_TYRO = """import pathlib, sys
sys.modules["tyro"] = None
sys.path.insert(0, ".")
import pytest
from bench import gpu
files = sorted(p for p in pathlib.Path("tests").rglob("test_*.py") if "mark.gpu" in p.read_text())
options = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
code = pytest.main([*options, *(str(file) for file in files if file.name != "test_bench_gpu.py")])
gpu.execute_part("learner", pathlib.Path(sys.argv[1]), True)
sys.exit(code)
"""


@pytest.mark.slow
def test_only_the_plan_and_the_step_need_tyro(tmp_path):
    """The tests marked gpu can be collected, and the learner is measured."""
    command = [sys.executable, "-c", WITHOUT_TYRO, str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    table = gpu.Table("learner", tmp_path / "learner.csv")
    assert set(select(table, "tokens_per_s", "provider")) == {"kept 0", "ours"}
    assert set(select(table, "left out", "provider")) == {"kept 0, --plan", "ours, --plan"}


class ImpatientPopen(subprocess.Popen):
    """A command whose time is over once it has made the file "ready" in the folder that its last
    word names.
    """

    def communicate(self, input=None, timeout=None):
        if timeout is not None:
            while not (Path(self.args[-1]) / "ready").exists() and self.poll() is None:
                time.sleep(0.01)
            timeout = 0.01
        return super().communicate(input, timeout)


def test_a_run_that_takes_too_long_leaves_the_step_that_it_made_and_time_to_the_next(
    table, monkeypatch
):
    """Stop both runs after two logged steps. Remaining time is split evenly among remaining runs;
    the first run takes 20 of 103 seconds.
    """
    code = """import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[-1]) / "grpo"
folder.mkdir(parents=True)
with (folder / "metrics.jsonl").open("w") as file:
    for seconds in (9.0, 2.0):
        file.write(json.dumps({"time/step": seconds, "reward": 0.5}) + chr(10))
    file.write('{"time/st')
(folder.parent / "ready").touch()
time.sleep(60)"""
    limits, run, end = [], gpu_runs._run_command, time.time() + 103.0

    def run_command(words, seconds):
        limits.append(seconds)
        monkeypatch.setenv("WHETSTONE_GPU_END", str(end - 20.0))
        run([sys.executable, "-c", code, *words], seconds)

    monkeypatch.setattr(gpu_runs, "save", lambda size, folder, device: folder)
    monkeypatch.setattr(gpu_runs, "_run_command", run_command)
    monkeypatch.setattr(gpu_runs.subprocess, "Popen", ImpatientPopen)
    monkeypatch.setenv("WHETSTONE_GPU_END", str(end))
    gpu_runs.part_step(table, True)
    for metric in ("samples_per_s", "time/step"):
        assert select(table, metric, "value") == ["2", "2"]
    stopped = [f"stopped after {seconds:.0f} s" for seconds in limits]
    assert select(table, "failed", "note") == stopped
    assert 45 < limits[0] <= 50 and 70 < limits[1] <= 80


def test_a_command_that_takes_too_long_ends_with_its_children_and_with_its_part(
    tmp_path, monkeypatch
):
    """The command shares the process group of its part, which is killed as a whole."""
    code = """import os, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
folder = pathlib.Path(sys.argv[1])
(folder / "pids").write_text(f"{os.getpgrp()} {child.pid}")
(folder / "ready").touch()
child.wait()"""
    monkeypatch.setattr(gpu_runs.subprocess, "Popen", ImpatientPopen)
    with pytest.raises(RuntimeError, match="stopped after 8 s"):
        gpu_runs._run_command([sys.executable, "-c", code, str(tmp_path)], 8.0)
    group, child = map(int, (tmp_path / "pids").read_text().split())
    assert group == os.getpgrp()
    deadline = time.monotonic() + 10
    while (state := read_state(child)) not in ("gone", "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state in ("gone", "Z")


def read_state(pid: int) -> str:
    """Return the state of a process as in /proc, "gone" without one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0]
    except OSError:
        return "gone"


def test_the_plan_beside_the_learner_is_of_the_step_that_it_makes(table, tmp_path):
    model = gpu_runs.save("tiny", tmp_path / "model", "cpu")
    gpu_runs.compare_plan(table, "tiny", "kept 0", model, 2, 32, 0, 1 << 24)
    planned, ratio = rows_of(table.path)
    assert (planned["metric"], ratio["metric"]) == ("planned_bytes", "measured/planned")
    assert float(ratio["value"]) == pytest.approx((1 << 24) / int(planned["value"]), rel=1e-4)
    twice = gpu_runs.plan_of(model, 4, 32)
    assert twice.sums["train"] > gpu_runs.plan_of(model, 2, 32).sums["train"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tests/test_a.py::test_b[x y] PASSED [ 10%]", ("tests/test_a.py::test_b[x y]", "passed")),
        ("tests/test_a.py::test_b SKIPPED (why)  [ 1%]", ("tests/test_a.py::test_b", "skipped")),
        ("[gw3] [ 12%] FAILED tests/test_a.py::test_b ", ("tests/test_a.py::test_b", "failed")),
        ("tests/test_a.py::test_b ", None),
        ("=== 3 passed, 1 FAILED ===", None),
    ],
)
def test_the_outcome_of_a_test_is_read_with_and_without_xdist(line, expected):
    assert gpu_kernels.read_outcome(line) == expected


def make_row(part, case, provider, metric, value, floor="", unit="", note=""):
    cells = [part, case, provider, metric, str(value), unit, str(floor), note]
    return dict(zip(gpu.COLUMNS, cells, strict=True))


def test_the_verdict_names_what_failed_what_is_slow_and_who_is_faster():
    row = make_row
    rows = [
        row("floors", "8192^3", "torch.mm", "TFLOP/s", 700),
        row("floors", "whole part", "", "seconds", 3.0, unit="s"),
        row("tests", "a", "pytest", "passed", 1),
        row("tests", "b", "pytest", "passed", 1),
        row("tests", "c", "pytest", "failed", 1),
        row("agreement", "0.5B, bfloat16", "ours", "kl", 0.02, 0.01, "nats"),
        row("agreement", "0.5B, float32", "ours", "kl", 1e-9, 0.01, "nats"),
        row("decode", "8B, 64 rows", "paged", "tokens_per_s", 500, 1000),
        row("peers", "8B, 64 rows", "vllm", "tokens_per_s", 750),
        row("kernels", "0.5B", "ours", "both", 2.0, 1.5, "ms"),
        row("peers", "0.5B", "liger", "both", 3.0, 1.5, "ms"),
        row("learner", "0.6B", "ours", "tokens_per_s", 900, 1000),
        row("learner", "0.6B", "kept 0", "tokens_per_s", 950, 1000),
        row("step", "LoRA", "ours", "samples_per_s", 80, note="3.2 s a step"),
        row("sharded", "whole part", "", "status", "stopped after 25 s"),
        row("decode", "8B LoRA, 64 rows", "paged", "tokens_per_s", 400, 1000),
        row("host", "8B, 64 rows", "paged", "host_share", 0.2),
        row("host", "8B LoRA, 64 rows", "paged", "host_share", 0.45),
        row("learner", "0.6B", "ours, --plan", "measured/planned", 0.981),
        row("draw", "0.5B, 64 rows", "ours", "failed", "OutOfResources"),
        row("kernels", "policy_loss", "ours", "forward", 0.02, 0.0004, "ms"),
    ]
    assert gpu_verdict.format_verdict(rows, "a card").splitlines() == [
        "# Verdict: a card",
        "",
        "- tests: 2 passed, 1 failed",
        "- failed: sharded (stopped after 25 s); c; draw, 0.5B, 64 rows, ours (OutOfResources)",
        "- sampler and learner: WRONG in 0.5B, bfloat16, ours: KL 0.02; right in 0.5B, float32, "
        "ours: KL 1e-09",
        "- memory: ours, --plan: 0.98 of it",
        "- limits: TFLOP/s 700",
        "- step: LoRA: 80 samples/s, 3.2 s a step",
        "- host: 45% of a step at 8B LoRA, 64 rows",
        "- slow: decode, 8B LoRA, 64 rows, tokens_per_s reaches 40% of its floor; kernels, 0.5B, "
        "both reaches 75% of its floor; learner, 0.6B, tokens_per_s reaches 90% of its floor",
        "- behind: 8B, 64 rows: vllm is 1.50 times as fast (tokens_per_s)",  # not liger
        "- next: mend the failed tests (1); find where sampler and learner disagree; run again "
        "with --part sharded; speed up decode (8B LoRA, 64 rows), the host's work first",
    ]


def test_kernels_are_compared_with_those_that_do_the_same_in_the_same_memory():
    times = {
        "ours": ("flat", 3.0), "ours_saved": ("logits", 2.0), "ours_frozen": ("flat", 1.0),
        "torch": ("logits", 2.5), "torch_frozen": ("logits", 1.0), "torch_compile": ("logits", 1.6),
        "liger": ("flat", 3.5),
    }  # fmt: skip
    rows = [
        make_row("peers", "8B", name, "both", ms, "1", "ms", f"{memory}, 5 MB")
        for name, (memory, ms) in times.items()
    ]
    expected = ["8B: torch_compile is 1.25 times as fast (both)"]
    assert gpu_verdict.find_beaten(rows) == expected


def test_the_verdict_of_nothing_and_of_figures_that_are_no_numbers():
    lines = gpu_verdict.format_verdict([], "a card").splitlines()
    assert [line.split(":")[0] for line in lines[2:]] == ["- tests", "- next"]
    row = make_row("agreement", "0.5B", "ours", "kl", "nan", "0.01", "nats")
    text = gpu_verdict.format_verdict([row], "a card")
    assert "WRONG in 0.5B, ours: KL nan" in text
    # nothing has a floor, so nothing is near to it
    assert "next: find where sampler and learner disagree; run the parts that have floors" in text


def test_a_test_that_hangs_leaves_time_to_the_others(monkeypatch):
    words = gpu_kernels.pytest_command(False)
    assert words[words.index("-n") + 1] == "12" and words[words.index("--timeout") + 1] == "60"
    monkeypatch.setattr(gpu_kernels.importlib.util, "find_spec", lambda name: None)
    assert not {"-n", "--timeout"} & set(gpu_kernels.pytest_command(False))


@pytest.mark.slow
@pytest.mark.campaign
def test_parts_run_dry(tmp_path):
    """Run the command of the GPU campaign on a CPU with the smallest sizes. All these parts finish,
    and the table exists.
    """
    parts = ["floors", "tests", "step", "decode", "kernels", "peers"]
    words = [sys.executable, str(REPO / "bench" / "gpu.py"), "--dry", "--output", str(tmp_path)]
    words += ["--part", *parts[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    result = rows_of(tmp_path / "gpu.csv")
    assert {row["part"] for row in result} == set(parts)
    assert [row["value"] for row in result if row["metric"] == "status"] == ["done"] * 6
    assert not [row for row in result if row["metric"] == "failed"]
    # every figure that has a floor has it from this machine's own limits
    assert not [row for row in result if "floor not measured" in row["note"]]
    assert {row["part"] for row in result if row["floor"]} >= {"decode", "kernels", "peers"}
    # few files, so that a machine that returns only a few files returns them all
    names = ["gpu.csv", "parts.tar", "verdict.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    verdict = (tmp_path / "verdict.md").read_text()
    assert verdict.startswith("# Verdict") and len(verdict.splitlines()) <= 2 + 10
