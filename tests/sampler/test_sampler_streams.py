"""Test counter-based uniforms: the published Philox outputs, and independence of the batch."""

import numpy as np
import pytest
from sampler_models import make_request

from rl.sampler import build_stop_condition
from rl.sampler.running_rows import RunningRows, as_uint64, philox4x32, philox_uniforms
from rl.sampler.sampling_requests import SequenceGroup


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known outputs published by the authors of Philox with Random123 (philox4x32, 10 rounds).
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    as_words = lambda values: tuple(np.array([value], np.uint64) for value in values)  # noqa: E731
    words = philox4x32(as_words(counter), as_words(key))
    assert tuple(int(word[0]) for word in words) == expected


def test_every_coordinate_changes_the_number_and_batches_do_not():
    base = dict(seed=5, problem=7, index=2, position=11)
    single = philox_uniforms(*(np.array([value], np.uint64) for value in base.values()))[0]
    for name in base:
        changed = {**base, name: base[name] + 1}
        assert (
            philox_uniforms(*(np.array([value], np.uint64) for value in changed.values()))[0]
            != single
        )
    many = philox_uniforms(
        np.uint64(5),
        np.arange(50, dtype=np.uint64)[:, None],
        np.uint64(2),
        np.arange(20, dtype=np.uint64),
    )
    assert many.shape == (50, 20) and many[7, 11] == single
    assert len(np.unique(many)) == many.size


def test_every_bit_of_seed_and_problem_counts():
    """Seeds and streams of a repeated problem are 63-bit numbers."""
    bits = np.uint64(1) << np.arange(64, dtype=np.uint64)
    by_seed = philox_uniforms(bits, np.uint64(7), np.uint64(2), np.uint64(11))
    by_problem = philox_uniforms(np.uint64(5), bits, np.uint64(2), np.uint64(11))
    assert len(np.unique(np.concatenate([by_seed, by_problem]))) == 128


def test_uniform_moments_and_range():
    u = philox_uniforms(
        np.uint64(1),
        np.arange(200, dtype=np.uint64)[:, None],
        np.uint64(0),
        np.arange(1000, dtype=np.uint64),
    )
    assert u.min() >= 0 and u.max() < 1
    n = u.size
    assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * n)
    assert abs(u.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / n)
    # Neighbouring positions, and neighbouring problems, are uncorrelated.
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)


def test_negative_and_huge_seeds_are_taken_modulo_two_to_64():
    assert as_uint64(-1) == np.uint64(2**64 - 1)
    assert as_uint64(2**64 + 3) == np.uint64(3)


def test_rows_know_their_next_uniform_however_far_they_went_without_asking():
    """Steps without the host are recorded without a call of `next_uniforms`; later calls return the
    number of the current token.
    """
    rng, no_stop = np.random.default_rng(3), build_stop_condition([], ())
    for _ in range(50):
        rows = RunningRows()
        for job, (seed, problem) in enumerate([(4, 0), (4, 1), (9, 1)]):
            request = make_request([1], 2, seed=seed, problem=problem, first_index=job)
            rows.add([SequenceGroup(job, request, 99, 0, no_stop, (), num_unfinished=2)], [2])
        for _ in range(12):
            result = rows.next_uniforms()
            assert np.array_equal(
                result,
                philox_uniforms(
                    rows["seed"],
                    rows["problem"],
                    rows["index"],
                    rows["num_sampled"].astype(np.uint64),
                ),
            )
            for _ in range(int(rng.integers(1, 30))):
                rows.record(np.zeros((1, len(rows)), np.int64), np.zeros((1, len(rows))))
            if len(rows) > 1 and rng.random() < 0.2:
                rows.keep_rows(np.sort(rng.permutation(len(rows))[:-1]))
