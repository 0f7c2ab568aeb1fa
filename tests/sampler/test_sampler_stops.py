"""Test the end of a response: the meaning of `stop`, and stop strings against decoding the whole
text at every token.
"""

import numpy as np
import pytest
import torch
from sampler_models import VOCAB, tiny_model

from rl.sampler import (
    Engine,
    SamplingRequest,
    StopStringMatcher,
    build_stop_condition,
    make_decoder,
)
from rl.sampler.stop_conditions import StopTable
from rl.types import SamplingParams

TOKENIZERS = ["qwen2.5", "gpt2", "minimind_6400"]


def load_tokenizer(path):
    from transformers import AutoTokenizer, GPT2TokenizerFast

    return (GPT2TokenizerFast if path.name == "gpt2" else AutoTokenizer).from_pretrained(path)


def test_meaning_of_stop():
    eos = (2, 5)
    assert build_stop_condition(None, eos).token_ids == {2, 5}
    assert build_stop_condition([], eos).token_ids == frozenset()
    assert build_stop_condition([], eos).strings == ()
    assert build_stop_condition("end", eos).token_ids == {2, 5}
    assert build_stop_condition("end", eos).strings == ("end",)
    assert build_stop_condition([7, 9], eos).token_ids == {2, 5, 7, 9}
    with pytest.raises(ValueError, match="empty string"):
        build_stop_condition(["a", ""], eos)


def test_table_looks_up_rows_of_tokens_and_shares_equal_sets():
    table = StopTable(10)
    first = table.row_of(frozenset({2, 4}), set)
    none = table.row_of(frozenset(), lambda: {first})
    assert table.row_of(frozenset({4, 2}), lambda: {first, none}) == first != none
    tokens = np.array([2, 4, 5, 2])
    assert table.table[np.array([first, first, first, none]), tokens].tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_every_id_of_the_vocabulary_can_stop():
    """Includes the first and the last id, as a stop of the model and of the caller. Ids outside the
    vocabulary stop nothing.
    """
    table = StopTable(6)
    for token in range(6):
        for row in (
            table.row_of(build_stop_condition([token], ()).token_ids, set),
            table.row_of(build_stop_condition(None, (token, 6, 99)).token_ids, set),
        ):
            assert np.flatnonzero(table.table[row]).tolist() == [token]


def test_the_table_does_not_grow_with_the_stops_of_finished_requests(shared_data):
    """Each request has a stop string and a stop id of its own, and overlaps with the next."""
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "minimind_6400")
    engine, finished = Engine(make_decoder(tiny_model("llama")), (1,), tokenizer), []
    for i in range(40):
        params = SamplingParams(
            max_tokens=4 + i % 3, temperature=1.0, stop=[f"stop {i}", i % VOCAB]
        )
        engine.add(SamplingRequest(prompt=[5, 6], params=params, seed=i))
        finished += engine.step()
    while engine.busy:
        finished += engine.step()
    assert len(finished) == 40
    for done in finished:
        (sequence,) = done.result().sequences
        ends = {1, done.request_id % VOCAB}
        assert (sequence.tokens[-1] in ends) == (sequence.stop_reason == "stop")
        assert not ends & set(sequence.tokens[:-1])
    assert len(engine._stops.table) <= 8, "a row for each request that has ever been served"
    assert len(engine._stop_strings._completing) <= 256


def first_hit_by_full_decoding(tokenizer, strings, tokens) -> int | None:
    """Return the number of tokens after which the decoded text contains a stop string."""
    for n in range(1, len(tokens) + 1):
        text = tokenizer.decode(
            tokens[:n], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if any(string in text for string in strings):
            return n
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_equal_full_decoding(shared_data, name):
    tokenizer = load_tokenizer(shared_data / "tokenizers" / name)
    text = (
        "The answer is 42.\n\nUser: then 7 and 8, über naïve 日本語 🙂🙂 end   of </answer> text\n"
        "Observation: done ."
    )
    streams = [tokenizer.encode(text)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):  # random ids: partial characters, odd spaces, special tokens
        streams.append(torch.randint(0, len(tokenizer), (40,), generator=generator).tolist())
    # Character by character, so that a stop string spans many tokens.
    streams.append(
        [token for character in "so </answer>\n\nUser: x" for token in tokenizer.encode(character)]
    )
    conditions: list[tuple[str, ...]] = [
        ("</answer>",),
        ("\n\nUser:",),
        ("日本", "zzz"),
        ("🙂🙂",),
        ("   ",),
        (" .",),
        (" ",),
    ]
    conditions.append(("e", "t"))
    hits = 0
    for tokens in streams:
        for strings in conditions:
            finder = StopStringMatcher(tokenizer)
            array = np.array(tokens)
            result = next(
                (n for n in range(1, len(tokens) + 1) if finder.matches(strings, array[:n])), None
            )
            expected = first_hit_by_full_decoding(tokenizer, strings, tokens)
            assert result == expected, (strings, tokens)
            hits += expected is not None
    assert hits > 15  # the comparison is not vacuous


def test_the_cost_does_not_grow_with_the_response(shared_data):
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "minimind_6400")
    finder = StopStringMatcher(tokenizer)
    decoded: list[int] = []
    plain = finder.decode

    def counting(tokens):
        decoded.append(len(tokens))
        return plain(tokens)

    finder.decode = counting  # type: ignore[method-assign]
    tokens = np.array(tokenizer.encode("a b c d e > f ") * 60)
    for n in range(1, len(tokens) + 1):
        assert not finder.matches(("</answer>",), tokens[:n])
    assert max(decoded) <= 4 * len("</answer>")
