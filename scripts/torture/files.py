"""Every file of every artefact damaged in many ways: a run that uses it must say which file it is."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from scripts.torture.outcome import Case, attempt
from trime.config.compose import compose_config
from trime.lab.manifest import MANIFEST
from trime.lab.runner import run
from trime.report.results import read_run

STAGES = "stages=[prepare,pack,fit,encode,index,tune,evaluate]"
SMALL = (
    "size=tiny",
    "train.updates=2",
    "trainer.enable_progress_bar=false",
    "logger=none",
    "report.samples.passages=0",
    *(f"report.figures.{name}=null" for name in ("picture", "memories", "analysis")),
)
RUNS = {
    "trime_ext": ("experiment=trime_ext", "evaluate.memories=[local,long,external,ngram,ngram_document]", "dataset.modules=20"),
    "ivf": ("experiment=knn_lm", "index=ivf", "dataset.modules=20", "datastore.tokens=4k"),
    "memorizing": ("experiment=memorizing", "dataset.modules=20"),
    "translation": ("experiment=trime_mt",),
}

Damage = Callable[[bytes, random.Random, bytes], bytes | None]


def truncate(content: bytes, draw: random.Random, other: bytes) -> bytes:
    """Cut the end off, at a random place."""
    return content[: draw.randrange(len(content))] if content else b"x"


def flip(content: bytes, draw: random.Random, other: bytes) -> bytes:
    """Flip a bit of a random byte."""
    place = draw.randrange(len(content)) if content else 0
    return content[:place] + bytes([(content[place] if content else 0) ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def change_digit(content: bytes, draw: random.Random, other: bytes) -> bytes:
    """Change one digit, or a byte where there is none."""
    digits = [match.start() for match in re.finditer(rb"\d", content[:100_000])]
    if not digits:
        return flip(content, draw, other)
    place = draw.choice(digits)
    return content[:place] + str((int(content[place : place + 1]) + 1) % 10).encode() + content[place + 1 :]


def swap(content: bytes, draw: random.Random, other: bytes) -> bytes:
    """Put another run's file of that name there, or one with its bytes in reverse."""
    return other if other != content else content[::-1] + b"x"


def delete(content: bytes, draw: random.Random, other: bytes) -> None:
    """Remove the file."""


DAMAGES: tuple[Damage, ...] = (truncate, flip, change_digit, swap, delete)


def campaign(count: int | None, seed: int, names: tuple[str, ...] = tuple(RUNS)) -> list[Case]:
    """Make the runs twice, with another seed the second time, and damage ``count`` files; None: each in every way."""
    with tempfile.TemporaryDirectory() as folder:
        attempts: list[tuple[DictConfig, Path, Path, Damage]] = []
        for name in names:
            config, _ = (make(name, number, Path(folder) / f"{name}-{number}") for number in (0, 1))
            for file, twin in files_of(Path(folder) / f"{name}-0", Path(folder) / f"{name}-1"):
                attempts += [(config, file, twin, damage) for damage in DAMAGES]
        draw = random.Random(seed)
        draw.shuffle(attempts)
        return [damaged(*arguments, draw) for arguments in attempts[:count]]


def make(name: str, seed: int, place: Path) -> DictConfig:
    """Run an experiment from nothing in a folder of its own; return the configuration that runs its stages again."""
    words = (*RUNS[name], *SMALL, f"seed={seed}", f"paths.data={place}/data", f"paths.outputs={place}/outputs")
    run(compose_config(*words))
    return compose_config(*words, STAGES)


def files_of(folder: Path, other: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files of all artefacts and results in a folder, each with one of the same name in another folder.

    An artefact that both runs have, since the seed does not matter to it, is its own twin: its manifest there is as good.
    """
    for root in ("data", "outputs/artefacts", "outputs/runs"):
        for file in sorted((folder / root).rglob("*")):
            if file.is_file() and (file.name == "results.json" or any((parent / MANIFEST).exists() for parent in file.parents)):
                kind = file.parent.name.partition("-")[0]
                twins = [path for path in sorted(other.rglob(file.name)) if path.parent.name.startswith(kind)]
                same = twins and twins[0].parent.name == file.parent.name
                yield file, file if same or not twins else twins[0]


def damaged(config: DictConfig, file: Path, twin: Path, damage: Damage, draw: random.Random) -> Case:
    """Damage a file, run what uses it, and restore it."""
    before = file.stat()
    backup = file.with_name(f"{file.name}.backup")
    shutil.copy2(file, backup)
    other = twin.read_bytes()
    content = damage(file.read_bytes(), draw, other)
    try:
        os.unlink(file) if content is None else file.write_bytes(content)
        action: Callable[[], Any] = partial(read_run, file) if file.name == "results.json" else partial(run, config)
        named = file.parent.name if file.name == MANIFEST else file.name  # its numbers are those of other files
        return attempt(f"{damage.__name__} {file.parent.name}/{file.name}", action, named)
    finally:
        backup.replace(file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
