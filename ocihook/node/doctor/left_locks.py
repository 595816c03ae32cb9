"""Locks of a network that CRIU has left: those that block packets, and tables that block none.

A dump that stops a container of the node's own network leaves its table (CRIU 4.2, net.c: a restore here removes it).
Its sets have the container's connections, or nothing. In a network of its own a container's table drops every packet.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ocihook.criu.version import run_output
from ocihook.linux.procfs import command_line

SBIN = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_TABLE = re.compile(r"^table inet (CRIU-\S+) \{$(.*?)^\}$", re.MULTILINE | re.DOTALL)
_DROPS_ALL = re.compile(r"policy drop\b")
_ELEMENTS = re.compile(r"elements = \{([^}]*)\}")
_JUMP = re.compile(r"^-A (?:INPUT|OUTPUT) -j CRIU$", re.MULTILINE)
_DROP = re.compile(r"^-A CRIU -j DROP$", re.MULTILINE)


class LeftLock(NamedTuple):
    """A lock that no running CRIU has."""

    name: str
    blocks_all: bool
    entries: int  # of connections that are blocked, one for each direction
    remove: str  # a command

    @property
    def is_empty(self) -> bool:
        """Return whether it blocks nothing."""
        return not self.blocks_all and not self.entries


def left_locks(*inside: str) -> list[LeftLock]:
    """Return CRIU's locks of a network; none while a CRIU runs. `inside` is a command that enters the network."""
    if os.geteuid() != 0 or _is_criu_running():
        return []
    return [*_tables(inside), *_chains(inside)]


def remove_empty(*inside: str) -> list[str]:
    """Remove the tables that block nothing; return what was done, a line each."""
    going = [lock for lock in left_locks(*inside) if lock.is_empty]
    for lock in going:
        _runner(inside)(*lock.remove.split())
    return [f"removed {lock.name}" for lock in going]


def commands(locks: Iterable[LeftLock], *inside: str) -> str:
    """Return the commands that remove locks."""
    return "; ".join(" ".join((*inside, lock.remove)) for lock in locks)


def _is_criu_running() -> bool:
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return any(words and Path(words[0]).name.rstrip(":") == "criu" for words in map(command_line, pids))


def _tables(inside: tuple[str, ...]) -> list[LeftLock]:
    if shutil.which("nft", path=SBIN) is None:
        return []
    text = _runner(inside)("nft", "list", "ruleset", "inet")
    return [_of_table(found[1], found[2]) for found in _TABLE.finditer(text)]


def _of_table(name: str, text: str) -> LeftLock:
    entries = sum(found.count(",") + 1 for found in _ELEMENTS.findall(text))
    return LeftLock(f"table inet {name}", bool(_DROPS_ALL.search(text)), entries, f"nft delete table inet {name}")


def _chains(inside: tuple[str, ...]) -> list[LeftLock]:
    """Return the chains of iptables; IPv6's only beside IPv4's, as CRIU makes it: to list them may load a module."""
    run, found = _runner(inside), []
    for program in ("iptables", "ip6tables"):
        if shutil.which(f"{program}-save", path=SBIN) is None:
            break
        rules = run(f"{program}-save", "-t", "filter")
        if not _JUMP.search(rules) or not _DROP.search(rules):
            break
        found.append(LeftLock(f"chain CRIU of {program}", True, 0, f"{program} -F CRIU"))
    return found


def _runner(inside: tuple[str, ...]) -> Callable[..., str]:
    return lambda *command: run_output(*inside, *_found(command))


def _found(command: Iterable[str]) -> list[str]:
    program, *arguments = command
    return [shutil.which(program, path=SBIN) or program, *arguments]
