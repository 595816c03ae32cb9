"""Configuration: defaults < config.toml < config.d < annotations; every mistake names the file and the key."""

import dataclasses
import re
from pathlib import Path

import pytest

from ocihook.config import ALLOWED, CHOICES, RANGES, TABLES, Policy, Settings, apply_annotations, load_settings
from ocihook.errors import AdmissionError, ConfigError


def write(root: Path, text: str, name: str = "config.toml") -> Path:
    file = root / "etc/ocihook" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_nothing_configured(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == Settings()


NUMBERS = [
    (table, field.name)
    for table, settings in (("policy", Policy), ("agent", Settings))
    for field in dataclasses.fields(settings)
    if field.name not in TABLES and type(field.default) in (int, float)
]


@pytest.mark.parametrize(("table", "key"), NUMBERS)
def test_every_number_has_a_range(tmp_path: Path, table: str, key: str) -> None:
    for wrong in (-1, int(RANGES[key][1]) + 1, "nan", "inf"):
        write(tmp_path, f"[{table}]\n{key} = {wrong}\n")
        with pytest.raises(ConfigError, match=rf"{key} must be (between|an integer)"):
            load_settings(tmp_path)


def test_later_sources_win(tmp_path: Path) -> None:
    write(tmp_path, '[policy]\nmode = "off"\non_pack_error = "fail"\nquiesce_timeout_s = 3\n[agent]\nworkers = 2\n')
    write(tmp_path, '[policy]\nmode = "inline"\n', "config.d/20.toml")
    write(tmp_path, '[policy]\nmode = "off"\n[agent]\nworkers = 3\n', "config.d/10.toml")
    write(tmp_path, "not read", "config.d/30.conf")
    settings = load_settings(tmp_path)
    assert settings.policy == Policy(mode="inline", on_pack_error="fail", quiesce_timeout_s=3.0)
    assert settings.workers == 3
    annotations = {"ocihook.io/mode": "off", "ocihook.io/quiesce-timeout-s": "0.5", "example.org/mode": "x"}
    policy, refused, unknown = apply_annotations(settings, annotations, in_pod=True)
    assert policy == Policy(mode="off", on_pack_error="fail", quiesce_timeout_s=0.5)
    assert (refused, unknown) == ((), ())


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
        ("[policy.allowed]\nmoed = true", r"\[policy.allowed\]: unknown key 'moed'. Did you mean 'mode'\?"),
        ('[policy.allowed]\nmode = ["fast"]', r"\[policy.allowed\]: mode must be one of"),
        ("[policy.allowed]\nmode = [1]", r"\[policy.allowed\]: mode must be a string, not 1"),
        ('[policy.allowed]\nmode = "off"', r"\[policy.allowed\]: mode must be a list of its values, not 'off'"),
        ("[policy.allowed]\nquiesce_timeout_s = 601", "quiesce_timeout_s must be between"),
        ('[policy.allowed]\nquiesce_timeout_s = "1"', "quiesce_timeout_s must be a number"),
        ('[policy.allowed]\ngpu_map = ["x"]', "gpu_map must be true or false"),
        ("[policy]\nallowed = 1", r"allowed must be a table, as in \[allowed\]"),
        ('[restore_from]\nteam = "other"', r"\[restore_from\]: team must be a list of domains, not 'other'"),
        ('[restore_from]\nteam = ["../x"]', r"\[restore_from\]: '../x' is no namespace"),
        ("[restore_from]\nTeam = []", r"\[restore_from\]: 'Team' is no namespace"),
        ("[restore_from]\nteam = [1]", r"\[restore_from\]: 1 is no namespace"),
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
        ("ocihook.io/mode", "fast", "annotation ocihook.io/mode: mode must be one of"),
        ("ocihook.io/quiesce-timeout-s", "soon", "annotation ocihook.io/quiesce-timeout-s: 'soon' is not a number"),
        ("ocihook.io/quiesce-timeout-s", "inf", "must be between"),
        ("ocihook.io/quiesce-ack", "x", "must be an absolute path"),
        ("ocihook.io/quiesce-signal", "STOP", "must be one of"),
    ],
)
def test_mistakes_name_the_annotation_and_have_no_effect(name: str, text: str, message: str) -> None:
    for in_pod in (True, False):
        policy, refused, unknown = apply_annotations(Settings(), {name: text}, in_pod=in_pod)
        assert (policy, unknown) == (Policy(), ())
        (error,) = refused
        assert isinstance(error, ConfigError)
        assert re.search(message, str(error))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ocihook.io/moed", "annotation ocihook.io/moed is not known here and has no effect; did you mean 'mode'?"),
        ("ocihook.io/workers", "known are: mode"),  # a pod does not decide about the node
        ("ocihook.io/restore-into", "is not known here and has no effect"),  # of another release
    ],
)
def test_what_another_release_may_know_is_told_and_stops_nothing(name: str, message: str) -> None:
    annotations = {name: "latest", "ocihook.io/mode": "store"}
    policy, refused, unknown = apply_annotations(Settings(), annotations, in_pod=True)
    assert (policy, refused) == (Policy(mode="store"), ())
    assert message in unknown[0]


REFUSED_BY_DEFAULT = {
    "push": "always",
    "preflight": "warn",
    "gpu_map": "GPU-00000000-0000-0000-0000-000000000000=GPU-00000000-0000-0000-0000-000000000001",
    "quiesce_timeout_s": "61",
    "gpu_lock_timeout_s": "60.5",
}


@pytest.mark.parametrize(("key", "value"), REFUSED_BY_DEFAULT.items())
def test_what_a_pod_may_not_set_unless_it_is_allowed(tmp_path: Path, key: str, value: str) -> None:
    name = f"ocihook.io/{key.replace('_', '-')}"
    annotations = {name: value, "ocihook.io/mode": "store"}
    policy, refused, _ = apply_annotations(Settings(), annotations, in_pod=True)
    assert policy == Policy(mode="store")  # a restore goes ahead with what is allowed
    (error,) = refused
    assert isinstance(error, AdmissionError)
    assert str(error).startswith(f"annotation {name}: a pod may not set ")
    assert str(error).endswith(f"allow it in /etc/ocihook/config.toml: [policy.allowed] {key}")
    assert apply_annotations(Settings(), annotations, in_pod=False).refused == ()  # root's own container

    allowed = {"push": '["always"]', "preflight": '["refuse", "warn"]', "gpu_map": "true"}.get(key, "600")
    write(tmp_path, f"[policy.allowed]\n{key} = {allowed}\n")
    settings = load_settings(tmp_path)
    policy, refused, _ = apply_annotations(settings, annotations, in_pod=True)
    assert refused == ()
    assert str(getattr(policy, key)).startswith(value)
    write(tmp_path, f"[policy.allowed]\n{key} = false\n", "config.d/1.toml")
    assert len(apply_annotations(load_settings(tmp_path), annotations, in_pod=True).refused) == 1


def test_every_key_has_a_bound_for_pods() -> None:
    assert set(ALLOWED) == set(Policy.__dataclass_fields__)
    for key, allowed in ALLOWED.items():
        assert isinstance(allowed, tuple) == (key in CHOICES)
        assert not isinstance(allowed, tuple) or set(allowed) <= set(CHOICES[key])


def test_what_holds_on_the_node_anyway_a_pod_may_set() -> None:
    settings = Settings(policy=Policy(preflight="warn"))
    assert apply_annotations(settings, {"ocihook.io/preflight": "warn"}, in_pod=True).refused == ()


def test_rules_of_several_files(tmp_path: Path) -> None:
    write(tmp_path, '[restore_from]\nteam-b = ["team-a"]\n"*" = ["shared"]\n[policy.allowed]\nmode = ["store"]\n')
    write(tmp_path, '[restore_from]\n_node = ["*"]\nteam-b = []\n[policy.allowed]\npush = true\n', "config.d/1.toml")
    settings = load_settings(tmp_path)
    assert settings.restore_from == {"team-b": (), "*": ("shared",), "_node": ("*",)}
    assert settings.allowed == {**ALLOWED, "mode": ("store",), "push": True}


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


def test_a_renamed_key_still_counts_and_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "etc/ocihook/config.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[policy]\ngpu_preflight = "warn"\n[policy.allowed]\ngpu_preflight = ["refuse", "warn"]\n')
    settings = load_settings(tmp_path)
    assert (settings.policy.preflight, settings.allowed["preflight"]) == ("warn", ("refuse", "warn"))
    assert "gpu_preflight is now called preflight" in caplog.text
    found = apply_annotations(Settings(), {"ocihook.io/gpu-preflight": "warn"}, in_pod=False)
    assert found.policy.preflight == "warn"
    assert found.unknown == ("annotation ocihook.io/gpu-preflight is now called ocihook.io/preflight",)
