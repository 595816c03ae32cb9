"""What a checkpoint records of its node, and whether this node can restore it: CRIU, processors, GPUs."""

import logging
import platform
from collections.abc import Mapping

from ocihook.errors import UnsupportedError
from ocihook.linux.processor import features

log = logging.getLogger(__name__)

# Features by which libraries choose code once, at their start: a process that then misses one dies of SIGILL.
_CHOSEN_BY = (
    *("aes", "amx", "avx", "bmi", "erms", "fma", "fsrm", "gfni", "sha", "sse", "ssse", "vaes", "vpclmul", "xsave"),
    *("asimd", "sve"),  # on aarch64
)


def host_facts(criu: str) -> dict[str, str]:
    """Return what a restore on another node may need to know of this one."""
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "criu": criu,
        "cpu_features": " ".join(sorted(features())),
    }


def check_host(host: Mapping[str, str], criu: str) -> None:
    """Refuse a checkpoint of a machine that this one cannot replace; warn where it may not be able to.

    Args:
        host: where the checkpoint was made.
        criu: version of this node's CRIU, "" if it is not known.

    Raises:
        UnsupportedError: naming what differs.
    """
    check_machine(host)
    check_criu(host, criu)
    missing = missing_features(host)
    if missing:
        log.warning("the checkpoint was made on processors that have %s, and these have not", ", ".join(missing))


def check_criu(host: Mapping[str, str], here: str) -> None:
    """Refuse what CRIU would fail on halfway: older versions do not read pagemaps of 4.2 and later.

    Args:
        host: where the checkpoint was made.
        here: version of this node's CRIU, "" if it is not known.

    Raises:
        UnsupportedError: if it is too old.
    """
    there = host.get("criu", "")
    if _major_minor(there) >= (4, 2) and (0, 0) < _major_minor(here) < (4, 2):
        raise UnsupportedError(
            f"the checkpoint was made by CRIU {there}, this node's CRIU {here} cannot read it",
            hint="install CRIU 4.2 or later on this node",
        )


def check_machine(host: Mapping[str, str]) -> None:
    """Refuse a checkpoint of another kind of processor.

    Raises:
        UnsupportedError: naming it.
    """
    there, here = host.get("machine", ""), platform.machine()
    if there and there != here:
        raise UnsupportedError(
            f"the checkpoint was made on {there}, this node is {here}", hint="restore it on a like one"
        )


def missing_features(host: Mapping[str, str]) -> list[str]:
    """Return the processor features, among those by which programs choose code, that were there and are not here."""
    there = set(host.get("cpu_features", "").split())
    return sorted(name for name in there - features() if name.startswith(_CHOSEN_BY)) if features() else []


def _major_minor(version: str) -> tuple[int, int]:
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return 0, 0
