"""The likeliest tokens beside each one that was drawn, at the temperature that it was drawn at."""

from __future__ import annotations

from collections.abc import Sequence

from rl.serve.episodes import Desk, Session
from rl.types import SampledSequence, SamplingParams

GREEDY_ONE = SamplingParams(max_tokens=1, temperature=0.0, stop=None)


async def top_logprobs(
    session: Session,
    desk: Desk,
    model: str | None,
    prompt: Sequence[int],
    sequence: SampledSequence,
    k: int,
) -> list[list[tuple[int, float]]]:
    """For each drawn token the k likeliest (id, logprob) of the untruncated distribution at its
    temperature, the likeliest first.

    The answer is read once more, which gives logprobs p1 at temperature 1. Logits differ as these
    do, and at temperature T a token's logprob is its logit / T less what is the same for all: p(j)
    = p(drawn) + (p1(j) - p1(drawn)) / T, with p(drawn) as it was drawn.
    """
    assert sequence.logprobs is not None
    whole = [*prompt, *sequence.tokens]
    read = await session.draw(
        desk, model, whole, 1, GREEDY_ONE, include_prompt_logprobs=True, topk_prompt_logprobs=k
    )
    assert read.prompt_logprobs is not None and read.topk_prompt_logprobs is not None
    temperature = sequence.temperature or 1.0  # greedy samples carry logprobs at 1
    found = []
    for i, logprob in enumerate(sequence.logprobs):
        at_one, rows = (
            read.prompt_logprobs[len(prompt) + i],
            read.topk_prompt_logprobs[len(prompt) + i],
        )
        assert at_one is not None and rows is not None
        found.append(
            [(token, min(0.0, logprob + (value - at_one) / temperature)) for token, value in rows]
        )
    return found
