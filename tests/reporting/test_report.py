"""Test the page of `whetstone report`: numbers, hostile text, page size and pairs of runs."""

import html
import json
import math
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import numpy as np
import pytest
import torch
from listener import MessageRecorder

import report
import whetstone
from rl.algorithms import METHODS
from rl.config import RunSettings, read_run, resolve_config
from rl.errors import RankLost, UserError
from rl.reporting import Logbook
from rl.reporting.update_files import write_update_file
from rl.trainer import write_report
from rl.trainer.run_report import ReportWriter, describe_launch

REPO = Path(__file__).resolve().parents[2]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u202e\x00\x1b[2J\u2028 &lt;b&gt;"


@pytest.fixture
def small_plotly(monkeypatch):
    """Replace the plotly library by a comment, so that the tests run without it."""
    package, offline = ModuleType("plotly"), ModuleType("plotly.offline")
    offline.get_plotlyjs = lambda: "// plotly"
    monkeypatch.setitem(sys.modules, "plotly", package)
    monkeypatch.setitem(sys.modules, "plotly.offline", offline)
    return offline


def resolve(*words: str) -> dict:
    return resolve_config(read_run(words, METHODS, REPO / "recipes" / "sorting.yaml", RunSettings))


GRPO = ("grpo", "--dataset", "addition", "--reward", "exact_match", "--steps", "4")


def write_run(folder: Path, metrics, rollouts=None, words=GRPO) -> Path:
    """Write a run folder with its configuration, metrics and rollout files."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(resolve(*words)))
    lines = [json.dumps(row) + "\n" for row in metrics]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for name, rows in (rollouts or {}).items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / name).write_text(text)
    return folder


def make_row(problem: int, correct: float, response: str = "4", **more) -> dict:
    row = {"group": problem, "tag": "addition", "problem": problem, "prompt": f"{problem}+1="}
    row |= {"response": response, "reward": correct, "advantage": None, "stop_reason": "stop"}
    return {**row, "metrics": {"correct": correct}, **more}


def write_record(path: Path, num_answers: int, num_tokens: int) -> None:
    """Write an update record of groups of eight answers with the tokens 0, 1, 2 ..."""
    rng, count = np.random.default_rng(0), num_answers * num_tokens
    sampled = -rng.exponential(size=count).astype(np.float32)
    arrays = {
        "target_tokens": np.tile(np.arange(num_tokens), num_answers),
        "sampled": sampled,
        "datums": np.array([[i // 8, i % 8, 0, num_tokens] for i in range(num_answers)]),
        "turns": np.zeros(num_answers, np.int64),
        "turn_counts": np.ones(num_answers, np.int64),
        "call/0/datums": np.arange(num_answers),
        "call/0/logprobs": sampled + rng.normal(0, 0.3, count).astype(np.float32),
        "call/0/entropies": rng.exponential(size=count).astype(np.float32),
    }
    write_update_file(path, arrays, {"calls": [{}]})


def read_page(path: Path) -> tuple[str, dict]:
    """Return the page and the data in its script."""
    page = path.read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return page, json.loads(text)


def read_text(page: str) -> str:
    """Return the text of the page without tags."""
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)))


def test_curves_equal_the_metrics(tmp_path, small_plotly):
    rng = random.Random(1)
    metrics = [
        {"step": i, "stage": "grpo", "reward/total": rng.random(), "optim/lr": 1e-5 * rng.random()}
        for i in range(1, 60)
    ]
    metrics[9] |= {"test/env/all/correct": 0.25, "time/step": 3.0, "time/tokens_per_second": 10.0}
    metrics[20]["reward/total"] = None  # logged as null because it was not finite
    path = write_report([write_run(tmp_path / "run", metrics)])
    assert path == tmp_path / "run" / "report.html"
    (run,) = read_page(path)[1]["runs"]
    names = {name for row in metrics for name in row} - {"step", "stage"}
    assert set(run["series"]) == names
    for name, series in run["series"].items():
        expected = [(i, row[name]) for i, row in enumerate(metrics) if row.get(name) is not None]
        assert series["rows"] == [i for i, _ in expected]
        assert series["values"] == pytest.approx([value for _, value in expected], rel=1e-6)
    assert run["axes"]["steps"] == [row["step"] for row in metrics]
    assert run["axes"]["tokens"][8:10] == [0, 30] and run["axes"]["tokens"][-1] == 30
    assert run["axes"]["hours"][-1] == pytest.approx(3 / 3600)


def test_long_curves_are_thinned_and_keep_their_values(tmp_path, small_plotly):
    metrics = [
        {"step": i + 1, "stage": "grpo", "reward/total": i / 7, **{f"m/{j}": i + j for j in range(5)}}
        for i in range(30_000)
    ]  # fmt: skip
    (run,) = read_page(write_report([write_run(tmp_path / "run", metrics)]))[1]["runs"]
    series = run["series"]["m/3"]
    assert 10_000 < len(series["rows"]) < 15_001 and series["rows"][-1] == 29_999
    assert series["values"] == [float(i + 3) for i in series["rows"]]
    assert len(run["series"]["reward/total"]["rows"]) == 30_000  # as many as a panel shows


def test_alarms_are_periods_and_the_parts_of_a_step_add_up(tmp_path, small_plotly):
    metrics = [
        {"step": step, "stage": "grpo", "time/step": 10.0, "time/sample": 4.0, "time/score": 1.0,
         "alarm/length": float(step in (2, 3, 5)), "alarm/kl_1": 0.0}
        for step in range(1, 7)
    ]  # fmt: skip
    metrics[-1]["time/test"] = 2.0
    page, data = read_page(write_report([write_run(tmp_path / "run", metrics)]))
    (run,) = data["runs"]
    assert [(a["name"], a["first"], a["last"]) for a in run["alarms"]] == [
        ("length", 2, 3), ("length", 5, 5)
    ]  # fmt: skip
    assert run["times"]["total"] == {
        "sampling": 24.0, "waiting for rewards and environments": 6.0,
        "update, and the rest of the step": 30.0, "evaluation by samples": 2.0,
    }  # fmt: skip
    assert run["times"]["steps"] == [1, 2, 3, 4, 5, 6]


def test_the_headline_says_how_much_is_new(tmp_path, small_plotly):
    metrics = [
        {"step": 0, "stage": "grpo", "test/env/all/correct": 0.2, "test/greedy/all/correct": 0.6},
        {"step": 1, "stage": "grpo", "reward/total": 0.5},
        {"step": 4, "stage": "grpo", "test/env/all/correct": 0.7, "test/greedy/all/correct": 0.7},
    ]
    text = read_text(read_page(write_report([write_run(tmp_path / "run", metrics)]))[0])
    assert "0.2 → 0.7 held-out accuracy, grpo" in text and "0.6 → 0.7 greedy accuracy" in text
    assert "Most of this gain (80%) is sharpening" in text  # (0.6 - 0.2) / (0.7 - 0.2)


@pytest.mark.parametrize("words", [
    GRPO,
    (*GRPO, "--variant", "dr_grpo", "--learning-rate", "3e-5", "--stop", "no", "1e3"),
    (str(REPO / "recipes" / "sorting.yaml"),),
    (str(REPO / "recipes" / "gsm8k.yaml"), "--temperature", "0.7"),
], ids=["grpo", "variant", "sorting", "gsm8k"])  # fmt: skip
def test_the_recipe_of_the_page_repeats_the_run(tmp_path, small_plotly, words):
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo"}], words=words)
    page, _ = read_page(write_report([folder]))
    (text,) = re.findall(r'<pre class="recipe">(.*?)</pre>', page, re.S)
    recipe = tmp_path / "repeat.yaml"
    recipe.write_text(html.unescape(text))
    assert resolve(str(recipe))["stages"] == resolve(*words)["stages"]


def write_hostile_run(folder: Path) -> Path:
    metrics = [
        {"step": step, "stage": HOSTILE, "reward/total": 0.5, HOSTILE: 1.0, f"alarm/{HOSTILE}": 1.0}
        for step in range(1, 4)
    ]
    answers = [
        make_row(0, 1.0, HOSTILE, prompt=HOSTILE, answer=HOSTILE, tag=HOSTILE, error=HOSTILE),
        make_row(1, 0.0, "x" * 2_000_000, tokens=[HOSTILE, "a"], logprobs=[-1.0, None]),
        make_row(2, 0.0, HOSTILE * 50_000),
        make_row(3, 0.0, turns=[{"text": HOSTILE, "sampled": False, "role": "user"},
                                {"text": HOSTILE, "sampled": True, "tool_calls": [{"name": HOSTILE, "answer": HOSTILE}]}]),
        make_row(4, 0.0, turns=[{"text": "x", "sampled": True, "metrics": [1], "messages": 5}]),
        *[make_row(5, 1e308, tokens=5)] * 2,
    ]  # fmt: skip
    rollouts = {"grpo-eval-000000.jsonl": answers, "grpo-eval-000003.jsonl": answers}
    write_run(folder, metrics, {**rollouts, "step_000003_grpo.jsonl": answers})
    with (folder / "rollouts" / "step_000003_grpo.jsonl").open("a") as file:
        file.write('[1]\n{"unfinished')
    config = json.loads((folder / "config.json").read_text())
    config["stages"][0]["name"] = config["recipe"] = HOSTILE
    config["stages"][0]["settings"]["system_prompt"] = HOSTILE
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "launches.jsonl").write_text('{"devices": 5}\n')
    check = '{"rewards": [{"reward": 1, "dataset": 2, "rows": Infinity}]}'
    (folder / "reward_check.json").write_text(check)
    return folder


def test_hostile_text_stays_text(tmp_path, small_plotly):
    folders = [write_hostile_run(tmp_path / f"run{i}") for i in range(2)]
    path = write_report(folders, tmp_path / "page.html", labels=[HOSTILE, HOSTILE + "2"])
    page, data = read_page(path)
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)
    parser.feed(page)
    assert tags.count("script") == 3 and "img" not in tags
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2066-\u2069]", page)
    assert len(page) < 500_000  # answers of four megabytes are shortened
    rollouts = data["runs"][0]["rollouts"]
    answers = [answer for group in rollouts["batches"][0]["groups"] for answer in group["answers"]]
    assert len(answers) == 7
    for answer in answers:
        rendered = answer.get("html", "")
        assert "<script" not in rendered and "<img" not in rendered
    assert any("&lt;script&gt;" in answer.get("html", "") for answer in answers)


def test_a_page_of_many_rollouts_stays_below_ten_megabytes(tmp_path, small_plotly):
    small_plotly.get_plotlyjs = lambda: "//" + "x" * 4_900_000
    tokens = [f"word{i} é" for i in range(800)]
    logprobs = [-0.123456 * (i % 9) for i in range(800)]
    drawn = {"tokens": tokens, "logprobs": logprobs}
    ids = list(range(800))
    batch = [
        make_row(i // 8, i % 2, "", index=i % 8, **drawn, response_tokens=ids) for i in range(48)
    ]
    rollouts = {f"step_{step:06d}_grpo.jsonl": batch for step in range(1, 15)}
    evaluation = [make_row(i, 1.0, "", **drawn) for i in range(60)]
    rollouts |= {f"grpo-eval-{step:06d}.jsonl": evaluation for step in (0, 5, 10, 14)}
    metrics = [{"step": step, "stage": "grpo", "reward/total": 0.5} for step in range(1, 15)]
    folder = write_run(tmp_path / "run", metrics, rollouts)
    for step in range(1, 15):
        write_record(folder / "rollouts" / f"step_{step:06d}_grpo.update.safetensors", 48, 800)
    path = write_report([folder])
    assert sum(file.stat().st_size for file in (folder / "rollouts").iterdir()) > 15_000_000
    assert 7_000_000 < path.stat().st_size <= 10_000_000
    shown = read_page(path)[1]["runs"][0]["rollouts"]
    assert len(shown["files"]) == 18 and len(shown["batches"]) == 12
    assert all(batch["groups"] for batch in shown["batches"])
    assert shown["token_values"] == ["entropies", "ratios"]
    for batch in shown["batches"]:
        for answer in (item for group in batch["groups"] for item in group["answers"]):
            assert len(answer["entropies"]) == len(answer["ratios"]) == 800
    assert [entry["step"] for entry in shown["evaluations"]] == [0, 5, 10, 14]
    assert len(shown["evaluations"][0]["rows"]) > 5


def test_the_turns_of_an_episode_have_their_entropies_and_ratios(tmp_path, small_plotly):
    turns = [
        {"role": "user", "text": "go", "sampled": False},
        {"role": "assistant", "text": "ab", "sampled": True, "tokens": ["a", "b"],
         "token_ids": [5, 6], "logprobs": [-1.0, -1.0], "reward": 0.0},
        {"role": "user", "text": "on", "sampled": False},
        {"role": "assistant", "text": "c", "sampled": True, "tokens": ["c"],
         "token_ids": [7], "logprobs": [-1.0], "reward": 1.0},
    ]  # fmt: skip
    rows = [make_row(0, 1.0, index=i, advantage=1.0, turns=turns) for i in range(2)]
    metrics = [{"step": 1, "stage": "grpo", "reward/total": 0.5}]
    folder = write_run(tmp_path / "run", metrics, {"step_000001.jsonl": rows})
    arrays = {  # the second answer is trained on: both turns in one datum, in two passes
        "target_tokens": np.array([5, 6, 7]),
        "sampled": np.full(3, -1.0, np.float32),
        "datums": np.array([[0, 1, 0, 3]]),
        "turns": np.array([0, 1]),
        "turn_counts": np.array([2]),
    }
    for k, (shift, entropy) in enumerate([(0.0, 0.0), (1.0, 0.5)]):
        arrays[f"call/{k}/datums"] = np.array([0])
        arrays[f"call/{k}/logprobs"] = np.array([-1.0, -1.0 + shift, -1.0 - shift], np.float32)
        arrays[f"call/{k}/entropies"] = np.array([entropy, entropy, 3 * entropy], np.float32)
    path = folder / "rollouts" / "step_000001.update.safetensors"
    write_update_file(path, arrays, {"calls": [{}, {}]})
    rollouts = read_page(write_report([folder]))[1]["runs"][0]["rollouts"]
    plain, coloured = (a["html"] for a in rollouts["batches"][0]["groups"][0]["answers"])
    assert rollouts["token_values"] == ["entropies", "ratios"] and "ratio" not in plain
    assert re.findall(r"entropy ([\d.]+), ratio ([\d.]+)", coloured) == [
        ("0.500", "1"), ("0.500", "2.718"), ("1.500", "0.3679")
    ]  # fmt: skip
    assert re.findall(r'class="p\d aup (e\d r\d)"', coloured) == ["e2 r3", "e2 r6", "e4 r0"]
    path.write_bytes(b"damaged")
    rollouts = read_page(write_report([folder]))[1]["runs"][0]["rollouts"]
    assert rollouts["token_values"] == []
    assert len(rollouts["batches"][0]["groups"][0]["answers"]) == 2


def test_best_and_worst_and_the_same_problem_over_training(tmp_path, small_plotly):
    group = [make_row(0, float(i), str(i), metrics={}) for i in range(20)]
    before, middle, after = ([make_row(i, float(i < n)) for i in range(8)] for n in (2, 4, 6))
    rollouts = {"step_000001.jsonl": group, "grpo-eval-greedy-000000.jsonl": before}
    rollouts |= {f"grpo-eval-{i:06d}.jsonl": rows for i, rows in enumerate((before, middle, after))}
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo"}], rollouts)
    shown = read_page(write_report([folder]))[1]["runs"][0]["rollouts"]
    answers = shown["batches"][0]["groups"][0]["answers"]
    rewards = [answer["reward"] for answer in answers]
    assert rewards == sorted(rewards, reverse=True) and (rewards[0], rewards[-1]) == (19.0, 0.0)
    sampled = [entry for entry in shown["evaluations"] if not entry["greedy"]]
    assert [(entry["step"], entry["mean"]) for entry in sampled] == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert len({tuple(row["problem"] for row in entry["rows"]) for entry in sampled}) == 1
    numbers = [row["number"] for row in sampled[0]["rows"]]
    assert numbers[:3] == ["2", "6", "0"]  # learned, still wrong, still right


def write_pair(tmp_path: Path, differences: list[int]) -> list[Path]:
    """Write two runs whose scores differ by `differences`; the second lists the problems in another
    order.
    """
    first = [make_row(i, float(d < 0)) for i, d in enumerate(differences)]
    second = [make_row(i, float(d > 0)) for i, d in enumerate(differences)]
    names = ("base", "seed", "rate")
    words = ((), ("--seed", "1"), ("--learning-rate", "2e-5"))
    metrics = [{"step": 4, "stage": "grpo", "reward/total": 1.0}]
    folders = []
    for name, more, rows in zip(names, words, (first, second[::-1], first), strict=True):
        rollouts = {"grpo-eval-000004.jsonl": rows}
        folders.append(write_run(tmp_path / name, metrics, rollouts, (*GRPO, *more)))
    return folders


@pytest.mark.parametrize(("differences", "mean", "error", "verdict"), [
    # deviations of +-0.5 from the mean of 0.5: sqrt(4 * 0.25 / 3 / 4)
    ([1, 1, 0, 0], 0.5, 0.288675, "is within the noise"),
    # 20 of 40: sqrt(40 * 0.25 / 39 / 40)
    ([1] * 20 + [0] * 20, 0.5, 0.080064, "is larger than the noise"),
    # squared deviations from the mean of 0: 10 of 40 are 1
    ([1] * 5 + [-1] * 5 + [0] * 30, 0.0, math.sqrt(10 / 39 / 40), "is within the noise"),
])  # fmt: skip
def test_runs_are_paired_by_problem(tmp_path, small_plotly, differences, mean, error, verdict):
    base, seed, rate = write_pair(tmp_path, differences)
    path = write_report([base, seed, rate], tmp_path / "page.html")
    page, data = read_page(path)
    rows = [read_text(row) for row in re.findall("<tr>.*?</tr>", page, re.S)]
    (row,) = [row for row in rows if "base , seed" in row]
    assert f"sampled {len(differences)} " in row and verdict in row
    assert f"{mean:+.3f} {error:.4f} " in row
    assert any("base , rate" in row and "Both score the same on each" in row for row in rows)
    assert [run["group"] for run in data["runs"]] == [0, 0, 1]
    assert any(row.split() == ["seed", "0", "1", "0"] for row in rows)
    assert any(row.split()[0] == "learning_rate" and "2e-05" in row for row in rows)
    assert not any(row.split()[:1] == ["output_dir"] for row in rows if len(row.split()) > 3)


def test_another_problem_is_not_paired(tmp_path, small_plotly):
    metrics = [{"step": 4, "stage": "grpo"}]
    rollouts = {"grpo-eval-000004.jsonl": [make_row(0, 1.0, prompt="1+1=")]}
    others = {"grpo-eval-000004.jsonl": [make_row(0, 1.0, prompt="2+2=")]}
    folders = [write_run(tmp_path / "a", metrics, rollouts)]
    folders.append(write_run(tmp_path / "b", metrics, others))
    page, _ = read_page(write_report(folders, tmp_path / "page.html"))
    assert "No two runs have held-out answers to the same problems" in page


def test_errors_say_what_is_missing(tmp_path, small_plotly, monkeypatch):
    with pytest.raises(UserError, match="holds no run"):
        write_report([tmp_path])
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo"}])
    with pytest.raises(UserError, match="2 labels for 1 runs"):
        write_report([folder], labels=["a", "b"])
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    message = r'plotly.*: pip install -e "\.\[report\]" in the checkout$'
    with pytest.raises(UserError, match=message):
        write_report([folder])
    assert not (folder / "report.html").exists()


def test_the_command_writes_the_page(tmp_path, small_plotly, monkeypatch, capsys):
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo", "reward/total": 0.5}])
    monkeypatch.setattr(sys, "argv", ["report.py", str(folder), "-o", str(tmp_path / "page.html")])
    assert report.main() == 0 and str(tmp_path / "page.html") in capsys.readouterr().out
    assert "reward" in read_page(tmp_path / "page.html")[0] and "report" in whetstone.SCRIPTS


def make_writer(folder: Path, **more) -> tuple[ReportWriter, MessageRecorder]:
    listener = MessageRecorder()
    launch = describe_launch(0, {"world": 1, "device": "cpu"}, [])
    more = {"guard": lambda: None, "exceeds_grace": lambda seconds: False} | more
    return ReportWriter(folder, listener, launch, **more), listener


def test_a_run_writes_its_page_and_its_launches(tmp_path, small_plotly):
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo", "reward/total": 0.5}])
    for _ in range(2):  # the second launch resumes
        writer, listener = make_writer(folder)
        writer.update()  # too early: the page would take more than 1% of the time
        assert writer._thread is None
        writer.close()
        assert not listener.notes and not listener.warnings
    launches = [json.loads(line) for line in (folder / "launches.jsonl").open()]
    assert len(launches) == 2
    assert launches[1]["versions"]["torch"] == torch.__version__
    assert launches[1]["devices"] and launches[1]["peak_memory"] > 10_000_000
    text = read_text(read_page(folder / "report.html")[0])
    assert f"torch {torch.__version__}" in text and "process of rank 0" in text


def test_an_evaluation_writes_the_page_in_a_thread(tmp_path, small_plotly):
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo", "reward/total": 0.5}])
    writer, listener = make_writer(folder)
    writer._last_end -= 60  # as if a minute had passed
    generator, states = torch.get_rng_state(), (random.getstate(), np.random.get_state()[1].copy())
    writer.update()
    writer._thread.join()
    assert "reward" in (folder / "report.html").read_text() and not listener.warnings
    assert torch.equal(torch.get_rng_state(), generator) and random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    pages = writer._thread
    writer.update()  # the next update waits for a hundred times the cost of the first
    assert writer._thread is pages


def test_damaged_launches_do_not_end_a_run(tmp_path, small_plotly):
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo"}])
    (folder / "launches.jsonl").write_bytes(b'{"a": 1}\n\x00garbage\n{"b": 2}\n')
    _, listener = make_writer(folder)
    launches = [json.loads(line) for line in (folder / "launches.jsonl").open()]
    assert launches[:2] == [{"a": 1}, {"b": 2}] and len(launches) == 3 and not listener.warnings
    (folder / "launches.jsonl").unlink()
    (folder / "launches.jsonl").mkdir()
    _, listener = make_writer(folder)
    assert len(listener.warnings) == 1


def test_a_failing_page_is_a_single_warning(tmp_path, small_plotly):
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo"}])
    writer, listener = make_writer(folder)
    (folder / "config.json").write_text("{broken")
    writer.close()
    writer.close()
    assert len(listener.warnings) == 1 and "no report.html" in listener.warnings[0]


def test_a_stop_without_time_writes_no_page(tmp_path, small_plotly):
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo"}])
    writer, _ = make_writer(folder, exceeds_grace=lambda seconds: seconds > 1)
    writer.close()
    assert not (folder / "report.html").exists() and (folder / "launches.jsonl").exists()


def test_a_run_that_loses_a_rank_prints_the_error_before_it_draws(tmp_path, small_plotly):
    """A launcher kills the other ranks within seconds: nothing is drawn between error and print."""
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo", "reward/total": 0.5}])
    writer, _ = make_writer(folder)
    with pytest.raises(RankLost), writer, Logbook(folder, resume_step=1):
        raise RankLost("rank 1")
    assert not (folder / "report.html").exists() and not (folder / "curves.png").exists()
    assert (folder / "launches.jsonl").exists()
    with pytest.raises(KeyError), make_writer(folder)[0]:
        raise KeyError
    assert (folder / "report.html").exists()


def test_without_plotly_a_note_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "plotly", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    writer, listener = make_writer(write_run(tmp_path / "run", [{"step": 1, "stage": "grpo"}]))
    writer.close()
    assert len(listener.notes) == 1 and ".[report]" in listener.notes[0]
    assert not listener.warnings and not (tmp_path / "run" / "report.html").exists()


def test_checkpoints_have_the_metrics_of_their_step(tmp_path, small_plotly):
    metrics = [
        {"step": 2, "stage": "grpo", "reward/total": 0.4321, "optim/entropy": 1.234,
         "test/env/all/correct": 0.125},
        {"step": 4, "stage": "grpo", "reward/total": 0.8765},
    ]  # fmt: skip
    folder = write_run(tmp_path / "run", metrics)
    rows = [{"name": f"grpo-{i}", "kind": "step", "batch": i} for i in (2, 4)]
    (folder / "checkpoints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, _ = read_page(write_report([folder]))
    rows = [read_text(row).split() for row in re.findall("<tr>.*?</tr>", page, re.S)]
    assert ["grpo-2", "step", "2", "0.125", "0.4321", "1.234"] in rows
    assert ["grpo-4", "step", "4", "0.8765"] in rows


def test_a_length_without_tokens_is_one_of_characters(tmp_path, small_plotly):
    """Held-out answers are stored without tokens."""
    turns = [{"response": "abc"}, {"response": "de"}]
    rollouts = {
        "step_000001.jsonl": [make_row(0, 1.0, "forty", tokens=["for", "ty"])],
        "grpo-eval-000001.jsonl": [make_row(0, 1.0, "forty"), make_row(1, 0.0, turns=turns)],
    }
    folder = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo"}], rollouts)
    stored = read_page(write_report([folder]))[1]["runs"][0]["rollouts"]
    (answer,) = stored["batches"][0]["groups"][0]["answers"]
    assert (answer["length"], answer["unit"]) == (2, "tokens")
    lengths = [(row["length"], row["unit"]) for row in stored["evaluations"][0]["rows"]]
    assert sorted(lengths) == [(5, "characters")] * 2


def test_steps_with_alarms_are_shown(tmp_path, small_plotly):
    rollouts = {
        f"step_{step:06d}.jsonl": [make_row(0, 1.0), make_row(0, 0.0)] for step in range(1, 101)
    }
    metrics = [
        {"step": step, "stage": "grpo", "alarm/length": float(47 <= step <= 49)}
        for step in range(1, 101)
    ]
    folder = write_run(tmp_path / "run", metrics, rollouts)
    batches = read_page(write_report([folder]))[1]["runs"][0]["rollouts"]["batches"]
    assert {47, 48, 49} <= {batch["step"] for batch in batches} and len(batches) <= 16
    assert [batch["step"] for batch in batches if batch["alarms"] == ["length"]] == [47, 48, 49]


@pytest.fixture
def open_page(browser):
    """Open a page from disk in Chromium. Any script error or network request fails the test."""
    pytest.importorskip("plotly")
    tab, problems = browser.new_page(viewport={"width": 1300, "height": 900}), []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("dialog", lambda dialog: problems.append("a dialog"))
    tab.on(
        "request", lambda request: problems.extend([request.url] * request.url.startswith("http"))
    )

    def visit(path: Path):
        tab.goto(f"file://{quote(str(path))}")
        tab.wait_for_selector("body[data-drawn]")
        return tab

    yield visit
    tab.close()
    assert not problems


CURVES_OF_THE_PAGE = """() => Object.fromEntries([...document.querySelectorAll(".panel")].map((panel) => [
    panel.querySelector("h3").textContent,
    panel.querySelector(".plot").data.map((trace) => [Array.from(trace.x), Array.from(trace.y)])]))"""


@pytest.mark.extras
@pytest.mark.slow
def test_a_browser_shows_the_curves_and_answers_of_a_run(tmp_path, open_page):
    rng = random.Random(2)
    metrics = [
        {"step": step, "stage": "grpo", "reward/total": rng.random(), "time/step": 36.0,
         "time/tokens_per_second": 10.0, "alarm/length": float(step in (3, 4))}
        for step in range(1, 25)
    ]  # fmt: skip
    for step in (1, 10, 24):
        metrics[step - 1]["test/env/all/correct"] = rng.random()
    answers = [
        make_row(0, float(i % 2), "", tokens=["a", " b"] * (i + 1), logprobs=[-0.1, -4.0] * (i + 1),
                 advantage=i - 3.5, tag=("addition", "other")[i // 4], index=i,
                 response_tokens=[1, 2] * (i + 1))
        for i in range(8)
    ]  # fmt: skip
    rollouts = {f"step_{step:06d}.jsonl": answers for step in (1, 4, 20)}
    for i, step in enumerate((0, 5, 10, 15, 24)):
        rows = [make_row(j, float(j < i), f"the answer of {step} is") for j in range(3)]
        rollouts[f"grpo-eval-{step:06d}.jsonl"] = rows
    folder = write_run(tmp_path / "run", metrics, rollouts)
    count = sum(2 * (i + 1) for i in range(8))
    arrays = {
        "target_tokens": np.tile([1, 2], count // 2),
        "sampled": np.full(count, -1.0, np.float32),
        "datums": np.array([[0, i, 0, 2 * (i + 1)] for i in range(8)]),
        "turns": np.zeros(8, np.int64),
        "turn_counts": np.ones(8, np.int64),
        "call/0/datums": np.arange(8),
        "call/0/logprobs": np.linspace(-2.5, 0.0, count, dtype=np.float32),
        "call/0/entropies": np.linspace(0.0, 4.0, count, dtype=np.float32),
    }
    write_update_file(folder / "rollouts/step_000004.update.safetensors", arrays, {"calls": [{}]})
    page = open_page(write_report([folder]))

    (curve,) = page.evaluate(CURVES_OF_THE_PAGE)["reward"]
    assert curve[0] == list(range(1, 25))
    assert curve[1] == pytest.approx([row["reward/total"] for row in metrics], rel=1e-6)
    ((steps, values),) = page.evaluate(CURVES_OF_THE_PAGE)["held-out accuracy"]
    assert steps == [1, 10, 24]
    page.select_option("#axis", "hours")
    (curve,) = page.evaluate(CURVES_OF_THE_PAGE)["reward"]
    assert curve[0] == pytest.approx([0.01 * step for step in range(1, 25)])
    page.select_option("#axis", "tokens")
    assert page.evaluate(CURVES_OF_THE_PAGE)["reward"][0][0][-1] == 24 * 360
    page.select_option("#metric", "time/step")
    assert page.evaluate(CURVES_OF_THE_PAGE)["time/step"][0][1] == [36.0] * 24

    def count_answers() -> int:
        return page.locator("#source-view article").count()

    assert "step 20" in page.locator("#source option:checked").text_content()
    assert count_answers() == 8
    page.fill("#reward-low", "0.5")
    assert count_answers() == 4
    page.fill("#length-high", "8")  # tokens: 4 and 8 of 4, 8, 12, 16
    assert count_answers() == 2
    page.fill("#reward-low", "")
    page.fill("#length-high", "")
    page.select_option("#tag", "other")
    assert count_answers() == 4
    page.select_option("#tag", "")
    page.fill("#words", "nowhere")
    assert count_answers() == 0
    page.fill("#words", "")
    page.select_option("#alarm", "length")
    sources = page.locator("#source option").all_text_contents()
    assert sources == ["step 4: groups of training, alarms: length"]

    def colour_of(kind: str) -> str:
        token = page.locator(f"#source-view span.{kind}").first
        return token.evaluate("(node) => getComputedStyle(node).backgroundColor")

    by_probability = colour_of("adown.p1"), colour_of("adown.p5")
    assert by_probability[0] != by_probability[1]
    page.check('input[value="by-advantage"]')
    assert colour_of("adown.p1") == colour_of("adown.p5") != colour_of("aup")
    for mode, bands in (("entropy", ("e0", "e3", "e5")), ("ratio", ("r0", "r3", "r6"))):
        page.check(f'input[value="by-{mode}"]')
        assert len({colour_of(band) for band in bands}) == 3
    hover = page.locator("#source-view span.r6").first.get_attribute("title")
    ratio = float(re.search(r"ratio ([0-9.]+)", hover)[1])
    assert ratio >= 2 and re.search(r"entropy [0-9.]+", hover)

    facts = page.locator("#problem-view article p:nth-of-type(2)").first.text_content()
    assert " characters" in facts and " tokens" not in facts  # held-out answers have no tokens

    titles = page.locator("#problem-view article b")
    assert titles.all_text_contents() == ["step 0", "step 10", "step 24"]
    assert page.locator("#problem-view article .new").all_text_contents() == ["10", "24"]
    page.check("#every")
    assert len(titles.all_text_contents()) == 5
    before = page.locator("#problem-view").text_content()
    page.click("#next")
    assert page.locator("#problem-view").text_content() != before


@pytest.mark.extras
@pytest.mark.slow
def test_a_browser_draws_seeds_as_mean_and_band(tmp_path, open_page):
    folders = []
    for seed in range(3):
        metrics = [
            {"step": step, "stage": "grpo", "reward/total": float(step + seed), "time/step": 36.0 + seed}
            for step in range(1, 21)
        ]  # fmt: skip
        folders.append(write_run(tmp_path / str(seed), metrics, None, (*GRPO, "--seed", str(seed))))
    page = open_page(write_report(folders, tmp_path / "page.html"))
    for axis, place in (("steps", 2), ("hours", 2 * 37 / 3600)):
        page.select_option("#axis", axis)
        low, high, mean = page.evaluate(CURVES_OF_THE_PAGE)["reward"]
        assert [line[1][1] for line in (low, high, mean)] == pytest.approx([2, 4, 3])
        assert mean[0][1] == pytest.approx(place, rel=1e-5)
    page.uncheck("#seeds")
    assert len(page.evaluate(CURVES_OF_THE_PAGE)["reward"]) == 3


@pytest.mark.extras
@pytest.mark.slow
def test_a_browser_shows_hostile_text_as_text(tmp_path, open_page):
    page = open_page(write_report([write_hostile_run(tmp_path / "run")]))
    assert page.evaluate("document.body.dataset.drawn") == "1 panels"
    assert page.locator("img").count() == 0 and page.locator("svg").count() >= 1
    assert page.locator("article").count() >= 4
    assert "<script>alert(1)</script>" in page.locator("#problem-view").text_content()
    sources = page.locator("#source option").evaluate_all(
        "(nodes) => nodes.map((node) => node.value)"
    )
    for source in sources:
        page.select_option("#source", source)
        assert page.locator("#source-view img").count() == 0


def test_the_page_has_the_tables_of_evaluate(tmp_path, small_plotly):
    run = write_run(tmp_path / "run", [{"step": 1, "stage": "grpo", "reward/total": 0.5}])
    page = read_page(write_report([run]))[0]
    assert 'id="evaluations"' not in page
    row = {"dataset": HOSTILE, "metric": "pass@4", "mean": 0.625, "standard_error": 0.0312}
    row |= {"problems": 30, "answers": 120, "truncated": None}
    evaluation = {"weights": "run: grpo-final", "temperature": 0.8, "seeds": [0, 1], "table": [row]}
    evaluation["comparison"] = [{"sentence": "aime: The difference is noise."}]
    (run / "evaluations").mkdir()
    (run / "evaluations" / "a.json").write_text(json.dumps(evaluation))
    (run / "evaluations" / "broken.json").write_text("{")
    page = read_page(write_report([run]))[0]
    (section,) = re.findall(r'<section id="evaluations">.*?</section>', page, re.S)
    assert "<script" not in section and "<img" not in section
    text = read_text(section)
    assert "run: grpo-final" in text and "temperature 0.8 , seeds 0, 1" in text
    assert "pass@4 0.6250 0.0312 30 120 n/a" in text and "aime: The difference is noise." in text
