"""doctor as a command: its exit status is its answer."""

import json

import pytest
from click.testing import CliRunner

from ocihook.cli.doctor import doctor
from ocihook.preflight.finding import Finding, Status


@pytest.mark.parametrize(
    ("status", "exit_code", "verdict"),
    [
        (Status.OK, 0, "A checkpoint will work here."),
        (Status.SKIP, 0, "A checkpoint will work here."),
        (Status.WARN, 0, "A checkpoint will work here."),
        (Status.FAIL, 1, "A checkpoint will not work here."),
    ],
)
def test_exit_status_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, status: Status, exit_code: int, verdict: str
) -> None:
    findings = [Finding("kernel", Status.OK, "6.1"), Finding("criu", status, "too old", "install a newer one")]
    monkeypatch.setattr("ocihook.cli.doctor.check_node", lambda: findings)
    people = CliRunner().invoke(doctor)
    assert (people.exit_code, people.stdout.splitlines()[-1]) == (exit_code, verdict)
    assert ("install a newer one" in people.stdout) is (status is not Status.OK)
    programs = CliRunner().invoke(doctor, ["--json"])
    assert programs.exit_code == exit_code
    value = json.loads(programs.stdout)
    assert value["will_work"] is (exit_code == 0)
    assert value["findings"][1] == {
        "check": "criu",
        "status": str(status),
        "detail": "too old",
        "remedy": "install a newer one",
        "can_fix": False,
    }


def test_a_warning_that_rules_out_containers_is_in_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("kernel-6.16", Status.WARN, "CRIU is old", "install 4.2", rules_out="containers with Internet sockets"),
        Finding("mig", Status.OK, "none", rules_out="containers on MIG instances"),
        Finding("huge pages", Status.WARN, "never", "echo madvise"),
    ]
    monkeypatch.setattr("ocihook.cli.doctor.check_node", lambda: findings)
    done = CliRunner().invoke(doctor)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[-1] == "A checkpoint will work here, except for: containers with Internet sockets."
    value = json.loads(CliRunner().invoke(doctor, ["--json"]).stdout)
    assert (value["will_work"], value["except_for"]) == (True, ["containers with Internet sockets"])


def test_help_tells_what_the_exit_status_means() -> None:
    text = " ".join(CliRunner().invoke(doctor, ["--help"]).stdout.split())
    assert "Exit status 0: it will" in text
    assert "1: it will not" in text
