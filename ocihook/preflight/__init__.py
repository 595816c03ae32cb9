"""Checks of a container or process tree: what CRIU would refuse, lose or fail to restore; for doctor and for dumps."""
