"""The engines (podman, containerd, CRI-O): how they name containers and what their archives look like."""
