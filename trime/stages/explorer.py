"""serve: a page on this machine on which one types a text, sees which memories know it, and lets the model go on."""

from __future__ import annotations

import math
import socket
import threading
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trime.decoding.explanation import GeneratedToken, annotate, extend_shown
from trime.errors import UserError, install_command
from trime.lab.stage import Stage
from trime.report.canvas import memory_colours
from trime.report.page import first_shown
from trime.report.passages import SampledToken, annotate_token, rendered
from trime.report.run_result import VOCABULARY
from trime.stages.graph import Graph
from trime.stages.samples import Writer, open_writer

HOST = "127.0.0.1"  # the page is only for this machine
TOKENS = 200  # that are explained, or written, at once
ENTRIES = 3  # of memories, shown per token
LONGEST = 200_000  # characters of a text


class ExplorerRequest(BaseModel):
    """A request of the page: ``write`` so many tokens after a text, or explain it (0); ``silent`` memories are switched off."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(max_length=LONGEST)]
    write: Annotated[int, Field(ge=0, le=TOKENS)] = 0
    temperature: Annotated[float, Field(ge=0, le=5)] = 0.0
    silent: list[str] = []


class Explorer:
    """A writer whose answers are shown on a page, one after another."""

    def __init__(self, writer: Writer):
        self.writer, self.lock = writer, threading.Lock()
        self.colours = memory_colours([VOCABULARY, *writer.memories])
        del self.colours[VOCABULARY]

    def page(self) -> str:
        """Return the HTML of the page on which texts are typed."""
        label = f"{self.writer.graph.config.name}, {self.writer.label}"
        return rendered("explorer.html", label=label, colours=self.colours, tokens=TOKENS)

    def answer(self, asked: ExplorerRequest) -> dict[str, str]:
        """Return the text as it is then, its explained tokens as HTML, and a sentence on them; UserError for an empty text."""
        if unknown := {*asked.silent} - {*self.colours}:
            raise UserError(f"there is no memory {', '.join(sorted(unknown))}")
        with self.lock:
            writer = self.writer
            ids = writer.token_ids(asked.text)
            if not ids:
                raise UserError("the text is empty")
            writer.restart({"max_new_tokens": asked.write, "temperature": asked.temperature, "top_p": 1.0, "entries": ENTRIES})
            writer.continuation.silent = frozenset(asked.silent)
            first = len(ids) if asked.write else max(0, len(ids) - TOKENS)
            writer.continuation.read(ids[:first])
            explained = [*(writer.write(explain=True) if asked.write else writer.explain(ids[first:], ENTRIES))]
            ids += writer.written
            texts = [writer.text(ids[: first + count]) for count in range(1, len(explained) + 1)]
            before, after = writer.text(ids[:first]), writer.text(ids)
        tokens = [SampledToken(**token) for token in annotate(explained, texts, before)]
        opened = first_shown(tokens)
        shown = [annotate_token(token, self.colours, token is opened) for token in tokens]
        html = rendered("explored.html", given=before[-2000:], tokens=shown)
        # The typed text stays as it is: a tokenizer does not restore all of it.
        text = asked.text + extend_shown(before, after)[0] if asked.write else asked.text
        return {"html": html, "text": text, "said": summary(explained, bool(asked.write))}


def summary(tokens: list[GeneratedToken], written: bool) -> str:
    """Return a sentence on explained tokens: how many, how surprising, and how much of them came from memories."""
    loss = -sum(math.log(max(token.probability, 1e-300)) for token in tokens) / len(tokens)
    total = sum(token.probability for token in tokens)
    share = sum(token.probability - token.parts[VOCABULARY] for token in tokens) / max(total, 1e-300)
    made = f"{len(tokens)} tokens written" if written else f"perplexity {math.exp(loss):,.2f} of {len(tokens)} tokens"
    return f"{made}; memories give {100 * share:.0f} % of their probability"


def app_of(explorer: Explorer) -> Any:
    """Return the ASGI application that shows an explorer's page and gives its answers, only to this machine."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(explorer.page())

    async def answer(request: Request) -> JSONResponse:
        # Pages of other sites can send forms to this machine, but no JSON.
        if request.headers.get("content-type") != "application/json":
            return JSONResponse({"said": "send JSON"}, 415)
        try:
            asked = ExplorerRequest.model_validate_json(await request.body())
            return JSONResponse(await run_in_threadpool(explorer.answer, asked))
        except ValidationError as error:
            first = error.errors()[0]
            return JSONResponse({"said": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 400)
        except UserError as error:
            return JSONResponse({"said": str(error)}, 400)

    only_here = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])  # whatever name a page found it by
    return Starlette(routes=[Route("/", page), Route("/answer", answer, methods=["POST"])], middleware=[only_here])


def serve(writer: Writer, port: int) -> None:
    """Show a writer's page until it is interrupted; UserError if the port is taken or packages are missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError:
        raise UserError(f"the explorer needs the packages starlette and uvicorn: {install_command('serve')}") from None
    try:
        listening = socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        raise UserError(f"port {port} cannot be used ({error}): 0 takes one that is free (serve.port=0)") from None
    print(f"explorer: http://{HOST}:{listening.getsockname()[1]} (Ctrl-C ends it)", flush=True)
    server = uvicorn.Server(uvicorn.Config(app_of(Explorer(writer)), log_level="warning"))
    # A thread has a loop of its own: in a notebook one runs already.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    with suppress(KeyboardInterrupt):
        thread.join()
    server.should_exit = True
    thread.join()
    if not server.started:
        raise UserError("the explorer's server did not start: its error stands above")


def serve_run(graph: Graph) -> None:
    """Serve the last row of an experiment."""
    serve(open_writer(graph), graph.config.serve.port)


SERVE = Stage("serve", report=serve_run)
