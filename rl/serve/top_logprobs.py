"""Compute the most likely tokens at each sampled position, at the sampling temperature."""

from __future__ import annotations

from collections.abc import Sequence

from rl.serve.agent_sessions import AgentSession, SamplingBackend
from rl.types import SampledSequence, SamplingParams

GREEDY_TOKEN_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, stop=None)


async def compute_top_logprobs(
    session: AgentSession,
    backend: SamplingBackend,
    model: str | None,
    prompt: Sequence[int],
    sequence: SampledSequence,
    k: int,
) -> list[list[tuple[int, float]]]:
    """Return for each sampled token the k most likely (id, logprob) of the untruncated distribution
    at its temperature, most likely first.

    A second forward pass over the response gives logprobs p1 at temperature 1. Differences of
    logits equal differences of p1, and at temperature T a token's logprob is its logit / T minus a
    constant: p(j) = p(sampled) + (p1(j) - p1(sampled)) / T, with p(sampled) from sampling.
    """
    assert sequence.logprobs is not None
    whole = [*prompt, *sequence.tokens]
    response = await session.sample(
        backend,
        model,
        whole,
        1,
        GREEDY_TOKEN_PARAMS,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=k,
    )
    assert response.prompt_logprobs is not None and response.topk_prompt_logprobs is not None
    temperature = sequence.temperature or 1.0  # greedy samples have logprobs at temperature 1
    rows_by_token = []
    for i, logprob in enumerate(sequence.logprobs):
        base_logprob, rows = (
            response.prompt_logprobs[len(prompt) + i],
            response.topk_prompt_logprobs[len(prompt) + i],
        )
        assert base_logprob is not None and rows is not None
        rows_by_token.append(
            [
                (token, min(0.0, logprob + (value - base_logprob) / temperature))
                for token, value in rows
            ]
        )
    return rows_by_token
