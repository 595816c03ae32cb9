"""What a domain may be called: its name becomes a path, part of a tag, and an argument of root's `key_command`.

It comes out of archives, manifests and remotes, so it is checked wherever it is decoded, and again where it is used.
"""

import re

from ocihook.errors import StoreError

NODE_DOMAIN = "_node"  # of containers that are in no pod; no namespace can have this name
DOMAIN_NAME = re.compile(rf"{NODE_DOMAIN}|[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?")  # else a namespace: RFC 1123 label


def check_domain_name(name: str) -> str:
    """Return a name that a domain may have.

    Raises:
        StoreError: if it may not.
    """
    if not DOMAIN_NAME.fullmatch(name):
        raise StoreError(f"{name!r} is no name for a domain", hint="use a Kubernetes namespace's name")
    return name
