"""A decoder from a package's GGUF file: the same model in a folder, made once, or loaded by its name on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import composed
from trime.models.pretrained.loading import convert, find_gguf, load_pretrained
from trime.models.pretrained.tokenizer import load_tokenizer
from trime.stages.pretrained import ensure_model_folder

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
SYMBOLS = ["<|endoftext|>", *"abcdefgh", "ab", "cd"]


def small() -> Any:
    """Return a small decoder of SmolLM2's form, with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a projection with its rows as GGUF has them: the halves that rotate together side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(model: Any, file: Path) -> None:
    """Write a model and a tokenizer of byte pairs as a GGUF file."""
    out, config = gguf.GGUFWriter(file, "llama"), model.config
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(SYMBOLS)
    out.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(SYMBOLS) - 1))
    out.add_token_merges(["a b", "c d"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
            own = interleaved(weight, heads) if heads else weight
            out.add_tensor(names.get_name(name, (".weight",)), own.numpy().astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package that holds a GGUF file."""
    folder = tmp_path / "packages" / "held_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('a package that holds a model is not imported')")
    write(small(), folder / "small.gguf")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_the_folder_holds_the_same_model(package: Path, tmp_path: Path) -> None:
    file = find_gguf("held_model")
    assert file == package / "small.gguf"
    convert(file, tmp_path / "made")
    tokens = torch.tensor([[1, 2, 3, 9, 10, 4]])
    with torch.no_grad():
        assert torch.allclose(load_pretrained(str(tmp_path / "made"))(tokens).logits, small()(tokens).logits, atol=1e-5)
    assert load_tokenizer(str(tmp_path / "made"))("abcda")["input_ids"] == [9, 10, 1]
    assert not any("quantization" in path.read_text() for path in (tmp_path / "made").glob("config.json"))


def test_a_file_of_ones_own_is_converted_once(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named by its content: a copy is the same model, another file of that name is another one."""
    file, copy = package / "small.gguf", tmp_path / "my models" / "small.GGUF"
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    made = []
    for given in (file, copy):
        config = composed("model=pretrained", f"paths.data={tmp_path}/data", f"model.name='{given}'")
        ensure_model_folder(config)
        made.append((config.model.name, config.model.embedding.name, capsys.readouterr().out.count("model: made")))
    folder = made[0][0]
    assert made == [(folder, folder, 1), (folder, folder, 0)] and Path(folder).parent == tmp_path / "data" / "models"
    assert load_tokenizer(folder)("abcda")["input_ids"] == [9, 10, 1] and load_pretrained(folder) is not None
    other = small()
    other.lm_head.weight.data.mul_(2)
    write(other, copy)
    config = composed("model=pretrained", f"paths.data={tmp_path}/data", f"model.name='{copy}'")
    ensure_model_folder(config)
    assert config.model.name != folder
