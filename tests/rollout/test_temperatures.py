"""Test that each datum is scored at the temperature of its sample: several temperatures in a
version, mixed batches, and after a resume.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import random_datums

from rl import ServiceClient
from rl.losses import LOSSES
from rl.rollout import Trajectory, Transition, trajectory_to_datums
from rl.runtime import SampleTemperatures, sample_temperatures
from rl.types import (
    AdamParams,
    Datum,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SamplingParams,
)

PROMPT = ModelInput.from_ints([3, 4, 12, 5, 6, 13])
TEMPERATURES = (1.0, 0.7, 0.4)
KEEP = AdamParams(learning_rate=0.0)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=3) as service:
        yield service


@pytest.fixture
def client(service):
    client = service.create_full_training_client("tiny:addition", seed=2)
    client.forward_backward(random_datums(8, seed=1), "importance_sampling", divisor=10.0)
    # away from the flat start
    client.optim_step(AdamParams(learning_rate=1e-2, eps=1e-8)).result()
    yield client
    client.release()


def draw(sampler, temperature, count=3):
    params = SamplingParams(max_tokens=6, temperature=temperature, stop=[])
    return sampler.sample(PROMPT, count, params).result().sequences


def plain_datum(sequence, advantage=1.0):
    """Return a datum as a script builds it, without a temperature."""
    tokens, zeros = PROMPT.to_ints() + sequence.tokens, [0.0] * (PROMPT.length - 1)
    fields = {
        "target_tokens": tokens[1:],
        "logprobs": zeros + sequence.logprobs,
        "advantages": zeros + [advantage] * len(sequence.tokens),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), fields)


def compute_worst_difference(output, datums):
    actions = [d.loss_fn_inputs["advantages"].array != 0 for d in datums]
    pairs = zip(output.loss_fn_outputs, datums, actions, strict=True)
    return max(
        np.abs(o["logprobs"].array - d.loss_fn_inputs["logprobs"].array)[a].max()
        for o, d, a in pairs
    )


def test_evaluating_at_one_temperature_and_training_at_another_needs_no_word(client):
    """Many scripts do both; this was an error before."""
    sampler = client.save_weights_and_get_sampling_client()
    training = [plain_datum(s) for s in draw(sampler, 0.7)]
    draw(sampler, 1.0)  # an evaluation in between
    output = client.forward(training, "importance_sampling").result()
    assert compute_worst_difference(output, training) < 1e-5
    assert output.metrics["temperature:mean"] == 0.7
    override = client.forward(training, "importance_sampling", {"temperature": 1.0}).result()
    assert compute_worst_difference(override, training) > 0.01


def test_greedy_samples_are_scored_as_their_logprobs_are(client):
    """At temperature 1, since there is no distribution at 0. The batch also has sampled datums, and
    a greedy datum with an explicit temperature.
    """
    sampler = client.save_weights_and_get_sampling_client()
    greedy, sampled = draw(sampler, 0.0, 1), draw(sampler, 0.7, 2)
    datums = [plain_datum(s) for s in (*sampled, *greedy)]
    datums.append(Datum(datums[-1].model_input, datums[-1].loss_fn_inputs, temperature=0.0))
    output = client.forward(datums, "importance_sampling").result()
    assert compute_worst_difference(output, datums) < 1e-5


@pytest.mark.parametrize(
    "name",
    [n for n, spec in LOSSES.items() if spec.at_sampling_temperature and not spec.needs_mask],
)
def test_a_batch_may_mix_them(client, name):
    """Scores and gradients equal those of each part alone at its temperature."""
    sampler = client.save_weights_and_get_sampling_client()
    parts = {
        t: [plain_datum(s, (-1.0) ** i) for i, s in enumerate(draw(sampler, t))]
        for t in TEMPERATURES
    }
    mixed = [datum for trio in zip(*parts.values(), strict=True) for datum in trio]
    together = client.forward_backward(mixed, name).result()
    norm_together = client.optim_step(KEEP).result().metrics["grad_norm"]
    assert compute_worst_difference(together, mixed) < 1e-5
    assert together.metrics["temperature:mean"] == pytest.approx(np.mean(TEMPERATURES))
    losses = []
    for temperature, datums in parts.items():
        output = client.forward_backward(datums, name, {"temperature": temperature}).result()
        losses.append(output.metrics["loss:sum"])
    norm = client.optim_step(KEEP).result().metrics["grad_norm"]
    assert norm == pytest.approx(norm_together, rel=1e-5)
    assert together.metrics["loss:sum"] == pytest.approx(sum(losses), rel=1e-5)


def test_a_custom_loss_sees_each_datum_as_it_was_drawn(client):
    sampler = client.save_weights_and_get_sampling_client()
    mixed = [plain_datum(draw(sampler, t, 1)[0]) for t in TEMPERATURES]
    seen = []
    client.forward_backward_custom(
        mixed,
        lambda data, logprobs: (seen.extend(logprobs) or sum(lp.sum() for lp in logprobs), {}),
    ).result()
    client.optim_step(KEEP).result()
    for datum, actual in zip(mixed, seen, strict=True):
        actions = datum.loss_fn_inputs["advantages"].array != 0
        drawn = datum.loss_fn_inputs["logprobs"].array
        np.testing.assert_allclose(actual.detach().numpy()[actions], drawn[actions], atol=1e-5)


def test_a_datum_of_unknown_origin_asks_and_one_that_says_is_believed(client):
    sampler = client.save_weights_and_get_sampling_client()
    for temperature in (1.0, 0.7):
        draw(sampler, temperature)
    unknown = random_datums(1)[0]
    ask = r"temperatures \[1.0, 0.7\], and a datum is not a sample.*Datum\(..., temperature=...\)"
    with pytest.raises(ValueError, match=ask):
        client.forward([unknown], "ppo").result()
    text = Datum(unknown.model_input, unknown.loss_fn_inputs, temperature=0.7)
    expected, actual = (
        client.forward([datum], "ppo", config).result().loss_fn_outputs[0]["logprobs"].array
        for datum, config in ((unknown, {"temperature": 0.7}), (text, {}))
    )
    np.testing.assert_array_equal(actual, expected)


def test_trajectories_carry_it_and_a_change_begins_a_new_datum():
    def datums(*temperatures):
        turns = []
        for ob, token, t in zip(([1, 2], [1, 2, 3, 4]), (3, 5), temperatures, strict=True):
            action = SampledSequence([token], [-1.0], temperature=t)
            turns.append(Transition(ModelInput.from_ints(ob), action, 0.0, token == 5))
        return trajectory_to_datums(Trajectory(turns, advantage=1.0))

    assert [d.temperature for d in datums(0.7, 0.7)] == [0.7]
    result = datums(0.7, 1.0)
    assert [d.temperature for d in result] == [0.7, 1.0]
    assert sum(d.episode_share for d in result) == 1.0


def datum_of(sequence: SampledSequence, prompt: int) -> Datum:
    """Return a datum of a sample after so many tokens of a prompt."""
    targets = [7] * prompt + sequence.tokens
    fields = {"target_tokens": targets, "logprobs": [0.0] * prompt + sequence.logprobs}
    return Datum(ModelInput.from_ints([1] * len(targets)), fields)


def name_datum(datum: Datum, sequence: SampledSequence, prompt: int) -> Datum:
    """Return the datum without logprobs, with the name of the sample."""
    spans = [
        PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=prompt),
        SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=len(sequence.tokens)),
    ]
    targets = {"target_tokens": datum.loss_fn_inputs["target_tokens"]}
    return Datum(datum.model_input, targets).with_provenance(spans, spans)


def test_samples_are_told_apart_by_all_of_their_logprobs():
    """The tokens have the same certain ending at two temperatures; the part that differs may be far
    from the end.
    """
    rng, temperatures = np.random.default_rng(0), SampleTemperatures(limit=200)
    ending, sequences = [0.0] * 9, []
    for i in range(100):
        start = (-3 * rng.random(int(rng.integers(1, 6)))).tolist()
        drawn = [1] * len(start) + [2] * 9, start + ending
        label = {"sequence_id": str(i), "temperature": float(rng.choice([0.5, 1.0]))}
        sequences.append(SampledSequence(*drawn, **label))
        temperatures.record(sequences[-1])
    for first in sequences:
        prompt = int(rng.integers(1, 5))
        datum = datum_of(first, prompt)
        assert temperatures.find_temperature(datum) == first.temperature
        bare = name_datum(datum, first, prompt)
        assert temperatures.find_temperature(bare) == first.temperature
    for i in range(300):  # the oldest samples are evicted entirely
        new = SampledSequence([3], [-float(i)], sequence_id=f"new{i}", temperature=1.0)
        temperatures.record(new)
    assert temperatures.find_temperature(datum) is None
    assert len(temperatures._by_content) == len(temperatures._by_id) == 200
    assert sum(sum(lengths.values()) for lengths in temperatures._length_counts.values()) == 200


def test_many_samples_with_one_sure_end_do_not_slow_the_search(monkeypatch):
    """The last token of every sample has logprob 0, and all lengths differ."""
    rng, note = np.random.default_rng(0), SampleTemperatures()
    sequences = []
    for i in range(300):
        logprobs = [*(-rng.random(20 + i)).tolist(), 0.0]
        label = {"sequence_id": str(i), "temperature": 0.5 + i / 1000}
        sequences.append(SampledSequence([1] * len(logprobs), logprobs, **label))
        note.record(sequences[-1])
    read, digest = [], sample_temperatures._compute_digest

    def compute_digest(tokens, logprobs):
        read.append(len(tokens))
        return digest(tokens, logprobs)

    monkeypatch.setattr(sample_temperatures, "_compute_digest", compute_digest)
    for item in sequences[::50]:
        read.clear()
        assert note.find_temperature(datum_of(item, 400)) == item.temperature
        assert sum(read) < len(item.tokens) + 200


def test_a_greedy_sample_is_known_by_its_name_as_well():
    note = SampleTemperatures()
    greedy = SampledSequence([3, 4], [-1.0, -2.0], sequence_id="greedy", temperature=0.0)
    note.record(greedy)
    assert note.find_temperature(name_datum(datum_of(greedy, 1), greedy, 1)) == 0.0


@pytest.mark.parametrize("temperature", [1e-30, 9e-4, -1.0, float("nan"), True])
def test_a_datum_cannot_say_a_temperature_that_no_sample_has(client, temperature):
    datum = random_datums(1)[0]
    datum = Datum(datum.model_input, datum.loss_fn_inputs, temperature=temperature)
    with pytest.raises(ValueError, match="datum 0: temperature is 0 .greedy. or at least 0.001"):
        client.forward([datum], "ppo").result()


@pytest.mark.parametrize("lengths", [(3, 2, 1), (20, 18, 16)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_sample_is_told_from_shorter_ones_that_are_its_end(order, lengths):
    """A certain EOS is also a whole sample of another request. A datum matches the longest sample
    at its end, even if samples agree in more tokens than a digest covers.
    """
    longest = lengths[0]
    tokens = [4, 5, *range(6, 4 + longest), 2][-longest:]
    logprobs = [-1.5, *[-0.25] * (longest - 2), 0.0]
    of = dict(zip(lengths, (0.5, 0.7, 1.0), strict=True))  # length -> temperature
    samples = [
        SampledSequence(tokens[-n:], logprobs[-n:], sequence_id=str(n), temperature=t)
        for n, t in of.items()
    ]
    temperatures = SampleTemperatures()
    for i in order:
        temperatures.record(samples[i])
    for sample in samples:
        assert temperatures.find_temperature(datum_of(sample, 3)) == sample.temperature


@pytest.mark.parametrize("drawn_at", [(0.7,), (0.7, 1.0)])
def test_it_is_known_after_a_resume(service, client, drawn_at):
    """Without sampling after the resume, the default temperature and the error for an ambiguous one
    are as before.
    """
    sampler = client.save_weights_and_get_sampling_client()
    for temperature in drawn_at:
        draw(sampler, temperature)
    path = client.save_state(f"drawn-{len(drawn_at)}", overwrite=True).result().path
    state = json.loads(Path(path, "state.json").read_text())
    assert state["temperatures"] == list(drawn_at)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    unknown = random_datums(2, seed=4)
    if len(drawn_at) == 1:
        assert resumed.forward(unknown, "ppo").result().metrics["temperature:mean"] == 0.7
        fresh = service.create_training_client_from_state(path)  # weights alone record no samples
        assert fresh.forward(unknown, "ppo").result().metrics["temperature:mean"] == 1.0
    else:
        with pytest.raises(ValueError, match=r"temperatures \[0.7, 1.0\]"):
            resumed.forward(unknown, "ppo").result()
    # the same version gets one more temperature
    again = resumed.save_weights_and_get_sampling_client()
    draw(again, 0.4)
    with pytest.raises(ValueError, match=rf"temperatures \[{', '.join(map(str, drawn_at))}, 0.4\]"):
        resumed.forward(unknown, "ppo").result()


def test_truncated_samples_are_still_refused_after_a_resume(service, client):
    sampler = client.save_weights_and_get_sampling_client()
    sampler.sample(PROMPT, 2, SamplingParams(max_tokens=2, top_p=0.5)).result()
    path = client.save_state("cut", overwrite=True).result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    with pytest.raises(ValueError, match="top_k=-1 and top_p=1"):
        resumed.forward_backward(random_datums(2), "ppo").result()
