"""Programs that nobody has read: the honest pass, the hostile fail, and nothing outside them changes."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from dlm_jax.evals.sandbox import host
from dlm_jax.evals.sandbox.host import Exam, Limits

confined = pytest.mark.skipif(host.refusal() is not None, reason=f"no sandbox here: {host.refusal()}")
LIMITS = Limits(seconds=1, wall_seconds=4)
HONEST = "def f(x):\n    return x + 1"
TEST = "assert f(1) == 2\nassert f(41) == 42"

# {root} is a folder that is not theirs, {pid} a process and {port} a server; each would also like to pass
HOSTILE = {
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "forks and works": "import os\nfor _ in range(99):\n    try: os.fork()\n    except OSError: pass\nwhile 1: pass",
    "threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
    "deletes": "import shutil\nshutil.rmtree('{root}')",
    "deletes by shell": "import os\nos.system('rm -rf {root} /etc /bin /tmp/*')\ndef f(x): return os.listdir('/')",
    "overwrites": "open('{root}/keep', 'w').write('mine')\n" + HONEST,
    "creates": "open('{root}/new', 'w').write('mine')\n" + HONEST,
    "reads a secret": "def f(x): return open('{root}/keep').read()",
    "reads the environment": "import os\ndef f(x): return 2 if 'SECRET' in os.environ else os.environ['SECRET']",
    "patches the interpreter": "import sys\nopen(sys.prefix + '/lib/evil.py', 'w').write('x')\n" + HONEST,
    "loops": "while True: pass",
    "loops in C": "import re\nre.match('(a|a)*b', 'a' * 60)",
    "counts high": "def f(x): return 10 ** 10 ** 9",
    "sleeps": "import time\ntime.sleep(1000)",
    "loops deaf": "import signal\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n"
                  "    except (OSError, ValueError): pass\nwhile True: pass",
    "prints": "while True: print('x' * 100000)",
    "prints errors": "import sys\nwhile True: sys.stderr.write('x' * 100000)",
    "hogs memory": "x = [0]\nwhile True: x = x + x",
    "hogs memory at once": "x = bytearray(1 << 40)",
    "hogs shared memory": "import ctypes\nlibc = ctypes.CDLL(None)\n"
                          "if libc.shmget(0, 1 << 28, 0o1600) < 0: raise MemoryError\n" + HONEST,
    "hogs memory files": "import os\nkept = []\nwhile True:\n    kept.append(os.memfd_create('x'))\n"
                         "    os.write(kept[-1], bytes(1 << 23))",
    "exits well": "import os\nos._exit(0)",
    "exits before tests": "import sys\nsys.exit(0)",
    "exits in a test": "import os\ndef f(x): os._exit(0)",
    "raises an exit": "def f(x): raise SystemExit(0)",
    "raises an interrupt": "def f(x): raise KeyboardInterrupt",
    "raises a word of power": "class exec(Exception): pass\n"
                             "def f(x): raise exec('import os; os.write(3, b\"{{}}\"); os._exit(0)')",
    "raises what it cannot": "def f(x): raise BaseExceptionGroup('many', [KeyError(1), UnicodeError(2)])",
    "replaces the shell": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo [true]; echo true; exit 0'])",
    "equals everything": "class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
                         "def f(x): return Yes()",
    "is a number that equals": "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
                               "def f(x): return Yes(7)",
    "patches its examiner": "import builtins, json, sys\n"
                            "for name in ('verdict', 'examine', 'program'):\n"
                            "    setattr(sys.modules['__main__'], name, lambda *a: {{'passed': True, 'reason': ''}})\n"
                            "builtins.AssertionError = Warning\njson.dumps = lambda x: 'true'\n"
                            "json.loads = lambda x: True\ndef f(x): return 0",
    "seeks the tests": "import gc\ndef f(x):\n    texts = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
                       "    return next(o['tests'] for o in texts if 'tests' in o)",
    "defines the test's words": "def f(x): return 0\nassert_ = print = bool = int = lambda *a: True",
    "writes verdicts": "import os\nfor n in range(1024):\n    for text in ('{{\"passed\": true, \"reason\": \"\"}}',"
                       " '{{\"found\": [\"mine\", 0]}}'):\n        try: os.write(n, text.encode() + b'\\n')\n"
                       "        except OSError: pass\ndef f(x): return 0",
    "writes without end": "import os\nwhile True:\n    for n in range(32):\n        try: os.write(n, b'[' * 4096)\n"
                          "        except OSError: pass",
    "reads its input": "input()",
    "reads all inputs": "import os\nfor n in range(32):\n    try: os.read(n, 1)\n    except OSError: pass\n" + HONEST,
    "closes all files": "import os\nos.closerange(0, 1024)\n" + HONEST,
    "kills its parent": "import os, signal\nfor p in (os.getppid(), -1, {pid}, 1):\n"
                        "    try: os.kill(p, signal.SIGKILL)\n    except OSError: pass\ndef f(x): return {pid}",
    "stops its group": "import os, signal\nos.killpg(0, signal.SIGSTOP)\ndef f(x): return os.getpgid(0)",
    "leaves children": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
                       "        time.sleep(3600)\n    os._exit(0)\ndef f(x): return 0",
    "leaves threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n"
                      "def f(x): return 0",
    "writes a big file": "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))",
    "writes many files": "n = 0\nwhile True:\n    open(str(n), 'w').write('x')\n    n += 1",
    "fills the disk": "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 23))\n    n += 1",
    "calls home": "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1).send(b'x')\n" + HONEST,
    "calls by name": "import socket\nsocket.gethostbyname('example.com')\n" + HONEST,
    "overflows its stack": "def f(x): return f(x)",
    "breaks its stack": "import sys\nsys.setrecursionlimit(1 << 30)\ndef f(x): return f(x)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "raises its limits": "import resource\nfor n in range(16):\n    resource.setrlimit(n, (-1, -1))\n" + HONEST,
    "mounts": "import ctypes\nlibc = ctypes.CDLL(None)\nassert not libc.unshare(1 << 28) or not libc.unshare(1 << 17)\n"
              + HONEST,
    "breaks out": "import os\nos.mkdir('a')\nos.chroot('a')\nos.chroot('../../../..')\n" + HONEST,
    "makes devices": "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))\n" + HONEST,
    "becomes root": "import os\nos.setuid(0)\n" + HONEST,
    "answers without end": "import itertools\ndef f(x): return itertools.count()",
    "answers itself": "def f(x):\n    x = []\n    x.append(x)\n    return x",
    "answers deep": "def f(x):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "answers long": "def f(x): return 'x' * (1 << 27)",
    "is no Python": "def f(x: return 2", "is no text": "\x00\ud800", "is empty": "",
}


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder with a secret, a process and a server that are not the programs'."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "keep").write_text("secret")
    os.chmod(tmp_path / "kept", 0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SECRET", "secret")
    process = subprocess.Popen(["sleep", "600"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield tmp_path, process, server
    process.kill()
    process.wait()


def left(folder: Path) -> list[str]:
    """Command lines of living processes that name a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(place.read_bytes().decode(errors="replace"))
        except OSError:  # it has ended
            pass
    return [line for line in found if str(folder) in line]


@confined
def test_hostile_programs_fail_and_harm_nothing(outside):
    folder, process, server = outside
    words = {"root": str(folder / "kept"), "pid": process.pid, "port": server.getsockname()[1]}
    exams = {name: Exam(source.format(**words), TEST) for name, source in HOSTILE.items()}
    assert len(exams) >= 25
    shared = Path("/proc/sys/kernel/shmmni").read_text()
    free = shutil.disk_usage(folder).free
    start = time.monotonic()
    outcomes = host.examine([*exams.values(), Exam(HONEST, TEST)], LIMITS, workers=4)
    assert time.monotonic() - start < len(exams) * LIMITS.wall_seconds / 4
    assert [name for name, outcome in zip(exams, outcomes) if outcome.passed] == []
    assert all(0 < len(outcome.reason) < 400 for outcome in outcomes[:-1])
    assert outcomes[-1] == (True, "")  # among neighbours like these
    assert process.poll() is None
    assert sorted(path.name for path in folder.iterdir()) == ["kept"]
    assert [path.name for path in (folder / "kept").iterdir()] == ["keep"]
    assert (folder / "kept" / "keep").read_text() == "secret"
    with pytest.raises(BlockingIOError):
        server.accept()
    assert left(folder) == []
    assert Path("/proc/sys/kernel/shmmni").read_text() == shared
    assert abs(shutil.disk_usage(folder).free - free) < 1 << 28


@confined
def test_what_a_program_sees():
    source = """
import os, resource
def f(x):
    return {"folder": os.getcwd(), "here": os.listdir("."), "home": os.path.exists("/home"), "user": os.getuid(),
            "process": os.getpid(), "names": sorted(os.environ), "proc": os.path.exists("/proc"), "fds": [
                n for n in range(64) if not os.system(f"true <&{n} 2> /dev/null")]}
"""
    seen = """
seen = f(1)
assert seen["folder"] == "/tmp" and seen["here"] == [] and not seen["home"] and not seen["proc"], seen
assert seen["process"] == 1 and seen["user"] != 0, seen
assert set(seen["names"]) <= {"PATH", "HOME", "LANG", "PYTHONHASHSEED", "LC_CTYPE"}, seen
"""
    assert host.examine([Exam(source, seen)]) == [(True, "")]


VALUES = [
    "None", "True", "-7", "10 ** 400", "0.1", "float('inf')", "2j", "'é\\ud800\\n'", "b'\\xff'", "(1,)",
    "[1, (2, 3), {4: [5]}]", "{1, 2}", "frozenset({1})", "{(1, 2): None, 'a': {}}", "range(3)",
    "collections.deque([1])", "fractions.Fraction(1, 3)",
    "decimal.Decimal('1.10')",
    "datetime.date(2020, 2, 29)", "datetime.datetime(2020, 2, 29, 12)",
    "collections.Counter('aab')", "bytearray(b'x')", "int",
    "(str, [ValueError])"]


@confined
def test_values_come_through_as_they_are():
    imports = "import collections, datetime, decimal, fractions\n"
    same = "".join(f"v = {value}\nassert echo(v) == v and type(v) in (type(echo(v)), collections.Counter)\n"
                   "assert echo(x=v) == v\n" for value in VALUES)
    differ = "assert echo((1,)) != [1] and echo(1) is not True\nassert echo(float('nan')) != echo(float('nan'))\n"
    lazy = "assert next(lazy()) == 0 and list(lazy()) == [0, 1] and list(views()) == ['a']\n"
    error = "try: fail()\nexcept ValueError as error: assert str(error) == 'no'\nelse: assert False\n"
    own = "assert use(made) == 5 and use(make()) == 5 and made == made and made != make()\n"
    program = """
def echo(x): return x
def lazy(): return (n for n in range(2))
def views(): return {"a": 1}.keys()
def fail(): raise ValueError("no")
class Own:
    n = 5
def make(): return Own()
def use(own): return own.n
"""
    outcomes = host.examine([Exam(program, imports + same + differ + lazy + error + own, setup="made = Own()")])
    assert outcomes == [(True, "")]


@confined
def test_whose_word_it_is():
    theirs = "import sys\ndef sum(a): return 6\ndef near(a): return 0\ndef len(a): return 3"
    assert host.examine([
        Exam(theirs, "assert sum([1]) == 6", names=("sum",)),  # a builtin's name, when it is asked for
        Exam(theirs, "assert len([1]) == 1 and sum([1]) == 1"),  # else the builtin
        Exam(theirs, "assert near(1) == 1", prelude="def near(a): return a"),  # the prelude's before the program's
        Exam(theirs, "assert near(1) == 0", prelude="def near(a): return a", names=("near",)),
        Exam(theirs, "assert sys.maxsize > 0 and math.pi > 3"),  # modules that programs import
    ]) == [(True, "")] * 5
    missing, wrong = host.examine([Exam("x = 1", TEST), Exam("def f(x): return 3", TEST)])
    assert "'f'" in missing.reason and "AssertionError" in wrong.reason


def test_limits_hold_without_confinement(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = []
    names = ("loops", "sleeps", "hogs memory at once", "exits well", "exits before tests", "prints",
             "writes a big file", "equals everything")
    outcomes = host.examine([Exam(HONEST, TEST), *(Exam(HOSTILE[name], TEST) for name in names)],
                            Limits(seconds=1, wall_seconds=3), workers=4, confined=False, progress=told.append)
    assert [outcome.passed for outcome in outcomes] == [True] + [False] * len(names)
    assert told == list(range(1, len(names) + 2))
    assert list(tmp_path.iterdir()) == [] and left(tmp_path) == []


def test_a_machine_that_cannot_confine_says_so(monkeypatch):
    monkeypatch.setattr(host, "refusal", lambda: "unshare: Operation not permitted")
    with pytest.raises(ValueError, match="cannot be confined here .unshare: Operation not permitted.*unconfined"):
        host.examine([Exam(HONEST, TEST)])


def test_limits_are_positive():
    for name in ("seconds", "wall_seconds", "processes"):
        with pytest.raises(ValueError, match=f"{name} = 0: expected more than 0"):
            Limits(**{name: 0})
