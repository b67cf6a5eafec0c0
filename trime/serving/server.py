"""Serving of an endpoint until it is interrupted."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from contextlib import suppress
from importlib.util import find_spec

from trime.errors import UserError, install_command
from trime.serving.served import Served

HOST, PORT = "127.0.0.1", 8000
TOKEN = "TRIME_TOKEN"  # the variable that holds the token: a command line can be read by others


def serve(served: Served, host: str = HOST, port: int = 0, token: str | None = None) -> None:
    """Serve a model until it is interrupted; ``port`` 0 is one that is free, ``token`` by default that of the environment.

    UserError if the port is taken, packages are missing, or other machines are let in without a token.
    """
    if missing := [name for name in ("starlette", "uvicorn", "pydantic") if find_spec(name) is None]:
        raise UserError(f"an endpoint needs the packages {', '.join(missing)}: {install_command('serve')}")
    import uvicorn

    from trime.serving.endpoint import LOOPBACK, Endpoint

    token = token or os.environ.get(TOKEN)
    if host not in LOOPBACK and not token:
        raise UserError(f"{host} lets other machines in: set a token, such as {TOKEN}={secrets.token_urlsafe(16)}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"{host}, port {port} cannot be used ({error}): port 0 is one that is free") from None
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    page = f"{address}/#token={token}" if token else address
    print(f"{served.name}: the API is at {address}/v1, a page at {page} (Ctrl-C ends it)", flush=True)
    server = uvicorn.Server(uvicorn.Config(Endpoint(served, token), log_level="warning", timeout_graceful_shutdown=2))
    # A thread has a loop of its own: in a notebook one runs already.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    with suppress(KeyboardInterrupt):
        thread.join()
    server.should_exit = True
    thread.join()
    if not server.started:
        raise UserError("the server did not start: its error stands above")
