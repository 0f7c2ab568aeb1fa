"""The fields of a request: what is taken, what is taken only where it asks for nothing, and how the
rest is refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.settings import nearest
from rl.types import SamplingParams

MOST_CHOICES = 1024  # of one request
MOST_STOPS = 64
MOST_TOP_LOGPROBS = 20
MOST_BIASES = 1024  # OpenAI's


class Refused(Exception):
    """A request that is not served. `status`, `param`, `code`, `kind`: as OpenAI's errors have them
    (`kind` is their "type").

    `retry_after`: seconds after which it may be.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        kind: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.retry_after = retry_after
        self.message, self.param, self.status, self.code = message, param, status, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def as_json(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


# Fields that change no answer: labels, and hints of how to store or bill it.
LABELS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "request_id",
    "priority",
)

# Fields that are taken where they ask for nothing; every other value is refused by name.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}


# Why such fields are refused, where there is more to say than that they are.
_FREE = "what the model writes is not constrained to a grammar here; ask for the form in the messages, and check what comes"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "guided_choice",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "response_format",
            "structured_outputs",
        ),
        _FREE,
    ),
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty", "repetition_penalty"),
        "each token is drawn from the model's own distribution, whatever was drawn before; logit_bias changes that of single tokens",
    ),
}


class Fields:
    """A request's body, read field by field; `close` refuses what was not read. Errors name the
    field.
    """

    def __init__(self, body: Any, place: str = ""):
        if not isinstance(body, Mapping):
            raise Refused(f"the body is a JSON object, got {type(body).__name__}")
        self.body, self.place = body, place
        self.known: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value, `default` where it is missing or null."""
        self.known.add(name)
        value = self.body.get(name)
        return default if value is None else value

    def switch(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def whole(self, name: str, default: int | None, least: int, most: int) -> int | None:
        value = self.get(name, default)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not least <= value <= most
            or value != math.floor(value)
        ):
            raise self.wrong(name, value, f"a whole number from {least} to {most}")
        return int(value)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self.get(name, default)
        # NaN compares false
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not least <= value <= most
        ):
            raise self.wrong(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def close(self) -> None:
        """Refuses every field that nobody asked for, unless it is a label or says what would happen
        anyway.
        """
        for name, value in self.body.items():
            if name in self.known or name in LABELS or value is None:
                continue
            if name in NEUTRAL:
                if any(
                    value == fine and isinstance(value, bool) == isinstance(fine, bool)
                    for fine in NEUTRAL[name]
                ):
                    continue
                fine = " or ".join(repr(one) for one in NEUTRAL[name]) or "null"
                why = f", for {REASONS[name]}" if name in REASONS else ""
                text = f"{self.place}{name}={_short(value)} is not supported here{why}: leave it out (or give {fine})"
                raise Refused(text, self.place + name)
            near = nearest(name, {*self.known, *NEUTRAL})
            hint = f"; did you mean {near!r}?" if near else ""
            raise Refused(
                f"unknown parameter: {self.place + name!r}{hint}",
                self.place + name,
                code="unknown_parameter",
            )

    def wrong(self, name: str, value: Any, wanted: str) -> Refused:
        return Refused(f"{self.place}{name} is {wanted}, got {_short(value)}", self.place + name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def sampling_params(
    fields: Fields, max_tokens: int | None, *, own_stops: Sequence[str | int] = ()
) -> SamplingParams:
    """How tokens are drawn: temperature, top_p, top_k, min_p, logit_bias, min_tokens, ignore_eos,
    seed, stop, stop_token_ids.

    `own_stops`: what ends an answer anyway. Logprobs are of the whole distribution at the
    temperature, before a bias, and whatever top_p, top_k and min_p cut off it.
    """
    temperature = fields.number("temperature", 1.0, 0.0, 100.0)
    if 0 < temperature < 1e-3:
        raise fields.wrong("temperature", temperature, "0 (greedy) or at least 0.001")
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise fields.wrong("top_p", top_p, "above 0 and at most 1")
    top_k = fields.whole("top_k", -1, -1, 2**31 - 1) or -1  # 0 is how some say "no truncation"
    min_p = fields.number("min_p", 0.0, 0.0, 1.0)
    min_tokens = fields.whole("min_tokens", 0, 0, 2**31 - 1) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise fields.wrong("min_tokens", min_tokens, f"at most max_tokens ({max_tokens})")
    seed = fields.whole("seed", None, -(2**63), 2**63 - 1)
    stop = [*own_stops, *_stops(fields)]
    if min_tokens and any(isinstance(one, str) for one in stop):
        texts = [one for one in stop if isinstance(one, str)]
        raise Refused(
            f"{fields.place}min_tokens is not supported beside stop texts ({_short(texts)}): it keeps tokens from being drawn, and a text "
            "may be spelt by any; give stop_token_ids, or leave it out",
            fields.place + "min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        seed=None if seed is None else seed % 2**63,
        stop=stop or None,  # type: ignore[arg-type]  # the sampler takes texts and ids mixed
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        untruncated_logprobs=True,
        min_p=min_p,
        logit_bias=_bias(fields),
        min_tokens=min_tokens,
        ignore_eos=fields.switch("ignore_eos"),
    )


def _bias(fields: Fields) -> dict[int, float] | None:
    """logit_bias: token ids, as JSON spells keys, and what is added to their logits."""
    given, wanted = (
        fields.get("logit_bias", {}),
        f"an object of at most {MOST_BIASES} token ids with numbers from -100 to 100",
    )
    if not isinstance(given, Mapping) or len(given) > MOST_BIASES:
        raise fields.wrong("logit_bias", given, wanted)
    bias: dict[int, float] = {}
    for token, value in given.items():
        number = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and -100 <= value <= 100
        )
        if not number or not (token.isascii() and token.isdigit() and len(token) < 10):
            raise fields.wrong("logit_bias", {token: value}, wanted)
        bias[int(token)] = float(value)
    return bias or None


def _stops(fields: Fields) -> list[str | int]:
    given = fields.get("stop", [])
    texts = [given] if isinstance(given, str) else given
    if (
        not isinstance(texts, list)
        or len(texts) > MOST_STOPS
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise fields.wrong(
            "stop", given, f"a text or a list of at most {MOST_STOPS} texts, none of them empty"
        )
    ids = fields.get("stop_token_ids", [])
    if not token_ids(ids):
        raise fields.wrong("stop_token_ids", ids, "a list of token ids")
    return [*texts, *ids]


@contextlib.contextmanager
def naming_words(param: str) -> Iterator[None]:
    """Refuses what the tokenizer has no token for: the library (tokenizers) raises a bare Exception
    for a word that it does not know.
    """
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise Refused(
            f"{param} holds what the model's tokenizer has no token for ({error})"[:300], param
        ) from error


def token_ids(value: Any) -> bool:
    """Whether it is a list of whole numbers from 0 on."""
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value
    )


def own_texts(params: SamplingParams, renderer_stops: Sequence[str | int]) -> list[str]:
    """The stop texts of the request itself, which are no part of an answer's text."""
    own = set(renderer_stops)
    return [one for one in params.stop or () if isinstance(one, str) and one not in own]
