"""``trime memory``: a memory of one's own texts from the command line. Each command is a call of ``TextMemory``."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trime.errors import UserError
from trime.serving.server import HOST, PORT

Result = dict[str, Any] | list[Any]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the commands and their options."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", required=True, help="a folder or a name of a causal language model of transformers")
    common.add_argument(
        "--memory", required=True, type=Path, help="the folder of the memory, which is made where there is none"
    )
    common.add_argument(
        "--dtype", default="auto", help="of the weights, such as bfloat16 (%(default)s: as the model was saved)"
    )
    common.add_argument("--device", default="cpu", help="cpu, cuda, … (%(default)s)")
    common.add_argument("--no-knn", action="store_true", help="n-grams without neighbours: texts are added without the model")
    common.add_argument("--json", action="store_true", help="print the result as JSON")
    whole = argparse.ArgumentParser("trime memory", description=__doc__)
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str, *arguments: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about, parents=[common])
        for argument in arguments:
            settings: dict[str, Any] = {"nargs": "+", "metavar": "PATH", "help": "files or folders"}
            added.add_argument(argument, **(settings if argument == "paths" else {}))
        return added

    for name, about in (("add", "store files and folders"), ("evaluate", "what the memory is worth on other texts")):
        added = command(name, about, "paths")
        added.add_argument("--field", default="text", help="of rows that hold texts (%(default)s)")
        if name == "add":
            added.add_argument("--watch", action="store_true", help="go on, and store each file as it is saved or deleted")
    command("remove", "take a document out, or all below a folder", "name")
    command("list", "name the stored documents")
    command("count", "count the occurrences of a text in the stored texts", "text")
    command("find", "find a text in the stored texts", "text").add_argument("--limit", type=int, default=10, help="places")
    fit = command("fit", "fit the weights, to texts that are not stored or to stored ones that are hidden")
    fit.add_argument("paths", nargs="*", metavar="PATH", help="files or folders; without any, stored documents")
    fit.add_argument("--field", default="text", help="of rows that hold texts (%(default)s)")
    fit.add_argument("--seed", type=int, default=0)
    write = command("generate", "continue a prompt", "prompt")
    write.add_argument("--max-new-tokens", type=int, default=64)
    write.add_argument("--temperature", type=float, default=0.0, help="0: the most probable token (%(default)s)")
    write.add_argument("--top-p", type=float, default=1.0)
    write.add_argument("--seed", type=int, default=0)
    write.add_argument("--plain", action="store_true", help="without the memory, which then only makes it faster")
    write.add_argument("--expect", type=Path, metavar="FILE", help="a file that holds what will probably be written")
    serve = command("serve", "an endpoint in the form of OpenAI's API, and a page that explains texts, until it is interrupted")
    serve.add_argument("--host", default=HOST, help="for others than this machine, set TRIME_TOKEN too (%(default)s)")
    serve.add_argument("--port", type=int, default=PORT, help="0: one that is free (%(default)s)")
    explain = command("explain", "where each token of a text comes from", "text")
    explain.add_argument("--page", type=Path, help="write a page that shows it")
    return whole


def main(words: list[str]) -> int:
    """Run a command; return the exit status, 1 if it failed."""
    options = parser().parse_args(words)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        lines, result = COMMANDS[options.command](opened(options), options)
    except (UserError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was added is stored", file=sys.stderr)
        return 130
    print(json.dumps(result, ensure_ascii=False) if options.json else lines)
    return 0


def opened(options: argparse.Namespace) -> Any:
    """Return the memory of a model, which is loaded."""
    from trime.common.pretrained import OLDEST, load_pretrained
    from trime.models.pretrained.tokenizer import load_tokenizer
    from trime.text_memory.memory import TextMemory

    model = load_pretrained(options.model, options.dtype, OLDEST).to(options.device)
    return TextMemory(model, load_tokenizer(options.model), options.memory, knn=not options.no_knn)


def add(memory: Any, options: argparse.Namespace) -> tuple[str, Result]:
    changes = memory.watch(options.paths, options.field) if options.watch else [memory.add(options.paths, options.field)]
    for changed in changes:
        result = {"changed": changed, "documents": len(memory.names), "tokens": len(memory)}
        line = "{changed:,} changed; {documents:,} documents of {tokens:,} tokens".format(**result)
        if options.watch:
            print(json.dumps(result) if options.json else line, flush=True)
    return line, result


def remove(memory: Any, options: argparse.Namespace) -> tuple[str, Result]:
    count = memory.remove(options.name)
    return f"{count:,} removed", {"removed": count}


def names(memory: Any, options: argparse.Namespace) -> tuple[str, Result]:
    return "\n".join(memory.names), memory.names


def count(memory: Any, options: argparse.Namespace) -> tuple[str, Result]:
    number = memory.count(options.text)
    return str(number), {"count": number}


def find(memory: Any, options: argparse.Namespace) -> tuple[str, Result]:
    places = [
        {"file": source.name, "line": source.line, "text": text} for source, text in memory.find(options.text, options.limit)
    ]
    return "\n".join(f"{place['file']}:{place['line']}: {place['text']!r}" for place in places), places


def evaluation(memory: Any, options: argparse.Namespace) -> tuple[str, Result]:
    if options.command == "fit":
        measured = memory.fit(options.paths or None, options.field, options.seed)
    else:
        measured = memory.evaluate(options.paths, options.field)
    numbers = {name: (each.value, each.low, each.high) for name, each in measured.differences.items()}
    less = {name: [None if math.isnan(number) else number for number in each] for name, each in numbers.items()}
    content = {"tokens": measured.tokens, "documents": measured.documents, "perplexity": measured.perplexity}
    return str(measured), content | {"bits_per_byte": measured.bits_per_byte, "less": less, "near_copies": measured.near_copies}


def generate(memory: Any, options: argparse.Namespace) -> tuple[str, Result]:
    import torch

    torch.manual_seed(options.seed)
    sampled = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p} if options.temperature else {}
    expected = options.expect.read_text(encoding="utf-8") if options.expect else None
    text = memory.generate(options.prompt, options.max_new_tokens, mix=not options.plain, expect=expected, **sampled)
    return options.prompt + text, {"prompt": options.prompt, "text": text}


def serve(memory: Any, options: argparse.Namespace) -> tuple[str, Result]:
    memory.serve(options.host, options.port)
    return "", {}


def explain(memory: Any, options: argparse.Namespace) -> tuple[str, Result]:
    from trime.text_memory.served import as_explained

    tokens = memory.decoder.encode(options.text)
    if options.page:
        memory.explain_page(options.page, [tokens.tolist()])
    (explained,), lines = memory.explain([tokens.tolist()]), []
    for token in explained:
        largest = max(token.parts, key=token.parts.__getitem__)
        place = f"{token.sources[0][1].name}:{token.sources[0][1].line}" if token.sources else ""
        lines.append(f"{token.text!r:24} {token.probability:.3f}  {largest:9} {place}".rstrip())
    return "\n".join(lines), [as_explained(token).to_json() for token in explained]


COMMANDS: dict[str, Callable[[Any, argparse.Namespace], tuple[str, Result]]] = {
    **{"add": add, "remove": remove, "list": names, "count": count, "find": find, "fit": evaluation, "evaluate": evaluation},
    **{"generate": generate, "serve": serve, "explain": explain},
}
