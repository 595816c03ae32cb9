"""Checks of a node about connections: CRIU's options for them, and firewalls on the way."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ocihook.criu.conf import CRIU_CONF_DIR, options, read_block, remove_block
from ocihook.criu.files import OVERRULED, content
from ocihook.criu.version import find_program
from ocihook.errors import ConfigError, OcihookError
from ocihook.net import nftables
from ocihook.net.namespace import NetNamespace
from ocihook.node.install import CONF_NAMES
from ocihook.preflight.finding import Finding, Repair, Status

_LOOSE = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_loose")


def _check_connection_options() -> Iterator[Finding]:
    """Only the file that a runtime names overrides what it requests itself."""
    for name in CONF_NAMES:
        path, text = CRIU_CONF_DIR / name, content(name)
        try:
            block, foreign = read_block(text, where=str(path)), remove_block(text, where=str(path))
        except ConfigError:  # reported by the check of the installation
            continue
        if block and block.action_script and name != "default.conf" and "tcp-established" not in block.others:
            detail = f"{path} has the block of an earlier ocihook: containers with open connections are not dumped"
            rules_out = "containers with open connections"
            yield Finding("connections", Status.WARN, detail, "ocihook install", Repair.INSTALL, rules_out)
        for option in options(foreign):
            if option.name == "tcp-close":
                detail = f"{path}: tcp-close: every dump loses its connections, whatever their policy is"
                yield Finding("connections", Status.WARN, detail, "remove it; set tcp in /etc/ocihook/config.toml")
            elif name == "default.conf" and (overruling := _overruling(option.name)):
                detail = f"{path}: {option.name} has no effect: {overruling} overrides it in every dump"
                remedy = "remove it; `ocihook install` writes it where it counts"
                yield Finding("connections", Status.WARN, detail, remedy)


def _overruling(option: str) -> str:
    """Return the runtimes of this node that say something else than default.conf, whatever that says."""
    return " and ".join(runtime for runtime, names in OVERRULED.items() if option in names and find_program(runtime))


def _check_firewall() -> Iterator[Finding]:
    """To conntrack a moved connection begins in the middle, as one does whose beginning it has not seen."""
    try:
        is_strict = _LOOSE.read_text().strip() == "0"
    except OSError:  # nobody tracks connections
        return
    if is_strict and (rule := _drops_invalid()):
        detail = (
            f"nf_conntrack_tcp_loose is 0, and a rule drops what it does not know ({rule}): moved connections stall"
        )
        yield Finding("firewall", Status.WARN, detail, "sysctl net.netfilter.nf_conntrack_tcp_loose=1")


def _drops_invalid() -> str:
    """Return a rule of the node that drops packets of connections that are not known; "" if there is none."""
    try:
        rules = nftables.run(NetNamespace.at("/proc/self/ns/net"), "list ruleset")
    except OcihookError:
        return ""
    lines = (line.strip() for line in rules.splitlines())
    return next((line for line in lines if "ct state" in line and "invalid" in line and "drop" in line), "")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_check_connection_options, _check_firewall)
