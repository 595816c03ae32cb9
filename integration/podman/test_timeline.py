"""What real sessions left on record, as people and programs get it."""

import json
import shutil
from typing import Any

import pytest

from integration.browser import show
from integration.journals import last_session
from integration.namespace import is_required
from integration.podman.engine import Podman
from ocihook.cli.timeline_page import page
from ocihook.session.timeline import lay_out

VRAM_BYTES = 40 << 20  # a driver's mapping of 32 MiB and more is filled for it
HOSTILE = "<script>alert(1)</script><img src=https://elsewhere.example/x>"


def timeline(podman: Podman, *arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(podman.ocihook("timeline", "--json", *arguments))
    return value


def bars(found: dict[str, Any], lane: str) -> dict[str, dict[str, Any]]:
    return {bar["name"]: bar for bar in found["bars"] if bar["lane"].startswith(lane)}


def assert_sound(found: dict[str, Any]) -> None:
    assert found["outcome"] == "done"
    for bar in found["bars"]:
        assert bar["seconds"] > 0
        assert 0 <= bar["start_s"] <= bar["start_s"] + bar["seconds"] <= found["seconds"] + 0.05


def test_timeline_of_a_dump_and_its_restore(gpu_podman: Podman) -> None:
    podman = gpu_podman
    archive = podman.scratch / "c.tar"
    podman.start_cuda("c", VRAM_BYTES >> 20)
    podman.checkpoint("c", archive, "--leave-running")
    podman.assert_counts("c")
    dump = timeline(podman, last_session(podman.namespace, "post-dump")["id"])
    assert_sound(dump)
    process = bars(dump, "process ")
    rest = ["move out", "release", "give back", "restore", "unlock"]
    assert list(process) == ["lock", "checkpoint", "prefault", *rest]
    starts = [bar["start_s"] for bar in process.values()]
    assert starts == sorted(starts)
    assert process["checkpoint"]["bytes"] == process["move out"]["bytes"] > VRAM_BYTES
    assert bars(dump, "GPU-")[f"checkpoint of {process['lock']['lane'].split()[1]}"]["bytes"] >= VRAM_BYTES
    assert process["checkpoint"]["bytes"] - 4096 < process["prefault"]["bytes"] <= process["checkpoint"]["bytes"]
    workers = [bar for bar in dump["bars"] if bar["lane"].startswith("worker ") and "move out" in bar["name"]]
    assert sum(bar["bytes"] for bar in workers) == process["move out"]["bytes"]
    assert bars(dump, "CRIU").keys() > {"freezing", "frozen", "memory drained", "memory written"}
    assert bars(dump, "stages").keys() == {"pre-dump", "post-dump", "detached"}
    podman.remove("c")

    podman.restore(archive)
    restore = timeline(podman, last_session(podman.namespace, "post-resume")["id"])
    assert_sound(restore)
    assert list(bars(restore, "process ")) == ["write back", "populate", "restore", "unlock"]
    assert bars(restore, "CRIU").keys() >= {"forking", "restore"}
    assert bars(restore, "GPU-")
    assert timeline(podman) == restore, "without a name it is the newest"


def test_a_failed_dump_is_on_record_with_its_cause(podman: Podman) -> None:
    podman.start("c", quiesce_signal="USR1", quiesce_ack="/run/never", quiesce_timeout_s="0.2")
    podman.checkpoint("c", podman.scratch / "c.tar", check=False)
    found = timeline(podman, last_session(podman.namespace, "pre-dump")["id"])
    assert (found["outcome"], found["error_code"]) == ("refused", "quiesce")
    assert bars(found, "ocihook")["quiesce"]["failed"]
    podman.assert_counts("c")


@pytest.mark.skipif(not shutil.which("chromium") and not is_required(), reason="needs chromium")
def test_the_page_in_a_browser(podman: Podman) -> None:
    """In light and dark, with nothing fetched and nothing run, whatever a container is called."""
    podman.start("c")
    podman.checkpoint("c", podman.scratch / "c.tar")
    record = last_session(podman.namespace, "post-dump")
    record["container"]["name"] = HOSTILE
    file = podman.scratch / "page.html"
    text = page(lay_out(record))
    file.write_text(text)
    light = show(file)
    assert light.console == []
    assert "elsewhere.example" not in light.network_log
    assert "</svg>" in light.dom
    assert light.dom.count("<rect") == light.dom.count("</td><td>") > 5
    assert light.background[:3] == (255, 255, 255)
    file.write_text(text.replace("</body>", f"{HOSTILE}</body>"))
    dark = show(file, is_dark=True)
    assert len(dark.console) == 2, "a script and an image would have been noticed"
    assert dark.background[:3] == (20, 23, 26)
