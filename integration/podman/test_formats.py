"""An archive as the earlier release wrote it, of which tests/data/formats has one, restored by a real CRIU."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from integration.journals import last_session
from integration.podman.engine import NOTES, Podman
from ocihook.packs.frame import decode_frame, encode_frame

BEFORE = Path(__file__).parents[2] / "tests/data/formats/0.1.0-before.tar.xz"
MANIFEST = "checkpoint/ocihook.manifest"
MIB = 72  # of each of three mappings


@pytest.fixture(scope="module")
def workload(mappings: Path) -> Path:
    """Containers run this one here."""
    return mappings


def earlier_manifest() -> tuple[int, dict[str, Any]]:
    """Return version and content of a manifest that the earlier release wrote."""
    with tarfile.open(BEFORE) as tar:
        archive = tar.extractfile("archive-plain.tar")
        assert archive is not None
        with tarfile.open(fileobj=io.BytesIO(archive.read())) as inner:
            member = inner.extractfile(MANIFEST)
            assert member is not None
            version, body = decode_frame("manifest", (1, 2), member.read())
    return version, json.loads(body)


def shape(value: Any) -> Any:  # noqa: ANN401 - anything that JSON can say
    """Return what a value is made of: names, and kinds of values."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def written_before(archive: Path, target: Path) -> None:
    """Write an archive without all that the earlier release did not write, and that in its shape, to the last name."""
    version, earlier = earlier_manifest()
    with tarfile.open(archive) as source, tarfile.open(target, "w", format=source.format) as made:
        for member in source:
            data = source.extractfile(member) if member.isfile() else None
            if member.name.removeprefix("checkpoint/") in NOTES:
                continue
            if member.name == MANIFEST:
                assert data is not None
                _, body = decode_frame("manifest", (version,), data.read())
                value = {name: each for name, each in json.loads(body).items() if name in earlier}
                for part in ("container", "host"):
                    value[part] = {name: each for name, each in value[part].items() if name in earlier[part]}
                value["other_images"] = [one for one in value["other_images"] if one["name"] not in NOTES]
                assert shape(value) == shape(earlier)
                content = encode_frame("manifest", version, json.dumps(value, indent=1).encode())
                member.size, data = len(content), io.BytesIO(content)
            made.addfile(member, data)


def test_an_archive_of_the_earlier_release(podman: Podman) -> None:
    """Most of its memory goes past CRIU all the same."""
    fresh, archive = podman.scratch / "fresh.tar", podman.scratch / "c.tar"
    podman.start("c", MIB)
    podman.checkpoint("c", fresh)
    before = podman.count("c")
    podman.remove("c")
    written_before(fresh, archive)
    assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    restore = last_session(podman.namespace, "pre-restore")
    assert sum(phase["bytes"] for phase in restore["phases"] if phase["name"] == "memory write back") > MIB << 20
