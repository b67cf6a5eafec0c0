"""Download a dataset's archive: from several sources, with checksum, progress bar and resume."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from trime.common.io import lock_of, locked, partial_of
from trime.common.progress import Progress
from trime.errors import UserError

CHUNK = 2**20


def fetch(urls: list[str], digest: str | None, target: Path) -> Path:
    """Return the file at ``target``, downloaded from the first source that works; an interrupted download is resumed.

    ``digest`` is "algorithm:hex", or None where the caller checks the content. Raises UserError where no source provides
    the file.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(target)
    reasons = []
    for url in urls:
        if digest is None:  # without a digest, parts of two sources could be mixed unnoticed
            partial.unlink(missing_ok=True)
        try:
            download(url, partial)
            if digest is None or checksum(partial, digest.split(":")[0]) == digest:
                partial.replace(target)
                return target
            partial.unlink()
            reasons.append(f"{url}: wrong checksum")
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reasons.append(f"{url}: {getattr(error, 'reason', error)}")
    raise UserError(
        f"no source provided {target.name} ({'; '.join(reasons)}): put that file ({digest or target.stem}) at {target}"
    )


def download(url: str, partial: Path) -> None:
    """Download the missing part of a file and append it to ``partial``."""
    done = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is missing
            return
        raise
    # A server that ignores Range answers 200 with the whole file, which then replaces the part.
    done = done if response.status == 206 else 0
    with response, open(partial, "ab" if done else "wb") as file:
        length = int(response.headers.get("Content-Length") or 0)
        with Progress(total=length or None, unit="B", unit_scale=True, desc=f"fetch {url.rsplit('/', 1)[-1]}") as bar:
            while block := response.read(CHUNK):
                file.write(block)
                bar.update(len(block))
        if file.tell() - done < length:
            raise ConnectionError("the connection broke off")


def fetch_folder(urls: list[str], digest: str, archive: Path, folder: Path) -> Path:
    """Return a folder with the content of a zip archive, which is fetched if need be; UserError where the archive is broken."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock_of(folder), f"downloading {folder}"):
        if folder.is_dir():
            return folder
        # The folder gets its name when all of it is there: another process may already wait to read it.
        archive, partial = fetch(urls, digest, archive), partial_of(folder)
        try:
            with zipfile.ZipFile(archive) as file:
                file.extractall(partial)
        except zipfile.BadZipFile:
            raise UserError(
                f"{archive} is not a complete zip file: delete it, and run again or put the right one there"
            ) from None
        return partial.replace(folder)


def checksum(path: Path, algorithm: str) -> str:
    """Return the digest of a file as "algorithm:hex"."""
    with open(path, "rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"
