"""The models' forward passes from released-format checkpoints, padding included (model/), and the importer."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from tests.golden.checkpoints import checkpoint, models, network
from tests.golden.published import ROOT, arrays, assert_near, index, parametrized
from trime.models.checkpoints.fairseq import network_from_checkpoint, read_checkpoint
from trime.types import UserError

CHECKPOINTS = {"forward": "checkpoint_init", "forward_last": "checkpoint_last"}  # of which a file of outputs is
OUTPUTS = [(model, file) for model in models() for file in CHECKPOINTS if (ROOT / f"model/{model}/{file}.npz").is_file()]


@parametrized("model, file", OUTPUTS)
def test_forward(model: str, file: str) -> None:
    found, net = arrays(f"model/{model}/{file}.npz"), network(model, CHECKPOINTS[file])
    tokens, target = (torch.as_tensor(found[name]).long() for name in ("tokens", "target"))
    inner: list[torch.Tensor] = []
    for layer in net.backbone.layers:
        layer.register_forward_pre_hook(lambda _, given: inner.append(given[0]))
    with torch.no_grad():
        encoding, state = net.backbone(tokens, None, None)
        mass = net.head.evidence(encoding.f.flatten(0, 1), target.flatten())
        every = net.head.log_probs(encoding.f.flatten(0, 1))
        unscaled = net.backbone.embedding(tokens)
    assert state is None
    assert_near(encoding.f, found["features"])
    assert_near(encoding.g, found["last_ffn_input"])
    if "inner_states" in found:  # before each layer, and behind the last
        assert len(inner) == len(found["inner_states"]) - 1
        for ours, theirs in zip(inner, found["inner_states"], strict=False):
            assert_near(ours, theirs)
    if "embed_tokens_unscaled" in found:
        assert_near(unscaled, found["embed_tokens_unscaled"])
        assert_near(inner[0] - unscaled * float(found["embed_scale"]), found["embed_positions"])
    if "target_logprob" in found:
        assert_near(mass.target - mass.total, found["target_logprob"].ravel())
    for full in [found["full_logprob"]] if "full_logprob" in found else []:
        assert_near(every, full.reshape(len(every), -1))
    for logits in [found["logits"]] if "logits" in found else []:
        assert_near(every, torch.as_tensor(logits).flatten(0, 1).log_softmax(-1))
    assert_near(mass.target - mass.total, every.gather(1, target.flatten()[:, None]).squeeze(1))
    assert torch.allclose(every.logsumexp(1), torch.zeros(len(every)), atol=1e-5)


@parametrized("model", models())
def test_every_weight_is_read(model: str) -> None:
    """The listed keys are those of the file; each but markers and tied copies goes into the network."""
    listed, released = index("model/state_dict_keys.json"), read_checkpoint(checkpoint(model))
    weights = {f"decoder.{name}": value for name, value in released.weights.items()}
    assert {name: list(value.shape) for name, value in weights.items()} == listed[model]
    assert all(torch.equal(weights[one], weights[other]) for one, other in listed[f"{model}_shared"])
    copies = {other for _, other in listed[f"{model}_shared"]}
    kept = [name for name in weights if name not in copies and not name.endswith(("version", "_float_tensor"))]
    net, _ = network_from_checkpoint(released)
    assert net.parameter_count == sum(weights[name].numel() for name in kept)


def written(tmp_path: Path, content: object, zipped: bool = True) -> Path:
    torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    return tmp_path / "file.pt"


def content(model: str) -> dict:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(checkpoint(model), weights_only=True)


@parametrized("model", models())
def test_older_formats(model: str, tmp_path: Path) -> None:
    """Joined query, key and value weights in torch's first file format, and a form whose last norm does not count."""
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
        "no fairseq checkpoint": {"state_dict": weights},
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
