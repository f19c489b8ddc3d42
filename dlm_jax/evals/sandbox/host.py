"""Examines programs that a model wrote, several at a time; what they do harms nothing and cannot make them pass.

A program and its tests run in two processes, each with nothing of this machine but a processor for a while (`confine`):
the examiner calls the program's functions through a pipe (`inside`) and compares plain values (`wire`). A program
passes where its examiner says so in time; one that exits, hangs, closes its pipes or patches its interpreter does not.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_SCRIPT = Path(__file__).with_name("inside.py")
_REFUSED = 97  # exit code of `inside` that could not be confined
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may use, and its examiner.

    Attributes:
      seconds: of processor time, a process.
      wall_seconds: until both are killed.
      memory: bytes of addresses, a process.
      processes: and threads at one time, all of a program's.
      file_size: bytes, a file.
      disk: bytes of all files, which lie in memory.
      open_files: at one time, a process.
    """

    seconds: int = 5
    wall_seconds: float = 30.0
    memory: int = 1 << 29
    processes: int = 8
    file_size: int = 1 << 24
    disk: int = 1 << 25
    open_files: int = 32

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} = {getattr(self, field.name)}: expected more than 0")


@dataclasses.dataclass(frozen=True)
class Exam:
    """A program and its tests.

    Attributes:
      program: its source.
      tests: source of its tests, whose names are the program's where nobody else has them.
      names: the program's in any case, though builtins or the prelude have them too.
      setup: source that is run behind the program's, beside it.
      prelude: source that is run before the tests, beside them.
    """

    program: str
    tests: str
    names: tuple[str, ...] = ()
    setup: str = ""
    prelude: str = ""


class Outcome(NamedTuple):
    """What came of an exam.

    Attributes:
      passed: whether every test did.
      reason: why not, in words; empty where it did.
    """

    passed: bool
    reason: str


@functools.cache
def refusal() -> str | None:
    """Returns what keeps this machine from confining a process, in words; None where nothing does."""
    with _folder(confined=True) as root:
        done = subprocess.run(_command("program", root, Limits()), env=_ENVIRONMENT, stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=60, check=False)
    if done.returncode == 0:
        return None
    return json.loads(done.stdout)["refused"] if done.returncode == _REFUSED else done.stderr.decode()[-300:]


def check(confined: bool = True) -> None:
    """Raises ValueError where programs are to be confined on a machine that cannot do so.

    Args:
      confined: as in `examine`.
    """
    if confined and refusal() is not None:
        raise ValueError(f"programs cannot be confined here ({refusal()}): no network, no files but their own and no "
                         "other process take Linux 5.12 or later that lets this user make namespaces. Run on such a "
                         "machine, or, where nothing is worth harming, unconfined, with limits alone")


def examine(
    exams: Sequence[Exam], limits: Limits = Limits(), *, workers: int | None = None, confined: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Runs programs and tells which pass their tests.

    Args:
      exams: the programs with their tests.
      limits: of each.
      workers: exams at one time; default the machine's processors.
      confined: False leaves a program the network, all files of this user and his processes; `limits` hold still, but
        for those of disk and, for root, of processes.
      progress: called after every exam with their number so far.

    Returns:
      An outcome for each, in order.

    Raises:
      ValueError: programs cannot be confined here.
    """
    check(confined)
    with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        started = [pool.submit(_examine, exam, limits, confined) for exam in exams]
        for number, _ in enumerate(concurrent.futures.as_completed(started), 1):
            if progress is not None:
                progress(number)
    return [each.result() for each in started]


def _examine(exam: Exam, limits: Limits, confined: bool) -> Outcome:
    job = {"program": [exam.program, exam.setup], "tests": exam.tests, "names": exam.names, "prelude": exam.prelude}
    with contextlib.ExitStack() as stack:
        requests, answers = stack.enter_context(_pipe()), stack.enter_context(_pipe())
        folders = [stack.enter_context(_folder(confined)) for _ in range(2)]
        stack.enter_context(_started(
            _command("program", folders[0], limits, confined=confined), folders[0],
            stdin=requests.read, stdout=answers.write))
        examiner = stack.enter_context(_started(
            _command("examiner", folders[1], limits, answers.read, requests.write, confined=confined), folders[1],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(answers.read, requests.write)))
        requests.close()
        answers.close()
        try:
            said, _ = examiner.communicate(json.dumps(job).encode(), timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"no end within {limits.wall_seconds} seconds")
    if examiner.returncode == _REFUSED:
        raise ValueError(f"a program could not be confined: {json.loads(said)['refused']}")
    return Outcome(**json.loads(said)) if said else Outcome(False, "the examiner ended without a verdict")


def _command(role: str, folder: str, limits: Limits, *numbers: int, confined: bool = True) -> list[str]:
    # neither site-packages nor the current directory: a program has the standard library
    return [sys.executable, "-s", "-S", "-B", "-P", str(_SCRIPT), role, folder if confined else "",
            json.dumps(dataclasses.asdict(limits)), *map(str, numbers)]


class _Pipe:
    """Two ends of a pipe, closed once."""

    def __init__(self):
        self.read, self.write = os.pipe()
        self._open = True

    def close(self) -> None:
        if self._open:
            os.close(self.read)
            os.close(self.write)
        self._open = False


def _pipe() -> contextlib.closing[_Pipe]:
    return contextlib.closing(_Pipe())


@contextlib.contextmanager
def _folder(confined: bool) -> Iterator[str]:
    """A new folder; what a confined process mounts over it, nobody else sees."""
    with tempfile.TemporaryDirectory(prefix="exam", ignore_cleanup_errors=True) as made:
        os.chmod(made, 0o755 if confined else 0o700)
        yield made


@contextlib.contextmanager
def _started(command: list[str], folder: str, **streams) -> Iterator[subprocess.Popen]:
    """A process that is killed with its group at the end; a confined one's children die with it wherever they went."""
    process = subprocess.Popen(command, cwd=folder, env=_ENVIRONMENT, stderr=subprocess.DEVNULL, start_new_session=True,
                               **streams)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
