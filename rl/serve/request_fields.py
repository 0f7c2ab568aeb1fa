"""Read the fields of an OpenAI-style request.

A field is supported, accepted only at the values that have no effect (`NEUTRAL_VALUES`), ignored as
a label (`IGNORED_FIELDS`), or refused by name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.config import nearest_name
from rl.serve.http_errors import HttpError
from rl.types import PARAMETER_BOUNDS, SamplingParams

MAX_CHOICES = 1024  # per request
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024  # OpenAI's limit
# parameters that are read from the field of their name, by their bounds
NUMBER_PARAMETERS = (
    "temperature",
    "top_p",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


# Fields that do not change the response: labels, and hints for storage or billing.
IGNORED_FIELDS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "request_id",
    "priority",
)

# Fields that are accepted at these values, which have no effect; any other value is refused.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}


# Reasons for which fields of `NEUTRAL_VALUES` are refused, where a reason helps the caller.
_NO_GRAMMAR = (
    "this server does not constrain the model to a grammar; request the format in the messages, "
    "and check the response"
)
REFUSAL_REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "guided_choice",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "response_format",
            "structured_outputs",
        ),
        _NO_GRAMMAR,
    ),
}


class FieldReader:
    """Read a request's body field by field; `refuse_unread` refuses the remaining fields.

    Errors are `HttpError` and name the field. `prefix`: prefix of the field names in
    errors.
    """

    def __init__(self, body: Any, prefix: str = ""):
        if not isinstance(body, Mapping):
            raise HttpError(400, f"the body must be a JSON object, got {type(body).__name__}")
        self.body, self.prefix = body, prefix
        self.read_names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field's value; `default` if it is missing or null."""
        self.read_names.add(name)
        value = self.body.get(name)
        return default if value is None else value

    def get_flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.make_error(name, value, "true or false")
        return value

    def get_int(self, name: str, default: int | None, minimum: int, maximum: int) -> int | None:
        """Return an integer field from `minimum` to `maximum`."""
        value = self.get(name, default)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not minimum <= value <= maximum
            or value != math.floor(value)
        ):
            raise self.make_error(name, value, f"an integer from {minimum} to {maximum}")
        return int(value)

    def get_parameter(self, name: str) -> Any:
        """Return a number of `SamplingParams` from the field of its name, or None."""
        value, bounds = self.get(name), PARAMETER_BOUNDS[name]
        if value is None:
            return None
        if bounds.whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            bounds.validate(name, value)
        except ValueError:
            raise self.make_error(name, value, bounds.expected) from None
        return value if bounds.whole else float(value)

    def get_text(self, name: str) -> str | None:
        """Return a text field; None if it is missing or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.make_error(name, value, "a text")
        return value

    def refuse_unread(self) -> None:
        """Raise HttpError for a field that was not read, unless it is a label or has no
        effect.
        """
        for name, value in self.body.items():
            if name in self.read_names or name in IGNORED_FIELDS or value is None:
                continue
            if name in NEUTRAL_VALUES:
                if any(
                    value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
                    for allowed in NEUTRAL_VALUES[name]
                ):
                    continue
                allowed = " or ".join(repr(item) for item in NEUTRAL_VALUES[name]) or "null"
                reason = f", for {REFUSAL_REASONS[name]}" if name in REFUSAL_REASONS else ""
                text = (
                    f"{self.prefix}{name}={_shorten(value)} is not supported here{reason}: "
                    f"omit it (or pass {allowed})"
                )
                raise HttpError(400, text, self.prefix + name)
            suggestion = nearest_name(name, {*self.read_names, *NEUTRAL_VALUES})
            hint = f"; did you mean {suggestion!r}?" if suggestion else ""
            raise HttpError(
                400,
                f"unknown parameter: {self.prefix + name!r}{hint}",
                self.prefix + name,
                code="unknown_parameter",
            )

    def make_error(self, name: str, value: Any, expected: str) -> HttpError:
        """Return the error for a field of another type or range. `expected`: the expected value."""
        return HttpError(
            400,
            f"{self.prefix}{name} must be {expected}, got {_shorten(value)}",
            self.prefix + name,
        )


def _shorten(value: Any) -> str:
    """Return the repr of a value, cut at 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def read_sampling_params(
    fields: FieldReader, max_tokens: int | None, *, renderer_stops: Sequence[str | int] = ()
) -> SamplingParams:
    """Read the sampling parameters: `NUMBER_PARAMETERS`, top_k, logit_bias, ignore_eos, seed, stop,
    stop_token_ids.

    `renderer_stops`: stops of the renderer, which are always added. Logprobs are of the whole
    distribution at the temperature, before logit_bias, penalties and truncation by top_p, top_k
    and min_p.
    """
    values = {name: fields.get_parameter(name) for name in NUMBER_PARAMETERS}
    numbers = {name: value for name, value in values.items() if value is not None}
    if numbers.get("temperature", 0) > 100:
        raise fields.make_error("temperature", numbers["temperature"], "a number from 0 to 100")
    # some clients send 0 for no truncation
    top_k = fields.get_int("top_k", -1, -1, 2**31 - 1) or -1
    min_tokens = numbers.get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise fields.make_error("min_tokens", min_tokens, f"at most max_tokens ({max_tokens})")
    seed = fields.get_int("seed", None, -(2**63), 2**63 - 1)
    stop = [*renderer_stops, *_read_stops(fields)]
    if min_tokens and any(isinstance(item, str) for item in stop):
        texts = [item for item in stop if isinstance(item, str)]
        raise HttpError(
            400,
            f"{fields.prefix}min_tokens is not supported with stop texts ({_shorten(texts)}): it "
            "excludes tokens from sampling, and any tokens may spell a text; pass stop_token_ids, "
            "or omit min_tokens",
            fields.prefix + "min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        seed=None if seed is None else seed % 2**63,
        stop=stop or None,  # type: ignore[arg-type]  # the sampler accepts texts and ids together
        top_k=top_k,
        untruncated_logprobs=True,
        logit_bias=_read_logit_bias(fields),
        **numbers,
        ignore_eos=fields.get_flag("ignore_eos"),
    )


def _read_logit_bias(fields: FieldReader) -> dict[int, float] | None:
    """Return logit_bias: token id to the number added to its logit; JSON keys are decimal texts."""
    raw_bias, expected = (
        fields.get("logit_bias", {}),
        f"an object of at most {MAX_BIASES} token ids with numbers from -100 to 100",
    )
    if not isinstance(raw_bias, Mapping) or len(raw_bias) > MAX_BIASES:
        raise fields.make_error("logit_bias", raw_bias, expected)
    bias: dict[int, float] = {}
    for token, value in raw_bias.items():
        number = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and -100 <= value <= 100
        )
        if not number or not (token.isascii() and token.isdigit() and len(token) < 10):
            raise fields.make_error("logit_bias", {token: value}, expected)
        bias[int(token)] = float(value)
    return bias or None


def _read_stops(fields: FieldReader) -> list[str | int]:
    """Return the stop texts and stop token ids of a request."""
    value = fields.get("stop", [])
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or len(texts) > MAX_STOPS
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise fields.make_error(
            "stop", value, f"a text or a list of at most {MAX_STOPS} non-empty texts"
        )
    ids = fields.get("stop_token_ids", [])
    if not is_token_ids(ids):
        raise fields.make_error("stop_token_ids", ids, "a list of token ids")
    return [*texts, *ids]


@contextlib.contextmanager
def refuse_unknown_words(param: str) -> Iterator[None]:
    """Raise HttpError for a text that the tokenizer cannot encode.

    The tokenizers library raises a bare Exception for an unknown word.
    """
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise HttpError(
            400,
            f"{param} contains text that the model's tokenizer cannot encode ({error})"[:300],
            param,
        ) from error


def is_token_ids(value: Any) -> bool:
    """Return whether `value` is a list of non-negative integers."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def get_request_stop_texts(
    params: SamplingParams, renderer_stops: Sequence[str | int]
) -> list[str]:
    """Return the stop texts of the request itself, which are cut off a response's text."""
    excluded = set(renderer_stops)
    return [item for item in params.stop or () if isinstance(item, str) and item not in excluded]
