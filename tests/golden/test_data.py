"""Published data: ids, dictionaries, blocks, the texts for BM25, the datastore (data/, misc/, eval/)."""

from __future__ import annotations

from collections import Counter

import torch

from tests.golden.checkpoints import corpus_of, network
from tests.golden.published import assert_near, index, parametrized
from tests.golden.scored import STORES, datastore_arrays
from tests.golden.texts import DATA, corpora, dictionary, ids_of, splits_of, stream
from trime.data.segments import collate, cut
from trime.data.tokenizers import Whitespace
from trime.data.vocabulary import SpecialIds, Vocabulary

SPLITS = [(corpus, split) for corpus in corpora() for split in splits_of(DATA / corpus)]
BATCHING = index("misc/batching.json")
TRAIN = [run for run in BATCHING["runs"] if run["split"] == "train" and run["break_mode"] == "none"]


@parametrized("corpus, split", SPLITS)
def test_ids(corpus: str, split: str) -> None:
    """The published binaries hold our ids, in the dictionary's numbering."""
    text, _ = stream(corpus, split)
    assert ids_of(DATA / corpus, split).tolist() == text.tokens.tolist()


@parametrized("corpus", corpora())
def test_dictionary(corpus: str) -> None:
    """Counting the training text gives the published words in the published order, with the same padding words."""
    counts: Counter[str] = Counter()
    with open(DATA / corpus / "text" / "train.txt", "rb") as file:
        for symbols in Whitespace().tokens(file):
            counts.update(symbols)
    read = dictionary(corpus)
    size = sum(count > 0 for count in read.counts)
    made = Vocabulary.fairseq_from_counts(counts, size + 2, 1)
    assert made.symbols == read.symbols and made.counts[4:] == read.counts[4:]
    assert len(made) % 8 == 0 and made.special_ids == SpecialIds(2, 1) and made.unknown == 3


def corpus_of_batches() -> str:
    """Return the corpus of the published batches: the one with the listed dictionary."""
    special_tokens = BATCHING["special_tokens"]
    head = len(special_tokens["symbols_head"])
    read = {corpus: dictionary(corpus) for corpus in corpora()}
    return next(
        corpus
        for corpus, vocabulary in read.items()
        if vocabulary.symbols[:head] == special_tokens["symbols_head"] and len(vocabulary) == special_tokens["dict_size"]
    )


def test_special_tokens_and_blocks() -> None:
    special_tokens, vocabulary = BATCHING["special_tokens"], dictionary(corpus_of_batches())
    assert (special_tokens["pad"], special_tokens["eos"], special_tokens["unk"]) == (
        vocabulary.special_ids.pad,
        vocabulary.special_ids.eos,
        vocabulary.unknown,
    )
    text, special_ids = stream(corpus_of_batches(), "train")
    segments = cut(text.offsets, TRAIN[0]["tokens_per_sample"])
    for block in BATCHING["train_blocks"]:
        batch = collate(text, segments, [block["id"]], special_ids)
        assert batch.tokens[0].tolist() == block["source"] and batch.targets[0].tolist() == block["target"]


def test_texts_for_bm25() -> None:
    """The published search reads the inputs in the iterator's order; ours reads the targets in the text's order."""
    run = next(run for run in TRAIN if run["shuffle"] and run["num_shards"] == 1 and not run["args"])
    assert BATCHING["bm25_segments_order"] == [segment for batch in run["frozen_batches"] for segment in batch]
    text, special_ids = stream(corpus_of_batches(), "train")
    vocabulary = dictionary(corpus_of_batches())
    segments = cut(text.offsets, run["tokens_per_sample"])
    for segment in BATCHING["bm25_segments_first3"]:
        tokens = collate(text, segments, [segment["id"]], special_ids).tokens[0].tolist()
        assert segment["contents"].split() == [vocabulary.symbols[token] for token in tokens if token != special_ids.eos]


@parametrized("name", list(STORES))
def test_datastore(name: str) -> None:
    """Keys and tokens are those of the training split; the published pass leaves out windows without a full context."""
    store, saved = STORES[name], datastore_arrays(name)
    text, special_ids = stream(corpus_of(store["model"]), store["split"])
    windows, net = cut(text.offsets, store["block"], store["context"]), network(store["model"])
    keys, tokens = [], []
    for number in range(len(windows)):
        batch = collate(text, windows, [number], special_ids)
        with torch.no_grad():
            encoding, _ = net.backbone(batch.tokens, None, None)
        keys.append(encoding.g[batch.scored])
        tokens.append(batch.targets[batch.scored])
    kept = slice(store["first_saved_stream_position"], store["first_saved_stream_position"] + store["size"])
    assert len(text.tokens) == store["stream_tokens"] and len(saved["vals"]) == store["size"]
    assert torch.cat(tokens)[kept].tolist() == saved["vals"].ravel().tolist()
    rounding = torch.finfo(torch.as_tensor(saved["keys"]).dtype).eps / torch.finfo(torch.float32).eps
    assert_near(torch.cat(keys)[kept], saved["keys"], 31 + round(rounding))
