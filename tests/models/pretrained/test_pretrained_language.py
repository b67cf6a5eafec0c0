"""A pretrained decoder as a language model: its own outputs, memories in its layers, continued training, and errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Tiny
from tests.helpers.decoders import FAMILIES, model_of
from tests.helpers.pretrained import TEXT, save_model
from trime.common.pretrained import load_pretrained
from trime.decoding.generation import Continuation, TextScorer, WindowLengths
from trime.errors import UserError
from trime.kv.eviction.fifo import FIFO
from trime.kv.rope import KINDS
from trime.lab.runner import run
from trime.layers.embeddings import AdaptiveInput
from trime.layers.heads import AdaptiveSoftmax
from trime.models.backbones.transformer import Transformer
from trime.models.network import Network, build_network, load_network, save_network
from trime.models.pretrained.language import PretrainedBackbone, PretrainedDecoder, PretrainedHead
from trime.models.pretrained.tokenizer import PieceTokenizer, encode_text
from trime.scoring.mixture_spec import MixtureSpec
from trime.stages.graph import Graph
from trime.stages.pretrained import model_fingerprint
from trime.token_memory.test.local import LocalMemory

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
PER_HEAD, LORA = "model.per_head=true", "model.lora={rank: 2, alpha: 4, dropout: 0.0}"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_model("Llama", tmp_path / "llama")


def network_of(
    folder: Path, size: int = 0, chunk: int = 7, lora: dict[str, Any] | None = None, per_head: bool = False
) -> Network:
    decoder = PretrainedDecoder(20, str(folder), lora=lora)
    backbone = PretrainedBackbone(decoder, {"size": size, "policy": FIFO()}, chunk=chunk, per_head=per_head)
    return Network(backbone, PretrainedHead(decoder)).eval()


@pytest.mark.parametrize("kind", FAMILIES)
def test_any_causal_model_is_one(kind: str, tmp_path: Path) -> None:
    """Log-probabilities of every family are the model's own: with its cap, its scale, and its bias."""
    more = {"Granite": {"logits_scaling": 4.0}, "Gemma2": {"final_logit_softcapping": 0.1}}
    model, tokens = model_of(kind, 30, **more.get(kind, {})), torch.randint(3, 20, (2, 30))
    model.save_pretrained(tmp_path)
    decoder = PretrainedDecoder(20, str(tmp_path))
    backbone = PretrainedBackbone(decoder, {"size": 0, "policy": FIFO()})
    network = Network(backbone, PretrainedHead(decoder)).eval()
    with torch.no_grad():
        f = network.backbone(tokens)[0].f.flatten(0, 1)
        expected = model(tokens).logits.log_softmax(-1).flatten(0, 1)
        torch.testing.assert_close(network.head.log_probs(f), expected)
        mass = network.vocabulary_mass(f, tokens.flatten())
        cache = network.backbone.new_cache()
        pieces = [network.backbone(piece, kept=cache)[0].f for piece in tokens.split([9, 1, 1, 19], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1).flatten(0, 1), f, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mass.target - mass.total, expected.gather(1, tokens.flatten()[:, None]).squeeze(1))
    if type(model).__name__ not in KINDS:
        with pytest.raises(UserError, match="is not supported: choose one of"):
            PretrainedBackbone(decoder, {"size": 8, "policy": FIFO()})


@pytest.mark.parametrize("kind", ["pretrained", "of the lab"])
def test_a_text_that_grows_is_read_once(kind: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model reads each token of a window once, and its probabilities are those of a text that is scored as a whole."""
    embedding = AdaptiveInput(20, 16, [8])
    own = Network(Transformer(embedding, layers=2, heads=2, inner=16, positions=16), AdaptiveSoftmax(embedding)).eval()
    network, tokens = network_of(llama) if kind == "pretrained" else own, torch.randint(3, 20, (23,)).tolist()
    row, lengths = MixtureSpec(joint=("local",), interpolations=()), WindowLengths(8, 6)
    text = Continuation(network, row, {"local": LocalMemory()}, lengths, start=1, vocabulary=20)
    read = []
    monkeypatch.setattr(network.backbone, "forward", counting(network.backbone.forward, read))
    found = []
    for token in tokens:
        found.append(text.next()[0].probability[token].log())
        text.read([token])
    assert sum(read) == 8 + 14 + 13, "three windows, the last two after 6 tokens"
    scorer = TextScorer(network, row, {"local": LocalMemory()}, lengths, start=1)
    expected = torch.cat([log_probability for log_probability, _ in scorer.score(tokens)])
    torch.testing.assert_close(torch.stack(found).float(), expected.float(), rtol=1e-4, atol=1e-5)


def counting(forward: Callable[..., Any], read: list[int]) -> Callable[..., Any]:
    """Return a function that also keeps how many tokens it was given."""

    def counted(tokens: torch.Tensor, *arguments: Any) -> Any:
        read.append(tokens.shape[1])
        return forward(tokens, *arguments)

    return counted


@pytest.mark.parametrize("kind", ["Llama", "GPTNeoX"])
def test_it_is_the_model_itself(kind: str, tmp_path: Path) -> None:
    """f is the input of its output layer, g that of its last feed-forward block."""
    folder = save_model(kind, tmp_path / "model")
    network, model, tokens = network_of(folder), load_pretrained(str(folder)), torch.randint(1, 15, (2, 30))
    with torch.no_grad():
        encoding, state = network.backbone(tokens)
        expected = model(tokens, output_hidden_states=True)
    assert state is None and not network.is_stateful and network.backbone.positions == 128
    torch.testing.assert_close(encoding.f, expected.hidden_states[-1])
    layer = model.base_model.layers[-1]
    ffn_inputs: list[torch.Tensor] = []
    layer.mlp.register_forward_pre_hook(lambda _, inputs: ffn_inputs.append(inputs[0]))
    with torch.no_grad():
        model(tokens)
    torch.testing.assert_close(encoding.g, ffn_inputs[0])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "GPTNeoX"])
def test_with_large_memories_windows_are_one_text(kind: str, per_head: bool, tmp_path: Path) -> None:
    """With M ≥ length, windows equal the whole text; a fresh row forgets; a restored state continues."""
    folder, tokens = save_model(kind, tmp_path / "model"), torch.randint(1, 15, (2, 60))
    plain, stateful = network_of(folder), network_of(folder, size=60, per_head=per_head)
    with torch.no_grad():
        expected, _ = plain.backbone(tokens)
        state, parts = None, []
        for part in tokens.split(20, 1):
            encoding, state = stateful.backbone(part, state, torch.tensor([False, False]))
            parts.append(encoding)
        again, _ = stateful.backbone(tokens[:, :20], state, torch.tensor([True, False]))
    assert stateful.is_stateful
    torch.testing.assert_close(torch.cat([part.f for part in parts], 1), expected.f, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([part.g for part in parts], 1), expected.g, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.f[0], expected.f[0, :20], rtol=0, atol=1e-5)
    assert not torch.allclose(again.f[1], expected.f[1, :20], atol=1e-3)


def test_low_rank_updates_are_all_that_is_trained_and_saved(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    lora = {"rank": 2, "alpha": 4}
    network, tokens = network_of(llama, lora=lora), torch.randint(1, 15, (2, 30))
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert trained and all("lora" in name for name in trained)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        changed, before = (one.backbone(tokens)[0].f for one in (network, network_of(llama)))
    assert not torch.allclose(changed, before, atol=1e-2)
    save_network(network, tmp_path / "part.safetensors")
    assert (tmp_path / "part.safetensors").stat().st_size < (llama / "model.safetensors").stat().st_size / 2
    package = "trime.models.pretrained.language"
    model = {
        "embedding": {"_target_": f"{package}.PretrainedDecoder", "name": str(llama), "lora": lora},
        "backbone": {"_target_": f"{package}.PretrainedBackbone", "memory": {"size": 0, "policy": None}},
        "head": {"_target_": f"{package}.PretrainedHead"},
    }
    again = load_network(model, 20, tmp_path / "part.safetensors").eval()
    with torch.no_grad():
        torch.testing.assert_close(again.backbone(tokens)[0].f, changed)
        network.backbone.decoder.save(tmp_path / "merged")  # type: ignore[operator,union-attr]
        merged = load_pretrained(str(tmp_path / "merged"))
        log_probs = again.head.log_probs(changed.flatten(0, 1)).view(2, 30, -1)  # type: ignore[operator]
        torch.testing.assert_close(merged(tokens).logits.log_softmax(-1), log_probs, rtol=0, atol=1e-4)
    count = sum(tensor.numel() for tensor in load_file(tmp_path / "part.safetensors").values())
    assert 0 < count < build_network(model, 20).parameter_count / 2


def test_pieces_are_those_of_the_tokenizer(llama: Path) -> None:
    """In lines of any length, joined or not; a piece's index is its id."""
    pieces = PieceTokenizer(str(llama), size=40)
    lines = [f"{text}\n".encode() for text in TEXT * 5]
    symbols = [piece for part in pieces.tokens(lines) for piece in part]
    assert [pieces.symbols.index(piece) for piece in symbols] == encode_text(pieces.tokenizer, b"".join(lines).decode())
    assert len(list(pieces.tokens(lines))) > 1 and pieces.start == "</s>" and pieces.unknown == "<unk>"


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment, more",
    [
        pytest.param("trime_ext", [], marks=pytest.mark.slow),
        ("knn_lm", ["train.updates=0"]),
        ("trime_long", [LORA]),
        ("vanilla", ["model.memory_size=[20,30]", "model.chunk=16", "eviction=lra_sum", "evaluate.context=0", PER_HEAD]),
    ],
)
def test_experiments_continue_a_decoder(experiment: str, more: list[str], llama: Path, tiny: Tiny, tmp_path: Path) -> None:
    if LORA in more:
        pytest.importorskip("peft", reason="peft is not installed")
    options = [f"experiment={experiment}", "model=pretrained", f"model.name={llama}", f"paths.outputs={tmp_path}", *more]
    config = tiny(*options)
    run(config)
    graph = Graph(config)
    (results,) = tmp_path.glob("runs/*/*/results.json")
    metrics = json.loads(results.read_text())["metrics"]
    assert all(1 < row["perplexity"] < 40 for row in metrics["test"]), "the vocabulary has 22 tokens"
    counts = graph.corpus.corpus().vocabulary.counts
    assert sum(counts) == graph.corpus.corpus().statistics["splits"]["train"]["tokens"]
    continued = graph.fit.path() / "transformers"
    assert continued.is_dir() == bool(config.train.updates)
    if continued.is_dir():
        again = "model=pretrained", f"model.name={continued}", "train.updates=0", f"paths.outputs={tmp_path}"
        run(tiny("experiment=knn_lm", *again))
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    model_fingerprint.cache_clear()
    with pytest.raises(UserError, match="other weights"):
        run(tiny(*options, f"checkpoint={graph.fit.path()}", "evaluate.block=16"))


@pytest.mark.slow
def test_models_without_updates_are_told_apart(llama: Path, tiny: Tiny, tmp_path: Path) -> None:
    """By their weights, whoever names them; settings without effect do not make another model."""
    torch.manual_seed(1)
    other = shutil.copytree(llama, tmp_path / "other")
    model = load_pretrained(str(llama))
    model.model.embed_tokens.weight.data.normal_()
    model.save_pretrained(other)
    fixed, outcomes = ["experiment=vanilla", "model=pretrained", "train.updates=0", f"paths.outputs={tmp_path}/outputs"], []
    for folder in (llama, other):
        options = [*fixed, f"model.name={folder}"]
        config = tiny(*options)
        run(config)
        graph = Graph(config)
        imported = Graph(tiny(*options, f"checkpoint={graph.fit.path()}"))
        assert Graph(tiny(*options, "seed=1", "segments.length=8")).fit.folder == graph.fit.folder
        evicting = Graph(tiny(*options, "eviction=lru"))
        assert evicting.test.fingerprint == graph.test.fingerprint, "without memories there is nothing to evict"
        outcomes += [graph.test.fingerprint, imported.test.fingerprint, graph.evaluate.rows()[0]["perplexity"]]
    assert len({*outcomes}) == 6, outcomes
