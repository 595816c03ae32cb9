"""What a restore finds out about a container's network: where it is, which addresses it has, what has old ones."""

import json
import os
import subprocess
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ocihook.container.runtime_call import find_network_namespace
from ocihook.errors import IdentificationError, UnsupportedError
from ocihook.net import restore
from ocihook.net.moving import make_plan
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import Link, Route
from ocihook.net.note import NetworkNote
from ocihook.net.old_addresses import carriers, strayed
from ocihook.net.policy import parse
from tests.fakes.sockets import make_socket, raw

OWN, NEW = ip_address("10.0.0.1"), ip_address("10.9.0.1")
SOCKETS = [make_socket(1, "10.0.0.1"), make_socket(2, "127.0.0.1"), make_socket(3, "10.0.0.1", "192.0.2.7")]


def bundle(directory: Path, *namespaces: dict[str, str]) -> str:
    (directory / "config.json").write_text(json.dumps({"linux": {"namespaces": [{"type": "pid"}, *namespaces]}}))
    return str(directory)


def test_the_namespace_that_a_bundle_names(tmp_path: Path) -> None:
    here = os.getpid()
    assert find_network_namespace(here, bundle(tmp_path)) is None
    assert find_network_namespace(here, bundle(tmp_path, {"type": "network"})) == ""
    path = find_network_namespace(here, bundle(tmp_path, {"type": "network", "path": "/proc/self/ns/net"}))
    assert path is not None
    assert NetNamespace.at(path) == NetNamespace(path, os.stat("/proc/self/ns/net").st_ino)
    assert NetNamespace.at(path).is_ours


@pytest.mark.parametrize("path", ["/proc/self/ns/none", "/etc/hostname", "/proc/self/ns"])
def test_what_is_no_namespace(tmp_path: Path, path: str) -> None:
    with pytest.raises(
        IdentificationError, match=f"{path}, which the container's bundle names, is not a network namespace"
    ):
        find_network_namespace(os.getpid(), bundle(tmp_path, {"type": "network", "path": path}))


def here(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> NetNamespace:
    link = Link("eth0", 2, "", "veth", 1500, is_up=True, is_loopback=False, addresses=addresses)
    monkeypatch.setattr(restore, "links", lambda _namespace, **_: [link])
    return NetNamespace("/proc/self/ns/net", 1)


def test_own_addresses_are_those_of_the_note(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = here(monkeypatch, "10.9.0.1/16", "10.0.0.7/8")
    links = [Link("eth0", 9, "", "", 1500, is_up=True, is_loopback=False, addresses=("10.0.0.1/8", "10.0.0.7/8"))]
    found = restore._own_addresses(SOCKETS, namespace, NetworkNote(links=tuple(links)))
    assert found[OWN] == NEW
    assert found[ip_address("10.0.0.7")] == ip_address("10.0.0.7")


def test_without_a_note_sockets_tell_which_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restore._own_addresses(SOCKETS, here(monkeypatch, "10.9.0.1/16"), None)[OWN] == NEW
    assert OWN in restore._own_addresses(SOCKETS, here(monkeypatch, "10.9.0.1/16", "10.9.0.2/16"), None).gaps
    assert restore._own_addresses(SOCKETS, None, None).pairs == {OWN: OWN}  # CRIU makes the network, as it was


def test_what_still_has_old_addresses_is_told() -> None:
    environment: dict[str, Any] = {
        "MASTER_ADDR": "10.0.0.1",
        "URL": "http://10.0.0.1:80/",
        "OTHER": "10.0.0.10 110.0.0.1",
    }
    command = ["sh", "-c", "echo ready; read line"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            told = list(carriers(program.pid, {"10.0.0.1": "10.9.0.1"}))
            assert list(carriers(program.pid, {})) == []
        finally:
            program.kill()
    assert [line for line in told if "environment" in line] == [
        f"its environment has 10.0.0.1 in {name!r}; the address is 10.9.0.1 now" for name in ("MASTER_ADDR", "URL")
    ]


def test_link_local_addresses_become_those_of_the_same_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in no note: each node makes its own."""
    listener = make_socket(4, "fe80::1", interface="eth0")
    client = make_socket(5, "fe80::1", "fe80::9", interface="eth0")
    elsewhere = make_socket(6, "fe80::2", interface="eth1")
    namespace = here(monkeypatch, "fe80::7/64")
    found = restore._own_addresses([listener, client, elsewhere], namespace, NetworkNote(links=()))
    assert found.pairs == {ip_address("fe80::1"): ip_address("fe80::7")}
    assert "no interface eth1" in found.gaps[ip_address("fe80::2")]
    plan = make_plan([listener, client], parse("established", "tcp"), found, own=found.pairs.keys())
    assert next(move.ends.local for move in plan.moves) == raw("fe80::7")
    assert [move.sock for move in plan.closed] == [client]  # its peer knows another address


def test_link_local_addresses_of_ipv4_are_in_the_note_and_move_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, client = make_socket(4, "169.254.0.1"), make_socket(5, "169.254.0.1", "169.254.0.9")
    note = NetworkNote(links=(), of_link={"eth0": ("169.254.0.1/16",), "eth1": ("169.254.0.2/16",)})
    namespace = here(monkeypatch, "169.254.0.7/16")
    found = restore._own_addresses([listener, client], namespace, note)
    assert found.pairs == {ip_address("169.254.0.1"): ip_address("169.254.0.7")}
    assert not found.gaps  # of an address that no socket has
    plan = make_plan([listener, client], parse("established", "tcp"), found, own=found.pairs.keys())
    assert next(move.ends.local for move in plan.moves) == raw("169.254.0.7")
    assert [move.sock for move in plan.closed] == [client]

    namespace = here(monkeypatch)
    found = restore._own_addresses([listener], namespace, note)
    with pytest.raises(UnsupportedError, match=r"TCP 169.254.0.1:.*eth0 had 169.254.0.1, and has none where"):
        make_plan([listener], parse("established", "tcp"), found, own=found.pairs.keys())


def test_routes_that_have_old_addresses_or_lead_nowhere() -> None:
    had = [Route("0.0.0.0/0", "10.0.0.254", 2), Route("10.0.0.0/8", "", 2), Route("172.16.0.0/12", "10.0.0.253", 2)]
    has = [Route("0.0.0.0/0", "10.9.0.254", 2), Route("10.0.0.1/32", "", 2), Route("192.0.2.0/24", "10.0.0.1", 2)]
    assert list(strayed(had, has, {"10.0.0.1": "10.9.0.1"})) == [
        "its route to 10.0.0.1/32 has 10.0.0.1; the address is 10.9.0.1 now",
        "its route to 192.0.2.0/24 has 10.0.0.1; the address is 10.9.0.1 now",
        "it had a route to 172.16.0.0/12 by 10.0.0.253, and has none where it is restored",
    ]
    assert list(strayed(had, had, {})) == []
