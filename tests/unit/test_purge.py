"""`apt purge` always ends, and takes nothing that checkpoints need; an installation takes no settings away."""

import subprocess
from pathlib import Path

import pytest

POSTRM = Path(__file__).parents[2] / "packaging/deb/postrm"
POSTINST = POSTRM.with_name("postinst")
ID = "20260102T030405Z-0123abcd"


def failing_helper(root: Path) -> Path:
    """Put a deb-systemd-helper that changes nothing, and fails, in the place of the machine's own; return where."""
    helper = root / "bin/deb-systemd-helper"
    helper.parent.mkdir(exist_ok=True)
    helper.write_text("#!/bin/sh\nexit 1\n")
    helper.chmod(0o755)
    return helper.parent


def purge(root: Path) -> str:
    """Run the script over a tree; return what it says."""
    text = POSTRM.read_text()
    for place in ("/etc/ocihook", "/run/ocihook", "/var/lib/ocihook"):
        assert f"={place}\n" in text
        text = text.replace(f"={place}\n", f"={root}{place}\n")
    (root / "var/lib").mkdir(parents=True, exist_ok=True)
    command, path = ["sh", "-c", text, "postrm", "purge"], {"PATH": f"{failing_helper(root)}:/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def make(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[policy]\n")


def left(root: Path) -> set[str]:
    names = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    return names - {"bin/deb-systemd-helper"}


def test_nothing_is_left_of_a_node_without_checkpoints(tmp_path: Path) -> None:
    make(tmp_path, "etc/ocihook/config.toml", "etc/ocihook/config.d/10.toml", "run/ocihook/sessions/x.json")
    (tmp_path / "var/lib/ocihook").mkdir(parents=True)
    assert purge(tmp_path) == ""
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*ocihook*")] == []
    assert purge(tmp_path) == ""  # again


@pytest.mark.parametrize(
    "checkpoint",
    [
        f"var/lib/ocihook/store/domains/team/checkpoints/{ID}.manifest",
        f"var/lib/ocihook/store/domains/team/pending/{ID}/job",
    ],
)
def test_keys_and_configuration_stay_with_checkpoints(tmp_path: Path, checkpoint: str) -> None:
    make(tmp_path, "etc/ocihook/config.toml", "etc/ocihook/store.keys", checkpoint)
    before = left(tmp_path)
    said = purge(tmp_path)
    assert left(tmp_path) == before
    assert f"rm -r {tmp_path}/etc/ocihook removes it" in said
    assert f"rm -r {tmp_path}/var/lib/ocihook removes it" in said


@pytest.mark.parametrize(
    "setting", ['store_dir = "/data"', '  remote = "/mnt"', 'key_file="/root/keys"', '"key_command" = "keys {domain}"']
)
def test_a_store_elsewhere_may_need_them_too(tmp_path: Path, setting: str) -> None:
    make(tmp_path, "etc/ocihook/config.toml", "etc/ocihook/config.d/10.toml")
    (tmp_path / "etc/ocihook/config.d/10.toml").write_text(f"[agent]\n{setting}\n")
    before = left(tmp_path)
    assert "it stays" in purge(tmp_path)
    assert left(tmp_path) == before


def test_what_is_no_setting_is_never_removed(tmp_path: Path) -> None:
    make(tmp_path, "etc/ocihook/config.toml", "etc/ocihook/keys/team", "var/lib/ocihook/history/1.json")
    said = purge(tmp_path)
    assert left(tmp_path) == {"etc/ocihook/keys/team", "var/lib/ocihook/history/1.json"}
    assert "maybe keys: they stay" in said


@pytest.mark.parametrize(
    ("before", "is_replaced"),
    [
        (None, True),
        ("# of the version before\n[policy]\n#mode = 1\n", True),
        ('# ours\n[policy]\nmode = "store"\n', False),
        ('  "key_file" = "/root/keys"\n', False),
    ],
)
def test_a_configuration_that_sets_something_stays(tmp_path: Path, before: str | None, *, is_replaced: bool) -> None:
    """The package brings one with all defaults as comments; dpkg knows nothing of it, so that no purge takes it."""
    make(tmp_path, "usr/share/ocihook/config.toml")
    file = tmp_path / "etc/ocihook/config.toml"
    file.parent.mkdir(parents=True)
    if before is not None:
        file.write_text(before)
    text = POSTINST.read_text().replace("/usr/libexec/ocihook/compile", "true")
    for place in ("/run/", "/var/", "/etc/", "/usr/share/"):
        assert f" {place}" in text
        text = text.replace(f" {place}", f" {tmp_path}{place}")
    command, path = ["sh", "-c", text, "postinst", "configure"], {"PATH": f"{failing_helper(tmp_path)}:/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=path)
    assert done.returncode == 0, done.stderr
    assert file.read_text() == ("[policy]\n" if is_replaced else before)
