"""A long text through a small evicting memory of a decoder of transformers: python examples/long_reading.py MODEL FILE [M]."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trime

name, file, *size = sys.argv[1:] or sys.exit(__doc__)
entries = int(size[0]) if size else 512
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).eval()
ids = torch.tensor([tokenizer(Path(file).read_text())["input_ids"][: model.config.max_position_embeddings - 64]])
policies = {"fifo": trime.FIFO(), "sink": trime.Sink(4), "lra_sum": trime.LRASum(trime.BelowMean(2.0), trime.Raw())}
for label, policy in policies.items():
    cache = trime.EvictingCache(model, entries, policy)
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40, do_sample=False)
    kept = cache.positions(0)[0]
    print(
        f"{label}: read {ids.shape[1]:,} tokens into {entries} entries a layer ({cache.bytes / 1e6:.1f} MB); "
        f"layer 0 keeps positions {int(kept[kept >= 0].min())} to {int(kept.max())}"
    )
    print(repr(tokenizer.decode(output[0, ids.shape[1] :])))
