"""Test that samples and datums are the same, bit for bit, in another process, and how many bytes
their messages have.
"""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rl.distributed import collectives
from rl.rewards import SampleScore, Score, hash_beginning
from rl.types import Datum, ModelInput, SampledSequence, TensorData


def send(item):
    """Return an object as another rank receives it."""
    return collectives.unpack_message(collectives.pack_message(item))


def make_datum(rng: np.random.Generator, case: int) -> tuple[Datum, dict[str, np.ndarray]]:
    """Return a datum with zeros, equal values, -0.0 and NaN in other places, and its arrays."""
    n = int(rng.integers(1, 20))
    tokens = rng.integers(0, 100, n + 1)
    logprobs = np.where(rng.random(n) < 0.5, 0, rng.normal(size=n)).astype(np.float32)
    if case % 3 == 0:
        logprobs[: n // 2] = -0.0 if case % 2 else 0.0
    if case % 5 == 0:
        logprobs[: n // 3] = 0
    if case % 7 == 0:
        logprobs[n // 2 :] = np.nan
    mask = np.zeros(n, np.float32)
    mask[n // 3 :] = 1
    targets = tokens[1:] if case % 4 else rng.integers(0, 100, n)
    text = ModelInput.of(tokens[:-1]) if case % 2 else ModelInput.from_ints(tokens[:-1].tolist())
    soft = rng.normal(size=(n, 2)).astype(np.float32)
    arrays = {"target_tokens": targets, "logprobs": logprobs, "mask": mask, "weights": soft}
    inputs = {name: TensorData(array) for name, array in arrays.items()}
    options = {"episode_share": 0.25, "temperature": 0.5, "version": case}
    datum = Datum(text, inputs, experts=rng.integers(0, 9, (n, 2)).astype(np.int16), **options)
    return datum, {**arrays, "experts": datum.experts.copy(), "tokens": tokens[:-1]}


@pytest.mark.parametrize("move", [lambda d: pickle.loads(pickle.dumps(d)), send, copy.deepcopy])
def test_a_datum_keeps_every_bit(move):
    rng = np.random.default_rng(0)
    for case in range(210):
        datum, arrays = make_datum(rng, case)
        moved = move(datum)
        assert moved.model_input.token_ids() == arrays["tokens"].tolist()
        assert {type(token) for token in moved.model_input.token_ids()} == {int}
        found = {name: data.array for name, data in moved.loss_fn_inputs.items()}
        found |= {"experts": moved.experts, "tokens": arrays["tokens"]}
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes(), (case, name)
        assert (moved.episode_share, moved.temperature, moved.version) == (0.25, 0.5, case)


@pytest.mark.parametrize("logprobs", [
    None, [], [-0.1, -2.0, float("nan")], [float(np.float32(-0.1)), -0.0, float("-inf")],
    [-1e-300, 0.1, -1e300],
])  # fmt: skip
@pytest.mark.parametrize("tokens", [[], [0, 5, 2**31 - 1], [2**31, 1, 2]])
def test_a_sample_keeps_its_lists(tokens, logprobs):
    score = SampleScore(True, hash_beginning("é" * 60), Score(0.5, {"x": 1.0}, seconds={"r": 2.0}))
    sample = SampledSequence(
        list(tokens), logprobs, "length", 3, "id", 0.7, experts=np.ones((2, 2), np.int16),
        beyond=True, versions=[1, 1, 2], score=score,
    )  # fmt: skip
    moved = send(sample)
    assert moved.num_tokens == len(tokens)
    assert repr(moved.as_json()) == repr(sample.as_json())  # NaN is equal here
    assert moved.score == score and hash_beginning("é" * 50) == moved.score.beginning
    assert [type(token) for token in moved.tokens] == [int] * len(tokens)
    moved.tokens.append(4)
    assert moved.num_tokens == len(tokens) + 1 and send(moved).tokens == [*tokens, 4]


def test_threads_that_read_a_received_sample_at_once_get_the_same_list():
    """The thread of the ranks' scores reads a sample while the rollout reads it."""
    moved = send([SampledSequence([1, 2, 3], [-1.0, -2.0, -3.0]) for _ in range(8000)])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            reads = [pool.submit(lambda: [(s.tokens, s.logprobs) for s in moved]) for _ in "1234"]
            results = [read.result() for read in reads]
    finally:
        sys.setswitchinterval(interval)
    for sample, *lists in zip(moved, *results, strict=True):
        assert sample.tokens == [1, 2, 3] and sample.logprobs == [-1.0, -2.0, -3.0]
        assert all(t is sample.tokens and p is sample.logprobs for t, p in lists)


@pytest.mark.parametrize("read_first", [False, True])
def test_a_field_of_a_received_sample_may_be_assigned(read_first):
    moved = send(SampledSequence([1, 2, 3], [-1.0, -2.0, -3.0], versions=[1, 1, 2]))
    if read_first:
        assert moved.tokens == [1, 2, 3]
    moved.tokens, moved.logprobs, moved.versions = [9, 8], [-4.0, -5.0], None
    for sample in (moved, send(moved)):
        assert (sample.num_tokens, sample.tokens_np.tolist()) == (2, [9, 8])
        assert sample.logprobs_np.tolist() == [-4.0, -5.0] and sample.as_array("versions") is None
        assert (sample.tokens, sample.logprobs, sample.versions) == ([9, 8], [-4.0, -5.0], None)


def test_bytes_of_a_token():
    """A sampled token has an id and a logprob of 4 bytes each. A datum's tokens have 4 bytes, and
    those of its answer 4 for the logprob.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, 1536)
    logprobs = rng.normal(size=1024).astype(np.float32)
    sample = SampledSequence(tokens[512:].tolist(), logprobs.tolist(), temperature=1.0)
    assert 8 * 1024 < len(collectives.pack_message(sample)) < 8 * 1024 + 600
    columns = {"mask": 1.0, "advantages": 0.5, "logprobs": logprobs}
    inputs = {"target_tokens": tokens[1:]}
    for name, values in columns.items():
        inputs[name] = np.zeros(1535, np.float32)
        inputs[name][511:] = values
    datum = Datum(ModelInput.of(tokens[:-1]), inputs)
    assert 4 * (1535 + 1024) < len(collectives.pack_message(datum)) < 4 * (1535 + 1024) + 1000


def test_received_arrays_are_no_views_of_their_message():
    """An array that is kept would otherwise keep the whole message of its rank."""
    columns = [np.arange(1000.0) + i for i in range(9)]
    message = collectives.pack_message(columns)
    moved = collectives.unpack_message(message)
    message.zero_()
    for column, array in zip(columns, moved, strict=True):
        assert array.tobytes() == column.tobytes() and array.flags.writeable


@pytest.mark.parametrize("tokens", [[1, None], [1, 2**70], [1, "a"], [1, 2.5]])
def test_a_datum_of_unusable_tokens_is_sent(tokens):
    """The check of the verb names the wrong token, after the datum is sent."""
    datum = Datum(ModelInput.from_ints(tokens), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    moved = send(datum)
    assert moved.model_input.token_ids() == tokens
    assert moved.loss_fn_inputs["target_tokens"].tolist() == [2, 3]


@pytest.mark.parametrize("values", [
    [1, True], [True, 1], [0, -1.5], [-1.5, 0], [1, None], [0.5, None], [1, 2**63], [1, 2**70],
    [0.5, True],
])  # fmt: skip
def test_a_list_of_several_types_keeps_them(values):
    moved = send(SampledSequence(values, values, versions=values))
    for received in (moved.tokens, moved.logprobs, moved.versions):
        assert repr(received) == repr(values)


def test_samples_are_equal_whatever_scored_them():
    score = SampleScore(True, hash_beginning("a"), Score(0.5))
    assert SampledSequence([1], score=score) == SampledSequence([1])
    assert "score" not in repr(SampledSequence([1], score=score))
