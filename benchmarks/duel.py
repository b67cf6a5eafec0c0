"""Evicting caches beside kvpress: prompts of lm_eval's RULER tasks, which need no download, and what each answers.

Every contestant reads the same prompts, the question at their end, and keeps the same share of them. kvpress runs in an
environment of its own (``--kvpress PYTHON``). Each answer is kept in ``--folder``, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.completion import interval
from benchmarks.decoder_memory import finished
from benchmarks.measure import ROOT, Measured
from trime.common.io import write_json
from trime.common.progress import Progress

SIDE = ROOT / "benchmarks" / "duel_kvpress.py"
TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
WHOLE = {"whole": True, "heads": "apart"}
OURS: dict[str, dict[str, Any]] = {
    "FIFO": {"policy": "FIFO"},
    "Sink": {"policy": "Sink"},
    "LRASum": {"policy": "LRASum"},
    "H2O": {"policy": "H2O"},
    "TOVA": {"policy": "TOVA"},
    "SnapKV": {"policy": "SnapKV"},
    "SnapKV, recall": {"policy": "SnapKV", "recall": 1},
    "SnapKV, whole": {"policy": "SnapKV", **WHOLE},
    "KVzip, AdaKV, whole": {"policy": "KVzip", "whole": True, "heads": "ada_kv"},
    "KVzip, whole": {"policy": "KVzip", "whole": True, "heads": "ada_kv_across_layers"},  # as kvpress
}
THEIRS = ("StreamingLLM", "TOVA", "SnapKV", "KVzip")

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a folder of a causal language model and its tokenizer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt, at most")
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--longest", type=int, default=128, help="tokens that are written, at most: a number comes first")
    parser.add_argument("--share", type=float, default=0.25, help="of a prompt's entries that are kept")
    parser.add_argument("--ours", nargs="*", default=[*OURS], choices=[*OURS])
    parser.add_argument("--theirs", nargs="*", default=THEIRS, choices=THEIRS)
    parser.add_argument("--kvpress", help="the interpreter of an environment with kvpress; left out: not run")
    parser.add_argument("--folder", type=Path, default=Path("outputs/duel"), help="for prompts and answers")


def measure(options: argparse.Namespace) -> Measured:
    """Return for each contestant how often it is right, by task and over all, the bytes it holds, and seconds a prompt."""
    options.folder.mkdir(parents=True, exist_ok=True)
    made_of = [Path(options.model).name, options.tokens, options.prompts, options.longest, *options.tasks]
    file = options.folder / f"prompts-{'-'.join(map(str, made_of))}.json"
    prompts = finished(file, lambda: prompts_of(options))
    answers: dict[str, list[Row]] = {}

    def kept(name: str) -> Path:
        place = f"{file.stem.removeprefix('prompts-')}-{options.dtype}-{name}".replace(", ", "-").replace(" ", "-")
        return options.folder / f"answers-{place}.json"

    answers["all is kept"] = answers_of(options, prompts, {}, kept("all"))
    for name in options.ours:
        settings = {**OURS[name], "memory": options.share}
        answers[name] = answers_of(options, prompts, settings, kept(f"{name}-{options.share}"))
    for name in options.theirs if options.kvpress else ():
        out = kept(f"kvpress-{name}-{options.share}")
        if len(answered(out)) < len(prompts):
            words = [options.model, file, out, name, options.share, options.dtype, options.device]
            subprocess.run([options.kvpress, str(SIDE), *map(str, words)], check=True)
        answers[f"kvpress: {name}"] = answered(out)
    full = rights(prompts, answers["all is kept"])
    return Measured([row_of(name, each, prompts, full) for name, each in answers.items()], [])


def prompts_of(options: argparse.Namespace) -> list[Row]:
    """Return the prompts of the tasks with what must occur in an answer, in the model's chat template if it has one."""
    from lm_eval.tasks import TaskManager, get_task_dict
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def chat(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        ends: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        ends["continue_final_message"] = not add_generation_prompt
        return str(tokenizer.apply_chat_template(history, tokenize=False, **ends))

    manager = TaskManager(metadata={"pretrained": options.model, "max_seq_lengths": [options.tokens]})
    rows = []
    for name, task in get_task_dict(list(options.tasks), manager).items():
        task.build_all_requests(
            limit=options.prompts,
            apply_chat_template=bool(tokenizer.chat_template),
            chat_template=chat if tokenizer.chat_template else None,
            tokenizer_name=options.model,
        )
        for instance in task.instances:
            text, settings = instance.args
            outputs = [str(output) for output in instance.doc["outputs"]]
            rows.append(
                {"task": name, "prompt": text, "outputs": outputs, "longest": min(settings["max_gen_toks"], options.longest)}
            )
    return rows


def answered(file: Path) -> list[Row]:
    """Return the answers that a file has so far."""
    return list(json.loads(file.read_text())) if file.exists() else []


def answers_of(options: argparse.Namespace, prompts: list[Row], settings: dict[str, Any], file: Path) -> list[Row]:
    """Return what the model answers with an evicting cache, or without one; each answer is kept in the file."""
    rows = answered(file)
    if len(rows) == len(prompts):
        return rows

    from lm_eval.api.instance import Instance

    import trime.harness

    if settings.get("recall"):  # as many as are kept
        settings = settings | {"recall": int(options.share * options.tokens)}
    model = trime.harness.TrimeHF(
        pretrained=options.model,
        dtype=options.dtype,
        device=options.device,
        batch_size=1,
        add_bos_token=False,  # as in the template, and on the other side
        max_length=2 * options.tokens,
        **settings,
    )
    description = ", ".join(map(str, settings.values())) or "all is kept"
    for prompt in Progress(prompts[len(rows) :], initial=len(rows), total=len(prompts), unit="prompt", desc=description):
        started = time.perf_counter()
        model.prompts |= dict.fromkeys(model.prompts, 0)
        arguments = prompt["prompt"], {"max_gen_toks": prompt["longest"], "until": [], "do_sample": False}
        (text,) = model.generate_until([Instance("generate_until", {}, arguments, 0)], disable_tqdm=True)
        everything = model.bytes_of(int(model.prompts["tokens"]))
        held = {name: model.prompts[f"bytes held {name}"] or everything for name in ("at most", "after")}
        rows.append({"text": text, "seconds": time.perf_counter() - started, **held})
        write_json(file, rows)
    return rows


def rights(prompts: list[Row], answers: list[Row]) -> np.ndarray:
    """Return for each prompt the share of the wanted texts that occur in its answer, as the tasks count."""
    pairs = zip(prompts, answers, strict=True)
    return np.array([np.mean([text.lower() in each["text"].lower() for text in one["outputs"]]) for one, each in pairs])


def row_of(name: str, answers: list[Row], prompts: list[Row], full: np.ndarray) -> Row:
    right, tasks = rights(prompts, answers), np.array([prompt["task"] for prompt in prompts])
    row: Row = {"contestant": name, "prompts": len(prompts), "right": round(float(right.mean()), 3)}
    row["less all kept"] = interval(right - full)
    row |= {task: round(float(right[tasks == task].mean()), 3) for task in dict.fromkeys(tasks.tolist())}
    for held in ("at most", "after"):
        row[f"MB {held}"] = round(float(np.mean([each[held] for each in answers])) / 1e6, 2)
    return row | {"seconds a prompt": round(float(np.median([each["seconds"] for each in answers])), 2)}
