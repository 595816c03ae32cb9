"""The static tests of CRIU's own suite (test/zdtm): what each is, and which of them can run as a container."""

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

RUNC_FLAGS = ("--tcp-established", "--file-locks", "--ext-unix-sk", "--shell-job")
# What only zdtm's driver gives: a mount, a device or a namespace outside, a plugin, cgroups of version 1.
_FOREIGN = ("--external", "--join-ns", "--enable-fs", "--lsm-mount-context", "--ext-mount-map", "--libdir", "--cgroup")
_FOREIGN_FLAGS = (*_FOREIGN, "--manage-cgroups")
_UNUSABLE = {
    r"binfmt_misc|vt|loginuid": "it changes the host",
    r"rtc": "it needs a plugin of CRIU and a device",
    r"(selinux|apparmor|change_mnt_context).*": "it needs SELinux or AppArmor",
    r"cr_veth.*|macvlan": "it needs a link outside",
    r"net(ns)?_lock.*": "it needs a peer outside",
    r"mnt_(root_)?ext.*": "it needs a mount outside",
    r"cgroup.*": "it changes the host's cgroups",
}


@dataclass(frozen=True)
class Case:
    """One test of the suite, as its Makefile starts it."""

    suite: Path
    name: str
    words: tuple[str, ...]  # of its command line

    @cached_property
    def described(self) -> dict[str, Any]:
        """Its description: a literal of Python, but for one that asks for an environment variable."""
        file = self.suite / f"{self.name}.desc"
        return dict(eval(file.read_text(), {"os": os})) if file.exists() else {}

    @property
    def flags(self) -> set[str]:
        """What kind of test it is."""
        return set(self.described.get("flags", "").split())

    @property
    def is_refused(self) -> bool:
        """Whether CRIU is to refuse its dump."""
        return "crfail" in self.flags

    @property
    def timeout_s(self) -> float:
        """How long it may take to end."""
        return float(self.described.get("timeout") or 30)

    def options(self, verb: str) -> list[str]:
        """Return CRIU's options in a dump ("checkpoint") or a restore ("restore")."""
        keys = ("opts", "dopts" if verb == "checkpoint" else "ropts")
        texts = [text for key in keys for text in re.split(r"(?:^|\s)--", self.described.get(key, ""))]
        return [f"--{text.strip()}" for text in texts if text.strip()]

    @property
    def unusable(self) -> str:
        """Why it cannot run as a container; empty if it can."""
        if os.uname().machine not in self.described.get("arch", os.uname().machine).split():
            return "it is for another machine"
        if self.described.get("flavor", "").split() == ["uns"]:
            return "it needs a user namespace"
        if "crlib" in self.flags:
            return "it needs a plugin of CRIU"
        if "noauto" in self.flags:
            return "it is not among those that run by themselves"
        foreign = [o for verb in ("checkpoint", "restore") for o in self.options(verb) if o.startswith(_FOREIGN_FLAGS)]
        reasons = (reason for pattern, reason in _UNUSABLE.items() if re.fullmatch(pattern, self.name))
        return f"it needs {foreign[0]}" if foreign else next(reasons, "")


def find_cases(suite: Path) -> list[Case]:
    """Return the tests that are built."""
    if not suite.is_dir():
        return []
    # Its targets print with which arguments each test is started.
    command = ["make", "-n", "-k", "-C", str(suite), "PKG_CONFIG=false", "start"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stdout
    found = re.findall(r"^(?:\S*/)?(\S+) (--pidfile=\S+\.pid .*)$", printed, re.MULTILINE)
    cases = [Case(suite, name, (f"./{name}", *words.split())) for name, words in found]
    return sorted((case for case in cases if os.access(suite / case.name, os.X_OK)), key=lambda case: case.name)
