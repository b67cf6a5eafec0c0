"""Published data: ids, dictionaries, blocks, the texts that BM25 searches, the datastore (README sections 2, 3, 4)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.golden.published import ROOT, arrays, index, network, parametrized
from tests.golden.test_evaluation import CASES, stream
from trime.data.segments import collate, cut
from trime.data.tokenizers import Whitespace
from trime.data.vocabulary import Ends, Vocabulary

SPLITS = sorted((path.parent.name, path.stem) for path in (ROOT / "data").glob("*/*.bin"))
BATCHING = index("misc/batching.json")


@parametrized("corpus, split", SPLITS)
def test_ids(corpus: str, split: str) -> None:
    """The published binaries hold our ids, in the dictionary's numbering."""
    text, _ = stream(corpus, split)
    assert np.fromfile(ROOT / "data" / corpus / f"{split}.bin", np.uint16).tolist() == text.tokens.tolist()


@parametrized("corpus", sorted({corpus for corpus, _ in SPLITS}))
def test_dictionary(corpus: str) -> None:
    """As many words as were kept, counted in the training text, ordered and filled up as published."""
    counts: Counter[str] = Counter()
    with open(ROOT / "data" / corpus / "text" / "train.txt", "rb") as file:
        for symbols in Whitespace().tokens(file):
            counts.update(symbols)
    read = Vocabulary.of_dictionary(ROOT / "data" / corpus / "dict.txt")
    kept = sum(count > 0 for count in read.counts)
    made = Vocabulary.as_published(counts, kept + 2, 1)
    assert made.symbols == read.symbols and made.counts[4:] == read.counts[4:]
    assert len(made) % 8 == 0 and made.ends == Ends(2, 1) and made.unknown == 3


@pytest.mark.skipif(not BATCHING, reason=f"no golden vectors at {ROOT}")
def test_special_tokens_and_blocks() -> None:
    named, vocabulary = BATCHING["special_tokens"], Vocabulary.of_dictionary(ROOT / "data" / "words" / "dict.txt")
    assert vocabulary.symbols[: len(named["symbols_head"])] == named["symbols_head"] and len(vocabulary) == named["dict_size"]
    assert (named["pad"], named["eos"], named["unk"]) == (vocabulary.ends.pad, vocabulary.ends.eos, vocabulary.unknown)
    text, ends = stream("words", "train")
    segments = cut(text.offsets, BATCHING["runs"][0]["tokens_per_sample"])
    for block in BATCHING["train_blocks"]:
        batch = collate(text, segments, [block["id"]], ends)
        assert batch.tokens[0].tolist() == block["source"] and batch.targets[0].tolist() == block["target"]


@pytest.mark.skipif(not BATCHING, reason=f"no golden vectors at {ROOT}")
def test_texts_for_bm25() -> None:
    """The published search reads the source side in the iterator's order; ours reads the targets in the text's order."""
    run = next(run for run in BATCHING["runs"] if run["shuffle"] and run["num_shards"] == 1)
    assert BATCHING["bm25_segments_order"] == [segment for batch in run["frozen_batches"] for segment in batch]
    text, ends = stream("words", "train")
    vocabulary = Vocabulary.of_dictionary(ROOT / "data" / "words" / "dict.txt")
    segments = cut(text.offsets, run["tokens_per_sample"])
    for found in BATCHING["bm25_segments_first3"]:
        tokens = collate(text, segments, [found["id"]], ends).tokens[0].tolist()
        assert found["contents"].split() == [vocabulary.symbols[token] for token in tokens if token != ends.eos]


@parametrized("name", sorted(path.stem for path in (ROOT / "eval").glob("dstore_*.npz")))
def test_datastore(name: str) -> None:
    """Keys and tokens of the training split; the published pass leaves out windows whose history is not full yet."""
    found, model = arrays(f"eval/{name}.npz"), name.removeprefix("dstore_")
    case = next(case for case in CASES.values() if case["datastore"] == model)
    text, ends = stream("words", "train")
    windows, net, keys, tokens = cut(text.offsets, case["block"], case["context_window"]), network(model), [], []
    for number in range(len(windows)):
        batch = collate(text, windows, [number], ends)
        with torch.no_grad():
            encoding, _ = net.backbone(batch.tokens, None, None)
        keys.append(encoding.g[batch.scored])
        tokens.append(batch.targets[batch.scored])
    left_out = case["context_window"]
    assert torch.cat(tokens)[left_out:].tolist() == found["vals"].ravel().tolist()
    assert (torch.cat(keys)[left_out:] - torch.as_tensor(found["keys"])).abs().max() < 2e-5
