"""Test datums in Tinker's documented form: no `mask`, or `weights` instead."""

import warnings

import numpy as np
import pytest

from rl import ServiceClient
from rl.types import (
    AdamParams,
    Datum,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SamplingParams,
)

POLICY = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
PROMPT = [3, 12, 5, 7]
MASK = [0.0] * 3 + [1.0] * 4
CONFIGS = {"dro": {"beta": 0.3}, "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}}


@pytest.fixture  # a service warns once
def service(tmp_path):
    with ServiceClient(output_dir=tmp_path / "out", seed=3) as service:
        yield service


@pytest.fixture
def client(service):
    return service.create_full_training_client("tiny:addition", seed=2)


def make_documented_datum(advantages=(0.5, 0.5, 0.5, 0.5), **fields):
    """Return a datum with a prompt and an answer of four tokens each."""
    answer = [4, 6, 8, 1]
    inputs = {
        "target_tokens": [*PROMPT[1:], *answer],
        "logprobs": [0.0] * 3 + [-2.5, -2.7, -2.4, -2.9],
        "advantages": [0.0] * 3 + list(advantages),
    }
    return Datum(ModelInput.from_ints([*PROMPT, *answer[:-1]]), {**inputs, **fields})


def update(client, data, loss, config=None):
    """Return (loss, gradient norm) of a single call on the datums."""
    output = client.forward_backward(data, loss, config or CONFIGS.get(loss, {})).result()
    norm = client.optim_step(AdamParams(0.0)).result().metrics["grad_norm"]
    return output.metrics["loss:sum"], norm


@pytest.mark.parametrize("loss", POLICY)
def test_a_documented_datum_is_that_with_the_mask_of_its_answer(client, loss):
    def make_pair(**fields):
        return [make_documented_datum((value,) * 4, **fields) for value in (0.5, -1.0)]

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        bare = [update(client, make_pair(), loss) for _ in range(2)]
    masked = update(client, make_pair(mask=MASK), loss)
    assert bare == [masked, masked] and masked[1] > 0
    messages = [str(item.message) for item in heard if "mask" in str(item.message)]
    assert len(messages) == (1 if loss in ("dro", "gspo") else 0)
    assert all(loss in text and "positions with an advantage" in text for text in messages)
    if loss == "ppo":  # a term of the loss takes the same actions
        config = {"entropy_coef": 0.1}
        pairs = (make_pair(), make_pair(mask=MASK))
        bare, masked = (update(client, pair, loss, config) for pair in pairs)
        assert bare == masked


@pytest.mark.parametrize("loss", POLICY)
def test_weights_of_0_and_1_are_the_mask(client, loss):
    """This also holds if they exclude a token with an advantage or include a token without."""
    for mask in (MASK, [0.0] * 3 + [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]):
        results = [
            update(client, [make_documented_datum((0.5, 0.5, 0.0, 0.5), **fields)], loss)
            for fields in ({"mask": mask}, {"weights": mask}, {"weights": mask, "mask": mask})
        ]
        assert results == [results[0]] * 3, mask


def test_weights_stand_for_the_mask_of_losses_on_pairs_too(client):
    weighted, masked = [], []
    for answer in ([4, 6, 8, 1], [4, 6, 9, 2]):
        datum, targets = make_documented_datum(), {"target_tokens": [*PROMPT[1:], *answer]}
        weighted.append(datum.with_inputs({**targets, "weights": MASK}))
        masked.append(datum.with_inputs({**targets, "mask": MASK}))
    assert update(client, weighted, "simpo") == update(client, masked, "simpo")


@pytest.mark.parametrize(("fields", "text"), [
    ({"weights": [0.0] * 3 + [1.0, 0.5, 1.0, 1.0]}, r"datum 0.*weights.*0\.5.*advantages"),
    ({"weights": [0.0] * 3 + [1.0, float("nan"), 1.0, 1.0]}, r"datum 0.*weights.*nan"),
    ({"weights": [1.0] * 4}, r"datum 0: 'weights' has 4 values, the model_input has 7"),
    ({"weights": MASK, "mask": [1.0] * 7}, r"datum 0.*'weights' and 'mask'.*position 0"),
])  # fmt: skip
def test_weights_that_are_no_mask_are_refused_by_name(client, fields, text):
    for loss in ("ppo", "dro"):
        with pytest.raises(ValueError, match=text):
            client.forward_backward([make_documented_datum(**fields)], loss)


def sampled(client, turns, advantage):
    """Return a datum of `turns` sampled answers, and its mask; every second token has credit."""
    sampler = client.save_weights_and_get_sampling_client()
    tokens, logprobs, mask = [], [], []
    for turn in range(turns):
        tokens += [3 + turn, 12, 5]
        params = SamplingParams(5, seed=turn + 7, stop=[])
        (sequence,) = sampler.sample(ModelInput.from_ints(tokens), 1, params).result().sequences
        tokens += sequence.tokens
        logprobs += [0.0] * 3 + sequence.logprobs
        mask += [0.0] * 3 + [1.0] * len(sequence.tokens)
    values = advantage * np.asarray(mask) * (np.arange(len(mask)) % 2)
    fields = {"target_tokens": tokens[1:], "logprobs": logprobs[1:], "advantages": values[1:]}
    return Datum(ModelInput.from_ints(tokens[:-1]), fields), mask[1:]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("loss", ["dro", "gspo"])
def test_recorded_samples_are_actions_even_without_an_advantage(client, loss, turns):
    for advantages in (0.0, 0.7):
        datum, mask = sampled(client, turns, advantages)
        client.forward_backward([make_documented_datum(mask=MASK)], "ppo").result()
        client.optim_step(AdamParams(1e-2)).result()  # away from the weights that sampled it
        expected = update(client, [datum.with_inputs({**datum.loss_fn_inputs, "mask": mask})], loss)
        assert update(client, [datum], loss) == expected
        assert expected[1] > 0 or (loss == "gspo" and advantages == 0.0)


def test_provenance_tells_the_sampled_tokens(client):
    names = {"sequence_id": "elsewhere:1"}
    prompt = [PromptProvenanceSpan(**names, length=7)]
    targets = [PromptProvenanceSpan(**names, length=3), SampledProvenanceSpan(**names, length=4)]
    datum = make_documented_datum((0.0,) * 4).with_provenance(prompt, targets)
    expected = update(client, [make_documented_datum((0.0,) * 4, mask=MASK)], "dro")
    assert update(client, [datum], "dro") == expected and expected[1] > 0


def test_a_datum_with_neither_mask_nor_advantages_still_names_what_it_lacks(service):
    client = service.create_full_training_client("tiny:addition", seed=2, value_head=True)
    datum = make_documented_datum(returns=[0.0] * 3 + [1.0] * 4)
    del datum.loss_fn_inputs["advantages"], datum.loss_fn_inputs["logprobs"]
    with pytest.raises(ValueError, match=r"datum 0 lacks loss_fn_inputs\['mask'\]"):
        client.forward_backward([datum], "value")
