"""Whose a checkpoint is: its domain, and the one container, however often recreated, that it counts for.

A pod's name says most of whose it is, and its labels the rest (container/pod_owner.py). Controllers make names by rules
(Kubernetes: names/generate.go, util/rand, job, replicaset and statefulset controllers; JobSet):

    Job                JOB-RANDOM            indexed: JOB-INDEX-RANDOM
    JobSet             JOBSET-GROUP-JOB-INDEX-RANDOM
    CronJob            CRONJOB-MINUTES-RANDOM, the minutes since 1970; or CRONJOB-MINUTES-INDEX-RANDOM
    Deployment         DEPLOYMENT-HASH-RANDOM
    DaemonSet, others  NAME-RANDOM
    StatefulSet        STATEFULSET-ORDINAL

What is the same in all names of a member, indices included, is the lineage. What may be part of somebody's own name
stays: then more is kept than need be.
"""

import re

from ocihook.errors import IdentificationError
from ocihook.model import ContainerRef
from ocihook.packs.domain_names import NODE_DOMAIN

_LONGEST_NAME = 63  # what is generated is cut to this: the end of the owner's name, its index even, may lack
_RANDOM = re.compile(r"-[bcdfghjklmnpqrstvwxz2456789]{5}$")
_HASH = re.compile(r"-[456789bcdf]{8,10}$")  # a number, its digits written so
_MINUTES = re.compile(r"-(?:2[7-9]|[3-5][0-9])[0-9]{6}(?=(?:-[0-9]+)?$)")  # of the years 2021 to 2084, and no date
_INDICES = re.compile(r"(?:-[0-9]+)*$")


def domain_name(container: ContainerRef) -> str:
    """Return the domain of a container: its pod's namespace, whose members trust one another.

    Raises:
        IdentificationError: if it is in a pod whose namespace is not known.
    """
    if container.is_in_pod and not container.pod_namespace:
        raise IdentificationError(f"container {container} is in a pod whose namespace its engine does not report")
    return container.pod_namespace or NODE_DOMAIN


def lineage(container: ContainerRef) -> str:
    """Return what checkpoints of the same member of the same owner have in common; within a domain it is its own."""
    if not container.pod_name:
        named = container.name if container.engine == "podman" else ""
        return container.member or container.owner or named or container.id
    return f"{container.pod_namespace}/{container.member or _member_of_owner(container)}/{container.name}"


def is_own(checkpoint: ContainerRef, container: ContainerRef) -> bool:
    """Return whether a checkpoint is one that a container goes on from by `latest`: of the same member and owner.

    Owners of one name differ by their uids, where both are known and no annotation of the container names its owner.
    """
    uids = {checkpoint.owner_uid, container.owner_uid} - {""}
    return lineage(checkpoint) == lineage(container) and (bool(container.owner) or len(uids) <= 1)


def owner_name(container: ContainerRef) -> str:
    """Return the owner of a container's pod: as its annotation says, or by its controller's rule for names.

    It is "" without a pod and an annotation.
    """
    return container.owner or _INDICES.sub("", _member(container.pod_name))


def _member_of_owner(container: ContainerRef) -> str:
    member = _member(container.pod_name)
    if container.owner:
        indices = _INDICES.search(member)
        return container.owner + (indices[0] if indices else "")
    return container.pod_name if len(container.pod_name) >= _LONGEST_NAME else member


def has_identity(container: ContainerRef) -> bool:
    """Return whether a container has an identity of its own, and is not just any replica of a Deployment."""
    stem = _RANDOM.sub("", container.pod_name)
    return bool(container.member) or stem == container.pod_name or not _HASH.search(stem)


def _member(pod_name: str) -> str:
    """Return a pod's name without the parts that change each time it is recreated."""
    stem = _RANDOM.sub("", pod_name)
    return pod_name if stem == pod_name else _MINUTES.sub("", _HASH.sub("", stem))
