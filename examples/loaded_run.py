"""Use a finished run: score text token by token, and continue it with the origin of each token."""

import sys

import trime

model = trime.load(sys.argv[1])
print(model.label)
for token in model.score("import os\n")[0]:
    print(
        f"{token.text!r:<12} {token.probability:.4f}  " + "  ".join(f"{name} {part:.4f}" for name, part in token.parts.items())
    )
for token in model.explain("import os", max_new_tokens=5, entries=1, temperature=0):
    print(f"{token.text!r:<12} from {', '.join(entry['place'] for entry in token.entries) or 'the vocabulary'}")
