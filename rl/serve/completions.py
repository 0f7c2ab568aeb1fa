"""Serve /v1/completions: continue texts or token ids, and score prompts with `echo` and `logprobs`,
as evaluation harnesses do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

from rl.renderers import certain_text
from rl.serve.chat import Answer, Serving
from rl.serve.chat_fields import (
    MOST_CHOICES,
    MOST_TOP_LOGPROBS,
    Fields,
    Refused,
    naming_words,
    own_texts,
    sampling_params,
    token_ids,
)
from rl.serve.chat_reply import below_zero, head_of, spelt, usage
from rl.serve.chat_request import MOST_TOKENS
from rl.serve.chat_stream import Live, TextWriter
from rl.serve.chat_top import top_logprobs
from rl.serve.episodes import Desk, Session, Turn
from rl.types import SampledSequence, SampleResponse, SamplingParams

MOST_PROMPTS = 4096  # per request
_DEFAULT_TOKENS = 16  # OpenAI's default

Row = Sequence[tuple[int, float]] | None  # (id, logprob) of a position, most likely first


@dataclass(frozen=True)
class _Ask:
    """Hold a completion request."""

    model: str | None
    prompts: list[list[int]]
    texts: list[str | None]  # each prompt's text; None for a prompt of token ids
    n: int
    params: SamplingParams
    draws: bool  # False if max_tokens is 0: prompts are only scored
    logprobs: int | None
    echo: bool
    as_ids: bool
    return_token_ids: bool
    usage_in_stream: bool
    stream: bool


def routes(serving: Serving) -> list[Route]:
    """Return the routes of /v1/completions."""
    return serving.route("/v1/completions", completions)


def _read(body: Any, tokenizer: Any) -> _Ask:
    """Read a completion request and tokenize its prompts. Raises Refused."""
    fields = Fields(body)
    model = fields.text("model")
    special = fields.switch("add_special_tokens", True)
    raw_prompts = fields.get("prompt")
    if isinstance(raw_prompts, str) or (
        isinstance(raw_prompts, list)
        and raw_prompts
        and all(isinstance(item, int) for item in raw_prompts)
    ):
        raw_prompts = [raw_prompts]
    if not isinstance(raw_prompts, list) or not 0 < len(raw_prompts) <= MOST_PROMPTS:
        raise fields.wrong(
            "prompt",
            raw_prompts,
            f"a text, token ids, or a list of at most {MOST_PROMPTS} of either",
        )
    prompts: list[list[int]] = []
    texts: list[str | None] = []
    for i, item in enumerate(raw_prompts):
        if not isinstance(item, str) and not (token_ids(item) and item):
            raise Refused(
                f"prompt[{i}] must be a text or a list of token ids, got {item!r:.80}",
                f"prompt[{i}]",
            )
        if (
            isinstance(item, str)
            and not item.isprintable()
            and any("\ud800" <= letter <= "\udfff" for letter in item)
        ):
            raise Refused(
                f"prompt[{i}] contains half of a surrogate pair, which is not valid text",
                f"prompt[{i}]",
            )
        texts.append(item if isinstance(item, str) else None)
        with naming_words(f"prompt[{i}]"):
            prompts.append(
                [int(t) for t in tokenizer.encode(item, add_special_tokens=special)]
                if isinstance(item, str)
                else list(item)
            )
        if not prompts[-1]:
            raise Refused(
                f"prompt[{i}] has no tokens, and the model has no token to begin with",
                f"prompt[{i}]",
            )
    echo, logprobs = fields.switch("echo"), fields.whole("logprobs", None, 0, MOST_TOP_LOGPROBS)
    max_tokens = fields.whole("max_tokens", _DEFAULT_TOKENS, 0, MOST_TOKENS)
    if max_tokens == 0 and not echo:
        raise Refused(
            "max_tokens=0 samples no token: pass echo: true, with logprobs, to score the prompt",
            "max_tokens",
        )
    return_token_ids, stream = fields.switch("return_token_ids"), fields.switch("stream")
    options = Fields(fields.get("stream_options", {}), "stream_options.")
    usage_in_stream, _ = options.switch("include_usage"), options.switch("include_obfuscation")
    options.close()
    n = fields.whole("n", 1, 1, MOST_CHOICES) or 1
    if fields.get("best_of", n) != n:
        raise fields.wrong(
            "best_of", fields.body["best_of"], f"n ({n}): the response has every sample"
        )
    request = _Ask(
        model,
        prompts,
        texts,
        n,
        sampling_params(fields, max_tokens or 1),
        max_tokens != 0,
        logprobs,
        echo,
        return_token_ids or fields.switch("return_tokens_as_token_ids"),
        return_token_ids,
        usage_in_stream,
        stream,
    )
    fields.close()
    return request


async def completions(serving: Serving, body: Any, session: Session, live: Live | None) -> Answer:
    """Sample n completions of each prompt, in a common batch if the engine forms it.

    Sample j of prompt p is the choice with index p * n + j.
    """
    desk = serving.desk
    tokenizer = await session.tokenizer(desk, Fields(body).text("model"))
    # tokenizing a megabyte takes more than a second
    request = await asyncio.to_thread(_read, body, tokenizer)
    if request.logprobs and not session.reads_again:
        raise Refused(
            "logprobs above 0 are not supported in a training episode: 0 returns those of the "
            "sampled tokens",
            "logprobs",
        )
    score_options = (
        {"include_prompt_logprobs": True, "topk_prompt_logprobs": request.logprobs}
        if request.echo and request.logprobs is not None
        else {}
    )
    head = {**head_of("cmpl", request.model), "object": "text_completion"}

    def make_writer() -> TextWriter:
        return TextWriter(
            head,
            lambda index, tokens: _begun(tokenizer, request, index // request.n, tokens),
            request.usage_in_stream,
        )

    pending = []
    for p, prompt in enumerate(request.prompts):
        callback = {"show": live.show(p * request.n)} if live is not None and request.draws else {}
        pending.append(
            session.draw(
                desk, request.model, prompt, request.n, request.params, **score_options, **callback
            )
        )
    if live is not None:
        live.writer = make_writer()
    responses = await _all_or_none(pending)
    choices: list[dict[str, Any]] = []
    sequences: list[SampledSequence] = []
    for p, response in enumerate(responses):
        for j, sequence in enumerate(response.sequences):
            if request.draws:
                sequences.append(sequence)
                text = _text(tokenizer, sequence, request.params)
                answer = {"role": "assistant", "content": text}
                session.note(
                    Turn(request.prompts[p], sequence, answer, sequence.stop_reason == "stop")
                )
            choices.append(
                await _choice(
                    session, desk, tokenizer, request, p, p * request.n + j, response, sequence
                )
            )
    whole = {
        **head,
        "choices": choices,
        "usage": usage(sum(map(len, request.prompts)), sequences),
    }
    return whole, make_writer if live is not None else None


async def _all_or_none(
    draws: Sequence[Coroutine[Any, Any, SampleResponse]],
) -> list[SampleResponse]:
    """Return the results of all coroutines. If any fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(draw) for draw in draws]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


def _begun(tokenizer: Any, asked: _Ask, p: int, tokens: Sequence[int]) -> str:
    """Return the certain part of the text of a choice of prompt p, from its tokens so far."""
    return _head(tokenizer, asked, p) + certain_text(
        _decoded(tokenizer, tokens), own_texts(asked.params, ())
    )


def _head(tokenizer: Any, asked: _Ask, p: int) -> str:
    """Return the text before a response to prompt p: the prompt if `echo`, else ""."""
    text = asked.texts[p]
    return (_decoded(tokenizer, asked.prompts[p]) if text is None else text) if asked.echo else ""


def _text(tokenizer: Any, sequence: SampledSequence, params: SamplingParams) -> str:
    """Return the sampled text, without the end token or stop text."""
    tokens = list(sequence.tokens)
    stops = own_texts(params, ())
    text = _decoded(tokenizer, tokens)
    cut = min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
    if cut is not None:
        return text[:cut]
    return _decoded(tokenizer, tokens[:-1]) if sequence.stop_reason == "stop" and tokens else text


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the exact text of tokens, including special tokens."""
    return str(
        tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


async def _choice(
    session: Session,
    desk: Desk,
    tokenizer: Any,
    asked: _Ask,
    p: int,
    index: int,
    response: SampleResponse,
    sequence: SampledSequence,
) -> dict[str, Any]:
    """Return a choice of the response."""
    prompt = asked.prompts[p]
    text = _head(tokenizer, asked, p) + (
        _text(tokenizer, sequence, asked.params) if asked.draws else ""
    )
    result: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
    result["finish_reason"] = sequence.stop_reason if asked.draws else "length"
    if asked.return_token_ids:
        result |= {
            "token_ids": list(sequence.tokens) if asked.draws else [],
            "prompt_token_ids": prompt,
        }
    if asked.logprobs is None:
        return result
    tokens: list[int] = []
    logprobs: list[float | None] = []
    rows: list[Row] = []
    if asked.echo:
        assert response.prompt_logprobs is not None
        tokens, logprobs = list(prompt), list(response.prompt_logprobs)
        rows = list(response.topk_prompt_logprobs or [None] * len(prompt))
    if asked.draws:
        assert sequence.logprobs is not None
        tokens += sequence.tokens
        logprobs += sequence.logprobs
        if asked.logprobs:
            rows += await top_logprobs(session, desk, asked.model, prompt, sequence, asked.logprobs)
        else:
            rows += [None] * len(sequence.tokens)
    return result | {"logprobs": _logprobs(tokenizer, tokens, logprobs, rows, asked)}


def _logprobs(
    tokenizer: Any,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    rows: Sequence[Row],
    asked: _Ask,
) -> dict[str, Any]:
    """Return OpenAI's logprobs: four lists with an entry for each token.

    Each entry of top_logprobs includes the sampled token, where harnesses look for it.
    """
    texts = [spelt(tokenizer, token, asked.as_ids) for token in tokens]
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
            top.setdefault(spelt(tokenizer, token, asked.as_ids), below_zero(value))
        top.setdefault(text, below_zero(logprob))
        tops.append(top)
    values = [None if logprob is None else below_zero(logprob) for logprob in logprobs]
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": tops if asked.logprobs else None,
        "text_offset": offsets,
    }
