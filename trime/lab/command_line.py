"""The command line: Hydra's, with every mistake of a user as one line."""

from __future__ import annotations

import difflib
import errno
import os
import re
import shlex
import sys
import traceback
from pathlib import Path

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to main() below, which prints one line
os.environ["MPLBACKEND"] = "agg"  # pictures are files; a notebook's own backend is not known here
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # silences a harmless warning of the gradient reducer

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from trime.common.choices import THREADS
from trime.config.check import validate
from trime.config.compose import compose_config
from trime.config.folder import CONF, PROGRAM
from trime.config.help import groups, schema_entries
from trime.errors import UserError, install_command
from trime.lab.sweep import Jobs, read_job_results, report_jobs

SETTINGS_ERRORS = ("MisconfigurationException", "UsageError", "AuthenticationError")  # of Lightning and W&B, not imported here
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
LOST_JOBS = ("TerminatedWorkerError", "BrokenProcessPool", "UncompletedJobError", "FailedJobError")  # of joblib and submitit


def format_error(error: BaseException) -> str:
    """Return a user's mistake as one line; re-raise any other error, which is a defect and keeps its traceback."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    messages = map(str, causes)
    full = any(getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for cause in causes)
    # safetensors, FAISS and NumPy's tofile say it in words
    if full or any(re.search("No space left|os error 28|write error in|requested and .* written", text) for text in messages):
        file = getattr(error, "filename2", None) or getattr(error, "filename", None) or "while writing"
        return f"the disk is full ({file}): free space or set paths.outputs and paths.data; the same command resumes"
    for cause in reversed(causes):
        if isinstance(cause, UserError):
            return one_line(cause)
    if isinstance(error, HydraException | OmegaConfBaseException):  # instantiate() wraps errors of constructors
        return one_line(causes[-1] if isinstance(causes[-1], ValueError) else error)
    if type(error).__name__ in SETTINGS_ERRORS:
        return one_line(error)
    for cause in causes:
        if isinstance(cause, FileNotFoundError):
            return f"{cause.strerror}: {cause.filename}" if cause.filename else one_line(cause)
        if isinstance(cause, OSError) and cause.errno in UNWRITABLE:
            remedy = "if it is to be written, choose another folder with paths.outputs, paths.data or report.keep"
            return f"{cause.strerror}: {cause.filename}: {remedy}"
    source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)  # Hydra, a sweeper or a launcher, not a job
    from_plugin = not {"hydra", "hydra_plugins", "optuna", "joblib", "submitit"}.isdisjoint(source.parts)
    if from_plugin and isinstance(error, ValueError | NotImplementedError | AssertionError):
        return f"{one_line(error)}: see hydra.sweeper and hydra.launcher"
    raise error


def one_line(error: BaseException) -> str:
    """Return an error's message with all white space collapsed."""
    return " ".join(str(error).split())


def limit_threads(words: list[str]) -> None:
    """Tell the libraries of ``threads=N`` before they are imported: their pools are made then."""
    counts = [word.partition("=")[2] for word in words if re.fullmatch(r"threads=[1-9]\d*", word)]
    os.environ.update({name: counts[-1] for name in THREADS if counts})


def check_text_exists(words: list[str]) -> None:
    """Raise UserError where a dataset's path names nothing: to import what would find that out takes longer than all else."""
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        key, _, value = word.partition("=")
        # Hydra answers a sweep, a path with a space, and whatever else it reads otherwise.
        is_plain = re.fullmatch(r"'[^']+'|[\w./~-]+", value, re.ASCII) and value != "null" and ("=" in after or after[0] == "-")
        if is_plain and re.fullmatch(r"(evaluate\.|datastore\.)?dataset\.path", key):
            path = Path(value.strip("'")).expanduser()
            if not path.exists():
                raise UserError(f"{key}={path}: there is no file or folder of that name")


def is_housekeeping(words: list[str]) -> bool:
    """Return whether a command only lists or deletes finished runs, which needs nothing that trains, nor a sweep."""
    stages = [re.fullmatch(r"stages=\[([\w, ]+)\]", word) for word in words if word.startswith("stages=")]
    named = {name.strip() for found in stages if found for name in found[1].split(",")}
    others = any(word.startswith(("-", "report.", "hydra", "experiment=", "table=")) for word in words)
    return len(stages) == 1 and bool(named) and named <= {"list", "disk", "prune"} and not others


def run_housekeeping(words: list[str]) -> int:
    """Run a command that only lists or deletes runs, composed once and without Hydra's job; return the exit status."""
    from trime.lab.storage import DISK, LIST, PRUNE

    config = compose_config(*words)
    try:
        validate(config)
        for stage in (LIST, DISK, PRUNE):
            if stage.standalone and stage.name in config.stages:
                stage.standalone(config)
    except Exception as error:
        print(f"error: {format_error(error)}", file=sys.stderr)
        return 1
    return 0


def message_of(error: BaseException) -> str:
    """Return one line for a command that Hydra refuses, with a similar name where one of its words has none that exists."""
    if isinstance(error, MissingConfigException):
        missing = error.missing_cfg_file or ""
        choices = ", ".join(groups().get(missing.rpartition("/")[0], {}))
        return f"there is no {missing}{similar(missing) or f': choose from {choices}'}"
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals:
            written = "settings are written KEY=VALUE, and a value with a space is quoted"
            return f"{key}: {written}{similar(f'experiment/{key}')}"
        if value.startswith(("[", "{")):
            return f"{error.override} cannot be read: its brackets do not match"
        text = re.sub(r"(\\+)$", r"\1\1", value.strip('"').replace('"', '\\"'))  # the last quote must not be escaped
        quoted = shlex.quote(f'{key}="{text}"')
        return f"{error.override} cannot be read: a text with such marks is quoted, {quoted}"
    if several := re.search(r"Ambiguous value for argument '(\S+)'", str(error)):
        key, _, values = several[1].partition("=")
        listed = "" if key in groups() else f", or write {key}=[{values}] for a list"
        return f"{several[1]} has several values: add -m for a run with each{listed}"
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        return f"there is no setting {unknown[1]}{similar(unknown[1])}"
    return one_line(error)


def similar(name: str) -> str:
    """Ask for the name that is most like an unknown one, of settings, groups and choices as GROUP/NAME; empty if none is."""
    choices = [f"{group}/{choice}" for group, files in groups().items() for choice in files]
    near = difflib.get_close_matches(name, [*schema_entries(), *groups(), *choices], 1, cutoff=0.8)
    return f": is it {near[0].replace('/', '=', 1)}?" if near else ""


def run_jobs() -> bool:
    """Run the command's single job, or every job of its sweep, and report them; return True if all of it succeeded."""
    jobs, failed = Jobs(format_error), False
    try:
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(jobs)()
    except (HydraException, OmegaConfBaseException):
        raise
    except Exception as error:
        died = f"the process of a job died ({one_line(error)[:200]}): the same command resumes"
        message = died if type(error).__name__ in LOST_JOBS else format_error(error)
        print(f"error: {message}", file=sys.stderr)
        failed = True
    results = [*jobs.results, *read_job_results()]
    if not results and not failed and (patterns := [word for word in sys.argv[1:] if "glob(" in word]):
        print(f"error: nothing matches {' '.join(patterns)}, so nothing was run", file=sys.stderr)
        return False
    try:
        report_jobs(results)
    except Exception as error:
        print(f"error: {format_error(error)}", file=sys.stderr)
        failed = True
    return not failed and not any(result.error for result in results)


def main() -> int:
    """Run the command line; return the exit status, 1 if a run failed."""
    limit_threads(sys.argv[1:])
    try:
        check_text_exists(sys.argv[1:])
        if is_housekeeping(sys.argv[1:]):
            return run_housekeeping(sys.argv[1:])
        return 0 if run_jobs() else 1
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    except (HydraException, OmegaConfBaseException) as error:
        plugins = ("hydra/sweeper/optuna", "hydra/launcher/joblib", "hydra/launcher/submitit")
        not_installed = any(name in str(error) for name in plugins)
        remedy = install_command("sweep") if not_installed else f"{' '.join(PROGRAM)} --help lists groups and keys"
        print(f"error: {message_of(error)} ({remedy})", file=sys.stderr)
        return 1
    except BrokenPipeError:
        try:
            sys.stdout.flush()  # text that could not be written is still to be flushed
        except BrokenPipeError:  # as of `stages=[list] | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is flushed to the pipe at exit
            return 141
        raise
    except KeyboardInterrupt:
        print("interrupted: the same command resumes", file=sys.stderr)
        return 130
