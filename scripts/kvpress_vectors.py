"""Make tests/golden/kvpress: ``python scripts/kvpress_vectors.py``, in an environment of its own with kvpress 0.5.5.

Prompts are random numbers, of a layer with two heads of keys, in float64: queries before rotation, keys after it. Each press
scores them as it does in its own hook, with an identity in place of the projection of queries.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvpress import AdaKVPress, KVzipPress, PyramidKVPress, SnapKVPress
from torch import nn
from transformers import LlamaConfig

OUT = Path(__file__).parents[1] / "tests" / "golden" / "kvpress"
B, H, G, L, D, THETA = 2, 4, 2, 40, 8, 10000.0  # texts, heads of queries and keys, tokens, width
RATIO, SAFE, CONTEXT = 0.5, 0.2, 24  # share that is evicted, of AdaKV; tokens that KVzip repeats
PYRAMIDS = [
    (4096, 0.5, 24, 20, 64),
    (4096, 0.8, 30, 5, 64),
    (1000, 0.5, 12, 2, 16),
    (4096, 0.9, 24, 20, 64),
    (2048, 0.25, 24, 10, 32),
]


class Rotation(nn.Module):
    def forward(self, _: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions[..., None] / THETA ** (torch.arange(0, D, 2) / D)
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def kept_by(module: nn.Module, tokens: int) -> np.ndarray:
    """Return the mask of entries that a press has not marked as evicted, of one text."""
    _, head, place = module.masked_key_indices  # type: ignore[misc]
    kept = torch.ones(G, tokens, dtype=torch.bool)
    kept[head, place] = False
    return kept.numpy()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    query, key, value = torch.randn(B, H, L, D), torch.randn(B, G, L, D), torch.randn(B, G, L, D)
    hidden = query.transpose(1, 2).reshape(B, L, H * D)
    module = nn.Module()
    module.q_proj, module.rotary_emb, module.head_dim, module.layer_idx = nn.Identity(), Rotation(), D, 0
    module.config = LlamaConfig(hidden_size=H * D, num_attention_heads=H, num_key_value_heads=G, head_dim=D)
    module.config._attn_implementation = "sdpa"
    turned = module.rotary_emb(None, torch.arange(L)[None].expand(B, -1))

    def at(texts: slice, tokens: slice) -> dict[str, Any]:
        return {"position_embeddings": tuple(wave[texts, tokens] for wave in turned)}

    arrays = {"query": query, "key": key, "value": value}
    everything = slice(None)
    press = SnapKVPress(RATIO, window_size=8)
    arrays["snapkv/scores"] = press.score(module, hidden, key, value, None, at(everything, everything))
    for text in range(B):
        one = slice(text, text + 1)
        AdaKVPress(press, SAFE).compress(module, hidden[one], key[one], value[one], None, at(one, everything))
        arrays[f"snapkv/kept of {text}"] = kept_by(module, L)
    press = KVzipPress(RATIO, layerwise=True)
    press.context_length = press.end_idx = CONTEXT
    press.score_val = torch.zeros(1, B, G, CONTEXT)
    press.score_kvzip(module, hidden[:, CONTEXT:], key, value, None, at(everything, slice(CONTEXT, None)))
    arrays["kvzip/scores"] = scores = press.score_val[0].clone()
    layers = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=module)]))
    for text in range(B):
        press.score_val = scores[None, text : text + 1].clone()
        press.compress_post(layers)
        arrays[f"kvzip/kept of {text}"] = kept_by(module, CONTEXT)
    pyramids = []
    for length, ratio, count, beta, window in PYRAMIDS:
        press, module.config.num_hidden_layers, budgets = PyramidKVPress(ratio, window, beta=beta), count, []
        for module.layer_idx in range(count):
            budgets.append(press.get_layer_budget(module, length))
        case = {"length": length, "ratio": ratio, "layers": count, "beta": beta, "window": window}
        pyramids.append(case | {"budgets": budgets})
    settings = {
        "kept": int(L * (1 - RATIO)),
        "theta": THETA,
        "snapkv": {"window": 8, "kernel": 5},
        "ada_kv": {"share": SAFE},
        "kvzip": {"context": CONTEXT, "kept": CONTEXT - int(G * CONTEXT * RATIO) // G, "sinks": 4},
        "pyramids": pyramids,
    }
    OUT.mkdir(exist_ok=True)
    np.savez_compressed(OUT / "prompts.npz", **{name: np.asarray(array) for name, array in arrays.items()})
    (OUT / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
