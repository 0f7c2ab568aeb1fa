"""Which groups make up a batch: the bound on age over random latencies, by a simulated clock."""

from __future__ import annotations

import heapq
import random

import pytest

from rl.episodes import Admission


def simulate(seed: int, apart: bool):
    """Groups that take random times, an update too; (admission, batches: [(version, [(number,
    began)])], resumed from JSON on the way).

    `apart`: an update's weights take a time of their own to who draws, while the learner goes on;
    one update's after the other's.
    """
    chance = random.Random(seed)
    size, bound, steps = chance.randint(1, 5), chance.randint(0, 4), chance.randint(1, 12)
    admission = Admission(size, bound, size * steps, redraw=chance.random() < 0.5)
    spread = chance.choice([0.0, 1.0, 3.0])  # all alike, to a few that take a hundred times as long
    now, events, attempt, batches, learning = 0.0, [], {}, [], False
    # weights are on their way; an update waits for those before its own to be there
    arriving, ended = False, False
    began: dict[int, int] = {}

    def start(number):
        attempt[number] = attempt.get(number, 0) + 1
        began[number] = admission.version
        heapq.heappush(
            events, (now + chance.lognormvariate(0, spread), "ended", number, attempt[number])
        )

    for _ in range(100_000):
        for number in admission.begin():
            start(number)
        if not learning:
            batch, again = admission.take()
            for number in again:
                start(number)
            if batch:
                batches.append((len(batches), [(number, began[number]) for number in batch]))
                learning = True
                heapq.heappush(
                    events, (now + chance.lognormvariate(0, spread / 2), "learned", -1, 0)
                )
        if len(batches) == steps and not (learning or arriving):
            break
        # IndexError: everybody waits for everybody
        now, kind, number, which = heapq.heappop(events)
        if kind == "landed":
            admission.updated()
            arriving = False
        if kind == "learned" or (kind == "landed" and ended):
            ended = arriving
            if ended:
                continue
            learning = False
            if apart:
                arriving = True
                heapq.heappush(events, (now + chance.lognormvariate(0, spread), "landed", -1, 0))
                continue
            admission.updated()
            if chance.random() < 0.3:  # a run that goes on from a checkpoint
                state = admission.state()
                counts = admission.awaited, admission.redrawn
                admission = Admission(size, bound, size * steps, redraw=admission.redraw)
                admission.load_state(state)
                admission.awaited, admission.redrawn = counts
        elif kind == "ended" and which == attempt[number]:
            admission.end(number)
    return admission, batches, size, bound, steps


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_no_token_is_ever_older_than_the_bound_and_every_group_is_trained_once(first, apart):
    ages, waited, redrawn = set(), 0, 0
    for seed in range(first, first + 250):
        admission, batches, size, bound, steps = simulate(seed, apart)
        assert [version for version, _ in batches] == list(range(steps))
        assert all(len(batch) == size for _, batch in batches)
        assert sorted(number for _, batch in batches for number, _ in batch) == list(
            range(size * steps)
        )
        for version, batch in batches:
            for _, began in batch:
                assert 0 <= version - began <= bound
                ages.add(version - began)
        waited, redrawn = waited + admission.awaited, redrawn + admission.redrawn
        if bound == 0:  # in step: each batch is the problems of its own step, in order
            in_order = [list(range(i * size, i * size + size)) for i in range(steps)]
            assert [[number for number, _ in batch] for _, batch in batches] == in_order
    assert ages == {0, 1, 2, 3, 4} and waited > 50 and redrawn > 50  # each rule had something to do


def test_a_batch_is_of_those_that_are_there_until_one_may_wait_no_longer():
    admission = Admission(batch_size=2, bound=1, total=8)
    assert admission.begin() == [0, 1, 2, 3] and admission.begin() == []
    for number in (1, 2):
        admission.end(number)
    assert admission.take() == ([1, 2], [])  # 0 and 3 are late, and may be
    assert admission.begin() == []  # which would be trained two updates after this one
    admission.updated()
    assert admission.begin() == [4, 5]
    for number in (4, 5):
        admission.end(number)
    # trained after this update they would be two versions old
    assert admission.take() == ([], []) and admission.awaited == 2
    admission.end(0)
    admission.end(3)
    assert admission.take() == ([0, 3], []) and admission.awaited == 2
    again = Admission(batch_size=1, bound=1, total=3, redraw=True)
    again.begin()
    again.end(1)
    assert again.take() == ([1], [])
    again.updated()
    assert again.begin() == [2]
    again.end(2)
    assert again.take() == ([2], [0]) and again.redrawn == 1 and again.since == {0: 1}
