"""Checkpoint and restore of GPU containers on stock clusters, called by CRIU as its action script."""

__version__ = "0.1.0"
