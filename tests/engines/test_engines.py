"""Engines make every part once, whoever dies meanwhile; artefacts are the same bytes as those of one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.conftest import ROOT
from tests.helpers.parts import cut_small, open_part_files, open_small_parts
from trime.engines.base import Engine, Job
from trime.engines.local import Local
from trime.engines.processes import Processes, device_names
from trime.errors import UserError
from trime.pipeline.manifest import MANIFEST
from trime.plan import language_model
from trime.plan.language_model import Plan
from trime.run.runner import run
from trime.stages import encode, pack, scoring

PARTS = [2, 3, 5, 8]


def made(engine: Engine, job: Job) -> list[int]:
    """Run a job and return how much work it reported, in order of size."""
    amounts: list[int] = []
    engine.run(job, open_part_files(job), PARTS, amounts.append)
    return sorted(amounts)


def test_one_process_makes_all_parts(tmp_path: Path) -> None:
    assert made(Local(), Job(open_part_files, "", "encode", "x", tmp_path)) == [1, 1, 1, 1, *PARTS]
    assert {(tmp_path / str(number)).read_text().split()[0] for number in PARTS} == {str(os.getpid())}


def test_several_processes_make_each_part_once(tmp_path: Path) -> None:
    """They open the job once each, have the threads that were asked for, and leave this process's environment as it was."""
    before = dict(os.environ)
    amounts = made(Processes(2, threads=3), Job(open_part_files, "", "encode", "x", tmp_path))
    assert amounts == [number + 1 for number in PARTS] and dict(os.environ) == before
    lines = [(tmp_path / str(number)).read_text().split() for number in PARTS]
    workers = {process for process, _ in lines}
    assert str(os.getpid()) not in workers and 1 <= len(workers) <= 2 and {threads for _, threads in lines} == {"3"}
    assert {file.name for file in tmp_path.glob("opened-*")} == {f"opened-{process}" for process in (*workers, os.getpid())}


@pytest.mark.parametrize("visible, names", [(None, ["0", "1"]), ("2,3,5", ["2", "3"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])])
def test_workers_have_the_devices_that_this_process_may_use(
    visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_names(2) == names
    if visible is not None:
        with pytest.raises(UserError, match=r"lower engine\.devices"):
            device_names(4)


def test_a_single_part_needs_no_other_process(tmp_path: Path) -> None:
    job = Job(open_part_files, "", "encode", "x", tmp_path)
    Processes(2).run(job, open_part_files(job), [5], lambda amount: None)
    assert (tmp_path / "5").read_text().split()[0] == str(os.getpid())


def test_a_worker_that_dies_costs_its_parts_only(tmp_path: Path) -> None:
    assert made(Processes(2), Job(open_part_files, "death", "encode", "x", tmp_path)) == [number + 1 for number in PARTS]
    assert (tmp_path / "death").exists() and all((tmp_path / str(number)).exists() for number in PARTS)


def test_workers_that_always_die_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"workers died 4 times.*engine\.workers"):
        made(Processes(2), Job(open_part_files, "always", "encode", "x", tmp_path))


def test_a_mistake_is_told_as_in_one_process(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="part 3 is a mistake"):
        made(Processes(2), Job(open_part_files, "mistake", "encode", "x", tmp_path))


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests.helpers.parts import open_part_files
from trime.engines.base import Job
from trime.engines.processes import Processes
if __name__ == "__main__":
    job = Job(open_part_files, "slow", "encode", "x", Path({str(tmp_path)!r}))
    Processes(2).run(job, None, [1, 2], print)
"""
    (tmp_path / "start.py").write_text(script)
    command = subprocess.Popen([sys.executable, str(tmp_path / "start.py")], env=os.environ | {"PYTHONPATH": str(ROOT)})
    wait_until(lambda: len([*tmp_path.glob("opened-*")]) == 2)
    workers = [int(file.name.partition("-")[2]) for file in tmp_path.glob("opened-*")]
    command.kill()
    command.wait()
    wait_until(lambda: not any(is_running(process) for process in workers))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after some minutes."""
    for _ in range(1800):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it never came true")


def is_running(process: int) -> bool:
    """Return True unless a process has ended, whether or not its end was taken note of."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_artefacts_are_the_same_by_several_processes(
    name: str, tiny: Callable[..., DictConfig], text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ray":
        pytest.importorskip("ray", reason="pip install -e '.[cluster]'").shutdown()
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for module, setting in ((encode, "SHARD"), (pack, "QUERIES"), (scoring, "PART")):
        monkeypatch.setattr(module, setting, getattr(module, setting))  # restored after the test
    cut_small()
    monkeypatch.setattr(language_model, "open_job", open_small_parts)
    contents = []
    text = "dataset=folder", f"dataset.path={text_folder}", f"paths.data={tmp_path}/data"
    for engine, stages in (
        ("local", "prepare,pack,fit,encode,datastore,tune,evaluate"),
        (name, "pack,encode,datastore,tune,evaluate"),
    ):
        config = tiny(
            *(
                "experiment=trime_ext",
                "batching.k=2",
                "index.factory=Cells16",
                f"paths.outputs={tmp_path}/outputs",
            ),
            *(*text, f"engine={engine}", f"stages=[{stages}]"),
        )
        run(config)
        plan = Plan(config)
        made = [
            plan.pack,
            plan.valid,
            plan.memories.datastores[0].store,
            plan.memories.datastores[0].index,
            *plan.tune.build_order(),
            plan.test,
            plan.evaluate,
        ]
        made += [plan.subsets.mixtures, plan.subsets]
        contents.append({file.relative_to(tmp_path): content(file) for artefact in made for file in artefact.path().iterdir()})
        for artefact in made:
            shutil.rmtree(artefact.folder)
    assert len(contents[0]) > 10 and contents[0].keys() == contents[1].keys()
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []


def content(file: Path) -> Any:
    """Return what a file holds, without what was measured while it was made."""
    if file.name == MANIFEST:
        return None
    return file.read_bytes() if file.suffix != ".json" else without_measured(json.loads(file.read_text()))


def without_measured(content: Any) -> Any:
    """Return JSON without times and memory."""
    if isinstance(content, list):
        return [*map(without_measured, content)]
    measured = {"seconds", "build_seconds", "tokens_per_second", "peak_memory_mb"}
    measured |= {"encode_seconds_per_token", "seconds_per_token", "processor_seconds", "processor_ms_per_token"}
    return (
        {name: without_measured(content[name]) for name in content.keys() - measured} if isinstance(content, dict) else content
    )
