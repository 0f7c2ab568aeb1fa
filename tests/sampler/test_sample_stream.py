"""Test a sample stream across slices: requests that join and leave, other verbs in between, and the
owner of each token.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import ADAM, random_datums
from sampler_models import one_thread, random_prompts, reference_logprobs, tiny_model  # noqa: F401

from rl import ServiceClient
from rl.client import SampleStream
from rl.sampler import Engine, SamplingRequest, make_decoder
from rl.types import ModelInput, SamplingParams

PARAMS = SamplingParams(max_tokens=9, temperature=1.0, stop=[])


def make_request(i: int, **changes) -> SamplingRequest:
    return SamplingRequest(
        **{
            "prompt": [3 + i % 5, 4, 12] + [5] * (i % 3),
            "params": PARAMS,
            "seed": 7,
            "problem": i,
            **changes,
        }
    )


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
    expected, _ = client.sample_many(
        [make_request(i, num_samples=1 + i % 3) for i in range(6)]
    ).result()
    with SampleStream(client) as stream:
        tickets = [stream.add(make_request(0)), stream.add(make_request(1, num_samples=2))]
        results = {}
        slices = 0
        while stream.busy:
            if slices and len(tickets) < 6:
                tickets.append(
                    stream.add(make_request(len(tickets), num_samples=1 + len(tickets) % 3))
                )
            slices += 1
            results |= stream.run_steps(3).finished
            client.sample_many([make_request(40)]).result()  # another verb between two slices
    assert slices > 4 and get_tokens(results[t] for t in tickets) == get_tokens(expected)
    for ticket, response in zip(tickets, expected, strict=True):
        for got, target in zip(results[ticket].sequences, response.sequences, strict=True):
            np.testing.assert_allclose(got.logprobs, target.logprobs, atol=1e-5)
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
        ticket, lengths = stream.add(make_request(0, num_samples=2)), []
        while stream.busy:
            result = stream.run_steps(4, partial_tickets=True)
            lengths.append(
                {
                    sample: len(s.tokens)
                    for sample, s in result.partial_output.get(ticket, {}).items()
                }
            )
            last = result.partial_output.get(ticket) or last  # noqa: F821
    assert lengths == [{0: 4, 1: 4}, {0: 8, 1: 8}, {}]
    assert all(
        last[i].tokens == sequence.tokens[:8]
        for i, sequence in enumerate(result.finished[ticket].sequences)
    )


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
        assert [len(r.resume_from.tokens) if r.resume_from else 0 for r in remaining.values()] == [
            5,
            5,
            0,
        ]
        stream.recompute_cache()
        here = to_the_end(stream)
    with SampleStream(client) as other:
        again = {other.add(request): ticket for ticket, request in remaining.items()}
        present = {again[ticket]: response for ticket, response in to_the_end(other).items()}
    assert (
        get_tokens(here[t] for t in tickets)
        == get_tokens(present[t] for t in tickets)
        == get_tokens(expected)
    )
    # bit for bit, because both prefill the same tokens again in the same batch
    assert [here[t].sequences[0].logprobs for t in tickets] == [
        present[t].sequences[0].logprobs for t in tickets
    ]


@pytest.mark.parametrize("kind", ["fast", "hf"])
def test_every_decoder_goes_on_where_a_sample_was_cut(kind):
    """Resumed rows run with new rows; each logprob equals that of a plain forward."""
    model = tiny_model("qwen3")
    prompts = random_prompts([5, 17, 9])
    params = SamplingParams(max_tokens=12, temperature=0.9)
    engine = Engine(make_decoder(model, kind=kind), eos_token_ids=(3,), max_rows=2)
    for problem, prompt in enumerate(prompts):
        engine.add(SamplingRequest(prompt=prompt, params=params, problem=problem))
    whole = {done.request_id: done.response for _ in range(40) for done in engine.step()}
    for problem, prompt in enumerate(prompts):
        engine.add(SamplingRequest(prompt=prompt, params=params, problem=problem))
    done = [item for _ in range(6) for item in engine.step()]
    remaining = engine.unfinished_requests()
    assert any(request.resume_from for _, request in remaining)
    other = Engine(make_decoder(model, kind=kind), eos_token_ids=(3,), max_rows=3)
    numbers = {other.add(request): number for number, request in remaining}
    while other.busy:
        done += [type(item)(numbers[item.request_id], item.response) for item in other.step()]
    for item in done:
        (sequence,), (expected,) = item.response.sequences, whole[item.request_id - 3].sequences
        assert sequence.tokens == expected.tokens and sequence.stop_reason == expected.stop_reason
        reference = reference_logprobs(model, prompts[item.request_id - 3], sequence.tokens, 0.9)
        np.testing.assert_allclose(sequence.logprobs, reference.numpy(), atol=1e-4)
    assert len(done) == 3


class ConversationDriver:
    """Conversations of several turns on an engine: each prompt extends the previous text by new
    tokens.
    """

    def __init__(self, engine, count, named=True):
        self.engine, self.named = engine, named
        self.texts = {i: [3 + i, 4, 12, *[5] * (12 + i)] for i in range(count)}
        self.drawn = {i: [] for i in range(count)}

    def turn(self, turn, only=None):
        numbers = {}
        for i, text in self.texts.items():
            if only is None or i in only:
                name = f"talk {i}" if self.named else None
                params = SamplingParams(max_tokens=4 + i, temperature=1.0, stop=[])
                numbers[
                    self.engine.add(
                        SamplingRequest(
                            prompt=text, params=params, seed=turn, problem=i, conversation=name
                        )
                    )
                ] = i
        while self.engine.busy:
            for done in self.engine.step():
                i, (sequence,) = numbers[done.request_id], done.response.sequences
                self.drawn[i].append((self.texts[i], sequence))
                self.texts[i] = [*self.texts[i], *sequence.tokens, 7, 8 + turn]


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_a_conversation_is_read_once_whatever_its_turns(path):
    """Token counts show it. Every logprob equals that of a plain forward, although the prompt was
    prefilled turn by turn.
    """
    model = tiny_model("qwen3")
    decoder = make_decoder(model, kind="fast")
    if path == "torch":
        decoder.cpu_kernels = None
    talk = ConversationDriver(Engine(decoder), 4)
    plain = ConversationDriver(Engine(decoder, enable_prefix_caching=False), 4, named=False)
    for turn in range(3):
        talk.turn(turn)
        plain.turn(turn)
    # all but the last answer token has been fed, in full chunks
    chunk = talk.engine._state.chunk_size
    cached = sum(
        (len(prompt) + len(sequence.tokens) - 1) // chunk * chunk
        for turns in talk.drawn.values()
        for prompt, sequence in turns[:-1]
    )
    assert talk.engine.counters.prefix_cached_tokens == cached > 100
    assert talk.engine.counters.prefill_tokens + cached == plain.engine.counters.prefill_tokens
    assert plain.engine.counters.prefix_cached_tokens == 0
    for i, turns in talk.drawn.items():
        for (prompt, sequence), (_, expected) in zip(turns, plain.drawn[i], strict=True):
            assert sequence.tokens == expected.tokens
            np.testing.assert_allclose(
                sequence.logprobs,
                reference_logprobs(model, prompt, sequence.tokens).numpy(),
                atol=1e-4,
            )


def test_conversations_make_room_and_are_not_taken_for_others():
    model = tiny_model("qwen3")
    tight = ConversationDriver(Engine(make_decoder(model, kind="fast"), kv_cache_tokens=100), 4)
    roomy = ConversationDriver(Engine(make_decoder(model, kind="fast")), 4, named=False)
    for turn in range(3):
        tight.turn(turn)
        roomy.turn(turn)
    assert [[s.tokens for _, s in drawn] for drawn in tight.drawn.values()] == [
        [s.tokens for _, s in d] for d in roomy.drawn.values()
    ]
    assert 0 < tight.engine.counters.peak_cache_tokens <= 100
    talk = ConversationDriver(Engine(make_decoder(model, kind="fast")), 3)
    talk.turn(0)
    talk.texts[1] = [9, *talk.texts[1][1:]]  # changed: none of it is in the cache
    before = talk.engine.counters.prefix_cached_tokens
    talk.turn(1)
    chunk, others = talk.engine._state.chunk_size, (talk.drawn[0][0], talk.drawn[2][0])
    cached = sum((len(prompt) + len(s.tokens) - 1) // chunk * chunk for prompt, s in others)
    assert talk.engine.counters.prefix_cached_tokens - before == cached > 0
    talk.turn(2)
    for prompt, sequence in (turn for turns in talk.drawn.values() for turn in turns[1:]):
        np.testing.assert_allclose(
            sequence.logprobs, reference_logprobs(model, prompt, sequence.tokens).numpy(), atol=1e-4
        )


def test_an_episode_that_is_drawn_again_goes_on_by_its_own_cache():
    """The first turn is sampled twice with the same result, so the cache has two equal entries for
    a name.
    """
    model = tiny_model("qwen3")
    talk = ConversationDriver(Engine(make_decoder(model, kind="fast")), 3)
    begun = dict(talk.texts)
    talk.turn(0)
    talk.texts = dict(begun)
    talk.turn(0)
    talk.turn(1)
    for first, again, last in talk.drawn.values():
        assert first[1].tokens == again[1].tokens
        np.testing.assert_allclose(
            last[1].logprobs,
            reference_logprobs(model, *(last[0], last[1].tokens)).numpy(),
            atol=1e-4,
        )
