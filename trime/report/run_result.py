"""The results of a run, as results.json holds them: the stage report collects them, and every report reads them.

Fields of other versions of the code are kept as they are, so that results can be read and written again without loss. A field
with a default may be missing in results of earlier versions.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trime.common.metrics import MEASURES

FEW_TOKENS = 10_000  # scored tokens below which a reader is referred to the intervals
FEWEST = 10  # units (documents, parts or sentences) below which an interval means too little for a verdict
VOCABULARY = "vocabulary"  # the name of the row without memory
PATH_SETTINGS = re.compile(r"((?:[\w.]*path|paths\.\w+|report\.keep|questions\.(?:babi|background))=).+")
WITHOUT_EFFECT = ("seed=", "report.", "logger", "hydra", "sweep=")  # settings that do not set runs apart, by their beginning

Number = int | float
MemorySize = int | tuple[int, ...]  # entries, or one number per layer


class Record(BaseModel):
    """A part of results.json: its fields cannot be set again, and only those that were given are written."""

    # Fields that another version wrote are kept, so that its results can be written again without loss.
    model_config = ConfigDict(frozen=True, extra="allow")

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class Dataset(Record):
    """A text; numbers are by split, ``unknown`` is the share of tokens that are ``<unk>``."""

    name: str
    fingerprint: str
    path: str | None = None
    own: bool = False
    test_hash: str | None = None  # of test's token ids, which differ between tokenisations
    tokens: dict[str, int] = {}
    bytes: dict[str, int] = {}
    unknown: dict[str, float] = {}
    vocabulary: int | None = None
    notes: list[str] = []


class ScoredText(Record):
    """The size of the scored part of a split; bytes are those that its tokens predict."""

    tokens: int
    bytes: int
    documents: int


class Training(Record):
    """The cost of training; empty if a model was read as it is."""

    updates: int | None = None
    processor_ms_per_token: float | None = None


class Bucket(Record):
    """A mean over some tokens: of a loss in nats, or of a weight or share; None if there are no tokens."""

    bucket: str
    tokens: int
    loss: float | None = None
    perplexity: float | None = None
    mean: float | None = None


class Row(Record):
    """The result of a combination of memories on a split; ``loss`` is in nats per token."""

    memories: str
    mixture: str = ""
    tuned: dict[str, Number] = {}
    at_grid_edge: list[str] = []  # tuned settings at the edge of their grid
    loss: float
    perplexity: float
    tokens: int
    documents: list[tuple[float, int]]  # summed loss and tokens of each unit of a bootstrap
    bootstrap_unit: str = "documents"
    by_memory_size: dict[str, float] = {}  # loss
    bits_per_byte: float | None = None
    bits_per_character: float | None = None
    metric: str | None = None
    fitted: dict[str, Any] | None = None  # facts on a fitted mixture
    search: str | None = None
    memory_size: MemorySize | None = None  # of the memory that fills while text is read
    eviction: str | None = None
    memory_share: list[Bucket] = []
    tokens_per_second: float | None = None
    processor_ms_per_token: float | None = None  # earlier versions measured only elapsed time
    peak_memory_mb: float | None = None
    bleu: float | None = None
    bleu_statistics: list[list[int]] | None = None  # of each sentence

    @property
    def metric_name(self) -> str:
        """Return bits/char or bits/byte if tokens are characters or bytes, else perplexity."""
        return self.metric or ("perplexity" if self.bits_per_character is None else "bits/char")

    @property
    def value(self) -> float:
        return MEASURES[self.metric_name](self.loss)


class Datastore(Record):
    """The entries of a memory that is searched, and their index."""

    entries: int
    index: str
    recall: float
    nprobe: int | None = None
    dataset: str | None = None
    text: str | None = None  # its fingerprint, if it is not the text that the model learned from


class Search(Record):
    """The search in datastores; ``keys`` is the precision of keys. Several datastores may have K as in ``4 and 8``."""

    k: int | str
    keys: str


class Cost(Record):
    """The cost of one memory; its peak size, for a datastore that on disk."""

    bytes: Number
    seconds_per_token: float


class MeanWeights(Record):
    """The mean weights of a memory in a mixture, and the share of tokens for which its weight is largest."""

    largest: float
    by_frequency: list[Bucket] = []
    by_similarity: list[Bucket] = []
    by_context: list[Bucket] = []


class Subset(Record):
    """A mixture that was fitted with some of the memories: its losses, and the seconds of the mixture itself."""

    memories: list[str]
    valid_loss: float
    loss: float
    documents: list[tuple[float, int]]
    seconds_per_token: float


class Subsets(Record):
    """A fitted mixture on subsets of its memories; the last has all. ``selection`` is evaluate.subsets."""

    mixture: str
    selection: str
    external_search: Search | None = None
    encode_seconds_per_token: float
    costs: dict[str, Cost]
    weights: dict[str, MeanWeights]
    subsets: list[Subset]


class Analysis(Record):
    """The analysis of a split: losses by frequency, retrieval accuracy by K, loss by size of the memory."""

    buckets: dict[str, list[Bucket]]
    retrieval: dict[str, float]
    by_memory_size: dict[str, float]


class RunResult(Record):
    """The facts that every run records: its name, code, settings and machine, and rows by split."""

    name: str
    seed: int
    created: str | None = None
    commit: str | None = None
    config_hash: str | None = None
    versions: dict[str, str] = {}
    hardware: dict[str, Any] = {}  # cpu, gpu, cores
    command: str | None = None
    overrides: list[str] | None = None  # the settings of the command that may set this run apart from others
    made_from: list[str] | None = None  # names of artefacts
    metrics: Mapping[str, Sequence[Record]]

    @property
    def settings(self) -> list[str]:
        """Return ``overrides``; those of results of earlier versions are found in the command."""
        if self.overrides is not None:
            return self.overrides
        # Words without = are the program and its flags, but ~ deletes a setting.
        return [word for word in effective(split_command(self.command)) if "=" in word or word.startswith("~")]

    @property
    def made_at(self) -> str:  # commit and time
        return ", ".join(filter(None, [str(self.commit)[:7], self.created]))

    @property
    def title(self) -> str:  # of the text that was read
        return "questions"


class ScoredRun(RunResult):
    """The results of a language model or a translation model: rows by split, ``valid`` and ``test``."""

    dataset: Dataset
    parameters: int | None = None
    train: Training = Training()
    trained_with_memory: bool | None = None
    tuned: dict[str, Number] = {}
    sample: str | None = None
    metrics: dict[str, list[Row]]
    scored: dict[str, ScoredText] = {}
    duplicates: list[str] = []
    durations: dict[str, float] = {}  # seconds by stage
    artefacts: dict[str, str] | None = None
    subsets: Subsets | None = None
    analysis: dict[str, Analysis] = {}  # by split
    imported: dict[str, Any] | None = None
    evaluation_dataset: Dataset | None = None  # if it is not the one that the model learned from
    datastore: Datastore | None = None  # the first
    datastores: dict[str, Datastore] = {}  # by memory

    @property
    def row(self) -> Row:  # the experiment's own on test, the last
        return self.metrics["test"][-1]

    @property
    def dev(self) -> Row:  # the same on dev
        return self.metrics["valid"][-1]

    @property
    def evaluated(self) -> Dataset:
        return self.evaluation_dataset or self.dataset

    @property
    def text(self) -> tuple[str | int | None, ...]:
        """Return the facts that runs must share to be compared. Those of earlier versions have neither hash nor sample."""
        data = self.evaluated
        return data.name, data.fingerprint, data.vocabulary, data.test_hash, self.sample, self.row.tokens

    @property
    def title(self) -> str:
        """Return the title of the evaluated text, as in ``novels (3fa2c1, 32,000 symbols, starts)``."""
        data = self.evaluated
        symbols = f"{data.vocabulary:,} symbols" if data.vocabulary else None
        return f"{data.name} ({', '.join(filter(None, [data.fingerprint[:6], symbols, self.sample]))})"

    @property
    def other_texts(self) -> dict[str, tuple[str, str]]:
        """Return name and fingerprint of the text that the model learned from, if another is scored, and of the datastore's."""
        found = {}
        if self.evaluation_dataset:
            found["trained on"] = self.dataset.name, self.dataset.fingerprint
        if self.datastore and self.datastore.dataset:
            found["datastore of"] = self.datastore.dataset, self.datastore.text or ""
        return found

    @property
    def is_trained(self) -> bool:
        """Return False if a model was read as it is; runs of earlier versions, which lack the number of updates, trained."""
        return self.train.updates != 0

    @property
    def is_fitted(self) -> bool:
        """Return True if the mixture of the last row was fitted, which those of the papers are not."""
        return len(self.metrics["test"]) > 1 and self.dev.fitted is not None

    @property
    def is_smoke_test(self) -> bool:
        """Return True if a result says only that the code ran: of few tokens, in too few units for an interval."""
        return self.row.tokens < FEW_TOKENS and len(self.row.documents) < FEWEST


class DepthCell(Record):
    """The answers to questions whose answer is at one depth of the text, 0 to 1."""

    depth: float
    questions: int
    exact_match: Number
    contained: Number


class AnswerRow(Record):
    """Answers to questions: shares by measure, numbers of tokens, and as further fields the settings of reading."""

    exact_match: Number
    contained: Number | None = None
    questions: int
    tokens: int | None = None
    tokens_per_second: float | None = None
    processor_ms_per_token: float | None = None
    peak_memory_mb: float | None = None
    missing_evidence: int | None = None
    prompt_tokens: int | None = None
    by_depth: list[DepthCell] = []
    memory_size: MemorySize | None
    query_size: int | None
    eviction: str
    max_prompt_tokens: int | None


class AnsweringRun(RunResult):
    """The results of a model that answers questions: one row, of one split."""

    questions: dict[str, Any]  # settings
    questions_text: str | None = None  # hash of their files
    answering: dict[str, Any] = {}  # settings
    model: str
    small_model: dict[str, Any] | None = None  # how it was trained
    metrics: dict[str, list[AnswerRow]]

    @property
    def row(self) -> AnswerRow:
        ((row,),) = self.metrics.values()
        return row

    @property
    def measure(self) -> str:  # by which an answer counts: exact_match or contained
        return str(self.answering.get("counts", "exact_match"))

    @property
    def share(self) -> float:  # of questions that were answered
        return float(getattr(self.row, self.measure))


def is_run(content: Any) -> bool:
    """Return whether the content of a JSON file has the form of a run's results."""
    return isinstance(content, dict) and {"name", "seed", "metrics"} <= content.keys()


def run_from_json(content: dict[str, Any]) -> RunResult:
    """Return the results of a run of any version; ValueError says in one line which field is missing or of another type."""
    try:
        return (AnsweringRun if "questions" in content else ScoredRun).model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def scored_runs(runs: Iterable[RunResult]) -> list[ScoredRun]:
    """Return the runs that scored a text."""
    return [run for run in runs if isinstance(run, ScoredRun)]


def effective(overrides: Iterable[str]) -> list[str]:
    """Return the settings of a command that may change results, without those that are paths."""
    return [word for word in overrides if not PATH_SETTINGS.match(word) and not word.startswith(WITHOUT_EFFECT)]


def split_command(command: str | None) -> list[str]:
    """Return the words of a command line, split as a shell does."""
    try:
        return shlex.split(command or "")
    except ValueError:  # an earlier version could drop a quotation mark
        return (command or "").split()


def without_paths(command: str | None) -> str | None:
    """Return a command line in which paths are replaced by …; None for an empty one."""
    words = [PATH_SETTINGS.sub(r"\1…", w) if PATH_SETTINGS.match(w) else shlex.quote(w) for w in split_command(command)]
    return " ".join(words) or None
