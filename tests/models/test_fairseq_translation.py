"""Released translation checkpoints are read, encoded and translated as by fairseq, whose conventions are written out here."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tests.conftest import composed
from tests.helpers.fairseq_translation import (
    EOS,
    PAD,
    Reference,
    Released,
    Sizes,
    arguments,
    padded_left,
    random_weights,
    write_checkpoint,
)
from trime.errors import UserError
from trime.lab.runner import run
from trime.models.fairseq import network_from_checkpoint, read_checkpoint, translation_network_from_checkpoint
from trime.models.network import build_network
from trime.stages.translation.graph import TranslationGraph

pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
Tiny = Callable[..., DictConfig]
FORMS = [(False, True), (False, False), (True, True)]  # norm first in encoder and decoder: the published form, then others
SIZES = Sizes(source=21, target=17)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_forward(form: tuple[bool, bool], tmp_path: Path) -> None:
    """Sources of several lengths, padded on the left there and on the right here; all at once and token by token."""
    network, _ = translation_network_from_checkpoint(
        read_checkpoint(write_checkpoint(tmp_path / "checkpoint_best.pt", SIZES, form))
    )
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
        assert (step.f[:, 0] - f[:, position]).abs().max() < 2e-5


@pytest.mark.parametrize("form", FORMS)
def test_every_weight_is_read(form: tuple[bool, bool], tmp_path: Path) -> None:
    network, description = translation_network_from_checkpoint(
        read_checkpoint(write_checkpoint(tmp_path / "file.pt", SIZES, form))
    )
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


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"arch": "transformer_lm_wiki103", "encoder_layers": 3}, "encoder_layers and decoder_layers differ"),
        ({"arch": "lstm"}, "architecture lstm"),
        ({"encoder_learned_pos": True}, "encoder_learned_pos"),
        ({"activation_fn": "gelu"}, "activation_fn"),
        ({"share_all_embeddings": True}, "share_all_embeddings"),
        ({"adaptive_softmax_cutoff": "100,200"}, "adaptive_softmax_cutoff"),
        ({"decoder_normalize_before": False}, "norm"),
        ({"encoder_normalize_before": True}, "lacks encoder.layer_norm"),
        ({"decoder_attention_heads": 2}, "encoder_attention_heads and decoder_attention_heads differ"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path / "file.pt", SIZES, FORMS[0], **changed)
    with pytest.raises(UserError, match=message):
        translation_network_from_checkpoint(read_checkpoint(file))


def test_weights_that_are_missing_or_too_many(tmp_path: Path) -> None:
    file, weights = tmp_path / "file.pt", random_weights(SIZES, FORMS[0])
    name, table = "decoder.layers.1.encoder_attn.k_proj.weight", "encoder.embed_tokens.weight"
    cases = {
        "lacks layers.1.encoder_attn.k_proj.weight": {key: weight for key, weight in weights.items() if key != name},
        "no place": weights | {"encoder.gate": torch.zeros(2)},
        "output_projection.weight has no place": weights | {"decoder.output_projection.weight": torch.zeros(17, 16)},
        "shape": weights | {name: torch.zeros(2, 2)},
        f"lacks '{table}'": {key: weight for key, weight in weights.items() if key != table},
    }
    for message, changed in cases.items():
        torch.save({"args": arguments(SIZES, FORMS[0]), "model": changed}, file)
        with pytest.raises(UserError, match=message):
            translation_network_from_checkpoint(read_checkpoint(file))
    torch.save({"args": arguments(SIZES, FORMS[0]), "model": weights}, file)
    with pytest.raises(UserError, match="transformer_iwslt_de_en is not supported"):
        network_from_checkpoint(read_checkpoint(file))


@pytest.fixture(params=FORMS[:2])
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


@pytest.mark.parametrize("name", ["mt_vanilla", "knn_mt", "trime_mt"])
@torch.no_grad()
def test_translations_are_the_published_decoder_s(name: str, released: Released, tiny: Tiny, tmp_path: Path) -> None:
    """The whole command with a beam of one, against greedy search by the model written out, with its memory."""
    settings = [
        "translation.beam=1",
        "translation.sentences=null",
        "translation.min_length=1",
        "translation.max_length=[1.2,10]",
    ]
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
    assert results["parameters"] == parameters_of(released)


def parameters_of(released: Released) -> int:
    network, _ = translation_network_from_checkpoint(read_checkpoint(released.checkpoint))
    return network.parameter_count


@pytest.mark.slow
def test_an_imported_folder_is_a_checkpoint(released: Released, tiny: Tiny, tmp_path: Path) -> None:
    """It has both dictionaries; a trained model's folder has those of its text."""
    places = [f"paths.data={tmp_path}/data", f"paths.outputs={tmp_path}/outputs"]
    first = tiny("experiment=knn_mt", "dataset=parallel", *released.overrides, *places, "translation.key=f")
    loss = run(first).loss
    folder = TranslationGraph(first).model.folder
    given = [f"checkpoint={folder}", "dictionary=null", *released.overrides[2:]]
    assert run(tiny("experiment=knn_mt", "dataset=parallel", *given, *places, "translation.key=f")).loss == loss
    assert run(tiny("experiment=knn_mt", "dataset=parallel", *given, *places, "translation.key=g")).loss != loss, (
        "of other keys"
    )
    text = ["experiment=knn_mt", "dataset=parallel", *released.overrides[2:], *places, "translation.joined_dictionary=false"]
    trained = tiny(*text)
    loss = run(trained).loss
    folder = TranslationGraph(trained).fit.folder
    assert run(tiny(*text, f"checkpoint={folder}")).loss == loss
    (released.folder / "train.de").write_text((released.folder / "train.de").read_text().replace("d1 ", "new "))
    with pytest.raises(UserError, match="another source dictionary"):
        run(tiny(*text, f"checkpoint={folder}"))


@pytest.mark.parametrize(
    "changed, message",
    [
        (["dictionary=null"], "dict.de.txt,dict.en.txt"),
        (["dictionary=dict.en.txt"], "dict.de.txt,dict.en.txt"),
        (["dictionary=[nowhere.txt,nothing.txt]"], "not a fairseq dictionary"),
        (["dataset.cut=false"], "dataset.cut=true"),
        (["checkpoint=nowhere.pt"], "does not exist"),
    ],
)
def test_mistakes(changed: list[str], message: str, released: Released, tiny: Tiny, tmp_path: Path) -> None:
    places = [f"paths.data={tmp_path}/data", f"paths.outputs={tmp_path}/outputs"]
    with pytest.raises(UserError, match=message):
        run(tiny("experiment=mt_vanilla", "dataset=parallel", *released.overrides, *places, *changed))


def test_dictionaries_of_another_model(released: Released, tiny: Tiny, tmp_path: Path) -> None:
    """The source language's dictionary comes first: swapped, their sizes do not fit."""
    swapped = f"dictionary=[{released.folder}/dict.en.txt,{released.folder}/dict.de.txt]"
    with pytest.raises(UserError, match=r"dict\.en\.txt has .* symbols .* the checkpoint"):
        run(tiny("experiment=mt_vanilla", "dataset=parallel", *released.overrides, swapped, f"paths.outputs={tmp_path}"))
    two = released.overrides[1]
    with pytest.raises(UserError, match=r"dictionary=dict\.txt"):
        run(tiny("experiment=vanilla", f"checkpoint={released.checkpoint}", two, f"paths.outputs={tmp_path}"))
