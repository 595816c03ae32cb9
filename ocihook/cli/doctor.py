"""`ocihook doctor`: what would make a checkpoint fail, here or of a container, each with its remedy."""

import os
from pathlib import Path

import click

from ocihook.cli.render import json_option, print_json, print_table
from ocihook.errors import UnsupportedError
from ocihook.node.doctor.archive import check_archive
from ocihook.node.doctor.run import check_container, check_node, check_process, repair
from ocihook.preflight.finding import Finding, Repair, Status
from ocihook.stages.recover import recover


@click.command()
@click.option("--container", help="Check this running container: its id, the beginning of it, or its name.")
@click.option("--pid", type=click.IntRange(1, 1 << 22), help="Check this process and its descendants.")
@click.option(
    "--archive",
    type=click.Path(exists=True, path_type=Path),
    help="Check whether this checkpoint, an archive or an image directory, can be restored here.",
)
@click.option(
    "--fix",
    is_flag=True,
    help="Do what is safe: complete the installation, start its socket, recover what was left, remove empty tables.",
)
@json_option
def doctor(*, container: str | None, pid: int | None, archive: Path | None, fix: bool, as_json: bool) -> None:
    """Check whether a checkpoint will work on this node, or of a container, or be restored here, and what to do if not.

    The last line says that it will, that it will except for the cases that warnings name, or that it will not.

    Exit status 0: it will, or will except for those cases; 1: it will not.
    """
    if sum(bool(chosen) for chosen in (container, pid, archive)) > 1:
        raise click.UsageError("--container, --pid and --archive exclude one another")
    findings = _check(container, pid, archive)
    done: list[str] = []
    if fix and any(finding.repair is not Repair.NONE for finding in findings):
        if os.geteuid() != 0:
            raise UnsupportedError("only root can change this node", hint="use sudo")
        done = repair(findings, lambda: map(str, recover()))
        findings = _check(container, pid, archive)
    will_work = all(finding.status is not Status.FAIL for finding in findings)
    warnings = (finding for finding in findings if finding.status is Status.WARN and finding.rules_out)
    exceptions = list(dict.fromkeys(finding.rules_out for finding in warnings))
    if as_json:
        print_json(
            {
                "will_work": will_work,
                "except_for": exceptions,
                "findings": [_json(finding) for finding in findings],
                "done": done,
            }
        )
    else:
        for line in done:
            click.echo(f"fixed: {line}")
        if fix and not done:
            click.echo("There was nothing to fix that is safe to fix.")
        print_table(["", "CHECK", "FINDING", "REMEDY"], [_row(finding) for finding in findings])
        what = "of this container " if container else "of this process " if pid else ""
        what = "A restore of this checkpoint" if archive else f"A checkpoint {what}".strip()
        click.echo(f"{what} {_verdict(exceptions, will_work=will_work)}")
    if not will_work:
        raise click.exceptions.Exit(1)


def _verdict(exceptions: list[str], *, will_work: bool) -> str:
    if not will_work:
        return "will not work here."
    return f"will work here, except for: {', '.join(exceptions)}." if exceptions else "will work here."


def _check(container: str | None, pid: int | None, archive: Path | None) -> list[Finding]:
    if archive:
        return check_archive(archive)
    if container:
        return check_container(container)
    return check_process(pid) if pid else check_node()


def _json(finding: Finding) -> dict[str, str | bool]:
    value = finding._asdict()
    del value["repair"], value["rules_out"]
    return value | {"can_fix": finding.repair is not Repair.NONE}


def _row(finding: Finding) -> list[str]:
    return [finding.status, finding.check, finding.detail, finding.remedy if finding.status is not Status.OK else ""]
