"""Scored evaluation, token by token (README section 3): windows, memories, mixtures, traces of the long memory.

The published program has the in-band quirk in mode gn alone, so that mode lm and kNN-LM are scored without it.
Not covered: the entries of index.json without windows, which the published program cannot run (gn_interp_only,
li_no_arg, gnli); and in mode li the first position, where it spreads over hidden entries (README section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from tests.golden.published import ROOT, arrays, index, network, parametrized, windows_of
from trime.data.corpus import Split
from trime.data.segments import collate, cut, cut_lines
from trime.data.tokenizers import Whitespace
from trime.data.vocabulary import Ends, Vocabulary
from trime.memory.datastore import Datastore, Nearest
from trime.memory.recent import Recent
from trime.memory.search import Exact
from trime.models.network import Reader
from trime.tasks.language_model import vocabulary_evidence
from trime.tasks.rows import Layer, Row
from trime.tasks.scoring import Scorer, Window

CASES = {name: case for name, case in index("eval/index.json").items() if "windows" in case}


def datastore(folder: Path, case: dict) -> Datastore:
    """The published datastore in shards of our own."""
    found = arrays(f"eval/dstore_{case['datastore'].split('_')[0]}.npz")
    keys = torch.as_tensor(found["keys"]).to(torch.float16 if case["datastore"].endswith("fp16") else torch.float32)
    token = torch.as_tensor(found["vals"]).flatten().long()
    for number, part in enumerate(torch.arange(len(token)).split(1500)):
        columns = {"g": keys[part], "token": token[part], "document": torch.full_like(part, -1)}
        save_file(columns, folder / f"{number:05d}.safetensors")
    return Datastore(folder)


def flag(case: dict, name: str, default: float) -> float:
    flags = case["flags"]
    return float(flags[flags.index(name) + 1]) if name in flags else default


def row_of(case: dict) -> tuple[Row, bool]:
    """The row of a case, and whether its interpolation divides by the square root of the width."""
    flags, tau = case["flags"], flag(case, "--softmax-temp", 1.0)
    names = (("local", "--use-local"), ("long", "--use-long"), ("external", "--use-external"))
    used = tuple(name for name, option in names if option in flags)
    sizes = (int(flag(case, "--mem-size", 0)),)
    if "--knnlm" in flags:
        return Row((), (Layer(("external",), (tau,), (flag(case, "--lmbda", 0),)),), sizes=sizes), False
    mode = flags[flags.index("--mode") + 1]
    if mode == "li":
        return Row((), (Layer(used, (tau,), (case["extra"]["cache_lmbda"],)),), sizes=sizes), True
    layer = Layer(("external",), (flag(case, "--interp-temp", 1),), (flag(case, "--lmbda", 0),))
    return Row(used, (layer,) if "--use-interp" in flags else (), (tau,), sizes), False


class Read(NamedTuple):
    """The settings under which a case was run."""

    row: Row
    scaled: bool
    published: bool


def read(case: dict) -> Read:
    return Read(*row_of(case), case["flags"][:2] == ["--mode", "gn"])


def encoded(case: dict) -> Iterator[Window]:
    """The windows of a case, encoded."""
    model = network(case["model"], published=read(case).published)
    for batch in windows_of(case["windows"]):
        with torch.no_grad():
            contexts, vocabulary = vocabulary_evidence(Reader(model), batch)
        yield Window(contexts, int((~batch.scored).sum()), vocabulary)


def scorer(case: dict, folder: Path, rescore: bool = False) -> Scorer:
    row, scaled, _ = read(case)
    recent, nearest = None, None
    if "long" in row.memories:
        recent = Recent(list(row.sizes), crossing=True, repeats=True)
    if "external" in row.memories:
        store, metric = datastore(folder, case), case["faiss"]
        nearest = Nearest(store, Exact(store.keys.blocks, metric, 700), case["k"], metric, rescore)
    return Scorer([row], recent, nearest, scaled, jumps_clear=True)


@parametrized(
    "name, rescore",
    [(name, rescore) for name, case in CASES.items() for rescore in (False, True)[: 1 + bool(case["datastore"])]],
)
def test_scored_tokens(name: str, rescore: bool, tmp_path: Path) -> None:
    case, found = CASES[name], arrays(f"eval/{name}.npz")
    pairs = list(scorer(case, tmp_path, rescore).scores(encoded(case)))
    scores = torch.cat([score.flatten() for _, (score,) in pairs])
    expected, first = torch.as_tensor(found["logp"]), 1 if "li" in case["flags"] else 0  # li: README, position 0
    assert len(scores) == case["tokens_scored"]
    assert torch.cat([window.query.token for window, _ in pairs]).tolist() == found["target"].tolist()
    assert (scores - expected)[first:].abs().max() < 1e-4
    assert abs(-scores.double().mean().item() / np.log(2) - case["loss_base2"]) < (2e-2 if first else 1e-4)


@parametrized("name", [name for name, case in CASES.items() if case.get("mem_trace")])
def test_what_the_long_memory_holds(name: str, tmp_path: Path) -> None:
    """Labels before and after every window; where a window does not follow the last, nothing is held."""
    case = CASES[name]
    traced, cleared = index(f"eval/{name}.mem.json"), []
    own = scorer(case, tmp_path)
    assert own.recent is not None
    size = own.recent.sizes[-1]
    for number, (trace, (_, _)) in enumerate(zip(traced, own.scores(encoded(case)), strict=True)):
        before = [] if own.recent.seen is None else own.recent.seen.token.tolist()
        if number and not before:
            cleared.append(number)
        else:
            assert before[-size:] == (trace["mem_before"] or [])
    assert cleared == case["mem_cleared_at"]
    assert own.recent.seen is not None and own.recent.seen.token.tolist()[-size:] == traced[-1]["mem_after"]


@parametrized("name", sorted(path.name for path in (ROOT / "eval").glob("outputs_*.npz")))
def test_what_the_model_says_of_every_window(name: str) -> None:
    """f, g and the head's logsumexp at all positions of a set of windows, context and padding included."""
    found, (model, windows) = arrays(f"eval/{name}"), name.removeprefix("outputs_").removesuffix(".npz").split("_", 1)
    net, outputs = network(model), []
    for window in index("eval/windows.json")[windows]:
        with torch.no_grad():
            encoding, _ = net.backbone(torch.tensor([window["src"]]), None, None)
            mass = net.head.evidence(encoding.f[0], torch.tensor(window["src"]))
        outputs.append((encoding.f[0], encoding.g[0], mass.total))
    ours = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    assert [len(part[0]) for part in outputs] == found["window_lengths"].tolist()
    names = [key for key in found if key != "window_lengths"]
    for key in names:
        shaped = [part for part in ours if part.shape == found[key].shape]
        assert min((part - torch.as_tensor(found[key])).abs().max() for part in shaped) < 2e-4, key


SETS = sorted(
    {(case["windows"], case["split"], case["break_mode"], case["block"], case["context_window"]) for case in CASES.values()}
)


@parametrized("case", SETS)
def test_windows(case: tuple[str, str, str, int, int]) -> None:
    """Our cut of the stream: the same windows, in the same order, every token scored once."""
    name, split, mode, block, context = case
    published = windows_of(name)
    text, ends = stream(name.split("_")[0], split)
    windows = cut(text.offsets, block, context) if mode == "none" else cut_lines(text, text.offsets, ends.eos, block, context)
    if not context:
        windows = windows.take(np.argsort(windows.length, kind="stable"))
    assert windows.scored() == len(text.tokens) == sum(int(batch.scored.sum()) for batch in published)
    for number, theirs in enumerate(published):
        ours = collate(text, windows, [number], ends)
        for part in ("tokens", "targets", "scored", "length", "start"):
            assert torch.equal(getattr(ours, part), getattr(theirs, part)), part


def stream(corpus: str, split: str) -> tuple[Split, Ends]:
    """A split of the published data, read by our own tokenizer and dictionary."""
    vocabulary = Vocabulary.of_dictionary(ROOT / "data" / corpus / "dict.txt")
    with open(ROOT / "data" / corpus / "text" / f"{split}.txt", "rb") as file:
        symbols = [symbol for line in Whitespace().tokens(file) for symbol in line]
    ids = np.array([vocabulary.index[symbol] for symbol in symbols])
    return Split(ids, np.array([0, len(ids)])), vocabulary.ends
