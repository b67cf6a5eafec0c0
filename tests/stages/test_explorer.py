"""The explorer: what its page shows is what the model says, with any memories switched off, and to this machine alone."""

from __future__ import annotations

import asyncio
import html
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from tests.helpers.browser import in_a_browser, seen_at
from tests.helpers.runs import SharedRun
from trime.bundle.loaded_model import load
from trime.errors import UserError
from trime.stages.explorer import HOST, Explorer, ExplorerRequest, app_of, serve

TEXT = "import os\nimport sys\nfor name in os.listdir ( path ) :\n"


@pytest.fixture(scope="module")
def explorer(language: SharedRun) -> Explorer:
    return Explorer(load(language.folder).writer)


def probabilities(explorer: Explorer, *silent: str, text: str = TEXT) -> list[dict[str, float]]:
    """Return the parts of the probability of each token of a text as the page shows them."""
    shown = explorer.answer(ExplorerRequest(text=text, silent=[*silent]))["html"]
    templates = re.findall(r"<template>(.*?)</template>", shown, re.S)
    return [
        {"whole": float(re.search(r"has probability ([\d.]+)\.</p>", one)[1])}  # type: ignore[index]
        | {name: float(part) for name, part in re.findall(r"<td>(\w+)</td><td class=\"number\">([\d.]+)</td>", one)}
        for one in templates
    ]


def test_a_page_shows_what_the_model_says(explorer: Explorer) -> None:
    tokens = probabilities(explorer)
    scored = explorer.writer.score(explorer.writer.token_ids(TEXT))
    assert [token["whole"] for token in tokens] == pytest.approx([token.probability for token in scored], abs=1e-4)
    assert all(sum(token.values()) == pytest.approx(2 * token["whole"], abs=5e-4) for token in tokens)


def test_memories_are_switched_off_and_on(explorer: Explorer) -> None:
    """A silent memory proposes nothing, and the others share its weight; nothing of that stays."""
    long = 4 * TEXT  # of several windows
    every, names = probabilities(explorer, text=long), [*explorer.colours]
    for name in names:
        parts = probabilities(explorer, name, text=long)
        assert not any(token[name] for token in parts) and any(a != b for a, b in zip(parts, every, strict=True)), name
    alone = probabilities(explorer, *names, text=long)
    assert all(token["vocabulary"] == token["whole"] for token in alone)
    assert probabilities(explorer, text=long) == every


def test_a_text_goes_on(explorer: Explorer) -> None:
    asked = ExplorerRequest(text=TEXT, write=5)
    first, again = explorer.answer(asked), explorer.answer(asked)
    assert first == again and first["text"].startswith(TEXT) and first["said"].startswith("5 tokens written")
    assert first["html"].count("<template>") == 5 and "↵" not in first["text"]
    with pytest.raises(UserError, match="empty"):
        explorer.answer(ExplorerRequest(text=""))
    with pytest.raises(UserError, match="no memory other"):
        explorer.answer(ExplorerRequest(text=TEXT, silent=["other"]))


def test_what_is_typed_is_text(explorer: Explorer) -> None:
    assert "<script>" not in explorer.answer(ExplorerRequest(text="<script>alert ( 1 )</script>\n"))["html"]


def test_only_this_machine_is_answered(explorer: Explorer) -> None:
    """A page of another site can neither send what it likes nor read the answer under a name of its own."""
    client = pytest.importorskip("starlette.testclient").TestClient(app_of(explorer), base_url=f"http://{HOST}")
    assert "textarea" in client.get("/").text and client.get("/", headers={"host": "elsewhere.org"}).status_code == 400
    assert client.post("/answer", content="{}", headers={"content-type": "text/plain"}).status_code == 415
    for wrong in ({"text": ""}, {"text": TEXT, "write": 10**6}, {"write": 3}, {"text": TEXT, "silent": ["x"]}):
        answer = client.post("/answer", json=wrong)
        assert answer.status_code == 400 and len(answer.json()["said"].splitlines()) == 1
    assert client.post("/answer", json={"text": TEXT}).json()["said"].startswith("perplexity")


def test_a_port_that_is_taken_is_named(explorer: Explorer) -> None:
    with socket.create_server((HOST, 0)) as taken, pytest.raises(UserError, match="0 takes one that is free"):
        serve(explorer.writer, taken.getsockname()[1])


def test_it_runs_where_a_loop_runs_already(explorer: Explorer, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a notebook, whose cell goes on when it is interrupted."""
    pytest.importorskip("uvicorn")
    pages = []

    def visit() -> None:
        try:
            while not (address := re.search(r"http://\S+", capsys.readouterr().out)):
                time.sleep(0.05)
            with urlopen(address[0], timeout=60) as page:
                pages.append(page.read().decode())
        finally:  # or the test would never end
            os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> str:
        serve(explorer.writer, 0)
        return "went on"

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    loop, visitor = asyncio.new_event_loop(), threading.Thread(target=visit, daemon=True)
    visitor.start()
    try:
        assert loop.run_until_complete(cell()) == "went on" and "textarea" in pages[0]
    finally:
        loop.close()
        signal.signal(signal.SIGINT, before)


@in_a_browser
def test_a_browser_shows_it(explorer: Explorer, tmp_path: Path) -> None:
    """A text in the address is explained at once, and its first word's sources are open."""
    uvicorn = pytest.importorskip("uvicorn")
    listening = socket.create_server((HOST, 0))
    server = uvicorn.Server(uvicorn.Config(app_of(explorer), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.05)
    address = f"http://{HOST}:{listening.getsockname()[1]}/?text={quote(TEXT)}"
    seen = html.unescape(seen_at(address, tmp_path))
    server.should_exit = True
    thread.join(30)
    assert re.search(r"<output[^>]*>perplexity [\d.,]+ of \d+ tokens", seen) and "has probability" in seen
    assert seen.count('role="button"') == len(explorer.writer.token_ids(TEXT))
    assert seen.count('tabindex="0" aria-pressed="true"') == 1
