"""Test which groups make up a batch: the bound on staleness for random latencies, with a simulated
clock.
"""

from __future__ import annotations

import heapq
import random

import pytest

from rl.rollout import StalenessController


def simulate(seed: int, apart: bool):
    """Simulate groups and updates with random durations; the run is saved to JSON and resumed
    midway.

    Returns (admission, batches, batch size, bound, steps), where a batch is (version, [(group
    number, version at its start)]). If `apart`, the transfer of an update's weights to the samplers
    takes its own time while the learner continues, one transfer at a time.
    """
    chance = random.Random(seed)
    size, bound, steps = chance.randint(1, 5), chance.randint(0, 4), chance.randint(1, 12)
    admission = StalenessController(size, bound, size * steps, resample=chance.random() < 0.5)
    spread = chance.choice([0.0, 1.0, 3.0])  # equal to very different durations
    now, events, attempt, batches, learning = 0.0, [], {}, [], False
    # arriving: weights are in transfer. An update waits for the transfer of the previous weights.
    arriving, ended = False, False
    began: dict[int, int] = {}

    def start(number):
        attempt[number] = attempt.get(number, 0) + 1
        began[number] = admission.version
        heapq.heappush(
            events, (now + chance.lognormvariate(0, spread), "ended", number, attempt[number])
        )

    for _ in range(100_000):
        for number in admission.start_groups():
            start(number)
        if not learning:
            batch, again = admission.take_batch()
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
        # raises IndexError at a deadlock
        now, kind, number, which = heapq.heappop(events)
        if kind == "landed":
            admission.version += 1
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
            admission.version += 1
            if chance.random() < 0.3:  # the run resumes from a checkpoint
                state = admission.state()
                counts = admission.num_awaited, admission.num_rescheduled
                admission = StalenessController(
                    size, bound, size * steps, resample=admission.resample
                )
                admission.load_state(state)
                admission.num_awaited, admission.num_rescheduled = counts
        elif kind == "ended" and which == attempt[number]:
            admission.ended_groups.add(number)
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
        waited, redrawn = waited + admission.num_awaited, redrawn + admission.num_rescheduled
        if bound == 0:  # synchronous: each batch has the problems of its step, in order
            in_order = [list(range(i * size, i * size + size)) for i in range(steps)]
            assert [[number for number, _ in batch] for _, batch in batches] == in_order
    assert ages == {0, 1, 2, 3, 4} and waited > 50 and redrawn > 50  # every rule was exercised


def test_a_batch_is_of_those_that_are_there_until_one_may_wait_no_longer():
    admission = StalenessController(batch_size=2, max_staleness=1, num_groups=8)
    assert admission.start_groups() == [0, 1, 2, 3] and admission.start_groups() == []
    for number in (1, 2):
        admission.ended_groups.add(number)
    assert admission.take_batch() == ([1, 2], [])  # 0 and 3 are late but within the bound
    assert admission.start_groups() == []  # they would be trained two updates after this version
    admission.version += 1
    assert admission.start_groups() == [4, 5]
    for number in (4, 5):
        admission.ended_groups.add(number)
    # trained after this update, 0 and 3 would be two versions old
    assert admission.take_batch() == ([], []) and admission.num_awaited == 2
    admission.ended_groups.add(0)
    admission.ended_groups.add(3)
    assert admission.take_batch() == ([0, 3], []) and admission.num_awaited == 2
    again = StalenessController(batch_size=1, max_staleness=1, num_groups=3, resample=True)
    again.start_groups()
    again.ended_groups.add(1)
    assert again.take_batch() == ([1], [])
    again.version += 1
    assert again.start_groups() == [2]
    again.ended_groups.add(2)
    assert (
        again.take_batch() == ([2], [0])
        and again.num_rescheduled == 1
        and again.start_versions == {0: 1}
    )
