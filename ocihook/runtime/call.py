"""One call of the OCI runtime that the handler stands before: its words, and the calls that we make in its place."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ocihook.container.runtime_call import runtime_of
from ocihook.errors import OcihookError

# Options that take a value, as in container/runtime_call.py: of the program, and of the commands that we look into
# (runc's create.go and restore.go, crun's create.c and restore.c).
_GLOBAL_VALUES = frozenset(("--root", "--log", "--log-format", "--criu", "--rootless", "--cgroup-manager"))
_RESTORE_VALUES = ("--image-path", "--work-path", "--manage-cgroups-mode", "--empty-ns", "--status-fd")
_LSM_VALUES = ("--lsm-profile", "--lsm-mount-context")
_COMMAND_VALUES = frozenset(
    ("--bundle", "--pid-file", "--console-socket", "--preserve-fds", *_RESTORE_VALUES, *_LSM_VALUES)
)
_SPELLING = {"-b": "--bundle"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What an engine has called the runtime with."""

    program: Path  # the runtime itself
    words: tuple[str, ...]  # all that it was called with
    prefix: tuple[str, ...]  # those before the command
    command: str
    options: Mapping[str, str]  # of the command, by their long names; "" for one without a value
    positional: tuple[str, ...]  # of the command

    @classmethod
    def parse(cls, program: Path, words: Sequence[str]) -> "Call":
        """Read a command line: runc's, which has Go's single dashes too, and crun's."""
        at = 0
        while at < len(words) and words[at].startswith("-"):
            at += 2 if words[at] in _GLOBAL_VALUES else 1
        options, positional, rest = {}, [], [*words[at + 1 :]]
        while rest:
            word = rest.pop(0)
            if not word.startswith("-"):
                positional.append(word)
                continue
            name, equals, value = word.partition("=")
            name = f"-{name}" if not name.startswith("--") and len(name) > 2 else _SPELLING.get(name, name)
            options[name] = value if equals or name not in _COMMAND_VALUES or not rest else rest.pop(0)
        return cls(
            program=program,
            words=tuple(words),
            prefix=tuple(words[:at]),
            command=words[at] if at < len(words) else "",
            options=options,
            positional=tuple(positional),
        )

    @property
    def runtime(self) -> str:
        """Which runtime it is, whatever its program is called: runc, crun."""
        return runtime_of(self.program) or "runc"

    @property
    def pid(self) -> int:
        """The process that the engine has started."""
        return os.getpid()

    @property
    def is_crun(self) -> bool:
        """Return whether it is crun, or else runc."""
        return self.runtime == "crun"

    @property
    def container_id(self) -> str:
        """Which container this is about.

        Raises:
            OcihookError: if no runtime would accept its name.
        """
        name = self.positional[0] if self.positional else ""
        if not name or "/" in name or name.startswith("."):
            raise OcihookError(f"{self.runtime} was called for {name!r}, which is not a container id")
        return name

    @property
    def state_directory(self) -> Path:
        """Where the runtime keeps the container's state."""
        return Path(self.global_option("--root") or ("/run/crun" if self.is_crun else "/run/runc")) / self.container_id

    @property
    def bundle(self) -> Path:
        """The directory of the container's config.json."""
        return Path(self.options.get("--bundle", ".")).absolute()

    def pass_on(self) -> NoReturn:
        """Execute the runtime in our place, with the same arguments."""
        os.execv(self.program, [str(self.program), *self.words])  # noqa: S606 - as our launcher does

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call the runtime with other words, and with its output to ourselves."""
        return subprocess.run(  # waits: as its engine would for the runtime alone
            [self.program, *self.prefix, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )

    def logging_to(self, path: Path) -> "Call":
        """Return the same call with another log: the engine's is in the bundle, which it may remove at any time."""
        return replace(self, prefix=tuple(self.prefix_with_log(path)))

    def global_option(self, name: str) -> str:
        """Return the value of an option before the command; "" if it is not there."""
        for at, word in enumerate(self.prefix):
            if word == name:
                return self.prefix[at + 1] if at + 1 < len(self.prefix) else ""
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return ""

    def prefix_with_log(self, path: Path) -> list[str]:
        """Return the words before the command, with another log, as text."""
        kept, rest = [], [*self.prefix]
        while rest:
            word = rest.pop(0)
            value = [rest.pop(0)] if word in _GLOBAL_VALUES and rest else []
            if word.partition("=")[0] not in ("--log", "--log-format"):
                kept += [word, *value]
        return [*kept, f"--log={path}"]

    def say(self, text: str, level: str = "error") -> None:
        """Write where the engine looks for the runtime's own words; 0, 1 and 2 may be the container's."""
        path = self.global_option("--log")
        if not path:
            if level == "error":
                sys.stderr.write(f"ocihook: {text}\n")
            return
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        record = {"level": level, "msg": f"ocihook: {text}", "time": when}
        is_json = self.global_option("--log-format") == "json"
        line = (
            json.dumps(record) if is_json else " ".join(f"{key}={json.dumps(value)}" for key, value in record.items())
        )
        with open(path, "a") as log:
            log.write(f"{line}\n")
