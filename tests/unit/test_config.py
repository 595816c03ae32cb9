"""Configuration: defaults < config.toml < config.d < annotations; every mistake names the file and the key."""

from pathlib import Path

import pytest

from ocihook.config import Policy, Settings, apply_annotations, load_settings
from ocihook.errors import ConfigError


def write(root: Path, text: str, name: str = "config.toml") -> Path:
    file = root / "etc/ocihook" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_nothing_configured(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == Settings()


def test_later_sources_win(tmp_path: Path) -> None:
    write(tmp_path, '[policy]\nmode = "off"\non_pack_error = "fail"\nquiesce_timeout_s = 3\n[agent]\nworkers = 2\n')
    write(tmp_path, '[policy]\nmode = "inline"\n', "config.d/20.toml")
    write(tmp_path, '[policy]\nmode = "off"\n[agent]\nworkers = 3\n', "config.d/10.toml")
    write(tmp_path, "not read", "config.d/30.conf")
    settings = load_settings(tmp_path)
    assert settings.policy == Policy(mode="inline", on_pack_error="fail", quiesce_timeout_s=3.0)
    assert settings.workers == 3
    annotations = {"ocihook.io/mode": "off", "ocihook.io/quiesce-timeout-s": "0.5", "example.org/mode": "x"}
    assert apply_annotations(settings.policy, annotations) == Policy(
        mode="off", on_pack_error="fail", quiesce_timeout_s=0.5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[policy]\nmoed = "off"', r"\[policy\]: unknown key 'moed'. Did you mean 'mode'\?"),
        ("[polcy]", r"unknown table 'polcy'. Did you mean 'policy'\?"),
        ("mode = 1", "unknown table 'mode'"),
        ("policy = 1", r"policy must be a table, as in \[policy\]"),
        ('[policy]\nmode = "fast"', "mode must be one of 'inline', 'store', 'off', not 'fast'"),
        ("[policy]\nmode = true", "mode must be a string, not True"),
        ("[agent]\nworkers = true", "workers must be an integer, not True"),
        ("[agent]\nworkers = -1", "workers must be between 0 and 1024, not -1"),
        ('[agent]\nidle_timeout_s = "60"', "idle_timeout_s must be a number, not '60'"),
        ("[agent]\nmemory_bound_bytes = 1", "memory_bound_bytes must be between"),
        ("[policy]\nquiesce_timeout_s = nan", "quiesce_timeout_s must be between 0.1 and 600, not nan"),
        ('[policy]\nquiesce_ack = "../x"', "quiesce_ack must be an absolute path"),
        ('[policy]\nquiesce_ack = "/a/../../x"', "quiesce_ack must be an absolute path"),
        ('[policy]\nresume_signal = "KILL"', "resume_signal must be one of"),
        ('[agent]\nhistory_dir = "history"', "history_dir must be an absolute path"),
        ('[agent]\nmetrics_address = "0.0.0.0:9748"', "metrics_address must be 127.0.0.1:PORT"),
        ('[agent]\nmetrics_address = "unix:relative"', "metrics_address must be"),
        ('[agent]\nremote = "ftp://x"', "remote must be /DIRECTORY, s3://BUCKET/PREFIX or oci://REGISTRY/REPOSITORY"),
        ('[agent]\nkey_file = "keys"', "key_file must be an absolute path"),
        ('[policy]\npush = "always"', r"push is 'always', and no remote is configured. Set remote in \[agent\]"),
        ("[agent]\nmemory_bound_bytes = -1", "memory_bound_bytes must be between"),
        ("[policy", "is not TOML"),
        ("a = \x80", "is not TOML|cannot be read"),
    ],
)
def test_mistakes_name_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    for name in ("config.toml", "config.d/10.toml"):
        file = write(tmp_path, text, name)
        with pytest.raises(ConfigError, match=message) as raised:
            load_settings(tmp_path)
        assert str(raised.value).startswith(str(file))
        file.unlink()


def test_a_directory_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "etc/ocihook/config.toml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"config.toml cannot be read: Is a directory"):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ocihook.io/moed", "off", "unknown key 'moed'"),
        ("ocihook.io/workers", "9", "unknown key 'workers'"),  # a pod does not decide about the node
        ("ocihook.io/mode", "fast", "annotation ocihook.io/mode: mode must be one of"),
        ("ocihook.io/quiesce-timeout-s", "soon", "annotation ocihook.io/quiesce-timeout-s: 'soon' is not a number"),
        ("ocihook.io/quiesce-timeout-s", "inf", "must be between"),
        ("ocihook.io/quiesce-ack", "x", "must be an absolute path"),
        ("ocihook.io/quiesce-signal", "STOP", "must be one of"),
    ],
)
def test_mistakes_name_the_annotation(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_annotations(Policy(), {name: text})


@pytest.mark.parametrize(
    ("cores", "gib", "configured", "bound_mib"),
    [(2, 8, 0, 256), (64, 1024, 0, 48 + 64 * 52), (64, 64, 0, 1024), (64, 1024, 100 << 20, 100)],
)
def test_the_bound_grows_with_the_node(
    monkeypatch: pytest.MonkeyPatch, cores: int, gib: int, configured: int, bound_mib: int
) -> None:
    pages = {"SC_PHYS_PAGES": gib << 18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("ocihook.config.os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("ocihook.config.os.sysconf", pages.get)
    assert Settings(memory_bound_bytes=configured).bound_bytes == bound_mib << 20
