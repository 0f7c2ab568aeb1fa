"""Define built-in rewards on text: exact match, keywords, length, format, and weighted sums."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsFloat

from rl.errors import UserError
from rl.rewards.reward_calls import CombinedReward, Meta, RewardItem, RewardPartError, RewardResult
from rl.rewards.reward_registry import Reward, register_reward, resolve_reward


def expected_answer(meta: Meta) -> str:
    """Return meta["answer"], or meta["expected_answer"], as text.

    Raises UserError if the problem has neither.
    """
    for key in ("answer", "expected_answer"):
        if meta is not None and meta.get(key) is not None:
            return str(meta[key]).strip()
    keys = sorted(meta) if meta is not None else None
    raise UserError(
        "the problem has no expected answer: meta needs 'answer' (or 'expected_answer'), it "
        f"has {keys}"
    )


def check_unit(reward: str, unit: str) -> None:
    """Raise UserError unless `unit` is a unit of an answer's length."""
    if unit not in ("words", "characters"):
        raise UserError(f"{reward}: unit is 'words' or 'characters', got {unit!r}")


def measure_length(response: str, unit: str) -> int:
    return len(response.split()) if unit == "words" else len(response)


@register_reward("exact_match", bounded=True)
def exact_match(prompt: str, response: str, meta: Meta = None) -> RewardResult:
    """Return 1 if the response, stripped of white space, equals meta["answer"], else 0."""
    correct = float(response.strip() == expected_answer(meta))
    return RewardResult(correct, {"correct": correct})


@register_reward("keyword_contains", bounded=True)
class KeywordContains:
    """Score the share of `keywords` that the response contains as substrings.

    Letter case counts only if `case_sensitive`.
    """

    def __init__(self, *, keywords: Sequence[str], case_sensitive: bool = False):
        if (
            isinstance(keywords, str)
            or not keywords
            or not all(isinstance(word, str) and word for word in keywords)
        ):
            raise UserError(
                "keyword_contains: keywords is a list of at least 1 non-empty string, got "
                f"{keywords!r}"
            )
        self.case_sensitive = case_sensitive
        self.keywords = [word if case_sensitive else word.lower() for word in keywords]

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> float:
        text = response if self.case_sensitive else response.lower()
        return sum(word in text for word in self.keywords) / len(self.keywords)


@register_reward("length_penalty", bounded=True)
class LengthPenalty:
    """Score -penalty_scale * |length - target_length|, at most 0; the length in words or
    characters.
    """

    def __init__(
        self,
        *,
        target_length: int,
        penalty_scale: float = 0.01,
        unit: Literal["words", "characters"] = "words",
    ):
        if not isinstance(target_length, int | float) or target_length < 0:
            raise UserError(
                f"length_penalty: target_length is a number of at least 0, got {target_length!r}"
            )
        if not penalty_scale >= 0:
            raise UserError(
                "length_penalty: penalty_scale is at least 0 (the reward is its negative), "
                f"got {penalty_scale}"
            )
        check_unit("length_penalty", unit)
        self.target_length, self.penalty_scale, self.unit = target_length, penalty_scale, unit

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> RewardResult:
        length = measure_length(response, self.unit)
        return RewardResult(
            -self.penalty_scale * abs(length - self.target_length), {"length": float(length)}
        )


_FENCE = "```"


def parse_json(response: str, tag: str) -> tuple[Any] | None:
    """Return the value of a response that is JSON, optionally in a code fence whose tag matches the
    pattern `tag`; None for any other text.
    """
    text = response.strip()
    if text.startswith(_FENCE) and text.endswith(_FENCE) and len(text) > 2 * len(_FENCE):
        text = re.sub(rf"\A{tag}", "", text[len(_FENCE) : -len(_FENCE)])
    try:
        return (json_module.loads(text),)
    except (ValueError, RecursionError):
        return None


def _is_numbered_list(response: str) -> bool:
    """Return whether at least two lines begin "1.", "2.", ... (or "1)"), in order from 1."""
    numbers = [
        int(number)
        for number in re.findall(r"^[ \t]*(\d{1,6})[.)][ \t]+\S", response, re.MULTILINE)
    ]
    return len(numbers) >= 2 and numbers == list(range(1, len(numbers) + 1))


@register_reward("format_compliance")  # not bounded: a pattern may backtrack without end
class FormatCompliance:
    """Score the share of checks that hold.

    Checks: each regular expression of `patterns` matches (^ and $ match at lines), the response is
    JSON (`json`), it is a numbered list from 1 (`numbered_list`). Metric `format`: 1 if all hold.
    """

    def __init__(
        self, *, patterns: Sequence[str] = (), json: bool = False, numbered_list: bool = False
    ):
        if isinstance(patterns, str):
            patterns = [patterns]
        try:
            self.patterns = [re.compile(pattern, re.MULTILINE) for pattern in patterns]
        except re.error as error:
            raise UserError(
                f"format_compliance: {error.pattern!r} is not a regular expression: {error}"
            ) from error
        self.json, self.numbered_list = json, numbered_list
        if not (self.patterns or json or numbered_list):
            raise UserError(
                "format_compliance has nothing to check: pass patterns=[...], json=True or "
                "numbered_list=True"
            )

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> RewardResult:
        checks = [pattern.search(response) is not None for pattern in self.patterns]
        if self.json:
            value = parse_json(response, "json")
            checks.append(value is not None and isinstance(value[0], (dict, list)))
        if self.numbered_list:
            checks.append(_is_numbered_list(response))
        return RewardResult(sum(checks) / len(checks), {"format": float(all(checks))})


@register_reward("composite")
class CompositeReward(CombinedReward):
    """Score the sum of weight * reward over `weights` {spec: weight}.

    `settings` {spec: {...}} holds the settings of each part. Metrics: each part's reward under its
    name, and the part's metrics under their names (prefixed with the part's name if two parts
    collide). If a part fails, the whole fails and the error names the part. A part that returns
    None does not apply: the sum is over the others.
    """

    skips_not_applicable = True

    def __init__(
        self,
        *,
        weights: Mapping[str, float],
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        settings = settings or {}
        if (
            not isinstance(weights, Mapping)
            or not weights
            or not all(isinstance(weight, SupportsFloat) for weight in weights.values())
        ):
            raise UserError(
                "composite: weights is {reward: weight} with at least one reward, each weight a "
                f"number, got {weights!r}"
            )
        stray = sorted(set(settings) - set(weights))
        if stray:
            raise UserError(
                f"composite: settings for {stray}, which weights does not name ({sorted(weights)})"
            )
        self.parts = [
            (resolve_reward(spec, **settings.get(spec, {})), float(weight))
            for spec, weight in weights.items()
        ]

    def part_rewards(self) -> list[Reward]:
        return [part for part, _ in self.parts]

    def combine_results(
        self, item: RewardItem, results: Sequence[RewardResult | None]
    ) -> RewardResult:
        total = 0.0
        metrics: dict[str, float] = {}
        seconds: dict[str, float] = {}
        if all(result is None for result in results):
            raise RewardPartError("in all of its parts: each returned None, not applicable")
        for (part, weight), result in zip(self.parts, results, strict=True):
            if result is None:
                continue
            total += weight * result.reward
            seconds |= result.seconds
            for key, value in {part.short_name: result.reward, **result.metrics}.items():
                while key in metrics:
                    key = f"{part.short_name}/{key}"
                metrics[key] = value
        return RewardResult(total, metrics, seconds)
