"""What packages take of a dependency is enough for what ocihook does with it, and no more."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

_STAGE = Path(__file__).parents[2] / "packaging/stage.py"  # the directory is no package: PyPI's has its name
_USE = """
import sys
sys.path[:0] = sys.argv[1:]
import botocore.session
assert botocore.__file__.startswith(sys.argv[1])
session = botocore.session.Session()
clients = {name: session.create_client(name, region_name="eu-central-1") for name in session.get_available_services()}
assert {"s3", "signin", "sso", "sso-oidc", "sts"} == set(clients), set(clients)
clients["s3"].get_paginator("list_objects_v2")
print(clients["s3"].generate_presigned_url("get_object", {"Bucket": "b", "Key": "k"}))
"""


@pytest.fixture(scope="module")
def stage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ocihook_stage", _STAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_kept_of_botocore(stage: ModuleType, tmp_path: Path) -> None:
    """Object storage, and the services that lead to its credentials."""
    files = importlib.metadata.files("botocore") or []
    kept = [file for file in files if stage.is_kept("botocore", str(file))]
    for file in kept:
        place = tmp_path / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_binary())
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 5 << 20
    others = [path for path in sys.path if path.endswith("site-packages")]
    environment = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "HOME": str(tmp_path)}
    command = [sys.executable, "-ISB", "-c", _USE, str(tmp_path), *others]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert "X-Amz-Signature=" in done.stdout or "Signature=" in done.stdout, done.stderr


_ASK = """
import os, sys
sys.path[:0] = sys.argv[1:]
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import destroy, inet_sockets, links, routes, unix_peers
here = NetNamespace.of(os.getpid())
assert [link.name for link in links(here) if link.is_loopback] == ["lo"]
routes(here), unix_peers(here), destroy(here, inet_sockets(here)[:0])
import pyroute2
assert all(path.startswith(sys.argv[1]) for path in pyroute2.__path__), pyroute2.__path__
"""


def test_what_is_kept_of_pyroute2(stage: ModuleType, tmp_path: Path) -> None:
    """Messages alone: its __init__ would import all the rest."""
    for file in importlib.metadata.files("pyroute2") or []:
        if stage.is_kept("pyroute2", str(file)):
            place = tmp_path / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_binary())
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.py")) < 400 << 10
    assert not (tmp_path / "pyroute2/__init__.py").exists()
    project = str(_STAGE.parents[1])
    done = subprocess.run(
        [sys.executable, "-ISB", "-c", _ASK, str(tmp_path), project],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
