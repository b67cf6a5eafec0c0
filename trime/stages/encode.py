"""encode: the model's g at each context, the token that follows, and the vocabulary's mass, in shards.

Tuning, evaluation and datastores are passes over these shards, without the model. Each shard is written
atomically, and a killed run resumes with the next one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file

from trime.common.identity import Free
from trime.common.io import check_room, write_json, write_tensors
from trime.common.metrics import ResourceUsage, Usage
from trime.common.types import Batch, Contexts, LogMass, Tensor, TokenPosition, contexts_of, is_token
from trime.data.corpus import Corpus, content_hash
from trime.data.module import WindowLoader, batches_by_length, sequential_batches
from trime.data.segments import Segments, cut, cut_lines, document_offsets, parse_token_count
from trime.errors import UserError
from trime.lab.artefact import Artefact, Lab
from trime.lab.engines import Advance
from trime.lab.shards import ShardedArtefact, Work
from trime.lab.stage import Stage
from trime.models.network import Reader
from trime.stages.model_io import CARRIED, ModelSettings, check_positions
from trime.stages.prepare import Prepare
from trime.token_memory.search.datastore import Shards, stored_keys, stored_numbers
from trime.token_memory.test.base import Window
from trime.training.hardware import Hardware


@dataclass(frozen=True)
class Portion:
    """The range of a split that is encoded, and its use.

    ``section``: evaluate (contexts and masses are stored, for scoring) or datastore (only contexts). ``tokens``: a budget of
    scored tokens, None for all; ``sample``: whether it is spent on the starts of documents or on whole ones. ``dtype``: of
    the stored encodings.
    """

    section: str
    split: str
    tokens: int | None
    sample: str
    dtype: str

    @property
    def for_datastore(self) -> bool:
        """Whether contexts are encoded to be searched, rather than scored."""
        return self.section == "datastore"

    @classmethod
    def of(cls, config: DictConfig, section: str, split: str) -> Portion:
        """Return the portion that a section of the configuration asks for."""
        settings = config[section]
        tokens = parse_token_count(settings.tokens)
        sample = settings.get("sample", "starts") if tokens else "starts"  # one name for all tokens, so that they have one hash
        return cls(section, split, tokens, sample, settings.dtype)


@dataclass(frozen=True, kw_only=True)
class TextWindows:
    """Windows of ``block`` tokens, each read with the ``context`` tokens before it.

    Each token costs (block + context) / block tokens that are read. ``lines``: a window is as many whole lines as fit.
    """

    bounded: bool = True  # windows end with their document
    sorted: bool = False  # they are read from shortest to longest rather than in the order of the text
    block: int
    context: int
    lines: bool
    section: Free[str]  # whose settings these are

    @classmethod
    def of(cls, config: DictConfig, for_datastore: bool = False) -> TextWindows:
        """Return the windows of evaluated text, or of a datastore's text, which may have a block and a context of its own."""
        evaluate, own = config.evaluate, config.datastore if for_datastore else {}
        sizes = {name: evaluate[name] if own.get(name) is None else own[name] for name in ("block", "context")}
        return cls(
            **sizes,
            lines=evaluate.lines and not for_datastore,
            section="evaluate" if sizes == {name: evaluate[name] for name in sizes} else "datastore",
            bounded=evaluate.bounded,
            sorted=config.compatibility.sorted_windows,
        )

    def lengths(self) -> dict[str, int]:
        """Return the tokens that a model reads at once, by the settings that decide it; none if the text does."""
        return {f"{self.section}.block + {self.section}.context": self.block + self.context}

    def cut(self, corpus: Corpus, portion: Portion) -> Segments:
        """Return the windows of a portion of a corpus, in the order in which they are read."""
        text = corpus.split(portion.split)
        offsets = document_offsets(text, self.bounded)
        sizes = self.block, self.context, portion.tokens, portion.sample
        windows = cut_lines(text, offsets, corpus.vocabulary.eos, *sizes) if self.lines else cut(offsets, *sizes)
        if self.context or not self.sorted:
            return windows
        return windows.take(np.argsort(windows.length, kind="stable"))  # so the published code reads windows without context

    def check(self, corpus: Corpus, description: dict[str, Any]) -> None:
        """Raise UserError if a model, by its description, cannot read the corpus."""
        return


log = logging.getLogger(__name__)

SHARD = 2**17  # the largest number of tokens in a shard, context included
BATCH_TOKENS = {"cpu": 2**13, "cuda": 98_304}  # tokens per batch, unless evaluate.batch_tokens says how many
FORECAST_TOKENS, FORECAST_BATCHES = 2**17, 4  # time and disk are forecast from so many tokens on, by so many batches


@dataclass(frozen=True, eq=False, repr=False)
class Encode(ShardedArtefact):
    """A portion of a corpus encoded by the model, window by window."""

    kind, format = "encode", 4
    summary_file = "encode.json"

    portion: Portion
    corpus: Prepare
    model: Artefact
    windowing: TextWindows
    reading: dict[str, Any]  # how the model reads text, beside its weights
    hardware: Hardware
    settings: Free[ModelSettings]  # with which the model is opened
    batch_tokens: Free[int | None]  # tokens per batch; None: as many as the device takes
    lab: Free[Lab]

    @property
    def split(self) -> str:
        """The split that is encoded."""
        return self.portion.split

    @property
    def stage(self) -> str:
        return "evaluate" if self.split == "test" and not self.portion.for_datastore else "encode"

    def windows(self, corpus: Corpus) -> Segments:
        """Return the windows that are encoded, in the order in which they are read."""
        return self.windowing.cut(corpus, self.portion)

    def build(self, folder: Path) -> None:
        opened = corpus, reader, windows = self.open()
        if windows.scored() > FORECAST_TOKENS and not any(folder.iterdir()):
            self.forecast(folder, Reader(reader.network), corpus, windows)
        self.make_shards(self.work(folder, opened), folder, f"encode {self.split}")
        usage = Usage()
        for note in folder.glob("part-*.json"):
            usage.add(json.loads(note.read_text(encoding="utf-8")))
        content = {
            "tokens": windows.scored(),
            "seconds": round(usage.seconds, 3),
            "processor_seconds": usage.processor_seconds,
            "peak_memory_mb": usage.peak_memory_mb,
            "width": reader.network.width,
            # Which model encoded which text:
            "vocabulary_fingerprint": corpus.vocabulary.fingerprint,
            "model": content_hash(self.model.path() / "model.safetensors"),
            "section": self.portion.section,
            "split": self.split,
            "text": corpus.fingerprint(self.split),
            "dataset": corpus.statistics["name"],
            "bounded": self.windowing.bounded,
            "characters": corpus.statistics["characters"],
        }
        write_json(folder / "encode.json", content)

    def open(self) -> tuple[Corpus, Reader, Segments]:
        """Return corpus, model and windows; UserError if the model cannot read these windows."""
        corpus = self.corpus.corpus()
        network, description = self.settings.open(self.model.path())
        if description["vocabulary_fingerprint"] != corpus.vocabulary.fingerprint:
            raise UserError(
                f"the model was trained with another vocabulary ({description['vocabulary']:,} symbols) than "
                f"{corpus.statistics['name']}'s ({len(corpus.vocabulary):,}): evaluate it with the dataset it was "
                "trained on as dataset=, and name other text by dataset@evaluate.dataset="
            )
        self.windowing.check(corpus, description)
        windows = self.windows(corpus)
        lengths = {} if self.settings.reads_any_length else self.windowing.lengths()
        longest = int(windows.length.max()) if lengths else 0
        check_positions(network.backbone.positions, lengths, self.settings.is_pretrained, longest)
        network.to(self.hardware.device)
        if network.is_stateful and (windows.context.any() or self.windowing.sorted):
            raise UserError(f"{CARRIED}, and compatibility=none")
        return corpus, Reader(network), windows

    def work(self, folder: Path, opened: tuple[Corpus, Reader, Segments] | None = None) -> Work:
        """Return the work on shards of as many windows each; a stateful reader must have read those before a shard.

        Shards that another machine left at a URL may lack the state after the last one.
        """
        corpus, reader, windows = opened or self.open()
        length = max(1, SHARD // int(windows.length.max()))  # windows of a shard
        shards = [windows.take(slice(first, first + length)) for first in range(0, len(windows), length)]
        files = [folder / f"{number:05d}.safetensors" for number in range(len(shards))]

        def make(number: int, advance: Advance) -> None:
            restore_reader_state(reader, folder, number - 1, self.hardware.device)
            batches = self.encode_batches(reader, corpus, shards[number], number * length)
            # Time and memory are not in the shard, whose bytes depend only on the text.
            write_shard(files[number], folder / f"part-{number:05d}.json", reader, batches, advance)

        def can_begin(number: int) -> bool:
            return reader_state_file(folder, number - 1).exists()

        sizes = [shard.scored() for shard in shards]
        return Work(files, sizes, make, in_order=reader.network.is_stateful, can_begin=can_begin)

    def encode_batches(self, reader: Reader, corpus: Corpus, windows: Segments, first: int) -> Iterator[dict[str, Tensor]]:
        """Yield the columns of each batch; ``first`` numbers the first window.

        A stateful model reads one window at a time, in order; for others, windows of like length share a batch.
        """
        batches = self.batches(windows, reader.network.is_stateful)
        for batch in WindowLoader(corpus.split(self.split), windows, batches, corpus.vocabulary.special_ids):
            with self.hardware.autocast():
                yield self.columns(reader, batch.to(self.hardware.device), first)

    def batches(self, windows: Segments, one_by_one: bool) -> list[list[int]]:
        """Return the numbers of the windows that each batch holds, in the order in which batches are read."""
        return sequential_batches(windows, 1) if one_by_one else batches_by_length(windows, self.windows_per_batch(windows))

    def windows_per_batch(self, windows: Segments) -> int:
        """Return the number of windows in a batch."""
        tokens = self.batch_tokens or BATCH_TOKENS[self.hardware.device.type]
        return max(1, tokens // int(windows.length.max()))

    def forecast(self, folder: Path, reader: Reader, corpus: Corpus, windows: Segments) -> None:
        """Print a forecast of the time and the disk space of encoding; UserError if the disk is too small."""
        seconds, size = self.estimate_cost(reader, corpus, windows)
        log.info(
            f"{self.stage}: {windows.scored():,} tokens of {self.split}: about {seconds / 60:.1f} minutes "
            f"and {size / 2**20:,.0f} MiB",
        )
        check_room(folder, size, "contexts", "set paths.outputs, datastore.tokens=N or datastore.dtype=int8")

    @torch.no_grad()
    def estimate_cost(self, reader: Reader, corpus: Corpus, windows: Segments) -> tuple[float, float]:
        """Return estimates of the seconds and bytes that all windows take, from a few batches of them."""
        count = min(len(windows), FORECAST_BATCHES * self.windows_per_batch(windows))
        sample = windows.take(np.linspace(0, len(windows) - 1, count).astype(int))
        size, times = 0, [time.perf_counter()]
        for columns in self.encode_batches(reader, corpus, sample, 0):
            size += sum(column.nbytes for column in columns.values())
            times.append(time.perf_counter())
        batches = self.batches(sample, reader.network.is_stateful)[1:]  # the first is a warm-up
        read = sum(int(sample.length[batch].sum()) for batch in batches)
        seconds = (times[-1] - times[1]) / max(1, read) * int(windows.length.sum())
        return seconds, size * windows.scored() / sample.scored()

    def columns(self, reader: Reader, batch: Batch, first: int) -> dict[str, Tensor]:
        """Return the columns of a batch: all tokens of its windows, or only the scored ones for a datastore.

        The column ``scored`` is false for the context before the scored tokens, whose masses are not computed.
        """
        scored = batch.scored.flatten()
        if self.portion.for_datastore:
            return self.context_columns(contexts_of(batch, reader.encode(batch).g).take(scored), first)
        contexts, vocabulary = reader.contexts_and_mass(batch)
        tokens = is_token(batch).flatten()
        of_vocabulary = {"target": vocabulary.target, "total": vocabulary.total, "gate": vocabulary.gate}
        columns = {name: column for name, column in of_vocabulary.items() if column is not None}
        masses = torch.zeros(len(columns), len(scored), device=scored.device)
        masses[:, scored] = torch.stack(list(columns.values())).float()
        if masses.isnan().any():
            raise UserError("the model gives tokens of this text a probability that is not a number (NaN): train it anew")
        token_masses = dict(zip(columns, masses[:, tokens].cpu().unbind(), strict=True))
        return self.context_columns(contexts.take(tokens), first) | {"scored": scored[tokens].cpu()} | token_masses

    def context_columns(self, contexts: Contexts, first: int) -> dict[str, Tensor]:
        """Return contexts as columns on the host; ``first`` is the number of the shard's first window."""
        columns = stored_keys(contexts.g, self.portion.dtype, f"{self.portion.section}.dtype") | {
            "token": stored_numbers(contexts.token),
            "document": stored_numbers(contexts.positions.document),
            "segment": stored_numbers(contexts.positions.segment + first),
            "position": stored_numbers(contexts.positions.position),
        }
        return {name: column.cpu() for name, column in columns.items()}


@torch.no_grad()
def write_shard(file: Path, note: Path, reader: Reader, batches: Iterator[dict[str, Tensor]], advance: Advance) -> None:
    """Write the columns of encoded batches, in the order of their windows, as one shard, and a note on time and memory.

    Progress is counted in scored tokens.
    """
    meter, read = ResourceUsage(), []
    for batch in batches:
        read.append(batch)
        advance(int(batch["scored"].sum()) if "scored" in batch else len(batch["token"]))
    order = torch.cat([batch["segment"] for batch in read]).argsort(stable=True)
    columns = {name: torch.cat([batch[name] for batch in read])[order] for name in read[0]}
    save_reader_state(reader, file)
    write_json(note, meter.note(), indent=None)
    write_tensors(file, columns)


def save_reader_state(reader: Reader, shard: Path) -> None:
    """Save the state in which a stateful reader leaves a shard, until the artefact is finished."""
    if reader.network.is_stateful:
        tensors = {f"{number:04d}": tensor for number, tensor in enumerate(reader.state_tensors())}
        write_tensors(reader_state_file(shard.parent, int(shard.stem)), tensors)


def restore_reader_state(reader: Reader, folder: Path, shard: int, device: Any) -> None:
    """Restore the state that a killed run saved after the last finished shard."""
    file = reader_state_file(folder, shard)
    if reader.state is None and file.exists():
        tensors = load_file(file)
        reader.restore([tensors[name] for name in sorted(tensors)], device)
    reader_state_file(folder, shard - 1).unlink(missing_ok=True)


def reader_state_file(folder: Path, shard: int) -> Path:
    """Return the file of the reader's state after a shard."""
    return folder / f"part-carried-{shard:05d}.safetensors"


def read_windows(folder: Path, device: torch.device, low: int = 0, high: int | None = None) -> Iterator[Window]:
    """Yield the windows of an encoded split in the order of the stream, on the device where memories are read.

    ``low`` and ``high``: the numbers of the first token and of the one after the last, where windows begin.
    """
    names = ("g", "token", "document", "segment", "position", "scored", "target", "total")
    shards = Shards(folder)
    gated = "gate" in shards.files[0].keys()  # noqa: SIM118 (safetensors' files are not dictionaries)
    for columns in shards.iter_columns(*names, *(["gate"] if gated else []), first=low, last=high):
        g, token, document, segment, position, scored, target, total, *gate = (column.to(device) for column in columns)
        positions = TokenPosition(document.long(), segment.long(), position.long())
        contexts = Contexts(g.float(), token.long(), positions)
        edges = [0, *((segment.diff() != 0).nonzero().squeeze(1) + 1).tolist(), len(segment)]
        for begin, end in pairwise(edges):
            context = int((~scored[begin:end]).sum())
            mass = LogMass(*(column[begin + context : end] for column in (target, total, *gate)))
            yield Window(contexts.take(slice(begin, end)), context, mass)


ENCODE = Stage("encode", lambda graph: [graph.valid, *graph.memories.artefacts("encode")])
