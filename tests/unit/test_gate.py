"""Which differences between two bundles keep a container from resuming: table, and properties of any pair."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocihook.container.spec import SpecFacts, spec_facts
from ocihook.errors import UnsupportedError
from ocihook.runtime.gate import Difference, Kind, check_spec, compare
from ocihook.session.record import from_json, to_json

BUNDLE = Path("/b")
POD_UID = "io.kubernetes.cri.sandbox-uid"
NAMESPACE = "io.kubernetes.cri.sandbox-namespace"
Spec = dict[str, Any]


def spec(pod: str = "0b1c", container: str = "a" * 64) -> Spec:
    """Return a bundle as containerd would write it."""
    kubelet = f"/var/lib/kubelet/pods/{pod}"
    state = f"/run/containerd/io.containerd.grpc.v1.cri/sandboxes/{container}"
    return {
        "hostname": f"host-{pod}",
        "root": {"path": f"/run/{container}/rootfs", "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 1, "gid": 2, "additionalGids": [3], "umask": 0o022},
            "capabilities": {
                name: ["CAP_CHOWN", "CAP_KILL"]
                for name in ("bounding", "effective", "permitted", "inheritable", "ambient")
            },
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 500, "hard": 600}],
            "noNewPrivileges": False,
            "apparmorProfile": "",
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["rw", "size=64m", "mode=1777"]},
            {"destination": "/data", "type": "bind", "source": "/srv/data", "options": ["rbind", "rshared", "rw"]},
            {
                "destination": "/cache",
                "type": "bind",
                "source": f"{kubelet}/volumes/kubernetes.io~empty-dir/cache",
                "options": ["rbind", "rprivate", "rw"],
            },
            {"destination": "/etc/hostname", "type": "bind", "source": f"{state}/hostname", "options": ["rbind"]},
            {"destination": "/last", "type": "bind", "source": f"{kubelet}/containers/main/{container[:8]}"},
            {
                "destination": "/token",
                "type": "bind",
                "source": f"{kubelet}/volumes/kubernetes.io~projected/kube-api-access-{container[:5]}",
                "options": ["rbind", "ro"],
            },
        ],
        "linux": {
            "cgroupsPath": f"/kubepods/{pod}/{container}",
            "namespaces": [
                {"type": "pid"},
                {"type": "mount"},
                {"type": "ipc"},
                {"type": "network", "path": f"/n/{pod}"},
            ],
            "maskedPaths": ["/proc/kcore"],
            "readonlyPaths": ["/proc/sys"],
            "sysctl": {"kernel.msgmax": "100"},
            "devices": [
                {"path": "/dev/x", "type": "c", "major": 10, "minor": 4, "fileMode": 0o666, "uid": 0, "gid": 0}
            ],
            "resources": {
                "memory": {"limit": 1 << 30},
                "devices": [
                    {"allow": False, "access": "rwm"},
                    {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rw"},
                    {"allow": True, "type": "c", "major": 10, "minor": 4, "access": "rwm"},
                ],
            },
            "seccomp": {
                "defaultAction": "SCMP_ACT_ERRNO",
                "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
                "syscalls": [
                    {"names": ["read", "write"], "action": "SCMP_ACT_ALLOW"},
                    {
                        "names": ["clone"],
                        "action": "SCMP_ACT_ALLOW",
                        "args": [{"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}],
                    },
                ],
            },
        },
        "annotations": {"io.kubernetes.cri.image-name": "a@sha256:1", NAMESPACE: "default", POD_UID: pod},
    }


def changed(change: Callable[[Spec], object]) -> SpecFacts:
    made = spec("ffff", "b" * 64)
    change(made)
    return spec_facts(made, BUNDLE)


def kinds(found: tuple[Difference, ...]) -> set[Kind]:
    return {difference.kind for difference in found}


def mount(made: Spec, place: str) -> Spec:
    return next(entry for entry in made["mounts"] if entry["destination"] == place)


def syscalls(made: Spec) -> list[Any]:
    listed: list[Any] = made["linux"]["seccomp"]["syscalls"]
    return listed


# What takes a right away; the same the other way round gives it.
NARROWER: dict[str, tuple[Callable[[Spec], object], str]] = {
    "capability": (
        lambda s: s["process"]["capabilities"]["bounding"].remove("CAP_KILL"),
        r"capabilities that are missing: CAP_KILL \(bounding\)",
    ),
    "ambient": (
        lambda s: s["process"]["capabilities"].update(ambient=None),
        r"missing: CAP_CHOWN \(ambient\), CAP_KILL \(ambient\)",
    ),
    "no capabilities": (
        lambda s: s["process"].pop("capabilities"),
        r"CAP_KILL \(ambient, bounding, effective, inheritable, permitted\)",
    ),
    "no new privileges": (lambda s: s["process"].update(noNewPrivileges=True), "no_new_privileges was False, is True"),
    "umask": (lambda s: s["process"]["user"].update(umask=0o077), "umask allows 700, allowed 755"),
    "soft limit": (lambda s: s["process"]["rlimits"][0].update(soft=400), "soft limit RLIMIT_NOFILE was 500, is 400"),
    "hard limit": (lambda s: s["process"]["rlimits"][0].update(hard=500), "hard limit RLIMIT_NOFILE was 600, is 500"),
    "another limit": (
        lambda s: s["process"]["rlimits"].append({"type": "RLIMIT_CORE", "soft": 0, "hard": 0}),
        "limit RLIMIT_CORE was not set, is 0:0",
    ),
    "root": (lambda s: s["root"].update(readonly=True), "read-only root was False, is True"),
    "read-only mount": (
        lambda s: mount(s, "/data")["options"].append("ro"),
        "restrictions of mount /data that are new: ro",
    ),
    "recursively": (lambda s: mount(s, "/data")["options"].append("rro"), "mount /data that are new: ro, rro"),
    "noexec": (lambda s: mount(s, "/tmp")["options"].append("noexec"), "mount /tmp that are new: noexec"),
    "not recursive": (
        lambda s: mount(s, "/data").update(options=["bind", "rshared"]),
        "mount /data that are new: bind without mounts below",
    ),
    "propagation": (
        lambda s: mount(s, "/data").update(options=["rbind", "rslave"]),
        "propagation of mount /data was shared, is slave",
    ),
    "private": (lambda s: mount(s, "/data").update(options=["rbind"]), "was shared, is private"),
    "size": (
        lambda s: mount(s, "/tmp").update(options=["size=32m", "mode=1777"]),
        "size of mount /tmp was 67108864, is 33554432",
    ),
    "inodes": (
        lambda s: mount(s, "/tmp")["options"].append("nr_inodes=5"),
        "nr_inodes of mount /tmp was not limited, is 5",
    ),
    "read-only path": (
        lambda s: s["linux"]["readonlyPaths"].append("/proc/irq"),
        "read-only paths that are new: /proc/irq",
    ),
    "device mode": (
        lambda s: s["linux"]["devices"][0].update(fileMode=0o600),
        "mode of device /dev/x allows 600, allowed 666",
    ),
    "device rule": (
        lambda s: s["linux"]["resources"]["devices"].pop(1),
        "access to device c 1:3 that are missing: r, w",
    ),
    "listed device's rule": (
        lambda s: s["linux"]["resources"]["devices"][2].update(access="r"),
        "access to device /dev/x that are missing: m, w",
    ),
    "denied device": (
        lambda s: s["linux"]["resources"]["devices"].append({"allow": False, "type": "c", "major": 1, "access": "w"}),
        "access to device c 1:3 that are missing: w",
    ),
    "AppArmor": (lambda s: s["process"].update(apparmorProfile="p"), "AppArmor profile was unconfined, is p"),
    "SELinux": (lambda s: s["process"].update(selinuxLabel="u:r:t:s0"), "SELinux label was unconfined, is u:r:t:s0"),
    "system call": (lambda s: syscalls(s)[0]["names"].remove("write"), "the seccomp profile allows less of write"),
    "condition": (lambda s: syscalls(s).pop(1), "the seccomp profile allows less of clone"),
    "killed": (
        lambda s: s["linux"]["seccomp"].update(defaultAction="SCMP_ACT_KILL_PROCESS"),
        "allows less of .*all other calls",
    ),
    "architecture": (lambda s: s["linux"]["seccomp"]["architectures"].pop(), "allows less of architectures"),
}

# What cannot be restored, or cannot be told to be wider.
OTHER: dict[str, tuple[Callable[[Spec], object], str]] = {
    "image": (
        lambda s: s["annotations"].update({"io.kubernetes.cri.image-name": "b"}),
        "image was 'a@sha256:1', is 'b'",
    ),
    "user": (lambda s: s["process"]["user"].update(uid=0), "user was '1:2:3', is '0:2:3'"),
    "groups": (lambda s: s["process"]["user"].update(additionalGids=[]), "user was '1:2:3', is '1:2'"),
    "source": (
        lambda s: mount(s, "/data").update(source="/srv/other"),
        "source of mount /data was '/srv/data', is '/srv/other'",
    ),
    "another pod's volume": (
        lambda s: mount(s, "/cache").update(source="/var/lib/kubelet/pods/other/volumes/kubernetes.io~empty-dir/cache"),
        "source of mount /cache",
    ),
    "another volume": (
        lambda s: mount(s, "/cache").update(source="/var/lib/kubelet/pods/ffff/volumes/kubernetes.io~empty-dir/x"),
        "source of mount /cache",
    ),
    "type": (
        lambda s: mount(s, "/data").update(type="tmpfs", options=[]),
        "type of mount /data was 'bind', is 'tmpfs'",
    ),
    "mode of a mount": (lambda s: mount(s, "/tmp").update(options=["size=64m", "mode=700"]), "options of mount /tmp"),
    "new mount": (lambda s: s["mounts"].append({"destination": "/new"}), "mounts that are new: /new"),
    "unmasked": (lambda s: s["linux"].update(maskedPaths=[]), "masked paths that are missing: /proc/kcore"),
    "new device": (lambda s: s["linux"]["devices"].append({"path": "/dev/y"}), "devices that are new: /dev/y"),
    "device owner": (lambda s: s["linux"]["devices"][0].update(uid=5), "owner of device /dev/x was '0:0', is '5:0'"),
    "sysctl": (lambda s: s["linux"].update(sysctl={}), "sysctls that are missing: kernel.msgmax"),
    "personality": (lambda s: s["linux"].update(personality={"domain": "LINUX32"}), "personality was 'not set'"),
    "ID mappings": (lambda s: s["linux"].update(uidMappings=[{"hostID": 1}]), "ID mappings was 'not set'"),
    "shared namespace": (
        lambda s: s["linux"]["namespaces"][2].update(path="/i"),
        "shared namespaces that are new: ipc",
    ),
    "no namespace": (lambda s: s["linux"]["namespaces"].pop(2), "namespaces that are missing: ipc"),
}


@pytest.mark.parametrize("name", NARROWER)
def test_fewer_rights_are_refused_by_name_and_more_are_not(name: str) -> None:
    change, message = NARROWER[name]
    full, less = spec_facts(spec(), BUNDLE), changed(change)
    assert kinds(compare(full, less)) == {Kind.NARROWER}
    with pytest.raises(UnsupportedError, match=message):
        check_spec(full, less)
    assert kinds(check_spec(less, full)) == {Kind.WIDER}


@pytest.mark.parametrize("name", OTHER)
def test_other_differences_are_refused_by_name(name: str) -> None:
    change, message = OTHER[name]
    then = spec()
    with pytest.raises(UnsupportedError, match=message):
        check_spec(spec_facts(then, BUNDLE), changed(change))


def test_a_missing_mount_device_or_shared_namespace_is_fewer() -> None:
    full = spec_facts(spec(), BUNDLE)
    for change in (
        lambda s: s["mounts"].pop(2),
        lambda s: s["linux"].update(devices=[]),
        lambda s: s["linux"]["namespaces"][3].pop("path"),
        lambda s: s["linux"]["namespaces"].append({"type": "user"}),
        lambda s: s["linux"]["maskedPaths"].append("/proc/x"),
    ):
        assert Kind.NARROWER in kinds(compare(full, changed(change)))


def test_no_profile_is_wider_than_any(tmp_path: Path) -> None:
    full = spec_facts(spec(), tmp_path)
    free = changed(lambda s: s["linux"].pop("seccomp"))
    assert kinds(compare(full, free)) == {Kind.WIDER}
    assert kinds(compare(free, full)) == {Kind.NARROWER}


def test_names_of_the_pod_and_what_the_runtime_applies_do_not_count() -> None:
    """Another pod's ids, hostname, limits of its cgroup, numbers of a device, and errors of calls."""

    def change(made: Spec) -> None:
        made["linux"]["resources"]["memory"]["limit"] = 5
        made["linux"]["devices"][0].update(major=11, minor=7)
        made["linux"]["resources"]["devices"][2].update(major=11, minor=7)
        made["linux"]["seccomp"]["defaultErrnoRet"] = 38
        made["linux"]["sysctl"]["kernel.msgmax"] = "200"
        made["process"].update(oomScoreAdj=9)
        mount(made, "/tmp")["options"].append("noatime")

    assert compare(spec_facts(spec(), BUNDLE), changed(change)) == ()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("@/overlay-containers/{a}/userdata/hosts", "@/overlay-containers/{b}/userdata/hosts"),
        ("/x/overlay-containers/{a}/userdata/shm", "/y/overlay-containers/{b}/userdata/shm"),
        ("@/volumes/{a}/_data", "/other/volumes/{b}/_data"),
        ("@/volumes/named/_data", "@/volumes/named/_data"),
        (
            "/var/lib/containerd/io.containerd.grpc.v1.cri/containers/{a}/volumes/{b}",
            "/var/lib/containerd/io.containerd.grpc.v1.cri/containers/{b}/volumes/{a}",
        ),
    ],
)
def test_directories_of_engines_are_compared_without_ids(one: str, two: str) -> None:
    root, ids = "/var/lib/containers/storage", {"a": "a" * 64, "b": "b" * 64}
    made = [
        spec_facts(
            {"mounts": [{"destination": "/d", "source": source.replace("@", root).format(**ids)}]},
            Path(f"{root}/overlay-containers/{ids[which]}/userdata"),
        )
        for which, source in (("a", one), ("b", two))
    ]
    assert compare(*made) == ()
    assert made[0].rights != spec_facts({"mounts": [{"destination": "/d", "source": "/else"}]}, BUNDLE).rights


@pytest.mark.parametrize(
    "sources",
    [
        ("/srv/one", "/srv/two"),
        ("/r/volumes/one/_data", "/r/volumes/two/_data"),
        (f"/srv/volumes/{'a' * 64}", f"/srv/volumes/{'b' * 64}"),
        ("/srv/pods/a/volumes/x", "/srv/pods/b/volumes/x"),
        ("./data", "data/other"),
    ],
)
def test_sources_that_differ_are_refused(sources: tuple[str, str]) -> None:
    made = [spec_facts({"mounts": [{"destination": "/d", "source": source}]}, BUNDLE) for source in sources]
    with pytest.raises(UnsupportedError, match="source of mount /d was"):
        check_spec(*made)


def test_a_record_without_rights_is_refused() -> None:
    """Earlier releases wrote six facts."""
    full = spec_facts(spec(), BUNDLE)
    then = from_json(SpecFacts, to_json(full)[:6])
    assert then.rights is None
    with pytest.raises(UnsupportedError, match="did not record what its container was allowed"):
        check_spec(then, full)


@pytest.mark.parametrize("key", ["apparmorProfile", "selinuxLabel"])
def test_another_label_of_a_security_module_is_no_difference(key: str) -> None:
    """The restore applies it."""
    then, now = spec(), spec()
    then["process"][key], now["process"][key] = "p", "q"
    assert check_spec(spec_facts(then, BUNDLE), spec_facts(now, BUNDLE)) == ()
    without_label = to_json(spec_facts(then, BUNDLE))
    without_label[6].pop()
    assert check_spec(from_json(SpecFacts, without_label), spec_facts(spec(), BUNDLE))[:1] == (
        check_spec(spec_facts(then, BUNDLE), spec_facts(spec(), BUNDLE))[:1] if key == "apparmorProfile" else ()
    )


@pytest.mark.parametrize(
    "broken",
    [
        {"process": {"capabilities": 3}},
        {"process": {"rlimits": [{}]}},
        {"linux": {"seccomp": {"defaultAction": "SCMP_ACT_X"}}},
        {"linux": {"resources": {"devices": [{"allow": True, "type": "z"}]}}},
        {"linux": {"devices": [{"path": "/dev/x", "major": "x"}]}},
        {"mounts": [{"destination": "/x", "options": 3}]},
    ],
)
def test_a_malformed_bundle_is_an_error(broken: Spec) -> None:
    with pytest.raises(UnsupportedError, match=r"config\.json is not one that a runtime accepts"):
        spec_facts(broken, BUNDLE)


CAPABILITIES = st.lists(st.sampled_from(["CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW", "CAP_SYS_ADMIN"]), unique=True)
ACTIONS = st.sampled_from(["SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_ERRNO", "SCMP_ACT_KILL"])
PATHS = st.lists(st.sampled_from(["/proc/a", "/proc/b", "/proc/c"]), unique=True)
CALLS = st.fixed_dictionaries(
    {"names": st.lists(st.sampled_from(["read", "write", "bpf"]), min_size=1, unique=True), "action": ACTIONS},
    optional={"args": st.lists(st.fixed_dictionaries({"index": st.just(0), "value": st.integers(0, 1)}), max_size=1)},
)
RULES = st.fixed_dictionaries(
    {"allow": st.booleans(), "access": st.sampled_from(["r", "rw", "rwm"])},
    optional={"type": st.sampled_from(["a", "b", "c"]), "major": st.integers(-1, 2), "minor": st.integers(-1, 2)},
)
OPTIONS = st.lists(
    st.sampled_from(
        ["ro", "rw", "rro", "noexec", "exec", "nosuid", "rbind", "bind", "rslave", "shared", "size=4k", "size=8k"]
    )
)
BUNDLES = st.builds(
    lambda **parts: parts,
    process=st.fixed_dictionaries(
        {
            "capabilities": st.dictionaries(st.sampled_from(["bounding", "effective", "ambient"]), CAPABILITIES),
            "noNewPrivileges": st.booleans(),
            "rlimits": st.lists(
                st.fixed_dictionaries(
                    {
                        "type": st.sampled_from(["RLIMIT_CORE", "RLIMIT_NOFILE"]),
                        "soft": st.integers(0, 3),
                        "hard": st.integers(0, 3),
                    }
                ),
                unique_by=lambda limit: limit["type"],
            ),
            "user": st.fixed_dictionaries({"umask": st.integers(0, 0o777)}),
        }
    ),
    root=st.fixed_dictionaries({"readonly": st.booleans()}),
    mounts=st.lists(
        st.fixed_dictionaries({"destination": st.just("/d"), "source": st.just("/s"), "options": OPTIONS}), max_size=1
    ),
    linux=st.fixed_dictionaries(
        {
            "readonlyPaths": PATHS,
            "maskedPaths": PATHS,
            "resources": st.fixed_dictionaries({"devices": st.lists(RULES, max_size=4)}),
            "seccomp": st.fixed_dictionaries({"defaultAction": ACTIONS, "syscalls": st.lists(CALLS, max_size=3)}),
        }
    ),
)


@given(BUNDLES)
def test_equal_bundles_fit_also_through_the_record(made: Spec) -> None:
    facts = spec_facts(made, BUNDLE)
    assert compare(facts, spec_facts(copy.deepcopy(made), Path("/elsewhere"))) == ()
    recorded = from_json(SpecFacts, json.loads(json.dumps(to_json(facts))))
    assert recorded == facts


@given(BUNDLES, BUNDLES)
def test_a_relaxation_is_the_inverse_of_a_narrowing(one: Spec, two: Spec) -> None:
    """If nothing is taken away in one direction, nothing is given in the other; and no difference goes unnoticed."""
    facts = [spec_facts(made, BUNDLE) for made in (one, two)]
    forth, back = kinds(compare(*facts)), kinds(compare(*reversed(facts)))
    if forth <= {Kind.WIDER}:
        assert back <= {Kind.NARROWER, Kind.OTHER}
    assert bool(forth) == bool(back) or {*forth, *back} == {Kind.OTHER}


@given(BUNDLES, st.data())
def test_any_narrowing_is_found_among_other_changes(made: Spec, data: st.DataObject) -> None:
    """A row of the table on top of an arbitrary bundle, and any relaxation besides."""
    then = spec()
    then["process"]["capabilities"] |= {key: ["CAP_KILL", "CAP_CHOWN"] for key in made["process"]["capabilities"]}
    names = data.draw(st.lists(st.sampled_from([*NARROWER]), min_size=1, max_size=1))
    now = copy.deepcopy(then)
    NARROWER[names[0]][0](now)
    given_more = data.draw(st.sampled_from(["CAP_NET_RAW", "CAP_SYS_ADMIN"]))
    for held in (now["process"].get("capabilities") or {}).values():
        if held is not None:
            held.append(given_more)
    found = compare(spec_facts(then, BUNDLE), spec_facts(now, BUNDLE))
    assert Kind.NARROWER in kinds(found)


def model_allows(rules: Sequence[Mapping[str, Any]], kind: str, major: int, minor: int) -> set[str]:
    """Decide as the kernel does, rule by rule."""
    allowed: set[str] = set()
    for rule in rules:
        fits = rule.get("type", "a") in ("a", kind)
        for key, number in (("major", major), ("minor", minor)):
            fits = fits and rule.get(key, -1) in (-1, number)
        if fits:
            allowed = allowed | {*rule["access"]} if rule["allow"] else allowed - {*rule["access"]}
    return allowed


@given(st.lists(RULES, max_size=5), st.lists(RULES, max_size=5))
def test_device_rules_are_compared_by_what_they_allow(one: list[Spec], two: list[Spec]) -> None:
    made = [spec_facts({"linux": {"resources": {"devices": rules}}}, BUNDLE) for rules in (one, two)]
    everything = [(kind, major, minor) for kind in "bc" for major in range(4) for minor in range(4)]
    gone = any(model_allows(one, *device) - model_allows(two, *device) for device in everything)
    new = any(model_allows(two, *device) - model_allows(one, *device) for device in everything)
    wanted = {kind for kind, is_so in ((Kind.NARROWER, gone), (Kind.WIDER, new)) if is_so}
    assert kinds(compare(*made)) == wanted


@given(st.lists(CALLS, max_size=4), st.lists(CALLS, max_size=4), ACTIONS, ACTIONS)
def test_seccomp_profiles_that_are_called_wider_refuse_nothing_new(
    one: list[Spec], two: list[Spec], default: str, now_default: str
) -> None:
    profiles = [{"defaultAction": d, "syscalls": c} for d, c in ((default, one), (now_default, two))]
    made = [spec_facts({"linux": {"seccomp": profile}}, BUNDLE) for profile in profiles]
    found = kinds(compare(*made))
    order = ["SCMP_ACT_KILL", "SCMP_ACT_ERRNO", "SCMP_ACT_LOG", "SCMP_ACT_ALLOW"]

    def best(profile: Spec, name: str, value: int) -> set[int]:
        rules = [c for c in profile["syscalls"] if name in c["names"]]
        plain = [order.index(c["action"]) for c in rules if not c.get("args")]
        if plain:
            return {max(plain)}
        met = {order.index(c["action"]) for c in rules if c["args"][0]["value"] == value}
        return met or {order.index(profile["defaultAction"])}

    for name in ("read", "write", "bpf", "other"):
        for value in (0, 1, 2):
            before, after = best(profiles[0], name, value), best(profiles[1], name, value)
            if max(after) < min(before):
                assert found & {Kind.NARROWER, Kind.OTHER}
            if min(after) > max(before):
                assert found & {Kind.WIDER, Kind.OTHER}


def test_a_record_is_small() -> None:
    """A profile as podman's has some 400 calls."""
    made = spec()
    made["linux"]["seccomp"]["syscalls"] = [
        {"names": [f"call{number}" for number in range(400)], "action": "SCMP_ACT_ALLOW"}
    ]
    facts = spec_facts(made, BUNDLE)
    assert len(json.dumps(to_json(facts))) < 64 << 10
