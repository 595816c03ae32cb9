"""The kubelet's checkpoint API as docs/quickstart.md uses it, what people see of it, and what it leaves behind."""

import json
import os
import time
from collections.abc import Callable

from integration.criu.mount_behind import mount_behind
from integration.journals import last_session
from integration.kubelet.engine import CHECKPOINTS, NODE, Kubelet
from integration.namespace import wait_for
from integration.podman.engine import assert_packed, image_names
from integration.registry import DockerRegistry


def test_a_pod_goes_on_from_an_image(kubelet: Kubelet, make_registry: Callable[..., DockerRegistry]) -> None:
    node = kubelet.engine
    image = f"{make_registry().address}/team/job:step-1000"
    node.pull_from(image.partition("/")[0])
    container = kubelet.start("job")
    status, answer = kubelet.checkpoint("job")
    assert status == 200
    (archive,) = json.loads(answer)["items"]
    assert archive.startswith(f"{CHECKPOINTS}/checkpoint-job-{NODE}_team-main-")
    node.assert_counts(container)
    before = node.count(container)
    kubelet.remove("job")
    assert_packed(node.namespace.path(archive))
    dump = last_session(node.namespace, "post-dump")["container"]
    assert (dump["pod_namespace"], dump["pod_name"], dump["name"]) == ("team", f"job-{NODE}", "main")
    assert f"team/job-{NODE}/main" in node.ocihook("archive", "list", CHECKPOINTS)

    node.ocihook("image", "push", archive, image, "--plain-http")
    restored = kubelet.start("again", image, resume_signal="USR2")
    wait_for("the job to be told to go on", lambda: "resumed" in node.log(restored))
    assert node.count(restored)[1] == before[1]
    kubelet.remove("again")


def test_annotations_old_archives_and_errors(kubelet: Kubelet) -> None:
    node = kubelet.engine
    container = kubelet.start("job", mode="store")
    archives = []
    for _ in range(2):
        began_s = int(time.time())
        (archive,) = json.loads(kubelet.checkpoint("job")[1])["items"]
        assert "ocihook.thin" in image_names(node.namespace.path(archive))
        os.utime(node.namespace.path(archive), (0, 0))  # else it might still be written to
        archives.append(archive.rpartition("/")[2])
        wait_for("another second, which is in the name", lambda began_s=began_s: time.time() >= began_s + 1)  # type: ignore[misc]
    node.ocihook("wait")
    node.ocihook("store", "prune", "--keep-last", "1", "--archives", CHECKPOINTS)
    assert os.listdir(node.namespace.path(CHECKPOINTS)) == archives[1:]
    assert "every byte right" in node.ocihook("store", "verify", "--read-data")

    mount_behind(node.init_pid(container), node.scratch / "nvidia", "/tmp")
    status, answer = kubelet.checkpoint("job")
    assert status == 500
    assert f"ocihook: the dump of container team/job-{NODE}/main failed: /tmp was mounted into" in answer
    node.assert_counts(container)
    kubelet.remove("job")
