"""Finds the lines of CRIU's configuration files that it refuses: it exits before it opens a log; engines see an EOF.

How CRIU reads a line is `parse_statement` of criu/config.c; what a line names is given to getopt_long(3), which also
accepts an unambiguous prefix of a name. Tested with `criu check --config FILE` of CRIU 4.1.1.
"""

import difflib
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# All of `long_opts` in criu/config.c of CRIU 4.2 (2cf8f13ca). `criu --help` does not show all of them.
_SWITCHES = _words("""
    allow-uprobes auto-dedup daemon deprecated display-stats evasive-devices experimental extra file-locks force-irmap
    ghost-fiemap link-remap log-pid mntns-compat-mode page-server restore-detached restore-sibling shell-job
    skip-file-rwx-check skip-in-flight stream tcp-close tcp-established tls track-mem unprivileged weak-sysctls
""")  # each as no-NAME, too
_WITHOUT_VALUE = _words("""
    all enable-external-masters enable-external-sharing exec-cmd help lazy-pages leave-running leave-stopped ms
    no-default-config tls-no-cn-verify version
""")
_WITH_VALUE = _words("""
    action-script address cgroup-dump-controller cgroup-props cgroup-props-file cgroup-root cgroup-yard close config
    empty-ns enable-fs ext-mount-map external feature file-validation freeze-cgroup ghost-limit images-dir inherit-fd
    irmap-scan-path join-ns libdir log-file lsm-mount-context lsm-profile network-lock pidfile port pre-dump-mode
    prev-images-dir ps-socket root skip-mnt status-fd timeout tls-cacert tls-cacrl tls-cert tls-key tree veth-pair
    work-dir
""")
_WITH_OR_WITHOUT = _words("cpu-cap ext-unix-sk manage-cgroups verbosity")
_ALL = frozenset((*_SWITCHES, *(f"no-{name}" for name in _SWITCHES), *_WITHOUT_VALUE, *_WITH_VALUE, *_WITH_OR_WITHOUT))


class Fault(NamedTuple):
    """A line that CRIU refuses."""

    line: int  # the first is 1
    what: str
    remedy: str


class Script(NamedTuple):
    """An action script, and where it is named."""

    line: int
    path: str


class Known(NamedTuple):
    """The options that the CRIU of this node accepts, as far as it reports them; by default, those of CRIU 4.2."""

    version: str = ""
    program: bytes | None = None  # the executable, which has the name of each option in it
    help: str = ""  # what `criu --help` prints: a later CRIU has options that we do not know

    def lacks(self, name: str) -> bool:
        """Return whether it is older than an option."""
        return self.program is not None and name.encode() + b"\0" not in self.program

    def has_another(self, name: str) -> bool:
        """Return whether it has an option that CRIU 4.2 did not have."""
        bare = name.removeprefix("no-")
        named = rf"(?<!\S)(?:\S+\|)?--{re.escape(bare)}(?![\w-])"
        return bare not in _ALL and re.search(named, self.help) is not None


def faults(content: bytes, known: Known) -> Iterator[Fault]:
    """Yield the lines of a configuration file that CRIU refuses, whatever it is to do."""
    for line, word, value in _statements(content):
        if word.endswith("\r"):
            yield Fault(line, "the line ends with a carriage return", "give the file the line ends of Unix")
        elif word.startswith("-"):
            plain_name = word.lstrip("-")
            yield Fault(line, f"`{word}` has dashes, which CRIU adds itself", f"write {plain_name}")
        else:
            yield from _about(line, word, value, known)


def scripts(content: bytes) -> Iterator[Script]:
    """Yield the action scripts that a configuration file names."""
    for line, word, value in _statements(content):
        name, _, joined = word.partition("=")
        if _meant(name) == ["action-script"] and (path := joined or value):
            yield Script(line, path)


def _statements(content: bytes) -> Iterator[tuple[int, str, str]]:
    """Yield line, first word and value of each line that has any."""
    for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), 1):
        text = line.lstrip()
        if text and not text.startswith("#"):
            word, _, rest = text.partition(" " if " " in text else "\t")
            rest = rest.strip()
            try:
                value = next(iter(shlex.split(rest, comments=True)), "") if rest[:1] == '"' else rest.split("#")[0]
            except ValueError:  # a quote that is not closed
                value = rest
            yield number, word, value.strip()


def _meant(name: str) -> list[str]:
    """Return the options that a name may abbreviate."""
    return [name] if name in _ALL else sorted(option for option in _ALL if option.startswith(name))


def _about(line: int, word: str, value: str, known: Known) -> Iterator[Fault]:
    name, sign, joined = word.partition("=")
    meant = _meant(name)
    if not meant:
        if not known.has_another(name):
            close = difflib.get_close_matches(name, _ALL, n=1)
            remedy = f"did you mean {close[0]}?" if close else "remove it; `criu --help` lists the options"
            yield Fault(line, f"CRIU has no option `{name}`", remedy)
    elif len(meant) > 1:
        yield Fault(line, f"`{name}` may be {', '.join(meant)}", "write the whole name")
    elif known.lacks(meant[0]):
        remedy = "remove it, or install a later CRIU"
        yield Fault(line, f"CRIU {known.version} has no option `{meant[0]}`".replace("  ", " "), remedy)
    elif meant[0] in _WITH_VALUE and not joined and not value:
        yield Fault(line, f"`{name}` needs a value, and takes the next line for it", f"write {name} VALUE")
    elif meant[0] not in _WITH_VALUE | _WITH_OR_WITHOUT and sign:
        yield Fault(line, f"`{name}` takes no value", f"write {name}, or no-{name}" if name in _SWITCHES else name)
