"""Serve /v1/completions: continue texts or token ids, and score prompts with `echo` and `logprobs`,
as evaluation harnesses do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

from rl.renderers import trim_uncertain_end
from rl.serve.agent_sessions import AgentSession, SampledTurn, SamplingBackend
from rl.serve.chat_request import MAX_TOKENS
from rl.serve.chat_response import clamp_logprob, count_usage, format_token, make_response_head
from rl.serve.chat_stream import LiveSamples, TextEventWriter
from rl.serve.http_errors import HttpError
from rl.serve.openai_serving import HandlerResult, OpenAIServing
from rl.serve.request_fields import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    FieldReader,
    get_request_stop_texts,
    is_token_ids,
    read_sampling_params,
    refuse_unknown_words,
)
from rl.serve.top_logprobs import compute_top_logprobs
from rl.types import SampledSequence, SampleResponse, SamplingParams

MAX_PROMPTS = 4096  # per request
_DEFAULT_TOKENS = 16  # OpenAI's default

TopRow = Sequence[tuple[int, float]] | None  # (id, logprob) of a position, most likely first


@dataclass(frozen=True)
class _CompletionRequest:
    """Hold a completion request."""

    model: str | None
    prompts: list[list[int]]
    texts: list[str | None]  # each prompt's text; None for a prompt of token ids
    n: int
    params: SamplingParams
    samples_tokens: bool  # False if max_tokens is 0: prompts are only scored
    logprobs: int | None
    echo: bool
    tokens_as_ids: bool
    return_token_ids: bool
    include_usage: bool
    stream: bool


def make_completion_routes(serving: OpenAIServing) -> list[Route]:
    """Return the routes of /v1/completions."""
    return serving.make_routes("/v1/completions", handle_completions)


def _read_request(body: Any, tokenizer: Any) -> _CompletionRequest:
    """Read a completion request and tokenize its prompts. Raises HttpError."""
    fields = FieldReader(body)
    model = fields.get_text("model")
    special = fields.get_flag("add_special_tokens", True)
    raw_prompts = fields.get("prompt")
    if isinstance(raw_prompts, str) or (
        isinstance(raw_prompts, list)
        and raw_prompts
        and all(isinstance(item, int) for item in raw_prompts)
    ):
        raw_prompts = [raw_prompts]
    if not isinstance(raw_prompts, list) or not 0 < len(raw_prompts) <= MAX_PROMPTS:
        raise fields.make_error(
            "prompt",
            raw_prompts,
            f"a text, token ids, or a list of at most {MAX_PROMPTS} of either",
        )
    prompts: list[list[int]] = []
    texts: list[str | None] = []
    for i, item in enumerate(raw_prompts):
        if not isinstance(item, str) and not (is_token_ids(item) and item):
            raise HttpError(
                400,
                f"prompt[{i}] must be a text or a list of token ids, got {item!r:.80}",
                f"prompt[{i}]",
            )
        if (
            isinstance(item, str)
            and not item.isprintable()
            and any("\ud800" <= letter <= "\udfff" for letter in item)
        ):
            raise HttpError(
                400,
                f"prompt[{i}] contains half of a surrogate pair, which is not valid text",
                f"prompt[{i}]",
            )
        texts.append(item if isinstance(item, str) else None)
        with refuse_unknown_words(f"prompt[{i}]"):
            prompts.append(
                [int(t) for t in tokenizer.encode(item, add_special_tokens=special)]
                if isinstance(item, str)
                else list(item)
            )
        if not prompts[-1]:
            raise HttpError(
                400,
                f"prompt[{i}] has no tokens, and the model has no token to begin with",
                f"prompt[{i}]",
            )
    echo, logprobs = fields.get_flag("echo"), fields.get_int("logprobs", None, 0, MAX_TOP_LOGPROBS)
    max_tokens = fields.get_int("max_tokens", _DEFAULT_TOKENS, 0, MAX_TOKENS)
    if max_tokens == 0 and not echo:
        raise HttpError(
            400,
            "max_tokens=0 samples no token: pass echo: true, with logprobs, to score the prompt",
            "max_tokens",
        )
    return_token_ids, stream = fields.get_flag("return_token_ids"), fields.get_flag("stream")
    options = FieldReader(fields.get("stream_options", {}), "stream_options.")
    usage_in_stream, _ = options.get_flag("include_usage"), options.get_flag("include_obfuscation")
    options.refuse_unread()
    n = fields.get_int("n", 1, 1, MAX_CHOICES) or 1
    if fields.get("best_of", n) != n:
        raise fields.make_error(
            "best_of", fields.body["best_of"], f"n ({n}): the response has every sample"
        )
    request = _CompletionRequest(
        model,
        prompts,
        texts,
        n,
        read_sampling_params(fields, max_tokens or 1),
        max_tokens != 0,
        logprobs,
        echo,
        return_token_ids or fields.get_flag("return_tokens_as_token_ids"),
        return_token_ids,
        usage_in_stream,
        stream,
    )
    fields.refuse_unread()
    return request


async def handle_completions(
    serving: OpenAIServing, body: Any, session: AgentSession, live: LiveSamples | None
) -> HandlerResult:
    """Sample n completions of each prompt, in a common batch if the engine forms it.

    Sample j of prompt p is the choice with index p * n + j.
    """
    backend = serving.backend
    tokenizer = await session.tokenizer(backend, FieldReader(body).get_text("model"))
    # tokenizing a megabyte takes more than a second
    request = await asyncio.to_thread(_read_request, body, tokenizer)
    if request.logprobs and not session.allows_rescoring:
        raise HttpError(
            400,
            "logprobs above 0 are not supported in a training episode: 0 returns those of the "
            "sampled tokens",
            "logprobs",
        )
    score_options = (
        {"include_prompt_logprobs": True, "topk_prompt_logprobs": request.logprobs}
        if request.echo and request.logprobs is not None
        else {}
    )
    head = {**make_response_head("cmpl", request.model), "object": "text_completion"}

    def make_writer() -> TextEventWriter:
        return TextEventWriter(
            head,
            lambda index, tokens: _make_partial_text(
                tokenizer, request, index // request.n, tokens
            ),
            request.include_usage,
        )

    pending = []
    for p, prompt in enumerate(request.prompts):
        callback = (
            {"show": live.make_callback(p * request.n)}
            if live is not None and request.samples_tokens
            else {}
        )
        pending.append(
            session.sample(
                backend,
                request.model,
                prompt,
                request.n,
                request.params,
                **score_options,
                **callback,
            )
        )
    if live is not None:
        live.writer = make_writer()
    responses = await _gather_or_cancel(pending)
    choices: list[dict[str, Any]] = []
    sequences: list[SampledSequence] = []
    for p, response in enumerate(responses):
        for j, sequence in enumerate(response.sequences):
            if request.samples_tokens:
                sequences.append(sequence)
                text = _get_sampled_text(tokenizer, sequence, request.params)
                answer = {"role": "assistant", "content": text}
                session.record_turn(
                    SampledTurn(
                        request.prompts[p], sequence, answer, sequence.stop_reason == "stop"
                    )
                )
            choices.append(
                await _make_choice(
                    session, backend, tokenizer, request, p, p * request.n + j, response, sequence
                )
            )
    whole = {
        **head,
        "choices": choices,
        "usage": count_usage(sum(map(len, request.prompts)), sequences),
    }
    return whole, make_writer if live is not None else None


async def _gather_or_cancel(
    coroutines: Sequence[Coroutine[Any, Any, SampleResponse]],
) -> list[SampleResponse]:
    """Return the results of all coroutines. If any fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(draw) for draw in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


def _make_partial_text(
    tokenizer: Any, request: _CompletionRequest, p: int, tokens: Sequence[int]
) -> str:
    """Return the certain part of the text of a choice of prompt p, from its tokens so far."""
    return _make_echo(tokenizer, request, p) + trim_uncertain_end(
        _decode(tokenizer, tokens), get_request_stop_texts(request.params, ())
    )


def _make_echo(tokenizer: Any, request: _CompletionRequest, p: int) -> str:
    """Return the text before a response to prompt p: the prompt if `echo`, else ""."""
    text = request.texts[p]
    return (
        (_decode(tokenizer, request.prompts[p]) if text is None else text) if request.echo else ""
    )


def _get_sampled_text(tokenizer: Any, sequence: SampledSequence, params: SamplingParams) -> str:
    """Return the sampled text, without the end token or stop text."""
    tokens = list(sequence.tokens)
    stops = get_request_stop_texts(params, ())
    text = _decode(tokenizer, tokens)
    cut = min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
    if cut is not None:
        return text[:cut]
    return _decode(tokenizer, tokens[:-1]) if sequence.stop_reason == "stop" and tokens else text


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the exact text of tokens, including special tokens."""
    return str(
        tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


async def _make_choice(
    session: AgentSession,
    backend: SamplingBackend,
    tokenizer: Any,
    request: _CompletionRequest,
    p: int,
    index: int,
    response: SampleResponse,
    sequence: SampledSequence,
) -> dict[str, Any]:
    """Return a choice of the response."""
    prompt = request.prompts[p]
    text = _make_echo(tokenizer, request, p) + (
        _get_sampled_text(tokenizer, sequence, request.params) if request.samples_tokens else ""
    )
    result: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
    result["finish_reason"] = sequence.stop_reason if request.samples_tokens else "length"
    if request.return_token_ids:
        result |= {
            "token_ids": list(sequence.tokens) if request.samples_tokens else [],
            "prompt_token_ids": prompt,
        }
    if request.logprobs is None:
        return result
    tokens: list[int] = []
    logprobs: list[float | None] = []
    rows: list[TopRow] = []
    if request.echo:
        assert response.prompt_logprobs is not None
        tokens, logprobs = list(prompt), list(response.prompt_logprobs)
        rows = list(response.topk_prompt_logprobs or [None] * len(prompt))
    if request.samples_tokens:
        assert sequence.logprobs is not None
        tokens += sequence.tokens
        logprobs += sequence.logprobs
        if request.logprobs:
            rows += await compute_top_logprobs(
                session, backend, request.model, prompt, sequence, request.logprobs
            )
        else:
            rows += [None] * len(sequence.tokens)
    return result | {"logprobs": _make_logprobs(tokenizer, tokens, logprobs, rows, request)}


def _make_logprobs(
    tokenizer: Any,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    rows: Sequence[TopRow],
    request: _CompletionRequest,
) -> dict[str, Any]:
    """Return OpenAI's logprobs: four lists with an entry for each token.

    Each entry of top_logprobs includes the sampled token, where harnesses look for it.
    """
    texts = [format_token(tokenizer, token, request.tokens_as_ids) for token in tokens]
    offsets, offset = [], 0
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops: list[dict[str, float] | None] = []
    for text, logprob, row in zip(texts, logprobs, rows, strict=True):
        if logprob is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token, value in row or ():
            top.setdefault(
                format_token(tokenizer, token, request.tokens_as_ids), clamp_logprob(value)
            )
        top.setdefault(text, clamp_logprob(logprob))
        tops.append(top)
    values = [None if logprob is None else clamp_logprob(logprob) for logprob in logprobs]
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": tops if request.logprobs else None,
        "text_offset": offsets,
    }
