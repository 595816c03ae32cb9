"""Which lines of its configuration files CRIU refuses: what doctor says, the CRIU of the machine does."""

import os
import re
from pathlib import Path

import pytest

from ocihook.criu.options import faults
from ocihook.criu.version import run_output
from ocihook.node.doctor.node import _check_criu, _known_options

_REFUSES = re.compile(r"unrecognized option|requires an argument|doesn't allow an argument|is ambiguous")


@pytest.mark.parametrize(
    "line",
    [
        "tcp-close",
        "tcp-close # why",
        "no-tcp-close",
        "tcp-clos",
        "ghost-limi 5M",
        "allow-uprobes",
        "manage-cgroups=ignore",
        "verbosity",
        'lsm-profile "selinux:a"',
        "tcp-closed",
        "tcp-close#why",
        "--tcp-close",
        "tcp-close\r",
        "tcp-close=yes",
        "no-ghost-limit",
        "ghost-limit",
        "tls-c x",
        "xyz",
    ],
)
def test_what_criu_refuses_is_found(tmp_path: Path, line: str) -> None:
    conf = tmp_path / "criu.conf"
    conf.write_text(f"{line}\n", newline="")
    said = run_output("criu", "check", "--config", str(conf))
    assert said
    found = list(faults(conf.read_bytes(), _known_options()))
    assert bool(_REFUSES.search(said)) == bool(found), said.splitlines()[:3]


def test_doctor_leaves_no_link_where_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU links the earlier images that its configuration names beside its images, also for `criu check`."""
    conf, place = tmp_path / "criu.conf", tmp_path / "place"
    conf.write_text("track-mem\nprev-images-dir /\n")
    place.mkdir()
    monkeypatch.setenv("CRIU_CONFIG_FILE", str(conf))
    monkeypatch.chdir(place)
    run_output("criu", "check")
    assert os.readlink("parent") == "/"
    Path("parent").unlink()
    assert [finding.check for finding in _check_criu()] == ["criu"]
    assert os.listdir() == []
