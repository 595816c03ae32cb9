"""A container that is created again with fewer rights than it had is never resumed with the old ones."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from integration.namespace import CommandError, wait_for
from integration.podman.engine import IMAGE, SITE
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HandledContainerd
from integration.runtime.test_archives import checkpoint
from integration.runtime.test_podman import AGAIN, STOPPED, assert_went_on

STRICT = {"restore_from": "latest", "on_restore_error": "fail"}


@pytest.fixture
def node(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[HandledContainerd]:
    """A containerd with ocihook installed."""
    node = HandledContainerd(scratch, forky_root, wheels, workload)
    node.install()
    yield node
    node.close()


def profile(path: Path, *denied: str) -> str:
    """Write a seccomp profile; return podman's option for it."""
    rules = [{"names": [*denied], "action": "SCMP_ACT_ERRNO"}]
    path.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}))
    return f"--security-opt=seccomp={path}"


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_fewer_rights_are_refused_by_name(make_handled: MakeHandled, runtime: str) -> None:
    podman = make_handled(runtime)
    one, two = podman.scratch / "one", podman.scratch / "two"
    for directory in (one, two):
        directory.mkdir()
    wide = {
        "capability": "--cap-add=SYS_CHROOT",
        "seccomp": profile(podman.scratch / "wide", "bpf"),
        "limit": "--ulimit=nofile=500:600",
        "volume": f"--volume={one}:/data",
        "tmpfs": "--tmpfs=/small:size=2m",
        "rule": "--device-cgroup-rule=c 10:* rw",
        "sysctl": "--sysctl=kernel.msgmax=9000",
        "home": "--env=HOME=/",  # podman sets it by the user: another program starts from scratch
    }
    podman.make("run", "job", *wide.values(), **STOPPED)
    podman.wait_to_count("job")
    last = podman.stop("job")
    narrowed = {
        r"capabilities that are missing: CAP_SYS_CHROOT \(bounding, effective, permitted\)": {
            "capability": "--cap-drop=SYS_CHROOT"
        },
        "the seccomp profile allows less of mount": {"seccomp": profile(podman.scratch / "narrow", "bpf", "mount")},
        "soft limit RLIMIT_NOFILE was 500, is 400": {"limit": "--ulimit=nofile=400:600"},
        "restrictions of mount /data that are new: ro": {"volume": f"{wide['volume']}:ro"},
        "source of mount /data was .*/one', is .*/two'": {"volume": f"--volume={two}:/data"},
        "size of mount /small was 2097152, is 1048576": {"tmpfs": "--tmpfs=/small:size=1m"},
        r"access to device c 10:\* that are missing: w": {"rule": "--device-cgroup-rule=c 10:* r"},
        "sysctls that are missing: kernel.msgmax": {"sysctl": "--label=A=1"},
        "no_new_privileges was False, is True": {"more": "--security-opt=no-new-privileges"},
        "read-only root was False, is True": {"more": "--read-only"},
        "user was '0:0.*', is '7:0": {"more": "--user=7"},
        "masked paths that are new: /proc/version": {"more": "--security-opt=mask=/proc/version"},
        "umask allows 700, allowed 755": {"more": "--umask=0077"},
    }
    for message, options in narrowed.items():
        with pytest.raises(CommandError, match=rf"not configured as the one that was checkpointed: .*{message}"):
            podman.make("run", "job", *(wide | options).values(), **STRICT)
        assert not podman.workloads(), message
        podman("rm", "--force", "job")
    podman.make("run", "job", *(wide | {"more": "--read-only"}).values(), restore_from="latest")  # a cold start
    podman.wait_to_count("job")
    assert podman.counts("job")[0] == 1
    assert "starts from scratch: the container is not configured as the one" in podman.agent_log()
    podman.remove("job")
    more = {
        "capability": "--cap-add=SYS_CHROOT,SYS_NICE",
        "limit": "--ulimit=nofile=700:800",
        "sysctl": "--sysctl=kernel.msgmax=9001",
    }
    podman.make("run", "job", *(wide | more).values(), **AGAIN)
    assert_went_on(podman, "job", last)
    status = Path(f"/proc/{podman.init_pid('job')}/status").read_text()
    bounding = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapBnd"))
    assert bounding >> 18 & 1  # CAP_SYS_CHROOT
    assert not bounding >> 23 & 1  # CAP_SYS_NICE
    assert "goes on with the rights it had: capabilities that are new: CAP_SYS_NICE" in podman.agent_log()
    msgmax = podman.namespace.run(
        "nsenter", "--ipc", "--target", str(podman.init_pid("job")), "cat", "/proc/sys/kernel/msgmax"
    )
    assert msgmax.strip() == "9001"


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_pod_with_fewer_rights_is_refused(node: HandledContainerd, runtime: str) -> None:
    """The new pod has another uid, and so other directories of the kubelet's and of containerd's."""
    shared: dict[str, Any] = {"volumes": ["/cache"], "host_paths": {"/host": "/scratch/one"}}
    for name in ("one", "two"):
        (node.scratch / name).mkdir()
    first = node.add(
        node.make_pod("first", runtime, member="job", checkpoint_on_stop="true"), "first", "main", "4", **shared
    )
    node.call("StartContainer", container_id=first)
    wait_for("it to count", lambda: len(node.counts(first)) > 2)
    last = node.stop(first)
    narrowed: dict[str, dict[str, Any]] = {
        r"capabilities that are missing: .*CAP_NET_RAW \(bounding, effective, permitted\)": {
            "capabilities": {"drop_capabilities": ["NET_RAW"]}
        },
        "the seccomp profile allows less of .*all other calls": {"seccomp": {"profile_type": 0}},  # the engine's own
        "masked paths that are new: /proc/version": {"masked_paths": ["/proc/version"]},
        "read-only root was False, is True": {"readonly_rootfs": True},
        "no_new_privileges was False, is True": {"no_new_privs": True},
        "user was '0:0.*', is '7:": {"run_as_user": {"value": 7}},
        "source of mount /host was '/scratch/one', is '/scratch/two'": {"host_paths": {"/host": "/scratch/two"}},
    }
    for number, (message, changes) in enumerate(narrowed.items()):
        pod = f"changed-{number}"
        container = node.add(
            node.make_pod(pod, runtime, member="job", **STRICT), pod, "main", "4", **(shared | changes)
        )
        with pytest.raises(grpc.RpcError, match=message):
            node.call("StartContainer", container_id=container)
        assert not node.namespace.pids("/workload")
    container = node.add(node.make_pod("again", runtime, member="job", **STRICT), "again", "main", "4", **shared)
    node.call("StartContainer", container_id=container)
    wait_for("it to count", lambda: len(node.counts(container)) > 2)
    assert node.counts(container)[0] == last + 1


def test_run_from_elsewhere_keeps_a_relative_volume(make_handled: MakeHandled) -> None:
    """`--volume ./data:/data` is of the directory where the container was made; without that one it is refused."""
    podman = make_handled("runc")
    podman.use_by_default()
    podman.ocihook("install", "--runtime", "--libexec", "/etc/ocihook/libexec")
    conf = podman.namespace.path("/etc/criu/default.conf")  # for crun on machines with hybrid cgroups
    conf.write_text(f"{conf.read_text() if conf.exists() else ''}cgroup-dump-controller unified\n")
    one, two = podman.scratch / "one", podman.scratch / "two"
    for directory in (one, two):
        (directory / "data").mkdir(parents=True)
        (directory / "data/who").write_text(directory.name)
    words = f"--detach --name job --network host --pids-limit 0 --volume ./data:/data {IMAGE} /workload 4"
    podman.namespace.run("sh", "-c", f"cd {one} && podman run {words}")
    podman.wait_to_count("job")
    last = checkpoint(podman, "job")
    run_from = f"cd {two} && PYTHONPATH={SITE} {sys.executable} -m ocihook run --from job"
    moved = one.rename(podman.scratch / "moved")
    with pytest.raises(CommandError, match=r"source of mount /data was .*/one/data', is .*/two/data'"):
        podman.namespace.run("sh", "-c", run_from)
    assert podman("ps", "--all", "--quiet") == ""
    moved.rename(one)
    podman.namespace.run("sh", "-c", run_from)
    podman.wait_to_count("job")
    assert podman.counts("job")[0] == last + 1
    assert podman.file("job", "/data/who") == "one"


def restrictions(pid: int) -> dict[str, list[str]]:
    """Return a process's restrictions as the kernel shows them: credentials, filters, limits, options of mounts."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    wanted = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp")
    found = {line.split(":")[0]: line.split()[1:] for line in status if line.startswith(wanted)}
    found["limits"] = Path(f"/proc/{pid}/limits").read_text().splitlines()
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        fields = line.split()
        found[f"mount {fields[4]}"] = sorted({*fields[5].split(",")} & {"ro", "nosuid", "nodev", "noexec"})
    return found


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_all_restrictions_come_back(make_handled: MakeHandled, runtime: str) -> None:
    podman = make_handled(runtime)
    (podman.scratch / "data").mkdir()
    words = [
        "--read-only",
        "--cap-drop=ALL",
        "--cap-add=KILL",
        "--security-opt=no-new-privileges",
        "--security-opt=mask=/proc/version:/proc/tty",
        f"--volume={podman.scratch}/data:/data:ro,noexec,nosuid,nodev",
        "--tmpfs=/small:size=2m,noexec",
        "--ulimit=nofile=500:600",
        "--group-add=9",
        profile(podman.scratch / "profile", "bpf"),
    ]
    podman.make("run", "job", *words, **STOPPED)
    podman.wait_to_count("job")
    before = restrictions(podman.init_pid("job"))
    assert "ro" in before["mount /"]
    assert before["NoNewPrivs"] == ["1"]
    last = podman.stop("job")
    podman.make("run", "job", *words, on_no_checkpoint="fail", **STRICT)
    assert_went_on(podman, "job", last)
    after = restrictions(podman.init_pid("job"))
    assert {key: {*after[key]} >= {*before[key]} for key in before} == dict.fromkeys(after, True)
    mounts = {key for key in after if key.startswith("mount ")}
    assert {key: after[key] for key in after.keys() - mounts} == {key: before[key] for key in before.keys() - mounts}
    assert "ro" in after["mount /proc/version"]  # it is the node's /dev/null
