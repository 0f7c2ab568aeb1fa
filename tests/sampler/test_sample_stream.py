"""Test a sample stream across slices: requests that join and leave, other verbs in between, and the
owner of each token.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import ADAM, random_datums
from sampler_models import (  # noqa: F401
    check_logprobs,
    check_same,
    one_thread,
    random_prompts,
    run_requests,
    tiny_model,
)

from rl import ServiceClient
from rl.client import SampleStream
from rl.sampler import Engine, SamplingRequest, make_decoder
from rl.types import ModelInput, SamplingParams

PARAMS = SamplingParams(max_tokens=9, temperature=1.0, stop=[])


def make_request(i: int, **changes) -> SamplingRequest:
    prompt = [3 + i % 5, 4, 12] + [5] * (i % 3)
    fields = {"prompt": prompt, "params": PARAMS, "seed": 7, "problem": i, **changes}
    return SamplingRequest(**fields)


def get_tokens(responses):
    return [[sequence.tokens for sequence in response.sequences] for response in responses]


def to_the_end(stream: SampleStream, steps: int = 4) -> dict:
    results = {}
    while stream.busy:
        results |= stream.run_steps(steps).finished
    return results


@pytest.fixture
def policy(tmp_path):
    with ServiceClient(output_dir=tmp_path / "out", seed=1) as service:
        yield service.create_full_training_client("tiny:addition", seed=1)


def test_requests_that_join_while_others_run_get_the_samples_they_would_have_got_together(policy):
    client = policy.save_weights_and_get_sampling_client()
    requests = [make_request(i, num_samples=1 + i % 3) for i in range(6)]
    expected, _ = client.sample_many(requests).result()
    with SampleStream(client) as stream:
        tickets = [stream.add(request) for request in requests[:2]]
        results, slices = {}, 0
        while stream.busy:
            if slices and len(tickets) < 6:
                tickets.append(stream.add(requests[len(tickets)]))
            slices += 1
            results |= stream.run_steps(3).finished
            client.sample_many([make_request(40)]).result()  # another verb between two slices
    assert slices > 4
    check_same([results[ticket] for ticket in tickets], expected)
    for ticket, response in zip(tickets, expected, strict=True):
        for got, target in zip(results[ticket].sequences, response.sequences, strict=True):
            assert (got.version, got.versions, got.temperature) == (target.version, None, 1.0)


def test_what_was_dropped_or_refused_costs_no_other(policy):
    client = policy.save_weights_and_get_sampling_client()
    expected, _ = client.sample_many([make_request(1)]).result()
    with SampleStream(client) as stream:
        gone = stream.add(make_request(0, num_samples=3))
        stays = stream.add(make_request(1))
        wrong = stream.add(make_request(2, prompt=[99]))
        early = stream.add(make_request(3))
        stream.drop(early)  # before it was admitted
        assert isinstance(stream.run_steps(2).finished[wrong], ValueError)
        stream.drop(gone)
        stream.drop(gone)
        actual = to_the_end(stream)
    assert set(actual) == {stays} and get_tokens([actual[stays]]) == get_tokens(expected)


def test_a_slice_shows_what_is_drawn_so_far(policy):
    with SampleStream(policy.save_weights_and_get_sampling_client()) as stream:
        ticket, partial = stream.add(make_request(0, num_samples=2)), []
        while stream.busy:
            result = stream.run_steps(4, partial_tickets=True)
            samples = result.partial_output.get(ticket, {})
            partial.append({sample: s.tokens for sample, s in samples.items()})
    whole = [sequence.tokens for sequence in result.finished[ticket].sequences]
    assert partial == [{i: whole[i][:n] for i in range(2)} for n in (4, 8)] + [{}]


@pytest.mark.parametrize("restarted", [False, True])
def test_new_weights_reach_running_samples_at_a_token_and_each_token_says_which_drew_it(
    policy, restarted
):
    datums = random_datums(4, seed=3)
    old = policy.save_weights_and_get_sampling_client()
    v = old.version
    with SampleStream(old) as stream:
        tickets = [stream.add(make_request(i)) for i in range(3)]
        stream.run_steps(4)
        policy.forward_backward(datums, "importance_sampling")
        policy.optim_step(ADAM.__class__(learning_rate=0.05)).result()
        new = policy.save_weights_and_get_sampling_client()
        stream.switch_weights(new, recompute=restarted)
        # the same prompt, which the new weights prefill again
        late = stream.add(make_request(0, problem=50))
        actual = to_the_end(stream)
    for ticket in tickets:
        (sequence,) = actual[ticket].sequences
        assert sequence.versions == [v] * 4 + [v + 1] * 5 and sequence.version == v
        whole = ModelInput.from_ints([*make_request(ticket).prompt, *sequence.tokens])
        # Each token's logprob is that of the weights of its version (if these weights computed the
        # whole cache).
        before, after = (np.array(c.compute_logprobs(whole).result()[-9:]) for c in (old, new))
        np.testing.assert_allclose(sequence.logprobs[:4], before[:4], atol=1e-5)
        assert np.abs(before - after).max() > 1e-2
        assert (np.abs(np.array(sequence.logprobs[4:]) - after[4:]).max() < 1e-5) == restarted
    (fresh,) = actual[late].sequences
    expected, _ = new.sample_many([make_request(0, problem=50)]).result()
    assert get_tokens([actual[late]]) == get_tokens(expected)
    assert (fresh.version, fresh.versions) == (v + 1, None)


def test_a_stream_whose_weights_are_gone_says_so_instead_of_drawing_under_a_stale_label(policy):
    """The learner loads its next weights into a released sampler. Slices of the old version must
    not run on them.
    """
    client = policy.save_weights_and_get_sampling_client()
    with SampleStream(client) as stream:
        stream.add(make_request(0))
        stream.run_steps(2)
        client.release()
        policy.save_weights_and_get_sampling_client()
        with pytest.raises(Exception, match=r"weights have been freed"):
            stream.run_steps(2)


def test_what_is_unfinished_goes_on_in_another_stream_as_it_would_have(policy):
    client = policy.save_weights_and_get_sampling_client()
    expected, _ = client.sample_many([make_request(i) for i in range(3)]).result()
    with SampleStream(client) as stream:
        tickets = [stream.add(make_request(i)) for i in range(2)]
        stream.run_steps(5)
        tickets.append(stream.add(make_request(2)))
        remaining = stream.unfinished()
        begun = [len(r.resume_from.tokens) if r.resume_from else 0 for r in remaining.values()]
        assert begun == [5, 5, 0]
        stream.recompute_cache()
        results = to_the_end(stream)
        here = [results[ticket] for ticket in tickets]
    with SampleStream(client) as other:
        again = {ticket: other.add(request) for ticket, request in remaining.items()}
        results = to_the_end(other)
        there = [results[again[ticket]] for ticket in tickets]
    assert get_tokens(here) == get_tokens(there) == get_tokens(expected)
    # bit for bit, because both prefill the same tokens again in the same batch
    assert [r.sequences[0].logprobs for r in here] == [r.sequences[0].logprobs for r in there]


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_every_decoder_goes_on_where_a_sample_was_cut(kind):
    """Resumed rows run with new rows; each logprob equals that of a plain forward."""
    model = tiny_model("qwen3")
    decoder, params = make_decoder(model, kind=kind), SamplingParams(max_tokens=12, temperature=0.9)
    requests = [
        SamplingRequest(prompt=prompt, params=params, problem=problem)
        for problem, prompt in enumerate(random_prompts([5, 17, 9]))
    ]
    expected = run_requests(Engine(decoder, eos_token_ids=(3,), max_rows=2), requests)
    engine = Engine(decoder, eos_token_ids=(3,), max_rows=2)
    for request in requests:
        engine.add(request)
    done = {item.request_id: item.response for _ in range(6) for item in engine.step()}
    remaining = engine.unfinished_requests()
    assert any(request.resume_from for _, request in remaining)
    other = Engine(decoder, eos_token_ids=(3,), max_rows=3)
    resumed = run_requests(other, [request for _, request in remaining])
    done |= {number: response for (number, _), response in zip(remaining, resumed, strict=True)}
    check_same([done[i] for i in range(3)], expected, 1e-4)
    for i, request in enumerate(requests):
        check_logprobs(model, request.prompt, done[i].sequences[0], 0.9)
