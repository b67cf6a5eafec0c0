"""A server of an endpoint, as clients in other processes see it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from trime.serving.endpoint import Endpoint
from trime.serving.served import Served
from trime.serving.server import HOST


@contextmanager
def serving(served: Served) -> Iterator[str]:
    """Serve a model within a ``with`` block; its address."""
    listening = socket.create_server((HOST, 0))
    server = uvicorn.Server(uvicorn.Config(Endpoint(served), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.02)
    try:
        yield f"http://{HOST}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
