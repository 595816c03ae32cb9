"""Checkpoint images through a registry: pushed by us, pulled and restored by podman."""

import json
from collections.abc import Callable

from integration.podman.engine import Podman
from integration.registry import DockerRegistry
from integration.test_registry import write_auth_file


def test_a_pushed_checkpoint_is_pulled_and_restored(
    podman: Podman, make_registry: Callable[..., DockerRegistry]
) -> None:
    registry = make_registry(has_auth=True)
    archive = podman.scratch / "c.tar"
    podman.start("c")
    podman.checkpoint("c", archive, compression="zstd")
    before = podman.count("c")
    podman.remove("c")
    auth_file = str(write_auth_file(podman.scratch / "auth.json", registry))
    image = f"{registry.address}/team/job:1"
    push = ("image", "push", str(archive), image, "--plain-http", "--authfile", auth_file, "--json")
    pushed = json.loads(podman.ocihook(*push))
    assert pushed["sent_bytes"] > archive.stat().st_size
    assert json.loads(podman.ocihook(*push))["sent_bytes"] == 0

    podman("pull", "--tls-verify=false", "--authfile", auth_file, image)
    (inspected,) = json.loads(podman("image", "inspect", image))
    assert inspected["Digest"] == pushed["digest"]
    podman("container", "restore", image)
    podman.assert_goes_on("c", before)
