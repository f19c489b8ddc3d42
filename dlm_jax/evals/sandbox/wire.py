"""Values between two processes that do not trust each other: one line of JSON each, plain data, no code.

A value keeps its type as far as comparing it goes: tuples stay tuples, subclasses become what they are kinds of, and
iterators arrive as iterators over all they would yield. Anything else stays where it is and travels as a number, of
which only the sender knows the meaning.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import itertools
import json

LONGEST = 1 << 24  # characters of a line
_MOST = 1 << 20  # values that an iterator may yield
_TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_TEXTUAL = {"decimal": decimal.Decimal, "fraction": fractions.Fraction}
_DATED = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}  # a datetime is a date, too
_SEVERAL = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}


class Handle:
    """Something of the other process that cannot travel; equal to itself alone.

    Attributes:
      number: by which the other process knows it.
    """

    def __init__(self, number: int):
        self.number = number


class Wire:
    """One end of a connection."""

    def __init__(self, reader, writer):
        """Takes two open text files, of lines that come and lines that go."""
        self._reader, self._writer, self._kept = reader, writer, []

    def send(self, message) -> None:
        """Sends a value of JSON's own kinds; others are to be packed first."""
        line = json.dumps(message)
        if len(line) >= LONGEST:
            raise ValueError(f"a message of {len(line)} characters; at most {LONGEST}")
        self._writer.write(line + "\n")
        self._writer.flush()

    def receive(self):
        """Returns the next message.

        Raises:
          EOFError: the other end is gone.
          ValueError: what came is no message.
        """
        line = self._reader.readline(LONGEST)
        if not line.endswith("\n"):
            raise ValueError("a message without an end") if line else EOFError("the other process is gone")
        return json.loads(line)

    def pack(self, value):
        """Returns a value as JSON's own kinds; what cannot travel is kept, and its number sent."""
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).decode("latin-1")]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        for name, kind in _TEXTUAL.items():
            if isinstance(value, kind):
                return [name, str(value)]
        for name, kind in _DATED.items():
            if isinstance(value, kind):
                return [name, value.isoformat()]
        if isinstance(value, dict):
            return ["dict", [[self.pack(k), self.pack(v)] for k, v in value.items()]]
        for name, kind in _SEVERAL.items():
            if isinstance(value, kind):
                return [name, [self.pack(item) for item in value]]
        if isinstance(value, _VIEWS):
            return ["list" if isinstance(value, _VIEWS[1]) else "set", [self.pack(item) for item in value]]
        if isinstance(value, type) and _TYPES.get(value.__name__) is value:
            return ["type", value.__name__]
        if isinstance(value, Handle):
            return ["yours", value.number]
        if hasattr(type(value), "__next__"):
            items = [self.pack(item) for item in itertools.islice(value, _MOST + 1)]
            if len(items) > _MOST:
                raise ValueError(f"an iterator of more than {_MOST} values")
            return ["iterator", items]
        self._kept.append(value)
        return ["mine", len(self._kept) - 1]

    def unpack(self, packed):
        """Returns what `pack` packed at the other end."""
        if not isinstance(packed, list):
            return packed
        name, *rest = packed
        if name == "mine":
            return Handle(int(rest[0]))
        if name == "yours":
            return self._kept[rest[0]]
        if name in _SEVERAL:
            return _SEVERAL[name](map(self.unpack, rest[0]))
        if name == "iterator":
            return iter([self.unpack(item) for item in rest[0]])
        if name == "dict":
            return {self.unpack(key): self.unpack(value) for key, value in rest[0]}
        if name in _TEXTUAL:
            return _TEXTUAL[name](rest[0])
        if name in _DATED:
            return _DATED[name].fromisoformat(rest[0])
        if name == "type":
            return _TYPES[rest[0]]
        if name in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[name](rest[0].encode("latin-1"))
        return {"complex": complex, "range": range}[name](*rest)
