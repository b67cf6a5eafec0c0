"""generate: continues a prompt with the model and memories of an experiment, and explains where each token came from."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

from trime.inspection.writers import GeneratedToken, writer_of
from trime.io import plain, write_atomically
from trime.plan.language_model import Plan
from trime.types import UserError


def generate(plan: Plan) -> None:
    """Prints the continuation of a prompt as it comes, or with explain=true a line for each token; writes generated.json."""
    prompt, writer = prompt_of(plan.config.prompt_file), writer_of(plan)
    ids = writer.read(prompt)
    print(f"generate: {len(ids):,} tokens of prompt; {writer.label}", flush=True)
    told: list[GeneratedToken] = []
    shown = ""
    for one in writer.write():
        told.append(one)
        if plan.config.explain:
            print(line(one), flush=True)
            continue
        fresh, shown = added(shown, writer.text(writer.written))
        print(fresh, end="", flush=True)
    whole = writer.text([*ids, *writer.written])
    content = {"prompt": prompt, "text": whole, "model": writer.label, "tokens": [one._asdict() for one in told]}
    asked = {name: plain(plan.config[name]) for name in ("generate", "seed", "model", "eviction", "explain")}
    file = writer.folder / f"generated-{sha256(json.dumps([prompt, asked]).encode()).hexdigest()[:8]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=1, ensure_ascii=False))
    print(f"\n\ngenerated: {file}")


def added(shown: str, text: str) -> tuple[str, str]:
    """What is to be shown beyond what is shown, and all that is shown then.

    White space at the end waits, for a mark may stand close to what comes before it; so does a character of which
    only some bytes are there.
    """
    whole = text.rstrip().removesuffix("\N{REPLACEMENT CHARACTER}")
    common = next((i for i, (a, b) in enumerate(zip(shown, whole, strict=False)) if a != b), min(len(shown), len(whole)))
    return whole[common:], whole


def prompt_of(file: str | None) -> str:
    """The text of a file, or of standard input."""
    try:
        text = sys.stdin.read() if file is None else Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt_file={file} cannot be read as text: {error}") from None
    if not text.strip():
        raise UserError("the prompt is empty: name a file that holds one, prompt_file=FILE, or give it by standard input")
    return text


def line(told: GeneratedToken) -> str:
    """A token's line: probability, its parts, and the entries that gave most."""
    parts = "  ".join(f"{name} {part:.4f}" for name, part in told.parts.items())
    entries = "".join(f"\n      {own['share']:.4f} {own['memory']}: … {own['text']} ({own['place']})" for own in told.entries)
    return f"{told.text!r:<16} {told.probability:.4f} = {parts}{entries}"
