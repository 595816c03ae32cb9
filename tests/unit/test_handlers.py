"""The runtime handler is put before runtimes by drop-ins alone, and taken away again to the last byte."""

import json
import tomllib
from pathlib import Path

import pytest

from ocihook.errors import ConfigError, UnsupportedError
from ocihook.node import handlers
from ocihook.node.install import LIBEXEC, apply_change
from tests.unit.test_install import tree

PROJECT = Path(__file__).parents[2]


def make(root: Path, *programs: str) -> None:
    for name in programs:
        path = root / "usr/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)


def install(root: Path) -> None:
    for change in handlers.plan_handlers(root, LIBEXEC):
        apply_change(change)


def drop_in(root: Path, path: Path) -> dict[str, object]:
    return tomllib.loads((root / path.relative_to("/")).read_text())


def test_each_engine_gets_a_drop_in_and_gives_it_back(tmp_path: Path) -> None:
    make(tmp_path, "runc", "crun", "containerd", "crio", "podman")
    (tmp_path / "etc/containerd").mkdir(parents=True)
    (tmp_path / "etc/containerd/config.toml").write_text('version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n')
    before = tree(tmp_path)
    install(tmp_path)
    assert handlers.plan_handlers(tmp_path, LIBEXEC) == []
    runtimes = drop_in(tmp_path, handlers.CONTAINERD_DROP_IN)["plugins"]["io.containerd.cri.v1.runtime"]  # type: ignore[index]
    handler = runtimes["containerd"]["runtimes"]["ocihook"]
    assert handler["runtime_type"] == "io.containerd.runc.v2"
    assert handler["pod_annotations"] == ["ocihook.io/*"]
    assert handler["options"] == {"BinaryName": str(LIBEXEC / "ocihook-runc"), "SystemdCgroup": False}
    crio = drop_in(tmp_path, handlers.CRIO_DROP_IN)
    assert crio == {
        "crio": {
            "runtime": {"runtimes": {"ocihook": {"runtime_path": str(LIBEXEC / "ocihook-runc"), "runtime_type": "oci"}}}
        }
    }
    podman = drop_in(tmp_path, handlers.PODMAN_DROP_IN)
    assert podman == {"engine": {"runtimes": {"ocihook": [str(LIBEXEC / "ocihook-crun")]}}}
    hook = json.loads((tmp_path / handlers.HOOK_FILE.relative_to("/")).read_text())
    packaged = json.loads((PROJECT / "hooks.d/50-ocihook.json").read_text())
    assert hook == {**packaged, "hook": {**packaged["hook"], "path": str(LIBEXEC / "oci-hook")}}
    assert "@" not in (tmp_path / LIBEXEC.relative_to("/") / "oci-hook").read_text()
    program = (tmp_path / LIBEXEC.relative_to("/") / "ocihook-crun").read_text()
    assert "exec '/usr/bin/crun' \"$@\"" in program
    assert "@" not in program.replace('"$@"', "")
    assert next(handlers.notes(tmp_path)).startswith("restart containerd")
    handlers.remove(handlers.plan_removal(tmp_path, LIBEXEC), tmp_path)
    assert tree(tmp_path) == before


def test_a_refresh_makes_programs_name_the_release_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that installed them is removed; and nothing is installed where the handler is not."""
    make(tmp_path, "runc", "podman")
    assert handlers.plan_refresh(tmp_path, LIBEXEC) == []
    install(tmp_path)
    assert handlers.plan_refresh(tmp_path, LIBEXEC) == []
    monkeypatch.setattr("ocihook.node.distribution.SITE", Path("/opt/ocihook/lib/ocihook/later/site-packages"))
    for change in handlers.plan_refresh(tmp_path, LIBEXEC):
        apply_change(change)
    for name in ("ocihook-runc", "oci-hook"):
        assert "/lib/ocihook/later/" in (tmp_path / LIBEXEC.relative_to("/") / name).read_text()


def test_the_hook_of_a_package_stays_and_one_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "crun", "podman")
    place = tmp_path / handlers.HOOK_FILE.relative_to("/")
    place.parent.mkdir(parents=True)
    place.write_bytes(packaged := (PROJECT / "hooks.d/50-ocihook.json").read_bytes())
    install(tmp_path)
    handlers.remove(handlers.plan_removal(tmp_path, LIBEXEC), tmp_path)
    assert place.read_bytes() == packaged
    place.unlink()
    monkeypatch.setattr(handlers.os, "access", lambda *_: False)  # type: ignore[attr-defined]  # a read-only /usr
    install(tmp_path)
    assert not place.exists()
    assert not (tmp_path / LIBEXEC.relative_to("/") / handlers.HOOK_NAME).exists()
    assert "wrong annotations are reported by the handler and by dumps alone" in next(handlers.notes(tmp_path))


@pytest.mark.parametrize(("version", "plugin"), [(2, "io.containerd.grpc.v1.cri"), (3, "io.containerd.cri.v1.runtime")])
def test_the_default_handler_is_copied(tmp_path: Path, version: int, plugin: str) -> None:
    make(tmp_path, "runc", "containerd")
    (tmp_path / "etc/containerd").mkdir(parents=True)
    (tmp_path / "etc/containerd/config.toml").write_text(
        f'version = {version}\n[plugins."{plugin}".containerd]\ndefault_runtime_name = "nvidia"\n'
        f'[plugins."{plugin}".containerd.runtimes.nvidia.options]\nSystemdCgroup = true\n'
    )
    install(tmp_path)
    found = drop_in(tmp_path, handlers.CONTAINERD_DROP_IN)
    assert found["version"] == version
    options = found["plugins"][plugin]["containerd"]["runtimes"]["ocihook"]["options"]  # type: ignore[index]
    assert options["SystemdCgroup"] is True
    assert any("add `imports" in note for note in handlers.notes(tmp_path))


def test_engines_that_are_not_there_get_nothing(tmp_path: Path) -> None:
    make(tmp_path, "crun", "crio")
    install(tmp_path)
    assert not (tmp_path / "etc/containerd").exists()
    assert not (tmp_path / "etc/containers/containers.conf.d").exists()
    assert "ocihook-crun" in (tmp_path / handlers.CRIO_DROP_IN.relative_to("/")).read_text()


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="neither runc nor crun"):
        handlers.plan_handlers(tmp_path, LIBEXEC)
    make(tmp_path, "runc", "podman", "containerd")
    place = tmp_path / handlers.PODMAN_DROP_IN.relative_to("/")
    place.parent.mkdir(parents=True)
    place.write_text("[engine]\n")
    with pytest.raises(UnsupportedError, match="is not ocihook's"):
        handlers.plan_handlers(tmp_path, LIBEXEC)
    place.unlink()
    (tmp_path / "etc/containerd").mkdir()
    (tmp_path / "etc/containerd/config.toml").write_text("version = [")
    with pytest.raises(ConfigError, match="cannot be read"):
        handlers.plan_handlers(tmp_path, LIBEXEC)


def test_a_handler_that_containers_need_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "runc", "podman")
    install(tmp_path)
    monkeypatch.setattr(handlers, "NODE", tmp_path)
    task = tmp_path / "run/containerd/io.containerd.runtime.v2.task/k8s.io/0123456789abcdef"
    task.mkdir(parents=True)
    (task / "options.json").write_text(f'{{"binary_name": "{LIBEXEC / "ocihook-runc"}"}}')
    with pytest.raises(UnsupportedError, match="1 containers were made by the runtime handler, 0123456789ab"):
        handlers.plan_removal(tmp_path, LIBEXEC)
    (task / "options.json").write_text('{"binary_name": "/usr/bin/runc"}')
    assert len(handlers.plan_removal(tmp_path, LIBEXEC)) == 4
