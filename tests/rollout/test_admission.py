"""Test which groups make up a batch. test_staleness runs whole training loops."""

from rl.rollout import StalenessController


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
