"""Define built-in rewards on the form of an answer: repetition, length by correctness, script,
language.
"""

from __future__ import annotations

import functools
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl.errors import UserError
from rl.rewards.reward_calls import CombinedReward, Meta, RewardItem, RewardResult
from rl.rewards.reward_registry import Reward, register_reward, resolve_reward
from rl.rewards.text import check_unit, measure_length

# Maximum number of letters or tokens examined: a reward in the trainer's process must end within
# milliseconds.
_MAX_LETTERS = 20_000


@register_reward("repetition", bounded=True)
class RepetitionReward:
    """Score -scale * share of n-grams that repeat an earlier n-gram of the answer.

    0 without repetition, nearly -scale for a loop. The n-grams consist of `n` words (letter case is
    ignored) or characters; an answer shorter than an n-gram has none. Metric `repetition`: the
    share.
    """

    def __init__(
        self, *, n: int = 3, scale: float = 1.0, unit: Literal["words", "characters"] = "words"
    ):
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 100:
            raise UserError(f"repetition: n is a whole number from 1 to 100, got {n!r}")
        if not scale >= 0:
            raise UserError(
                f"repetition: scale is at least 0 (the reward is its negative), got {scale}"
            )
        check_unit("repetition", unit)
        self.n, self.scale, self.unit = n, scale, unit

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> RewardResult:
        pieces: Sequence[str] = (response.lower().split() if self.unit == "words" else response)[
            :_MAX_LETTERS
        ]
        count = max(0, len(pieces) - self.n + 1)
        distinct = {tuple(pieces[i : i + self.n]) for i in range(count)}
        share = 1 - len(distinct) / count if count else 0.0
        return RewardResult(-self.scale * share if share else 0.0, {"repetition": share})


@register_reward("cosine_length")
@dataclass(kw_only=True, eq=False)
class CosineLengthReward(CombinedReward):
    """Reward length by correctness (Yeo et al., arXiv 2502.03373, section 4.2, also the source of
    the defaults).

    If `reward` is at least `threshold`, the result goes from `right` at length 0 to `right_long`,
    else from `wrong` to `wrong_long`, along half a cosine up to `max_length`. Longer answers get
    `too_long`. Correct answers should be short; wrong answers may need more reasoning. The length
    is in words or characters; for tokens, see overlong_share.
    """

    max_length: int
    reward: str = "exact_match"
    settings: Mapping[str, Any] | None = None
    threshold: float = 1.0
    unit: Literal["words", "characters"] = "words"
    right: float = 2.0
    right_long: float = 1.0
    wrong: float = -10.0
    wrong_long: float = 0.0
    too_long: float = -10.0

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise UserError(f"cosine_length: max_length is at least 1, got {self.max_length}")
        check_unit("cosine_length", self.unit)
        self.part = resolve_reward(self.reward, **(self.settings or {}))

    def part_rewards(self) -> list[Reward]:
        return [self.part]

    def combine_results(self, item: RewardItem, results: Sequence[RewardResult]) -> RewardResult:
        response, (inner,) = item[1], results
        length = measure_length(response, self.unit)
        is_right = inner.reward >= self.threshold
        short, long = (self.right, self.right_long) if is_right else (self.wrong, self.wrong_long)
        shaped = long + (short - long) * (1 + math.cos(math.pi * length / self.max_length)) / 2
        metrics = {self.part.short_name: inner.reward, **inner.metrics, "length": float(length)}
        return RewardResult(
            self.too_long if length >= self.max_length else shaped, metrics, inner.seconds
        )


@functools.lru_cache(maxsize=1 << 17)
def _get_script(letter: str) -> str:
    """Return the script of a letter, the first word of its Unicode name: latin, cyrillic, cjk,
    hiragana, ...

    Return "" for any other character.
    """
    return unicodedata.name(letter, "").partition(" ")[0].lower() if letter.isalpha() else ""


@functools.cache
def _list_scripts() -> frozenset[str]:
    return frozenset(_get_script(chr(code)) for code in range(0x20000))


_SCRIPT_ALIASES = {"han": "cjk", "chinese": "cjk", "korean": "hangul"}


@register_reward("script", bounded=True)
class ScriptReward:
    """Score the share of the answer's letters in `script`.

    `script`: latin, cyrillic, greek, arabic, cjk, hangul, ..., or a list of these. An answer
    without letters (a number) gets `without`. Metric `script`: the share.
    """

    def __init__(self, *, script: str | Sequence[str], without: float = 1.0):
        names = [script] if isinstance(script, str) else list(script)
        scripts = {_SCRIPT_ALIASES.get(name.lower(), name.lower()) for name in names}
        unknown = sorted(scripts - _list_scripts())
        if not scripts or unknown:
            raise UserError(
                f"script: unknown script {unknown or names}; scripts are latin, cyrillic, "
                "greek, cjk and others"
            )
        self.scripts, self.without = scripts, without

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> RewardResult:
        scripts = [script for letter in response[:_MAX_LETTERS] if (script := _get_script(letter))]
        share = (
            sum(script in self.scripts for script in scripts) / len(scripts)
            if scripts
            else self.without
        )
        return RewardResult(share, {"script": share})


@register_reward("language", needs=("py3langid",))
class LanguageReward:
    """Score the probability that the answer is in `language`, according to the library py3langid.

    `language`: an ISO 639-1 code (en, de, zh, ...); without it, the language of the prompt.
    Detection is unreliable for short texts; `script` needs no library.
    """

    def __init__(self, *, language: str | None = None):
        if language is not None and not (
            isinstance(language, str) and len(language) == 2 and language.isalpha()
        ):
            raise UserError(
                f"language: expected a code of two letters such as en or de, got {language!r}"
            )
        self.language = language.lower() if language else None

    def __call__(self, prompt: str, response: str, meta: Meta = None) -> RewardResult:
        ranked = dict(rank_languages(response))
        language = self.language or rank_languages(prompt)[0][0]
        if language not in ranked:
            raise UserError(
                f"py3langid does not know the language {language!r}, it knows "
                f"{', '.join(sorted(ranked))}"
            )
        share = float(ranked[language])
        return RewardResult(share, {"language": share})


def rank_languages(text: str) -> list[tuple[str, float]]:
    """Return the languages that py3langid knows with their probabilities, the most probable
    first.
    """
    return _load_identifier().rank(text)


@functools.cache
def _load_identifier() -> Any:
    """Return py3langid's model, with scores normalized to probabilities."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_pickled_model(MODEL_FILE, norm_probs=True)
