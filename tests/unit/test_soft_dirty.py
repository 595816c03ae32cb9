"""Whether the kernel marks written pages: asked once, believed for this boot only, never a failure."""

import gzip
import json
import os
from pathlib import Path

import pytest

from ocihook.errors import OcihookError
from ocihook.linux import soft_dirty

CONFIGS = (Path("/proc/config.gz"), Path(f"/boot/config-{os.uname().release}"))


def test_the_kernel_does_what_its_configuration_says() -> None:
    config = next((path for path in CONFIGS if path.exists()), None)
    if config is None:
        pytest.skip("this kernel's configuration is not to be had")
    data = config.read_bytes()
    text = gzip.decompress(data) if config.suffix == ".gz" else data
    assert soft_dirty.measure() == (b"\nCONFIG_MEM_SOFT_DIRTY=y\n" in text)


def test_the_kernel_is_asked_once_per_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = soft_dirty.works(tmp_path)
    path = tmp_path / soft_dirty.NOTE_NAME
    assert json.loads(path.read_bytes())["works"] == truth
    soft_dirty.note(tmp_path, works=not truth)
    assert soft_dirty.works(tmp_path) == (not truth)
    for key, value in (("boot_id", "another"), ("kernel", "another"), ("works", "yes")):
        noted = json.loads(path.read_bytes())
        path.write_text(json.dumps({**noted, key: value}))
        assert soft_dirty.works(tmp_path) == truth, key
        assert json.loads(path.read_bytes())["works"] == truth, key
        soft_dirty.note(tmp_path, works=not truth)
    for damaged in (b"", b"[]", b"{}", b"\xff", b"1"):
        path.write_bytes(damaged)
        assert soft_dirty.works(tmp_path) == truth, damaged


@pytest.mark.parametrize("error", [OSError("no page map"), OcihookError("no child"), RuntimeError("a defect")])
def test_what_cannot_be_found_out_is_false_and_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_page_bytes: int) -> bool:
        raise error

    monkeypatch.setattr(soft_dirty, "_marks_what_is_written", fail)
    assert soft_dirty.measure() is None
    assert not soft_dirty.works(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_test_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_page_bytes: int) -> bool:
        while True:
            os.sched_yield()

    monkeypatch.setattr(soft_dirty, "_marks_what_is_written", hang)
    monkeypatch.setattr(soft_dirty, "_TEST_S", 0.01)
    assert not soft_dirty.works(tmp_path)
    assert soft_dirty.works(tmp_path / "missing") is False
