"""The endpoint: what OpenAI's own client asks, what a model answers in Python, and who is not answered."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from tests.helpers.browser import in_a_browser, seen_at
from tests.helpers.decoders import PROMPT, text_of
from trime.errors import UserError
from trime.serving.endpoint import LARGEST, Endpoint
from trime.serving.server import serve
from trime.text_memory.memory import TextMemory
from trime.text_memory.served import GAPS, ServedMemory

HERE = "http://127.0.0.1"
NAME = "LlamaForCausalLM"


@pytest.fixture
def client(served: ServedMemory) -> TestClient:
    return TestClient(Endpoint(served), base_url=HERE)


def completion(client: TestClient, **asked: Any) -> dict[str, Any]:
    """Return the answer to a request whose prompt is that of the tests, greedy unless it says otherwise."""
    response = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, **asked})
    assert response.status_code == 200, response.text
    return response.json()


def test_openai_s_client_gets_what_the_memory_writes(address: str, fitted: TextMemory) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [NAME]
    expected = fitted.generate(PROMPT, 24)
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=3)
    assert whole.choices[0].text == expected and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    logprobs = whole.choices[0].logprobs
    assert "".join(logprobs.tokens) == expected
    assert [max(each.values()) for each in logprobs.top_logprobs] == pytest.approx(logprobs.token_logprobs)
    chunks = [*client.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with pytest.raises(openai.NotFoundError, match=NAME):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])


def test_a_chat_of_openai_s_client(address: str, fitted: TextMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(fitted.decoder.tokenizer, "chat_template", template, raising=False)
    chat = [{"role": "user", "content": "    def lock_queue(self,"}]
    expected = fitted.generate(chat, 16)
    parts = [{"role": "user", "content": [{"type": "text", "text": "    def lock_queue(self,"}]}]
    for messages in (chat, parts):
        answer = client.chat.completions.create(
            model=NAME, messages=messages, max_completion_tokens=16, temperature=0, logprobs=True, top_logprobs=1
        )
        assert answer.choices[0].message.content == expected
        assert all(token.logprob == token.top_logprobs[0].logprob for token in answer.choices[0].logprobs.content)
    stream = client.chat.completions.create(model=NAME, messages=chat, max_tokens=16, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    with pytest.raises(openai.BadRequestError, match="text alone"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": [{"type": "image_url"}]}])


def test_an_echoed_prompt_is_scored_as_the_memory_scores_it(client: TestClient, fitted: TextMemory) -> None:
    text = text_of(11, 6)
    tokens = fitted.decoder.encode(text).tolist()
    for prompt in (text, tokens):
        (choice,) = completion(client, prompt=prompt, max_tokens=0, echo=True, logprobs=1)["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"] == text and "".join(logprobs["tokens"]) == text and logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(fitted.score(text).tolist(), abs=1e-4)
    (choice,) = completion(client, prompt=text, max_tokens=1, echo=True, logprobs=1)["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(tokens) + 1


def test_sources_are_those_that_explain_has(client: TestClient, fitted: TextMemory, texts: Path) -> None:
    text = (texts / "stored" / "0.py").read_text()[:160]
    (choice,) = completion(client, prompt=text, max_tokens=0, echo=True, sources=20)["choices"]
    (expected,) = fitted.explain(fitted.decoder.encode(text))
    assert [token["text"] for token in choice["sources"]] == [token.text for token in expected[-20:]]
    for token, own in zip(choice["sources"], expected[-20:], strict=True):
        assert token["probability"] == pytest.approx(own.probability)
        assert [(each["file"], each["line"]) for each in token["sources"]] == [(s.name, s.line) for _, s, _ in own.sources]
        assert token["share"] == pytest.approx(1 - own.parts["model"] / own.probability)
    (name,) = {token["run"]["file"] for token in choice["sources"] if token["run"]}
    assert sum(bool(token["run"]) for token in choice["sources"]) > 10 and name.endswith("0.py")
    assert sum(len(token["sources"]) > 0 for token in choice["sources"]) > 10
    (choice,) = completion(client, max_tokens=12, sources=True)["choices"]
    assert "".join(token["text"] for token in choice["sources"]) == choice["text"]


def test_stops_seeds_and_several_answers(client: TestClient, fitted: TextMemory) -> None:
    text = completion(client, max_tokens=40)["choices"][0]["text"]
    stop = text[12:16]
    (choice,) = completion(client, max_tokens=40, stop=["never", stop])["choices"]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    (choice,) = completion(client, max_tokens=40, stop=stop, sources=True)["choices"]
    assert "".join(token["text"] for token in choice["sources"]).startswith(choice["text"])
    assert len("".join(token["text"] for token in choice["sources"][:-1])) < len(choice["text"])
    streamed = client.post(
        "/v1/completions", json={"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop": stop, "stream": True}
    ).text
    assert streamed.endswith("data: [DONE]\n\n") and stop not in "".join(part for part in streamed.split('"text": "')[1:])
    sampled = {"max_tokens": 12, "temperature": 1.5, "seed": 3, "n": 3}
    first, again = (completion(client, **sampled)["choices"] for _ in range(2))
    assert first == again and len({choice["text"] for choice in first}) == 3
    assert [choice["index"] for choice in completion(client, prompt=[PROMPT, "def "], max_tokens=2)["choices"]] == [0, 1]
    expected = completion(client, max_tokens=12, prediction={"type": "content", "content": text})
    assert expected["choices"][0]["text"] == completion(client, max_tokens=12)["choices"][0]["text"]


def test_ten_clients_do_not_disturb_each_other(address: str, client: TestClient) -> None:
    import httpx2 as httpx

    asked = [{"prompt": PROMPT, "max_tokens": 8, "temperature": 1.2, "seed": seed} for seed in range(10)]
    alone = [completion(client, **each)["choices"][0]["text"] for each in asked]

    def ask(content: dict[str, Any]) -> str:
        return httpx.post(f"{address}/v1/completions", json=content, timeout=120).json()["choices"][0]["text"]

    with ThreadPoolExecutor(10) as pool:
        assert [*pool.map(ask, asked)] == alone


def test_a_client_that_goes_away_is_left(address: str, served: ServedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text ends where it is, and one that still waits is never begun."""
    import httpx2 as httpx

    written, write, begun = [], served.write, threading.Event()

    def counted(prompt: Any, wanted: Any, take: Any) -> Any:
        begun.set()

        def slow(token: Any, text: str) -> bool:
            written.append(token)
            time.sleep(0.02)
            return bool(take(token, text))

        return write(prompt, wanted, slow)

    monkeypatch.setattr(served, "write", counted)
    asked = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    with httpx.stream("POST", f"{address}/v1/completions", json=asked | {"stream": True}, timeout=60) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json=asked, timeout=0.3)
    before = time.monotonic()
    last = httpx.post(f"{address}/v1/completions", json=asked | {"max_tokens": 2}, timeout=60)
    assert last.status_code == 200 and len(written) < 250 and time.monotonic() - before < 30


def test_what_is_wrong_is_said_in_one_line(client: TestClient) -> None:
    for asked, word in [
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logit_bias": {"1": 2}}, "logit_bias"),
        ({"prompt": "x", "silent": ["knn"]}, "silent"),
        ({"prompt": [1, 10**8]}, "token"),
        ({"prompt": "x", "max_tokens": 10**7}, "together may have 512"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "n": 10**6}, "n: "),
        ({"prompt": "x", "prediction": {"content": []}}, "text"),
    ]:
        response = client.post("/v1/completions", json=asked)
        error = response.json()["error"]
        assert response.status_code == 400 and word in error["message"] and "\n" not in error["message"], asked
    json = {"content-type": "application/json"}
    for body, status in [(b"{", 400), (b"[1]", 400), (b"[" * 100_000, 400), (b"\xff", 400), (b" " * 10 * 2**20, 413)]:
        response = client.post("/v1/completions", content=body, headers=json)
        assert response.status_code == status and response.json()["error"]["message"]
    assert len(b" " * 10 * 2**20) > LARGEST
    assert client.post("/v1/completions", content="x", headers={"content-type": "text/plain"}).status_code == 415
    assert client.get("/v1/completions").status_code == 405 and client.get("/../etc/passwd").status_code == 404


def test_pages_of_other_sites_are_not_answered(client: TestClient, served: ServedMemory) -> None:
    """By their own name, by a name of theirs for this machine, or in a frame; and nothing at all without the token."""
    asked = {"prompt": PROMPT, "max_tokens": 1}
    for headers in (
        {"origin": "http://elsewhere.org"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"host": "elsewhere.org"},
        {"host": "127.0.0.1.elsewhere.org"},
        {"host": ""},
        {"host": "[::1"},
        {"origin": "http://[::1"},
    ):
        for response in (client.post("/v1/completions", json=asked, headers=headers), client.get("/", headers=headers)):
            assert response.status_code in (400, 403, 421) and "access-control-allow-origin" not in response.headers
    assert client.post("/v1/completions", json=asked, headers={"origin": HERE}).status_code == 200
    assert "frame-ancestors 'none'" in client.get("/").headers["content-security-policy"]
    guarded = TestClient(Endpoint(served, "a secret"), base_url="http://machine.example")
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "Bearer ä".encode()}):
        assert guarded.get("/v1/models", headers=headers).json()["error"]["code"] == "invalid_api_key"
    assert guarded.get("/v1/models", headers={"authorization": "Bearer a secret"}).status_code == 200
    assert all(name not in guarded.get("/").text for name in served.memory.names)


def test_other_machines_need_a_token(served: ServedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIME_TOKEN", raising=False)
    with pytest.raises(UserError, match="set a token"):
        serve(served, "0.0.0.0")


def test_a_gap_is_filled_where_the_model_has_learned_to(fitted: TextMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """By suffix, and by the tokens of a gap as an editor spells them."""
    served = ServedMemory(fitted)
    known = fitted.decoder.tokenizer.get_vocab()
    numbers = {name: 300 + number for number, name in enumerate(GAPS[0])}
    monkeypatch.setattr(fitted.decoder.tokenizer, "get_vocab", lambda: known | numbers)
    served = ServedMemory(fitted)
    expected = served.infill("    def lock", "return")
    before, behind, gap = GAPS[0]
    assert served.tokens(f"{before}    def lock{behind}return{gap}") == expected
    inside = fitted.decoder.inside
    assert expected == [300, *inside("    def lock"), 301, *inside("return"), 302]
    client = TestClient(Endpoint(served), base_url=HERE)
    (choice,) = completion(client, prompt="    def lock", suffix="return", max_tokens=4)["choices"]
    assert choice["text"] == fitted.generate(torch.tensor(expected), 4)


def test_a_read_text_is_predicted_token_by_token(fitted: TextMemory) -> None:
    tokens = fitted.decoder.encode(text_of(12, 6))
    own = [float(read.prediction.log_probability[read.token]) for read in fitted.read(tokens)]
    assert own == pytest.approx(fitted.score(text_of(12, 6)).tolist(), abs=1e-4)
    assert [read.token for read in fitted.read(np.array(tokens), 5)] == tokens[5:].tolist()


@in_a_browser
def test_a_browser_shows_it(address: str, tmp_path: Path) -> None:
    """A text in the address is explained at once, and its first word's sources are open."""
    seen = seen_at(f"{address}/?text=def%20lock_queue(self)", tmp_path)
    assert "perplexity" in seen and "has probability" in seen and seen.count('role="button" aria-pressed="true"') == 1
