"""kvpress in ``benchmarks duel``, in an environment of its own: MODEL PROMPTS OUT PRESS SHARE DTYPE [DEVICE]."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from kvpress import KVzipPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

PRESSES: dict[str, Any] = {
    "StreamingLLM": StreamingLLMPress,
    "TOVA": TOVAPress,
    "SnapKV": SnapKVPress,
    "KVzip": KVzipPress,
}


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: dict[str, Any], press: Any) -> dict[str, Any]:
    """Return the greedy answer to a prompt whose entries a press has evicted, and the bytes that the cache holds."""
    started, cache, written = time.perf_counter(), DynamicCache(), list[int]()
    tokens = tokenizer(prompt["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
    with press(model):
        model.model(input_ids=tokens[:, :-1], past_key_values=cache)
    before = tokens.shape[1] - 1
    of_layers: list[Any] = cache.layers
    sizes = [layer.keys.nbytes + layer.values.nbytes for layer in of_layers]
    token, position = tokens[:, -1:], before
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    while len(written) < prompt["longest"]:
        logits = model(token, past_key_values=cache, position_ids=torch.tensor([[position]], device=model.device)).logits
        token, position = logits[:, -1].argmax(-1, keepdim=True), position + 1
        if int(token) in ends:
            break
        written.append(int(token))
    text = tokenizer.decode(written, skip_special_tokens=True)
    after, layers = sum(sizes), len(sizes)
    whole = after // of_layers[0].keys.shape[2] * before
    # A layer is cut once it has read the prompt; those whose entries are only masked hold all of it.
    most = after + (whole - after) // layers
    return {"text": text, "seconds": time.perf_counter() - started, "at most": most, "after": after}


def main() -> None:
    folder, prompts, out, press, share, dtype, *device = sys.argv[1:]
    wanted = json.loads(Path(prompts).read_text())
    rows = json.loads(Path(out).read_text()) if Path(out).exists() else []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(*device or ["cpu"])
    for prompt in wanted[len(rows) :]:
        rows.append(answer(model, tokenizer, prompt, PRESSES[press](1 - float(share))))
        aside = Path(out).with_suffix(".partial")
        aside.write_text(json.dumps(rows))
        aside.replace(out)
        print(f"\rkvpress, {press}: {len(rows)} of {len(wanted)}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
