"""What a coordinator keeps of a gang on disk: which epochs are taken, and the manifest of each that was decided.

A directory for each gang, below one for its namespace. `last` is the number of the newest epoch; it is written before
that number is handed out. EPOCH.json is an attempt whose end all members have reached; it is written before any of
them learns that. docs/formats.md has its fields.
"""

import contextlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ocihook.errors import GangError
from ocihook.gang.protocol import CHOICE, Decided
from ocihook.linux.files import replace_file
from ocihook.model import GangRef

NO_NAMESPACE = "_node"  # which no namespace can be called
_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_KEPT = 100  # of what was decided


class Epochs:
    """The epochs of one gang."""

    def __init__(self, root: Path, namespace: str, name: str) -> None:
        """Take a gang's directory.

        Raises:
            GangError: if the names are not valid.
        """
        if (namespace and not _NAME.fullmatch(namespace)) or not _NAME.fullmatch(name):
            raise GangError(f"{namespace!r} and {name!r} are not valid names of a namespace and a gang")
        self.namespace, self.name = namespace, name
        self._directory = root / (namespace or NO_NAMESPACE) / name
        self._nodes: dict[int, tuple[str, dict[str, str]]] = {}  # of an epoch: its attempt, and its members' nodes

    @property
    def last(self) -> int:
        """The newest epoch that was taken; 0: none."""
        try:
            return int((self._directory / "last").read_text())
        except FileNotFoundError:
            return 0

    def take(self, epoch: int) -> str:
        """Make durable that an epoch is taken; return an id that no attempt of any coordinator has."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._directory / "last", b"%d\n" % epoch, mode=0o600)
        return secrets.token_hex(8)

    def keep(self, epoch: int, record: Mapping[str, Any]) -> None:
        """Make durable what all members have reached."""
        data = {"version": _VERSION, "namespace": self.namespace, "gang": self.name, "epoch": epoch, **record}
        replace_file(self._path(epoch), json.dumps(data, indent=1).encode(), mode=0o600)
        for old in self.decided()[:-_KEPT]:
            self._path(old).unlink(missing_ok=True)
            self._completed(old).unlink(missing_ok=True)

    def note_complete(self, epoch: int, attempt: str, member: str, node: str) -> bool:
        """Note that a member's checkpoint of an epoch is complete; False if there is no such member of a node.

        A note may be lost with the node's power.

        Raises:
            GangError: if what is kept is damaged.
        """
        if epoch not in self._nodes:
            try:
                record = self.read(epoch)
            except FileNotFoundError:
                return False
            nodes = {name: str(known.get("node")) for name, known in record["members"].items()}
            self._nodes = {epoch: (str(record.get("attempt")), nodes)}  # members of one epoch report at one time
        known_attempt, nodes = self._nodes[epoch]
        if attempt != known_attempt or nodes.get(member) != node:
            return False
        with self._completed(epoch).open("a") as file:  # of 16,384 members each record has megabytes: only a line
            file.write(json.dumps(member) + "\n")
        return True

    def _incomplete(self, record: Mapping[str, Any]) -> list[str]:
        noted: set[str] = set()
        with contextlib.suppress(FileNotFoundError):
            noted.update(self._completed(record["epoch"]).read_text(errors="replace").splitlines())
        members = record["members"].items()
        return [name for name, member in members if not member.get("is_complete") and json.dumps(name) not in noted]

    def read(self, epoch: int) -> dict[str, Any]:
        """Return what is kept of an epoch.

        Raises:
            GangError: if it is damaged.
            FileNotFoundError: if nothing is.
        """
        try:
            record: dict[str, Any] = json.loads(self._path(epoch).read_bytes())
            if record["version"] != _VERSION or not isinstance(record["members"], dict):
                raise ValueError("of no version that is known")
        except (ValueError, KeyError, TypeError) as error:
            raise GangError(f"{self._path(epoch)} is damaged: {error}") from error
        return record

    def decided(self) -> list[int]:
        """Return the epochs that something is kept of, the oldest first."""
        return sorted(int(path.stem) for path in self._directory.glob("*.json") if path.stem.isdigit())

    def dumps(self) -> list[tuple[int, list[str]]]:
        """Return those of them that are dumps, with the members of which no complete checkpoint is known."""
        found = []
        for epoch in self.decided():
            with contextlib.suppress(FileNotFoundError):  # it has just made room
                record = self.read(epoch)
                if record["act"] == "dump":
                    found.append((epoch, self._incomplete(record)))
        return found

    def latest(self, count: int) -> dict[int, Decided]:
        """Return what members of the last epochs may ask about, so many at most."""
        found = {}
        for epoch in self.decided()[-count:]:
            record = self.read(epoch)
            sessions = {str(name): str(member["session"]) for name, member in record["members"].items()}
            found[epoch] = Decided(sessions, {CHOICE: str(record["chosen"])} if "chosen" in record else {})
        return found

    def _path(self, epoch: int) -> Path:
        return self._directory / f"{epoch}.json"

    def _completed(self, epoch: int) -> Path:
        return self._directory / f"{epoch}.complete"


def all_gangs(root: Path) -> Iterator[Epochs]:
    """Yield the gangs that a coordinator knows."""
    for path in sorted(root.glob("*/*/last")):
        namespace = path.parts[-3]
        yield Epochs(root, "" if namespace == NO_NAMESPACE else namespace, path.parts[-2])


def epochs_of(root: Path, gang: GangRef) -> Epochs:
    """Return the epochs of a member's gang."""
    return Epochs(root, gang.namespace, gang.name)
