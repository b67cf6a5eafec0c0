"""Cut a folder into parcels that a call to a borrowed machine can carry, and put it together there.

``python -m benchmarks.parcels cut FOLDER PARCELS`` writes PARCELS/NNN.bin of at most 60 MiB and PARCELS/parcels.json;
``python -m benchmarks.parcels join PARCELS FOLDER`` checks each of them, and writes the folder when all are there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import xxhash

from trime.common.io import replacing, write_atomically
from trime.errors import UserError

SIZE = 60 * 2**20  # bytes of a parcel
LIST = "parcels.json"


def cut(folder: Path, parcels: Path, size: int = SIZE) -> None:
    """Write the files of a folder, one after the other, into parcels."""
    parcels.mkdir(parents=True, exist_ok=True)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    if not files:
        raise UserError(f"{folder} holds no files")
    content: dict[str, Any] = {"files": {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}}
    checksums, waiting = [], bytearray()

    def close() -> None:
        checksums.append(xxhash.xxh3_64_hexdigest(waiting))
        with replacing(parcels / f"{len(checksums) - 1:03d}.bin") as aside:
            aside.write_bytes(waiting)
        waiting.clear()

    for file in files:
        with file.open("rb") as source:
            while block := source.read(size - len(waiting)):
                waiting += block
                if len(waiting) == size:
                    close()
    if waiting or not checksums:
        close()
    write_atomically(parcels / LIST, json.dumps(content | {"checksums": checksums}))


def join(parcels: Path, folder: Path) -> None:
    """Write the folder that was cut; UserError names a parcel that is missing or not as it was written."""
    content = json.loads((parcels / LIST).read_text())
    names = [f"{number:03d}.bin" for number in range(len(content["checksums"]))]
    for name, checksum in zip(names, content["checksums"], strict=True):
        if not (parcels / name).is_file():
            raise UserError(f"{parcels / name} is not there yet: carry it, and join again")
        if xxhash.xxh3_64_hexdigest((parcels / name).read_bytes()) != checksum:
            raise UserError(f"{parcels / name} is damaged: carry it again")
    whole = b"".join((parcels / name).read_bytes() for name in names)
    begin = 0
    for name, size in content["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder / name) as aside:
            aside.write_bytes(whole[begin : begin + size])
        begin += size


if __name__ == "__main__":
    try:
        _, verb, source, target = sys.argv
        cut(Path(source), Path(target)) if verb == "cut" else join(Path(source), Path(target))
    except ValueError:
        sys.exit(__doc__)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
