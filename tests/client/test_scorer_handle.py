"""Test the scores that rank 0 awaits from the ranks that sampled the answers, without a launch."""

import pickle
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl.client import SampleScorerHandle
from rl.rewards import SampleScore, ScoredProblem, Scorer, resolve_reward
from rl.rollout import SampleScorer, ScorerSettings, open_sample_scorer
from rl.runtime import Driver, WorkerSettings
from rl.runtime.sampling_worker import SamplingWorker
from rl.sampler import SamplingRequest
from rl.types import SampledSequence

GRADED = """
import time
def grade(prompt, response, meta):
    time.sleep(float(response))
    return float(prompt)
"""
WAIT = 20.0


class SpacedNumbers:
    """Decode tokens into tenths, as a renderer."""

    def parse_response(self, tokens):
        if not tokens:
            raise ValueError("an answer without tokens")
        return {"role": "assistant", "content": str(tokens[0] / 10)}, True


class LocalDriver:
    """Execute the verbs of scorers at once, on a single rank of number `rank`."""

    closed = False

    def __init__(self, rank: int = 3):
        self.rank, self.verbs, self.failure = rank, [], None

    def submit(self, verb, *arguments) -> Future:
        self.verbs.append(verb)
        future: Future = Future()
        if verb == "name_machine":
            future.set_result(["here"])
        elif verb == "open_scorer":
            self.scorer, reason = open_sample_scorer(arguments[1], self.rank, 1)
            future.set_result([("here", reason)])
        elif verb == "take_scores" and self.failure is not None:
            future.set_exception(self.failure)
        elif verb == "take_scores":
            future.set_result(self.scorer.take_scores(arguments[1]))
        else:
            self.scorer.close()
            future.set_result(None)
        return future


@pytest.fixture
def reward(tmp_path) -> str:
    (tmp_path / "graded.py").write_text(GRADED)
    return f"{tmp_path / 'graded.py'}:grade"


@pytest.fixture
def local(reward):
    """Return (rank 0's scorer, driver, handle)."""
    with Scorer(reward, workers=1) as scorer:
        driver = LocalDriver()
        settings = ScorerSettings(SpacedNumbers(), scorer.reward, 10.0, 2, {})
        handle = SampleScorerHandle(driver, 0, settings.pack())
        assert not handle.refusals
        yield scorer, driver, handle
        handle.close()


def sample(handle, rank: SampleScorer, *tenths: int, seconds: float | None = None):
    """Return samples, each scored with 7 after some tenths of a second, that left the rank."""
    samples = [SampledSequence([number] if number >= 0 else []) for number in tenths]
    rank.submit(handle.make_task(ScoredProblem("7", {}, None, "")), samples)
    rank.hand_over(seconds)
    return samples


def expect(handle, scorer, ticket, response: str = "0"):
    return handle.expect(ticket, scorer, lambda: ("8", response, {}, None))


def test_scores_arrive_by_ticket_and_are_counted(local):
    scorer, driver, handle = local
    first, second = sample(handle, driver.scorer, 2, 0)
    pending = [expect(handle, scorer, s.score.score) for s in (second, first)]
    assert [p.result(WAIT).reward for p in pending] == [7.0, 7.0]
    assert scorer.counts["calls"] == 2


def test_a_rank_waits_only_a_share_of_the_limit(local):
    """What takes longer has a ticket, so that the other ranks are not kept waiting."""
    scorer, driver, handle = local
    begin = time.monotonic()
    late, quick = sample(handle, driver.scorer, 30, 0, seconds=1.0)
    assert time.monotonic() - begin < 2.5
    assert quick.score.score.reward == 7.0 and isinstance(late.score.score, tuple)
    assert expect(handle, scorer, late.score.score).result(WAIT).reward == 7.0


def test_no_score_stays_pending_when_the_scorers_are_closed(local):
    scorer, driver, handle = local
    (late,) = sample(handle, driver.scorer, 30)
    pending = expect(handle, scorer, late.score.score)
    handle.close()
    with pytest.raises(RuntimeError, match="were closed"):
        pending.result(WAIT)
    with pytest.raises(RuntimeError, match="open them again"):
        expect(handle, scorer, late.score.score)


def test_an_error_of_a_score_is_that_score_s_alone(local):
    """A failed verb fails what is expected at that time; a failed delivery its own score."""
    scorer, driver, handle = local
    one, two, three = sample(handle, driver.scorer, 0, 0, 0)
    driver.failure = RuntimeError("a verb failed")
    with pytest.raises(RuntimeError, match="a verb failed"):
        expect(handle, scorer, one.score.score).result(WAIT)
    driver.failure = None
    broken = SimpleNamespace()  # cannot count
    with pytest.raises(AttributeError, match="record_score"):
        expect(handle, broken, two.score.score).result(WAIT)
    assert expect(handle, scorer, three.score.score).result(WAIT).reward == 7.0


def test_what_a_rank_no_longer_holds_is_scored_by_rank_0(local, monkeypatch):
    """It forgets the oldest tickets beyond a number: those of samples that were dropped."""
    scorer, driver, handle = local
    monkeypatch.setattr("rl.rollout.sample_scorer._MAX_TICKETS", 2)
    samples = sample(handle, driver.scorer, 0, 0, 0)
    rewards = [expect(handle, scorer, s.score.score).result(WAIT).reward for s in samples]
    assert rewards == [8.0, 7.0, 7.0]


def test_an_answer_that_cannot_be_decoded_is_left_to_rank_0(local, caplog):
    scorer, driver, handle = local
    for _ in range(2):
        good, bad = sample(handle, driver.scorer, 0, -1, seconds=WAIT)
        assert good.score.score.reward == 7.0 and bad.score is None
    (line,) = [r.getMessage() for r in caplog.records]
    assert (
        "an answer without tokens" in line and "(rank 3)" in line and socket.gethostname() in line
    )


def test_samples_of_a_failed_verb_are_forgotten(local):
    scorer, driver, handle = local
    worker = SimpleNamespace(sample_scorers={0: driver.scorer})
    task = handle.make_task(ScoredProblem("7", {}, None, ""))
    one = SampledSequence([0])
    with pytest.raises(MemoryError), SamplingWorker._score_samples(worker, WAIT):
        driver.scorer.submit(task, [one])
        raise MemoryError
    driver.scorer.hand_over(WAIT)
    assert one.score is None


def test_a_row_that_cannot_be_pickled_is_named_once(local, caplog):
    _, _, handle = local
    for name in ("first row", "second row"):
        assert handle.make_task(ScoredProblem(name, {"lock": threading.Lock()}, None, "")) is None
    (line,) = [r.getMessage() for r in caplog.records]
    assert "first row" in line and "pickle" in line


def test_a_score_that_a_built_in_reward_gave_up_is_counted_as_on_its_rank(reward):
    """Rank 0 counts what the rank's scorer counted, also after the way to rank 0."""
    builtin = replace(resolve_reward(reward), builtin=True)
    with Scorer(builtin, timeout=0.3, workers=1) as rank:
        score = rank.submit("7", "30").result(WAIT)
        assert score.reward == 0.0 and rank.counts["timeouts"] == 1
    moved = pickle.loads(pickle.dumps(SampleScore(True, b"", score))).score
    with Scorer(builtin, workers=1) as here:
        here.record_score(moved)
        assert here.counts == rank.counts


def test_the_ranks_of_a_machine_that_sample_divide_its_workers(reward, monkeypatch):
    """2 of the 8 processes of this machine sample: each has half of the 6 workers."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    me = socket.gethostname()
    worker = SimpleNamespace(
        reports_results=True,
        settings=SimpleNamespace(sampler=SimpleNamespace(tp=1)),
        objects=SimpleNamespace(rank=1),
        sample_scorers={},
    )
    with Scorer(reward, workers=1) as scorer:
        packed = ScorerSettings(SpacedNumbers(), scorer.reward, 10.0, 6, {}).pack()
    before = set(threading.enumerate())
    opened = SamplingWorker.open_scorer(worker, 0, packed, [me, "another", me])
    workers = [t for t in set(threading.enumerate()) - before if t.name.startswith("scorer ")]
    worker.sample_scorers[0].close()
    assert opened == (me, None) and len(workers) == 3


def test_asking_for_scores_does_not_cut_up_batches_of_samples(monkeypatch):
    """Sample requests that are held back run with the next verb that may depend on them."""
    submitted = []
    group = SimpleNamespace(submit=lambda c: submitted.append(c.verb), alive=True, device="cpu")
    monkeypatch.setattr("rl.runtime.driver.GroupService", lambda settings, role: group)
    driver = Driver(WorkerSettings())
    driver.submit_sample(0, Future(), SamplingRequest(prompt=[1]))
    driver.submit("take_scores", 0, [])
    assert submitted == ["take_scores"]
    driver.submit("name_machine")
    assert submitted == ["take_scores", "sample", "name_machine"]
