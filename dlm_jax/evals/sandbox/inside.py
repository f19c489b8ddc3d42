"""What runs in a sandbox: the program on one side, its examiner on the other, each confined and apart.

    python inside.py program ROOT LIMITS                        standard input and output: the wire to the examiner
    python inside.py examiner ROOT LIMITS READ WRITE            standard input: the job; standard output: the verdict

The examiner holds the tests and compares; the program answers calls with plain values. So a program sees neither the
tests nor what they expect, and nothing that it does to its own interpreter reaches who judges it.
"""

import ast
import builtins
import importlib
import json
import os
import sys
import types

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import confine
import wire

del sys.path[0]
REFUSED = 97  # exit code of a process that could not be confined
REASON = 300  # characters
_ERRORS = {name: kind for name, kind in vars(builtins).items()  # those that are made of a text
           if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, UnicodeError)
           and "Group" not in name}


def program(connection: wire.Wire) -> None:
    """Answers an examiner's requests: run a source, tell what names mean, call something."""
    namespace = {"__name__": "program", "__builtins__": builtins}

    def run(source):
        exec(compile(source, "<program>", "exec"), namespace)

    def look(names):
        return {name: ["function"] if callable(namespace[name]) else ["value", connection.pack(namespace[name])]
                for name in names if not isinstance(namespace.get(name, builtins), types.ModuleType)}

    def call(name, arguments, options):
        return connection.pack(namespace[name](*connection.unpack(arguments), **connection.unpack(options)))

    requests = {"run": run, "look": look, "call": call}
    while True:
        try:
            name, *rest = connection.receive()
        except EOFError:
            return
        try:
            answer = {"found": requests[name](*rest)}
        except BaseException as error:  # an exit is an answer, too
            answer = {"raised": [type(error).__name__, str(error)[:REASON]]}
        connection.send(answer)


class Program:
    """The program as the examiner sees it."""

    def __init__(self, connection: wire.Wire):
        self._wire = connection

    def ask(self, *request):
        """Sends a request; returns what was found.

        Raises:
          BaseException: of the built-in kind that the program raised, RuntimeError for others.
        """
        self._wire.send(request)
        answer = self._wire.receive()
        if "raised" in answer:
            name, text = answer["raised"]
            raise _ERRORS.get(name, RuntimeError)(text if name in _ERRORS else f"the program raised {name}: {text}")
        return answer["found"]

    def function(self, name):
        """Returns a function of the program, to be called from here."""
        def call(*arguments, **options):
            return self._wire.unpack(self.ask("call", name, self._wire.pack(arguments), self._wire.pack(options)))
        return call

    def meaning(self, names):
        """Returns what names mean to the program, as far as it knows them: functions to call, and values."""
        return {name: self.function(name) if kind == "function" else self._wire.unpack(value[0])
                for name, (kind, *value) in self.ask("look", names).items() if name in names}


def examine(job: dict, subject: Program) -> None:
    """Runs the tests of a job; returns where they pass and raises what they raise otherwise."""
    for source in job["program"]:
        subject.ask("run", source)
    namespace = {"__name__": "tests"}
    exec(compile(job["prelude"], "<prelude>", "exec"), namespace)
    tests = ast.parse(job["tests"])
    used = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    known = namespace.keys() | vars(builtins).keys()
    foreign = sorted(name for name in used if name in job["names"] or name not in known)
    namespace |= subject.meaning(foreign)
    for name in foreign:
        if name not in namespace and name in sys.stdlib_module_names:  # tests use modules that programs import
            namespace[name] = importlib.import_module(name)
    exec(compile(tests, "<tests>", "exec"), namespace)


def verdict(job: dict, connection: wire.Wire) -> dict:
    """Returns {"passed", "reason"} of a job."""
    try:
        examine(job, Program(connection))
    except BaseException as error:
        return {"passed": False, "reason": f"{type(error).__name__}: {error}"[:REASON]}
    return {"passed": True, "reason": ""}


def _own(number: int, mode: str):
    """A standard stream under another number, as a file; the standard stream itself leads nowhere from now on."""
    file = os.fdopen(os.dup(number), mode, encoding="ascii")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, number)
    os.close(nowhere)
    return file


def main(role: str, root: str, limits: str, *numbers: str) -> None:
    """Confines this process (where `root` is a folder) and plays its role."""
    limits = json.loads(limits)
    try:
        confine.confine(root, limits) if root else confine.limit(limits)
    except (confine.Refused, OSError) as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        os._exit(REFUSED)
    sys.set_int_max_str_digits(0)
    reader, writer = _own(0, "r"), _own(1, "w")
    if role == "program":
        program(wire.Wire(reader, writer))
    else:
        job = json.load(reader)
        files = [os.fdopen(int(number), mode, encoding="ascii") for number, mode in zip(numbers, "rw")]
        json.dump(verdict(job, wire.Wire(*files)), writer)
        writer.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
