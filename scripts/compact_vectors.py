"""Make tests/golden/vectors from the full set of golden vectors: ``python -m scripts.compact_vectors FULL_FOLDER``.

``tests/golden/chosen.json`` names the cases: at least one for every test, and of every kind the smallest. Their numbers
are copied as they are, with these exceptions: arrays that no test reads are left out; outputs compared to 5e-5 are
stored in float32; a model's outputs over a set of windows are those of the first windows; a checkpoint is its weights, each
once, and its plain values. The bytes written depend on the numbers alone.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from tests.golden.checkpoints import parted
from tests.golden.texts import ids_of

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
VECTORS = GOLDEN / "vectors"
CHOSEN = json.loads((GOLDEN / "chosen.json").read_text())
UNREAD = re.compile(  # arrays that no test reads
    r"max_abs_grad_diff_f32_vs_f64|(rank\d+_)?ntokens|hidden_after_.*|attn_probs_.*|(enc|dec)_hidden_.*|cross_.*"
    r"|attention_probs|out_official_f32|ys_f32|.*_(loss|lprobs)_f32"
)
Arrays = dict[str, np.ndarray]


def arrays(path: Path) -> Arrays:
    """Return what a file holds, without the arrays that no test reads."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files if not UNREAD.fullmatch(name)}


def small(path: Path) -> Arrays:
    """Return a file's arrays of at most 50 kB; the tests compare the larger ones where they are."""
    return {name: array for name, array in arrays(path).items() if array.nbytes <= 50_000}


def write_arrays(path: Path, content: Arrays) -> None:
    """Write an ``.npz`` whose bytes tell no time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name, array in content.items():
            entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            with file.open(entry, "w") as stream:
                np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file with a line for each entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in content.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(path: Path, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return a JSON file's entries, or those of ``names``; KeyError where one is not there."""
    content = json.loads(path.read_text())
    return content if names is None else {name: content[name] for name in names}


def losses(full: Path, out: Path) -> None:
    cases = read(full / "index.json", CHOSEN["losses"])
    heads = dict.fromkeys(case["softmax"] for case in cases.values())
    write_json(out / "index.json", read(full / "index.json", heads) | cases)
    for name in [*heads, *cases]:
        write_arrays(out / f"{name}.npz", arrays(full / f"{name}.npz"))


def evaluation(full: Path, out: Path) -> None:
    stores = read(full / "index.json", [f"dstore_{name}" for name in CHOSEN["datastores"]])
    cases = read(full / "index.json", CHOSEN["scored"])
    windows = read(full / "windows.json", dict.fromkeys(case["windows"] for case in cases.values()))
    write_json(out / "index.json", stores | cases)
    write_json(out / "windows.json", windows)
    for name, case in cases.items():
        write_arrays(out / f"{name}.npz", arrays(full / f"{name}.npz"))
        if case.get("mem_trace"):
            shutil.copyfile(full / f"{name}.mem.json", out / f"{name}.mem.json")
    for model in dict.fromkeys(store["model"] for store in stores.values()):
        write_arrays(out / f"dstore_{model}.npz", arrays(full / f"dstore_{model}.npz"))
    for path in sorted(full.glob("outputs_*.npz")):
        outputs = arrays(path)
        lengths = outputs.pop("window_lengths")[: CHOSEN["windows"]]
        first = {name: part[: lengths.sum()] for name, part in outputs.items()}
        write_arrays(out / path.name, first | {"window_lengths": lengths})


def checkpoints(full: Path, out: Path) -> None:
    keys = [name for model in CHOSEN["checkpoints"] for name in (model, f"{model}_shared")]
    write_json(out / "state_dict_keys.json", read(full / "state_dict_keys.json", keys))
    for model, states in CHOSEN["checkpoints"].items():
        for state in states:
            tensors, values = parted(full / model / f"checkpoint_{state}")
            (out / model).mkdir(exist_ok=True)
            save_file(tensors, out / model / f"checkpoint_{state}.safetensors")
            write_json(out / model / f"checkpoint_{state}.json", values)
        if "init" in states:
            write_arrays(out / model / "forward.npz", small(full / model / "forward.npz"))
            write_json(out / model / "train_trajectory.json", read(full / model / "train_trajectory.json"))
        write_arrays(out / model / "forward_last.npz", arrays(full / model / "forward_last.npz"))


def texts(full: Path, out: Path) -> None:
    """Copy the text, and the ids of fairseq's binaries as arrays."""
    for corpus in sorted(path.name for path in full.iterdir()):
        shutil.copytree(full / corpus / "text", out / corpus / "text", copy_function=shutil.copyfile)
        shutil.copyfile(full / corpus / "dict.txt", out / corpus / "dict.txt")
        write_arrays(out / corpus / "ids.npz", {split: ids_of(full / corpus, split) for split in ("train", "valid", "test")})


def miscellany(full: Path, out: Path) -> None:
    """Batches, schedules, optimisers and the translation loss are small; of the BM25 chains three are kept."""
    chains = read(full / "bm25.json")
    write_json(out / "bm25.json", chains | {"cases": {name: chains["cases"][name] for name in CHOSEN["chains"]}})
    group(full, out, "mt_loss", None, CHOSEN["translation"])
    write_arrays(out / "optim.npz", arrays(full / "optim.npz"))
    for name in ("batching", "lr", "optim"):
        write_json(out / f"{name}.json", read(full / f"{name}.json"))


def of_cases(content: Arrays, every: Iterable[str], kept: list[str]) -> Arrays:
    """Return the arrays of the kept cases, ``CASE/ARRAY`` or ``CASE_ARRAY``, and those that are no case's."""
    longest_first = sorted(every, key=len, reverse=True)

    def case_of(array: str) -> str | None:
        return next((name for name in longest_first if array.startswith((f"{name}/", f"{name}_"))), None)

    return {name: array for name, array in content.items() if case_of(name) in (None, *kept)}


def group(full: Path, out: Path, name: str, part: str | None, kept: list[str]) -> None:
    """Copy a group of cases: the entries of its JSON file, or those of an entry, and their arrays."""
    content = read(full / f"{name}.json")
    cases = content if part is None else content[part]
    write_arrays(out / f"{name}.npz", of_cases(arrays(full / f"{name}.npz"), cases, kept))
    cases = {case: cases[case] for case in kept}
    write_json(out / f"{name}.json", cases if part is None else content | {part: cases})


def memory(full: Path, out: Path) -> None:
    """Copy what concerns memories inside attention."""
    group(full, out, "attendre_layer", None, CHOSEN["attendre"])
    group(full, out, "lm_infinite", "cases", CHOSEN["lm_infinite"])
    group(full, out, "kvpress_scores", "presses", CHOSEN["presses"])
    streams = read(full / "evict_policies.json", CHOSEN["policies"])
    for stream, kept in CHOSEN["policies"].items():
        policies = streams[stream]["policies"]
        write_arrays(out / f"evict_{stream}.npz", of_cases(arrays(full / f"evict_{stream}.npz"), policies, kept))
        streams[stream]["policies"] = {name: policies[name] for name in kept}
    write_json(out / "evict_policies.json", streams)
    meta = read(full / "mt_meta.json", CHOSEN["memorizing"])
    write_json(out / "mt_meta.json", {name: {"config": layer["config"]} for name, layer in meta.items()})
    for name in [*(f"mt_{name}" for name in CHOSEN["memorizing"]), "t5_buckets", "xl_masks"]:
        write_arrays(out / f"{name}.npz", arrays(full / f"{name}.npz"))
    for name in [f"hf_{name}" for name in CHOSEN["pretrained"]]:
        shutil.copyfile(full / f"{name}.safetensors", out / f"{name}.safetensors")
        write_json(out / f"{name}.config.json", read(full / f"{name}.config.json"))
        outputs = arrays(full / f"{name}.npz")
        write_arrays(
            out / f"{name}.npz", {key: x.astype(np.float32) if x.dtype.kind == "f" else x for key, x in outputs.items()}
        )


def compact(full: Path, out: Path) -> None:
    """Make the compact set of a full one; what was in ``out`` is replaced, but for its README."""
    for part in ("trime", "memory"):
        shutil.rmtree(out / part, ignore_errors=True)
    trime = full / "trime", out / "trime"
    for part, copy in {"losses": losses, "eval": evaluation, "model": checkpoints, "data": texts, "misc": miscellany}.items():
        copy(*(folder / part for folder in trime))
    memory(full / "memory", out / "memory")


if __name__ == "__main__":
    compact(Path(sys.argv[1]), VECTORS)
