"""Shared fixtures: configurations composed as the command line composes them, and one folder for tiny artefacts."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TextIO

import jaxtyping
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import trime.config.compose  # noqa: F401  the schema, which Hydra composes
from trime.common.io import replacing
from trime.config.folder import CONF

ROOT = Path(__file__).parents[1]
EVERY = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))  # experiments
SHARED = Path(os.environ.get("TRIME_SHARED", ROOT.parent / "shared"))
sys.path.insert(0, str(ROOT))
NO_PICTURES = [f"report.figures.{name}=null" for name in ("picture", "memories", "analysis")]  # half of a small run's time
Tiny = Callable[..., DictConfig]  # the fixture ``tiny``
SHARED_BY_PROCESSES: dict[str, Path] = {}  # the folder of shared_configurations, if there is one
pytest_plugins = ["tests.helpers.runs"]
# Where the types and shapes of every call are checked: a check takes longer than many a tensor operation of a small run.
CHECKED = re.compile(r"tests/(golden|memory|text_memory|models|scoring|training|decoding)/|test_(laws|contracts)|slow")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported first


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check types and shapes in numerical tests, and in all of ``make test-slow``."""
    where = f"{item.nodeid} {item.config.option.markexpr if item.config.option.markexpr == 'slow' else ''}"
    jaxtyping.config.update("jaxtyping_disable", not CHECKED.search(where))


@cache
def pickled(overrides: tuple[str, ...], return_hydra: bool) -> bytes:
    """Return the configuration of a command line, which the processes of a run compose once, or each of them does at once."""
    name = hashlib.sha256(repr((overrides, return_hydra)).encode()).hexdigest()
    folder = SHARED_BY_PROCESSES.get("composed")
    if folder and (folder / name).exists():
        return (folder / name).read_bytes()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        content = pickle.dumps(compose("config", list(overrides), return_hydra_config=return_hydra))
    if folder:
        with replacing(folder / name) as aside:
            aside.write_bytes(content)
    return content


@pytest.fixture(scope="session", autouse=True)
def shared_configurations(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Name the folder in which the processes of one test run share what Hydra has composed."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        SHARED_BY_PROCESSES["composed"] = folder = tmp_path_factory.getbasetemp().parent / "composed"
        folder.mkdir(exist_ok=True)


def is_value(override: str) -> bool:
    """Return True for ``key=value`` that sets a value: it neither chooses a yaml file, nor adds, deletes or sweeps."""
    key, _, value = override.partition("=")
    is_key = re.fullmatch(r"\w[\w.]*", key) is not None and not (CONF / key).is_dir()
    return is_key and "," not in re.sub(r"[\[{].*[\]}]", "", value)


def composed(*overrides: str, return_hydra: bool = False) -> DictConfig:
    """Return the configuration of a command line, which the caller may change.

    Composing takes a third of a second, so commands that choose the same files share it, and get their values as Hydra sets
    them. A value that does not fit is left to Hydra, for its message.
    """
    values = [override for override in overrides if is_value(override) and not return_hydra]
    chosen = tuple(override for override in overrides if override not in values)
    config: DictConfig = pickle.loads(pickled(chosen, return_hydra))
    try:
        for override in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    except (HydraException, OmegaConfBaseException):
        config = pickle.loads(pickled(overrides, return_hydra))
    return config


@cache
def experiment(name: str) -> DictConfig:
    """Return the configuration of an experiment, read-only."""
    config = composed(f"experiment={name}")
    OmegaConf.set_readonly(config, True)
    return config


@pytest.fixture(scope="session", autouse=True)
def float32() -> Iterator[None]:
    """Let models compute in float32 by default, whatever the processor multiplies in: other code's numbers are compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trime.common.cpu.multiplies_in_bfloat16", lambda: False)
        yield


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """Restore the precision of matrix products, which runs set for the whole process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


class Screen(logging.StreamHandler[TextIO]):
    """Writes messages to the standard output of the moment, which pytest may have replaced."""

    @property  # type: ignore[override]
    def stream(self) -> TextIO:
        """The standard output."""
        return sys.stdout

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore the stream that StreamHandler sets."""


@pytest.fixture(autouse=True)
def messages() -> None:
    """Send the package's messages to standard output, as on the command line, whatever a test has changed."""
    logger = logging.getLogger("trime")
    logger.setLevel(logging.INFO)
    logger.handlers = [Screen()]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give every test the same random state of torch, because tests run in random order (pytest-randomly)."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the session's artefacts, which all of its processes and tests have in common."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("trime")
    folder = tmp_path_factory.getbasetemp().parent / "trime"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def tiny(session_folder: Path) -> Tiny:
    """Return a function that composes an experiment at size=tiny with two updates, in the session's folder.

    A run draws no pictures unless it is asked for them.
    """

    def make(*overrides: str, return_hydra: bool = False, pictures: bool = False) -> DictConfig:
        fixed = ["size=tiny", "train.updates=2", "trainer.enable_progress_bar=false", "logger=none"]
        fixed += ["report.samples.passages=0", *([] if pictures else NO_PICTURES)]
        fixed += [f"paths.{name}={session_folder}/{name}" for name in ("data", "outputs")]
        return composed(*fixed, *overrides, return_hydra=return_hydra)

    return make


@pytest.fixture()
def text_folder(tmp_path: Path) -> Path:
    """Return a folder of text with train/ valid/ test/, some kilobytes in all."""
    text = "the cat sat on a mat and the dog ran to the house while it rained in May ."
    words = re.findall(r"\S+", text)
    for number, split in enumerate(("train", "valid", "test")):
        (tmp_path / "text" / split).mkdir(parents=True)
        for document in range(3):
            order = [words[(i * (7 + document + number) + i // 5) % len(words)] for i in range(600)]
            lines = [" ".join(order[i : i + 12]) for i in range(0, len(order), 12)]
            for suffix in ("txt", "py"):
                (tmp_path / "text" / split / f"{document}.{suffix}").write_text("\n".join(lines) + "\n")
    return tmp_path / "text"
