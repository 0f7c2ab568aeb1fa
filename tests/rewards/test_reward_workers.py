"""Test rewards that fork, forge replies, flood output and exhaust resources: each fails its item by
name or gets the right score, and the trainer runs none of their code.
"""

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl.processes import InvalidReply
from rl.rewards import RewardResult, RewardsLost, Scorer, build_worker_environment
from rl.rewards.captured_output import RewardOutput
from rl.rewards.reward_workers import (
    ENVIRONMENT,
    MAX_ERROR_CHARACTERS,
    WorkerStartError,
    decode_reply,
)

REPO = Path(__file__).resolve().parents[2]

MODULE = """
import ctypes, json, os, pickle, socket, struct, subprocess, sys, threading, time, zlib
from rl.rewards import RewardResult

def value(response): return float(response.split()[-1])

def forks(prompt, response, meta=None):
    kind = response.split()[0]
    if kind == "below_python":
        return -1000.0 if ctypes.CDLL(None).fork() == 0 else value(response)
    if os.fork() == 0:
        if kind == "child_raises":
            raise SystemExit(0)
        time.sleep(0.002 * (value(response) % 5))     # comes back early, or late into somebody else's turn
        return -1000.0 - value(response)
    time.sleep(0.002)
    return value(response)

def everywhere(data):
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.readlink("/proc/self/fd/" + name).startswith(("socket:", "pipe:")):
                os.write(int(name), data)
        except OSError:
            pass

class Bomb:
    def __reduce__(self): return os.system, ("touch " + os.environ["PYTHON_BOMB"],)

def forges(prompt, response, meta=None):
    word = response.split()[0]
    if word != "fine":
        pickled = pickle.dumps(Bomb())
        reply = json.dumps({"item": 1, "pid": os.getpid(), "nonce": "0" * 32, "reward": 1.0, "metrics": {}, "failure": None, "error": None})
        framed = lambda data: struct.pack(">2sQI", b"WR", len(data), zlib.crc32(data)) + data
        sends = {"garbage": b"\\x80\\x04garbage" * 10, "pickle": struct.pack("!i", len(pickled)) + pickled,
                 "framed": framed(pickled), "reply": framed(reply.encode()), "huge": struct.pack(">2sQI", b"WR", 1 << 60, 0)}
        everywhere(sends[word])
    return value(response)

def prints(prompt, response, meta=None):
    print("\\x1b[31mred\\x1b[0m\\x07 \\x1b]0;title\\x07" + "x" * int(1e6 * float(response.split()[0])), flush=True)
    os.write(2, b"also \\x1b[2J here\\n")
    return value(response)

class Unspeakable(Exception):
    def __str__(self): raise RuntimeError("no")

def raises(prompt, response, meta=None):
    if response.startswith("unspeakable"): raise Unspeakable
    raise ValueError("\\x1b[31m\\ud800 " + "long " * 2_000_000)

def metrics(prompt, response, meta=None):
    if response.startswith("many"): return RewardResult(1.0, {f"name {i} " + "x" * 200: 1.0 for i in range(6000)})
    return RewardResult(1.0, {"nan": float("nan"), "inf": float("inf"), "low": -float("inf"), "\\ud800": 1, 3: 2.0})

def descriptors(prompt, response, meta=None):
    code = "import os; print(sum(1 for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n)), end='')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False).stdout
    return float(out)

def environment(prompt, response, meta=None):
    return RewardResult(1.0, {name: float(len(text)) for name, text in os.environ.items()})

def dies_for_good(prompt, response, meta=None):
    open(os.environ["PYTHON_BOMB"], "w").write("no")
    os._exit(9)

def stops(prompt, response, meta=None):
    if response.startswith("stop"): os.kill(os.getpid(), 19)
    return value(response)

def closes(prompt, response, meta=None):
    if response.startswith("close"): os.closerange(3, 100)
    return value(response)

if os.path.exists(os.environ.get("PYTHON_BOMB", "/nowhere")) and open(os.environ["PYTHON_BOMB"]).read() == "no":
    raise ImportError("not any more")
"""


@pytest.fixture
def bomb_file(tmp_path, monkeypatch) -> Path:
    """Put the module on the path; yield the path of a file that the trainer must never create."""
    (tmp_path / "hostile.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHON_BOMB", str(tmp_path / "bomb"))
    yield tmp_path / "bomb"
    sys.modules.pop("hostile", None)


def items(words) -> list:
    return [(f"ask {i}", f"{word} {i}", None) for i, word in enumerate(words)]


def test_a_reward_that_forks_gets_its_own_reward(bomb_file):
    words = ["comes_back", "below_python", "child_raises"] * 30
    with Scorer("hostile:forks", timeout=20, workers=2) as scorer:
        scores = scorer.score_many(items(words))
        again = scorer.score_many(items(words))  # would show late replies
    assert [score.reward for score in scores + again] == [float(i) for i in range(90)] * 2


def test_what_is_no_reply_fails_its_item_by_name_and_is_not_run(bomb_file):
    words = ["fine", "garbage", "fine", "fine", "pickle", "framed", "reply", "fine", "huge"]
    with Scorer("hostile:forges", timeout=20, workers=1) as scorer:
        scores = scorer.score_many(items(words))
    for i, (each, score) in enumerate(zip(words, scores, strict=True)):
        if each == "fine":
            assert score.reward == i, score
        else:
            assert score.reward is None and score.failure == "error"
            assert "hostile:forges" in score.error and "sent an invalid reply" in score.error
            assert f"ask {i}" in score.error
    assert not bomb_file.exists()


@pytest.mark.parametrize("place", ["process", "thread"])
def test_an_error_text_is_bounded_and_plain(bomb_file, place):
    import hostile

    def closure(prompt, response, meta):
        return hostile.raises(prompt, response)

    reward = closure if place == "thread" else "hostile:raises"
    with Scorer(reward, timeout=20, workers=1) as scorer:
        assert scorer.place == place
        long, unspeakable = scorer.score_many(items(["long", "unspeakable"]))
    assert long.failure == unspeakable.failure == "error" and "Unspeakable" in unspeakable.error
    assert "ValueError" in long.error and "hostile.py:" in long.error
    assert len(long.error) < 4000 and "\x1b" not in long.error
    long.error.encode("utf-8")  # no half of a surrogate pair


def test_a_closures_metrics_are_bounded_and_plain_too():
    def closure(prompt, response, meta):
        return RewardResult(0.1, {"a\x1b[2J\ud800": 1 / 3, "b" * 9000: float("inf")})

    with Scorer(closure, timeout=20) as scorer:
        (score,) = scorer.score_many([("ask", "n", None)])
    assert score.reward == 0.1 and list(score.metrics.values()) == [1 / 3, float("inf")]
    assert list(score.metrics)[0] == "a\\ud800" and len(list(score.metrics)[1]) < 300


def test_a_closure_that_raises_what_ends_a_process_fails_its_item_at_once():
    def closure(prompt, response, meta):
        raise KeyboardInterrupt if response == "n" else GeneratorExit

    with Scorer(closure, timeout=20) as scorer:
        begin = time.monotonic()
        scores = scorer.score_many([("ask", "n", None), ("ask", "m", None)])
    assert time.monotonic() - begin < 10
    assert "KeyboardInterrupt" in scores[0].error and "GeneratorExit" in scores[1].error


def test_metrics_travel_by_name_and_are_bounded(bomb_file):
    with Scorer("hostile:metrics", timeout=20, workers=1) as scorer:
        odd, many = scorer.score_many([("ask", "odd", None), ("ask", "many", None)])
    assert odd.metrics["nan"] != odd.metrics["nan"]
    assert odd.metrics["inf"] == float("inf") == -odd.metrics["low"]
    assert odd.metrics["\\ud800"] == 1.0 and odd.metrics["3"] == 2.0
    assert many.failure == "error" and "metrics of" in many.error


def test_what_a_reward_prints_is_bounded_and_plain(bomb_file, capfd):
    with Scorer("hostile:prints", timeout=60, workers=1) as scorer:
        scores = scorer.score_many(
            [("ask", f"{size} {i}", None) for i, size in enumerate(("0.00001", "30", "5", "5"))]
        )
    assert [score.reward for score in scores] == [0, 1, 2, 3]
    out, err = capfd.readouterr()
    assert len(out) + len(err) < 200_000  # of 40 MB of output
    assert "[hostile:prints] red" in err and "also  here" in err
    assert "\x1b" not in out + err and "\x07" not in out + err


def test_what_a_closure_prints_is_bounded_and_plain_and_what_others_print_is_theirs(capfd):
    """A closure runs in a thread of this process. Its prints to either stream are distinguished
    from those of other threads by the printing thread.
    """
    begun, go_on = threading.Event(), threading.Event()

    def closure(prompt, response, meta=None):
        print("\x1b[31mred\x1b[0m", end="\n")
        sys.stderr.write("also here\n")
        begun.set()
        assert go_on.wait(30)
        for _ in range(1000):
            print("x" * 10_000)
        return 0.5

    out = sys.stdout
    with Scorer(closure, timeout=60) as scorer:
        pending = scorer.submit("a", "b")
        assert begun.wait(30)
        print("the loop's own line")
        go_on.set()
        assert scorer.place == "thread" and pending.result().reward == 0.5
        assert sys.stdout is out
    text = capfd.readouterr()
    assert text.out == "the loop's own line\n"
    assert "] red" in text.err and "] also here" in text.err and "\x1b" not in text.err
    assert len(text.err) < 70_000
    assert text.err.count("exceeded its output limit: the rest is dropped") == 1


def test_prints_of_many_workers_share_one_bound(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    printed = RewardOutput("name", limit=1000)
    for _ in range(100):
        printed(b"a line\n" * 10)
    assert len(out.getvalue()) < 1200 and out.getvalue().count("the rest is dropped") == 1


def test_what_a_reward_starts_inherits_none_of_the_workers_descriptors(bomb_file):
    with Scorer("hostile:descriptors", timeout=60, workers=1) as scorer:
        (score,) = scorer.score_many(items(["n"]))
    assert score.reward == 3.0, score  # standard input, output and error


SECRETS = {
    "HF_TOKEN": "hf_1",
    "WANDB_API_KEY": "w",
    "AWS_SECRET_ACCESS_KEY": "a",
    "OPENAI_API_KEY": "o",
    "MY_SETTING": "m",
}


def test_the_environment_handed_over_is_named(bomb_file, monkeypatch):
    for name, text in {**SECRETS, "LC_TIME": "C", "OMP_SCHEDULE": "static"}.items():
        monkeypatch.setenv(name, text)
    with Scorer("hostile:environment", timeout=20, workers=1) as plain:
        seen = plain.score_many(items(["n"]))[0].metrics
    with Scorer(
        "hostile:environment", timeout=20, workers=1, environment=("MY_SETTING", "OPENAI_*")
    ) as named:
        more = named.score_many(items(["n"]))[0].metrics
    assert not set(SECRETS) & set(seen)
    assert {"PATH", "LC_TIME", "OMP_SCHEDULE", "OMP_NUM_THREADS"} <= set(seen)
    assert seen["CUDA_VISIBLE_DEVICES"] == 0.0
    assert set(SECRETS) & set(more) == {"MY_SETTING", "OPENAI_API_KEY"}
    assert not [
        name for name in ENVIRONMENT if "TOKEN" in name and name != "TOKENIZERS_PARALLELISM"
    ]


def test_names_that_begin_like_those_handed_over_are_not(monkeypatch):
    for name in ENVIRONMENT:
        if "*" not in name:
            monkeypatch.setenv(f"{name}_KEY", "secret")
            monkeypatch.setenv(f"MY_{name}", "secret")
    wild = tuple(name[:-1] for name in ENVIRONMENT if name.endswith("*"))
    secret = {name for name, value in build_worker_environment().items() if value == "secret"}
    assert all(name.startswith(wild) for name in secret)


def test_a_reply_is_of_its_worker_to_its_item_and_bounded():
    """A reward may write any message in the format of replies."""
    fields = {"item": 3, "pid": 77, "nonce": "n", "reward": 1.0, "metrics": {}}
    fields |= {"failure": None, "error": None}

    def read(**changes):
        return decode_reply(json.dumps({**fields, **changes}).encode(), 3, 77, "n")[0]

    assert read().reward == 1.0
    changes = [{"item": 2}, {"item": 4}, {"item": True}, {"pid": 78}, {"nonce": "m"}, {"nonce": ""}]
    for change in (*changes, {"more": 1}, {"reward": "1"}):
        with pytest.raises(InvalidReply):
            read(**change)
    # plus the note on the number of omitted characters
    assert len(read(failure="error", error="x" * 50_000).error) < MAX_ERROR_CHARACTERS + 100
    (name,) = read(metrics={"m" * 5_000: 1.0}).metrics
    assert len(name) < 300


def test_a_named_variable_wins_over_the_defaults(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert build_worker_environment()["CUDA_VISIBLE_DEVICES"] == ""
    assert build_worker_environment(["CUDA_VISIBLE_DEVICES"])["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize("name, word", [("stops", "stop"), ("closes", "close")])
def test_a_worker_that_stops_itself_or_closes_its_socket_costs_its_item(bomb_file, name, word):
    words = ["n", word, "n", "n", "n"]
    big = "x" * 200_000  # exceeds the socket's buffer, so a send would block
    with Scorer(f"hostile:{name}", timeout=2.0, workers=1) as scorer:
        scores = scorer.score_many(
            [(f"ask {i} {big}", f"{each} {i}", None) for i, each in enumerate(words)]
        )
    assert [score.reward for score in scores] == [0.0, None, 2.0, 3.0, 4.0]


# ------------------------------------------------------------------- a pool that cannot be restored


def test_a_pool_that_cannot_be_restored_ends_with_the_cause(bomb_file, monkeypatch):
    monkeypatch.setattr("rl.rewards.reward_scorer._RESTART_SECONDS", (0.05,))
    scorer = Scorer("hostile:dies_for_good", timeout=20, workers=2)
    pending = [scorer.submit("ask", f"n {i}", None) for i in range(40)]
    begin = time.monotonic()
    outcomes = []
    for each in pending:
        try:
            outcomes.append(each.result(timeout=60).failure)
        except RewardsLost as lost:
            outcomes.append("lost")
            assert "hostile:dies_for_good" in str(lost) and "not any more" in str(lost)
    assert time.monotonic() - begin < 60
    assert set(outcomes) == {"death", "lost"} and outcomes.count("death") <= 2
    with pytest.raises(RewardsLost):
        scorer.submit("ask", "n 1", None)
    scorer.close()


@pytest.mark.parametrize(
    "error",
    [BlockingIOError(11, "Resource temporarily unavailable"), RuntimeError("a fault of our own")],
)
def test_whatever_keeps_a_worker_from_starting_ends_every_wait(bomb_file, monkeypatch, error):
    monkeypatch.setattr("rl.rewards.reward_scorer._RESTART_SECONDS", (0.05,))
    with Scorer("hostile:closes", timeout=20, workers=2) as scorer:
        assert scorer.submit("ask", "n 1", None).result(30).reward == 1.0

        def fails(*arguments, **options):
            raise error

        monkeypatch.setattr("rl.processes.supervised_process.subprocess.Popen", fails)
        outcomes = []
        for each in [scorer.submit("ask", f"close {i}", None) for i in range(6)]:
            try:
                outcomes.append(each.result(30).failure)
            except RewardsLost as lost:
                outcomes.append("lost")
                assert str(error.args[-1]) in str(lost)
    assert "lost" in outcomes and set(outcomes) <= {"death", "lost"}


def test_why_a_workers_interpreter_does_not_start_is_said(bomb_file, monkeypatch):
    monkeypatch.setattr("rl.rewards.reward_scorer._RESTART_SECONDS", (0.05,))
    with Scorer("hostile:closes", timeout=20, workers=1) as scorer:
        scorer._environment["PYTHONHOME"] = "/nowhere"
        assert scorer.submit("ask", "close 1", None).result(30).failure == "death"
        with pytest.raises(RewardsLost, match="exit code 1, it last printed: .*encodings"):
            scorer.submit("ask", "n 2", None).result(30)


def test_one_worker_that_cannot_come_back_leaves_its_items_to_the_others(bomb_file, monkeypatch):
    monkeypatch.setattr("rl.rewards.reward_scorer._RESTART_SECONDS", (0.05,))
    scorer = Scorer("hostile:closes", timeout=20, workers=2)

    def fails(self, machine):
        raise WorkerStartError("no room")

    monkeypatch.setattr(Scorer, "_make_worker", fails)
    with scorer:
        scores = [
            each.result(60).reward
            for each in [scorer.submit("ask", f"n {i}", None) for i in range(200)]
        ]
    assert scores == [float(i) for i in range(200)]


LIMITED = """
import os, resource, sys
sys.path[:0] = [{repo!r}, {here!r}]
from rl.rewards import RewardsLost, Scorer
scorer = Scorer("hostile:closes", timeout=20, workers=1)
assert scorer.submit("ask", "n 1", None).result(30).reward == 1.0
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
outcomes = []
for i in range(3):
    try:
        outcomes.append(scorer.submit("ask", f"close {{i}}", None).result(60).failure)
    except RewardsLost as lost:
        outcomes.append(str(lost))
print(outcomes)
scorer.close()
"""


@pytest.mark.slow
def test_without_descriptors_the_run_ends_with_the_cause(bomb_file, tmp_path):
    """The limit is really reached, not simulated."""
    code = LIMITED.format(repo=str(REPO), here=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Too many open files" in done.stdout, done.stdout + done.stderr
    assert "ulimit -n" in done.stdout, done.stdout + done.stderr
