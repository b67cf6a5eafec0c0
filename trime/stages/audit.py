"""audit: check for a trained run that the probability of a scored token does not depend on text that it must not see.

Text is altered and scored again with the run's model, memories and tuned settings:

* a token and all later ones are altered: no probability up to that token may change;
* all other documents are altered, if evaluation is bounded by documents: no probability may change;
* another target is scored: the weights of a fitted mixture at that token and before may not change.

The run's stored encodings, from which its results come, must score the text like fresh encodings, and the datastore is
searched for the test text. A violation raises UserError; all measurements are in ``audit.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from trime.common.io import write_json
from trime.common.progress import Progress
from trime.common.types import LogMass, Tensor, contexts_of, is_token
from trime.data.corpus import Split
from trime.data.duplicates import copied_shares
from trime.data.segments import Segments, collate
from trime.errors import UserError
from trime.lab.stage import Stage
from trime.models.network import Reader
from trime.scoring.mixture_spec import FittedMixtureSpec
from trime.stages.encode import read_windows
from trime.stages.graph import Graph
from trime.stages.scoring import build_scorer
from trime.token_memory.test.base import StateScope, Window

MAX_WINDOWS = 6  # windows of the test text that are altered
TOLERANCE = 1e-4  # nats: changes by rounding
STORED_TOLERANCE = 0.05  # nats per token on average: changes by the precision of stored encodings
RUN_LENGTH = 50  # consecutive tokens that count as copied if they occur again
MAX_COPIED = 0.5  # share of a test document that may consist of runs in the datastore


class Audit:
    """The checks of a run, with its text, model and memories."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.corpus = graph.evaluated_corpus.corpus()
        self.text = self.corpus.split("test")
        self.windows: Segments = graph.test.windows(self.corpus)
        self.network, _ = graph.model_settings.open(graph.model.path())
        self.device = graph.hardware.device
        self.network.to(self.device)
        self.scorer = build_scorer(graph.scoring, graph.tune.rows(), graph.memories, graph.test)
        self.searches = [memory.nearest for memory in self.scorer.memories.values() if memory.nearest]
        self.unaltered: dict[int, list[Tensor]] = {}  # scores by window number

    def relevant_windows(self, last: int) -> list[int]:
        """Return the windows that can affect window ``last``, itself included: as many as the memories reach back."""
        room, first = max([size for row in self.scorer.rows for size in row.sizes] or [0]), last
        scored = self.windows.length - self.windows.context
        # Its memories reach back from its first scored token; its context is text of earlier windows, read before that.
        while first > 0 and room > -int(self.windows.context[last]):
            first, room = first - 1, room - int(scored[first - 1])
        if self.network.is_stateful or any(memory.depends_on_whole_document for memory in self.scorer.memories.values()):
            # from the start of its document
            first = min(first, int(np.searchsorted(self.windows.document_offset, self.windows.document_offset[last])))
        return list(range(first, last + 1))

    @torch.no_grad()
    def scores(self, number: int, altered: np.ndarray | None = None) -> list[Tensor]:
        """Return log P of the *original* tokens of a window, [row][token], in a text with other tokens at ``altered``."""
        if altered is None and number in self.unaltered:
            return self.unaltered[number]
        text = self.text
        if altered is not None:
            tokens, size = np.array(text.tokens), len(self.corpus.vocabulary)
            shift = np.random.default_rng(number).integers(1, size, len(altered))  # never back to the same token
            tokens[altered] = (tokens[altered] + shift) % size
            text = Split(tokens, text.offsets)
        (*_, (_, row_scores)) = self.scorer.score_rows(self.encode(text, self.relevant_windows(number)))
        scores = [score[0, 0] for score in row_scores]
        if altered is None:
            self.unaltered[number] = scores
        return scores

    def encode(self, text: Split, numbers: list[int]) -> Iterator[Window]:
        """Yield windows of an altered text, whose targets are the original tokens."""
        special_ids, reader = self.corpus.vocabulary.special_ids, Reader(self.network)
        for number in numbers:
            batch = collate(text, self.windows, [number], special_ids).to(self.device)
            targets = collate(self.text, self.windows, [number], special_ids).targets.to(self.device).flatten()
            encoding = reader.encode(batch)
            contexts = contexts_of(batch, encoding.g.float()).take(is_token(batch).flatten())
            # Every batch numbers its segments from 0, but memories must tell windows apart.
            contexts = contexts._replace(positions=contexts.positions._replace(segment=contexts.positions.segment + number))
            scored = batch.scored.flatten()
            mass = self.network.vocabulary_mass(encoding.f.flatten(0, 1)[scored], targets[scored])
            vocabulary = LogMass(mass.target.float(), mass.total.float(), mass.gate)
            yield Window(contexts, int((~scored).sum()), vocabulary, targets[scored])

    def max_change(self, number: int, positions: np.ndarray, count: int) -> float:
        """Return by how many nats altering ``positions`` changes the first ``count`` scored tokens of a window, at most."""
        altered = self.scores(number, positions)
        pairs = zip(self.scores(number), altered, strict=True)
        return float(np.max([float((a[:count] - b[:count]).abs().max()) for a, b in pairs]))  # keeps NaN, which max() may lose

    def change_by_later_tokens(self, number: int) -> float:
        """Return the change in the first half of a window when the last token of that half and all later ones are altered."""
        windows, context = self.windows, int(self.windows.context[number])
        count = max(1, (int(windows.length[number]) - context) // 2)
        first = int(windows.document_offset[number] + windows.start[number]) + context + count - 1
        return self.max_change(number, np.arange(first, len(self.text.tokens)), count)

    def change_by_other_documents(self, number: int) -> float:
        """Return the change in a window when all other documents are altered."""
        document = int(np.searchsorted(self.text.offsets, self.windows.document_offset[number], side="right")) - 1
        # Its own text stays, all the others' changes, before and after.
        low, high = self.text.offsets[document : document + 2]
        outside = np.concatenate([np.arange(low), np.arange(high, len(self.text.tokens))])
        return self.max_change(number, outside, int(self.windows.length[number] - self.windows.context[number]))

    def change_by_target(self, number: int) -> float:
        """Return the change in the weights of fitted mixtures, up to and at a token, when another target is scored there."""
        fitted = [(index, row) for index, row in enumerate(self.scorer.rows) if isinstance(row, FittedMixtureSpec)]
        windows, weights = list(self.encode(self.text, self.relevant_windows(number))), []
        last = windows[-1]
        assert last.targets is not None
        # In the middle: the weights at the tokens before it may not change either.
        position = len(last.targets) // 2
        other = last.targets.clone()
        other[position] = (other[position] + 1) % len(self.corpus.vocabulary)
        for targets in (last.targets, other):
            scorers = [row.window_scorer() for _, row in fitted]
            # The windows before are scored, too, because mixtures may carry a history from one to the next.
            for window, masses in self.scorer.query(iter([*windows[:-1], last._replace(targets=targets)])):
                for scorer, (index, _) in zip(scorers, fitted, strict=True):
                    scorer(window, masses[index])
            weights.append([scorer.log_weights[: position + 1].exp() for scorer in scorers])
        return max((float((one - two).abs().max()) for one, two in zip(*weights, strict=True)), default=0.0)

    def stored_encoding_error(self, number: int) -> float:
        """Return the mean difference between the scores by stored and by fresh encodings of a window, in nats per token."""
        numbers = self.relevant_windows(number)
        # Encodings of the same windows as they were stored, from which the run's results come.
        windows = islice(read_windows(self.graph.test.path(), self.device), numbers[0], numbers[-1] + 1)
        (*_, (_, row_scores)) = self.scorer.score_rows(windows)
        pairs = zip(row_scores, self.scores(number), strict=True)
        return float(np.max([float((stored[0, 0] - fresh).abs().mean()) for stored, fresh in pairs]))

    def shares_in_datastores(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return by test document its largest share in any datastore of other text, and the largest share of a window's
        retrieved entries that are of its own document, from any datastore of the test text."""
        copied: dict[str, float] = {}
        own: dict[str, float] = {}
        documents = [self.text.document(number) for number in range(len(self.text.lengths))]
        for nearest in self.searches:
            if not nearest.hide_own:
                for number, share in copied_shares(documents, [nearest.store.token.numpy()], RUN_LENGTH).items():
                    if len(documents[number]) >= 2 * RUN_LENGTH - 1:  # a shorter copy need not hold a whole run as it is cut
                        copied[str(number)] = max(share, copied.get(str(number), 0.0))
                continue
            windows = read_windows(self.graph.test.path(), torch.device("cpu"))
            for window in islice(windows, None, None, max(1, len(self.windows) // MAX_WINDOWS)):
                score, _, index = nearest.entries(window.query)
                is_own = (nearest.store.document[index] == window.query.positions.document[:, None]) & score.isfinite()
                document = str(int(window.query.positions.document[0]))
                own[document] = max(float(is_own.float().mean()), own.get(document, 0.0))
        return copied, own


def audit(graph: Graph) -> dict[str, Any]:
    """Run all checks of a finished run and write audit.json; UserError if one is violated. Return the measurements."""
    checks = Audit(graph)
    numbers = evenly_spaced(np.arange(len(checks.windows)))
    scopes = [scored.state_scope for scored in (*checks.scorer.rows, *checks.scorer.memories.values())]
    bounded = graph.config.evaluate.bounded and StateScope.CORPUS not in scopes
    # The first windows of documents that follow another one would be affected first if its text leaked.
    borders = evenly_spaced(np.flatnonzero(np.diff(checks.windows.document)) + 1) if bounded else []
    later = [checks.change_by_later_tokens(number) for number in Progress(numbers, unit="window", desc="audit later tokens")]
    stored = [checks.stored_encoding_error(number) for number in numbers]
    weights = [checks.change_by_target(number) for number in numbers]
    others = [
        checks.change_by_other_documents(number) for number in Progress(borders, unit="window", desc="audit other documents")
    ]
    copied, own = checks.shares_in_datastores()
    holds_test_text = {nearest.hide_own for nearest in checks.searches}
    results = {
        "windows": numbers,
        "windows_after_borders": borders,
        "stored_encoding_error": float(np.max(stored)),
        "max_change_by_later_tokens": float(np.max(later)),
        "max_weight_change_by_target": float(np.max(weights)),
        "max_change_by_other_documents": float(np.max(others)) if others else None,
        "test_documents_in_datastore": copied,
        "test_documents_that_retrieve_themselves": own,
        "datastore_is_the_test_text": True in holds_test_text,
        "tolerance": TOLERANCE,
    }
    graph.run_folder.mkdir(parents=True, exist_ok=True)
    write_json(graph.run_folder / "audit.json", results)
    violated, passed = judge(results, holds_test_text)
    if violated:
        raise UserError(f"audit: {'; '.join(violated)} (see {graph.run_folder / 'audit.json'})")
    print("\n".join(passed))
    return results


def evenly_spaced(numbers: np.ndarray) -> list[int]:
    """Return at most MAX_WINDOWS of some numbers, evenly spaced."""
    if not len(numbers):
        return []
    return numbers[np.unique(np.linspace(0, len(numbers) - 1, MAX_WINDOWS).astype(int))].tolist()


def judge(results: dict[str, Any], holds_test_text: set[bool]) -> tuple[list[str], list[str]]:
    """Return a message for each check that failed, and the lines that are printed if none did.

    ``holds_test_text`` says of the searched datastores whether they hold the test text.
    """
    later, weights = results["max_change_by_later_tokens"], results["max_weight_change_by_target"]
    others, stored = results["max_change_by_other_documents"], results["stored_encoding_error"]
    windows, failed = len(results["windows"]), []
    passed = [f"audit: altering a token and later ones changes no probability up to it ({windows} windows, {later:.1e} nats)"]
    # Each check is "not <=" rather than ">", so that a NaN fails.
    if not later <= TOLERANCE:
        failed.append(f"altering a token and later ones changes its probability by {later:.2g} nats")
    if not weights <= TOLERANCE:
        failed.append(f"scoring another target changes the mixture's weights by {weights:.2g}")
    if others is None:
        passed.append("audit: other documents not checked: documents are not bounded by these settings, or there is only one")
    else:
        passed.append(f"audit: altering other documents changes no probability ({others:.1e} nats)")
        if not others <= TOLERANCE:
            failed.append(f"altering other documents changes a bounded one by {others:.2g} nats")
    if not stored <= STORED_TOLERANCE:
        failed.append(f"the stored encodings score the test text differently, by {stored:.2g} nats per token")
    for key, allowed in (("test_documents_in_datastore", MAX_COPIED), ("test_documents_that_retrieve_themselves", 0.0)):
        if copies := {document: share for document, share in results[key].items() if share > allowed}:
            worst = max(copies, key=copies.__getitem__)
            failed.append(f"{len(copies)} test documents are in the datastore, {100 * copies[worst]:.0f} % of document {worst}")
    if True in holds_test_text:
        passed.append("audit: the datastore holds the test text, and no document retrieves entries of its own")
    if False in holds_test_text:
        shares = results["test_documents_in_datastore"].values()
        passed.append(
            f"audit: at most {100 * max(shares, default=0):.1f} % of a test document are runs of {RUN_LENGTH} tokens in the "
            f"datastore ({len(shares)} documents searched, those of at least {2 * RUN_LENGTH - 1} tokens)"
        )
    passed.append(f"audit: stored and fresh encodings of the test text agree ({stored:.1e} nats per token)")
    return failed, passed


AUDIT = Stage("audit", report=audit)
