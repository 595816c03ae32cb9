"""`ocihook doctor`: what would keep a checkpoint from working here, each with its remedy."""

import click

from ocihook.cli.render import json_option, print_json, print_table
from ocihook.ops.doctor import Finding, Status, run_checks


@click.command()
@json_option
def doctor(*, as_json: bool) -> None:
    """Tell whether a checkpoint will work on this node, and what to do if not.

    Exit status 0: it will (warnings may tell of cases in which it will not); 1: it will not.
    """
    findings = run_checks()
    will_work = all(finding.status is not Status.FAIL for finding in findings)
    if as_json:
        print_json({"will_work": will_work, "findings": [finding._asdict() for finding in findings]})
    else:
        print_table(["", "CHECK", "FINDING", "REMEDY"], [_row(finding) for finding in findings])
        click.echo("A checkpoint will work here." if will_work else "A checkpoint will not work here.")
    if not will_work:
        raise click.exceptions.Exit(1)


def _row(finding: Finding) -> list[str]:
    return [finding.status, finding.check, finding.detail, finding.remedy if finding.status is not Status.OK else ""]
