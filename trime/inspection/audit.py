"""audit: shows for a trained run that no scored token's probability depends on what it must not depend on.

Text is altered and scored again with the run's model, memories and tuned settings:

* from a position on, own token included: nothing up to that position may move;
* in all other documents, where evaluation is bounded by them: nothing may move;
* another token is asked for: the weights of a fitted mixture may not move, at that token or before;

The run's stored encodings, which its figures come from, must say the same as the text encoded anew, and the
datastore's text is searched for the test text. A violation is an error; the figures are in ``audit.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from trime.data.corpus import Split
from trime.data.segments import Segments, collate
from trime.evaluation.fitted_rows import FittedRow
from trime.io import write_atomically
from trime.memory.base import Window
from trime.memory.external import ExternalMemory
from trime.memory.retrieval.datastore import Datastore, KNNMemory
from trime.models.network import Reader
from trime.pipeline.model_io import open_network
from trime.pipeline.processes import device_of
from trime.plan.language_model import Plan
from trime.stages.encode import windows_of
from trime.stages.tune import scorer_of
from trime.types import Mass, Tensor, UserError, contexts_of, is_token

PLACES = 6  # windows of the test text that are altered
TOLERANCE = 1e-4  # nats: what rounding may move
STORED = 0.05  # nats a token on average: what the stored encodings' precision may move
RUN = 50  # tokens: so many in a row, found again, are a copy
COPIED = 0.5  # of a document: more than this in the datastore is test text in it


class Audit:
    """The run's text, model and memories."""

    def __init__(self, plan: Plan):
        config, self.plan = plan.config, plan
        self.corpus = plan.evaluated_corpus.corpus()
        self.text = self.corpus.split("test")
        self.windows: Segments = plan.test.windows(self.corpus)
        self.network, _ = open_network(plan.model.path(), config)
        self.device = device_of(config)
        self.network.to(self.device)
        self.scorer = scorer_of(config, plan.tune.rows(), plan.memories, plan.test)
        self.unaltered: dict[int, list[Tensor]] = {}  # by the window's number

    @property
    def nearest(self) -> KNNMemory | None:
        """The external memory, where some row has it."""
        external = self.scorer.memories.get("external")
        return external.nearest if isinstance(external, ExternalMemory) else None

    def stretch(self, last: int) -> list[int]:
        """The windows that may bear on window ``last``: as many before it as the long memory holds."""
        room, first = max([size for row in self.scorer.rows for size in row.sizes] or [0]), last
        scored = self.windows.length - self.windows.context
        while first > 0 and room > -int(self.windows.context[last]):
            first, room = first - 1, room - int(scored[first - 1])
        if self.network.is_stateful or any(
            memory.remembers_all for memory in self.scorer.memories.values()
        ):  # from the start of its document
            first = min(first, int(np.searchsorted(self.windows.begin, self.windows.begin[last])))
        return list(range(first, last + 1))

    @torch.no_grad()
    def scores(self, text: Split, numbers: list[int]) -> list[Tensor]:
        """log P of the *original* tokens in the last window, [row, token], as the altered text makes it."""
        (*_, (_, found)) = self.scorer.scores(self.encoded(text, numbers))
        return [score[0, 0] for score in found]

    def as_is(self, number: int) -> list[Tensor]:
        """The scores of a window of the text itself."""
        if number not in self.unaltered:
            self.unaltered[number] = self.scores(self.text, self.stretch(number))
        return self.unaltered[number]

    def encoded(self, text: Split, numbers: list[int]) -> Iterator[Window]:
        ends, reader = self.corpus.vocabulary.ends, Reader(self.network)
        for number in numbers:
            batch = collate(text, self.windows, [number], ends).to(self.device)
            asked = collate(self.text, self.windows, [number], ends).targets.to(self.device).flatten()
            encoding = reader.encode(batch)
            contexts = contexts_of(batch, encoding.g.float()).take(is_token(batch).flatten())
            contexts = contexts._replace(place=contexts.place._replace(segment=contexts.place.segment + number))
            scored = batch.scored.flatten()
            mass = self.network.vocabulary_mass(encoding.f.flatten(0, 1)[scored], asked[scored])
            yield Window(
                contexts, int((~scored).sum()), Mass(mass.target.float(), mass.total.float(), mass.gate), asked[scored]
            )

    def altered(self, positions: np.ndarray, seed: int) -> Split:
        """The text with other tokens at some positions."""
        tokens = np.array(self.text.tokens)
        other = np.random.default_rng(seed).integers(1, len(self.corpus.vocabulary), len(positions))
        tokens[positions] = (tokens[positions] + other) % len(self.corpus.vocabulary)
        return Split(tokens, self.text.offsets)

    def moved(self, number: int, positions: np.ndarray, until: int) -> float:
        """How far altering ``positions`` moves the first ``until`` scored tokens of a window, in nats."""
        altered = self.scores(self.altered(positions, number), self.stretch(number))
        apart = [float((a[:until] - b[:until]).abs().max()) for a, b in zip(self.as_is(number), altered, strict=True)]
        return float(np.max(apart))  # which keeps a NaN, where max() may lose it

    def future(self, number: int) -> float:
        """What a token and those after it move in the probability of itself and of those before it."""
        windows = self.windows
        scored = int(windows.length[number] - windows.context[number])
        kept = max(1, scored // 2)
        first = int(windows.begin[number] + windows.start[number] + windows.context[number]) + kept - 1
        return self.moved(number, np.arange(first, len(self.text.tokens)), kept)

    def asked(self, number: int) -> float:
        """How far asking for another token moves the weights of fitted mixtures, at that token and those before it."""
        rows = [(place, row) for place, row in enumerate(self.scorer.rows) if isinstance(row, FittedRow)]
        every, found = list(self.encoded(self.text, self.stretch(number))), []
        last = every[-1]
        assert last.asked is not None
        place = len(last.asked) // 2
        other = last.asked.clone()
        other[place] = (other[place] + 1) % len(self.corpus.vocabulary)
        for asked in (last.asked, other):
            readings = [row.window_scorer() for _, row in rows]
            for window, masses in self.scorer.masses(iter([*every[:-1], last._replace(asked=asked)])):
                for reading, (number_, _) in zip(readings, rows, strict=True):
                    reading(window, masses[number_])
            found.append([reading.log_weights[: place + 1].exp() for reading in readings])
        return max((float((one - two).abs().max()) for one, two in zip(*found, strict=True)), default=0.0)

    def stored(self, number: int) -> float:
        """How far a window's scores by the run's stored encodings lie from those made anew, in nats a token."""
        numbers = self.stretch(number)
        every = islice(windows_of(self.plan.test.path(), self.device), numbers[0], numbers[-1] + 1)
        (*_, (_, found)) = self.scorer.scores(every)
        pairs = zip(found, self.as_is(number), strict=True)
        return float(np.max([float((kept[0, 0] - anew).abs().mean()) for kept, anew in pairs]))

    def after_borders(self) -> list[int]:
        """First windows of documents that follow another one: where its text would show, if anywhere."""
        return spread(np.flatnonzero(np.diff(self.windows.document)) + 1)

    def others(self, number: int) -> float:
        """What all other documents move in a window."""
        document = int(np.searchsorted(self.text.offsets, self.windows.begin[number], side="right")) - 1
        low, high = self.text.offsets[document : document + 2]
        outside = np.concatenate([np.arange(low), np.arange(high, len(self.text.tokens))])
        return self.moved(number, outside, int(self.windows.length[number] - self.windows.context[number]))

    @property
    def own_datastore(self) -> bool:
        """The datastore is of the very text that is scored."""
        return self.nearest is not None and self.nearest.hide_own

    def copied(self) -> dict[str, float]:
        """The share of each test document that lies in the datastore, or where it is of that text, is found there."""
        if self.nearest is None:
            return {}
        return self.own_entries(self.nearest) if self.own_datastore else in_runs(self.text, self.nearest.store)

    def own_entries(self, nearest: KNNMemory) -> dict[str, float]:
        """Of what is found for a document's tokens in a datastore of the same text: the share that is its own."""
        found: dict[str, list[float]] = {}
        every = windows_of(self.plan.test.path(), torch.device("cpu"))
        for window in islice(every, None, None, max(1, len(self.windows) // PLACES)):
            score, _, index = nearest.entries(window.query)
            own = (nearest.store.document[index] == window.query.place.document[:, None]) & score.isfinite()
            found.setdefault(str(int(window.query.place.document[0])), []).append(float(own.float().mean()))
        return {document: max(shares) for document, shares in found.items()}


def audit(plan: Plan) -> dict[str, Any]:
    """Runs every check of a finished run; UserError at the violations, after all figures are written."""
    checks = Audit(plan)
    uses_long = any("long" in row.memories for row in checks.scorer.rows)
    learns = any(isinstance(row, FittedRow) and row.online for row in checks.scorer.rows)
    bounded = plan.config.evaluate.bounded and not learns and not (plan.config.long.crossing and uses_long)
    numbers = spread(np.arange(len(checks.windows)))
    edges = checks.after_borders() if bounded else []
    future = [checks.future(number) for number in tqdm(numbers, unit="place", desc="audit later tokens")]
    stored = [checks.stored(number) for number in numbers]
    weights = [checks.asked(number) for number in numbers]
    others = [checks.others(number) for number in tqdm(edges, unit="place", desc="audit other documents")]
    found = {
        "windows": numbers,
        "windows_after_borders": edges,
        "stored_encodings_differ": float(np.max(stored)),
        "own_and_later_tokens_move": float(np.max(future)),
        "asked_token_moves_weights": float(np.max(weights)),
        "other_documents_move": float(np.max(others)) if others else None,
        "test_documents_in_datastore": checks.copied(),
        "datastore_is_the_test_text": checks.own_datastore,
        "tolerance": TOLERANCE,
    }
    plan.run_folder.mkdir(parents=True, exist_ok=True)
    write_atomically(plan.run_folder / "audit.json", json.dumps(found, indent=1))
    wrong = violations(found)
    if wrong:
        raise UserError(f"audit: {'; '.join(wrong)} (see {plan.run_folder / 'audit.json'})")
    print(said(found, plan))
    return found


def spread(numbers: np.ndarray) -> list[int]:
    """A few of some numbers, evenly."""
    return numbers[np.unique(np.linspace(0, len(numbers) - 1, PLACES).astype(int))].tolist() if len(numbers) else []


def violations(found: dict[str, Any]) -> list[str]:
    """A sentence for each check that failed."""
    wrong = []
    if not found["own_and_later_tokens_move"] <= TOLERANCE:
        wrong.append(f"a token or those after it move its probability by {found['own_and_later_tokens_move']:.2g} nats")
    if not found["asked_token_moves_weights"] <= TOLERANCE:
        wrong.append(f"the token that is asked for moves the mixture's weights by {found['asked_token_moves_weights']:.2g}")
    if found["other_documents_move"] is not None and not found["other_documents_move"] <= TOLERANCE:
        wrong.append(f"other documents move a bounded one by {found['other_documents_move']:.2g} nats")
    if not found["stored_encodings_differ"] <= STORED:
        wrong.append(
            f"the stored encodings of the test text score it otherwise, by {found['stored_encodings_differ']:.2g} nats a token"
        )
    allowed = 0.0 if found["datastore_is_the_test_text"] else COPIED
    copies = {name: share for name, share in found["test_documents_in_datastore"].items() if share > allowed}
    if copies:
        worst = max(copies, key=copies.__getitem__)
        wrong.append(f"{len(copies)} test documents lie in the datastore, document {worst} by {100 * copies[worst]:.0f} %")
    return wrong


def said(found: dict[str, Any], plan: Plan) -> str:
    """The verdict in a line or three."""
    moved = found["own_and_later_tokens_move"]
    lines = [f"audit: {len(found['windows'])} places: own and later tokens move nothing ({moved:.1e} nats)"]
    if found["other_documents_move"] is None:
        lines.append(
            "audit: documents are not bounded by these settings (mixture.online is not), or there is one alone: not checked"
        )
    else:
        lines.append(f"audit: other documents move nothing ({found['other_documents_move']:.1e} nats)")
    if plan.index:
        shares = found["test_documents_in_datastore"].values()
        lines.append(
            f"audit: at most {100 * max(shares, default=0):.1f} % of a test document are runs of {RUN} tokens in the datastore "
            f"({len(shares)} documents searched; those of less than {2 * RUN - 1} tokens are not)"
        )
    lines.append(
        f"audit: the stored encodings agree with the text encoded anew ({found['stored_encodings_differ']:.1e} nats a token)"
    )
    return "\n".join(lines)


def in_runs(text: Split, store: Datastore) -> dict[str, float]:
    """The share of each document that lies in runs of tokens which the datastore holds too."""
    known = np.unique(hashes(store.token.numpy()[: len(store) // RUN * RUN].reshape(-1, RUN)))
    found = {}
    for document, (low, high) in enumerate(zip(text.offsets[:-1], text.offsets[1:], strict=True)):
        tokens = np.asarray(text.tokens[low:high])
        if len(tokens) < 2 * RUN - 1:  # a shorter one need not hold a whole run of the datastore
            continue
        own = hashes(np.lib.stride_tricks.sliding_window_view(tokens, RUN))
        starts = np.flatnonzero(np.isin(own, known))
        covered = np.zeros(len(tokens) + 1, np.int64)
        np.add.at(covered, starts, 1)
        np.add.at(covered, starts + RUN, -1)
        found[str(document)] = float((np.cumsum(covered)[:-1] > 0).mean())
    return found


def hashes(rows: np.ndarray) -> np.ndarray:
    """A 64-bit number for each row of tokens."""
    factors = np.random.default_rng(0).integers(1, 2**63, RUN, dtype=np.uint64) | np.uint64(1)
    result = np.zeros(len(rows), np.uint64)
    for column in range(RUN):
        result += (rows[:, column].astype(np.uint64) + np.uint64(1)) * factors[column]
    return result
