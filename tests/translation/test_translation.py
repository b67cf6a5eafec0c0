"""Translation: reading text, beam search, and that memory at every search step is the memory of evaluation."""

from __future__ import annotations

import csv
import html
import itertools
import json
import math
import random
import shutil
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.conftest import Tiny
from tests.helpers.results import group_of, made
from tests.helpers.runs import SharedRun
from trime.common.io import partial_of, read_json_lines
from trime.common.types import Contexts
from trime.data.batching.published import Budget, Published, fill_batches
from trime.data.segments import cut
from trime.errors import UserError
from trime.lab.engines import Job
from trime.lab.manifest import MANIFEST
from trime.lab.runner import run
from trime.models.network import Network
from trime.report.bootstrap import bleu_difference, corpus_bleu
from trime.report.tables import EDGE
from trime.stages.graph import open_job
from trime.stages.samples import samples_of
from trime.token_memory.search.datastore import KNNMemory
from trime.translation.beam import Translator
from trime.translation.graph import TranslationGraph
from trime.translation.pairs.base import Pair
from trime.translation.pairs.folder import ParallelFolder
from trime.translation.pairs.iwslt14 import IWSLT14, TESTS
from trime.translation.pairs.phrases import Phrases
from trime.translation.pieces import JointBPE, PresegmentedText
from trime.translation.translate import Translate, bleu_statistics

pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")

OTHERS = "mt_vanilla", "knn_mt", "trime_mt model.gate=true", "trime_mt mixture=adaptive mixture.model.history=[]"


@pytest.fixture(params=["trime_mt", *(pytest.param(words, marks=pytest.mark.slow) for words in OTHERS)])
def translated(request: pytest.FixtureRequest, translation: SharedRun, tiny: Tiny) -> TranslationGraph:
    """Return the graph of a finished run."""
    if request.param != "trime_mt":
        run(config := tiny(*f"experiment={request.param}".split(), "report.samples.passages=2"))
        return TranslationGraph(config)
    graph = translation.graph
    assert isinstance(graph, TranslationGraph)
    return graph


def test_an_experiment_translates(translated: TranslationGraph) -> None:
    """BLEU of every row, with its signature; K is among those that were tried on valid."""
    config, results = translated.config, json.loads((translated.run_folder / "results.json").read_text())
    (*_, valid_row), (*_, test_row) = results["metrics"]["valid"], results["metrics"]["test"]
    assert 0 <= test_row["bleu"] <= 100 and test_row["signature"].startswith("nrefs:1|case:mixed")
    assert test_row["sentences"] == config.translation.sentences
    if "external" in test_row["memories"]:
        assert {int(k) for k in valid_row["bleu_by_k"]} == {*config.translation.k}
        assert test_row["k"] == valid_row["tuned"]["k"] and valid_row["bleu"] == max(valid_row["bleu_by_k"].values())
        assert results["datastore"]["entries"] == results["dataset"]["tokens"]["train"]
    assert "perplexity" in test_row and len(test_row["documents"]) == 400


def test_probabilities_of_the_search_are_those_of_evaluation(translated: TranslationGraph) -> None:
    network, _ = translated.model_settings.open(translated.model.path())
    for number in range(len(translated.tune.rows())):
        documents = translated.evaluate.rows()[number]["documents"]
        check_search(translated, network, translated.evaluate.translations.translator(number), documents)


def test_pages_show_the_memory_in_translations(translated: TranslationGraph) -> None:
    """Pieces shown are the translation that was scored; parts sum up; entries come from training pairs."""
    passages = samples_of(translated)
    if translated.config.name == "mt_vanilla":  # it has no memory to show
        assert passages is None
        return
    samples = passages.summary()
    written = translated.evaluate.translations.examples(2)
    assert len(samples) == 2
    for sample, (source, _, *translations) in zip(samples, written, strict=True):
        assert sample["before"] == f"{source} → "
        assert "".join(token["shown"] for token in sample["tokens"]).strip() == translations[-1].strip()
        for token in sample["tokens"]:
            assert token["probability"] == pytest.approx(sum(token["parts"].values()))
            assert sum(entry["share"] for entry in token["entries"]) <= token["parts"].get("external", 0) + 1e-6
            assert all(entry["place"].startswith("train, sentence ") for entry in token["entries"])
    assert "Samples with their memories" in (translated.run_folder / "page.html").read_text()


def check_search(graph: TranslationGraph, network: Network, translator: Translator, scored: list[list[float]]) -> None:
    """Fail unless the search's log-probabilities of references are what evaluation scored."""
    corpus = graph.corpus.corpus()
    text, source, special_ids = corpus.split("test"), corpus.sources.split("test"), corpus.vocabulary.special_ids
    for number in range(4):
        target = text.tokens[text.offsets[number] : text.offsets[number + 1]].astype(np.int64)
        read = source.tokens[source.offsets[number] : source.offsets[number + 1]].astype(np.int64)
        with torch.no_grad():
            encoding = network.backbone(torch.tensor(read)[None], torch.tensor([special_ids.eos, *target[:-1]])[None])
            sentence = torch.full((len(target),), number)
            log_probability = translator.log_probability(encoding.f[0], encoding.g[0], sentence).double()
        assert torch.allclose(log_probability.exp().sum(1), torch.ones(len(target), dtype=torch.float64), atol=1e-6)
        loss = -log_probability[torch.arange(len(target)), torch.tensor(target)].sum()
        assert float(loss) == pytest.approx(scored[number][0], rel=1e-4) and scored[number][1] == len(target)


def test_the_search_on_test_has_the_chosen_k(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a datastore of the very split shows a sentence none of its own entries."""
    own = "datastore.split=test", "translation.k=[2,9]", f"paths.outputs={tmp_path}"
    config = tiny("experiment=knn_mt", "mixture=none", *own)
    queries: list[tuple[int, bool]] = []
    entries = KNNMemory.entries

    def record_query(nearest: KNNMemory, query: Contexts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        similarity, token, index = entries(nearest, query)
        own_entries = nearest.store.document[index] == query.positions.document[:, None]
        queries.append((nearest.k, bool((own_entries & ~similarity.isinf()).any())))
        return similarity, token, index

    run(config)
    graph = TranslationGraph(config)
    best = graph.tune.tuned()["rows"][-1]["tuned"]["k"]
    shutil.rmtree(graph.evaluate.translations.path())
    monkeypatch.setattr(KNNMemory, "entries", record_query)
    graph.evaluate.translations.make()
    assert {k for k, _ in queries} == {best} and not any(own_entries for _, own_entries in queries)


@pytest.mark.slow
def test_translations_are_compared_by_bleu(tiny: Tiny, tmp_path: Path) -> None:
    configs = [tiny(f"experiment={name}") for name in ("mt_vanilla", "knn_mt")]
    for config in configs:
        run(config)
    folders = ",".join(str(TranslationGraph(config).run_folder) for config in configs)
    run(tiny("experiment=mt_vanilla", "stages=[report]", f"report.runs=[{folders}]", f"paths.outputs={tmp_path}"))
    folder = tmp_path / "reports" / "latest"
    with open(folder / "table.csv", newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    bleu = [float(row["test BLEU"]) for row in rows.values()]
    assert rows.keys() == {"mt_vanilla", "knn_mt", "knn_mt, adaptive"} and min(bleu) >= 0 and max(bleu) <= 100
    assert bleu == sorted(bleu, reverse=True), "the best first"
    difference, low, high = (rows["knn_mt"][f"BLEU vs mt_vanilla{end}"] for end in ("", ", low", ", high"))
    assert rows["mt_vanilla"]["paper IWSLT'14*"] == "32.58"
    order = [[cell.strip() for cell in line.split("|")] for line in (folder / "order.md").read_text().splitlines()]
    names = [[cell.removesuffix(f" {EDGE}") for cell in cells] for cells in order]
    (line,) = [cells for cells in names if cells[1:5] == ["paper IWSLT'14", "knn_mt", "mt_vanilla", "+0.57"]]
    assert line[5] == f"{difference} [{low}, {high}]", "the order is that of BLEU"


SMOOTHED = "a b c x d e f/a b c d e f, a b x c d/a b c d e, a x b x c/a b c d e, a b c/a b c d, x y z w/a b c d"


@pytest.mark.parametrize("text, reference", [pair.split("/") for pair in SMOOTHED.split(", ")])
def test_orders_without_a_match_are_smoothed_as_sacrebleu_has_it(text: str, reference: str) -> None:
    """No four words in a row match, nor three, nor two; no four words at all; no word."""
    from sacrebleu.metrics.bleu import BLEU

    expected = BLEU().corpus_score([text], [[reference]]).score
    assert float(corpus_bleu(np.array(bleu_statistics([text], [reference])).sum(0))) == pytest.approx(expected, abs=1e-9)


def test_the_difference_of_bleu_is_sacrebleu_s_paired_bootstrap() -> None:
    """BLEU, and the spread of draws, of two systems of which one errs more often."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.significance import PairedTest

    draw, words = random.Random(0), ["a", "b", "c", "d", "e", "f", "g", "h"]
    references = [" ".join(draw.choices(words, k=draw.randint(6, 14))) for _ in range(200)]
    systems, groups = [], []
    for number, rate in enumerate((0.1, 0.14)):
        texts = [" ".join(w if draw.random() > rate else "x" for w in reference.split()) for reference in references]
        systems.append(texts)
        content, statistics = made(str(number), 0, [1.0] * 200), bleu_statistics(texts, references)
        content["metrics"]["test"] = [content["metrics"]["test"][0] | {"bleu_statistics": statistics}]
        groups.append(group_of([content]))
        bleu = corpus_bleu(np.array(statistics).sum(0))
        assert float(bleu) == pytest.approx(BLEU().corpus_score(texts, [references]).score, abs=1e-9)
    ours = bleu_difference(*groups)
    assert ours is not None
    named = [(str(number), texts) for number, texts in enumerate(systems)]
    _, results = PairedTest(named, {"BLEU": BLEU()}, [references], test_type="bs", n_samples=2000)()
    theirs = results["BLEU"]
    assert ours.value == pytest.approx(theirs[0].score - theirs[1].score, abs=1e-9)
    assert ours.significant == (theirs[1].p_value < 0.05)
    same = bleu_difference(groups[0], groups[0])
    assert same is not None and same[:3] == (0, 0, 0)


@pytest.mark.slow  # as the trainings of test_training.py, on pairs
def test_several_devices_follow_translations(tiny: Tiny, tmp_path: Path) -> None:
    overrides = ["trainer.devices=2", "trainer.accelerator=cpu", f"paths.outputs={tmp_path}", "stages=[prepare,pack,fit]"]
    config = tiny("experiment=trime_mt", *overrides)
    run(config)
    assert json.loads((TranslationGraph(config).fit.path() / "train.json").read_text())["devices"] == 2


def test_a_killed_translation_goes_on(translation: SharedRun, tmp_path: Path) -> None:
    """With the batches that it has finished."""
    config = translation.copy(tmp_path / "outputs").config
    translate = TranslationGraph(config).evaluate.translations
    texts = [read_json_lines(translate.path() / f"row-{n}.jsonl") for n in range(2)]
    unfinished = partial_of(translate.folder)
    translate.folder.rename(unfinished)
    for name in ("bleu.json", MANIFEST):
        (unfinished / name).unlink()
    work = translate.work(unfinished)
    (size, *_) = work.sizes
    kept = next(file for (row, _, _), file in zip(translate.batches(), work.files, strict=True) if row == 1)
    kept.write_text(json.dumps({"texts": ["kept"] * size, "seconds": 1.0, "peak_memory_mb": 1.0}))
    run(config)
    again = [read_json_lines(translate.path() / f"row-{n}.jsonl") for n in range(2)]
    assert again == [texts[0], ["kept"] * size + texts[1][size:]] and len(work.sizes) > 2 * len(again)
    assert not [*translate.path().glob("part-*")]


def test_another_process_makes_the_same_translations(translation: SharedRun, tmp_path: Path) -> None:
    """Of valid and of test, from the configuration alone."""
    graph = translation.graph
    config = graph.config
    found = [node for stage in ("tune", "evaluate") for node in graph.artefacts_of(stage) if isinstance(node, Translate)]
    for translate in found:
        job = Job(partial(open_job, TranslationGraph), OmegaConf.to_yaml(config), translate.stage, translate.name, tmp_path)
        work, make, texts = translate.work(tmp_path), job.open(job), dict[int, list[str]]()
        for number, ((row, _, _), file) in enumerate(zip(translate.batches(), work.files, strict=True)):
            make(number, lambda amount: None)
            texts[row] = texts.get(row, []) + json.loads(file.read_text())["texts"]
            file.unlink()
        assert all(own == read_json_lines(translate.path() / f"row-{row}.jsonl") for row, own in texts.items())
    assert len(found) > 2


@pytest.mark.slow
def test_several_processes_translate_as_one(tiny: Tiny, tmp_path: Path) -> None:
    """The texts of every row and K, of valid and of test."""
    written = []
    for engine in ("local", "ray"):
        run(tiny("experiment=knn_mt", f"engine={engine}", f"paths.outputs={tmp_path}"))
        folders = sorted(tmp_path.glob("artefacts/translate-*"))
        written.append({file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("row-*.jsonl")})
        for folder in folders:
            shutil.rmtree(folder)
    assert written[0] == written[1] and len(written[0]) > 3


def test_batches_hold_their_budget() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 30, 200)
    segments = cut(np.concatenate([[0], lengths.cumsum()]), 40)
    near = draw.integers(0, 200, (200, 5)).astype(np.int32)
    for batching in (Budget(100, None, 0), Budget(100, 5, 0), Budget(100, None, 0, size=3)):
        plans = [batching.plan(segments, epoch, near) for epoch in (0, 0, 1)]
        assert plans[0] == plans[1] != plans[2]
        for plan in plans:
            assert sorted(itertools.chain(*plan)) == list(range(200))
            assert all(len(rows) * max(lengths[rows]) <= 100 and len(rows) <= batching.size for rows in plan)
    spread = [np.ptp(lengths[rows]) for rows in Budget(100, None, 0).plan(segments, 0, None)]
    assert np.mean(spread) < 2, "of like length"
    chained = sum(b in near[a] for rows in Budget(100, 5, 0).plan(segments, 0, near) for a, b in itertools.pairwise(rows))
    assert chained > 60, "neighbours side by side"
    held = [lengths[rows].sum() for rows in Budget(100, 5, 0, padding=False).plan(segments, 0, near)]
    assert sum(held) == lengths.sum() and np.median(held) > 70 and max(held) <= 100, "padding does not count"
    assert [len(rows) for rows in Budget(5, None, 0).plan(segments.take([0, 1]), 0, None)] == [1, 1]


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_batches_of_several_devices_are_fairseq_s(multiple: int) -> None:
    """Filled as the published order fills them; those of a chain stay together, those of like length are drawn apart."""
    lengths = np.random.default_rng(0).integers(1, 30, 400)
    order, tokens = np.random.default_rng(1).permutation(400).tolist(), 10 * int(lengths.max())
    expected = Published(10, "kept", 0, multiple=multiple).batches(order, lengths)
    assert fill_batches(order, lengths, tokens, 400, multiple=multiple) == expected
    segments, near = cut(np.concatenate([[0], lengths.cumsum()]), 40), np.arange(1, 401)[:, None] % 400
    for k in (None, 1):
        alone = Budget(tokens, k, 0, multiple=multiple).plan(segments, 0, near)
        together = Budget(tokens, k, 0, processes=4, multiple=multiple).plan(segments, 0, near)
        assert sorted(itertools.chain(*together)) == list(range(400)) and len(together) == -(-len(alone) // 4)
        single = {tuple(batch) for batch in alone}
        merged = [[part for part in single if {*part} <= {*batch}] for batch in together]
        assert all(sum(map(len, parts)) == len(batch) for parts, batch in zip(merged, together, strict=True))
    chained = sum(b == (a + 1) % 400 for batch in together for a, b in itertools.pairwise(batch))
    assert chained == 400 - len(together), "four batches of a chain follow one another"


def test_each_language_may_have_its_own_dictionary(tiny: Tiny, tmp_path: Path) -> None:
    """As fairseq-preprocess makes them without --joined-dictionary: each from its own side of the training text."""
    overrides = ["translation.joined_dictionary=false", f"paths.data={tmp_path}/data", f"paths.outputs={tmp_path}/outputs"]
    config = tiny("experiment=trime_mt", "dataset.count=200", "stages=[prepare,pack,fit]", *overrides)
    run(config)
    graph = TranslationGraph(config)
    corpus = graph.corpus.corpus()
    source, target = corpus.sources.vocabulary, corpus.vocabulary
    for vocabulary, text in ((source, corpus.sources), (target, corpus)):
        words = [symbol for symbol, count in zip(vocabulary.symbols, vocabulary.counts, strict=True) if count]
        assert {vocabulary.index[word] for word in words} == {*text.split("train").tokens.tolist()}
        assert len(vocabulary) % 8 == 0 and vocabulary.special_ids.pad == 1
    assert {*source.symbols} != {*target.symbols}
    network, described = graph.model_settings.open(graph.model.path())
    assert described["vocabulary"] == len(target) and network.head.weight.shape[0] == len(target)
    assert network.backbone.source_embedding.vocabulary == len(source)
    assert network.head.weight is network.backbone.embedding.table.weight
    joined = TranslationGraph(tiny("experiment=trime_mt", "dataset.count=200", *overrides[1:]))
    assert joined.corpus.fingerprint != graph.corpus.fingerprint and joined.fit.fingerprint != graph.fit.fingerprint


def test_moses_tokens_become_text(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """References and translations are detokenized before BLEU is counted (fairseq's --tokenizer moses --remove-bpe)."""
    pytest.importorskip("sacremoses", reason="sacremoses is not installed")
    pieces = "it &apos;s a well @-@ kn@@ own fact , isn &apos;t it ? &quot; yes &quot;"
    text = "it's a well-known fact, isn't it? \"yes\""
    assert PresegmentedText("en").text([*pieces.split(), "<eos>"]) == text
    for split in ("train", "test"):
        (tmp_path / f"{split}.de").write_text("es ist be@@ kannt .\n" * 3)
        (tmp_path / f"{split}.en").write_text(f"{pieces}\n" * 3)
    overrides = ["dataset=parallel", f"dataset.path={tmp_path}", f"paths.data={tmp_path}/data", "stages=[prepare]"]
    config = tiny("experiment=mt_vanilla", *overrides, "dataset.cut=true", "dataset.detokenize=true")
    run(config)
    corpus = TranslationGraph(config).corpus.corpus()
    assert corpus.references("test") == [text] * 3 and corpus.tokenizer.text(pieces.split()) == text
    with pytest.raises(UserError, match=r"dataset\.cut=true"):
        run(tiny("experiment=mt_vanilla", *overrides, "dataset.detokenize=true"))
    monkeypatch.setattr("trime.translation.pieces.find_spec", lambda name: None)
    with pytest.raises(UserError, match="sacremoses"):
        PresegmentedText("en")


def test_pieces_are_shared_and_give_the_sentence_back(tmp_path: Path) -> None:
    text = Phrases(300)
    joint = JointBPE.train(chain.from_iterable(text.pairs("train")), 200)
    joint.save(tmp_path / "pieces.json")
    again = JointBPE.load(tmp_path / "pieces.json")
    for pair in text.pairs("test"):
        for side in pair:
            (symbols,) = again.tokens([side.encode()])
            assert again.text(symbols) == side and symbols[-1] == "<eos>"
    (symbols,) = again.tokens(["Der Zug fährt 北京".encode()])
    assert symbols.count("<unk>") >= 2, "what was never seen is not lost"
    (pieces,) = PresegmentedText().tokens([b"ein klei@@ ner hu@@ nd ."])
    assert PresegmentedText().text(pieces) == "ein kleiner hund ."


@pytest.fixture
def parallel(tmp_path: Path) -> Path:
    """Files of the form of multi30k and of IWSLT's prepared ones."""
    folder, draw = tmp_path / "parallel", random.Random(0)
    folder.mkdir()
    for split, count in (("train", 40), ("val", 8), ("test", 8)):
        pairs = [*Phrases(40, seed=draw.randrange(9)).pairs("train")][:count]
        (folder / f"{split}.de").write_text("\n".join(pair.source for pair in pairs) + "\n")
        (folder / f"{split}.en").write_text("\n".join(pair.target for pair in pairs) + "\n")
    return folder


@pytest.mark.slow
def test_own_text_is_translated(parallel: Path, tiny: Tiny, tmp_path: Path) -> None:
    """Its page shows sentences of test with every row's translation."""
    overrides = ["dataset=parallel", f"dataset.path={parallel}", f"paths.outputs={tmp_path}", "dataset.cut=true"]
    config = tiny("experiment=trime_mt", *overrides, "report.samples.passages=3")
    run(config)
    (results,) = tmp_path.glob("runs/trime_mt/*/results.json")
    rows = json.loads(results.read_text())["metrics"]["test"]
    assert rows[-1]["sentences"] == 6
    translations = TranslationGraph(config).evaluate.translations
    page, examples = (results.parent / "page.html").read_text(), translations.examples(3)
    sources, references = ((parallel / f"test.{language}").read_text().splitlines() for language in ("de", "en"))
    places = [references.index(reference) for _, reference, *_ in examples]
    assert len(places) == 3 and places == sorted(set(places))
    for place, (source, reference, *texts) in zip(places, examples, strict=True):
        words = zip(source.split(), sources[place].split(), strict=True)
        assert len(texts) == len(rows) and all(word in (known, "<unk>") for word, known in words)
        assert all(html.escape(text) in page for text in (source, reference, *texts))


def test_long_and_lopsided_pairs_are_left_out() -> None:
    text = ParallelFolder(None, "de", "en", max_words=4, ratio=1.5)
    pairs = Pair("a b c d", "a b c"), Pair("a b c d e", "a b c d"), Pair("a b", "a b c d")
    assert [text.fits(pair) for pair in pairs] == [True, False, False]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Files of the form of the IWSLT'14 archive."""
    folder, pairs = tmp_path / "de-en", [*Phrases(100).pairs("train")]
    folder.mkdir()
    for side, language in enumerate(("de", "en")):
        about = f"<url>http://x</url>\n<talkid>1</talkid>\n<keywords>a b</keywords>\n<title>The {language} title</title>\n"
        description = "<description>TED Talk Subtitles</description>\n" + "".join(f" {pair[side]}\n" for pair in pairs)
        (folder / f"train.tags.de-en.{language}").write_text(about + description + "\n")
        for number, name in enumerate(TESTS):
            inside = "".join(f'<seg id="{n}"> {pair[side]} </seg>\n' for n, pair in enumerate(pairs[: number + 1], 1))
            (folder / f"IWSLT14.{name}.de-en.{language}.xml").write_text(f'<mteval>\n<doc docid="1">\n{inside}</doc>\n')
    return folder


def test_iwslt14_is_read_as_published(talks: Path) -> None:
    """Titles and descriptions count, every 23rd pair validates, the five test sets are one; text is lower-cased."""
    text = IWSLT14("nowhere", str(talks))
    pairs_of = {split: [*text.pairs(split)] for split in ("train", "valid", "test")}
    assert {split: len(pairs) for split, pairs in pairs_of.items()} == {"train": 98, "valid": 4, "test": 15}
    assert pairs_of["train"][0] == Pair("the de title", "the en title") and pairs_of["train"][1].source == "ted talk subtitles"
    assert pairs_of["valid"][0] == Pair(*(side.lower() for side in [*Phrases(100).pairs("train")][20]))
    assert next(IWSLT14("nowhere", str(talks), lower=False).pairs("test")) == next(Phrases(100).pairs("train"))
    (talks / "IWSLT14.TED.tst2011.de-en.en.xml").unlink()
    with pytest.raises(UserError, match="tst2011"):
        [*text.pairs("test")]


@pytest.mark.slow
def test_phrases_are_learned(tiny: Tiny, tmp_path: Path) -> None:
    """A grammar is translated all but perfectly after two minutes, with the datastore and without."""
    sizes = ["translation.width=64", "translation.layers=2", "translation.inner=128", "translation.dropout=0.0"]
    text = ["batching.size=null", "batching.tokens=1024", "translation.k=[1,4]"]
    text += ["translation.sentences=100", "translation.batch_size=50"]
    learning = ["train.updates=250", "schedule.warmup=50", "schedule.peak=0.003", f"paths.outputs={tmp_path}"]
    run(tiny("experiment=knn_mt", *sizes, *text, *learning))
    (results,) = tmp_path.glob("runs/knn_mt/*/results.json")
    plain, mixed, *_ = json.loads(results.read_text())["metrics"]["test"]
    assert plain["bleu"] > 95 and mixed["bleu"] > 95 and mixed["loss"] < plain["loss"]


def test_a_joint_dictionary_is_the_same_for_both_languages(tiny: Tiny) -> None:
    """With the counts of both, line ends included."""
    prepared = TranslationGraph(tiny("experiment=mt_vanilla", "translation.joined_dictionary=true")).corpus
    prepared.make()
    corpus = prepared.corpus()
    both, splits = corpus.vocabulary, corpus.statistics["splits"]
    assert corpus.sources.vocabulary.symbols == both.symbols and corpus.sources.vocabulary.counts == both.counts
    assert both.counts[both.symbols.index("</s>")] == 2 * splits["train"]["documents"]


def test_smoothing_is_the_share_that_goes_to_all(tiny: Tiny) -> None:
    """(1 - s) times the plain loss, and s times the mean of -log P over all pieces."""
    config = tiny("experiment=mt_vanilla", "stages=[prepare,fit]")
    run(config)
    graph = TranslationGraph(config)
    network, _ = graph.model_settings.open(graph.model.path())
    data, task = graph.fit.task.data(graph.corpus.corpus(), None, False), graph.fit.task.module(network)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    with torch.no_grad():
        task.train().network.eval()
        smoothed, _ = task.losses(batch, None, True)
        plain, _ = task.eval().losses(batch, None, True)
        f = network.backbone(batch.source, batch.tokens).f[batch.scored]
        uniform = -(f @ network.head.weight.T).log_softmax(1).mean(1)
    assert math.isclose(config.translation.smoothing, 0.1) and torch.allclose(smoothed, 0.9 * plain + 0.1 * uniform, atol=1e-5)


def test_the_best_weights_by_bleu(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """translation.best_by=bleu: at every validation valid is translated, and the highest BLEU decides."""
    made = iter([12.0, 31.5, 20.0])
    scores = "trime.translation.training.score_translations"
    monkeypatch.setattr(scores, lambda texts, references: {"bleu": next(made)})
    best = "train.keep=best", "translation.best_by=bleu", f"paths.outputs={tmp_path}"
    updates = "train.validate_every=2", "train.updates=6", "translation.updates=6"
    graph = TranslationGraph(tiny("experiment=mt_vanilla", *best, *updates))
    for stage in ("prepare", "pack", "fit"):
        for artefact in graph.artefacts_of(stage):
            artefact.make()
    assert json.loads((graph.model.path() / "train.json").read_text())["kept_update"] == 4 and not [*made]
