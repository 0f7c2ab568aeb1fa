"""Read the reply of a vLLM server to a request of samples, and reject whatever is not right."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.errors import UserError
from rl.layers import ExpertLayout
from rl.types import SampledSequence

_MISSING_PARTS = "returned a sample without token ids, logprobs or weight versions"


class VllmServerError(Exception):
    """Raised if a server does not answer, or answers with an error or with wrong data.

    `rejected`: the server refuses this request, so that another attempt is useless.
    `has_wrong_weights`: it holds other weights than it was told to load. `timed_out`: it did not
    answer within the time limit.
    """

    def __init__(
        self,
        url: str,
        text: str,
        *,
        rejected: bool = False,
        has_wrong_weights: bool = False,
        timed_out: bool = False,
    ):
        super().__init__(f"the vLLM server {url} {text}")
        self.rejected, self.has_wrong_weights = rejected, has_wrong_weights
        self.timed_out = timed_out


@contextmanager
def check_form(url: str, text: str) -> Iterator[None]:
    """Raise VllmServerError with this text if the block cannot read a reply in the expected
    form.
    """
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, EOFError, OverflowError) as error:
        raise VllmServerError(url, f"{text} ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class ReplyRules:
    """Hold what the replies to a request must satisfy.

    `matches_string`: whether these tokens end with a stop string; None without stop strings.
    `experts`: of the model, if the replies hold the experts of each token. `prompt_length`: in
    tokens.
    """

    max_tokens: int
    vocab_size: int
    stop_ids: Collection[int]
    matches_string: Callable[[Sequence[int]], bool] | None = None
    experts: ExpertLayout | None = None
    prompt_length: int = 0


def read_samples(
    url: str,
    reply: Mapping[str, Any],
    count: int,
    rules: ReplyRules,
    known_versions: Mapping[str, int],
    adapter: str | None = None,
) -> list[SampledSequence]:
    """Return the `count` samples of a reply in order of their seeds. `known_versions`: version of
    the weights by their id. `adapter`: id of the adapter that sampled all tokens, also if others
    were loaded meanwhile.

    Raises VllmServerError if the reply is not complete and consistent.
    """
    with check_form(url, _MISSING_PARTS):
        choices = {int(choice["index"]): choice for choice in reply["choices"]}
        if len(reply["choices"]) != count or choices.keys() != set(range(count)):
            indices = [choice["index"] for choice in reply["choices"]]
            raise VllmServerError(
                url, f"returned {len(indices)} samples, expected {count} (numbers {indices})"
            )
    return [_read_sample(url, choices[i], rules, known_versions, adapter) for i in range(count)]


def _read_sample(
    url: str,
    choice: Mapping[str, Any],
    rules: ReplyRules,
    known_versions: Mapping[str, int],
    adapter: str | None,
) -> SampledSequence:
    with check_form(url, _MISSING_PARTS):
        tokens = list(choice["token_ids"])
        entries = choice["logprobs"]["content"]
        finish_reason = choice["finish_reason"]
        spans = [
            (str(span["version"]), int(span["start"]), int(span["end"]))
            for span in choice["weight_versions"]
        ]
        logprobs = [float(entry["logprob"]) for entry in entries]
        scored = [int(entry["token_id"]) for entry in entries]
    _check_tokens(url, tokens, scored, logprobs, rules)
    stop_reason = _check_end(url, tokens, finish_reason, rules)
    versions = _read_versions(url, spans, len(tokens), known_versions)
    if adapter is not None:
        versions = [known_versions[adapter]] * len(tokens)
    experts = None
    if rules.experts is not None:
        fed = rules.prompt_length + len(tokens) - 1
        experts = _read_experts(url, choice.get("routed_experts"), rules.experts, fed)
    return SampledSequence(
        tokens,
        logprobs,
        stop_reason,  # type: ignore[arg-type]
        version=min(versions),
        versions=versions if len(set(versions)) > 1 else None,
        experts=experts,
    )


def _read_experts(url: str, text: Any, layout: ExpertLayout, num_tokens: int) -> np.ndarray:
    """Return the experts of the tokens that were fed, int16 [tokens, layers with experts * experts
    per token]. vLLM returns those of all layers, [tokens, layers, experts per token].
    """
    layers = [int(re.findall(r"\d+", block)[0]) for block in layout.blocks]
    with check_form(url, "returned no experts of the tokens"):
        data = base64.b64decode(text, validate=True)
        experts = np.load(io.BytesIO(data), allow_pickle=False)[:, layers].astype(np.int16)
    shape = (num_tokens, len(layers), layout.per_token)
    if experts.shape != shape or not ((experts >= 0) & (experts < layout.count)).all():
        bounds = [int(experts.min()), int(experts.max())] if experts.size else []
        raise VllmServerError(
            url,
            f"returned experts of shape {experts.shape} in {bounds}, expected {shape} in "
            f"[0, {layout.count - 1}]",
        )
    return experts.reshape(num_tokens, -1)


def read_prompt_logprobs(
    url: str, reply: Mapping[str, Any], prompt: Sequence[int], topk: int = 0
) -> tuple[list[float | None], list[list[tuple[int, float]] | None]]:
    """Return the logprob of each token of a prompt, and the `topk` most likely (token, logprob) at
    each position, best first; entry 0 of both is None. Raises VllmServerError if any is missing.
    """
    logprobs: list[float | None] = [None]
    best: list[list[tuple[int, float]] | None] = [None]
    with check_form(url, "returned no logprobs of a prompt"):
        entries = reply["prompt_logprobs"][1 : len(prompt)]
        for token, entry in zip(prompt[1:], entries, strict=True):
            row = {int(other): float(value["logprob"]) for other, value in entry.items()}
            logprobs.append(row[token])
            ranked = sorted(row.items(), key=lambda item: -item[1])
            best.append(ranked[:topk])
            if len(ranked) < topk:
                raise ValueError(f"{len(ranked)} of {topk} tokens")
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
