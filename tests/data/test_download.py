"""Downloads from a local server: several sources, checksum, resume."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trime.data.datasets.download import fetch
from trime.errors import UserError

CONTENT = bytes(range(256)) * 20_000
DIGEST = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Server(BaseHTTPRequestHandler):
    """Serves /good with ranges, /broken with half the content, /other with other bytes, and 404 elsewhere."""

    requests: list[tuple[str, str | None]] = []

    def do_GET(self) -> None:
        byte_range = self.headers.get("Range")
        self.requests.append((self.path, byte_range))
        if self.path not in ("/good", "/broken", "/other"):
            self.send_error(404)
            return
        start = int(byte_range.removeprefix("bytes=").rstrip("-")) if byte_range else 0
        body = (CONTENT if self.path != "/other" else CONTENT[::-1])[start:]
        self.send_response(206 if byte_range else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path == "/broken" else body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture()
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Server.requests.clear()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_next_source_where_one_fails(address: str, tmp_path: Path) -> None:
    target = fetch([f"{address}/gone", f"{address}/other", f"{address}/good"], DIGEST, tmp_path / "a" / "file.zip")
    assert target.read_bytes() == CONTENT and [path for path, _ in Server.requests] == ["/gone", "/other", "/good"]
    fetch([f"{address}/gone"], DIGEST, target)
    assert len(Server.requests) == 3, "an existing file is not downloaded again"


def test_an_interrupted_download_is_resumed(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"put that file .*file\.zip"):
        fetch([f"{address}/broken"], DIGEST, tmp_path / "file.zip")
    assert fetch([f"{address}/good"], DIGEST, tmp_path / "file.zip").read_bytes() == CONTENT
    assert Server.requests[-1] == ("/good", f"bytes={len(CONTENT) // 2}-")
