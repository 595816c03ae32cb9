"""What doctor says about connections on a node: options that undo or do nothing, firewalls that stop what moved."""

from pathlib import Path

import pytest

from ocihook.criu import files
from ocihook.criu.version import Program
from ocihook.errors import UnsupportedError
from ocihook.net import nftables
from ocihook.node.doctor import network
from ocihook.preflight.finding import Repair, Status

_STRICT = "table inet f {\n chain in {\n  ct state established accept\n  ct state invalid drop\n }\n}\n"


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make a node that has runc, with an empty configuration of CRIU."""
    known = {"runc": Program("runc", "/usr/bin/runc", (1, 3))}
    monkeypatch.setattr(network, "find_program", known.get)
    for module in (network, files):
        monkeypatch.setattr(module, "CRIU_CONF_DIR", tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("runc.conf", "tcp-close\n", "every dump loses its connections"),
        ("crun.conf", "# ours\ntcp-close\n", "every dump loses its connections"),
        ("default.conf", "tcp-close\n", "every dump loses its connections"),
        ("default.conf", "tcp-established\n", "has no effect: runc overrides it"),
        ("default.conf", "skip-in-flight\n", "has no effect: runc overrides it"),
        ("runc.conf", "# BEGIN ocihook\naction-script /x\n# END ocihook\n", "an earlier ocihook"),
        ("runc.conf", "tcp-established\nskip-in-flight\n", ""),
        ("default.conf", "network-lock nftables\n", ""),
    ],
)
def test_options_about_connections(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    found = list(network._check_connection_options())
    assert len(found) == bool(said)
    for finding in found:
        assert finding.status is Status.WARN
        assert str(tmp_path / name) in finding.detail
        assert said in finding.detail
        assert (finding.repair is Repair.INSTALL) is ("earlier" in said)


@pytest.mark.parametrize(
    ("loose", "rules", "is_told"),
    [("0", _STRICT, True), ("1", _STRICT, False), ("0", "", False), ("", _STRICT, False), ("0", None, False)],
)
def test_a_firewall_that_stops_what_has_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loose: str, rules: str | None, *, is_told: bool
) -> None:
    """Without `loose` the node tracks no connections; without rules the kernel does not give them."""

    def run(*_: object) -> str:
        if rules is None:
            raise UnsupportedError("no nftables")
        return rules

    (tmp_path / "loose").write_text(f"{loose}\n")
    monkeypatch.setattr(network, "_LOOSE", tmp_path / ("loose" if loose else "none"))
    monkeypatch.setattr(nftables, "run", run)
    found = list(network._check_firewall())
    assert [finding.status for finding in found] == [Status.WARN] * is_told
    assert all("(ct state invalid drop)" in finding.detail for finding in found)
