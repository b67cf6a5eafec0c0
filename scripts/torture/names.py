"""Text of one's own with hostile names, kinds and contents: it is read, or refused in one line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripts.torture.outcome import Case, attempt
from trime.config.compose import compose_config
from trime.lab.runner import run

Hostile = Callable[[Path], None]
TEXT = "the cat sat on a mat and the dog ran to the house while it rained in May .\n" * 40


def fifo(folder: Path) -> None:
    """A named pipe, which nobody writes to."""
    os.mkfifo(folder / "pipe.txt")


def link_to_itself(folder: Path) -> None:
    """A link that leads to itself."""
    (folder / "loop.txt").symlink_to(folder / "loop.txt")


def broken_link(folder: Path) -> None:
    """A link to a file that does not exist."""
    (folder / "nowhere.txt").symlink_to(folder / "gone")


def device(folder: Path) -> None:
    """A link to a device without end."""
    (folder / "zero.txt").symlink_to("/dev/zero")


def folder_loop(folder: Path) -> None:
    """A folder that contains itself."""
    (folder / "again").symlink_to(folder)


def folder_like_a_file(folder: Path) -> None:
    """A folder whose name ends in .txt."""
    (folder / "folder.txt").mkdir()


def not_utf8_name(folder: Path) -> None:
    """A name that is no UTF-8."""
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text(TEXT)


def strange_names(folder: Path) -> None:
    """Names with blanks, quotes, line breaks, equals signs, commas and markup."""
    for name in ("a b", "it's", 'quo"te', "new\nline", "a=b,c", "<b>bold", "${seed}", "-rf", "x" * 200, "名前"):
        (folder / f"{name}.txt").write_text(TEXT)


def empty_files(folder: Path) -> None:
    """Files without content."""
    for number in range(5):
        (folder / f"empty{number}.txt").touch()


def binary(folder: Path) -> None:
    """Bytes that are no text."""
    (folder / "noise.txt").write_bytes(bytes(range(256)) * 40)


def one_line(folder: Path) -> None:
    """A long text in a single line, without an end."""
    (folder / "line.txt").write_text(TEXT.replace("\n", " ") * 50)


def other_encodings(folder: Path) -> None:
    """UTF-16 with its mark, Latin-1, and the ends of lines of other systems."""
    (folder / "utf16.txt").write_bytes(TEXT.encode("utf-16"))
    (folder / "latin1.txt").write_bytes(("café " * 100).encode("latin-1"))
    (folder / "windows.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    (folder / "mac.txt").write_bytes(TEXT.replace("\n", "\r").encode())


def many_files(folder: Path) -> None:
    """Thousands of tiny files."""
    for number in range(3000):
        (folder / f"tiny{number}.txt").write_text("a\n")


READ = (
    folder_loop,
    folder_like_a_file,
    not_utf8_name,
    strange_names,
    empty_files,
    binary,
    one_line,
    other_encodings,
    many_files,
)
REFUSED = (fifo, link_to_itself, broken_link, device)


def campaign(count: int | None, seed: int) -> list[Case]:
    """Prepare and train on each kind of text, in one folder and in train/ valid/ test/."""
    cases = [prepared(hostile, split) for hostile in (*READ, *REFUSED) for split in (False, True)]
    return cases[:count]


def prepared(hostile: Hostile, split: bool) -> Case:
    """Put ordinary text and something hostile into a folder, and run a model on it to the report."""
    with tempfile.TemporaryDirectory() as temporary:
        text = Path(temporary) / "text"
        folders = [text / name for name in ("train", "valid", "test")] if split else [text]
        for folder in folders:
            folder.mkdir(parents=True)
            for number in range(4):
                (folder / f"plain{number}.txt").write_text(TEXT)
        hostile(folders[0])
        words = ["experiment=trime", "size=tiny", "train.updates=1", "logger=none", "trainer.enable_progress_bar=false"]
        words += [
            "dataset=folder_words",
            f"dataset.path={text}",
            f"paths.data={temporary}/data",
            f"paths.outputs={temporary}/out",
        ]
        config = compose_config(*words, "vocabulary.min_count=0", "evaluate.tokens=200")
        made = Path(temporary) / "out" / "runs"

        def action() -> bool:
            run(config)
            return any(made.rglob("results.json"))

        return attempt(f"{hostile.__name__}{' in train/' * split}", action, str(text), hostile in READ or None)
