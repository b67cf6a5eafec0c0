"""n-grams of a text memory beside infini-gram (Liu et al. 2024): the same counts, and how fast they are indexed and found.

Both index the tokens of the same files. Contexts are drawn from the text, some with another last token, so that a part of
them does not occur.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.common.io import size_of
from trime.common.progress import Progress
from trime.data.texts import read_texts
from trime.errors import UserError
from trime.text_memory.segment import Content, Document
from trime.text_memory.store import TextStore
from trime.token_memory.test.ngrams_cpu import followers

LENGTHS, REPLACED, ROUNDS = (1, 2, 4, 8), 0.2, 3
MARK, END, WIDTH = 2**16 - 1, 2**16 - 2, 2  # infini-gram's mark before a document, how it is answered, bytes of a token
NO_ANSWER = "none"
SAMPLED = 1000  # occurrences that infini-gram counts in its own demonstration, where there are more

Query = Callable[[list[int]], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a folder with a tokenizer of at most 65,535 tokens")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="files and folders of text")
    parser.add_argument("--tokens", type=int, default=15_000_000, help="tokens that are indexed, at most")
    parser.add_argument("--queries", type=int, default=2000)


def measure(options: argparse.Namespace) -> Measured:
    """Return the time and the size of both indices, and the microseconds of both kinds of query; both must agree on all."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = tokens_of(tokenizer, options.texts, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        built = {"text memory": ours(Path(folder) / "ours", texts, len(tokenizer))}
        with suppress(ImportError):
            built["infini-gram"] = theirs(Path(folder) / "theirs", texts)
        queries = contexts(texts, options.queries, len(tokenizer))
        rows = {name: {"index of": name, "tokens": sum(map(len, texts))} | row for name, (row, _) in built.items()}
        claims = []
        for kind in ("count", "next"):
            ways = {name: partial(answered, functions[kind], queries) for name, (_, functions) in built.items()}
            answers = {name: way() for name, way in ways.items()}
            for one, *others in zip(*answers.values(), strict=True):
                if any(other not in (one, NO_ANSWER) for other in others):
                    raise AssertionError(f"{kind} differs: {one} and {others}")
            if "infini-gram" in answers:
                rows["infini-gram"][f"{kind} without an answer"] = answers["infini-gram"].count(NO_ANSWER)
            timed = alternately(ways, ROUNDS, warmup=1)
            for name, each in timed.items():
                rows[name][f"µs a {kind}"] = round(1e6 * each["median_seconds"] / len(queries), 1)
            times = [each["rounds"] for each in timed.values()]
            claims.append(Claim(f"{kind}, in times of infini-gram", ratio(*times) if len(times) > 1 else None, 1.0))
        if "infini-gram" in built:
            way = partial(answered, built["infini-gram"][1]["sampled next"], queries)
            seconds = alternately({"sampled": way}, ROUNDS, warmup=1)["sampled"]["median_seconds"]
            rows["infini-gram"][f"µs a next of {SAMPLED:,} occurrences"] = round(1e6 * seconds / len(queries), 1)
    return Measured([*rows.values()], claims)


def answered(function: Query, queries: list[list[int]]) -> list[Any]:
    return [function(query) for query in queries]


def tokens_of(tokenizer: Any, paths: list[Path], limit: int) -> list[np.ndarray]:
    """Return the tokens of texts, up to a number of them."""
    found, left = [], limit
    for text in Progress(read_texts(paths), unit="text", desc="encode"):
        tokens = np.array(tokenizer(text.content, add_special_tokens=False).input_ids, np.int64)[:left]
        left -= len(tokens)
        if len(tokens):
            found.append(tokens)
        if left <= 0:
            break
    if not found:
        raise UserError("there is no text to index: name files that hold some with --texts")
    return found


def ours(folder: Path, texts: list[np.ndarray], vocabulary: int) -> tuple[dict[str, Any], dict[str, Query]]:
    """Return the time and size of a text memory's index, and its queries."""
    started, store = time.perf_counter(), TextStore(folder, {}, vocabulary)
    documents = [Document(str(number), "", len(text)) for number, text in enumerate(texts)]
    tokens = np.concatenate(texts)
    store.add(Content(documents, tokens, np.zeros(len(tokens), np.int32), None))
    row = {
        "seconds to index": round(time.perf_counter() - started, 1),
        "bytes a token": round(size_of(folder) / len(tokens), 1),
    }
    (segment,) = store.segments()

    def count(tokens: list[int]) -> int:
        low, high = segment.array.range_of(np.array(tokens))
        return high - low

    def following(tokens: list[int]) -> list[tuple[int, int]]:
        array = segment.array
        token, number = followers(array.text, array.suffixes, array.starts, *array.range_of(np.array(tokens)), len(tokens))
        return sorted(zip(token.tolist(), number.tolist(), strict=True))

    return row, {"count": count, "next": following}


def theirs(folder: Path, texts: list[np.ndarray]) -> tuple[dict[str, Any], dict[str, Query]]:
    """Return the same of infini-gram, whose indexing is given the tokens."""
    import infini_gram
    from infini_gram.engine import InfiniGramEngine

    folder.mkdir()
    started = time.perf_counter()
    marked = [np.concatenate([[MARK], text]).astype(np.uint16) for text in texts]
    (folder / "tokenized.0").write_bytes(np.concatenate(marked).tobytes())
    starts = np.cumsum([0, *map(len, marked)])[:-1] * WIDTH
    (folder / "offset.0").write_bytes(starts.astype(np.uint64).tobytes())
    command = [sys.executable, "-m", "infini_gram.indexing", "--data_dir", str(folder), "--save_dir", str(folder), "--mem", "8"]
    environment = os.environ | {"PYTHONPATH": str(Path(infini_gram.__file__).parents[1])}
    subprocess.run([*command, "--ulimit", "4096"], check=True, capture_output=True, env=environment)
    seconds, tokens = time.perf_counter() - started, sum(map(len, texts))
    row = {"seconds to index": round(seconds, 1), "bytes a token": round(size_of(folder) / tokens, 1)}
    engine = InfiniGramEngine(str(folder), eos_token_id=END, vocab_size=MARK)

    def count(tokens: list[int]) -> int:
        return int(engine.count(tokens)["count"])

    def following(tokens: list[int]) -> Any:
        found = engine.ntd(tokens, max_support=10**9)  # it counts a sample of what occurs more often
        counted = sorted((token, each["cont_cnt"]) for token, each in found["result_by_token_id"].items() if token != END)
        return NO_ANSWER if found["approx"] or not counted else counted

    def of_sample(tokens: list[int]) -> Any:
        return engine.ntd(tokens, max_support=SAMPLED)

    return row, {"count": count, "next": following, "sampled next": of_sample}


def contexts(texts: list[np.ndarray], number: int, vocabulary: int) -> list[list[int]]:
    """Return contexts of several lengths from random places."""
    generator, found = np.random.default_rng(0), []
    for _ in range(number):
        text, length = texts[generator.integers(len(texts))], int(generator.choice(LENGTHS))
        first = int(generator.integers(max(1, len(text) - length)))
        context = text[first : first + length].tolist()
        if generator.random() < REPLACED:
            context[-1] = int(generator.integers(vocabulary))
        found.append(context)
    return found
