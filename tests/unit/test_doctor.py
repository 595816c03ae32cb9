"""Each thing that would break a checkpoint is found, and comes with a remedy."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ocihook.criu.version import Program
from ocihook.ops import doctor
from ocihook.ops.doctor import Finding, Status


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Program]:
    """The programs of a node, to be filled in; its /etc/criu is tmp_path."""
    found: dict[str, Program] = {}
    monkeypatch.setattr(doctor, "find_program", found.get)
    monkeypatch.setattr(doctor, "CRIU_CONF_DIR", tmp_path)
    return found


def put(programs: dict[str, Program], name: str, *version: int) -> None:
    programs[name] = Program(name, f"/usr/bin/{name}", version)


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("version", "answer", "status"),
    [
        (None, "", Status.FAIL),
        ((3, 17, 1), "Looks good.", Status.FAIL),
        ((3, 19), "Looks good.", Status.WARN),
        ((4, 1, 1), "Looks good.", Status.OK),
        ((4, 1, 1), "Error (criu/x.c:1): no luck", Status.FAIL),
        ((4, 2, 1), "Looks good.", Status.OK),
    ],
)
def test_criu(
    programs: dict[str, Program],
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, ...] | None,
    answer: str,
    status: Status,
) -> None:
    monkeypatch.setattr(doctor, "run_output", lambda *_: answer)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    if version:
        put(programs, "criu", *version)
    finding = only(doctor._check_criu())
    assert finding.status is status
    assert finding.remedy or status is Status.OK


@pytest.mark.parametrize(
    ("version", "status", "word"),
    [
        ((1, 7, 24), Status.WARN, "no CheckpointContainer"),
        ((2, 0, 5), Status.WARN, "cannot restore"),
        ((2, 1, 9), Status.OK, "2.1.9"),
        ((2, 2, 6), Status.OK, "2.2.6"),
        ((2, 2, 7), Status.WARN, "switched on"),
        ((2, 3, 3), Status.OK, "2.3.3"),
        ((2, 3, 4), Status.WARN, "switched on"),
        ((2, 4, 0), Status.WARN, "no longer restores"),
    ],
)
def test_containerd(programs: dict[str, Program], version: tuple[int, ...], status: Status, word: str) -> None:
    put(programs, "containerd", *version)
    finding = only(doctor._check_engines())
    assert finding.status is status
    assert word in finding.detail


def test_block_must_be_in_the_file_that_the_runtime_reads(programs: dict[str, Program], tmp_path: Path) -> None:
    launcher = tmp_path / "criu-action"
    launcher.write_text("#!/bin/sh\nexit 0\n")
    launcher.chmod(0o755)
    put(programs, "criu", 4, 2, 1)
    put(programs, "crun", 1, 28)
    block = f"# BEGIN ocihook\naction-script {launcher}\n# END ocihook\n"
    (tmp_path / "runc.conf").write_text(block)
    assert only(doctor._check_installation()).status is Status.OK
    (tmp_path / "crun.conf").write_text("")  # hides runc.conf from crun
    assert only(doctor._check_installation()).status is Status.FAIL
    (tmp_path / "crun.conf").write_text(block)
    assert only(doctor._check_installation()).status is Status.OK
    put(programs, "crun", 1, 21)  # reads neither
    assert only(doctor._check_installation()).status is Status.FAIL
    (tmp_path / "default.conf").write_text(block)
    assert only(doctor._check_installation()).status is Status.OK
    (tmp_path / "default.conf").write_text("# BEGIN ocihook\n")
    assert "damaged" in only(doctor._check_installation()).detail


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.chmod(0o777), "can be changed by others"),
        (lambda path: path.chmod(0o644), "cannot be run"),
        (lambda path: path.write_text("#!/bin/sh\necho no >&2; exit 3\n"), "fails: no"),
        (lambda path: path.write_text("#!/no/such/interpreter\n"), "cannot be run"),
    ],
)
def test_launcher(programs: dict[str, Program], tmp_path: Path, spoil: Callable[[Path], None], word: str) -> None:
    launcher = tmp_path / "criu-action"
    launcher.write_text("#!/bin/sh\nexit 0\n")
    launcher.chmod(0o755)
    put(programs, "runc", 1, 3)
    (tmp_path / "runc.conf").write_text(f"# BEGIN ocihook\naction-script {launcher}\n# END ocihook\n")
    spoil(launcher)
    finding = only(doctor._check_installation())
    assert (finding.status, finding.remedy) == (Status.FAIL, "ocihook install")
    assert word in finding.detail


@pytest.mark.parametrize("option", ["stream", "lazy-pages", "leave-running", "network-lock skip", "log-file x"])
def test_harmful_options(programs: dict[str, Program], tmp_path: Path, option: str) -> None:
    (tmp_path / "runc.conf").write_text(f"tcp-established\n{option}\n")
    finding = only(doctor._check_criu_configuration())
    assert finding.status is Status.FAIL
    assert option.partition(" ")[0] in finding.detail


def test_harmless_configuration_and_foreign_scripts(programs: dict[str, Program], tmp_path: Path) -> None:
    (tmp_path / "runc.conf").write_text("tcp-established\nmanage-cgroups=ignore\naction-script /usr/bin/other\n")
    finding = only(doctor._check_criu_configuration())
    assert finding.status is Status.OK
    assert "/usr/bin/other" in finding.detail
    (tmp_path / "runc.conf").write_text("manage-cgroups ignore\n")
    assert only(doctor._check_criu_configuration()).remedy == "write manage-cgroups=ignore"


def test_nothing_installed(programs: dict[str, Program]) -> None:
    assert only(doctor._check_runtimes()).status is Status.FAIL
    assert only(doctor._check_engines()).status is Status.WARN


def test_every_finding_that_is_not_ok_has_a_remedy() -> None:
    findings = doctor.run_checks()
    assert {finding.check for finding in findings} >= {"kernel", "criu", "configuration", "cgroups", "memory"}
    assert all(finding.remedy for finding in findings if finding.status in (Status.WARN, Status.FAIL))
