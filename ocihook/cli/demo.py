"""`ocihook demo`: checkpoint and restore of a real container on this node, with figures."""

import dataclasses

import click

from ocihook.cli.render import format_bytes, json_option, print_json, print_table
from ocihook.errors import OcihookError
from ocihook.node.demo import DemoResult, check_node, enter_private_namespace, run_demo


@click.command()
@click.option(
    "--size",
    "size_mib",
    type=click.IntRange(16, 1 << 20),
    default=1024,
    show_default=True,
    help="Memory of the container in MiB.",
)
@click.option("--inside", is_flag=True, hidden=True, help="Already in a private mount namespace.")
@json_option
def demo(*, size_mib: int, inside: bool, as_json: bool) -> None:
    """Checkpoint a podman container through ocihook, remove it, restore it, and prove that nothing was lost.

    Nothing of this machine's configuration or containers is touched. Needs root, podman, criu, and runc or crun.
    """
    runtime = check_node()
    if not inside:
        options = ["--size", str(size_mib), *(["--json"] if as_json else [])]
        enter_private_namespace(["demo", "--inside", *options])
    result = run_demo(runtime, size_bytes=size_mib << 20, say=lambda step: click.echo(f"-> {step}", err=True))
    if as_json:
        print_json({**dataclasses.asdict(result), "succeeded": result.succeeded})
    else:
        print_table(["", "", ""], _rows(result))
    if not result.succeeded:
        raise OcihookError("the restored container is not what was checkpointed")


def _rows(result: DemoResult) -> list[list[str]]:
    share = f"{100 * result.packed_bytes / max(result.raw_bytes, 1):.0f} % of raw"
    same = "the same" if result.checksum_before == result.checksum_after else "DIFFERENT"
    return [
        ["memory images, raw", format_bytes(result.raw_bytes), ""],
        ["memory images, packed", format_bytes(result.packed_bytes), share],
        ["podman's archive", format_bytes(result.archive_bytes), "nothing but CRIU's small images beside the packs"],
        ["checkpoint", f"{result.checkpoint_s:.2f} s", f"podman with {result.runtime}"],
        ["  container frozen", f"{result.frozen_s:.2f} s", "CRIU's own measure"],
        ["  CRIU writes memory", f"{result.criu_memory_s:.2f} s", ""],
        ["  ocihook packs", f"{result.pack_s:.2f} s", _rate(result.raw_bytes, result.pack_s)],
        ["restore", f"{result.restore_s:.2f} s", ""],
        ["  ocihook verifies, unpacks", f"{result.unpack_s:.2f} s", _rate(result.raw_bytes, result.unpack_s)],
        ["count", f"{result.count_before} -> {result.count_after}", "went on where it was"],
        ["checksum of all memory", result.checksum_after[:16], same],
    ]


def _rate(size_bytes: int, seconds: float) -> str:
    return f"{format_bytes(int(size_bytes / seconds))}/s" if seconds else ""
