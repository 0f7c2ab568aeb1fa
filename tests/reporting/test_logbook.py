"""Test a run's folder: resumed files equal those of an unbroken run; pages and console output."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.errors import RunFolderError, UserError
from rl.jsonl import read_jsonl, write_atomically
from rl.reporting import (
    Logbook,
    check_claim_folder,
    check_writable,
    claim_folder,
    console,
    has_steps,
    rollout_html,
)


def read_contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file except the plot, which adds no information."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def row(**more: Any) -> dict[str, Any]:
    return {"prompt": "1+1=", "response": "2", "reward": 1.0, "advantage": 0.5, **more}


def one_step(book: Logbook, step: int) -> None:
    """Write what a training loop writes at a step. It depends only on the step."""
    norm = float("nan") if step == 3 else 0.1 * step
    book.log(step, {"stage": "grpo", "reward/total": math.sin(step) / 3, "optim/grad_norm": norm})
    if step % 2 == 0:
        book.write_rollouts(step, [row(response=str(step))])


@pytest.mark.parametrize("torn", ["", '{"step": 6, "rew'])
def test_a_killed_and_resumed_run_leaves_the_files_of_an_undisturbed_one(
    tmp_path: Path, torn: str
) -> None:
    whole, broken = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    with Logbook(whole) as book:
        for step in range(9):
            one_step(book, step)
    first = Logbook(broken)
    for step in range(6):
        # killed here: never closed; the newest checkpoint is that of step 4
        one_step(first, step)
    first.write_rollouts(5, [row(response="lost")])
    with (broken / "metrics.jsonl").open("a") as file:
        file.write(torn)
    first.write_rollouts(6, [row(response="never trained on")])
    with Logbook(broken, resume_step=4) as second:
        for step in range(5, 9):
            one_step(second, step)
    assert read_contents(broken) == read_contents(whole)
    assert len(read_contents(whole)) == 1 + 2 * 5


def test_files_that_a_killed_launch_was_writing_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    ours = [tmp_path / "report.html.0a1b2c3d.tmp", folder / "grpo-eval-000000.jsonl.ab12cd34.tmp"]
    theirs = [tmp_path / "notes.tmp", folder / "x.jsonl"]
    for path in ours:
        path.touch()
    assert not has_steps(tmp_path)
    for path in theirs:
        path.touch()
    with Logbook(tmp_path):
        assert [path for path in ours + theirs if path.exists()] == theirs


def test_lines_are_strict_json_and_complete_at_once(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    row = {"b": np.float32(0.5), "a": math.inf, "n": np.int64(3), "z": math.nan, "s": "sft"}
    book.log(0, row)
    # the line is readable before close
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 0, "b": 0.5, "a": null, "n": 3, "z": null, "s": "sft"}\n'
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    with pytest.raises(ValueError, match="step -1 after step 0"):
        book.log(-1, {})
    book.log(1, {"large": 1.79e308})
    for value in ([0.5], {"a": 1}, 10**400):
        with pytest.raises(ValueError, match="metrics of step 1: its x is "):
            book.log(1, {"x": value})
    assert [row["step"] for row in book.read_rows()] == [0, 1]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl line 2 is not JSON"):
        Logbook(tmp_path, resume_step=2)


def test_files_that_no_run_wrote_stay_among_the_rollouts(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "grpo-eval-000000.jsonl").write_text("{}\n")
    with Logbook(tmp_path, resume_step=-1):
        assert sorted(path.name for path in folder.iterdir()) == [".ipynb_checkpoints", "notes.txt"]


def test_writers_of_one_file_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flush, others = tmp_path / "config.json", os.fsync, []

    def fsync(handle: int) -> None:
        if not others:
            others.append("another writer")
            check_claim_folder(tmp_path)  # a config.json in the making is no content
            write_atomically(path, "second")
        flush(handle)

    monkeypatch.setattr("rl.jsonl.os.fsync", fsync)
    write_atomically(path, "first")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_flushed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "as on FUSE")

    monkeypatch.setattr("rl.jsonl.os.fsync", fsync)
    write_atomically(tmp_path / "f.json", "new")
    assert (tmp_path / "f.json").read_text() == "new"


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.json"
    write_atomically(path, "old")

    def power_cut(*_: Any) -> None:
        raise OSError("power cut")

    monkeypatch.setattr("rl.jsonl.os.fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        write_atomically(path, "new, but")
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "old"


def test_starts_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "runs" / "a"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check_writable, [folder] * 2000))
    assert not (tmp_path / "new").exists()  # nothing is left
    folder.mkdir(parents=True)
    check_writable(folder)
    assert not any(folder.iterdir())
    before = sorted(tmp_path.rglob("*"))
    check_writable(tmp_path / "gone" / ".." / ".." / tmp_path.name / "other")
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "a", tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(RunFolderError, match="folder"):
            check_writable(bad)


# --------------------------------------------------------------------------------------- run folder

STAGE = {"method": "sft", "name": "sft", "settings": {}}
CONFIG: dict[str, Any] = {"name": "x", "options": {}, "stages": [STAGE]}


def test_a_folder_is_claimed_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    claim_folder(folder, CONFIG)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunFolderError, match="--resume continues it, --overwrite deletes it"):
        claim_folder(folder, CONFIG)
    check_claim_folder(folder, resume=True)
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    claim_folder(folder, CONFIG | {"name": "new"}, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    with pytest.raises(RunFolderError, match="nothing to resume"):
        check_claim_folder(tmp_path / "nothing", resume=True)


def test_held_out_answers_before_the_first_step_are_no_steps(tmp_path: Path) -> None:
    """A run that ended before its first step may restart in its folder."""
    claim_folder(tmp_path, CONFIG)
    with Logbook(tmp_path) as book:
        book.log(0, {"stage": "grpo"})
        book.write_held_out_answers(0, [{"response": "1"}], "grpo")
        assert not has_steps(tmp_path)
        book.write_held_out_answers(3, [{"response": "1"}], "grpo", greedy=True)
        assert has_steps(tmp_path)
    with Logbook(tmp_path, resume_step=2):
        names = [path.name for path in (tmp_path / "rollouts").iterdir()]
        assert names == ["grpo-eval-000000.jsonl"]


def test_overwrite_deletes_runs_only(tmp_path: Path) -> None:
    """A model's folder has a config.json as well: a mistyped --output-dir must not delete it."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_text("weights")
    for overwrite in (False, True):
        with pytest.raises(RunFolderError, match="holds no run"):
            claim_folder(tmp_path, CONFIG, overwrite=overwrite)
    assert (tmp_path / "model.safetensors").read_text() == "weights"


def test_a_second_logbook_in_a_folder_is_refused(tmp_path: Path) -> None:
    Logbook(tmp_path).log(0, {})
    with pytest.raises(RunFolderError, match="has metrics or checkpoints already"):
        Logbook(tmp_path)


# ------------------------------------------------------------------------------------- rollout page


class PageParser(HTMLParser):
    """Parse a page into tags, texts of articles, classes of token spans, and links."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.articles: list[str] = []
        self.spans: list[tuple[str, str]] = []
        self.loads: list[str] = []
        self._kind = ""
        self.feed(text)
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        inputs = dict(attrs)
        self.tags.append(tag)
        self.loads += [str(inputs[name]) for name in ("src", "href") if name in inputs]
        if tag not in ("meta", "input"):
            self.open.append(tag)
        if tag == "article":
            self.articles.append("")
        self._kind = str(inputs.get("class", "")) if tag == "span" else self._kind

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "article" in self.open:
            self.articles[-1] += data
            if self.open[-1] == "span" and "pre" in self.open:
                self.spans.append((self._kind, data))


def test_the_page_shows_each_answer_escaped_and_loads_nothing() -> None:
    evil = "<script>alert('x')</script>&amp;"
    maths = {"tag": "maths", "problem": 3, "prompt": evil}
    rows = [
        row(**maths, response=evil, stop_reason="length", answer="<b>", error="reward <timed> out"),
        row(**maths, advantage=-0.5, tokens=["a", "<b>", " c"], logprobs=[-0.001, None, -5.0]),
        row(tag="maths", problem=4, reward=None, advantage=None, group=1),
        row(tag="maths", problem=4, group=2),  # the same problem again, in a separate group
    ]
    page = PageParser(rollout_html.render_page(rows, title="run & step", step=7))
    # two answers side by side, then single answers
    assert page.tags.count("section") == 3 and len(page.articles) == 4
    assert all(text in page.articles[0] for text in (evil, "reward <timed> out", "length"))
    assert "script" not in page.tags and page.loads == []
    assert "url(" not in rollout_html.render_page(rows, title="", step=0)
    assert "reward n/a" in page.articles[2]
    # p = 0.999 is in the band of expected tokens (5), p = 0.0067 in that of surprises (0). The
    # model did not write the token without a logprob.
    assert page.spans == [("p5 adown", "a"), ("ob", "<b>"), ("p0 adown", " c")]


def test_the_page_says_what_it_leaves_out() -> None:
    rows = [row(problem=i, tokens=["x"] * 10, logprobs=[-1.0] * 10) for i in range(10)]
    page = rollout_html.render_page(rows, title="", step=12, max_tokens=35)
    assert len(PageParser(page).articles) == 3
    expected = "10 problems, 10 answers, mean reward 1; the first 3 problems are shown, all are in "
    assert f"{expected}step_000012.jsonl" in page


# ------------------------------------------------------------------------------------------ console


class FakeClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def play(**options: Any) -> str:
    """Return the output of a run of one stage with a fake clock, two seconds per step."""
    stream, clock = io.StringIO(), FakeClock()
    with console.Console(stream=stream, clock=clock, **options) as out:
        out.start("addition", {"model": "tiny", "writes to": "runs/[a]"})
        out.stage("grpo", 200, first=50)
        for step in range(51, 251):
            clock.now += 2
            metrics = {"time/tokens_per_second": 12345.0, "optim/loss": 9.0}
            metrics |= {"test/env/all/correct": 0.9} if step == 77 else {}
            out.update(step, {"reward/total": step / 1000, **metrics})
            if step == 60:
                out.note("a note")
                out.warn("a [warning]")
        results = {"held-out accuracy": (0.3512, 0.97), "[/x]": (None, 1.0)}
        out.end("done", results=results, commands=["python plot.py"])
    return stream.getvalue()


def test_plain_output_has_round_steps_true_times_and_no_control_characters() -> None:
    text = play(terminal=False)
    assert not re.search(r"[^\x20-\x7e\n]", text)
    lines = [line for line in text.splitlines() if line.startswith("grpo")]
    steps = [int(re.split(r"[ /]+", line)[1]) for line in lines]
    assert steps == sorted([1, 27, *range(10, 201, 10)])
    # After 10 of 200 steps at 2 s each: 20 s elapsed, 380 s remaining.
    assert "grpo  10/200 (step 60 of the run)  reward 0.060  12.3k tok/s  0:20, 6:20 left" in lines
    assert lines[-1] == "grpo 200/200 (step 250 of the run)  reward 0.250  12.3k tok/s  6:40"
    assert next(line for line in lines if " 27/" in line).endswith("held-out accuracy 0.900")
    # a policy loss is not shown
    assert "warning: a [warning]" in text and "note: a note" in text and "loss" not in text
    assert "held-out accuracy  0.351 -> 0.970" in text and "n/a -> 1.000" in text
    assert "writes to  runs/[a]" in text


def test_quiet_keeps_warnings_and_the_end() -> None:
    text = play(terminal=False, quiet=True)
    assert text.splitlines()[0] == "warning: a [warning]" and "0.351" in text
    assert "grpo" not in text and "note" not in text


def test_a_resumed_stage_counts_from_where_it_was() -> None:
    stream, clock = io.StringIO(), FakeClock()
    out = console.Console(stream=stream, clock=clock, terminal=False)
    out.stage("grpo", 25, done=5)
    for step in (6, 7):
        clock.now += 3
        out.update(step, {})
    # 18 more steps at 3 s each, not 6 s for 7 steps
    assert stream.getvalue() == "grpo  6/25  0:03\ngrpo  7/25  0:06, 0:54 left\n"


def test_the_remaining_time_excludes_the_self_test_the_first_evaluation_and_compilation() -> None:
    stream, clock = io.StringIO(), FakeClock()
    out = console.Console(stream=stream, clock=clock, terminal=False)
    out.stage("grpo", 10)
    clock.now += 60  # the self-test
    out.update(0, {"test/env/all/correct": 0.1})
    for step, seconds in enumerate((40, 2, 2, 2), start=1):
        clock.now += seconds
        out.update(step, {})
    assert stream.getvalue().splitlines() == [
        "grpo before the first step  1:00  held-out accuracy 0.100", "grpo  1/10  1:40",
        "grpo  2/10  1:42, 0:16 left", "grpo  3/10  1:44, 0:14 left", "grpo  4/10  1:46, 0:12 left",
    ]  # fmt: skip


def test_a_terminal_gets_a_bar_and_boxes() -> None:
    text = play(terminal=True, width=120)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "\x1b[2K" in text and "held-out accuracy 0.900" in plain
    assert "a [warning]" in plain and "200/200 reward 0.250" in plain and "runs/[a]" in plain
    assert "[/x]" in plain


def test_unfinished_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}')
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]  # complete, only its newline is missing
    path.write_text('{"a": 1}\n{"a": ')
    assert read_jsonl(path) == [{"a": 1}]
    assert read_jsonl(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize(("shown", "expected"), [
    (console.format_duration(0), "0:00"), (console.format_duration(59.6), "1:00"),
    (console.format_duration(125), "2:05"), (console.format_duration(3725), "1:02:05"),
    (console.format_duration(-1), "0:00"), (console.format_count(7), "7"),
    (console.format_count(999.6), "1k"), (console.format_count(12345), "12.3k"),
    (console.format_count(4.512e6), "4.51M"),
    ([console.round_interval(n) for n in (0, 1, 25, 26, 125, 126, 10_000)],
     [1, 1, 1, 2, 5, 10, 500]),
])  # fmt: skip
def test_figures_are_short_and_round(shown: Any, expected: Any) -> None:
    assert shown == expected
