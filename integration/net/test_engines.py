"""Connections through engines and with what else a container can have: CNI, netavark, pods of several, GPUs."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from integration import fake_driver
from integration.journals import sessions
from integration.namespace import wait_for
from integration.net.conftest import MakeNode
from integration.net.containerd import NetContainerd
from integration.net.engine import HandledNetPodman, Place
from integration.net.pair import Pair, endpoints
from integration.net.traffic import CONNECTIONS, assert_flows
from integration.podman.engine import IMAGE

GPU_DEVICES = (("/dev/null", "ctl"), (fake_driver.GPU_NODES[3], "0"))


@pytest.fixture
def containerd(scratch: Path, forky_root: Path, wheels: Path, peer: Path) -> Iterator[NetContainerd]:
    """A containerd with ocihook and a bridge."""
    node = NetContainerd(scratch, forky_root, wheels, peer)
    try:
        node.make_bridge()
        node.install()
        yield node
    finally:
        node.close()


def test_pods_of_containerd_at_new_addresses(containerd: NetContainerd) -> None:
    """As the kubelet has it: frozen while they are archived, left running, then recreated."""
    old = {"server": Place.of(1, 2), "client": Place.of(1, 1)}
    new = {"server": Place.of(2, 2), "client": Place.of(2, 1)}
    words = endpoints(old["server"])
    ids = {name: containerd.start_peer(name, old[name], name, *words[name]) for name in old}
    said = {name: partial(containerd.said, container) for name, container in ids.items()}
    assert_flows(said)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: containerd.checkpoint(ids[name], f"{name}.tar"), ids))
    assert_flows(said)
    containerd.unplug(*ids)  # what they say from now on would not be forgotten by the other's checkpoint
    for container in ids.values():
        containerd.remove(container)
    pairs = [f"{a}={b}" for name in old for a, b in zip(old[name], new[name], strict=True)]
    containerd.configure("\n".join(["[policy]", f'address_map = "{",".join(pairs)}"', ""]))
    restored = {name: containerd.start_peer(f"{name}2", new[name], image=f"/scratch/{name}.tar") for name in ids}
    containerd.plug(*(f"{name}2" for name in restored))
    assert_flows({name: partial(containerd.said, container) for name, container in restored.items()})


def test_a_container_that_is_stopped_and_made_again(scratch: Path, forky_root: Path, wheels: Path, peer: Path) -> None:
    """By the runtime handler, in a new network namespace; the other end sees a pause."""
    node = HandledNetPodman(scratch, forky_root, wheels, peer)
    try:
        notes = {"checkpoint_on_stop": "true", "restore_from": "latest", "on_restore_error": "fail"}
        pair = Pair(node, tcp="established", **notes)
        words = endpoints(pair.places["server"])["server"]
        for _ in range(2):
            node.unplug("server")
            node("stop", "--time", "60", "server")
            node("rm", "server")
            node.remove_place("server")
            node.make_place("server", pair.places["server"], is_plugged=False)
            again = {**notes, "tcp": "established", "on_no_checkpoint": "fail"}
            node.start_peer("server", "server", "server", *words, says="", **again)
            node.plug("server")
            pair.assert_flows()
            pair.assert_nothing_is_left()
    finally:
        node.close()


def test_a_container_of_podmans_own_network(make_node: MakeNode) -> None:
    """It listens at whatever address podman gives it when it is restored."""
    node = make_node()
    node("network", "create", "--subnet", "10.99.7.0/24", "--disable-dns", "own")

    def address() -> str:
        shown = json.loads(node("inspect", "server"))[0]["NetworkSettings"]["Networks"]["own"]["IPAddress"]
        return str(shown)

    node.start_peer("other", "own:", "pause", says="")
    carries = ["--env=OWN=10.99.7.77"]
    node.start_peer("server", "own:ip=10.99.7.77", "server", "10.99.7.77/7000", options=carries)
    assert address() == "10.99.7.77"
    archive = node.scratch / "server.tar"
    node.checkpoint("server", archive)
    node.remove("server")
    node.restore(archive, "--ignore-static-ip", "--ignore-static-mac")
    assert address() != "10.99.7.77"
    assert f"its environment has 10.99.7.77 in 'OWN'; the address is {address()} now" in node.agent_log()
    log = node.scratch / "probe"
    node.namespace.spawn(node.peer, "client", f"{address()}/7000", log=log)
    wait_for("the listener to answer", lambda: "datagrams" in log.read_text())
    assert re.search(r"^connection 1 sent \d+ received [1-9]", log.read_text(), re.MULTILINE)


def test_closing_by_the_engines_own_option(make_node: MakeNode) -> None:
    """CRIU then makes all connections, closed, at whatever address; ocihook moves what listens."""
    pair = Pair(make_node("crun"), tcp="established")
    node = pair.node
    node.checkpoint("server", pair.archives["server"])
    node.remove("server")
    node.remove_place("server")
    place = node.make_place("server", Place.of(1, 2))
    node.restore(pair.archives["server"], "--tcp-close")
    wait_for("all connections to end", lambda: node.said("server").count("broken ") == CONNECTIONS)
    log = node.spawn_peer("client", "client", f"{place.four}/7000")
    wait_for("the listener to answer", lambda: "datagrams" in log.read_text())
    assert re.search(r"^connection 1 sent \d+ received [1-9]", log.read_text(), re.MULTILINE)
    assert all(session["effects"] == [] for session in sessions(node.namespace))
    assert node.holds("server") == []


def test_containers_of_a_pod_share_a_network(make_node: MakeNode) -> None:
    """Of two that are dumped at once neither lets the other's traffic go."""
    pair = Pair(make_node(), tcp="established")
    node = pair.node
    node.start_peer("second", "server", "server", f"{pair.places['server'].four}/7100")
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            names = ("server", "second")
            list(pool.map(lambda name: node.checkpoint(name, node.scratch / f"{name}.tar", "--leave-running"), names))
        pair.assert_flows()
    assert all(session["effects"] == [] for session in sessions(node.namespace))
    assert node.holds("server") == []


def test_an_engine_that_thaws_what_has_no_gpu_when_criu_fails(make_node: MakeNode, cuda_files: Path) -> None:
    """As one does that was restarted: all the time, from when CRIU has all threads and is about to fail."""
    node = make_node(cuda_files=cuda_files)
    node.make_place("job", Place.of(1, 1))
    devices = [f"--device={path}:/dev/nvidia{name}" for path, name in GPU_DEVICES]
    options = [
        "--annotation=ocihook.io/preflight=warn",
        "--network",
        "ns:/run/netns/job",
        "--pids-limit",
        "0",
        *devices,
    ]
    node("run", "--detach", "--name", "job", *options, IMAGE, "/cuda_workload", "16", "children=1", "watch")
    wait_for("the GPU to be used", lambda: node.count("job")[0] > 2)
    before = node.count("job")
    container = node("inspect", "--format", "{{.Id}}", "job").strip()
    switch, done = f"/sys/fs/cgroup/libpod_parent/libpod-{container}/cgroup.freeze", node.scratch / "done"
    thaw = f"while [ ! -e {done} ]; do echo 0 >{switch}; sleep 0.002; done"
    node.act_at("network-lock", f"setsid sh -c '{thaw}' </dev/null >/dev/null 2>&1 & exit 1")
    try:
        assert "failed" in node.checkpoint("job", node.scratch / "job.tar", "--leave-running", check=False)
        node.assert_goes_on("job", before)
    finally:
        done.touch()
    assert all(session["effects"] == [] for session in sessions(node.namespace))


def test_gpu_memory_and_connections_together(make_node: MakeNode, cuda_files: Path) -> None:
    node = make_node(cuda_files=cuda_files)
    options = [f"--device={path}:/dev/nvidia{name}" for path, name in GPU_DEVICES]
    pair = Pair(node, server=("beside", "/cuda_workload", "24"), options=options, tcp="established")
    wait_for("the GPU to be used", lambda: node.count("server")[0] > 2)
    for _ in range(2):
        before = node.count("server")
        pair.checkpoint()
        pair.assert_whole()
        pair.remove()
        pair.remove_places()
        pair.make_places(0, is_plugged=False)
        pair.restore()
        pair.assert_flows()
        node.assert_goes_on("server", before)
