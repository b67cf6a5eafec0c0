"""What a memory of texts is worth to a real decoder, beside what people do instead: passages in the prompt, and LoRA.

Each text is cut in three: most is stored, weights are fitted to some of the rest, and scored is the rest of it. For passages
in the prompt, the tokens before a window ask BM25 for the best passages of the stored part, which are read before it. LoRA
trains on the stored part for as long as the memory took to be made. What is finished of a text is kept in ``--folder``, and
the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from rank_bm25 import BM25Okapi

from benchmarks.measure import Claim, Measured, alternately, ratio
from trime.common.io import write_json
from trime.common.progress import Progress
from trime.common.types import Float, Int, Tensor
from trime.data.texts import read_texts
from trime.errors import UserError
from trime.report.bootstrap import paired_bootstrap
from trime.report.canvas import Panel, save_panels
from trime.scoring.mixtures.experts import concat_masses
from trime.text_memory.decoder import Decoder, WindowOutput
from trime.text_memory.experts import Experts
from trime.text_memory.held_out import HeldOut, from_files
from trime.text_memory.memory import WEIGHTS, TextMemory
from trime.text_memory.processor import fit_weights, mixed
from trime.text_memory.segment import Content, Document
from trime.text_memory.worth import Scored, resampled_parts

WINDOW, BEFORE = 256, 512  # tokens of a scored window, and before it
PASSAGE, PASSAGES = 256, 3  # tokens of a passage, and how many are put before a window or a prompt
SHARES = {"stored": 0.76, "held_out": 0.1, "test": 0.14}
CHAPTER = 8000  # characters of the parts that a single file is cut into
RATE, RANK, LENGTH = 2e-4, 8, 512  # of LoRA: learning rate, rank, tokens of an update
TIMED, PART = 4096, 512  # tokens that are timed; of a document that the bootstrap draws together
GENERATED, ROUNDS = 32, 7
COPIED = 2**18  # tokens of a document that enlarges a memory
BOUND = 1.15  # of a token with memory, in tokens without


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a model, for texts that are cut in three, and for what is made of them."""
    parser.add_argument("--model", required=True, help="a folder of a causal language model and its tokenizer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="folders or files, a text each")
    parser.add_argument("--characters", type=int, default=200_000, help="of a text that are used, at most")
    parser.add_argument("--folder", type=Path, default=Path("outputs/decoder-memory"), help="for memories and finished rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    parser.add_argument("--entries", type=int, default=0, help="stored tokens when a token is timed; 0: those of the last text")


def measure(options: argparse.Namespace) -> Measured:
    """Return bits per byte by memory and by what stands beside the text, completions, and the time of a token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval().to(options.device)

    model, rows = load(), []
    for path in options.texts:
        folder = options.folder / f"{path.stem}-{options.characters}"
        cut(path, folder / "texts", options.characters)
        memory = TextMemory(model, tokenizer, folder / "memory")
        worth = finished(folder / "worth.json", lambda m=memory, f=folder: worth_rows(m, f, load))  # type: ignore[misc]
        rows += [{"text": path.stem, **row} for row in with_differences(worth)]
    if options.entries:
        memory = enlarged(memory, options.folder / f"of-{options.entries}-tokens", options.entries)
    times = token_times(memory, model, tokenizer)
    return Measured([*rows, *times], [Claim("a token with memory, in tokens without", times[1]["times nothing"], BOUND)])


def finished(file: Path, rows: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows in a file, which are made where there is none."""
    if not file.exists():
        write_json(file, rows())
    return list(json.loads(file.read_text()))


def cut(source: Path, folder: Path, characters: int) -> None:
    """Write the parts of a text: a single file in its order, the files of a folder in the order of their names' hashes."""
    if folder.exists():
        return
    texts = [(text.name, text.content) for text in read_texts([source])]
    if len(texts) == 1:
        name, content = texts[0]
        texts = [
            (f"{first:09}{Path(name).suffix}", content[first : first + CHAPTER]) for first in range(0, len(content), CHAPTER)
        ]
    else:
        texts.sort(key=lambda text: xxhash.xxh3_64_intdigest(text[0].removeprefix(str(source.resolve())).encode()))
    whole = min(sum(len(content) for _, content in texts), characters)
    aside = folder.with_name("texts.partial")
    shutil.rmtree(aside, ignore_errors=True)
    waiting = iter(texts)
    for part, share in SHARES.items():
        (aside / part).mkdir(parents=True)
        size = 0
        for number, (name, content) in enumerate(waiting):
            (aside / part / f"{number:04}-{Path(name).name}").write_text(content)
            size += len(content)
            if size >= whole * share:
                break
        if not size:
            raise UserError(f"{source} has too few files for a part to store, one to fit and one to test: name a larger text")
    aside.rename(folder)


class Prompted(Decoder):
    """A decoder that reads the best passages of some texts before each window of a text."""

    def __init__(self, model: Any, tokenizer: Any, stored: list[np.ndarray]):
        super().__init__(model, tokenizer, WINDOW, BEFORE)
        self.passages = [text[first : first + PASSAGE] for text in stored for first in range(0, len(text), PASSAGE)]
        self.index = BM25Okapi([part.tolist() for part in self.passages])

    def best(self, asked: list[int]) -> list[Tensor]:
        """Return the passages for a text, the best one last: next to it."""
        numbers = np.argsort(-self.index.get_scores(asked))[:PASSAGES]
        return [torch.from_numpy(self.passages[number].astype(np.int64)) for number in reversed(numbers)]

    def read(self, tokens: Int[Tensor, " _"], logits: bool) -> Iterator[WindowOutput]:
        for first in range(0, len(tokens) - 1, self.window):
            begin, end = max(0, first - self.overlap), min(first + self.window, len(tokens) - 1)
            passages = self.best(tokens[max(0, first - WINDOW) : first + 1].tolist())
            start = torch.tensor(self.start, dtype=torch.long)
            yield from self.read_window(torch.cat([start, *passages, tokens[begin:end]]), end - first, logits)


def worth_rows(memory: TextMemory, folder: Path, load: Callable[[], Any]) -> list[dict[str, Any]]:
    """Return bits per byte of the test part under each set of memories, with nothing, passages or LoRA beside them."""
    model, tokenizer = memory.decoder.model, memory.decoder.tokenizer
    memory.add(folder / "texts" / "stored")
    stored, experts = stored_texts(memory), memory._experts()
    seconds = seconds_to_read(memory, stored)
    print(memory.fit(folder / "texts" / "held_out"))  # the weights that completions are written with
    rows = []
    memory.decoder = Decoder(model, tokenizer, WINDOW, BEFORE)
    rows += rows_beside("nothing", memory, folder, experts)
    memory.decoder = Prompted(model, tokenizer, stored)
    rows += rows_beside(f"{PASSAGES} passages", memory, folder, experts)
    adapted = trained(load(), stored, seconds)
    memory.decoder = Decoder(adapted, tokenizer, WINDOW, BEFORE)
    # Stored contexts are those of the model without LoRA, which the adapted one's cannot be compared with.
    rows += rows_beside("LoRA", memory, folder, experts, skipped="knn")
    for row in rows:
        row |= {"stored tokens": len(memory), "seconds to store": round(seconds)}
    return rows


def seconds_to_read(memory: TextMemory, texts: list[np.ndarray]) -> float:
    """Return how long the model takes for all tokens of some texts, of which some thousands are read."""
    tokens, started = 0, time.perf_counter()
    for text in texts:
        for read in memory.decoder.read(torch.from_numpy(text), logits=False):
            tokens += len(read.context)
        if tokens > TIMED:
            break
    return (time.perf_counter() - started) * len(memory) / tokens


def stored_texts(memory: TextMemory) -> list[np.ndarray]:
    return [
        segment.tokens(int(first), int(last)).astype(np.int64)
        for segment in memory.store.segments()
        for first, last in zip(segment.offsets, segment.offsets[1:], strict=False)
    ]


def rows_beside(
    beside: str, memory: TextMemory, folder: Path, experts: Experts, skipped: str | None = None
) -> list[dict[str, Any]]:
    """Return a row for each set of memories: weights are fitted to one part, for this decoder, and another is scored."""
    held_out, test = (together(memory._read_all(texts_of(memory, folder, part))) for part in ("held_out", "test"))
    size = sum(len(text.content.encode()) for text in texts_of(memory, folder, "test"))
    alone = test.masses.log_probability[:, 0]
    part = resampled_parts(test.masses.document, PART)
    sizes = np.bincount(part).tolist()
    names, rows = [name for name in experts.sizes if name != skipped], []
    ngrams = tuple(name for name in names if name != "knn")
    for chosen in dict.fromkeys([(), *((name,) for name in names), ngrams, tuple(names)]):
        losses = -(mixed_of(held_out, test, experts, chosen) if chosen else alone)
        row: dict[str, Any] = {"memories": ", ".join(chosen) or "none", "beside the text": beside, "tokens": len(losses)}
        row |= {"perplexity": round(math.exp(losses.double().mean()), 3)}
        row |= {"bits per byte": round(float(losses.double().sum()) / math.log(2) / size, 4)}
        rows.append(row | {"nats of parts": np.bincount(part, losses.double().numpy()).tolist(), "size": sizes})
    return rows


def texts_of(memory: TextMemory, folder: Path, part: str) -> list[HeldOut]:
    """Return the texts of a part that ``cut`` wrote."""
    return from_files(folder / "texts" / part, "text", memory.store, memory.decoder, memory._experts())


def together(texts: list[Scored]) -> Scored:
    """Return texts, each with numbers of its own, as one."""
    return Scored(concat_masses([each.masses for each in texts]), torch.cat([each.features for each in texts]))


def with_differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with their differences in bits per byte to the model alone, and to all memories beside nothing."""
    beside_nothing = [row for row in rows if row["beside the text"] == "nothing"]
    references = {"less alone": beside_nothing[0], "less all memories": beside_nothing[-1]}
    result = []
    for row in rows:
        of_row = {key: value for key, value in row.items() if key not in ("nats of parts", "size")}
        for name, other in references.items():
            if row is not other:
                of_row[name] = difference(row, other)
        result.append(of_row)
    return result


SHOWN = {  # rows of the picture: (memories, beside the text), and their colours, of Okabe and Ito
    "n-grams": ("ngram, document", "nothing", "#0072B2"),
    "kNN": ("knn", "nothing", "#0072B2"),
    "all memories": ("ngram, document, knn", "nothing", "#0072B2"),
    "passages": ("none", "3 passages", "#D55E00"),
    "LoRA": ("none", "LoRA", "#009E73"),
    "passages, all memories": ("ngram, document, knn", "3 passages", "#000000"),
    "LoRA, n-grams": ("ngram, document", "LoRA", "#000000"),
}


def draw(rows: list[dict[str, Any]], file: Path) -> Path:
    """Draw for each text how many bits per byte less than the model alone each way needs, with its interval."""
    texts = list(dict.fromkeys(row["text"] for row in rows if "text" in row))
    headline = "Bits per byte less than the model alone needs (lines: 95 %, over parts of documents)"
    with tempfile.TemporaryDirectory() as folder:
        panels: list[Panel] = [partial(draw_text, rows=rows, text=text) for text in texts]
        shutil.copy(save_panels(panels, Path(folder) / file.name, headline, height=2.6), file)
    return file


def draw_text(axis: Any, rows: list[dict[str, Any]], text: str) -> None:
    """Draw the panel of a text."""
    of_text = {(row["memories"], row["beside the text"]): row for row in rows if row.get("text") == text}
    for place, (memories, beside, colour) in enumerate(SHOWN.values()):
        middle, low, high = (-value for value in of_text[memories, beside]["less alone"])
        axis.plot([low, high], [place, place], color=colour, lw=2, alpha=0.5, solid_capstyle="butt")
        axis.plot([middle], [place], "o", color=colour, ms=6)
        axis.annotate(f"{middle:.3f}", (middle, place), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    axis.set_yticks(range(len(SHOWN)), list(SHOWN))
    axis.set_ylim(len(SHOWN) - 0.5, -0.8)
    axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
    axis.axvline(0, color="#5c6773", lw=0.8)
    axis.set_title(f"{text}: {of_text['none', 'nothing']['bits per byte']:.3f} alone")


def mixed_of(held_out: Scored, test: Scored, experts: Experts, chosen: tuple[str, ...]) -> Float[Tensor, " n"]:
    """Return the log-probabilities of the test tokens under a mixture of the model and the chosen memories."""
    masses, counts = experts.chosen(held_out.masses, chosen)
    mixture, _ = fit_weights(Scored(masses, held_out.features), counts, 0)
    return mixed(mixture, Scored(experts.chosen(test.masses, chosen)[0], test.features))


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Return the difference in bits per byte, and its interval over parts of documents."""
    # The bytes of a part are not counted: a token has as many as it has on average.
    bytes_of_token = sum(one["nats of parts"]) / math.log(2) / one["bits per byte"] / one["tokens"]
    sides = [np.stack([row["nats of parts"], bytes_of_token * np.array(row["size"])], 1) for row in (one, other)]
    return [round(value, 4) for value in paired_bootstrap(np.stack(sides)[None], "bits/byte")[:3]]


def trained(model: Any, texts: list[np.ndarray], seconds: float) -> Any:
    """Return the model with LoRA that was trained on some texts, in random order, for a time."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, settings).train()
    optimizer = torch.optim.AdamW([weight for weight in adapted.parameters() if weight.requires_grad], RATE)
    pieces = [text[first : first + LENGTH] for text in texts for first in range(0, len(text), LENGTH)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    started, generator = time.perf_counter(), np.random.default_rng(0)
    with Progress(total=round(seconds), unit="s", desc="LoRA") as bar:
        while (spent := time.perf_counter() - started) < seconds:
            tokens = torch.from_numpy(pieces[generator.integers(len(pieces))])[None].to(adapted.device)
            adapted(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.update(round(time.perf_counter() - started) - round(spent))
    return adapted.eval()


def enlarged(memory: TextMemory, folder: Path, entries: int) -> TextMemory:
    """Return a memory of so many tokens: copies of the texts of another, with random contexts, and the weights of that."""
    texts = np.concatenate(stored_texts(memory))
    larger = TextMemory(memory.decoder.model, memory.decoder.tokenizer, folder)
    generator = np.random.default_rng(len(larger))
    shutil.copy(memory.folder / WEIGHTS, folder)
    with Progress(total=entries, initial=len(larger), unit="token", unit_scale=True, desc="fill") as bar:
        while (stored := len(larger)) < entries:
            tokens = np.resize(np.roll(texts, generator.integers(len(texts))), min(COPIED, entries - stored))
            keys = generator.standard_normal((len(tokens), larger.decoder.width)).astype(np.float32)
            keys /= np.linalg.norm(keys, axis=1, keepdims=True)
            document = Document(f"copy {stored}", "", len(tokens))
            larger.store.add(Content([document], tokens, np.ones(len(tokens), np.int64), keys.astype(np.float16)))
            bar.update(len(tokens))
    return larger


def token_times(memory: TextMemory, model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the milliseconds of a generated token without and with the memory, in turn."""
    memory.decoder = Decoder(model, tokenizer, WINDOW, BEFORE)
    inputs = tokenizer("def read(self, name):\n    return", return_tensors="pt").to(model.device)
    settings = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False, "pad_token_id": 0}
    processor = memory.processor()
    contestants = {
        "none": lambda: model.generate(**inputs, **settings),
        "all": lambda: model.generate(**inputs, **settings, logits_processor=[processor]),
    }
    timed = alternately(contestants, ROUNDS, warmup=2)
    factor = ratio(timed["all"]["rounds"], timed["none"]["rounds"])
    return [
        {"memories": name, "stored tokens": len(memory), "ms a token": round(1000 * each["median_seconds"] / GENERATED, 1)}
        | ({"times nothing": factor} if name == "all" else {})
        for name, each in timed.items()
    ]
