"""Read the reply of a vLLM server to a request of one sample, and reject whatever is not right."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.types import SampledSequence
from rl.vllm.vllm_server import VllmServerError


@dataclass(frozen=True)
class ReplyRules:
    """Hold what the replies to a request must satisfy.

    `matches_string`: whether these tokens end with a stop string; None without stop strings.
    """

    max_tokens: int
    vocab_size: int
    stop_ids: Collection[int]
    matches_string: Callable[[Sequence[int]], bool] | None = None


def read_sample(
    url: str, reply: Mapping[str, Any], rules: ReplyRules, known_versions: Mapping[str, int]
) -> SampledSequence:
    """Return the sample of a reply. `known_versions`: version of the weights by their id.

    Raises VllmServerError if the reply is not complete and consistent.
    """
    try:
        choices = reply["choices"]
        if len(choices) != 1:
            raise VllmServerError(url, f"returned {len(choices)} samples, 1 was requested")
        choice = choices[0]
        tokens = list(choice["token_ids"])
        entries = choice["logprobs"]["content"]
        finish_reason = choice["finish_reason"]
        spans = [
            (str(span["version"]), int(span["start"]), int(span["end"]))
            for span in choice["weight_versions"]
        ]
        logprobs = [float(entry["logprob"]) for entry in entries]
        scored = [int(entry["token_id"]) for entry in entries]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise VllmServerError(
            url,
            "returned a sample without token ids, logprobs or weight versions "
            f"({type(error).__name__}: {error})",
        ) from error
    _check_tokens(url, tokens, scored, logprobs, rules)
    stop_reason = _check_end(url, tokens, finish_reason, rules)
    versions = _read_versions(url, spans, len(tokens), known_versions)
    return SampledSequence(
        tokens,
        logprobs,
        stop_reason,  # type: ignore[arg-type]
        version=min(versions),
        versions=versions if len(set(versions)) > 1 else None,
    )


def read_prompt_logprobs(
    url: str, reply: Mapping[str, Any], prompt: Sequence[int], topk: int = 0
) -> tuple[list[float | None], list[list[tuple[int, float]] | None]]:
    """Return the logprob of each token of a prompt, and the `topk` most likely (token, logprob) at
    each position, best first; entry 0 of both is None. Raises VllmServerError if any is missing.
    """
    logprobs: list[float | None] = [None]
    best: list[list[tuple[int, float]] | None] = [None]
    try:
        entries = reply["prompt_logprobs"][1 : len(prompt)]
        for token, entry in zip(prompt[1:], entries, strict=True):
            row = {int(other): float(value["logprob"]) for other, value in entry.items()}
            logprobs.append(row[token])
            ranked = sorted(row.items(), key=lambda item: -item[1])
            best.append(ranked[:topk])
            if len(ranked) < topk:
                raise ValueError(f"{len(ranked)} of {topk} tokens")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise VllmServerError(
            url, f"returned no logprobs of a prompt ({type(error).__name__}: {error})"
        ) from error
    return logprobs, best


def _check_tokens(
    url: str, tokens: list[Any], scored: list[int], logprobs: list[float], rules: ReplyRules
) -> None:
    if not 1 <= len(tokens) <= rules.max_tokens:
        raise VllmServerError(
            url, f"returned {len(tokens)} tokens, expected 1 to {rules.max_tokens}"
        )
    outside = [t for t in tokens if type(t) is not int or not 0 <= t < rules.vocab_size]
    if outside:
        raise VllmServerError(
            url, f"returned the token {outside[0]!r}, outside [0, {rules.vocab_size})"
        )
    if scored != tokens:
        raise VllmServerError(
            url,
            f"returned logprobs of other tokens ({len(scored)}: {scored[:8]}) than the sampled "
            f"({len(tokens)}: {tokens[:8]})",
        )
    bad = [logprob for logprob in logprobs if not -math.inf < logprob <= 1e-3]
    if bad:
        raise VllmServerError(url, f"returned the logprob {bad[0]}")


def _check_end(url: str, tokens: list[int], finish_reason: Any, rules: ReplyRules) -> str:
    """Return "stop" or "length". Raises VllmServerError if the sample does not end as reported."""
    stopped = tokens[-1] in rules.stop_ids or (
        rules.matches_string is not None and rules.matches_string(tokens)
    )
    if any(token in rules.stop_ids for token in tokens[:-1]):
        raise VllmServerError(url, "continued a sample after a stop token")
    if finish_reason == "stop" and stopped:
        return "stop"
    if finish_reason == "length" and len(tokens) == rules.max_tokens:
        return "stop" if stopped else "length"
    raise VllmServerError(
        url,
        f"returned a truncated sample: finish_reason {finish_reason!r} after {len(tokens)} of "
        f"{rules.max_tokens} tokens, the last is {tokens[-1]}",
    )


def _read_versions(
    url: str, spans: list[tuple[str, int, int]], length: int, known_versions: Mapping[str, int]
) -> list[int]:
    """Return the version of the weights of each token."""
    versions: list[int] = []
    for name, start, end in spans:
        if name not in known_versions:
            raise VllmServerError(
                url,
                f"sampled with the weights {name!r}, expected {list(known_versions)[-1]!r}: it was "
                "restarted, or another run has changed its weights",
            )
        if start != len(versions) or end < start:
            break
        versions += [known_versions[name]] * (end - start)
    if len(versions) != length:
        raise VllmServerError(url, f"returned weight versions {spans} of {length} tokens")
    return versions
