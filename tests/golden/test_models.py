"""Forward passes of models from checkpoints in the released format, with padding (model/), and the importer."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from tests.golden.checkpoints import checkpoint, models, network
from tests.golden.published import ROOT, arrays, assert_near, index, parametrized
from trime.errors import UserError
from trime.models.fairseq import network_from_checkpoint, read_checkpoint

CHECKPOINTS = {"forward": "checkpoint_init", "forward_last": "checkpoint_last"}  # file of outputs: its checkpoint
OUTPUTS = [(model, file) for model in models() for file in CHECKPOINTS if (ROOT / f"model/{model}/{file}.npz").is_file()]


@parametrized("model, file", OUTPUTS)
def test_forward(model: str, file: str) -> None:
    published, net = arrays(f"model/{model}/{file}.npz"), network(model, CHECKPOINTS[file])
    tokens, target = (torch.as_tensor(published[name]).long() for name in ("tokens", "target"))
    inner: list[torch.Tensor] = []
    for layer in net.backbone.layers:
        layer.register_forward_pre_hook(lambda _, inputs: inner.append(inputs[0]))
    with torch.no_grad():
        encoding, state = net.backbone(tokens, None, None)
        mass = net.head.mass(encoding.f.flatten(0, 1), target.flatten())
        log_probs = net.head.log_probs(encoding.f.flatten(0, 1))
        unscaled = net.backbone.embedding(tokens)
    assert state is None
    assert_near(encoding.f, published["features"])
    assert_near(encoding.g, published["last_ffn_input"])
    if "inner_states" in published:  # before each layer, and after the last
        assert len(inner) == len(published["inner_states"]) - 1
        for ours, theirs in zip(inner, published["inner_states"], strict=False):
            assert_near(ours, theirs)
    if "embed_tokens_unscaled" in published:
        assert_near(unscaled, published["embed_tokens_unscaled"])
        assert_near(inner[0] - unscaled * float(published["embed_scale"]), published["embed_positions"])
    if "target_logprob" in published:
        assert_near(mass.target - mass.total, published["target_logprob"].ravel())
    for full in [published["full_logprob"]] if "full_logprob" in published else []:
        assert_near(log_probs, full.reshape(len(log_probs), -1))
    for logits in [published["logits"]] if "logits" in published else []:
        assert_near(log_probs, torch.as_tensor(logits).flatten(0, 1).log_softmax(-1))
    assert_near(mass.target - mass.total, log_probs.gather(1, target.flatten()[:, None]).squeeze(1))
    assert torch.allclose(log_probs.logsumexp(1), torch.zeros(len(log_probs)), atol=1e-5)


@parametrized("model", models())
def test_every_weight_is_read(model: str) -> None:
    """The listed keys are those of the file; all but markers and tied copies go into the network."""
    listed, released = index("model/state_dict_keys.json"), read_checkpoint(checkpoint(model))
    weights = {f"decoder.{name}": value for name, value in released.weights.items()}
    assert {name: list(value.shape) for name, value in weights.items()} == listed[model]
    assert all(torch.equal(weights[one], weights[other]) for one, other in listed[f"{model}_shared"])
    copies = {other for _, other in listed[f"{model}_shared"]}
    unique = [name for name in weights if name not in copies and not name.endswith(("version", "_float_tensor"))]
    net, _ = network_from_checkpoint(released)
    assert net.parameter_count == sum(weights[name].numel() for name in unique)


def written(tmp_path: Path, content: object, zipped: bool = True) -> Path:
    torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    return tmp_path / "file.pt"


def content(model: str) -> dict:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(checkpoint(model), weights_only=True)


@parametrized("model", models())
def test_older_formats(model: str, tmp_path: Path) -> None:
    """Joined query, key and value weights in torch's first file format, and a version whose last norm does not count."""
    file = content(model)
    weights, joined = file["model"], dict(file["model"])
    for name in [name for name in weights if ".q_proj." in name]:
        parts = [joined.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        joined[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    net, description = network_from_checkpoint(read_checkpoint(written(tmp_path, file | {"model": joined}, zipped=False)))
    for ours, theirs in zip(net.parameters(), network(model).parameters(), strict=True):
        assert torch.equal(ours, theirs)
    old = file | {"model": weights | {"decoder.version": torch.tensor([2.0])}}
    net, description = network_from_checkpoint(read_checkpoint(written(tmp_path, old)))
    assert not description["backbone"]["final_norm"]


class Wicked:
    def __reduce__(self) -> tuple:
        return (print, ("executed",))


@parametrized("model", models()[:1])
def test_what_is_refused(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = content(model)
    args, weights = vars(file["args"]), file["model"]
    first = next(name for name in weights if "fc1.weight" in name)
    refused = {
        "not opened": file | {"extra_state": Wicked()},
        "not a fairseq checkpoint": {"state_dict": weights},
        "lacks": file | {"model": {name: value for name, value in weights.items() if name != first}},
        "no place": file | {"model": weights | {"decoder.gate": torch.zeros(2)}},
        "shape": file | {"model": weights | {first: torch.zeros(2, 2)}},
        "decoder_learned_pos": file | {"args": argparse.Namespace(**args | {"decoder_learned_pos": True})},
        "architecture lstm": file | {"args": argparse.Namespace(**args | {"arch": "lstm"})},
    }
    for message, changed in refused.items():
        with pytest.raises(UserError, match=message):
            network_from_checkpoint(read_checkpoint(written(tmp_path, changed)))
    (tmp_path / "cut.pt").write_bytes(checkpoint(model).read_bytes()[:5000])
    (tmp_path / "text.pt").write_text("w1 3\n")
    for name in ("cut.pt", "text.pt"):
        with pytest.raises(UserError):
            read_checkpoint(tmp_path / name)
    assert "executed" not in capsys.readouterr().out
