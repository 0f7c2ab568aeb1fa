"""Call a model behind an OpenAI-compatible chat API, such as a vLLM server."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl.errors import UserError
from rl.types import Message

API_KEY_VARIABLE = "OPENAI_API_KEY"
_CONCURRENT_REQUESTS = 64
_REQUEST_SECONDS = 120.0  # time limit of an attempt
# Waits before the next attempts of a request whose failure may pass: 429, 5xx, no connection.
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)
_TEXT_LIMIT = 300  # characters of a server's error that are shown
_REMEDY = "Start the server again and continue the run with --resume"


class APIRequestError(Exception):
    """Raised if a request has no reply."""


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

    def find_model(self) -> None:
        """Find out the model of an address that names none. Raises UserError if the server does
        not answer, or has several models.
        """
        if self.model:
            return
        try:
            names = [str(entry["id"]) for entry in self._send("/models")["data"]]
        except (APIRequestError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.url}/models lists no models ({_describe(error)}): start the server, or "
                "correct the address, such as http://localhost:8000/v1 or "
                "https://host/v1#MODEL"
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

        `seeds`: the `seed` of each request. `fields`: further fields of the requests. Raises
        UserError if no conversation has a reply.
        """
        bodies = [
            {"messages": list(prompt), "seed": seed, **fields}
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        replies = self._request_choices("/chat/completions", bodies)
        errors = [reply for reply in replies if isinstance(reply, APIRequestError)]
        if errors and len(errors) == len(replies):
            raise UserError(
                f"{self.url} answered none of {len(replies)} requests: {errors[0]}. {_REMEDY}"
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
                    f"{_REMEDY}"
                )
            results.append(scores)
        return results

    def _request_choices(
        self, path: str, bodies: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any] | APIRequestError]:
        """Return the first choice of the reply to each body, or the error of one without a reply.

        Requests are sent 64 at a time. One that fails with 429, 5xx or without a connection is
        sent up to five times.
        """
        self.find_model()

        def request(body: dict[str, Any]) -> dict[str, Any] | APIRequestError:
            try:
                return self._send(path, {"model": self.model, **body})["choices"][0]
            except APIRequestError as error:
                return error
            except (KeyError, IndexError, TypeError):
                return APIRequestError("the reply has no choices")

        with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
            return list(pool.map(request, bodies))

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON reply of a GET, or of a POST of `body`. Raises APIRequestError."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for wait in (*_RETRY_SECONDS, None):
            request = urllib.request.Request(self.url + path, data, headers)
            try:
                with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                text = error.read(10_000).decode("utf-8", "replace")
                problem = APIRequestError(f"HTTP {error.code}: {text[:_TEXT_LIMIT]}")
                if error.code != 429 and error.code < 500:
                    raise problem from error
            except (OSError, http.client.HTTPException) as error:
                problem = APIRequestError(_describe(error))
            except ValueError as error:
                raise APIRequestError(f"the reply is no JSON: {error}") from error
            if wait is None:
                raise problem
            time.sleep(wait)
        raise AssertionError("not reached")


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
