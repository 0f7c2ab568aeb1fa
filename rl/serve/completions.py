"""Serve /v1/completions: continue texts or token ids, and score prompts with `echo` and `logprobs`,
as evaluation harnesses do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from rl.renderers import trim_uncertain_end
from rl.serve.agent_sessions import AgentSession, SampledTurn
from rl.serve.chat_response import (
    TextChoice,
    TextLogprobs,
    TextResponse,
    clamp_logprob,
    count_usage,
    decode_exactly,
    format_token,
    get_request_stop_texts,
    make_response_head,
)
from rl.serve.chat_stream import LiveSamples, TextEventWriter
from rl.serve.http_errors import HttpError
from rl.serve.openai_schemas import CompletionBody
from rl.serve.openai_serving import HandlerResult, OpenAIServing, refuse_unknown_words
from rl.serve.schemas import read_body
from rl.types import SampledSequence, SampleResponse, SamplingParams

TopRow = Sequence[tuple[int, float]] | None  # (id, logprob) of a position, most likely first


@dataclass(frozen=True)
class _Completion:
    """Hold a completion request, its prompts as token ids, and build the parts of its response."""

    body: CompletionBody
    tokenizer: Any
    prompts: list[list[int]]
    params: SamplingParams

    @classmethod
    def read(cls, body: Any, tokenizer: Any) -> _Completion:
        """Read a request and tokenize its prompts. Raises HttpError."""
        request = read_body(CompletionBody, body)
        params = request.make_params(request.max_tokens or 1)
        prompts: list[list[int]] = []
        for i, item in enumerate(request.prompt):
            ids = item
            if isinstance(item, str):
                with refuse_unknown_words(f"prompt[{i}]"):
                    ids = tokenizer.encode(item, add_special_tokens=request.add_special_tokens)
            if not ids:
                text = "has no tokens, and the model has no token to begin with"
                raise HttpError(400, f"prompt[{i}] {text}", f"prompt[{i}]")
            prompts.append([int(token) for token in ids])
        return cls(request, tokenizer, prompts, params)

    @property
    def samples_tokens(self) -> bool:
        """Return whether tokens are sampled, and not only the prompts are scored."""
        return self.body.max_tokens != 0

    @property
    def is_scored(self) -> bool:
        """Return whether the prompts are scored."""
        return self.body.echo and self.body.logprobs is not None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the exact text of tokens, including special tokens."""
        return decode_exactly(self.tokenizer, tokens)

    def decode_certain(self, index: int, tokens: Sequence[int]) -> str:
        """Return the certain part of the text of a choice, from its tokens so far."""
        stops = get_request_stop_texts(self.params)
        return self.make_echo(index // self.body.n) + trim_uncertain_end(self.decode(tokens), stops)

    def make_echo(self, p: int) -> str:
        """Return the text before a response to prompt p: the prompt if `echo`, else ""."""
        prompt = self.body.prompt[p]
        if not self.body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self.decode(prompt)

    def decode_sample(self, sequence: SampledSequence) -> str:
        """Return the sampled text, without the end token or stop text."""
        text, stops = self.decode(sequence.tokens), get_request_stop_texts(self.params)
        cuts = [place for stop in stops if (place := text.find(stop)) >= 0]
        if cuts:
            return text[: min(cuts)]
        return self.decode(sequence.tokens[:-1]) if sequence.stop_reason == "stop" else text

    def make_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], rows: Sequence[TopRow]
    ) -> TextLogprobs:
        """Return OpenAI's logprobs: four lists with an entry for each token.

        Each entry of top_logprobs includes the sampled token, where harnesses look for it.
        """

        def format_id(token: int) -> str:
            return format_token(self.tokenizer, token, self.body.tokens_as_ids)

        texts = [format_id(token) for token in tokens]
        values = [None if logprob is None else clamp_logprob(logprob) for logprob in logprobs]
        tops: list[dict[str, float] | None] = []
        for text, value, row in zip(texts, values, rows, strict=True):
            top: dict[str, float] = {}
            for token, logprob in row or ():
                top.setdefault(format_id(token), clamp_logprob(logprob))
            if value is not None:
                top.setdefault(text, value)
            tops.append(None if value is None else top)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if self.body.logprobs else None,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
        }


async def handle_completions(
    serving: OpenAIServing, body: Any, session: AgentSession, live: LiveSamples | None
) -> HandlerResult:
    """Sample n completions of each prompt, in a common batch if the engine forms it.

    Sample j of prompt p is the choice with index p * n + j.
    """
    backend, name = serving.backend, body.get("model") if isinstance(body, dict) else None
    model = name if isinstance(name, str) else None
    tokenizer = await session.tokenizer(backend, model)
    # tokenizing a megabyte takes more than a second
    request = await asyncio.to_thread(_Completion.read, body, tokenizer)
    k, n = request.body.logprobs, request.body.n
    if k and not session.allows_rescoring:
        raise HttpError(
            400,
            "logprobs above 0 are not supported in a training episode: 0 returns those of the "
            "sampled tokens",
            "logprobs",
        )
    options: dict[str, Any] = {}
    if request.is_scored:
        options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": k}
    head, include_usage = (
        make_response_head("cmpl", model),
        request.body.stream_options.include_usage,
    )
    make_writer = partial(TextEventWriter, head, request.decode_certain, include_usage)
    pending = []
    for p, prompt in enumerate(request.prompts):
        if live is not None and request.samples_tokens:
            options["show"] = live.make_callback(p * n)
        pending.append(session.sample(backend, model, prompt, n, request.params, **options))
    if live is not None:
        live.writer = make_writer()
    responses = await _gather_or_cancel(pending)
    choices, sequences = await _make_choices(request, serving, session, responses)
    usage = count_usage(sum(map(len, request.prompts)), sequences)
    result: TextResponse = {
        **head,
        "object": "text_completion",
        "choices": choices,
        "usage": usage,
    }
    return result, make_writer


async def _make_choices(
    request: _Completion,
    serving: OpenAIServing,
    session: AgentSession,
    responses: Sequence[SampleResponse],
) -> tuple[list[TextChoice], list[SampledSequence]]:
    """Return the choices of a response and the sampled sequences, which become turns."""
    body, k = request.body, request.body.logprobs
    choices: list[TextChoice] = []
    sequences: list[SampledSequence] = []
    for p, response in enumerate(responses):
        prompt = request.prompts[p]
        for sequence in response.sequences:
            tokens: list[int] = []
            logprobs: list[float | None] = []
            rows: list[TopRow] = []
            if request.is_scored:
                tokens, logprobs = [*prompt], [*(response.prompt_logprobs or ())]
                rows = [*(response.topk_prompt_logprobs or [None] * len(prompt))]
            choice: TextChoice = {
                "index": len(choices),
                "text": request.make_echo(p),
                "logprobs": None,
                "finish_reason": sequence.stop_reason if request.samples_tokens else "length",
            }
            if request.samples_tokens:
                sequences.append(sequence)
                text = request.decode_sample(sequence)
                choice["text"] += text
                answer = {"role": "assistant", "content": text}
                is_complete = sequence.stop_reason == "stop"
                session.record_turn(SampledTurn(prompt, sequence, answer, is_complete))
                tokens += sequence.tokens
                logprobs += sequence.logprobs or []
                rows += (
                    await session.compute_top_logprobs(
                        serving.backend, body.model, prompt, sequence, k
                    )
                    if k
                    else [None] * len(sequence.tokens)
                )
            if k is not None:
                choice["logprobs"] = request.make_logprobs(tokens, logprobs, rows)
            if body.return_token_ids:
                choice["token_ids"] = list(sequence.tokens) if request.samples_tokens else []
                choice["prompt_token_ids"] = prompt
            choices.append(choice)
    return choices, sequences


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
