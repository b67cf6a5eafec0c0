"""The application: /v1/models, /v1/completions and /v1/chat/completions as OpenAI's clients speak them, and a page over them.

Requests are answered one after another, in the order in which they came; one whose client is gone is left. Only this machine is
answered, unless a host and a token are given, and no page of another site.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trime.errors import UserError
from trime.report.passages import rendered
from trime.serving.answers import Form, Piece, Usage, answer
from trime.serving.requests import AskedChat, AskedCompletion, parsed
from trime.serving.served import Served

log = logging.getLogger(__name__)

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
LARGEST = 4 * 2**20  # bytes of a request
SHOWN = 200  # tokens that the page explains, or writes, at once
PATIENCE = 0.2  # seconds between two looks whether a client is still there
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
AskedKind = type[AskedCompletion] | type[AskedChat]


class RefusedError(Exception):
    """A request that is refused whatever it asks for: the status, a message, and a code."""

    def __init__(self, status: int, message: str, code: str):
        super().__init__(message)
        self.status, self.code = status, code


class Job:
    """A request that is answered in the thread of answers; its pieces come to the server's loop."""

    def __init__(self, served: Served, asked: AskedCompletion | AskedChat):
        self.served, self.asked = served, asked
        self.loop, self.pieces = asyncio.get_running_loop(), asyncio.Queue[Piece | Usage | Exception]()
        self.is_left = threading.Event()

    def run(self) -> None:
        """Answer the request, in the thread of answers; the usage or an error comes last."""
        if self.is_left.is_set():
            return
        try:
            self.emit(answer(self.served, self.asked, self.emit))
        except UserError as error:
            self.emit(error)
        except Exception as error:
            log.exception("a request failed")
            self.emit(error)

    def emit(self, piece: Piece | Usage | Exception) -> bool:
        """Send a piece; return whether anyone listens."""
        if not self.is_left.is_set():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        return not self.is_left.is_set()

    async def next(self) -> Piece | Usage:
        """Return the next piece, or the usage as the last; raises what went wrong."""
        piece = await self.pieces.get()
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def watch(self, request: Request) -> None:
        """Leave the request when its client is gone."""
        while not await request.is_disconnected():
            await asyncio.sleep(PATIENCE)
        self.is_left.set()
        self.pieces.put_nowait(RefusedError(499, "the client went away", "gone"))


class Endpoint:
    """An ASGI application for a served model. Hosts other than this machine need a ``token``, which their clients send."""

    def __init__(self, served: Served, token: str | None = None):
        self.served, self.token = served, token
        self.worker = ThreadPoolExecutor(1, "answers")
        routes = [
            Route("/", self.page),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        handled = dict.fromkeys((RefusedError, UserError, HTTPException, Exception), refused)
        self.application = Starlette(routes=routes, exception_handlers=handled)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        if scope["type"] != "http":
            return await self.application(scope, receive, send)
        try:
            self.check(Headers(scope=scope), scope["path"])
        except RefusedError as error:
            return await (await refused(None, error))(scope, receive, send_guarded)
        return await self.application(scope, receive, send_guarded)

    def check(self, headers: Headers, path: str) -> None:
        """Raise RefusedError for what a page of another site sends, under whatever name, and for a wrong token."""
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name, site = urlsplit(f"//{host}").hostname, None if origin is None else urlsplit(origin).netloc
        except ValueError:
            raise RefusedError(400, "Host or Origin is no address", "wrong_host") from None
        if self.token is None and name not in LOOPBACK:
            raise RefusedError(421, f"the host {host[:80]!r} is not this machine", "wrong_host")
        if site not in (None, host):
            raise RefusedError(403, "pages of other sites are not answered", "wrong_origin")
        if self.token is not None and path != "/":  # the page asks for nothing and holds no text
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                raise RefusedError(401, "send the token of this endpoint as the API key", "invalid_api_key")

    async def page(self, request: Request) -> Response:
        """Return the page on which texts are typed."""
        served = self.served
        about = {"colours": served.colours, "titles": served.titles, "silenced": served.can_be_silent}
        return HTMLResponse(rendered("explorer.html", label=served.name, tokens=SHOWN, **about))

    async def models(self, request: Request) -> Response:
        """Return the one model there is."""
        about = {"id": self.served.name, "object": "model", "created": 0, "owned_by": "trime"}
        return JSONResponse({"object": "list", "data": [about]})

    async def completions(self, request: Request) -> Response:
        """Answer a request of /v1/completions."""
        return await self.answered(request, AskedCompletion)

    async def chat(self, request: Request) -> Response:
        """Answer a request of /v1/chat/completions."""
        return await self.answered(request, AskedChat)

    async def answered(self, request: Request, kind: AskedKind) -> Response:
        """Answer a request, whole or as a stream of events."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RefusedError(415, "send JSON, with content-type: application/json", "unsupported_media_type")
        asked = parsed(kind, await body_of(request))
        if asked.model not in (None, self.served.name):
            raise RefusedError(404, f"there is no model {asked.model[:80]!r}, only {self.served.name!r}", "model_not_found")
        job, form = Job(self.served, asked), Form(self.served, asked)
        self.worker.submit(job.run)
        watching, pieces = asyncio.ensure_future(job.watch(request)), list[Piece]()
        try:
            piece = await job.next()
            while isinstance(piece, Piece) and not asked.stream:
                pieces.append(piece)
                piece = await job.next()
        finally:
            watching.cancel()
        if asked.stream:
            return StreamingResponse(events(job, form, piece), media_type="text/event-stream")
        assert isinstance(piece, Usage)
        return JSONResponse(form.whole(pieces, piece))


async def body_of(request: Request) -> bytes:
    """Return the body of a request; RefusedError where it is too large."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST:
            raise RefusedError(413, f"a request has at most {LARGEST // 2**20} MB", "request_too_large")
    return body


async def events(job: Job, form: Form, piece: Piece | Usage) -> AsyncIterator[str]:
    """Yield the events of a streamed answer, the first of whose pieces is there; who is gone closes it, and the job is left."""
    try:
        while isinstance(piece, Piece):
            if piece.text or piece.tokens or piece.finish:
                yield event(form.chunk(piece))
            piece = await job.next()
        options = form.asked.stream_options
        if options and options.include_usage:
            yield event(form.head | {"choices": [], "usage": piece.to_json()})
        yield "data: [DONE]\n\n"
    except UserError as error:
        yield event(error_body(str(error)))
    finally:
        job.is_left.set()


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"


def error_body(message: str, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": " ".join(message.split()), "type": kind, "param": None, "code": code}}


async def refused(request: Any, error: Exception) -> Response:
    """Return the answer to a request that failed."""
    if isinstance(error, RefusedError):
        return JSONResponse(error_body(str(error), error.code), error.status)
    if isinstance(error, UserError):
        return JSONResponse(error_body(str(error)), 400)
    if isinstance(error, HTTPException):
        return JSONResponse(error_body(f"{request.method} {request.url.path}: {error.detail}"), error.status_code)
    return JSONResponse(error_body("the request failed: the server's log says why", kind="server_error"), 500)
