"""The state of a container's tasks at one moment, and the note of it beside CRIU's images.

The note's name is that of an image, so it is packed, stored, archived and verified as one. docs/formats.md has its
fields. Equal states of threads, which is what most have, are written once.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ocihook.errors import IntegrityError
from ocihook.linux.files import replace_file
from ocihook.packs.frame import (
    as_list,
    as_number,
    as_object,
    as_text,
    decode_frame,
    encode_frame,
    load_json,
    read_record,
)

STATE_NAME = "ocihook-tasks.img"
_KIND, _VERSION = "tasks", 1
_MAX_BYTES = 4 << 20  # compressed; a thousand processes with all different states take a tenth
_MAX_PLAIN_BYTES = 16 << 20
_MAX_TEXT = 4096  # characters of one value

Values = Mapping[str, str]  # what was read, by the names of rows (rows.py)


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """A process."""

    name: str
    own: Values = field(default_factory=dict)  # what all its threads have in common
    threads: Mapping[str, Values] = field(default_factory=dict)  # what each has, by its id in the container
    files: Mapping[str, Values] = field(default_factory=dict)  # what descriptors are, by their numbers


@dataclass(frozen=True, kw_only=True)
class ContainerState:
    """All processes of a container, by their pids in it."""

    processes: Mapping[str, ProcessState] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # names of processes in its cgroup that do not descend from its first one
    cpus: str = ""  # on which its cgroup lets it run, as the kernel lists them; "" if unknown
    places: Mapping[str, Values] = field(default_factory=dict)  # its mounts and inner cgroups ("mount /tmp")
    unread_files: int = 0  # descriptors of which only the kind was read: there are too many
    unread_memory: tuple[str, ...] = ()  # names of processes whose memory would have taken too long


def encode_state(state: ContainerState) -> bytes:
    """Return a note's content."""
    numbers: dict[int, int] = {}
    values: list[Values] = []

    def number(one: Values) -> int:
        if id(one) not in numbers:
            numbers[id(one)] = len(values)
            values.append(one)
        return numbers[id(one)]

    processes = {
        pid: [
            process.name,
            number(process.own),
            {tid: number(one) for tid, one in process.threads.items()},
            {fd: number(one) for fd, one in process.files.items()},
        ]
        for pid, process in state.processes.items()
    }
    body: dict[str, object] = {"values": values, "processes": processes, "left_out": state.left_out, "cpus": state.cpus}
    body |= {"places": state.places, "unread_files": state.unread_files, "unread_memory": state.unread_memory}
    return encode_frame(_KIND, _VERSION, zlib.compress(json.dumps(body, separators=(",", ":")).encode(), 1))


def decode_state(data: bytes) -> ContainerState:
    """Read a note's content.

    Raises:
        IntegrityError: if it is damaged.
    """
    _, body = decode_frame(_KIND, (_VERSION,), data)
    try:
        return _from_json(load_json(_inflate(body)))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, zlib.error) as error:
        raise IntegrityError(f"the note about the container's tasks is malformed: {error}") from error


def _inflate(body: bytes) -> bytes:
    reader = zlib.decompressobj()
    plain = reader.decompress(body, _MAX_PLAIN_BYTES)
    if not reader.eof:
        raise ValueError("it is cut short, or too large")
    return plain


def _from_json(body: Any) -> ContainerState:  # noqa: ANN401 - anything that JSON can say
    body = as_object(body)
    values = [_values(one) for one in as_list(body["values"])]
    processes = {}
    for pid, (name, own, threads, files) in as_object(body["processes"]).items():
        processes[_text(pid)] = ProcessState(
            name=_text(name), own=_pick(values, own), threads=_picked(values, threads), files=_picked(values, files)
        )
    return ContainerState(
        processes=processes,
        left_out=tuple(map(_text, as_list(body["left_out"]))),
        cpus=_text(body["cpus"]),
        places={_text(name): _values(one) for name, one in as_object(body.get("places", {})).items()},
        unread_files=as_number(body.get("unread_files", 0)),
        unread_memory=tuple(map(_text, as_list(body.get("unread_memory", [])))),
    )


def _values(value: object) -> Values:
    return {_text(key): _text(item) for key, item in as_object(value).items()}


def _picked(values: list[Values], numbers: object) -> dict[str, Values]:
    return {_text(key): _pick(values, number) for key, number in as_object(numbers).items()}


def _pick(values: list[Values], number: object) -> Values:
    if not isinstance(number, int) or not 0 <= number < len(values):
        raise ValueError("it names values that it does not have")
    return values[number]


def _text(value: object) -> str:
    text = as_text(value)
    if len(text) > _MAX_TEXT:
        raise ValueError("a value is too long")
    return text


def write_state(directory: Path, state: ContainerState) -> int:
    """Put the note into an image set, in place of any that is there; return its size in bytes.

    Raises:
        OSError: if it cannot be written.
    """
    data = encode_state(state)
    replace_file(directory / STATE_NAME, data, mode=0o600, durable=False)
    return len(data)


def read_state(directory: Path) -> ContainerState | None:
    """Return the state that an image set's note has; None if there is no note.

    Raises:
        IntegrityError: if it is damaged.
    """
    data = read_record(directory / STATE_NAME, _MAX_BYTES, "note about the container's tasks")
    return None if data is None else decode_state(data)
