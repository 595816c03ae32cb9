"""Who may have a stored checkpoint, whatever an archive says."""

import json
from pathlib import Path

import pytest

from ocihook.checkpoints.admission import check_domain
from ocihook.config import Settings
from ocihook.errors import AdmissionError, IdentificationError, IntegrityError, StoreError
from ocihook.model import ContainerRef
from ocihook.packs.cipher import Keyring, KeySource
from ocihook.packs.frame import encode_frame
from ocihook.remote.location import open_remote, remote_domains
from ocihook.store.domain import Domain
from ocihook.store.store import Store
from ocihook.store.stored_manifest import decode_stored, encode_stored
from tests.unit.test_store_records import MANIFEST

TEAM = ContainerRef(id="ab" * 32, engine="containerd", pod_namespace="team", pod_name="p", name="c")
PODMAN = ContainerRef(id="ab" * 32, engine="podman")
NAMES = ["", "..", "../x", "a/b", "/etc", "A", "-a", "a b", "a\n", "$(id)", "_", "a" * 64]


@pytest.mark.parametrize(
    ("container", "domain", "rules", "is_allowed"),
    [
        (TEAM, "team", {}, True),
        (TEAM, "other", {}, False),
        (TEAM, "_node", {}, False),
        (PODMAN, "_node", {}, True),
        (PODMAN, "team", {}, False),
        (PODMAN, "team", {"_node": ("*",)}, True),
        (TEAM, "other", {"team": ("other",)}, True),
        (TEAM, "other", {"team": ("shared",), "other": ("*",), "_node": ("*",)}, False),
        (TEAM, "shared", {"*": ("shared",)}, True),
        (TEAM, "other", {"*": ("shared",)}, False),
        (TEAM, "_node", {"*": ("*",)}, True),
    ],
)
def test_own_domain_or_a_rule(
    container: ContainerRef, domain: str, rules: dict[str, tuple[str, ...]], *, is_allowed: bool
) -> None:
    settings = Settings(restore_from=rules)
    if is_allowed:
        check_domain(domain, container, settings)
        return
    with pytest.raises(AdmissionError) as raised:
        check_domain(domain, container, settings)
    own = container.pod_namespace or "_node"
    assert str(raised.value) == (
        f"the checkpoint is in domain {domain} of the store, the container's own is {own}. An administrator can allow "
        f'it, in /etc/ocihook/config.toml: [restore_from] {own} = ["{domain}"]'
    )


def test_nobody_gets_nothing() -> None:
    with pytest.raises(AdmissionError, match="it is not known whose container this is"):
        check_domain("_node", None, Settings(restore_from={"*": ("*",)}))
    with pytest.raises(IdentificationError):
        check_domain("_node", ContainerRef(id="ab", engine="cri-o"), Settings())


@pytest.mark.parametrize("name", NAMES)
def test_no_other_name_becomes_a_path_or_an_argument(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "called"
    with pytest.raises(StoreError, match="no name for a domain"):
        _ = Keyring(KeySource(command=f"touch {marker} {{domain}}"), name).newest
    with pytest.raises(StoreError, match="no name for a domain"):
        Domain.open(tmp_path, name, create=True)
    with pytest.raises(StoreError, match="no name for a domain"):
        open_remote(str(tmp_path), name)
    assert list(tmp_path.iterdir()) == []
    data = encode_stored(MANIFEST)
    spoiled = json.loads(data.split(b"\n", 1)[1]) | {"domain": name}
    with pytest.raises(IntegrityError, match="malformed"):
        decode_stored(encode_frame("checkpoint", 1, json.dumps(spoiled).encode()))


def test_only_domains_are_listed(tmp_path: Path) -> None:
    for name in ("team", "_node", "lost+found", "Team"):
        (tmp_path / "domains" / name).mkdir(parents=True)
        (tmp_path / "domains" / name / "domain").touch()
    assert remote_domains(str(tmp_path)) == ["_node", "team"]
    assert Store(tmp_path).names() == ["_node", "team"]
