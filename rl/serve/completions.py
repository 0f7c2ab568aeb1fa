"""/v1/completions: texts or ids continued, and scored with `echo` and `logprobs`, as evaluation
harnesses ask for it.
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

MOST_PROMPTS = 4096  # of one request
_DEFAULT_TOKENS = 16  # OpenAI's

Row = Sequence[tuple[int, float]] | None  # a position's likeliest tokens, the likeliest first


@dataclass(frozen=True)
class _Ask:
    model: str | None
    prompts: list[list[int]]
    texts: list[str | None]  # of the prompts that came as text
    n: int
    params: SamplingParams
    draws: bool  # False where max_tokens is 0: prompts are scored alone
    logprobs: int | None
    echo: bool
    as_ids: bool
    return_token_ids: bool
    usage_in_stream: bool
    stream: bool


def routes(serving: Serving) -> list[Route]:
    return serving.route("/v1/completions", completions)


def _read(body: Any, tokenizer: Any) -> _Ask:
    fields = Fields(body)
    model = fields.text("model")
    special = fields.switch("add_special_tokens", True)
    given = fields.get("prompt")
    if isinstance(given, str) or (
        isinstance(given, list) and given and all(isinstance(one, int) for one in given)
    ):
        given = [given]
    if not isinstance(given, list) or not 0 < len(given) <= MOST_PROMPTS:
        raise fields.wrong(
            "prompt", given, f"a text, token ids, or a list of at most {MOST_PROMPTS} of either"
        )
    prompts: list[list[int]] = []
    texts: list[str | None] = []
    for i, one in enumerate(given):
        if not isinstance(one, str) and not (token_ids(one) and one):
            raise Refused(
                f"prompt[{i}] is a text or a list of token ids, got {one!r:.80}", f"prompt[{i}]"
            )
        if (
            isinstance(one, str)
            and not one.isprintable()
            and any("\ud800" <= letter <= "\udfff" for letter in one)
        ):
            raise Refused(
                f"prompt[{i}] holds half of a surrogate pair, which is no text", f"prompt[{i}]"
            )
        texts.append(one if isinstance(one, str) else None)
        with naming_words(f"prompt[{i}]"):
            prompts.append(
                [int(t) for t in tokenizer.encode(one, add_special_tokens=special)]
                if isinstance(one, str)
                else list(one)
            )
        if not prompts[-1]:
            raise Refused(
                f"prompt[{i}] is empty, and the model has no token to begin with", f"prompt[{i}]"
            )
    echo, logprobs = fields.switch("echo"), fields.whole("logprobs", None, 0, MOST_TOP_LOGPROBS)
    most = fields.whole("max_tokens", _DEFAULT_TOKENS, 0, MOST_TOKENS)
    if most == 0 and not echo:
        raise Refused(
            "max_tokens=0 draws nothing: give echo: true, with logprobs, to have the prompt scored",
            "max_tokens",
        )
    return_token_ids, stream = fields.switch("return_token_ids"), fields.switch("stream")
    options = Fields(fields.get("stream_options", {}), "stream_options.")
    usage_in_stream, _ = options.switch("include_usage"), options.switch("include_obfuscation")
    options.close()
    n = fields.whole("n", 1, 1, MOST_CHOICES) or 1
    if fields.get("best_of", n) != n:
        raise fields.wrong(
            "best_of", fields.body["best_of"], f"n ({n}): all that is drawn is given back"
        )
    asked = _Ask(
        model, prompts, texts, n, sampling_params(fields, most or 1), most != 0, logprobs, echo,
        return_token_ids or fields.switch("return_tokens_as_token_ids"), return_token_ids, usage_in_stream, stream,
    )  # fmt: skip
    fields.close()
    return asked


async def completions(serving: Serving, body: Any, session: Session, live: Live | None) -> Answer:
    """Every prompt n times, as one batch where the desk makes one; the choice of prompt p's sample
    j has the index p * n + j.
    """
    desk = serving.desk
    tokenizer = await session.tokenizer(desk, Fields(body).text("model"))
    # tokenizing a megabyte takes more than a second
    asked = await asyncio.to_thread(_read, body, tokenizer)
    if asked.logprobs and not session.reads_again:
        raise Refused(
            "logprobs above 0 are not served in an episode that is trained on: 0 gives those of the drawn tokens",
            "logprobs",
        )
    scored = (
        {"include_prompt_logprobs": True, "topk_prompt_logprobs": asked.logprobs}
        if asked.echo and asked.logprobs is not None
        else {}
    )
    head = {**head_of("cmpl", asked.model), "object": "text_completion"}

    def writer() -> TextWriter:
        return TextWriter(
            head,
            lambda index, tokens: _begun(tokenizer, asked, index // asked.n, tokens),
            asked.usage_in_stream,
        )

    draws = []
    for p, prompt in enumerate(asked.prompts):
        shown = {"show": live.show(p * asked.n)} if live is not None and asked.draws else {}
        draws.append(
            session.draw(desk, asked.model, prompt, asked.n, asked.params, **scored, **shown)
        )
    if live is not None:
        live.writer = writer()
    responses = await _all_or_none(draws)
    choices: list[dict[str, Any]] = []
    sequences: list[SampledSequence] = []
    for p, response in enumerate(responses):
        for j, sequence in enumerate(response.sequences):
            if asked.draws:
                sequences.append(sequence)
                said = _text(tokenizer, sequence, asked.params)
                answer = {"role": "assistant", "content": said}
                session.note(
                    Turn(asked.prompts[p], sequence, answer, sequence.stop_reason == "stop")
                )
            choices.append(
                await _choice(
                    session, desk, tokenizer, asked, p, p * asked.n + j, response, sequence
                )
            )
    whole = {
        **head,
        "choices": choices,
        "usage": usage(sum(map(len, asked.prompts)), sequences),
    }
    return whole, writer if live is not None else None


async def _all_or_none(
    draws: Sequence[Coroutine[Any, Any, SampleResponse]],
) -> list[SampleResponse]:
    """What each gives. Where one fails, the others are drawn for nobody: they are given up."""
    drawing = [asyncio.ensure_future(draw) for draw in draws]
    try:
        return await asyncio.gather(*drawing)
    except BaseException:
        for one in drawing:
            one.cancel()
        raise


def _begun(tokenizer: Any, asked: _Ask, p: int, tokens: Sequence[int]) -> str:
    """The text of a choice of prompt p of which these tokens have been drawn, as far as it is
    certain.
    """
    return _head(tokenizer, asked, p) + certain_text(
        _decoded(tokenizer, tokens), own_texts(asked.params, ())
    )


def _head(tokenizer: Any, asked: _Ask, p: int) -> str:
    """What stands before an answer to prompt p."""
    given = asked.texts[p]
    return (_decoded(tokenizer, asked.prompts[p]) if given is None else given) if asked.echo else ""


def _text(tokenizer: Any, sequence: SampledSequence, params: SamplingParams) -> str:
    """What was drawn, without the mark or text that ended it."""
    tokens = list(sequence.tokens)
    stops = own_texts(params, ())
    text = _decoded(tokenizer, tokens)
    at = min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
    if at is not None:
        return text[:at]
    return _decoded(tokenizer, tokens[:-1]) if sequence.stop_reason == "stop" and tokens else text


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
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
    prompt = asked.prompts[p]
    text = _head(tokenizer, asked, p) + (
        _text(tokenizer, sequence, asked.params) if asked.draws else ""
    )
    found: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
    found["finish_reason"] = sequence.stop_reason if asked.draws else "length"
    if asked.return_token_ids:
        found |= {
            "token_ids": list(sequence.tokens) if asked.draws else [],
            "prompt_token_ids": prompt,
        }
    if asked.logprobs is None:
        return found
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
    return found | {"logprobs": _logprobs(tokenizer, tokens, logprobs, rows, asked)}


def _logprobs(
    tokenizer: Any,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    rows: Sequence[Row],
    asked: _Ask,
) -> dict[str, Any]:
    """Four lists, an entry for each token. The drawn token stands among the likeliest too, as
    harnesses look for it there.
    """
    words = [spelt(tokenizer, token, asked.as_ids) for token in tokens]
    offsets, at = [], 0
    for word in words:
        offsets.append(at)
        at += len(word)
    tops: list[dict[str, float] | None] = []
    for word, logprob, row in zip(words, logprobs, rows, strict=True):
        if logprob is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token, value in row or ():
            top.setdefault(spelt(tokenizer, token, asked.as_ids), below_zero(value))
        top.setdefault(word, below_zero(logprob))
        tops.append(top)
    said = [None if logprob is None else below_zero(logprob) for logprob in logprobs]
    return {
        "tokens": words,
        "token_logprobs": said,
        "top_logprobs": tops if asked.logprobs else None,
        "text_offset": offsets,
    }
