"""Define the JSON bodies of Tinker's routes, and read them; errors name the field.

The same classes check the bodies, type the handlers, and describe the routes at /openapi.json.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

import zstandard
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from rl.errors import BadRequestError
from rl.serve.conversion import make_image
from rl.serve.http_errors import HttpError
from rl.types import (
    PARAMETER_BOUNDS,
    AdamParams,
    EncodedTextChunk,
    ImageChunk,
    SamplingParams,
)
from rl.types.number_checks import shorten

MAX_JSON_BYTES = 32 * 2**20
MAX_METADATA = 2**16  # characters of user metadata, which are kept as long as the server runs
MAX_SAMPLES = 2**16  # per request: their ids are sent before sampling, and others wait for them
_MAX_WINDOW = 1 << 27  # largest window of a frame in bytes, which bounds the decoder's memory
_MAX_TTL_SECONDS = 10 * 366 * 86400  # longest time to live of a checkpoint, in seconds
# name of a type in an error -> pydantic's errors of that type
_TYPE_ERRORS = {
    "string_type": "str",
    "int_type": "int",
    "list_type": "list",
    "bool_type": "bool",
    "dict_type": "dict",
    "model_type": "dict",
}


def _stringify_metadata(value: Any) -> Any:
    """Return user metadata with texts as values; a value that is not a text becomes its JSON.

    Raises a refusal for more than `MAX_METADATA` characters.
    """
    if not isinstance(value, dict):
        return {} if value is None else value
    metadata = {
        str(key): item if isinstance(item, str) else json.dumps(item) for key, item in value.items()
    }
    size = sum(len(key) + len(item) for key, item in metadata.items())
    if size > MAX_METADATA:
        raise make_refusal(f"has {size} characters, the limit is {MAX_METADATA}: send less")
    return metadata


def _check_size(value: Any) -> Any:
    """Raise ValueError for an integer of more than 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError
    return value


_ADAM, _SAMPLING = AdamParams(), SamplingParams()
_NON_NEGATIVE = "a finite number of at least 0"
_FRACTION = "a number of at least 0 and below 1"
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
# integers beyond 64 bits are refused, as everywhere in `rl.types`
Number = Annotated[float, BeforeValidator(_check_size)]
Metadata = Annotated[dict[str, str], BeforeValidator(_stringify_metadata)]
# null is the default
Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
TrueFlag = Annotated[bool, BeforeValidator(lambda value: True if value is None else value)]


def make_parameter(name: str, maximum: float | None = None) -> Any:
    """Return a field with the default, the bounds and the description of a sampling parameter.

    `maximum`: a lower maximum than that of `SamplingParams`.
    """
    bounds = PARAMETER_BOUNDS[name]
    limits: dict[str, Any] = {"ge": bounds.minimum, "le": maximum or bounds.maximum}
    return Field(
        getattr(_SAMPLING, name),
        description=bounds.expected + (f", and at most {maximum}" if maximum else ""),
        **{key: value for key, value in limits.items() if math.isfinite(value)},
    )


class JsonBody(BaseModel):
    """Hold the fields of a JSON body. Types are not converted, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    @classmethod
    def make_error(cls, error: Mapping[str, Any]) -> HttpError:
        """Return the error of a field of another type or range: of the innermost field that has a
        description, or of an item of a list of objects, whose class has a title.

        `error`: pydantic's error.
        """
        path, kind, value = list(error["loc"]), error["type"], error["input"]
        model: Any = cls  # the class of the objects at `place`
        place, expected = "", ""
        while path and model is not None:
            if isinstance(path[0], int):
                place += f"[{path.pop(0)}]"
                expected = model.model_config.get("title") or ""
                continue
            name = f"{place}.{path[0]}".lstrip(".")
            field = model.model_fields.get(path[0])
            if field is None:
                return model.describe_unknown(name, path[0], value)
            if field.description is None and expected:
                break
            place, expected = name, (field.description or "").partition(";")[0]
            model = find_body_type(field.annotation)
            del path[0]
        if kind == "refusal":
            place += error["ctx"]["at"]
            return HttpError(400, f"{place} {error['ctx']['text']}", place)
        is_absent = kind == "missing" or value is None and not place.endswith("]")
        if is_absent and not path:
            hint = f": {expected}" if expected else ""
            return HttpError(400, f"the body lacks {place!r}{hint}", place)
        got = shorten(value, 80)
        if not expected and kind in _TYPE_ERRORS:
            expected, got = f"of type {_TYPE_ERRORS[kind]}", type(value).__name__
        bounds = error.get("ctx", {})
        if not expected and "ge" in bounds:
            expected = f"an integer of at least {bounds['ge']}"
        elif not expected and "le" in bounds:
            expected = f"an integer of at most {bounds['le']}"
        is_named = path and kind != "missing" and path[-1] != "[key]"
        at = f" at {'.'.join(map(str, path))}" if is_named else ""
        return HttpError(400, f"{place} must be {expected or error['msg']}, got {got}{at}", place)

    @classmethod
    def describe_unknown(cls, place: str, name: str, value: Any) -> HttpError:
        """Return the error of an unknown field. `place`: its name with the names around it."""
        accepted = ", ".join(cls.model_fields)
        return HttpError(400, f"{place} is not supported: it accepts {accepted}", place)


def find_body_type(annotation: Any) -> type[JsonBody] | None:
    """Return the class of the objects of a field, or None for a field of other values."""
    if isinstance(annotation, type) and issubclass(annotation, JsonBody):
        return annotation
    return next(filter(None, map(find_body_type, get_args(annotation))), None)


class SessionBody(JsonBody):
    """Name a session."""

    session_id: str


class CreateSessionBody(JsonBody):
    """Describe a new session."""

    user_metadata: Metadata = {}
    display_name: Annotated[str, Field(max_length=1000)] | None = None


class FinishSessionBody(JsonBody):
    """Give the reason of a session's end."""

    reason: dict[str, Any] | None = None


class NewModelBody(SessionBody):
    """Describe a new model and its number in a session. Its optimizer is AdamW."""

    model_seq_id: Count
    user_metadata: Metadata = {}
    optimizer_config: dict[str, Any] | None = None


class LoraConfigBody(JsonBody):
    """Describe a LoRA. A flag that is absent is true, also with a tied head."""

    rank: Annotated[int, Field(ge=1, le=4096)]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    train_mlp: TrueFlag = True
    train_attn: TrueFlag = True
    train_unembed: TrueFlag = True


class CreateModelBody(NewModelBody):
    """Describe a new model with a LoRA."""

    base_model: str
    lora_config: LoraConfigBody

    @model_validator(mode="before")
    @classmethod
    def _require_lora(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("lora_config") is None:
            raise HttpError(
                400,
                "the body lacks lora_config: only LoRA training is supported over the network, not "
                "full fine-tuning",
            )
        return fields


class ModelBody(JsonBody):
    """Name a model."""

    model_id: str


class NumberedBody(ModelBody):
    """Name a model and the number of its request: requests run in the order of their numbers."""

    seq_id: PositiveCount


class AdamParamsBody(JsonBody):
    """Hold the fields of types.AdamParams, which checks their range."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: Number = Field(_ADAM.learning_rate, description=_NON_NEGATIVE)
    beta1: Number = Field(_ADAM.beta1, description=_FRACTION)
    beta2: Number = Field(_ADAM.beta2, description=_FRACTION)
    eps: Number = Field(_ADAM.eps, description="a finite number of at least 1e-30")
    weight_decay: Number = Field(_ADAM.weight_decay, description=_NON_NEGATIVE)
    grad_clip_norm: Number = Field(
        _ADAM.grad_clip_norm, description=f"{_NON_NEGATIVE} (0: no clipping)"
    )


class OptimStepBody(NumberedBody):
    """Hold the optimizer's parameters: AdamW's."""

    adam_params: AdamParamsBody | None = None
    optimizer_params: Any = None


class SaveWeightsBody(NumberedBody):
    """Name a checkpoint, by default step-<seq_id>. `ttl_seconds`: its time to live."""

    path: str | None = None
    ttl_seconds: Annotated[int, Field(ge=1, le=_MAX_TTL_SECONDS)] | None = None
    overwrite: Flag = False
    user_metadata: Metadata = {}


class SaveWeightsForSamplerBody(SaveWeightsBody):
    """Name weights for sampling; without a path, the number of a new sampling session."""

    kind: Any = "snapshot"
    sampling_session_seq_id: Count | None = None


class SaveWeightsExternalBody(SaveWeightsBody):
    """Name a Hugging Face folder. Encryption is not supported."""

    age_encryption_recipients: Any = None


class LoadWeightsBody(JsonBody):
    """Name weights to load into a model; without a model, into a new model of a session."""

    path: str
    optimizer: Flag = False
    model_id: Any = None
    seq_id: Any = None
    session_id: Any = None
    model_seq_id: Any = None
    base_model: Any = None


class LoadNewModelBody(NewModelBody):
    """Describe a new model of saved weights."""

    base_model: str | None = None


class FutureBody(JsonBody):
    """Name a request whose result is retrieved or that is cancelled."""

    request_id: str


class TtlBody(JsonBody):
    """Hold a time to live in seconds; null for none."""

    ttl_seconds: PositiveCount | None = None


class WeightsInfoBody(JsonBody):
    """Name saved weights by their tinker:// path."""

    tinker_path: str


class CreateSamplingSessionBody(SessionBody):
    """Describe a sampling session of saved weights or of a base model."""

    sampling_session_seq_id: Count
    model_path: str | None = None
    base_model: str | None = None


class JoinSamplingSessionBody(JsonBody):
    """Name a sampling session."""

    sampling_session_id: str


class AcceptedSampleBody(JsonBody):
    """Hold the fields of a sample request that are checked before it is accepted."""

    sampling_session_id: str | None = None
    seq_id: Annotated[int, Field(ge=0, le=2**63 - 1)]
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    prompt_logprobs: Flag = False
    topk_prompt_logprobs: Count | None = None
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_logprobs_last_n: PositiveCount | None = None
    topk_sample_logprobs: Any = None
    prompt_alt_tokens_k: Any = None


class ChunkBody(JsonBody):
    """Hold a part of a prompt: the token ids of a text, or an image."""

    model_config = ConfigDict(title="a text ('encoded_text') or the bytes of an image ('image')")

    type: Literal["encoded_text", "image"] = Field(
        default="encoded_text",
        description="'encoded_text' or 'image': this server accepts text and the bytes of images",
    )
    tokens: list[int] | None = Field(
        default=None, fail_fast=True, description="a list of token ids; of a text"
    )
    data: str = Field(default="", description="bytes in base64; of an image")
    format: Any = Field(default=None, description="png or jpeg; of an image")
    expected_tokens: Any = None
    override_dimensions: Any = None

    def to_chunk(self) -> EncodedTextChunk | ImageChunk:
        """Return the chunk. Raises BadRequestError for an invalid field."""
        if self.type == "encoded_text":
            if self.tokens is None:
                raise BadRequestError("a chunk of the prompt lacks 'tokens': a list of token ids")
            return EncodedTextChunk(self.tokens)
        try:
            data = base64.b64decode(self.data, validate=True)
        except ValueError:
            raise BadRequestError("an image's data must be its bytes in base64") from None
        overrides_size = self.override_dimensions is not None
        return make_image(data, self.format, self.expected_tokens, overrides_size)


class PromptBody(JsonBody):
    """Hold a prompt, in the form of types.ModelInput."""

    chunks: list[ChunkBody] = Field(fail_fast=True, description="a list of chunks")


class SamplingParamsBody(JsonBody):
    """Hold the fields of types.SamplingParams that Tinker has. The type checks them."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = make_parameter("max_tokens")
    seed: int | None = make_parameter("seed")
    stop: Any = Field(default=None, description="a text, a list of texts or token ids, or null")
    temperature: Number = make_parameter("temperature")
    top_k: int = make_parameter("top_k")
    top_p: Number = make_parameter("top_p")


class SampleBody(AcceptedSampleBody):
    """Hold a sample request: a prompt, sampling parameters, and the logprobs to return."""

    prompt: PromptBody = Field(description="{chunks: [...]}, in the form of types.ModelInput")
    sampling_params: Annotated[SamplingParamsBody, BeforeValidator(lambda value: value or {})] = (
        SamplingParamsBody()
    )


BodyT = TypeVar("BodyT", bound="JsonBody")


def parse_json(raw: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises ValueError for invalid JSON, and for a lone surrogate, which cannot be encoded again.
    """
    # json.loads itself accepts other encodings, and encoded surrogates
    text = raw.decode("utf-8-sig")
    value = json.loads(text)
    if "\\u" in text:  # the only spelling of a lone surrogate in valid UTF-8
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it contains half of a surrogate pair") from None
    return value


def parse_json_body(raw: bytes) -> Any:
    """Return the value of a JSON body. Raises HttpError: 413 if it is too large (parsing blocks the
    event loop for about 20 ms per MiB), 400 if it is invalid.
    """
    if len(raw) > MAX_JSON_BYTES:
        text = f"the JSON body has {len(raw)} bytes, the limit is {MAX_JSON_BYTES}"
        raise HttpError(413, f"{text}: send less at once")
    try:
        return parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not valid JSON ({str(error)[:200]})") from error


async def read_fields(request: Request) -> Any:
    """Return the fields of a JSON body; an empty body has none."""
    raw = await request.body()
    return parse_json_body(raw) if raw else {}


def read_body(body_type: type[BodyT], fields: Any) -> BodyT:
    """Return the fields as `body_type`. Raises HttpError (400), which names the first field of
    another type or range.
    """
    if not isinstance(fields, dict):
        got = type(fields).__name__
        raise HttpError(400, f"the body must be a JSON object, got {got}")
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise body_type.make_error(error.errors(include_url=False)[0]) from None


def make_refusal(text: str, at: str = "") -> PydanticCustomError:
    """Return the error of a validator. `text`: what follows the name of the field; `at`: the place
    within the field.
    """
    return PydanticCustomError("refusal", "{text}", {"text": text, "at": at})


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body.

    Raises HttpError: 415 for an unsupported encoding, 413 above `limit` bytes (decompression stops
    at the limit), 400 for invalid or truncated zstd.
    """
    if not encoding:
        return body
    if encoding.strip().lower() != "zstd":
        raise HttpError(
            415, f"this server reads bodies compressed with zstd, not with {encoding[:40]!r}"
        )
    try:
        data = (
            zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
            .stream_reader(body, read_across_frames=False)
            .read(limit + 1)
        )
        expected_size = zstandard.get_frame_parameters(body).content_size
    except zstandard.ZstdError as error:
        raise HttpError(400, f"the body is not valid zstd ({str(error)[:200]})") from None
    if len(data) > limit:
        raise HttpError(
            413, f"a body may have at most {limit} bytes after decompression: send less at once"
        )
    if expected_size not in (zstandard.CONTENTSIZE_UNKNOWN, len(data)):
        raise HttpError(
            400, f"the body is truncated: it decompresses to {len(data)} of {expected_size} bytes"
        )
    return data
