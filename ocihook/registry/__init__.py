"""OCI registries: their protocol, credentials, and what an image consists of."""
