"""Test the scorer with rewards that raise, hang, crash and lie: each fails only its sample, within
the time limit, and is named.
"""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rl.rewards import Scorer, register_reward, resolve_reward
from rl.rewards.reward_workers import ProcessRewardWorker

LENGTH = {"length_penalty": {"target_length": 2, "penalty_scale": 0.5}}

MODULE = """
import os, re, signal, subprocess, sys, time
def misbehave(prompt, response, meta=None):
    if response == "raise": raise KeyError("oops")
    if response == "nan": return float("nan")
    if response == "none": return None
    if response == "text": return "1.0"
    if response == "exit": sys.exit(3)
    if response == "die": os._exit(7)
    if response == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if response == "hang": time.sleep(1000)
    if response == "spin": re.match("(a+)+$", "a" * 60 + "b")   # in C, holding the interpreter's lock
    if response == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open(meta["file"], "w").write(str(child.pid))
        child.wait()
    if response == "pid": return os.getpid()
    return float(response)
class Deaf:
    def __init__(self, *, seconds): self.seconds = seconds
    def __call__(self, prompt, response, meta=None): time.sleep(self.seconds); return 1.0
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "misbehaving.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "misbehaving.py"


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_dead(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_bad_items_cost_only_themselves_and_are_named_and_counted(module):
    bad = ["raise", "nan", "none", "text", "exit", "die", "segfault", "hang", "spin"]
    responses = [text for index, word in enumerate(bad) for text in (str(index), word)] + ["9"]
    begin = time.monotonic()
    with Scorer("misbehaving:misbehave", timeout=0.5, workers=1) as scorer:
        assert scorer.place == "process"
        results = scorer.score_many([(f"ask {text}", text, None) for text in responses])
    scores = dict(zip(responses, results, strict=True))
    assert time.monotonic() - begin < 15  # four restarts and two time limits of half a second
    assert [scores[str(i)].reward for i in range(10)] == list(range(10))
    assert [scores[word].failure for word in bad] == [
        "error", "nan", "error", "error", "error", "death", "death", "timeout", "timeout",
    ]  # fmt: skip
    assert scorer.counts == {"calls": 19, "errors": 4, "timeouts": 2, "nan": 1, "deaths": 2}
    for word in bad:
        assert scores[word].reward is None
        assert "misbehave" in scores[word].error and f"ask {word}" in scores[word].error
    assert "KeyError: 'oops' (at " in scores["raise"].error
    assert "misbehaving.py:4)" in scores["raise"].error
    assert "exit code 7" in scores["die"].error and "SIGSEGV" in scores["segfault"].error
    assert "0.5 s" in scores["hang"].error and "NoneType" in scores["none"].error


def test_a_reward_that_loses_its_worker_at_every_answer_does_not_flood_the_log(module, caplog):
    with Scorer("misbehaving:misbehave", timeout=10, workers=1) as scorer:
        scores = scorer.score_many([("ask", "die", None)] * 10)
    assert scorer.counts["deaths"] == 10 and all(score.failure == "death" for score in scores)
    text = [record.getMessage() for record in caplog.records]
    assert len(text) == 2 and "exit code 7" in text[0] and "(10 answers so far)" in text[1], text


def test_the_limit_runs_from_an_items_start_not_from_its_submission(module):
    # 8 items of 0.2 s on a single worker take 1.6 s in total, twice the limit of each item
    with Scorer(resolve_reward("misbehaving:Deaf", seconds=0.2), timeout=0.8, workers=1) as scorer:
        scores = scorer.score_many([("", "", None)] * 8)
    assert [score.reward for score in scores] == [1.0] * 8


@pytest.fixture
def message_sizes(monkeypatch):
    """Return the list to which the number of answers of each message is appended."""
    sizes, send = [], ProcessRewardWorker.send
    monkeypatch.setattr(
        ProcessRewardWorker,
        "send",
        lambda self, items: sizes.append(len(items)) or send(self, items),
    )
    return sizes


class EndsItsProcess:
    """A value that ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (9,)


def test_of_quick_answers_in_a_message_a_bad_one_costs_only_itself(module, message_sizes):
    bad = {20: "die", 50: "hang", 51: "die", 90: "raise", 199: "hang"}
    items = [("ask", bad.get(i, str(i)), None) for i in range(200)]
    items[120] = ("ask", "120", {"value": EndsItsProcess()})
    with Scorer("misbehaving:misbehave", timeout=0.5, workers=1) as scorer:
        scorer.score_many([("ask", "1", None)] * 100)
        message_sizes.clear()
        scores = scorer.score_many(items)
    assert max(message_sizes) > 1 and sum(message_sizes) >= 200
    failures = {i: score.failure for i, score in enumerate(scores) if score.failure}
    names = {"die": "death", "hang": "timeout", "raise": "error"}
    assert failures == {i: names[word] for i, word in bad.items()} | {120: "death"}
    assert all(s.reward == i for i, s in enumerate(scores) if i not in failures)
    assert scorer.counts["calls"] == 300


def test_a_message_holds_one_answer_of_a_slow_reward(message_sizes, module):
    with Scorer(resolve_reward("misbehaving:Deaf", seconds=0.06), timeout=5.0, workers=4) as scorer:
        scorer.score_many([("", "", None)] * 40)
    assert message_sizes == [1] * 40


def test_waiting_answers_are_shared_among_idle_workers(message_sizes, module):
    """As many answers as workers: each scores one, however quick they are."""
    with Scorer(
        resolve_reward("misbehaving:Deaf", seconds=0.001), timeout=5.0, workers=4
    ) as scorer:
        scorer.score_many([("", "", None)] * 400)
        assert max(message_sizes) > 1
        message_sizes.clear()
        scorer.score_many([("", "", None)] * 4)
    assert message_sizes == [1] * 4


def test_a_score_that_nobody_waits_for_costs_no_worker():
    def slow(prompt, response, meta=None):
        time.sleep(0.2)
        return float(len(response))

    async def give_up_waiting(pending):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(pending), 0.01)

    with Scorer(slow, workers=1) as scorer:
        pending = scorer.submit("", "ab")
        asyncio.run(give_up_waiting(pending))
        assert not pending.cancel() and pending.result().reward == 2.0
        assert scorer.score_many([("", "abc")])[0].reward == 3.0


def test_workers_run_at_the_same_time(module):
    with Scorer(resolve_reward("misbehaving:Deaf", seconds=0.3), workers=4) as scorer:
        scorer.score_many([("", "", None)] * 8)  # starts the workers
        begin = time.monotonic()
        scorer.score_many([("", "", None)] * 8)
        assert time.monotonic() - begin < 2.0  # sequentially: 2.4 s


def test_signals_that_stop_a_run_do_not_cost_it_its_rewards(module):
    """A scheduler's signals reach every process of a run. The run then finishes its step and needs
    these scores.
    """
    with Scorer("misbehaving:misbehave", timeout=30, workers=1) as scorer:
        pid = int(scorer.submit("", "pid", None).result().reward)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
            assert scorer.submit("", "pid", None).result().reward == pid
    assert scorer.counts["deaths"] == 0 and wait_until_dead(pid)


def test_a_worker_that_ends_while_it_is_idle_costs_no_item(module):
    with Scorer("misbehaving:misbehave", workers=1) as scorer:
        (first,) = scorer.score_many([("", "pid", None)])
        os.kill(int(first.reward), signal.SIGKILL)
        assert wait_until_dead(int(first.reward))
        (second,) = scorer.score_many([("", "pid", None)])
        assert second.reward not in (None, first.reward) and scorer.counts["deaths"] == 0


def test_close_ends_the_workers_at_once_even_while_one_hangs(module):
    scorer = Scorer("misbehaving:misbehave", timeout=1000, workers=1)
    pid = int(scorer.submit("", "pid", None).result().reward)
    pending = [scorer.submit("", text, None) for text in ("hang", "1", "2")]
    assert pid != os.getpid() and alive(pid)
    begin = time.monotonic()
    scorer.close()
    assert time.monotonic() - begin < 15
    assert wait_until_dead(pid)
    assert [p.result().reward for p in pending] == [None] * 3
    assert "closed" in pending[0].result().error
    with pytest.raises(RuntimeError, match="closed"):
        scorer.submit("", "1", None)


SCRIPT = """
import sys, time
from rl.rewards import Scorer
open(sys.argv[1], "a").write("x")            # no `if __name__ == "__main__"`: a worker that ran this again would add to it
scorer = Scorer("misbehaving:misbehave", timeout=1000, workers=1)
print(int(scorer.submit("", "pid", None).result().reward), flush=True)
scorer.submit("", "spin", None)
if sys.argv[2] == "wait": time.sleep(1000)
time.sleep(0.5)
"""


@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_no_worker_outlives_its_owner_and_the_script_is_not_run_again(module, tmp_path, ending):
    script, trace = tmp_path / "script.py", tmp_path / "trace"
    script.write_text(textwrap.dedent(SCRIPT))
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    owner = subprocess.Popen(
        [sys.executable, str(script), str(trace), "wait" if ending == "kill" else "go"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    pid = int(owner.stdout.readline())
    assert alive(pid)
    if ending == "kill":
        time.sleep(0.3)
        owner.send_signal(signal.SIGKILL)
    assert owner.wait(timeout=30) == (-9 if ending == "kill" else 0)
    assert wait_until_dead(pid)
    assert trace.read_text() == "x"


def test_what_cannot_be_loaded_is_an_error_before_training(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="importing 'nowhere_to_be_found' failed"):
        Scorer("nowhere_to_be_found:f")
    # imports in this process, but not in a worker
    (tmp_path / "only_here.py").write_text(
        f"import os\nassert os.getpid() == {os.getpid()}\ndef f(p, r, m): return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError, match="only_here:f.*cannot be used.*could not load it.*AssertionError"
    ):
        Scorer("only_here:f")
    (tmp_path / "dies_there.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}: os._exit(5)\ndef f(p, r, m): return 1.0\n"
    )
    with pytest.raises(ValueError, match="did not start.*exit code 5"):
        Scorer("dies_there:f")


def test_a_closure_runs_in_a_thread_sees_its_variables_and_may_hang():
    seen: list[str] = []

    def reward(prompt, response, meta):
        seen.append(response)
        if response == "hang":
            time.sleep(1000)
        return len(response)

    with Scorer(reward, timeout=0.3) as scorer:
        assert scorer.place == "thread"
        scores = scorer.score_many(
            [("", text, {"not": lambda: "picklable"}) for text in ("a", "hang", "bb", "ccc")]
        )
    assert [score.reward for score in scores] == [1.0, None, 2.0, 3.0]
    assert scores[1].failure == "timeout" and scorer.counts["timeouts"] == 1
    assert seen == ["a", "hang", "bb", "ccc"]  # nothing runs twice


def test_rewards_that_cannot_hang_run_inline_and_others_elsewhere():
    places = {"exact_match": "inline", "gsm8k": "inline", "math_correctness": "process"}
    for name, place in places.items():
        with Scorer(name) as scorer:
            assert scorer.place == place
    with Scorer(resolve_reward("composite", weights={"exact_match": 1.0})) as scorer:
        assert scorer.place == "inline"
        score = scorer.submit("2+2=", "4", {}).result()
    assert score.failure == "error" and "2+2=" in score.error and scorer.counts["errors"] == 1


def test_a_combined_reward_of_a_file_runs_in_a_process_although_its_parts_are_bounded(tmp_path):
    (tmp_path / "combined.py").write_text(
        textwrap.dedent("""
        from rl.rewards import resolve_reward
        from rl.rewards.reward_calls import CombinedReward

        class Endless(CombinedReward):
            def part_rewards(self):
                return [resolve_reward("exact_match")]

            def combine_results(self, item, results):
                while True:
                    pass
    """)
    )
    with Scorer(f"{tmp_path / 'combined.py'}:Endless", timeout=1) as scorer:
        assert scorer.place == "process"
        score = scorer.submit("2+2=", "4", {"answer": "4"}).result()
    assert score.reward == 0.0 and score.metrics == {"gave_up": 1.0}  # its parts are built in


def test_a_registered_function_of_a_module_runs_in_a_process_alone_and_in_a_composite(module):
    import misbehaving

    from rl.rewards.reward_registry import _REGISTRY

    register_reward("tidy")(misbehaving.misbehave)
    try:
        composite = resolve_reward(
            "composite", weights={"tidy": 2.0, "length_penalty": 1.0}, settings=LENGTH
        )
        with Scorer("tidy", workers=1) as single, Scorer(composite, workers=1) as both:
            assert single.place == both.place == "process"
            assert single.submit("", "3", None).result().reward == 3.0
            score = both.submit("", "3", None).result()
            assert score.reward == 2 * 3.0 - 0.5 and score.metrics["tidy"] == 3.0
            assert both.submit("", "pid", None).result().metrics["tidy"] != os.getpid()
            failed = both.submit("", "raise", None).result()
    finally:
        del _REGISTRY["tidy"]
    assert failed.failure == "error" and "KeyError" in failed.error


MAIN_SCRIPT = """
from rl.rewards import Scorer, register_reward
@register_reward("mine")
def mine(prompt, response, meta=None): return 2.0 * len(response)
scorer = Scorer("mine")
print(scorer.place, scorer.submit("", "abc", None).result().reward)
"""


def test_a_function_of_the_script_itself_runs_in_a_thread(tmp_path):
    (tmp_path / "script.py").write_text(MAIN_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert out.stdout == "thread 6.0\n", out.stderr


def test_meta_that_cannot_travel_is_named(module):
    with Scorer("misbehaving:misbehave", workers=1) as scorer:
        scores = scorer.score_many([("", "1", {"f": lambda: 0}), ("", "2", None)])
    assert scores[0].failure == "error" and "meta" in scores[0].error
    assert scores[1].reward == 2.0


def test_math_works_away_from_the_main_thread_and_a_tower_of_powers_is_wrong():
    results = []

    def work():
        with Scorer("math_correctness", timeout=3.0, workers=1) as scorer:
            responses = [r"\boxed{\frac{2}{4}}", r"\boxed{9^{9^{9^{9}}}}", "0.5"]
            results.extend(scorer.score_many([("", text, {"answer": "1/2"}) for text in responses]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert [score.reward for score in results] == [1.0, 0.0, 1.0]
    assert [score.metrics["gave_up"] for score in results] == [0.0, 1.0, 0.0]


def test_a_worker_starts_without_torch_or_transformers():
    modules = "rl.rewards, rl.rewards.reward_workers, rl.data, rl.renderers"
    code = f"import sys, {modules}; print('torch' in sys.modules or 'transformers' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert out.stdout.strip() == "False", out.stderr
