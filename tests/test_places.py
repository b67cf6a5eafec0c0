"""Folders at URLs: copied whole, both ways; on a shared disk, in memory, and on an S3 server of this machine."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock
from uuid import uuid4

import numpy as np
import pytest

from trime import places
from trime.errors import UserError
from trime.memory.retrieval.sharded import download_rows
from trime.places import Place, complete_files, local_copy

KEY = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Start an S3 server and yield the URL of a bucket there."""
    moto, s3fs = (pytest.importorskip(name, reason=f"{name} is not installed") for name in ("moto.server", "s3fs"))
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (KEY | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
            patch.setenv(name, value)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("lab")
        yield "s3://lab"
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv(places.COPIES, str(tmp_path / "copies"))
    if request.param == "s3":
        return Place(f"{request.getfixturevalue('s3')}/{uuid4().hex}")
    return Place(f"file://{tmp_path}/disk") if request.param == "file" else Place(f"memory://{uuid4().hex}/disk")


def written(folder: Path, **files: str) -> Path:
    """Write files, whose names have _ for a slash, and return the folder."""
    for name, content in files.items():
        path = folder / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_files_go_there_and_come_back(place: Place, tmp_path: Path) -> None:
    """Neither locks nor what is being written; what has changed there is copied again, what has not is left alone."""
    source = written(tmp_path / "source", a="1", inner_b="22", c="3")
    (source / "c").rename(source / "c.partial")
    (source / ".x.lock").touch()
    assert complete_files(source) == ["a", "inner/b"]
    assert place.files() == {}
    place.check()
    place.upload(complete_files(source), source)
    assert {name: file.size for name, file in place.files().items() if name != ".trime"} == {"a": 1, "inner/b": 2}
    assert local_copy(f"{place.address}/inner/b").read_text() == "22"
    place.download()
    assert (place.local / "a").read_text() == "1" and not [*place.local.rglob("*.partial")]
    modified = (place.local / "a").stat().st_mtime_ns
    place.download()
    assert (place.local / "a").stat().st_mtime_ns == modified
    (source / "a").write_text("4")
    os.utime(place.local / "a", (1, 1))  # a copy of long ago
    place.upload(["a", "missing"], source)
    place.download(["a", "missing"])
    assert (place.local / "a").read_text() == "4"
    assert (place / "inner").read_bytes("b", 1, 9) == b"2"
    place.remove(["a"])
    assert "a" not in place.files()


def test_a_path_is_itself(tmp_path: Path) -> None:
    for path in ("outputs", "/a/b.c", "~/x", "C:/x"):
        assert not Place(path).is_remote and Place(path).local == Path(path).expanduser()
    assert (Place("outputs") / "a").local == Path("outputs/a") and local_copy(tmp_path) == tmp_path


def test_a_copy_lies_below_the_folder_of_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(places.COPIES, str(tmp_path))
    assert (Place("s3://bucket/a/") / "b").address == "s3://bucket/a/b"
    assert Place("s3://bucket/a/").local == tmp_path / "s3" / "bucket" / "a"
    assert Place("file:///../../etc/x").local == tmp_path / "file" / "etc" / "x"


def test_what_lies_there_no_longer_leaves_the_copy(place: Place, tmp_path: Path) -> None:
    """A later command reads what is there then; files of this machine that were not copied from there stay."""
    place.upload(["a", "b"], written(tmp_path / "source", a="1", b="2"))
    copy = local_copy(place.address)
    written(copy, own="3")
    place.remove(["a"])
    places.fetch_once.cache_clear()
    assert local_copy(place.address) == copy and {path.name for path in copy.iterdir()} == {"b", "own"}
    place.remove(["b"])
    places.fetch_once.cache_clear()
    with pytest.raises(UserError, match="does not exist"):
        local_copy(place.address)


def test_copies_need_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(f"memory://{uuid4().hex}")
    place.upload(["a"], written(tmp_path, a="1"))
    monkeypatch.setenv(places.COPIES, str(tmp_path / "a"))
    with pytest.raises(UserError, match="set TRIME_CACHE"):
        place.download()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("unknown://x", "unknown.*s3://"),
        ("memory://nothing/x", "does not exist"),
        ("file:///dev/null/x", "does not exist"),
        ("ftp://127.0.0.1:9/x", "refused"),
    ],
)
def test_what_does_not_exist_is_told(address: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        local_copy(address)


@pytest.mark.parametrize("address", ["unknown://x", "file:///dev/null/x"])
def test_what_cannot_be_written_is_told(address: str) -> None:
    with pytest.raises(UserError, match=address):
        Place(address).check()


def test_a_full_disk_is_no_fault_of_the_storage(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place.upload(["a"], written(tmp_path / "source", a="1"))
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(place.system[0], "get_file", full)
    with pytest.raises(OSError, match="No space"):
        place.download()
    assert not (place.local / "a").exists()


def test_a_name_that_leaves_the_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(f"memory://{uuid4().hex}")
    system, root = place.system
    monkeypatch.setattr(type(system), "find", lambda *args, **more: {f"{root}/../../x": {"size": 1}})
    with pytest.raises(UserError, match=r"names with '\.\.'"):
        place.download()


def test_what_is_being_made_is_copied_now_and_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And when it fails, so that another machine goes on with all of it."""
    place, sent = Place(f"memory://{uuid4().hex}"), threading.Event()
    upload = Place.upload

    def told(self: Place, *args: object) -> None:
        upload(self, *args)  # type: ignore[arg-type]
        sent.set()

    monkeypatch.setattr(places, "MIRROR", 0.01)
    monkeypatch.setattr(Place, "upload", told)
    with pytest.raises(KeyboardInterrupt), place.mirrored(written(tmp_path / "made", a="1")):
        assert sent.wait(60) and [*place.files()] == ["a"]
        monkeypatch.setattr(places, "MIRROR", 1e9)
        written(tmp_path / "made", b="2")
        raise KeyboardInterrupt
    assert {*place.files()} == {"a", "b"}


def test_rows_of_an_array_are_copied_alone(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trime.memory.retrieval.sharded.BLOCK", 100)  # several blocks
    array = np.random.default_rng(0).random((5000, 3)).astype(np.float16)
    (tmp_path / "source").mkdir()
    np.save(tmp_path / "source" / "key.npy", array)
    place.upload(["key.npy"], tmp_path / "source")
    for first, last in ((0, 1), (1700, 2345), (4999, 5000), (0, 5000), (7, 7)):
        download_rows(place, "key.npy", first, last, tmp_path)
        copy = np.load(tmp_path / "key.npy", mmap_mode="r")
        assert copy.shape == array.shape and (copy[first:last] == array[first:last]).all()
        assert not copy[:first].any() and not copy[last:].any()
