"""The manifests of packaging/kustomize name files that are there, and the installer knows what they call it."""

import re
from pathlib import Path

from ocihook.node.handlers import HANDLER

KUSTOMIZE = Path(__file__).parents[2] / "packaging/kustomize"
INSTALLER = (KUSTOMIZE.parent / "image/installer").read_text()


def test_what_is_named_is_there() -> None:
    for kustomization in KUSTOMIZE.rglob("kustomization.yaml"):
        text = kustomization.read_text()
        names = re.findall(r"^(?:  - |      - )([\w./-]+\.(?:yaml|toml)|\.\./\.\./\w+)$", text, re.MULTILINE)
        assert names
        for name in names:
            assert (kustomization.parent / name).exists(), f"{kustomization}: {name}"


def test_installer_knows_what_it_is_called_with() -> None:
    verbs = re.findall(r"^    (\w+)\)", INSTALLER, re.MULTILINE)
    base = (KUSTOMIZE / "base/daemonset.yaml").read_text()
    removal = (KUSTOMIZE / "overlays/remove/kustomization.yaml").read_text()
    called = re.findall(r"args: \[(\w+)\]", base) + re.findall(r"value: \[(\w+)\]", removal)
    assert called == ["serve", "unserve"]
    assert set(called) <= set(verbs)
    assert "hostPID: true" in base  # a dump that runs is seen
    assert "mountPath: /host\n" in base


def test_the_class_names_the_handler_that_install_makes() -> None:
    assert f"\nhandler: {HANDLER}\n" in (KUSTOMIZE / "runtime/runtimeclass.yaml").read_text()
