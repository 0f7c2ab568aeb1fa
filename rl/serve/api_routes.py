"""Build the routes of both protocols, and their description at /openapi.json and /docs."""

from __future__ import annotations

import asyncio
import html
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from rl.serve.http_errors import HttpError, SafeJSONResponse, make_error_response, report_error
from rl.serve.schemas import JsonBody, read_body, read_fields

_TITLE = "Whetstone: Tinker's protocol and an OpenAI-style endpoint"
_SCHEMA_PREFIX = "#/components/schemas/"
RouteHandler = Callable[..., Any]
# threads of handlers that are not coroutine functions, and may read large checkpoints: requests
# that train or sample do not wait for them, because they use the threads of `asyncio.to_thread`
_HANDLER_EXECUTOR = ThreadPoolExecutor(32, "whetstone-route")


class TypedRoute(Route):
    """Route requests to a handler: its result becomes a JSON response, any error an error response,
    which has OpenAI's form unless the path begins with /api/.

    A handler receives what its parameters name: `request`, `owner`, `body` (a JSON body, as the
    class of the parameter), and parameters of the path. A handler that is not a coroutine function
    runs in a thread, because it uses files or takes long.

    FastAPI describes the route, and does not run it: the handler limits the body's size before it
    parses the body, and checks some fields only when the request runs. FastAPI's own handling would
    also add a tenth to the CPU seconds of short requests.
    """

    def __init__(
        self,
        path: str,
        handler: RouteHandler,
        method: str = "POST",
        body_type: type[JsonBody] | str | None = None,
        response_types: Sequence[type] = (),
    ):
        """Create a route.

        body_type         class of a JSON body, or a media type, if the handler reads the body
        response_types    types of the JSON response and of an event of a stream
        """
        parameters = inspect.signature(handler, eval_str=True).parameters
        json_type: Any = parameters["body"].annotation if "body" in parameters else None
        is_coroutine = inspect.iscoroutinefunction(handler)

        async def endpoint(request: Request) -> Response:
            try:
                owner = get_request_owner(request)
                values: dict[str, Any] = {"request": request, "owner": owner, **request.path_params}
                if json_type is not None:
                    values["body"] = read_body(json_type, await read_fields(request))
                arguments = [values[name] for name in parameters]
                if is_coroutine:
                    result = await handler(*arguments)
                else:
                    loop = asyncio.get_running_loop()
                    result = await loop.run_in_executor(_HANDLER_EXECUTOR, handler, *arguments)
                return result if isinstance(result, Response) else SafeJSONResponse(result)
            except Exception as error:  # boundary: every failure is a response, not a traceback
                return make_error_response(report_error(error), not path.startswith("/api/"))

        endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__
        super().__init__(path, endpoint, methods=[method])
        self.body_type = json_type or body_type
        self.method, self.response_types = method, response_types

    def to_api_route(self) -> APIRoute:
        """Return the route in FastAPI's form, with its parameters and the reference to its body."""
        extra: dict[str, Any] = {
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in self.param_convertors
            ]
        }
        if isinstance(self.body_type, str):
            content = {self.body_type: {"schema": {"type": "string", "format": "binary"}}}
            extra["requestBody"] = {"content": content}
        elif self.body_type is not None:
            extra["requestBody"] = {"content": _refer_types([self.body_type])}
        if content := _refer_types(self.response_types):
            extra["responses"] = {"200": {"content": content}}
        return APIRoute(
            self.path,
            self.endpoint,
            methods=[self.method],
            response_model=None,
            openapi_extra=extra,
        )


def _refer_types(types: Sequence[type]) -> dict[str, Any]:
    """Return the references to the types of a JSON body and of an event of a stream."""
    return {
        media_type: {"schema": {"$ref": _SCHEMA_PREFIX + kind.__name__}}
        for media_type, kind in zip(("application/json", "text/event-stream"), types, strict=False)
    }


def get_request_owner(request: Request) -> str:
    """Return the owner of a request, as set by the surrounding application; "" without keys."""
    return str(getattr(request.state, "owner", "") or "")


def make_unsupported(feature: str) -> RouteHandler:
    """Return a handler that raises HttpError (400): `feature` is not supported."""

    async def refuse() -> Response:
        raise HttpError(400, f"not supported here: {feature}")

    return refuse


def make_description_routes(routes: Sequence[Any]) -> list[Route]:
    """Return the routes of /openapi.json, which describes the typed ones of `routes`, and of its
    page /docs, which loads nothing, not even from this server.
    """
    typed_routes = [route for route in routes if isinstance(route, TypedRoute)]
    api_routes = [route.to_api_route() for route in typed_routes]
    document = get_openapi(title=_TITLE, version="1", routes=api_routes)
    types: dict[str, Any] = {}
    for route in typed_routes:
        kinds = (route.body_type, *route.response_types)
        types |= {kind.__name__: kind for kind in kinds if isinstance(kind, type)}
    _, definitions = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(types[name])) for name in sorted(types)],
        ref_template=_SCHEMA_PREFIX + "{model}",
    )
    document.setdefault("components", {})["schemas"] = definitions["$defs"]
    rows = [
        f"<tr><td>{method.upper()}<td>{html.escape(path)}<td>{html.escape(text.partition('.')[0])}"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        for text in [operation.get("description", operation["summary"])]
    ]
    page = (
        f"<!doctype html><title>{_TITLE}</title><h1>{_TITLE}</h1><p>Every field with its bounds is "
        'in <a href="openapi.json">openapi.json</a>. This page has no interactive view, because '
        "its script would have to be loaded from another server: open openapi.json in any OpenAPI "
        f"viewer.<table>{''.join(rows)}</table>"
    )
    headers = {"content-security-policy": "default-src 'none'"}
    return [
        Route("/openapi.json", SafeJSONResponse(document), methods=["GET"]),
        Route("/docs", HTMLResponse(page, headers=headers), methods=["GET"]),
    ]
