"""Audit: the state of a container's tasks, recorded at a dump and compared after a restore."""
