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


class ChatRequestError(Exception):
    """Raised if a request has no reply."""


class ChatClient:
    """Send conversations to a server's `/chat/completions`.

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
        except (ChatRequestError, KeyError, TypeError) as error:
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
    ) -> list[dict[str, Any] | ChatRequestError]:
        """Return the server's choice for each prompt, or the error of a prompt without a reply.

        `seeds`: the `seed` of each request. `fields`: further fields of the requests. Requests are
        sent 64 at a time. One that fails with 429, 5xx or without a connection is sent up to five
        times. Raises UserError if no prompt has a reply.
        """
        self.find_model()

        def complete(prompt: Sequence[Message], seed: int) -> dict[str, Any] | ChatRequestError:
            body = {"model": self.model, "messages": list(prompt), "seed": seed, **fields}
            try:
                return self._send("/chat/completions", body)["choices"][0]
            except ChatRequestError as error:
                return error
            except (KeyError, IndexError, TypeError):
                return ChatRequestError("the reply has no choices")

        with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
            replies = list(pool.map(complete, prompts, seeds))
        errors = [reply for reply in replies if isinstance(reply, ChatRequestError)]
        if errors and len(errors) == len(replies):
            raise UserError(
                f"{self.url} answered none of {len(replies)} requests: {errors[0]}. Start the "
                "server again and continue the run with --resume"
            )
        return replies

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON reply of a GET, or of a POST of `body`. Raises ChatRequestError."""
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
                problem = ChatRequestError(f"HTTP {error.code}: {text[:_TEXT_LIMIT]}")
                if error.code != 429 and error.code < 500:
                    raise problem from error
            except (OSError, http.client.HTTPException) as error:
                problem = ChatRequestError(_describe(error))
            except ValueError as error:
                raise ChatRequestError(f"the reply is no JSON: {error}") from error
            if wait is None:
                raise problem
            time.sleep(wait)
        raise AssertionError("not reached")


def _describe(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__
