"""Released translation checkpoints are read, encoded and translated as by fairseq, whose conventions are written out here."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.conftest import Tiny, composed
from tests.helpers.fairseq_translation import (
    EOS,
    PAD,
    Reference,
    Released,
    Sizes,
    padded_left,
    random_weights,
    write_checkpoint,
)
from trime.errors import UserError
from trime.lab.runner import run
from trime.models.fairseq import read_checkpoint
from trime.models.network import build_network
from trime.translation.graph import TranslationGraph
from trime.translation.import_checkpoint import network_from_checkpoint

pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
FORMS = [(False, True), (False, False), (True, True)]  # norm first in encoder and decoder: the published form, then others
SIZES = Sizes(source=21, target=17)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_forward(form: tuple[bool, bool], tmp_path: Path) -> None:
    """Sources of several lengths, padded on the left there and on the right here; all at once and token by token."""
    network, _ = network_from_checkpoint(read_checkpoint(write_checkpoint(tmp_path / "checkpoint_best.pt", SIZES, form)))
    reference, draw = Reference(random_weights(SIZES, form), SIZES, form), random.Random(0)
    rows = [[draw.randrange(4, SIZES.source) for _ in range(length)] + [EOS] for length in (7, 3, 1)]
    previous = torch.tensor([[EOS, *(draw.randrange(4, SIZES.target) for _ in range(5))] for _ in rows])
    logits, f, g = reference.decode(padded_left(rows), previous)
    source = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, PAD)
    backbone = network.backbone
    for key, expected in (("f", f), ("g", g)):
        backbone.key = key  # type: ignore[assignment]
        encoding = backbone(source, previous)
        assert (encoding.f - f).abs().max() < 2e-5 and (encoding.g - expected).abs().max() < 2e-5
    log_probs = network.head.log_probs(encoding.f.flatten(0, 1))  # type: ignore[operator]
    assert (log_probs - logits.flatten(0, 1).log_softmax(-1)).abs().max() < 2e-5
    cache, encoded = None, backbone.encode_source(source)  # type: ignore[operator]
    for position in range(previous.shape[1]):
        step, cache = backbone.step(encoded, previous[:, position : position + 1], cache)  # type: ignore[operator]
        assert (step.f[:, 0] - f[:, position]).abs().max() < 2e-5 and (step.g[:, 0] - g[:, position]).abs().max() < 2e-5
    with pytest.raises(UserError, match="positions=1024"):
        backbone(torch.full((1, 1025), 5), previous[:1])


@pytest.mark.parametrize("form", FORMS)
def test_every_weight_is_read(form: tuple[bool, bool], tmp_path: Path) -> None:
    network, description = network_from_checkpoint(read_checkpoint(write_checkpoint(tmp_path / "file.pt", SIZES, form)))
    weights = random_weights(SIZES, form)
    markers = {"version", "_float_tensor"}
    names = [name for name in weights if name.split(".")[-1] not in markers and "output_projection" not in name]
    assert network.parameter_count == sum(weights[name].numel() for name in names)
    backbone = description["backbone"]
    assert (backbone["encoder_norm_first"], backbone["decoder_norm_first"]) == form
    assert backbone["source_vocabulary"] == SIZES.source and description["head"]["tied"]


def test_the_published_size() -> None:
    """39M (Table 9): 8,848 German and 6,632 English symbols, one table each, as fairseq counts transformer_iwslt_de_en."""
    for name in ("reproduce/table6/trime_mt", "reproduce/script/trime_mt", "reproduce/released/trime_mt"):
        model = composed(f"experiment={name}").model
        OmegaConf.update(model, "backbone.source_vocabulary", 8848, force_add=True)  # what fit and import add
        with torch.device("meta"):
            assert build_network(model, 6632).parameter_count == 39_470_080
            model.backbone.decoder_norm_first = False  # fairseq's default, without --decoder-normalize-before
            assert build_network(model, 6632).parameter_count == 39_469_056


@pytest.fixture(params=[FORMS[0], pytest.param(FORMS[1], marks=pytest.mark.slow)])
def released(request: pytest.FixtureRequest, tmp_path: Path) -> Released:
    (tmp_path / "released").mkdir()
    return Released(tmp_path / "released", request.param, seed=3)


def mixture_of(name: str, released: Released) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the probabilities of the next piece from logits and f, mixed as in the published decoder."""
    if name == "mt_vanilla":
        return lambda logits, _: logits.softmax(0)
    keys, values = released.datastore()

    def memory(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        best, index = scores.double().topk(k)
        return best, values[index]

    def spread(weights: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(released.sizes.target, dtype=torch.float64).index_add(0, tokens, weights)

    def knn(logits: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        best, tokens = memory(-(keys - f).square().sum(1), 32)
        return 0.8 * logits.softmax(0) + 0.2 * spread((best / 100).softmax(0), tokens)

    def trime(logits: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        best, tokens = memory(keys @ f, 16)
        scores = best / (15 * math.sqrt(len(f)))
        share = torch.exp(scores.logsumexp(0) - torch.logaddexp(scores.logsumexp(0), logits.logsumexp(0)))
        return (1 - share) * logits.softmax(0) + spread(scores.softmax(0), tokens)

    return {"knn_mt": knn, "trime_mt": trime}[name]


@pytest.mark.parametrize("name", [pytest.param("mt_vanilla", marks=pytest.mark.slow), "knn_mt", "trime_mt"])
@torch.no_grad()
def test_translations_are_the_published_decoder_s(name: str, released: Released, tiny: Tiny, tmp_path: Path) -> None:
    """The whole command with a beam of one, against greedy search by the model written out, with its memory."""
    settings = ["translation.beam=1", "translation.sentences=null"]
    settings += ["translation.min_length=1", "translation.max_length=[1.2,10]"]
    own = [*released.overrides, *settings, f"paths.data={tmp_path}/data", f"paths.outputs={tmp_path}/outputs"]
    asked = composed(f"experiment=reproduce/released/{name}")
    exact = ["index.factory=null", f"index.metric={asked.index.metric}"]
    config = tiny(f"experiment=reproduce/released/{name}", *own, *exact, "datastore.tokens=null")
    kept = [asked.translation.k, asked.tune.temperature, asked.tune.interpolation_temperature, asked.tune.interpolation_share]
    if name != "mt_vanilla":
        config.translation.k, config.tune.temperature = kept[:2]
        config.tune.interpolation_temperature, config.tune.interpolation_share = kept[2:]
    run(config)
    graph = TranslationGraph(config)
    row = 0 if name == "mt_vanilla" else 1
    found = [json.loads(line) for line in (graph.evaluate.translations.path() / f"row-{row}.jsonl").read_text().splitlines()]
    mixture = mixture_of(name, released)
    assert found == [released.greedy(source, mixture) for source in released.ids("test", "de")]
    results = json.loads((graph.run_folder / "results.json").read_text())
    assert results["imported"]["arch"] == "transformer_iwslt_de_en" and results["imported"]["updates"] == 7
    assert results["parameters"] == network_from_checkpoint(read_checkpoint(released.checkpoint))[0].parameter_count
