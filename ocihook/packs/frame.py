"""The first line of every record of the store: what it is, its version, and the checksum of all that follows."""

import json
import os
import re
import reprlib
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from ocihook.errors import IntegrityError
from ocihook.linux.files import open_regular

# Python takes up to 230 bytes for an array or object, of which JSON needs two; those of a record have 20 and more.
_VALUE_BYTES = 16
_FEW_VALUES = 1000
_FIRST_LINE = re.compile(rb"ocihook-([a-z]{1,20}) ([0-9]{1,9}) ([0-9a-f]{32})\n")


def encode_frame(kind: str, version: int, body: bytes) -> bytes:
    """Return a record: `ocihook-<kind> <version> <XXH3-128 of the body, hexadecimal>`, a newline, the body."""
    return b"ocihook-%s %d %s\n" % (kind.encode(), version, xxh3_128_hexdigest(body).encode()) + body


def decode_frame(kind: str, versions: tuple[int, ...], data: bytes) -> tuple[int, bytes]:
    """Return the version and the body of a record.

    Raises:
        IntegrityError: if it is damaged, of another kind, or of a version that this program does not know.
    """
    first = _FIRST_LINE.match(data)
    if not first or first[1] != kind.encode():
        raise IntegrityError(f"the {kind} does not begin as one")
    version = int(first[2])
    if version not in versions:
        raise IntegrityError(
            f"the {kind} is of version {version}, this ocihook knows versions up to {versions[-1]}",
            hint="use the ocihook version that wrote it, or a later one",
        )
    body = data[first.end() :]
    if xxh3_128_hexdigest(body).encode() != first[3]:
        raise IntegrityError(f"the {kind} is damaged: its checksum does not match")
    return version, body


def read_record(path: Path, limit_bytes: int, what: str) -> bytes | None:
    """Return the content of a record's file; None if there is none.

    Raises:
        IntegrityError: if it is not a file, or larger than such a record can be.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrityError(f"the {what} cannot be opened: {error.strerror}") from error
    with open(fd, "rb") as file:
        # Not more than its size: a read allocates as much memory as it is asked for.
        data = file.read(min(os.fstat(fd).st_size, limit_bytes) + 1)
    if len(data) > limit_bytes:
        raise IntegrityError(f"the {what} is larger than {limit_bytes} bytes")
    return data


def load_json(body: bytes) -> Any:  # noqa: ANN401 - anything that JSON can say
    """Read JSON strictly.

    Raises:
        ValueError: if it is not JSON, is nested too deeply, or has more arrays and objects than any record.
    """
    if body.count(b"[") + body.count(b"{") > _FEW_VALUES + len(body) // _VALUE_BYTES:
        raise ValueError("it is made of next to nothing but brackets")
    try:
        return json.loads(body.decode(), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def as_text(value: object) -> str:
    """Return a string that can be printed; else a ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{reprlib.repr(value)} is not a string")
    value.encode()  # half a surrogate pair, which JSON can hold, could never be printed
    return value


def as_name(value: object, pattern: re.Pattern[str]) -> str:
    """Return a string that matches; else a ValueError."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{reprlib.repr(value)} is not a valid name here")
    return value


def as_object(value: object) -> dict[str, Any]:
    """Return a JSON object that can be written again; else a ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} is not an object")
    try:
        json.dumps(value).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def as_list(value: object) -> list[Any]:
    """Return a JSON array; else a ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{reprlib.repr(value)} is not an array")
    return value


def as_number(value: object) -> int:
    """Return a size or count; else a ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 60:
        raise ValueError(f"{reprlib.repr(value)} is not a valid number here")
    return value
