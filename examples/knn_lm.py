"""kNN-LM with the adaptive mixture over any decoder of transformers: python examples/knn_lm.py MODEL TRAIN VALID TEST."""

import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trime

WINDOW = 256
name, *files = sys.argv[1:] or sys.exit(__doc__)
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).eval()


@torch.no_grad()
def windows(file: str, document: int) -> Iterator[trime.Window]:
    """Read a text in windows, each without the ones before; its own memories reach back further."""
    ids = torch.tensor(tokenizer(Path(file).read_text())["input_ids"])
    for start in range(0, len(ids) - 1, WINDOW):
        tokens = ids[start : start + WINDOW + 1]
        output = model(tokens[None, :-1], output_hidden_states=True)
        yield trime.window_of(output.hidden_states[-1][0], output.logits[0], tokens[1:], document, start)


train, valid, test = ([*windows(file, number)] for number, file in enumerate(files))
keys, tokens = (torch.cat([getattr(window.contexts, part) for window in train]) for part in ("g", "token"))
store = trime.Datastore.from_tensors(tempfile.mkdtemp(), keys, tokens)
memories = {
    "local": trime.LocalMemory(),
    "long": trime.LongMemory([4096], trime.FIFO()),
    "external": trime.ExternalMemory(trime.KNNMemory(store, k=min(64, len(store)))),
}
mixture = trime.MemoryMixture(memories)
print(f"valid, cross-fitted: perplexity {math.exp(mixture.fit(valid)):.2f}")
losses = {
    "with memories": [-score for score in mixture.score(test)],
    "model alone": [w.vocabulary.total - w.vocabulary.target for w in test],
}
for label, parts in losses.items():
    print(f"test, {label}: perplexity {torch.cat(parts).mean().exp():.2f}")
