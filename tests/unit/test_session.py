"""One session in this process: its verdicts, its journal, and the undoing of what it did."""

import dataclasses
import errno
import json
import os
import socket
import subprocess
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from ocihook import wire
from ocihook.agent import session as agent_session
from ocihook.agent.session import Session
from ocihook.checkpoints import stage as staging
from ocihook.checkpoints.complete import store_image_set
from ocihook.config import Policy, Settings
from ocihook.container.runtime_call import RuntimeCall
from ocihook.errors import ConfigError, IdentificationError, OcihookError, StoreFull, UnsupportedError
from ocihook.images.image_set import pack_image_set, verify_image_set
from ocihook.linux.files import identity
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.memory.standstill import is_given_up
from ocihook.model import ContainerRef
from ocihook.packs.cipher import NO_KEYS
from ocihook.packs.domain_names import NODE_DOMAIN
from ocihook.preflight import participant
from ocihook.session import criu_statistics, history
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal, open_journals
from ocihook.session.participant import CallFacts
from ocihook.session.undo import undo_all, undo_holding
from ocihook.stages import dump, page_images, restore, stored_pages
from ocihook.stages.page_images import Packing, Rehydrated
from ocihook.stages.recover import recover
from ocihook.store.store import Store
from tests.fakes.images import make_image_set, mixed_pages
from tests.fakes.keys import make_keys
from tests.unit.test_images import STATS, message

STATVFS = os.statvfs

MEMORY = {1: mixed_pages(200), 3: mixed_pages(30, seed=4)}


class Node:
    """A session of this process, which stands for CRIU, over one image set and a container of one process."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init_pid: int) -> None:
        self.init_pid = init_pid
        self.directory = tmp_path / "checkpoint"
        make_image_set(self.directory, MEMORY)
        self.runtime_dir = tmp_path / "run"
        self.history_dir = tmp_path / "history"
        self.store_dir = tmp_path / "store"
        self.keys = NO_KEYS
        self.policy = Policy()
        self.annotations: dict[str, str] = {"io.container.manager": "libpod"}
        call = RuntimeCall(runtime="runc", verb="checkpoint", container_id="ef" * 32, bundle="/b", leave_running=False)
        monkeypatch.setattr(dump, "find_runtime_call", lambda _pid: call)
        monkeypatch.setattr(restore, "find_runtime_call", lambda _pid: dataclasses.replace(call, verb="restore"))
        monkeypatch.setattr(dump, "read_annotations", lambda _pid, _bundle: self.annotations)
        monkeypatch.setattr(dump, "criu_version", lambda _pid: "4.1.1")
        monkeypatch.setattr(participant, "CHECKS", ())  # it is in the node's namespaces
        monkeypatch.setattr(participant, "read_config", lambda _pid, _bundle: {"annotations": self.annotations})
        criu = Process.find(os.getpid())
        assert criu is not None
        self.journal = Journal.create(self.runtime_dir, criu)
        self.session = Session(self.journal, self.settings)
        self.image_fd = os.open(self.directory, os.O_RDONLY)

    def settings(self) -> Settings:
        places = {"history_dir": str(self.history_dir), "store_dir": str(self.store_dir), "key_file": self.keys.file}
        return Settings(policy=self.policy, workers=1, **places)  # type: ignore[arg-type]

    def stage(self, name: str) -> tuple[int, str]:
        image_dir = f"/proc/{os.getpid()}/fd/{self.image_fd}"
        return self.session.handle(wire.Request(name, os.getpid(), self.init_pid, image_dir))

    def reload(self) -> Journal:
        self.journal = Journal.load(self.journal.path)
        self.session = Session(self.journal, self.settings)
        return self.journal


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container_pid: int) -> Node:
    return Node(tmp_path, monkeypatch, container_pid)


def fail_with(error: BaseException) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


def test_a_dump_and_a_restore(node: Node) -> None:
    assert node.stage("pre-dump") == (0, "")
    status, message = node.stage("post-dump")
    assert status == 0
    assert message.startswith("container efefefefefef: packed 942080 bytes of memory into ")
    assert not list(node.directory.glob("pages-*"))
    status, message = node.stage("pre-restore")
    assert (status, message) == (0, "container efefefefefef: verified and unpacked 942080 bytes of memory")
    assert [type(effect) for effect in node.journal.effects] == [Rehydrated]
    assert (node.directory / "pages-1.img").read_bytes() == MEMORY[1]
    node.session.finish()
    assert not list(node.directory.glob("pages-*"))
    assert open_journals(node.runtime_dir) == []
    (record,) = history.read(node.history_dir)
    assert record["id"] == node.journal.session_id
    names = ["preflight", "record tasks", "pack", "preflight", "read pagemaps", "unpack"]
    assert [phase["name"] for phase in record["phases"]] == names


def test_the_same_stage_gets_the_same_verdict_and_is_done_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.stage("pre-dump")
    first = node.stage("post-dump")
    monkeypatch.setattr(page_images, "pack_image_set", fail_with(AssertionError("again")))
    assert node.stage("post-dump") == first
    node.reload()
    assert node.stage("post-dump") == first


def test_mode_off_and_containers_of_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.annotations["ocihook.io/mode"] = "off"
    assert node.stage("pre-dump") == node.stage("post-dump") == (0, "")
    assert list(node.directory.glob("pages-*"))
    monkeypatch.setattr(dump, "find_runtime_call", lambda _pid: None)
    node.journal._data["stages"].clear()
    node.journal._data["container"] = None
    assert node.stage("pre-dump") == node.stage("post-dump") == (0, "")
    assert list(node.directory.glob("pages-*"))


def test_errors_say_what_and_who_and_what_now(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.annotations["ocihook.io/mode"] = "fast"
    status, message = node.stage("pre-dump")
    assert status == 1
    assert message == (
        "pre-dump of container efefefefefef: annotation ocihook.io/mode: mode must be one of 'inline', 'store', 'off', "
        "not 'fast'. The dump is refused, the container runs on"
    )
    monkeypatch.setattr(page_images, "rehydrate_image_set", fail_with(OSError(5, "Input/output error", "pages-1.img")))
    status, message = node.stage("pre-restore")
    assert status == 1
    assert message.endswith(": pages-1.img: Input/output error. The restore is refused, nothing was started")


def test_a_defect_is_a_veto_that_says_so(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "find_runtime_call", fail_with(ZeroDivisionError("oops")))
    status, message = node.stage("pre-dump")
    assert status == 1
    assert "ZeroDivisionError: oops (a defect in ocihook). The dump is refused" in message


@pytest.mark.parametrize("on_pack_error", ["keep", "fail"])
def test_packing_that_fails_follows_the_policy(node: Node, monkeypatch: pytest.MonkeyPatch, on_pack_error: str) -> None:
    node.policy = dataclasses.replace(node.policy, on_pack_error=on_pack_error)
    monkeypatch.setattr(page_images, "pack_image_set", fail_with(OcihookError("no luck")))
    node.stage("pre-dump")
    status, message = node.stage("post-dump")
    assert status == (1 if on_pack_error == "fail" else 0)
    assert "no luck" in message
    assert ("not packed" in message) == (on_pack_error == "keep")
    assert node.journal.effects == []
    assert (node.directory / "pages-1.img").read_bytes() == MEMORY[1]


def test_a_wrong_configuration_does_not_stop_a_restore(node: Node) -> None:
    node.stage("pre-dump")
    node.stage("post-dump")

    def broken() -> Settings:
        raise ConfigError("broken")

    node.session = Session(node.journal, broken)
    assert node.stage("pre-restore")[0] == 0


@pytest.mark.parametrize(
    ("there", "here", "status"),
    [
        ("4.2.1", "4.1.1", 1),
        ("4.1.1", "4.2.1", 0),
        ("4.2", "4.3", 0),
        ("", "4.1.1", 0),
        ("4.2.1", "", 0),
        ("x", "y", 0),
    ],
)
def test_images_of_a_newer_criu_are_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch, there: str, here: str, status: int
) -> None:
    monkeypatch.setattr(dump, "criu_version", lambda _pid: there)
    node.stage("pre-dump")
    node.stage("post-dump")
    monkeypatch.setattr(dump, "criu_version", lambda _pid: here)
    verdict, message = node.stage("pre-restore")
    assert verdict == status
    if status:
        assert "made by CRIU 4.2.1, this node's CRIU 4.1.1 cannot read it. Install CRIU 4.2 or later" in message


def of_namespace(namespace: str) -> dict[str, str]:
    return {"io.kubernetes.cri.sandbox-namespace": namespace, "io.kubernetes.cri.sandbox-name": "pod"}


def test_a_restore_takes_only_its_own_domain(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.annotations = of_namespace("team") | {"ocihook.io/mode": "store"}
    assert node.stage("pre-dump") == (0, "")
    status, message = node.stage("post-dump")
    assert (status, "on their way into the store" in message) == (0, True)

    def restored(annotations: dict[str, str]) -> tuple[int, str]:
        node.annotations = annotations
        node.journal._data["stages"].clear()
        node.journal._data["container"] = None
        return node.stage("pre-restore")

    with monkeypatch.context() as patch:
        patch.setattr(stored_pages, "is_here", fail_with(AssertionError("looked into the store")))
        status, message = restored(of_namespace("other"))
        assert (status, "the checkpoint is in domain team of the store, the container's own is other" in message) == (
            1,
            True,
        )
        assert restored({"io.container.manager": "libpod"})[0] == 1
        status, message = restored(of_namespace("other") | {"io.kubernetes.pod.namespace": "team"})
        assert (status, "it is not known whose container this is" in message) == (1, True)
        patch.setattr(restore, "find_runtime_call", fail_with(IdentificationError("no")))
        assert restored(of_namespace("team"))[0] == 1
        assert not list(node.directory.glob("pages-*"))
    assert restored(of_namespace("team"))[0] == 0
    assert (node.directory / "pages-1.img").read_bytes() == MEMORY[1]


def full(node: Node, patch: pytest.MonkeyPatch) -> None:
    room = types.SimpleNamespace(f_bavail=1000, f_frsize=4096)
    patch.setattr(os, "statvfs", lambda path: room if Path(path).is_relative_to(node.store_dir) else STATVFS(path))


def of_another_key(node: Node, _patch: pytest.MonkeyPatch) -> None:
    Store(node.store_dir, make_keys(node.directory.parent)).open(NODE_DOMAIN, create=True)
    node.keys = make_keys(node.directory.parent)


def without_its_key(node: Node, _patch: pytest.MonkeyPatch) -> None:
    node.keys = make_keys(node.directory.parent)
    Store(node.store_dir, node.keys).open(NODE_DOMAIN, create=True)
    Path(node.keys.file).unlink()


def not_encrypted_yet(node: Node, _patch: pytest.MonkeyPatch) -> None:
    Store(node.store_dir).open(NODE_DOMAIN, create=True)
    node.keys = make_keys(node.directory.parent)


def read_only(_node: Node, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tempfile.TemporaryFile", fail_with(OSError(errno.EROFS, "Read-only file system")))


def no_directory(node: Node, _patch: pytest.MonkeyPatch) -> None:
    node.store_dir.write_text("a file")


@pytest.mark.parametrize(
    ("cause", "reason", "code"),
    [
        (full, "has 4096000 bytes free, and the container", "store-full"),
        (of_another_key, "key", "key-missing"),
        (without_its_key, "key", "key-missing"),
        (not_encrypted_yet, "domain _node is not encrypted, and keys are configured", "store"),
        (read_only, "Read-only file system", "system"),
        (no_directory, "File exists", "system"),
    ],
)
@pytest.mark.parametrize("on_pack_error", ["keep", "fail"])
def test_a_store_that_cannot_take_a_dump(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    cause: Callable[[Node, pytest.MonkeyPatch], None],
    reason: str,
    code: str,
    on_pack_error: str,
) -> None:
    """That is known before anything is done; all memory is in the engine's archive then, or the dump is refused."""
    node.policy = dataclasses.replace(node.policy, mode="store", on_pack_error=on_pack_error)
    cause(node, monkeypatch)
    before = sorted(path.name for path in node.directory.iterdir())
    status, message = node.stage("pre-dump")
    assert reason in message
    assert node.journal.to_json()["error_code"] == code
    assert node.journal.effects == []
    assert sorted(path.name for path in node.directory.iterdir()) == before
    if on_pack_error == "fail":
        assert status == 1
        assert message.endswith("The dump is refused, the container runs on")
        assert [phase["name"] for phase in node.journal.to_json()["phases"]] == ["preflight"]
        return
    assert status == 0
    assert message.startswith("warning: container ")
    assert message.endswith("The checkpoint goes into the engine's archive")
    status, message = node.stage("post-dump")
    assert (status, "packed" in message) == (0, True)
    assert node.journal.effects == []
    assert not list(node.directory.glob("pages-*"))
    manifest = verify_image_set(node.directory, workers=1)
    assert manifest is not None
    assert {image.name for image in manifest.packed_images} == {name for name in before if name.startswith("pages-")}
    assert not list(node.store_dir.glob("domains/*/pending/*"))


def test_a_store_with_room_for_what_a_checkpoint_before_took(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same container, of which little is new, needs no room for all of its memory."""
    node.policy = dataclasses.replace(node.policy, mode="store")
    small = ContainerRef(id="ef" * 32)
    store = Store(node.store_dir)
    store.open(NODE_DOMAIN, create=True)
    room = types.SimpleNamespace(f_bavail=(64 << 20) // 4096 + 1000, f_frsize=4096)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _path: room)
        staging.check_can_store(store, small, 1000 * 4096)
        with pytest.raises(StoreFull, match="ocihook store prune"):
            staging.check_can_store(store, small, 1001 * 4096)
    store_image_set(store, node.directory, small, created="2026-01-01T00:00:00Z", workers=1)
    added = store.open(NODE_DOMAIN).checkpoints()[-1].added_bytes
    assert added < 1000 * 4096
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _path: room)
        staging.check_can_store(store, small, 1 << 40)
        with pytest.raises(UnsupportedError, match="and a checkpoint 8796093022208 at most"):
            staging.check_can_store(store, small, 1 << 44)


def test_what_a_pod_may_not_set_refuses_its_dump_and_not_its_restore(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.annotations |= {"ocihook.io/preflight": "warn", "ocihook.io/of-next-year": "x"}
    assert node.stage("pre-dump") == (0, "")  # podman's, root's own
    assert "annotation ocihook.io/of-next-year is not known here" in caplog.text
    assert node.stage("post-dump")[0] == 0
    node.annotations = of_namespace("team") | {"ocihook.io/preflight": "warn", "ocihook.io/resume-signal": "USR1"}
    assert node.stage("pre-restore")[0] == 0
    assert "annotation ocihook.io/preflight: a pod may not set 'warn' on this node" in caplog.text
    assert node.journal.facts(CallFacts).policy == Policy(resume_signal="USR1")
    node.journal._data["stages"].clear()
    status, message = node.stage("pre-dump")
    assert status == 1
    assert message.startswith("pre-dump of container team/pod/efefefefefef: annotation ocihook.io/preflight")
    assert message.endswith("[policy.allowed] preflight. The dump is refused, the container runs on")


class Killed(BaseException):
    """Stands for SIGKILL: nothing below cleans up."""


@pytest.mark.parametrize("commit", [False, True])
def test_interrupted_packing_begins_again_or_is_complete(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, commit: bool
) -> None:
    node.stage("pre-dump")
    real = pack_image_set

    def killed(directory: Path, **options: object) -> None:
        if commit:
            real(directory, **options)  # type: ignore[arg-type]
        else:
            (directory / "ocihook-0.pack").write_bytes(b"half")
        raise Killed

    monkeypatch.setattr(page_images, "pack_image_set", killed)
    with pytest.raises(Killed):
        node.stage("post-dump")
    monkeypatch.setattr(page_images, "pack_image_set", real if not commit else fail_with(AssertionError("again")))
    node.reload()
    status, message = node.stage("post-dump")
    assert status == 0
    assert "packed 942080 bytes" in message
    assert node.journal.effects == []
    assert verify_image_set(node.directory, workers=1) is not None


def test_packing_that_was_interrupted_is_known_after_the_container_runs(node: Node) -> None:
    """It may be committed: page images are gone then, and whoever began again would find none."""
    node.journal.add(Packing(directory=node.directory, identity=identity(node.directory)))
    undo_holding(node.reload(), Patience())
    assert [effect.kind for effect in node.reload().effects] == ["packing"]


def test_work_for_a_criu_that_was_killed_stops(node: Node) -> None:
    node.stage("pre-dump")
    criu = list(node.journal._data["criu"])
    node.journal._data["criu"][1] += 1
    _, message = node.stage("post-dump")
    assert "was killed meanwhile" in message
    assert (node.directory / "pages-1.img").read_bytes() == MEMORY[1]
    assert not list(node.directory.glob("ocihook*"))
    node.journal._data["criu"] = criu
    node.journal._data["stages"].pop("post-dump")
    assert node.stage("post-dump")[0] == 0
    node.journal._data["criu"] = [criu[0], criu[1] + 1]
    status, message = node.stage("pre-restore")
    assert status == 1
    assert "was killed meanwhile" in message
    assert not list(node.directory.glob("pages-*"))


def test_recover_undoes_sessions_of_the_dead_only(node: Node) -> None:
    node.stage("pre-dump")
    node.stage("post-dump")
    node.stage("pre-restore")
    assert [r.outcome for r in recover(node.runtime_dir)] == ["running"]
    assert list(node.directory.glob("pages-*"))
    node.journal._data["criu"][1] += 1  # now it is another process with the same pid
    node.journal.save()
    (recovery,) = recover(node.runtime_dir)
    assert (recovery.outcome, recovery.detail) == ("undone", "rehydrated")
    assert not list(node.directory.glob("pages-*"))
    assert recover(node.runtime_dir) == []


def test_another_directory_at_the_same_place_is_left_alone(node: Node) -> None:
    node.stage("pre-dump")
    node.stage("post-dump")
    node.stage("pre-restore")
    node.directory.rename(node.directory.with_name("moved"))
    make_image_set(node.directory, MEMORY)
    node.session.finish()
    assert list(node.directory.glob("pages-*"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 2, "criu": [1, 2], "effects": []}', '{"version": 1}'])
def test_a_journal_that_cannot_be_read_is_left_for_a_person(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sessions" / "1-2.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(OcihookError, match="is no journal of this version"):
        Journal.load(path)
    (recovery,) = recover(tmp_path)
    assert recovery.outcome == "failed"
    assert path.read_text() == content


@dataclass(kw_only=True)
class Numbered(Effect, kind="test"):
    number: int
    undone: ClassVar[list[int]] = []

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        self.undone.append(self.number)
        if self.undone == [2, 1]:
            raise OSError(5, "Input/output error")


def test_effects_are_undone_newest_first_and_forgotten_one_by_one(node: Node) -> None:
    for number in range(3):
        node.journal.add(Numbered(number=number))
    with pytest.raises(OcihookError, match="could not be undone"):
        undo_all(node.journal, Patience())
    assert [effect["number"] for effect in json.loads(node.journal.path.read_text())["effects"]] == [0, 1]
    undo_all(node.reload(), Patience())
    assert Numbered.undone == [2, 1, 1, 0]
    assert node.journal.effects == []


def test_statistics_that_the_engine_has_removed_were_noted_before(tmp_path: Path) -> None:
    """Of a dump that was left running: they are known as CRIU writes them."""
    criu = Process.find(os.getpid())
    assert criu is not None
    journal = Journal.create(tmp_path / "run", criu)
    journal.begin_stage("pre-dump")
    dump = {"freezing_time": 1, "frozen_time": 2, "memdump_time": 3, "memwrite_time": 4, "pages_scanned": 5}
    dump |= {"pages_skipped_parent": 6, "pages_written": 7, "pages_lazy": 8}
    criu_statistics.note_statistics(journal, STATS + message("stats_entry", dump=dump))
    (tmp_path / "work").mkdir()
    criu_statistics.note_end(journal, os.open(tmp_path / "work", os.O_RDONLY))
    facts = journal.facts(criu_statistics.CriuFacts)
    assert facts.criu_statistics == {"freezing": 1, "frozen": 2, "memdump": 3, "memwrite": 4}
    assert facts.criu_pages == 7
    assert facts.criu_ended is not None


@pytest.mark.parametrize("first", ["runtime", "criu"])
def test_who_ended_first_is_known_though_both_ended_while_a_stage_was_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A runtime that ended first has an engine that resumes nothing; else the engine resumes what it has paused."""
    programs = {name: subprocess.Popen(["sleep", "600"]) for name in ("runtime", "criu")}
    criu, runtime = (Process.find(programs[name].pid) for name in ("criu", "runtime"))
    assert criu is not None
    session = Session(Journal.create(tmp_path, criu, runtime), Settings)
    kept: list[bool] = []

    def both_end(*_: object) -> str:
        for name in sorted(programs, key=lambda name: name != first):
            programs[name].kill()
            programs[name].wait()
        return ""

    monkeypatch.setitem(agent_session._STAGES, "post-resume", both_end)
    monkeypatch.setattr(session, "finish", lambda: kept.append(is_given_up(session.journal)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hook, answered = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, hook, answered:
        request = wire.Request("post-resume", criu.pid, 0, "")
        socket.send_fds(ours, [request.encode()], [answered.fileno()])
        session.serve(theirs)
    assert kept == [first == "runtime"]
    assert not session.journal.is_interrupted
