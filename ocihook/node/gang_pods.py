"""Pods of a gang on a node without a kubelet: how they were made, and how they are made again from archives.

An archive lacks its pod's configuration. containerd has it: `crictl inspectp` and `inspect` show what it was given
by RunPodSandbox and CreateContainer (`info.config`). CRI-O does not show it. A kubelet's pods are their controller's.
"""

import json
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.errors import GangError, IntegrityError, OcihookError, UnsupportedError, plain
from ocihook.linux.files import replace_file
from ocihook.node.gang_engines import Engine, Running

_NAME = "pods.json"
_VERSION = 1
_KUBELET = "kubernetes.io/config.source"  # an annotation that each pod of a kubelet has (pkg/kubelet/types)


class PodRecipe(NamedTuple):
    """How the one container of a pod was made, in CRI's JSON."""

    handler: str  # of the runtime; "": the engine's default
    pod: Mapping[str, Any]  # PodSandboxConfig
    container: Mapping[str, Any]  # ContainerConfig


class Made(NamedTuple):
    """A pod that was made again, whose container is yet to be started."""

    sandbox: str
    container: str


def recipes_of(members: Mapping[str, Running]) -> dict[str, PodRecipe]:
    """Return how the pods of running members were made; none if their engine does not show it.

    Raises:
        GangError: if the engine does not answer.
    """
    found = {}
    for member, running in members.items():
        try:
            container = json.loads(running.engine.ask("inspect", running.container_id))["info"]
            sandbox = json.loads(running.engine.ask("inspectp", container["sandboxID"]))
            handler = str(sandbox["status"].get("runtimeHandler", ""))
            found[member] = PodRecipe(handler, {**sandbox["info"]["config"]}, {**container["config"]})
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}
    return found


def write_recipes(directory: Path, recipes: Mapping[str, PodRecipe]) -> None:
    """Note beside archives how their pods were made: with their environment, so for nobody else to read."""
    pods = {member: recipe._asdict() for member, recipe in recipes.items()}
    replace_file(directory / _NAME, json.dumps({"version": _VERSION, "pods": pods}, indent=1).encode(), mode=0o600)


def read_recipes(directory: Path) -> dict[str, PodRecipe]:
    """Return what `write_recipes` has noted.

    Raises:
        UnsupportedError: if nothing is, or the pods are a kubelet's.
        IntegrityError: if it is damaged.
    """
    path = directory / _NAME
    try:
        pods = json.loads(path.read_bytes())["pods"]
        recipes = {
            str(member): PodRecipe(str(pod["handler"]), {**pod["pod"]}, {**pod["container"]})
            for member, pod in pods.items()
        }
    except FileNotFoundError as error:
        raise UnsupportedError(
            f"{directory} does not say how its pods were made: `gang checkpoint --cri` notes it with containerd",
            hint="make pods that have the archives as their images, all at the same time",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} is damaged: {error!r}") from error
    if kubelets := sorted(
        name for name, recipe in recipes.items() if _KUBELET in (recipe.pod.get("annotations") or {})
    ):
        raise UnsupportedError(
            f"{', '.join(kubelets)}: pods of a kubelet, which would remove what it has not made",
            hint="have their controller make them again, with the archives as images or with ocihook.io/restore-from",
        )
    return recipes


def make_pods(engine: Engine, recipes: Mapping[str, PodRecipe], archives: Mapping[str, Path]) -> dict[str, Made]:
    """Make pods again, each with a container from its archive, and start none; all or none is there then.

    Raises:
        GangError: if one cannot be made.
    """

    def make(member: str) -> Made | str:
        recipe, made = recipes[member], Made("", "")
        image = {**(recipe.container.get("image") or {}), "image": str(archives[member])}
        with tempfile.TemporaryDirectory(prefix="ocihook-pods-") as scratch:
            pod, container = Path(scratch) / "pod.json", Path(scratch) / "container.json"
            pod.write_text(json.dumps(recipe.pod))
            container.write_text(json.dumps({**recipe.container, "image": image}))
            try:
                handler = [f"--runtime={recipe.handler}"] if recipe.handler else []
                made = Made(engine.ask("runp", *handler, str(pod)).strip(), "")
                return made._replace(container=engine.ask("create", made.sandbox, str(container), str(pod)).strip())
            except OcihookError as error:
                return plain(error) + remove_pods(engine, {member: made})

    with ThreadPoolExecutor(len(archives)) as pool:
        results = dict(zip(archives, pool.map(make, archives), strict=True))
    made = {member: result for member, result in results.items() if isinstance(result, Made)}
    if wrong := "; ".join(f"{member}: {result}" for member, result in results.items() if isinstance(result, str)):
        left = remove_pods(engine, made)
        raise GangError(f"the pods cannot be made again, and all are removed{left}: {wrong}")
    return made


def remove_pods(engine: Engine, pods: Mapping[str, Made]) -> str:
    """Remove pods with all that runs in them; return in words which are left."""
    left = []
    for member, made in pods.items():
        try:
            if made.sandbox:
                engine.ask("rmp", "--force", made.sandbox)
        except OcihookError as error:
            left.append(f"{member} ({plain(error)})")
    return f" but those of {', '.join(left)}" if left else ""
