"""Checks of what becomes of connections: CRIU's options for them, firewalls on the way, and each of a container's."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ocihook.criu.conf import CRIU_CONF_DIR, options, read_block, remove_block
from ocihook.criu.files import OVERRULED, content
from ocihook.criu.version import find_program
from ocihook.errors import ConfigError, OcihookError
from ocihook.linux.sockets import Socket
from ocihook.net import nftables
from ocihook.net.namespace import NetNamespace
from ocihook.net.policy import IN_WORDS, Fate, fate, parse
from ocihook.net.survey import Survey
from ocihook.node.doctor.finding import Finding, Repair, Status
from ocihook.node.doctor.workload import Workload
from ocihook.node.install import CONF_NAMES

_LOOSE = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_loose")
_STATUS = {Fate.REFUSED: Status.FAIL, Fate.CLOSED: Status.WARN, Fate.KEPT_IF_SAME: Status.WARN}


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
            yield Finding("connections", Status.WARN, detail, "ocihook install", Repair.INSTALL)
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


def _check_connections(workload: Workload) -> Iterator[Finding]:
    """What the policy will do to each connection of a container; of a process that is in none CRIU alone decides."""
    survey = Survey.of(workload.pids) if workload.container else None
    if survey is None or workload.options.has("tcp-close") or not workload.options.has("tcp-established"):
        return
    try:
        policy = parse(workload.policy().tcp, "tcp")
    except OcihookError:  # reported by the check of the policy
        return
    for sock in survey.connections:
        decided = fate(sock, policy, survey.own)
        remedy = "set ocihook.io/tcp to what is to become of it" if decided in _STATUS else ""
        status = _STATUS.get(decided, Status.OK)
        yield Finding("connection", status, f"{sock} {IN_WORDS[decided]}", remedy)


def about_connection(sock: Socket, workload: Workload, by_engine: str) -> Iterator[Finding]:
    """Yield what CRIU's options make of a connection, where these decide."""
    who, options_ = workload.who(sock.pid), workload.options
    if options_.has("tcp-close"):
        detail = f"{who} has an established TCP connection; it is closed by the restore (tcp-close)"
        yield Finding("tcp-established", Status.OK, detail)
    elif not options_.has("tcp-established"):
        detail = f"{who} has an established TCP connection, and no option says what is to become of it"
        remedy = f"{options_.add('tcp-close')}, or tcp-established where the address stays{by_engine}"
        if workload.container:
            remedy = f"ocihook install{by_engine}"
        repair = Repair.INSTALL if workload.container else Repair.NONE
        yield Finding("tcp-established", Status.FAIL, detail, remedy, repair)
    elif not workload.container:
        address = f"the address {sock.address} (tcp-established)"
        detail = f"{who} has an established TCP connection; a restore needs {address}"
        remedy = f"tcp-close closes connections and needs no address{by_engine}"
        yield Finding("tcp-established", Status.WARN, detail, remedy)


WORKLOAD_CHECKS: tuple[Callable[[Workload], Iterator[Finding]], ...] = (_check_connections,)
