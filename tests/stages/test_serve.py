"""The endpoint of an experiment: it says what the model says, with any memories switched off."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
import time
from typing import Any
from urllib.request import urlopen

import pytest

from tests.helpers.runs import SharedRun
from trime.bundle.loaded_model import LoadedModel, load
from trime.errors import UserError
from trime.serving.server import HOST, serve
from trime.stages.serve import ServedWriter

TEXT = "import os\nimport sys\nfor name in os.listdir ( path ) :\n"
testclient = pytest.importorskip("starlette.testclient")


@pytest.fixture(scope="module")
def loaded(language: SharedRun) -> LoadedModel:
    return load(language.folder)


@pytest.fixture(scope="module")
def served(loaded: LoadedModel) -> ServedWriter:
    return ServedWriter(loaded.writer)


def answered(served: ServedWriter, status: int = 200, **asked: Any) -> dict[str, Any]:
    """Return the only choice of an answer, or its error."""
    from trime.serving.endpoint import Endpoint

    client = testclient.TestClient(Endpoint(served), base_url=f"http://{HOST}")
    response = client.post("/v1/completions", json={"prompt": TEXT, "temperature": 0, **asked})
    assert response.status_code == status, response.text
    content = response.json()
    return content["choices"][0] if status == 200 else content["error"]


def explained(served: ServedWriter, *silent: str, text: str = TEXT) -> list[dict[str, Any]]:
    """Return the tokens of a text with the parts of their probability."""
    return answered(served, prompt=text, max_tokens=0, echo=True, sources=True, logprobs=1, silent=[*silent])["sources"]


def test_a_text_is_scored_and_explained_as_by_the_model(served: ServedWriter, loaded: LoadedModel) -> None:
    choice = answered(served, max_tokens=0, echo=True, sources=True, logprobs=2)
    (scored,) = loaded.score(TEXT)
    assert [token["probability"] for token in choice["sources"]] == pytest.approx(
        [each.probability for each in scored], rel=1e-3
    )
    total = sum(choice["logprobs"]["token_logprobs"])
    assert total == pytest.approx(loaded.log_likelihood(TEXT), rel=1e-4)
    assert choice["text"] == TEXT and len(choice["sources"]) == len(scored)
    places = [place for token in choice["sources"] for place in token["sources"]]
    assert any(place["file"].endswith(".py") and place["line"] > 0 for place in places)


def test_memories_are_switched_off_and_on(served: ServedWriter) -> None:
    """A silent memory proposes nothing, and the others share its weight; nothing of that stays."""
    long = 4 * TEXT  # of several windows
    every, names = explained(served, text=long), [*served.colours]
    for name in names:
        tokens = explained(served, name, text=long)
        assert not any(token["parts"][name] for token in tokens) and tokens != every, name
    assert not any(token["share"] > 1e-6 for token in explained(served, *names, text=long))
    assert explained(served, text=long) == every
    assert "no memory other" in answered(served, 400, silent=["other"])["message"]


def test_a_text_goes_on_as_in_python(served: ServedWriter, loaded: LoadedModel) -> None:
    expected = loaded.generate(TEXT, 12, temperature=0.0)
    choice = answered(served, max_tokens=12, sources=True, logprobs=0)
    assert choice["text"] == expected and choice["finish_reason"] == "length"
    assert len(choice["sources"]) == len(choice["logprobs"]["tokens"]) == 12
    sampled = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 5}
    for seed in range(5, 9):
        text = loaded.generate(TEXT, 12, seed, temperature=1.0, top_p=0.9)
        assert answered(served, **sampled | {"seed": seed})["text"].strip() == text.strip()


def test_a_port_that_is_taken_is_named(served: ServedWriter) -> None:
    with socket.create_server((HOST, 0)) as taken, pytest.raises(UserError, match="port 0 is one that is free"):
        serve(served, port=taken.getsockname()[1])


def test_it_runs_where_a_loop_runs_already(served: ServedWriter, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a notebook, whose cell goes on when it is interrupted."""
    pytest.importorskip("uvicorn")
    pages = []

    def visit() -> None:
        try:
            while not (address := re.search(r"page at (http://\S+)", capsys.readouterr().out)):
                time.sleep(0.05)
            with urlopen(address[1], timeout=60) as page:
                pages.append(page.read().decode())
        finally:  # or the test would never end
            os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> str:
        serve(served)
        return "went on"

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    loop, visitor = asyncio.new_event_loop(), threading.Thread(target=visit, daemon=True)
    visitor.start()
    try:
        assert loop.run_until_complete(cell()) == "went on" and "textarea" in pages[0]
    finally:
        loop.close()
        signal.signal(signal.SIGINT, before)
