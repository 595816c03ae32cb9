"""A failure of CRIU that the catalogue of causes does not know fails its test, whatever engine that uses."""

import json

import pytest

from integration.namespace import Namespace

_OWN_HISTORY = "mkdir -p /var/lib/ocihook\nmount -t tmpfs tmpfs /var/lib/ocihook\nmkdir /var/lib/ocihook/history"


@pytest.mark.parametrize("code", ["criu-unknown", "criu-io-uring"])
def test_an_unknown_cause_is_a_fault(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setenv("OCIHOOK_NIGHTLY", "1")
    namespace = Namespace(_OWN_HISTORY)
    facts = {"failure": {"name": code.removeprefix("criu-"), "what": "CRIU says «odd»", "remedy": ""}}
    record = {"id": "1", "began": 1, "ended": 2, "stages": {}, "phases": [], "facts": facts}
    record |= {"error_code": code, "error": "odd"}
    namespace.path("/var/lib/ocihook/history/1.json").write_text(json.dumps(record))
    if code != "criu-unknown":
        namespace.close()
        return
    with pytest.raises(AssertionError, match=r"causes.toml has no entry for: .*odd"):
        namespace.close()
