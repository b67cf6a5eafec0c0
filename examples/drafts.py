"""A text written with drafts from a folder, and which lines were copied: python examples/drafts.py MODEL FOLDER PROMPT [FILE].

FILE holds what will probably be written, such as a file before an edit.
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import trime

name, folder, prompt, *expected = sys.argv[1:] or sys.exit(__doc__)
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
memory = trime.TextMemory(model, tokenizer, tempfile.mkdtemp())
memory.add(folder)
memory.fit()
drafting = memory.drafting(expect=Path(expected[0]).read_text() if expected else None)
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
output = model.generate(**inputs, custom_generate=drafting, do_sample=False, max_new_tokens=64)
first = inputs["input_ids"].shape[1]
print(tokenizer.decode(output[0, first:]))
print(f"{drafting.tokens} tokens in {drafting.calls} calls of the model")
for source, (drafted, right) in drafting.sources.items():
    print(f"  {source}: {right} of {drafted} drafted tokens were right")
(tokens,) = memory.explain(output, first=first)
for run in dict.fromkeys(token.run for token in tokens if token.run):
    print(f"  {run.tokens} tokens in a row are those of {run.source.name}, line {run.source.line}")
