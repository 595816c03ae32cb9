"""Encrypted domains: nothing can be read, compared or exchanged without the key; keys come, go and are replaced."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from ocihook.checkpoints import listing, maintenance, pulling, pushing, remote_listing
from ocihook.checkpoints.prune import Keep, prune
from ocihook.cli import store as cli_module
from ocihook.cli.main import cli
from ocihook.config import Settings
from ocihook.errors import ConfigError, IntegrityError, KeyMissing, OcihookError, StoreError
from ocihook.packs.cipher import NO_KEYS, Keyring, KeySource, PackCipher, seal, unseal
from ocihook.packs.pack import PAGE_BYTES
from ocihook.store.domain import Domain
from ocihook.store.store import Store
from ocihook.store.verify import verify
from tests.fakes.keys import make_keys
from tests.unit.test_store_crash import DIED, Node, die_at, in_child, pages

KEY, OTHER = "11" * 32, "22" * 32


@pytest.fixture
def keys(tmp_path: Path) -> KeySource:
    return make_keys(tmp_path, KEY)


@pytest.fixture
def node(tmp_path: Path, keys: KeySource) -> Node:
    """An encrypted store with two checkpoints."""
    made = Node(tmp_path / "node", keys)
    made.dump(made.new)
    made.complete()
    return made


def use(node: Node, keys: KeySource) -> Node:
    node.keys = keys
    return node


def files_of(node: Node) -> list[Path]:
    return [path for path in node.store_dir.rglob("*") if path.is_file()]


def test_there_and_back(node: Node) -> None:
    assert node.contents() == [node.old, node.new]
    node.assert_clean()
    assert node.domain.is_encrypted
    assert node.domain.checkpoints()[1].added_bytes < 31 * PAGE_BYTES, "what is equal is found"


def test_nothing_is_readable_without_the_key(node: Node) -> None:
    (node.root / "images").rename(node.root / "gone")
    stored = b"".join(path.read_bytes() for path in files_of(node))
    for at in range(0, len(node.old), PAGE_BYTES):
        assert node.old[at : at + 64] not in stored
    for secret in (b"trainer", b"pages-1.img", bytes.fromhex(KEY), node.domain.page_ids.of(bytes(4096))[:8]):
        assert secret not in stored
    assert f"{node.domain.seed:016x}".encode() not in stored
    plain = Domain.open(node.store_dir, "team", NO_KEYS)
    with pytest.raises(KeyMissing, match=r"domain team is encrypted. Configure key_file or key_command"):
        plain.checkpoints()
    with pytest.raises(KeyMissing):
        listing.list_checkpoints(Store(node.store_dir))


def test_equality_does_not_show_across_domains(tmp_path: Path, keys: KeySource) -> None:
    """The same page has other ids, keys of the index and stored bytes in each."""
    page = pages(1, 1)
    ids = [Domain.open(tmp_path / "store", name, keys, create=True).page_ids.of(page) for name in ("one", "two")]
    assert ids[0] != ids[1]
    node, other = Node(tmp_path / "node", keys), Node(tmp_path / "other", keys)
    index = [next(n.domain.index_dir.iterdir()).read_bytes()[-20:] for n in (node, other)]
    assert index[0][:8] != index[1][:8]
    packs = [next(n.domain.packs_dir.iterdir()).read_bytes() for n in (node, other)]
    assert not {packs[0][at : at + 64] for at in range(40, 60 * 4096, 64)} & {
        packs[1][at : at + 64] for at in range(40, 60 * 4096, 64)
    }


def test_a_wrong_key(node: Node, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    wrong = make_keys(tmp_path / "x", OTHER)
    with pytest.raises(KeyMissing, match=r"encrypted with key [0-9a-f]{16} cannot be read without it. Add that key"):
        use(node, wrong).domain.checkpoints()


def test_records_cannot_be_exchanged(node: Node) -> None:
    first, second = (manifest.id for manifest in node.domain.checkpoints())
    there = node.domain.checkpoints_dir
    shutil.copy(there / f"{first}.manifest", there / f"{second}.manifest")
    with pytest.raises(IntegrityError, match=f"the encrypted manifest {second} is damaged, or was exchanged"):
        node.domain.read(second)


def test_packs_cannot_be_exchanged(tmp_path: Path, keys: KeySource) -> None:
    """Not for a plain one, and no chunk within one."""
    node = Node(tmp_path / "node", keys)
    plain = Node(tmp_path / "plain")
    (pack,) = node.domain.packs_dir.iterdir()
    good = pack.read_bytes()
    pack.write_bytes(next(plain.domain.packs_dir.iterdir()).read_bytes())
    with pytest.raises(IntegrityError):
        node.contents()
    with pytest.raises(IntegrityError, match="is not encrypted, as all of its domain are"):
        node.domain.packs.open(pack.name)
    cipher = PackCipher.new(Keyring(keys, "team"))
    stored = cipher.encrypt(40, b"content", b"raw")
    assert PackCipher(Keyring(keys, "team").newest, cipher.salt).decrypt(40, stored, b"raw") == b"content"
    for offset, associated in ((41, b"raw"), (40, b"lz4")):
        assert cipher.decrypt(offset, stored, associated) is None
    pack.write_bytes(good)
    assert verify(node.domain, read_data=True) == []


def test_a_plain_record_is_not_taken(node: Node, tmp_path: Path) -> None:
    plain = Node(tmp_path / "plain")
    (manifest,) = plain.domain.checkpoints()
    for kind in ("manifest", "layout"):
        shutil.copy(plain.domain.checkpoints_dir / f"{manifest.id}.{kind}", node.domain.checkpoints_dir)
    with pytest.raises(IntegrityError, match="is not encrypted, as all of domain team is"):
        node.domain.read(manifest.id)


def test_a_sealed_record(keys: KeySource) -> None:
    keyring = Keyring(keys, "team")
    record = seal(keyring, "layout x", b"body")
    assert unseal(keyring, "layout x", record) == b"body"
    assert seal(keyring, "layout x", b"body") != record
    for damaged in (record[:-1], record[:-1] + bytes([record[-1] ^ 1]), record[:20]):
        with pytest.raises(OcihookError):
            unseal(keyring, "layout x", damaged)
    with pytest.raises(IntegrityError):
        unseal(keyring, "layout y", record)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", KeyMissing, "has no key for domain team. `openssl rand -hex 32` makes one"),
        ("# only this\n", KeyMissing, "has no key for domain team"),
        ("hunter2\n", ConfigError, "a line is no key of 64 hexadecimal digits"),
        (KEY + "0\n", ConfigError, "a line is no key"),
    ],
    ids=["empty", "a comment", "a word", "too long"],
)
def test_what_is_no_key(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    for source in (KeySource(file=str(path)), KeySource(command=f"cat {path}")):
        with pytest.raises(error, match=message) as found:
            _ = Keyring(source, "team").newest
        assert text.strip() == "" or text.strip() not in str(found.value)


def test_where_keys_come_from(tmp_path: Path) -> None:
    path = tmp_path / "team.key"
    path.write_text(f"{KEY}\n")
    with pytest.raises(ConfigError, match=f"is open to others than its owner. Chmod 600 {path}"):
        _ = Keyring(KeySource(file=str(path)), "team").newest
    path.chmod(0o400)
    for source in (KeySource(file=f"{tmp_path}/{{domain}}.key"), KeySource(command=f"cat {tmp_path}/{{domain}}.key")):
        assert Keyring(source, "team").newest.secret == bytes.fromhex(KEY)
        with pytest.raises(KeyMissing):
            _ = Keyring(source, "other").newest
    for command in ("/no/such/command", "false", "sh -c 'echo why >&2; exit 3'"):
        with pytest.raises(KeyMissing, match="the key command"):
            _ = Keyring(KeySource(command=command), "team").newest
    with pytest.raises(KeyMissing, match="ended with status 3: why"):
        _ = Keyring(KeySource(command=command), "team").newest


def test_a_new_key(node: Node, tmp_path: Path) -> None:
    """What was written is read with the old one; afterwards everything is with the new one, and the old one can go."""
    use(node, make_keys(tmp_path, OTHER, KEY))
    third = node.old[: 3 * PAGE_BYTES] + pages(9, 9)
    node.dump(third)
    node.complete()
    assert node.contents() == [node.old, node.new, third]
    assert maintenance.rekey(node.store) == {"team": 2}
    assert maintenance.rekey(node.store) == {"team": 0}
    use(node, make_keys(tmp_path, OTHER))
    assert node.contents() == [node.old, node.new, third]
    node.assert_clean()
    before = node.domain.pack_bytes()
    node.dump(third)
    node.complete()
    assert node.domain.pack_bytes() == before, "ids are what they were"


def test_encrypting_what_was_not(tmp_path: Path) -> None:
    node = Node(tmp_path / "node")
    use(node, make_keys(tmp_path, KEY))
    with pytest.raises(
        StoreError, match=r"domain team is not encrypted, and keys are configured. `ocihook store rekey`"
    ):
        node.dump(node.new)
    assert node.contents() == [node.old]
    assert maintenance.rekey(node.store) == {"team": 1}
    assert node.domain.is_encrypted
    node.dump(node.new)
    node.complete()
    assert node.contents() == [node.old, node.new]
    node.assert_clean()
    stored = b"".join(path.read_bytes() for path in node.domain.directory.rglob("*") if path.is_file())
    assert node.old[:64] not in stored
    assert b"trainer" not in stored


@pytest.mark.parametrize("was_encrypted", [False, True])
@pytest.mark.parametrize("torn", [False, True])
def test_a_rekey_that_dies_at_any_write(tmp_path: Path, *, torn: bool, was_encrypted: bool) -> None:
    node = Node(tmp_path / "node", make_keys(tmp_path, KEY) if was_encrypted else NO_KEYS)
    node.dump(node.new)
    node.complete()
    new = make_keys(tmp_path, OTHER, *([KEY] if was_encrypted else []))
    number = 0
    while True:
        number += 1
        copy = use(node.copy(tmp_path / str(number)), new)

        def act(copy: Node = copy, number: int = number) -> None:
            die_at(number, torn=torn)
            maintenance.rekey(copy.store)

        status = in_child(act)
        assert status in {0, DIED}
        assert copy.contents() == [node.old, node.new]
        assert verify(copy.domain, read_data=True) == []
        maintenance.rekey(copy.store)
        assert copy.contents() == [node.old, node.new]
        copy.assert_clean()
        shutil.rmtree(copy.root)
        if status == 0:
            break
    assert number > 15


def test_to_a_remote_and_back(node: Node, tmp_path: Path, keys: KeySource) -> None:
    """What travels is encrypted; another node needs the same key."""
    remote = tmp_path / "remote"
    remote.mkdir()
    for manifest in node.domain.checkpoints():
        pushing.push(node.domain, manifest.id, str(remote))
    there = b"".join(path.read_bytes() for path in remote.rglob("*") if path.is_file())
    assert node.old[:64] not in there
    assert b"trainer" not in there
    assert len(remote_listing.list_remote(str(remote), keys)) == 2
    with pytest.raises(KeyMissing):
        remote_listing.list_remote(str(remote))
    with pytest.raises(KeyMissing):
        pulling.pull(Store(tmp_path / "other"), "team", manifest.id, str(remote))
    assert not (tmp_path / "other").exists()
    other = Store(tmp_path / "other", keys)
    pulling.pull(other, "team", manifest.id, str(remote))
    domain = other.open("team")
    assert verify(domain, read_data=True) == []
    assert domain.page_ids.of(bytes(4096)) != node.domain.page_ids.of(bytes(4096))
    with domain.shared():
        before = domain.before(domain.read(manifest.id))
    assert before is not None
    assert len(before.images) == 1
    before.verify()
    remote_listing.prune_remote(str(remote), Keep(last=1), keys)
    assert len(remote_listing.list_remote(str(remote), keys)) == 1


@pytest.mark.parametrize("make", [lambda _: NO_KEYS, lambda path: make_keys(path, KEY)])
def test_packs_with_few_pages_that_are_needed(tmp_path: Path, make: Callable[[Path], KeySource]) -> None:
    """They are rewritten without the others; what is needed of them stays what it is, and is found again."""
    node = Node(tmp_path / "node", make(tmp_path))
    few = node.old[7 * PAGE_BYTES : 11 * PAGE_BYTES] + node.old[30 * PAGE_BYTES : 35 * PAGE_BYTES] + pages(2, 5)
    node.dump(few)
    node.complete()
    before = node.domain.pack_bytes()
    prune(node.store, Keep(last=1))
    assert node.contents() == [few]
    assert node.domain.pack_bytes() < before - 50 * PAGE_BYTES
    node.assert_clean()
    node.dump(few)
    node.complete()
    assert node.contents() == [few, few]
    assert node.domain.checkpoints()[1].added_bytes == 0
    many = node.domain.pack_bytes()
    prune(node.store, Keep())
    assert node.domain.pack_bytes() == many


def test_rekey_on_the_command_line(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = make_keys(tmp_path, OTHER, KEY)
    settings = Settings(store_dir=str(node.store_dir), key_file=new.file)
    monkeypatch.setattr(cli_module, "load_settings", lambda: settings)
    result = CliRunner().invoke(cli, ["store", "rekey"])
    assert result.output == "domain team: wrote 2 packs again; all is encrypted with the newest key\n"
    Path(new.file).unlink()
    result = CliRunner().invoke(cli, ["store", "list"])
    assert "cannot be read" in str(result.exception)
