"""What continues a prompt: an experiment's own row with its memories, or a pretrained model that has read it with memories."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from trime.data.tokenizers import EOS, Tokenizer
from trime.data.vocabulary import Vocabulary
from trime.evaluation.fitted_rows import FittedRow
from trime.evaluation.generation import Continuation, Step, TokenSampler, WindowLengths, top_attention, top_entries
from trime.evaluation.rows import Row
from trime.io import plain
from trime.memory.base import Memory
from trime.memory.external import ExternalMemory
from trime.memory.ngrams import TextNgrams
from trime.memory.retrieval.datastore import Datastore
from trime.models.pretrained.loading import is_encoder_decoder, load_pretrained
from trime.models.pretrained.tokenizer import encode_prompt, load_tokenizer
from trime.pipeline.model_io import open_network
from trime.pipeline.pretrained import answerer_of, is_pretrained
from trime.pipeline.processes import device_of
from trime.pipeline.rows import rows_of
from trime.plan.language_model import Plan
from trime.stages.evaluate import policy_name
from trime.types import UserError

AROUND = 8  # tokens of an entry's context that are shown


class GeneratedToken(NamedTuple):
    """A token, its probability, how that splits, and the entries that gave most."""

    text: str
    probability: float
    parts: dict[str, float]
    entries: list[dict[str, Any]]


@runtime_checkable
class Writes(Protocol):
    """Something that continues a prompt."""

    label: str  # what it is
    folder: Path  # where what it wrote is kept
    written: list[int]

    def read(self, prompt: str) -> list[int]:
        """The prompt's tokens."""

    def write(self) -> Iterator[GeneratedToken]:
        """Token after token."""

    def text(self, tokens: list[int]) -> str:
        """Tokens as text."""


def writer_of(plan: Plan) -> Writes:
    """The experiment's own row; or a pretrained model that reads the prompt with memories in its layers."""
    if not is_pretrained(plan.config):
        return Writer(plan)
    place = str(plan.small_model.path()) if plan.small_model else plan.config.model.name
    trained = plan.config.checkpoint or (not plan.small_model and plan.fit.folder.is_dir())
    if is_encoder_decoder(place) or not (trained or own_memories(plan)):
        return LongWriter(plan, place)
    return Writer(plan)


def here(writer: Writes, tokens: list[int], place: int) -> tuple[str, str]:
    """The text of an entry of this very text, and where it stands."""
    return writer.text(tokens[max(0, place - AROUND) : place + 1]), f"token {place:,} of this text"


def entry(memory: str, share: float, text: str, place: str) -> dict[str, Any]:
    """An entry, for a reader."""
    return {"memory": memory, "share": share, "text": " ".join(text.split()), "place": place}


def own_memories(plan: Plan) -> set[str]:
    """The memories of the experiment's last row."""
    return rows_of(plan.config)[-1].memories


class LongWriter:
    """A pretrained model with memories in its layers (Attendre): probability is the vocabulary's, attention tells the rest."""

    def __init__(self, plan: Plan, place: str):
        self.config, self.tokenizer = plan.config, load_tokenizer(place)
        if not plain(self.config.model.memory_size):
            raise UserError("model.memory_size=0: a model that reads its prompt with memories wants room for entries")
        model = load_pretrained(place, self.config.model.dtype)
        self.answerer = answerer_of(plan.config, model)
        self.prompt: list[int] = []
        self.written: list[int] = []
        policy, size = policy_name(plain(self.config.eviction)), self.config.model.memory_size
        self.label = f"{type(model).__name__}, {policy}, {size} entries a layer"
        self.folder = Path(self.config.paths.outputs) / "runs" / self.config.name

    def read(self, prompt: str) -> list[int]:
        """Through the memories, to the end."""
        self.prompt = encode_prompt(self.tokenizer, prompt)
        self.steps = self.answerer.read([self.prompt], self.config.explain)
        return self.prompt

    def write(self) -> Iterator[GeneratedToken]:
        """Until the model ends its text."""
        given, generator = self.config.generate, torch.Generator().manual_seed(self.config.seed)
        choice = TokenSampler(given.temperature, given.top_p)
        while len(self.written) < given.tokens and self.tokenizer.eos_token_id not in self.written:
            so_far = torch.tensor([self.written], dtype=torch.long, device=self.steps.device)
            probability = self.steps.next_logits(so_far)[0].double().softmax(0)
            token = choice(probability[: len(self.tokenizer)], generator)
            share = float(probability[token])
            entries = self.entries(given.entries) if self.config.explain else []
            self.written.append(token)
            yield GeneratedToken(self.text([token]), share, {"vocabulary": share}, entries)

    def entries(self, count: int) -> list[dict[str, Any]]:
        """The places that got most attention."""
        tokens = [*self.prompt, *self.written]
        return [entry("attention", share, *here(self, tokens, place)) for share, place in self.steps.attention_trace().top(count)]

    def text(self, tokens: list[int]) -> str:
        """Tokens as text."""
        return self.tokenizer.decode(tokens)


class Writer:
    """The own row of an experiment, with its model and memories, tuned."""

    def __init__(self, plan: Plan):
        self.plan, config = plan, plan.config
        self.folder = plan.run_folder
        self.vocabulary: Vocabulary = plan.corpus.corpus().vocabulary
        self.tokenizer: Tokenizer = plan.corpus.dataset.tokenizer
        self.row = own_row(plan)
        self.label = self.row.label
        network, described = open_network(plan.model.path(), config)
        if described["vocabulary_fingerprint"] != self.vocabulary.fingerprint:
            raise UserError(
                "the model was trained with another vocabulary than the dataset's: name the dataset it was trained on"
            )
        device = device_of(config)
        prompt = {"text": None, "bounded": True, "split": "prompt"}
        memories = plan.memories.open_all(prompt, list(self.row.sizes), self.row.memories)
        evaluate = config.evaluate
        windows = WindowLengths(evaluate.block, 0 if network.is_stateful else evaluate.context)
        eos, scaled = self.vocabulary.eos, evaluate.scaled_interpolation
        self.sources = sources_of(plan, memories)
        size = len(self.vocabulary)
        self.continuation = Continuation(network.to(device), self.row, memories, windows, eos, size, scaled)
        self.written: list[int] = []

    def read(self, prompt: str) -> list[int]:
        """The prompt's tokens, of which an end that the tokenizer adds is none."""
        symbols = [symbol for part in self.tokenizer.tokens(io.BytesIO(prompt.encode())) for symbol in part]
        if symbols[-1:] == [EOS] and not prompt.endswith("\n"):
            symbols.pop()
        ids = [self.vocabulary.index[symbol] for symbol in symbols]
        self.continuation.read(ids)
        return ids

    def write(self) -> Iterator[GeneratedToken]:
        """Token after token."""
        given = self.plan.config.generate
        for step in self.continuation.generate(given.tokens, TokenSampler(given.temperature, given.top_p), self.plan.config.seed):
            told = self.told(step, given.entries if self.plan.config.explain else 0)
            self.written.append(step.token)
            yield told

    def told(self, step: Step, count: int) -> GeneratedToken:
        """What is known of a step, for a reader, with as many entries."""
        parts = {name: float(part[step.token]) for name, part in step.attribution.parts.items()}
        told = [*top_entries(step, count), *top_attention(step, count)] if count else []
        entries = [self.entry(*own) for own in told]
        return GeneratedToken(self.text([step.token]), float(step.attribution.probability[step.token]), parts, entries)

    def entry(self, memory: str, share: float, place: int) -> dict[str, Any]:
        """An entry with its text and place."""
        source = self.sources.get(memory)
        return entry(memory, share, *(source.of(place) if source else here(self, self.continuation.tokens, place)))

    def text(self, tokens: list[int]) -> str:
        """Tokens as text."""
        return self.tokenizer.text([self.vocabulary.symbols[token] for token in tokens])


def sources_of(plan: Plan, memories: dict[str, Memory]) -> dict[str, Passages]:
    """Of each memory whose entries do not stand in the prompt, the text where they do."""
    found: dict[str, Passages] = {}
    for name, memory in memories.items():
        if isinstance(memory, ExternalMemory):
            found[name] = Source(plan, memory.nearest.store)
        if isinstance(memory, TextNgrams):
            found[name] = Passages(plan)
    return found


class Passages:
    """The stored text, token by token."""

    def __init__(self, plan: Plan):
        self.corpus, self.tokenizer = plan.stored_corpus.corpus(), plan.stored_corpus.dataset.tokenizer
        self.split = plan.config.datastore.split

    def of(self, number: int) -> tuple[str, str]:
        """The text that ends with a token of the split, and the document it is of."""
        text = self.corpus.split(self.split)
        document = int(np.searchsorted(text.offsets, number, side="right")) - 1
        begin = int(text.offsets[document])
        ids = text.tokens[max(begin, number - AROUND) : number + 1].tolist()
        words = self.tokenizer.text([self.corpus.vocabulary.symbols[token] for token in ids])
        return words, f"{self.corpus.names(self.split)[document]}, token {number - begin:,}"


class Source(Passages):
    """The text that a datastore was made of."""

    def __init__(self, plan: Plan, store: Datastore):
        assert plan.index is not None
        self.store = store
        super().__init__(plan)
        information = plan.index.information()
        self.split = information["split"]
        self.known = information["text"] == self.corpus.fingerprint(self.split)
        self.position = self.store.keys.shards.column("position")

    def of(self, number: int) -> tuple[str, str]:
        """The text of an entry, up to the token that followed, and where it stands."""
        document, position = int(self.store.document[number]), int(self.position[number])
        if not self.known:  # a datastore of another run, whose text is not at hand
            return "", f"entry {number:,}"
        return super().of(int(self.corpus.split(self.split).offsets[document]) + position)


def own_row(plan: Plan) -> Row | FittedRow:
    """The experiment's last row, at what was tuned on valid where there is something to tune."""
    if own_memories(plan):
        return plan.tune.rows()[-1]
    return rows_of(plan.config)[-1]
