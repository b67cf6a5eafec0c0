"""Task 1 of Multi30k (Elliott et al. 2016): captions in German and English, 29,000 training pairs."""

from __future__ import annotations

import gzip
import shutil
import zlib
from pathlib import Path
from typing import ClassVar

from trime.common.io import locked, replacing
from trime.data.datasets.base import SPLITS
from trime.data.datasets.download import checksum, fetch
from trime.errors import UserError
from trime.translation.pairs.folder import ParallelFolder

SOURCES = (
    "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{name}.gz",
    "https://github.com/multi30k/dataset/raw/master/data/task1/raw/{name}.gz",
)
DIGESTS = {  # SHA-256 of the unpacked files
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
}


class Multi30k(ParallelFolder):
    """Multi30k from ``path`` (train.de, val.de, test_2016_flickr.de and the same in English) or downloaded to ``cache``."""

    names: ClassVar[dict[str, tuple[str, ...]]] = {
        "train": ("train",),
        "valid": ("val", "valid"),
        "test": ("test_2016_flickr", "test"),
    }

    def __init__(self, cache: str, path: str | None = None, source: str = "de", target: str = "en"):
        super().__init__(path, source, target, "multi30k")
        self.cache = Path(cache) / "multi30k"

    @property
    def location(self) -> Path:
        """The folder named by ``path``, or the one with the downloaded files."""
        if self.path is not None:
            return super().location
        names = [f"{self.names[split][0]}.{language}" for split in SPLITS for language in self.languages]
        if missing := [name for name in names if not (self.cache / name).exists()]:
            self.cache.mkdir(parents=True, exist_ok=True)
            with locked(self.cache / ".lock", f"downloading {self.cache}"):
                for name in missing:
                    download(name, self.cache / name)
        return self.cache


def download(name: str, target: Path) -> None:
    """Download and unpack one file, unless it exists; UserError where its content is not the published one."""
    if target.exists():  # another process may have finished it
        return
    packed = fetch([source.format(name=name) for source in SOURCES], None, target.with_name(f"{name}.gz"))
    with replacing(target) as partial:
        try:
            with gzip.open(packed) as content, open(partial, "wb") as out:
                shutil.copyfileobj(content, out)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{packed} is not a complete gzip file ({error}): delete it, or put {name} at {target}") from None
        if checksum(partial, "sha256") != f"sha256:{DIGESTS.get(name)}":
            raise UserError(f"{packed} is not the published {name}: delete it, or put {name} at {target}")
    packed.unlink()
