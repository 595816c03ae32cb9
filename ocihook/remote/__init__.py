"""Where checkpoints go beyond their node: a shared directory, an object store, a registry."""
