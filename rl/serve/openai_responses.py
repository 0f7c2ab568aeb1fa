"""Sample the replies of the OpenAI-style routes, and build their responses."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from rl.renderers import parse_partial_answer, prompt_opens_thoughts, trim_uncertain_end
from rl.serve.agent_sessions import AgentSession, SampledTurn, SamplingBackend
from rl.serve.http_errors import HttpError, make_tokenizer_error
from rl.serve.openai_schemas import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatMessage,
    ChatResponse,
    CompletionBody,
    ContentLogprobs,
    GenerateBody,
    ResponseHead,
    TextChoice,
    TextLogprobs,
    TextResponse,
    TokenChoice,
    TokenCounts,
    TokenLogprob,
    TokenResponse,
    TopLogprob,
    to_messages,
)
from rl.serve.schemas import read_body
from rl.types import Message, SampledSequence, SampleResponse, SamplingParams

_GREEDY_TOKEN_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, stop=None)

TopRow = Sequence[tuple[int, float]] | None  # (id, logprob) of a position, most likely first
# for each sampled token: (id, logprob), most likely first
TopLogprobs = Sequence[Sequence[tuple[int, float]]]
PartialSamples = Mapping[int, SampledSequence]  # the samples so far, by the index of the choice
ProgressCallback = Callable[[PartialSamples], None]


def make_id(kind: str) -> str:
    """Return a random id with the prefix `kind`."""
    return f"{kind}-{secrets.token_hex(12)}"


def decode_exactly(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the exact text of tokens, including special tokens."""
    return str(
        tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def format_token(tokenizer: Any, token: int, as_ids: bool) -> str:
    """Return a token as text; as token_id:<id> if `as_ids`, or if the token is only part of a
    character.
    """
    text = "\ufffd" if as_ids else decode_exactly(tokenizer, [token])
    return f"token_id:{token}" if "\ufffd" in text else text


def clamp_logprob(logprob: float) -> float:
    """Clamp a logprob to 0.

    Rounding can put the logprob of a near-certain token slightly above 0, which clients refuse.
    """
    return min(float(logprob), 0.0)


def make_content_logprobs(
    tokenizer: Any, sequence: SampledSequence, as_ids: bool, top: TopLogprobs | None = None
) -> ContentLogprobs:
    """Return OpenAI's logprobs: an entry for each sampled token and the end token."""

    def entry(token: int, logprob: float) -> TopLogprob:
        text = format_token(tokenizer, token, as_ids)
        utf8_bytes = None if text.startswith("token_id:") else list(text.encode("utf-8"))
        return {"token": text, "logprob": clamp_logprob(logprob), "bytes": utf8_bytes}

    assert sequence.logprobs is not None
    entries: list[TokenLogprob] = []
    for i, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
        likely = [entry(*pair) for pair in top[i]] if top else []
        entries.append({**entry(token, logprob), "top_logprobs": likely})
    return {"content": entries}


class SamplingReply:
    """Answer a request with samples: the base class of the replies of all routes that sample.

    A subclass reads the request, makes a choice of each sample, and makes the response.
    """

    operation: str  # name of the routes in /openapi.json
    prompts: list[list[int]]  # token ids
    n: int  # samples of each prompt
    params: SamplingParams
    num_likely = 0  # likely tokens to return at each sampled position
    shows_samples = True  # False: only the prompts are scored
    responses: list[SampleResponse]  # to the prompts

    def __init__(self, body: Any, session: AgentSession, backend: SamplingBackend):
        self.body, self.session = body, session
        self.backend = session.choose_backend(backend)
        self.options: dict[str, Any] = {}  # of `SamplingBackend.sample`

    async def prepare(self) -> None:
        """Read the request: set `prompts`, `n`, `params` and what the response needs.

        Raises HttpError if a field has a wrong value or is not supported.
        """
        raise NotImplementedError

    def make_choice(self, index: int, sequence: SampledSequence, top: TopLogprobs | None) -> Any:
        """Return the choice of a sample, and record its turn in the session.

        `top`: the likely tokens at each sampled position.
        """
        raise NotImplementedError

    def make_response(self, choices: list[Any]) -> Any:
        """Return the full response."""
        raise NotImplementedError

    async def run(self, make_callback: Callable[[int], ProgressCallback] | None) -> Any:
        """Sample and return the full response. The prompts share a batch if the engine forms it.

        Sample j of prompt p is the choice with index p * n + j. `make_callback(index)`: returns
        what is called with the samples so far of a prompt, whose first choice has that index.
        """
        tasks = []
        for p, prompt in enumerate(self.prompts):
            options = dict(self.options)
            if make_callback is not None and self.shows_samples:
                options["show"] = make_callback(p * self.n)
            sampling = self._sample(prompt, self.n, self.params, **options)
            tasks.append(asyncio.ensure_future(sampling))
        try:
            self.responses = await asyncio.gather(*tasks)
        except BaseException:  # of any of them
            for task in tasks:
                task.cancel()
            raise
        choices: list[Any] = []
        top = None
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            for sequence in response.sequences:
                if self.num_likely:
                    top = await self._compute_top_logprobs(prompt, sequence)
                choices.append(self.make_choice(len(choices), sequence, top))
        response = self.make_response(choices)
        # A session keeps replies for retries: only the response, and no cycle.
        del self.session, self.backend, self.responses
        return response

    async def _sample(
        self, prompt: list[int], n: int, params: SamplingParams, **options: Any
    ) -> SampleResponse:
        owner = self.session.owner
        return await self.backend.sample(self.body.model, prompt, n, params, owner=owner, **options)

    async def _compute_top_logprobs(
        self, prompt: list[int], sequence: SampledSequence
    ) -> list[list[tuple[int, float]]]:
        """Return for each sampled token the `num_likely` most likely (id, logprob) of the
        untruncated distribution at its temperature, most likely first.

        A second forward pass over the response gives logprobs p1 at temperature 1. Differences of
        logits equal differences of p1, and at temperature T a token's logprob is its logit / T
        minus a constant: p(j) = p(sampled) + (p1(j) - p1(sampled)) / T, with p(sampled) from
        sampling.
        """
        assert sequence.logprobs is not None
        response = await self._sample(
            [*prompt, *sequence.tokens[:-1]],
            1,
            _GREEDY_TOKEN_PARAMS,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=self.num_likely,
            next_token=sequence.tokens[-1],  # not fed: the answer may end where the context does
        )
        assert response.prompt_logprobs is not None and response.topk_prompt_logprobs is not None
        temperature = sequence.temperature or 1.0  # greedy samples have logprobs at temperature 1
        result = []
        for i, logprob in enumerate(sequence.logprobs, len(prompt)):
            base, row = response.prompt_logprobs[i], response.topk_prompt_logprobs[i]
            assert base is not None and row is not None
            result.append(
                [(token, min(0.0, logprob + (value - base) / temperature)) for token, value in row]
            )
        return result

    def _record_text(self, prompt: list[int], sequence: SampledSequence, text: str) -> None:
        """Record a turn whose prompt is not a chat."""
        answer = {"role": "assistant", "content": text}
        is_complete = sequence.stop_reason == "stop"
        self.session.record_turn(SampledTurn(prompt, sequence, answer, is_complete))

    def _count_usage(self) -> TokenCounts:
        """Return the token counts of the response."""
        prompt_tokens, completion_tokens = sum(map(len, self.prompts)), 0
        if self.shows_samples:
            sequences = chain.from_iterable(response.sequences for response in self.responses)
            completion_tokens = sum(len(sequence.tokens) for sequence in sequences)
        cached_tokens = sum(response.prompt_cache_hit_tokens for response in self.responses)
        return {
            "prompt_tokens": prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


class ChatReply(SamplingReply):
    """Answer a chat completion request, and record its turns in the session."""

    body: ChatBody
    operation = "handle_chat"

    async def prepare(self) -> None:
        body = self.body
        self.messages, self.tools = to_messages(body.messages), body.prompt_tools
        if body.top_logprobs and not self.session.allows_rescoring:
            raise HttpError(
                400,
                "top_logprobs is not supported in a training episode: only logprobs of the sampled "
                "tokens are",
                "top_logprobs",
            )
        self.n, self.num_likely = body.n, body.top_logprobs
        renderer = await self.backend.renderer(body.model, self.session.owner)
        with report_as_field_error("chat_template_kwargs", "chat_template_kwargs: "):
            renderer = renderer.with_settings(body.chat_template_kwargs)
        with report_as_field_error("tools"):
            self.renderer = renderer.with_tools(self.tools)
        with report_as_field_error("messages"):
            # a megabyte takes more than a second
            self.prompt = await asyncio.to_thread(
                self.session.build_prompt, self.renderer, self.messages, self.tools
            )
        self.prompts, stops = [self.prompt], self.renderer.get_stop_sequences()
        self.params = body.make_params(body.max_new_tokens, stops)
        self.stop_ids = {*body.stop_token_ids}.difference(stops)
        # parses samples, without the stop texts of the request
        self.reader = self.renderer
        if request_stops := get_request_stop_texts(self.params, stops):
            self.reader = self.renderer.with_stops(request_stops)
        self.head = make_response_head("chatcmpl", body.model)
        self._opens_thoughts = prompt_opens_thoughts(self.renderer, self.prompt)

    def parse(self, tokens: Sequence[int], ended: bool) -> Message:
        """Return the message of a sample, or the certain part of it unless `ended`."""
        return parse_partial_answer(self.reader, tokens, self._opens_thoughts, ended=ended)

    def make_token_fields(
        self, sequence: SampledSequence, top: TopLogprobs | None = None
    ) -> dict[str, Any]:
        """Return the fields of a choice that have an entry for each token."""
        body, tokenizer = self.body, self.renderer.tokenizer
        fields: dict[str, Any] = {"logprobs": None}
        if body.logprobs:
            logprobs = make_content_logprobs(tokenizer, sequence, body.tokens_as_ids, top)
            fields["logprobs"] = {**logprobs, "refusal": None}
        return fields | ({"token_ids": list(sequence.tokens)} if body.return_token_ids else {})

    def make_choice(
        self, index: int, sequence: SampledSequence, top: TopLogprobs | None
    ) -> ChatChoice:
        """Return a choice of the response, and record its turn. Each tool call gets an id."""
        tokens = list(sequence.tokens)
        # a stop id of the request is no part of the message
        ends_at_stop_id = sequence.stop_reason == "stop" and tokens[-1] in self.stop_ids
        tokens = tokens[:-1] if ends_at_stop_id else tokens
        message = self.parse(tokens, ended=True)
        calls = message.get("tool_calls") or ()
        reply: AssistantMessage = {
            "role": "assistant",
            "content": message["content"] or (None if calls else ""),
            "refusal": None,
        }
        if "reasoning_content" in message:
            reply["reasoning_content"] = message["reasoning_content"]
        if calls:
            reply["tool_calls"] = [
                {"id": make_id("call"), "type": "function", "function": call["function"]}
                for call in calls
            ]
        answer, is_complete = self.reader.parse_response(tokens)
        is_complete = is_complete or ends_at_stop_id
        turn = SampledTurn(self.prompt, sequence, answer, is_complete, self.messages, self.tools)
        self.session.record_turn(turn, *to_messages([read_body(ChatMessage, reply)]))
        is_cut = sequence.stop_reason == "length"
        choice: Any = {
            "index": index,
            "message": reply,
            "finish_reason": "length" if is_cut else "tool_calls" if calls else "stop",
        }
        return choice | self.make_token_fields(sequence, top)

    def make_response(self, choices: list[ChatChoice]) -> ChatResponse:
        versions = sorted({str(sequence.version) for sequence in self.responses[0].sequences})
        response: ChatResponse = {
            **self.head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._count_usage(),
            "system_fingerprint": f"weights-{'-'.join(versions)}",
        }
        if self.body.return_token_ids:
            response["prompt_token_ids"] = list(self.prompt)
        return response


class TextReply(SamplingReply):
    """Answer a completion request: choice p * n + j is sample j of prompt p."""

    body: CompletionBody
    operation = "handle_completions"

    async def prepare(self) -> None:
        body = self.body
        if body.logprobs and not self.session.allows_rescoring:
            raise HttpError(
                400,
                "logprobs above 0 are not supported in a training episode: 0 returns those of the "
                "sampled tokens",
                "logprobs",
            )
        self.tokenizer = await self.backend.tokenizer(body.model, self.session.owner)
        if self.tokenizer is None:
            raise make_tokenizer_error(body.model)
        self.n, self.params = body.n, body.make_params(body.max_tokens or 1)
        self.stops = get_request_stop_texts(self.params)
        # tokenizing a megabyte takes more than a second
        self.prompts = await asyncio.to_thread(self._tokenize_prompts)
        self.shows_samples = bool(body.max_tokens)
        if self.shows_samples:
            self.num_likely = body.logprobs or 0
        self.is_scored = body.echo and body.logprobs is not None  # whether the prompts are scored
        if self.is_scored:
            self.options |= {"include_prompt_logprobs": True, "topk_prompt_logprobs": body.logprobs}
        self.head = make_response_head("cmpl", body.model)

    def _tokenize_prompts(self) -> list[list[int]]:
        """Return the token ids of each prompt. Raises HttpError."""
        prompts: list[list[int]] = []
        for i, item in enumerate(self.body.prompt):
            ids = item
            if isinstance(item, str):
                with report_as_field_error(f"prompt[{i}]"):
                    add = self.body.add_special_tokens
                    ids = self.tokenizer.encode(item, add_special_tokens=add)
            if not ids:
                text = "has no tokens, and the model has no token to begin with"
                raise HttpError(400, f"prompt[{i}] {text}", f"prompt[{i}]")
            prompts.append([int(token) for token in ids])
        return prompts

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the exact text of tokens, including special tokens."""
        return decode_exactly(self.tokenizer, tokens)

    def decode_certain(self, index: int, tokens: Sequence[int]) -> str:
        """Return the certain part of the text of a choice, from its tokens so far."""
        text = self._decode_after_prompt(index, tokens)
        return self._make_echo(index) + trim_uncertain_end(text, self.stops)

    def _make_echo(self, index: int) -> str:
        """Return the text before the sample of a choice: its prompt if `echo`, else ""."""
        prompt = self.body.prompt[index // self.n]
        if not self.body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self.decode(prompt)

    def _decode_after_prompt(self, index: int, tokens: Sequence[int]) -> str:
        """Return the exact text of the tokens of a choice. Tokenizers such as Llama 2's drop a
        space at the beginning of a text, which these tokens are not.
        """
        last = self.prompts[index // self.n][-1:]
        before, text = self.decode(last), self.decode([*last, *tokens])
        return text[len(before) :] if text.startswith(before) else self.decode(tokens)

    def _decode_sample(self, index: int, sequence: SampledSequence) -> str:
        """Return the sampled text of a choice, without the end token or stop text."""
        text = self._decode_after_prompt(index, sequence.tokens)
        cuts = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if cuts:
            return text[: min(cuts)]
        is_stopped = sequence.stop_reason == "stop"
        return self._decode_after_prompt(index, sequence.tokens[:-1]) if is_stopped else text

    def _make_logprobs(
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

    def make_choice(
        self, index: int, sequence: SampledSequence, top: TopLogprobs | None
    ) -> TextChoice:
        p = index // self.n
        prompt, response = self.prompts[p], self.responses[p]
        if not self.shows_samples:  # the prompt is scored, the sampled token is dropped
            sequence = SampledSequence([], [], "length")
        text = self._decode_sample(index, sequence)
        if self.shows_samples:
            self._record_text(prompt, sequence, text)
        choice: TextChoice = {
            "index": index,
            "text": self._make_echo(index) + text,
            "logprobs": None,
            "finish_reason": sequence.stop_reason,
        }
        if self.body.logprobs is not None:
            tokens, logprobs = [*sequence.tokens], [*(sequence.logprobs or ())]
            rows: list[TopRow] = list(top) if top else [None] * len(tokens)
            if self.is_scored:
                tokens, logprobs = prompt + tokens, [*(response.prompt_logprobs or ()), *logprobs]
                rows = [*(response.topk_prompt_logprobs or [None] * len(prompt)), *rows]
            choice["logprobs"] = self._make_logprobs(tokens, logprobs, rows)
        if self.body.return_token_ids:
            choice["token_ids"] = list(sequence.tokens)
            choice["prompt_token_ids"] = prompt
        return choice

    def make_response(self, choices: list[TextChoice]) -> TextResponse:
        usage = self._count_usage()
        return {**self.head, "object": "text_completion", "choices": choices, "usage": usage}


class TokenReply(SamplingReply):
    """Answer a prompt of token ids with a choice for each sample.

    The stop token is the last id of a choice. Tokens in `logprobs` are written `token_id:<id>`.
    """

    body: GenerateBody
    operation = "generate"

    async def prepare(self) -> None:
        fields = self.body.sampling_params
        self.n = fields.n
        self.params = fields.make_params(fields.max_tokens, prefix="sampling_params.")
        self.prompts = [self.body.token_ids]
        # before sampling: the model may be freed meanwhile
        self.tokenizer = await self.backend.tokenizer(self.body.model, self.session.owner)

    def make_choice(
        self, index: int, sequence: SampledSequence, top: TopLogprobs | None
    ) -> TokenChoice:
        tokens, tokenizer = list(sequence.tokens), self.tokenizer
        text = "" if tokenizer is None else str(tokenizer.decode(tokens))
        self._record_text(self.body.token_ids, sequence, text)
        logprobs = None
        if self.body.sampling_params.logprobs is not None:
            logprobs = make_content_logprobs(tokenizer, sequence, as_ids=True)
        return {
            "index": index,
            "token_ids": tokens,
            "finish_reason": sequence.stop_reason,
            "logprobs": logprobs,
        }

    def make_response(self, choices: list[TokenChoice]) -> TokenResponse:
        prompt = self.body.token_ids
        return {"request_id": make_id("gen"), "choices": choices, "prompt_token_ids": prompt}


@contextlib.contextmanager
def report_as_field_error(param: str, prefix: str = "") -> Iterator[None]:
    """Raise HttpError for a ValueError of a field, and for a text that the tokenizer cannot encode.

    The tokenizers library raises a bare Exception for an unknown word.
    """
    try:
        yield
    except ValueError as error:
        raise HttpError(400, f"{prefix}{error}", param) from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        text = f"{param} contains text that the model's tokenizer cannot encode ({error})"
        raise HttpError(400, text[:300], param) from error


def get_request_stop_texts(
    params: SamplingParams, renderer_stops: Sequence[str | int] = ()
) -> list[str]:
    """Return the stop texts of the request itself, which are cut off a response's text."""
    excluded = set(renderer_stops)
    return [item for item in params.stop or () if isinstance(item, str) and item not in excluded]


def make_response_head(kind: str, model: str | None) -> ResponseHead:
    """Return the fields that a response and each of its events begin with."""
    return {"id": make_id(kind), "created": int(time.time()), "model": model or "default"}
