"""A sampler with scripted answers, instead of a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rl.types import SampledSequence, SampleResponse


def make_future(responses: list[SampleResponse]) -> Future:
    """Return what `sample_many` returns, with its result."""
    counters = {"emitted_tokens": sum(len(s.tokens) for r in responses for s in r.sequences)}
    future: Future = Future()
    future.set_result((responses, counters))
    return future


class ScriptedSampler:
    """Sample answers from `say(prompt text, turn, group's problem, member)`, the text of an answer.

    An answer ends with the tokenizer's EOS (or the token `end`), unless the text ends in "..." (cut
    off). `encode` returns the tokens of an answer, which may be any that decode to it.
    """

    def __init__(
        self,
        tokenizer,
        say: Callable[..., str],
        *,
        end: int | None = None,
        encode=None,
        max_context: int | None = 4096,
    ):
        self.tokenizer, self.say, self.info = tokenizer, say, {"max_context": max_context}
        self.end = tokenizer.eos_token_id if end is None else end
        self.encode = encode or (lambda text: tokenizer.encode(text, add_special_tokens=False))
        self.requests_seen: list[list[int]] = []
        self.turn = 0

    def sample_many(self, requests: Sequence, /):
        responses = []
        for request in requests:
            sequences = []
            for i in range(request.num_samples):
                self.requests_seen.append(list(request.prompt))
                text = self.say(
                    self.tokenizer.decode(request.prompt),
                    self.turn,
                    request.problem,
                    request.first_index + i,
                )
                cut = text.endswith("...")
                tokens = self.encode(text.removesuffix("...")) + ([] if cut else [self.end])
                sequences.append(
                    SampledSequence(
                        tokens,
                        [-0.5 - 0.001 * k for k in range(len(tokens))],
                        "length" if cut else "stop",
                    )
                )
            responses.append(SampleResponse(sequences=sequences))
        self.turn += 1
        return make_future(responses)
