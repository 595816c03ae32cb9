"""`ocihook image`: checkpoint archives as OCI images, in files and in registries."""

from pathlib import Path

import click

from ocihook.archive import oci_image
from ocihook.cli.registry import access_of, registry_options
from ocihook.cli.render import format_bytes, json_option, print_json, progress_bar
from ocihook.config import load_settings
from ocihook.registry.client import Reference
from ocihook.store.store import Store, store_workers

_thin = click.option(
    "--thin",
    "is_kept_thin",
    is_flag=True,
    help="Leave the memory of a thin archive in the store. Default: it goes along.",
)
_verify = click.option(
    "--verify/--no-verify",
    "is_verified",
    default=True,
    help="Read a checkpoint archive to its end before, and check every checksum in it. Default: verify.",
)


@click.group()
def image() -> None:
    """Make OCI images of checkpoint archives; CRI-O, containerd and podman restore containers from them."""


def _thin_rule(is_kept: bool) -> oci_image.ThinRule:  # noqa: FBT001 - the only one
    settings = load_settings()
    return oci_image.ThinRule(is_kept, Store.of(settings), store_workers(settings))


@image.command()
@click.argument("archive", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--oci-archive", "in_one_file", is_flag=True, help="OUTPUT is one tar file, not a directory.")
@click.option("--name", default="", metavar="REPOSITORY:TAG", help="Of the image, for those who import OUTPUT.")
@_thin
@_verify
@json_option
def build(
    *, archive: Path, output: Path, in_one_file: bool, name: str, is_kept_thin: bool, is_verified: bool, as_json: bool
) -> None:
    """Write OUTPUT, an OCI image layout with ARCHIVE as its layer. It stays compressed, or not, as it is."""
    with progress_bar("building", lambda: oci_image.work_bytes(archive, is_verified=is_verified)) as progress:
        built = oci_image.build_image(
            archive,
            output,
            in_one_file=in_one_file,
            name=name,
            thin=_thin_rule(is_kept_thin),
            is_verified=is_verified,
            progress=progress,
        )
    if as_json:
        print_json({"archive": str(archive), "output": str(output), "name": name, **_fields(built)})
    else:
        click.echo(f"{output}: {format_bytes(built.size_bytes)}, {built.digest}")


def _fields(built: oci_image.Built) -> dict[str, object]:
    return {"digest": built.digest, "bytes": built.size_bytes, "annotations": dict(built.annotations)}


@image.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("target", metavar="REGISTRY/REPOSITORY[:TAG]")
@_thin
@_verify
@registry_options
@json_option
def push(
    *,
    source: Path,
    target: str,
    is_kept_thin: bool,
    is_verified: bool,
    auth_file: Path | None,
    ca_file: Path | None,
    plain_http: bool,
    as_json: bool,
) -> None:
    """Push SOURCE to a registry: an image of `image build`, or an archive. What the registry has is not sent."""
    access = access_of(auth_file, ca_file, plain_http=plain_http)
    reference = Reference.parse(target)
    with progress_bar("pushing", lambda: oci_image.work_bytes(source, is_verified=is_verified)) as progress:
        pushed = oci_image.push_image(
            source, reference, access, thin=_thin_rule(is_kept_thin), is_verified=is_verified, progress=progress
        )
    sent_bytes = sum(blob.size_bytes for blob in pushed.blobs if blob.is_sent)
    if as_json:
        blobs = [{"digest": blob.digest, "bytes": blob.size_bytes, "sent": blob.is_sent} for blob in pushed.blobs]
        value = {"source": str(source), "reference": str(pushed.reference), "digest": pushed.digest}
        print_json({**value, "sent_bytes": sent_bytes, "blobs": blobs})
    else:
        total_bytes = sum(blob.size_bytes for blob in pushed.blobs)
        known = f", {format_bytes(total_bytes - sent_bytes)} were there already" if sent_bytes < total_bytes else ""
        click.echo(f"{pushed.reference}@{pushed.digest}: {format_bytes(sent_bytes)} sent{known}")
