"""Call a model behind an OpenAI-compatible API, such as a vLLM server."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rl.errors import UserError
from rl.types import Message, ModelInput

if TYPE_CHECKING:
    from rl.client import TrainingClient

API_KEY_VARIABLE = "OPENAI_API_KEY"
_CONCURRENT_REQUESTS = 64
_REQUEST_SECONDS = 120.0  # time limit of an attempt
_MODELS_SECONDS = 10.0  # the same, of the request for the list of models
# Waits before the next attempts of a request whose failure may pass: 429, 5xx, no connection.
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_MAX_RETRY_AFTER = 60.0  # seconds that a server may ask to wait (Retry-After)
_TEXT_LIMIT = 300  # characters of a server's error that are shown


class APIRequestError(Exception):
    """Raised if a request has no reply. `status`: the HTTP status of its error, if it has one."""

    def __init__(self, text: str, status: int | None = None):
        super().__init__(text)
        self.status = status

    @property
    def is_retryable(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.status is None or self.status == 429 or self.status >= 500

    @property
    def remedy(self) -> str:
        """Return what a user can do about the error."""
        if self.status in (401, 403):
            return f"Set {API_KEY_VARIABLE} to a valid key"
        if not self.is_retryable:
            return "Correct what the server names, such as the model or --max-tokens"
        return "Start the server again and continue the run with --resume"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turn a redirect into an HTTPError: the next server would get the key, and no body."""

    def redirect_request(self, *args: Any) -> None:
        return None


class OpenAIClient:
    """Send conversations and sequences of tokens to a server.

    `address`: http://host:8000/v1, where /v1 may be left out, or with #MODEL at its end if the
    server has several models. The key is read from OPENAI_API_KEY.
    """

    def __init__(self, address: str):
        base, _, self.model = address.partition("#")
        self.url = base.rstrip("/")
        if not urllib.parse.urlsplit(self.url).path:
            self.url += "/v1"
        self._opener = urllib.request.build_opener(_NoRedirects)
        # the field of the maximum length: OpenAI's newer models take another than most servers
        self._length_field = "max_tokens"

    def find_model(self) -> None:
        """Find out the model of an address that names none. Raises UserError if the server does
        not answer, or has several models.
        """
        if self.model:
            return
        try:
            reply = self._send("/models", seconds=_MODELS_SECONDS)
            names = [str(entry["id"]) for entry in reply["data"]]
        except (APIRequestError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.url}/models lists no models ({_describe(error)}): start the server, or "
                "correct the address, such as http://localhost:8000/v1 or https://host/v1#MODEL"
            ) from error
        if len(names) != 1:
            raise UserError(
                f"{self.url} has {len(names)} models: add the name of one to the address, such as "
                f"{self.url}#{names[0] if names else 'MODEL'} (it has "
                f"{', '.join(names[:10]) or 'none'})"
            )
        self.model = names[0]

    def complete_many(
        self, prompts: Sequence[Sequence[Message]], seeds: Sequence[int], **fields: Any
    ) -> list[dict[str, Any] | APIRequestError]:
        """Return the server's choice for each conversation, or the error of one without a reply.

        `seeds`: the `seed` of each request. `fields`: further fields of the requests; `max_tokens`
        is sent as `max_completion_tokens` to a server that asks for it. Raises UserError if no
        conversation has a reply.
        """
        bodies = [
            {"messages": list(prompt), "seed": seed, **fields}
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        replies = self._request_choices("/chat/completions", bodies)
        errors = [reply for reply in replies if isinstance(reply, APIRequestError)]
        if errors and len(errors) == len(replies):
            raise UserError(
                f"{self.url} answered none of {len(replies)} requests: {errors[0]}. "
                f"{errors[0].remedy}"
            )
        return replies

    def score_many(self, sequences: Sequence[Sequence[int]]) -> list[tuple[list[str], list[float]]]:
        """Return (texts, logprobs) of the tokens of each sequence. The logprob of token i is that
        of predicting it from those before it at temperature 1, and 0 for the first.

        Raises UserError if a sequence has no reply.
        """
        bodies = [
            {"prompt": list(tokens), "echo": True, "logprobs": 1, "max_tokens": 1}
            for tokens in sequences
        ]
        results = []
        for tokens, reply in zip(
            sequences, self._request_choices("/completions", bodies), strict=True
        ):
            scores = _read_token_logprobs(reply, len(tokens))
            if isinstance(scores, APIRequestError):
                raise UserError(
                    f"{self.url} did not score a sequence of {len(tokens)} tokens: {scores}. "
                    f"{scores.remedy}"
                )
            results.append(scores)
        return results

    def _request_choices(
        self, path: str, bodies: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any] | APIRequestError]:
        """Return the first choice of the reply to each body, or the error of one without a reply.

        Requests are sent 64 at a time. One that fails with 429, 5xx or without a connection is
        sent up to seven times. No more are sent after 64 have failed and none has succeeded.
        """
        self.find_model()
        failures: list[APIRequestError] = []
        successes: list[bool] = []

        def request(body: dict[str, Any]) -> dict[str, Any] | APIRequestError:
            if len(failures) >= _CONCURRENT_REQUESTS and not successes:
                return failures[0]
            try:
                choice = self._send_completion(path, {"model": self.model, **body})["choices"][0]
                if not isinstance(choice, dict):
                    raise TypeError("a choice is an object")
            except (APIRequestError, KeyError, IndexError, TypeError) as error:
                if not isinstance(error, APIRequestError):
                    error = APIRequestError("the reply has no choices")
                failures.append(error)
                return error
            successes.append(True)
            return choice

        with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
            return list(pool.map(request, bodies))

    def _send_completion(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON reply of a POST, with the maximum length in the field that the server
        takes.
        """
        while True:
            field = self._length_field
            renamed = {field if name == "max_tokens" else name: v for name, v in body.items()}
            try:
                return self._send(path, renamed)
            except APIRequestError as error:
                other = "max_completion_tokens"
                if field == other or error.status != 400 or other not in str(error):
                    raise
                self._length_field = other

    def _send(
        self, path: str, body: dict[str, Any] | None = None, seconds: float = _REQUEST_SECONDS
    ) -> Any:
        """Return the JSON reply of a GET, or of a POST of `body`. Raises APIRequestError, and
        UserError for a key that no header can hold.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY_VARIABLE, "").strip():
            if not (key.isascii() and key.isprintable()):
                raise UserError(
                    f"{API_KEY_VARIABLE} holds characters that no key has, such as a line break or "
                    "an invisible space: set it to the key alone"
                )
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for wait in (*_RETRY_SECONDS, None):
            request = urllib.request.Request(self.url + path, data, headers)
            try:
                with self._opener.open(request, timeout=seconds) as reply:
                    content = reply.read()
                break
            except urllib.error.HTTPError as error:
                problem = _read_http_error(error)
                # the server may ask to wait longer
                delay = error.headers.get("Retry-After", "")
                if wait and delay.isdigit():
                    wait = max(wait, min(float(delay), _MAX_RETRY_AFTER))
            except (OSError, http.client.HTTPException) as error:
                problem = APIRequestError(_describe(error))
            if wait is None or not problem.is_retryable:
                raise problem
            time.sleep(wait)
        try:
            return json.loads(content)
        except ValueError as error:
            raise APIRequestError(f"the reply is no JSON: {error}") from error


def _read_http_error(error: urllib.error.HTTPError) -> APIRequestError:
    """Return the error with the first characters of the reply, which may be cut off."""
    if 300 <= error.code < 400 and (location := error.headers.get("Location")):
        text = f"a redirect to {location}, which is not followed: set the address behind it"
        return APIRequestError(f"HTTP {error.code}: {text}", error.code)
    try:
        text = error.read(10_000).decode("utf-8", "replace")[:_TEXT_LIMIT]
    except (OSError, http.client.HTTPException):
        text = str(error.reason)
    return APIRequestError(f"HTTP {error.code}: {text}", error.code)


def _describe(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__


def _read_token_logprobs(
    choice: dict[str, Any] | APIRequestError, length: int
) -> tuple[list[str], list[float]] | APIRequestError:
    """Return (texts, logprobs) of the first `length` tokens of an echoed prompt, or an error."""
    if isinstance(choice, APIRequestError):
        return choice
    try:
        texts = [str(text) for text in choice["logprobs"]["tokens"][:length]]
        logprobs = [float(logp) for logp in choice["logprobs"]["token_logprobs"][1:length]]
    except (KeyError, TypeError, ValueError):
        return APIRequestError("the reply has no logprobs of the prompt (echo, logprobs)")
    if len(texts) != length or len(logprobs) != length - 1:
        return APIRequestError(f"the reply has logprobs of {len(texts)} tokens")
    return texts, [0.0, *logprobs]


_SAMPLE_SIZE = 100  # tokens of the vocabulary that are compared


class APIScoringClient:
    """Compute logprobs of given tokens, as a sampling client does (`compute_logprobs_many`).

    The server echoes prompts of token ids with their logprobs (`/completions`), which are those of
    temperature 1.
    """

    def __init__(self, client: OpenAIClient):
        self.client = client

    def check_vocabulary(self, student: TrainingClient, name: str) -> None:
        """Raise UserError unless the server reads up to 100 token ids, spread over the student's
        vocabulary, as the same texts.
        """
        tokenizer = student.info["tokenizer"]
        if tokenizer is None:
            raise UserError(
                f"the {name} is behind an API, which is asked about sample tokens, and the policy "
                "has no tokenizer: set --tokenizer"
            )
        size = len(tokenizer)
        ids = sorted({*range(size)} - {*tokenizer.all_special_ids})
        # ASCII, since servers show a token that is a part of a character in different ways
        texts = {i: tokenizer.decode([i]).strip() for i in ids[:: max(1, size // _SAMPLE_SIZE)]}
        expected = {i: text for i, text in texts.items() if text and text.isascii()}
        ((received, _),) = self.client.score_many([list(expected)])
        for (token, text), other in zip(expected.items(), received, strict=True):
            if other.strip() != text:
                raise UserError(
                    f"the {name} has another vocabulary than the policy: token {token} is "
                    f"{text!r} in the policy's and {other[:50]!r} in the other. Choose a model of "
                    "the policy's family"
                )

    def compute_logprobs_many(
        self, inputs: Sequence[ModelInput], temperature: float = 1.0
    ) -> Future[list[list[float | None]]]:
        """Return a future of the logprobs of each input's tokens, None for its first. Raises
        UserError for another temperature than 1.
        """
        if temperature != 1:
            raise UserError(
                f"the server at {self.client.url} returns logprobs at temperature 1, and "
                f"temperature {temperature:g} is set: set --temperature 1"
            )
        scores = self.client.score_many([tokens.to_ints() for tokens in inputs])
        future: Future[list[list[float | None]]] = Future()
        future.set_result([[None, *logprobs[1:]] for _, logprobs in scores])
        return future

    def release(self) -> None:
        """Do nothing: the server holds the weights."""
