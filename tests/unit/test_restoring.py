"""A restore of which anybody may be killed at any step: what is left is a held container, or nothing at all."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ocihook import wire
from ocihook.belongings.saving import Writer
from ocihook.checkpoints.belongings import FACTS_NAME, IMAGES_DIR
from ocihook.config import Policy, Settings
from ocihook.container.spec import spec_facts
from ocihook.errors import OcihookError, RestoreError
from ocihook.linux.cgroup import Freezer
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, command_line
from ocihook.model import ContainerRef
from ocihook.packs.pages import no_progress
from ocihook.remote.location import open_remote
from ocihook.remote.remote import ClaimBlob
from ocihook.runtime import attempts, cgroups, claims, containers, create, restoring
from ocihook.runtime.call import Call
from ocihook.runtime.choice import Chosen
from ocihook.session.record import to_json
from ocihook.store.stored_manifest import BELONGINGS_NAME
from ocihook.store.thin import Thin

ID = "c" * 64
CHECKPOINT = Thin("_node", "20261123T120000Z-0123abcd")
# Its container is a `sleep` that nobody waits for, whose pid is its state.
RUNTIME = """#!/bin/sh
state=@STATE@ before=''
for word; do
    case $before$word in --log*) : >> "${word#--log=}" || exit 1 ;; esac
    before=''; [ "$word" != --log ] || before=--log
done
case " $* " in
    *" restore "*) [ ! -e $state.fails ] || { sleep 1000 & exit 1; }; sleep 1000 & echo $! > $state ;;
    *" state "*) [ -e $state ] || exit 1; echo "{\\"pid\\": $(cat $state)}" ;;
    *" delete "*) [ ! -e $state ] || kill -9 "$(cat $state)"; rm -f $state ;;
esac
"""
STEPS = (
    "fetch",
    "lay_out",
    "_check",
    "make_claim",
    "bring_reversibly",
    "_use_own_criu_settings",
    "_run",
    "cgroups_of",
    "mend",
    "hold",
)


class Manifest:
    id = CHECKPOINT.checkpoint_id
    host: dict[str, str] = {}  # noqa: RUF012
    other_images = ()
    container = ContainerRef(id="before", runtime="runc")


class Node:
    """A node with a runtime that only plays one."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.bundle, self.rootfs = path / "bundle", path / "bundle/rootfs"
        self.rootfs.mkdir(parents=True)
        (self.rootfs / "kept").write_text("of the image")
        (self.bundle / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
        self.program = path / "runc"
        self.program.write_text(RUNTIME.replace("@STATE@", str(path / "state")))
        self.program.chmod(0o755)
        self.remote = path / "remote"
        self.remote.mkdir()
        self.settings = Settings(store_dir=str(path / "store"), remote=str(self.remote))
        self.call = Call.parse(
            self.program,
            [
                "--root",
                str(path / "runc-root"),
                "--log",
                f"{self.bundle}/log",
                "create",
                "--bundle",
                str(self.bundle),
                ID,
            ],
        )
        container = ContainerRef(id=ID, runtime="runc")
        self.kept = containers.Kept(
            container=container, bundle=self.bundle, program=self.program, prefix=self.call.prefix, domain="_node"
        )
        monkeypatch.setattr(wire, "RUNTIME_DIR", str(path / "run"))
        monkeypatch.setattr(restoring, "open_journals", list)
        monkeypatch.setattr(restoring, "fetch", lambda *_: (None, Manifest()))
        monkeypatch.setattr(restoring, "lay_out", self._lay_out)
        monkeypatch.setattr(restoring, "cgroups_of", lambda _: [])
        self.freezer = Freezer(path, 2)
        self.freezer.switch.write_text("1")
        monkeypatch.setattr(restoring, "hold", lambda _: self.freezer)
        containers.keep(self.kept)

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.bundle / "config.json").read_bytes())
        return config

    def _lay_out(self, _domain: object, _manifest: object, place: Path, **_: object) -> None:
        (place / IMAGES_DIR).mkdir()
        (place / FACTS_NAME).write_text(json.dumps(to_json(spec_facts(self.config, self.bundle))))
        changed = place / "changed"
        changed.mkdir()
        (changed / "kept").write_text("changed")
        (changed / "new").write_text("new")
        with (place / BELONGINGS_NAME).open("wb") as file:
            writer = Writer(file, no_progress)
            writer.add_tree("rootfs", changed)
            writer.end()

    def restore(self, changes: Mapping[str, Any] = MappingProxyType({})) -> None:
        config = {**self.config, **changes}
        restoring.restore(self.call, self.kept, config, Chosen(CHECKPOINT, is_restart=False), self.settings, Policy())

    def processes(self) -> list[int]:
        """Return the container's processes, which are called as no others are."""
        found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [pid for pid in found if command_line(pid) == ["sleep", "1000"] and self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/cwd") == str(Path.cwd()) and Process.find(pid) is not None
        except OSError:
            return False

    def assert_as_before(self, config: object = {"root": {"path": "rootfs"}}) -> None:
        assert Patience(timeout_s=60).until(lambda: not self.processes())
        assert {path.name: path.read_text() for path in self.rootfs.iterdir()} == {"kept": "of the image"}
        assert self.config == config
        assert not restoring.place_of(self.settings, ID).exists()
        assert not (containers.directory_of(ID) / wire.RESTORING_NAME).exists()
        assert not (containers.directory_of(ID) / containers.HELD_NAME).exists()
        assert self.claims() == []
        assert not claims.has_claims(self.path / "store")

    def claims(self) -> list[ClaimBlob]:
        return open_remote(str(self.remote), CHECKPOINT.domain).claims(CHECKPOINT.checkpoint_id)

    def attempts(self) -> int:
        path = attempts.attempts_path(self.settings, CHECKPOINT)
        return int(path.read_text()) if path.exists() else 0


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.chdir(tmp_path)
    node = Node(tmp_path, monkeypatch)
    yield node
    for pid in node.processes():
        os.kill(pid, signal.SIGKILL)


def test_what_is_restored_is_held_and_on_record(node: Node) -> None:
    node.restore()
    kept = containers.read(ID)
    assert kept is not None
    assert kept.checkpoint == CHECKPOINT.checkpoint_id
    assert kept.init is not None
    init = kept.init
    assert Patience(timeout_s=60).until(
        lambda: node.processes() == [init.pid]
    )  # it becomes what it is called in a while
    mark = (containers.directory_of(ID) / containers.HELD_NAME).read_text()
    assert mark == f"{init.pid} {init.start_ticks} 0 {node.freezer.switch}\n"
    assert (node.rootfs / "new").read_text() == "new"
    assert node.attempts() == 0
    restoring.settle(ID)
    claims.tend_claims(node.path / "store")
    assert len(node.claims()) == 1
    assert kept.init.is_alive()  # there is nothing to take back


def test_two_never_run_from_one_checkpoint(node: Node) -> None:
    node.restore()
    again = containers.Kept(
        container=ContainerRef(id="d" * 64), bundle=node.bundle, program=node.program, prefix=(), domain="_node"
    )
    with pytest.raises(RestoreError, match=rf"{CHECKPOINT.checkpoint_id} runs already, as container c{{12}}"):
        restoring.restore(node.call, again, node.config, Chosen(CHECKPOINT, is_restart=False), node.settings, Policy())
    assert Patience(timeout_s=60).until(lambda: len(node.processes()) == 1)


def test_what_runs_on_another_node_is_not_restored_here(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Settings(store_dir=str(tmp_path / "other store"), remote=str(node.remote))
    Path(elsewhere.store_dir).mkdir()
    other = ContainerRef(id="e" * 64, name="job", runtime="runc")
    claim = claims.note_claim(CHECKPOINT, other, elsewhere)
    claims.make_claim(claim, Patience())
    monkeypatch.setattr(claims, "_UNDECIDED_S", 0.5)
    with pytest.raises(
        RestoreError, match=rf"runs already, on node {os.uname().nodename}, as container job \(e{{12}}\)"
    ):
        node.restore()
    (held,) = node.claims()
    assert node.attempts() == 0
    claims.end_claim(claim)
    node.assert_as_before()
    node.restore()
    assert [blob.token for blob in node.claims()] != [held.token]
    restoring.discard(ID)
    claims.tend_claims(node.path / "store")
    assert node.claims() == []


def test_a_checkpoint_that_failed_twice_is_not_tried_again(node: Node) -> None:
    (node.path / "state.fails").touch()
    for number in (1, 2):
        with pytest.raises(RestoreError, match="does not say why"):
            node.restore()
        node.assert_as_before()
        assert node.attempts() == number
    with pytest.raises(RestoreError, match="could not be restored 2 times and is not tried again"):
        node.restore()
    assert node.attempts() == 2


def test_damaged_attempts_are_one_error(node: Node) -> None:
    path = attempts.attempts_path(node.settings, CHECKPOINT)
    path.parent.mkdir(parents=True)
    for damaged in (b"", b"one", b"-1", b"1\n", b"9" * 5000):
        path.write_bytes(damaged)
        with pytest.raises(RestoreError, match=rf"{path}, which counts .* is damaged") as failure:
            node.restore()
        assert failure.value.hint == f"remove {path}"
        node.assert_as_before()
    path.unlink()
    node.restore()


def test_what_cannot_be_undone_starts_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rootfs is half the other one's: what the policy says does not count, and who removes it undoes the rest."""
    monkeypatch.setattr(create, "load_settings", lambda: node.settings)
    monkeypatch.setattr(create, "choose", lambda *_: Chosen(CHECKPOINT, is_restart=False))
    monkeypatch.setattr(Call, "pass_on", lambda _: 77)
    config = {**node.config, "annotations": {"ocihook.io/restore-from": "latest"}}
    (node.bundle / "config.json").write_text(json.dumps(config))
    (node.path / "state.fails").touch()
    assert create.create(node.call, lambda: None) == 77  # from scratch, by policy
    node.assert_as_before(config)

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(restoring, "take_out", no_space)
        with pytest.raises(RestoreError, match=r"neither restored nor started.*could not be undone: No space"):
            create.create(node.call, lambda: None)
    assert (node.rootfs / "new").exists()
    assert recovered() == ["undone"]
    node.assert_as_before(config)


@pytest.mark.parametrize("on_claim", ["error", "wait", "fail"])
def test_a_checkpoint_that_another_node_has_claimed(node: Node, monkeypatch: pytest.MonkeyPatch, on_claim: str) -> None:
    """By policy the container starts from scratch, which is on record, is not created, or waits for the claim's end."""
    settings = replace(node.settings, history_dir=str(node.path / "history"))
    monkeypatch.setattr(create, "load_settings", lambda: settings)
    monkeypatch.setattr(create, "choose", lambda *_: Chosen(CHECKPOINT, is_restart=False))
    monkeypatch.setattr(create, "_CLAIM_POLL_S", 0.01)
    monkeypatch.setattr(Call, "pass_on", lambda _: 77)
    notes = {"restore-from": "latest", "on-claim": on_claim, "restore-wait-s": "600"}
    config = {**node.config, "annotations": {f"ocihook.io/{name}": text for name, text in notes.items()}}
    (node.bundle / "config.json").write_text(json.dumps(config))
    remote = open_remote(str(node.remote), CHECKPOINT.domain)
    other = claims.Holder(node="other", host="other", container=ContainerRef(id="x"), is_decided=True)
    remote.write_claim(CHECKPOINT.checkpoint_id, "1", claims._encode(other))

    def told(_call: Call, text: str) -> None:
        assert "waits for its checkpoint, for 600 s at most" in text
        assert "on node other, as container x" in text
        remote.remove_claim(CHECKPOINT.checkpoint_id, "1")

    monkeypatch.setattr(create, "_tell", told)
    if on_claim == "wait":
        assert create.create(node.call, lambda: None) == 0
        kept = containers.read(ID)
        assert kept is not None
        assert kept.checkpoint == CHECKPOINT.checkpoint_id
        return
    if on_claim == "fail":
        with pytest.raises(OcihookError, match=r"runs already, on node other.*store release.*Nothing was started"):
            create.create(node.call, lambda: None)
    else:
        assert create.create(node.call, lambda: None) == 77
    (record,) = (json.loads(path.read_bytes()) for path in Path(settings.history_dir).glob("*resume*.json"))
    assert "on node other" in record["error"]


def test_an_engine_that_creates_it_again_does_not_know_of_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was restored, and the call that was to report it was killed. The engine's bundle has been removed since."""
    node.restore()
    kept = containers.read(ID)
    assert kept is not None
    assert kept.init is not None
    for path in (node.bundle / "log", node.bundle / "config.json"):
        path.unlink(missing_ok=True)
    shutil.rmtree(node.bundle)
    restoring.discard(ID)
    assert Patience(timeout_s=60).until(lambda: not node.processes())
    assert containers.read(ID) is None


def die(who: str, caller: int) -> None:
    """Kill the worker, the engine's call, or both, from within the worker."""
    if who != "worker":
        os.kill(caller, signal.SIGKILL)
        assert Patience(timeout_s=60).until(lambda: Process.find(caller) is None)
    if who != "caller":
        os.kill(os.getpid(), signal.SIGKILL)


def dying(step: Callable[..., Any], who: str, moment: str, caller: int, *arguments: Any, **options: Any) -> Any:
    if moment == "before":
        die(who, caller)
    result = step(*arguments, **options)
    if moment == "after":
        die(who, caller)
    return result


def recovered() -> list[str]:
    return [recovery.outcome for recovery in restoring.recover_restores()]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("who", ["worker", "caller", "both"])
@pytest.mark.parametrize("step", STEPS)
def test_kills_nothing_is_left(node: Node, monkeypatch: pytest.MonkeyPatch, step: str, who: str, moment: str) -> None:
    caller = os.fork()
    if caller == 0:
        try:
            real = getattr(restoring, step)
            monkeypatch.setattr(restoring, step, partial(dying, real, who, moment, os.getpid()))
            node.restore()
        except RestoreError as error:
            os._exit(3 if "killed" in str(error) else 4)
        finally:
            os._exit(5)
    _, status = os.waitpid(caller, 0)
    assert status == (3 << 8 if who == "worker" else signal.SIGKILL)
    record = containers.directory_of(ID) / wire.RESTORING_NAME
    if who == "caller":
        assert Patience(timeout_s=60).until(lambda: not record.parent.exists())  # nobody else removes it
    if who == "both":
        assert Patience(timeout_s=60).until(lambda: recovered() == ["undone"])
        assert recovered() == []
    node.assert_as_before()
    assert node.attempts() == (STEPS.index(step) > STEPS.index("make_claim"))


def test_what_is_being_restored_is_nobody_else_s(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for the same container, as of an engine that tries again, leaves it to those who are at it."""
    reader, writer = os.pipe()
    caller = os.fork()
    if caller == 0:
        os.close(writer)
        monkeypatch.setattr(restoring, "fetch", lambda *_: (os.read(reader, 1), Manifest()))
        try:
            node.restore()
        finally:
            os._exit(0)
    os.close(reader)
    try:
        record = containers.directory_of(ID) / wire.RESTORING_NAME
        assert Patience(timeout_s=60).until(record.exists)
        assert recovered() == ["running"]
        with pytest.raises(RestoreError, match="is being restored"):
            restoring.settle(ID, wait_s=0.05)
        with pytest.raises(RestoreError, match="is being restored as another container"):
            node.restore()
    finally:
        os.close(writer)
    os.waitpid(caller, 0)
    assert (containers.directory_of(ID) / containers.HELD_NAME).exists()


@pytest.mark.parametrize("kind", ["fifo", "link", "four"])
def test_a_file_that_the_runtime_would_wait_for_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def lay_out(domain: object, manifest: object, place: Path, **more: object) -> None:
        node._lay_out(domain, manifest, place, **more)
        odd = place / IMAGES_DIR / "descriptors.json"
        if kind == "fifo":
            os.mkfifo(odd)
        elif kind == "link":
            odd.symlink_to("/dev/zero")
        else:
            odd.write_text('["pipe:[1]", "pipe:[1]", "pipe:[1]", "pipe:[1]"]')

    monkeypatch.setattr(restoring, "lay_out", lay_out)
    with pytest.raises(RestoreError, match=r"descriptors\.json .*is not (a file|an array of at most 3 names)"):
        node.restore()
    node.assert_as_before()
    assert node.attempts() == 0


def test_fewer_rights_are_refused_and_more_are_told(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RestoreError, match="as the one that was checkpointed: no_new_privileges was False, is True"):
        node.restore({"process": {"noNewPrivileges": True}})
    node.assert_as_before()
    assert node.attempts() == 0
    node.restore({"process": {"capabilities": {"bounding": ["CAP_KILL"]}}})
    assert containers.read(ID) is not None
    said = (node.bundle / "log").read_text()
    assert (
        f"container {node.kept.container} goes on with the rights it had: capabilities that are new: CAP_KILL" in said
    )


def test_a_checkpoint_that_does_not_record_rights_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def lay_out(domain: object, manifest: object, place: Path, **more: object) -> None:
        node._lay_out(domain, manifest, place, **more)
        facts = json.loads((place / FACTS_NAME).read_bytes())
        (place / FACTS_NAME).write_text(json.dumps(facts[:6]))

    monkeypatch.setattr(restoring, "lay_out", lay_out)
    with pytest.raises(RestoreError, match="did not record what its container was allowed"):
        node.restore()
    node.assert_as_before()


@pytest.mark.parametrize(
    ("program", "options", "path", "is_known"),
    [
        ("crun", [], "/pods/a", True),
        ("crun", ["--systemd-cgroup"], "pods.slice:crun:a", False),  # systemd makes it
        ("runc", [], "/pods/a", False),  # CRIU itself is in it
        ("crun", [], "", False),
        ("crun", [], "/pods/../a", False),
    ],
)
def test_a_cgroup_is_frozen_before_its_container_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, options: list[str], path: str, *, is_known: bool
) -> None:
    (tmp_path / "cgroup.procs").touch()
    monkeypatch.setattr(cgroups, "_MOUNT", tmp_path)
    call = Call.parse(Path(f"/usr/bin/{program}"), [*options, "create", ID])
    found = cgroups.cgroup_to_be(call, {"linux": {"cgroupsPath": path}})
    assert found == (tmp_path / "pods/a" if is_known else None)


def test_a_cgroup_that_was_frozen_is_thawed_when_its_restore_is_reverted(node: Node, tmp_path: Path) -> None:
    frozen = tmp_path / "cgroup"
    frozen.mkdir()
    (frozen / "cgroup.freeze").write_text("1")
    (frozen / "cgroup.events").write_text("frozen 0\n")
    noted = restoring.Restoring(workers=(), cgroup=frozen)
    (containers.directory_of(ID) / wire.RESTORING_NAME).write_text(json.dumps(to_json(noted)))
    restoring.settle(ID)
    assert (frozen / "cgroup.freeze").read_text() == "0"
    node.assert_as_before()


@pytest.mark.parametrize("of_node", [b"", b"manage-cgroups=soft\n", b"manage-cgroups\n"])
def test_criu_leaves_cgroups_alone_whatever_the_node_says(node: Node, of_node: bytes) -> None:
    conf = node.path / "runc.conf"
    conf.write_bytes(of_node)
    config = {**node.config, "annotations": {"org.criu.config": str(conf)}}
    restoring._use_own_criu_settings(node.call, node.kept, config)
    own = Path(node.config["annotations"]["org.criu.config"])
    assert own.read_bytes().splitlines()[-1] == b"manage-cgroups=ignore"
