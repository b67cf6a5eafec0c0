"""A long text in a small memory of a decoder of transformers: python examples/long_reading.py MODEL FILE [M [QUESTION]].

With a question, the last two policies let it decide what is kept, chunk by chunk.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trime

name, file, *rest = sys.argv[1:] or sys.exit(__doc__)
size, asked = int(rest[0]) if rest else 512, f"\n\nQuestion: {rest[1]}\n\nAnswer:" if len(rest) > 1 else ""
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).eval()
question = torch.tensor([tokenizer(asked, add_special_tokens=False)["input_ids"]], dtype=torch.long)
room = max(1, model.config.max_position_embeddings - question.shape[1] - 64)
text = torch.tensor([tokenizer(Path(file).read_text())["input_ids"][:room]], dtype=torch.long)
prompt = torch.cat([text, question], 1)
policies = {"fifo": trime.FIFO(), "sink": trime.Sink(), "lra_sum": trime.LRASum()}
guided = {"tova": trime.TOVA(), "snapkv": trime.SnapKV(window=min(64, size // 2), kernel=21)} if asked else {}
for label, policy in {**policies, **guided}.items():
    cache = trime.EvictingCache(model, size, policy)
    if label in guided:
        cache.read(model, text, question)
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=40, do_sample=False)
    kept = cache.positions(0)[0]
    print(
        f"{label}: read {prompt.shape[1]:,} tokens into {size} entries a layer ({cache.bytes / 1e6:.1f} MB); "
        f"layer 0 keeps positions {int(kept[kept >= 0].min())} to {int(kept.max())}"
    )
    print(repr(tokenizer.decode(output[0, prompt.shape[1] :])))
