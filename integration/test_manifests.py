"""The manifests of packaging/kustomize as a cluster gets them: rendered, and each name in them followed."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.test_documents import run
from ocihook.cli.install import install
from ocihook.config import load_settings
from ocihook.node.handlers import HANDLER

PROJECT = Path(__file__).parents[1]
KUSTOMIZE = PROJECT / "packaging/kustomize"
DIRECTORIES = sorted(path.parent for path in KUSTOMIZE.rglob("kustomization.yaml"))
INSTALLER = (PROJECT / "packaging/image/installer").read_text()

Manifest = dict[str, Any]


def render(directory: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(run("kubectl", "kustomize", str(directory))))


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


@pytest.fixture(params=DIRECTORIES, ids=lambda path: str(path.relative_to(KUSTOMIZE)))
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(request.param)


def test_pods_are_started_where_documents_say(manifests: list[Manifest]) -> None:
    """A label that no document names is on no node."""
    documents = (PROJECT / "docs/install.md").read_text()
    for daemon_set in of_kind(manifests, "DaemonSet"):
        template = daemon_set["spec"]["template"]
        assert daemon_set["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        for label, value in template["spec"]["nodeSelector"].items():
            assert f'`{label}: "{value}"`' in documents
        for runtime_class in of_kind(manifests, "RuntimeClass"):
            assert runtime_class["scheduling"]["nodeSelector"] == template["spec"]["nodeSelector"]


def test_what_a_pod_mounts_is_there(manifests: list[Manifest]) -> None:
    for daemon_set in of_kind(manifests, "DaemonSet"):
        namespace, pod = daemon_set["metadata"]["namespace"], daemon_set["spec"]["template"]["spec"]
        assert namespace in {found["metadata"]["name"] for found in of_kind(manifests, "Namespace")}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["/host"]["hostPath"]["path"] == "/"
        assert "emptyDir" in mounts["/tmp"]
        (config,) = (found for found in of_kind(manifests, "ConfigMap") if found["metadata"]["namespace"] == namespace)
        assert mounts["/config"]["configMap"]["name"] == config["metadata"]["name"]


def test_the_configuration_is_understood(manifests: list[Manifest], tmp_path: Path) -> None:
    for config in of_kind(manifests, "ConfigMap"):
        directory = tmp_path / "etc/ocihook/config.d"
        directory.mkdir(parents=True)
        for name, text in config["data"].items():
            (directory / name).write_text(text)
        settings = load_settings(tmp_path)
        assert (settings.keep_last, settings.archive_dir) == (3, "/var/lib/kubelet/checkpoints")


def test_the_installer_knows_what_it_is_called_with(manifests: list[Manifest]) -> None:
    verbs = re.findall(r"^    (\w+)\)", INSTALLER, re.MULTILINE)
    for daemon_set in of_kind(manifests, "DaemonSet"):
        pod = daemon_set["spec"]["template"]["spec"]
        verb, *options = pod["containers"][0]["args"]
        assert verb in verbs
        install.make_context("install", options)  # an unknown option is an error
        assert bool(options) <= (verb == "serve")
        assert pod["hostPID"]  # a dump that runs is seen
        assert f"touch {pod['containers'][0]['readinessProbe']['exec']['command'][-1]}" in INSTALLER


def test_one_manifest_replaces_another() -> None:
    """A removal beside an installer that goes on would be undone within ten minutes."""
    found = {
        str(directory.relative_to(KUSTOMIZE)): {
            (one["metadata"]["namespace"], one["metadata"]["name"], str(one["spec"]["selector"]))
            for one in of_kind(render(directory), "DaemonSet")
        }
        for directory in DIRECTORIES
    }
    assert found.pop("runtime") == found.pop("checkpoint-api") == set()  # a class, and a role
    assert found.keys() == {"base", "overlays/remove", "overlays/runtime"}
    assert len(set.union(*found.values())) == 1
    (removal,) = of_kind(render(KUSTOMIZE / "overlays/remove"), "DaemonSet")
    assert removal["spec"]["template"]["spec"]["containers"][0]["args"] == ["unserve"]


def test_the_class_names_the_handler_that_install_makes(manifests: list[Manifest]) -> None:
    assert {found["handler"] for found in of_kind(manifests, "RuntimeClass")} <= {HANDLER}


def test_the_role_allows_checkpoints_and_nothing_else() -> None:
    manifests = render(KUSTOMIZE / "checkpoint-api")
    (role,), (binding,) = of_kind(manifests, "ClusterRole"), of_kind(manifests, "ClusterRoleBinding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes/checkpoint"], "verbs": ["create"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_documents_name_manifests_that_are_there() -> None:
    pages = "".join(path.read_text() for path in (PROJECT / "docs").glob("*.md"))
    named = set(re.findall(r"-k (packaging/kustomize/[\w/-]+)", pages))
    assert named == {str(path.relative_to(PROJECT)) for path in DIRECTORIES}
