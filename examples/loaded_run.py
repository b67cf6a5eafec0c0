"""A finished run scores text, continues it and says where tokens are from: python examples/loaded_run.py RUN_FOLDER [TEXT]."""

import sys

import trime

folder, *words = sys.argv[1:] or sys.exit(__doc__)
model, text = trime.load(folder), " ".join(words) or "import os\n"
print(model.label)
for token in model.score(text)[0]:
    print(
        f"{token.text!r:<12} {token.probability:.4f}  " + "  ".join(f"{name} {part:.4f}" for name, part in token.parts.items())
    )
for token in model.explain(text, max_new_tokens=5, entries=1, temperature=0):
    print(f"{token.text!r:<12} from {', '.join(entry['place'] for entry in token.entries) or 'the vocabulary'}")
