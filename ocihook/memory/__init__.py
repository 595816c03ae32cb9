"""Processes that stand still, and their memory on its way out and in past CRIU."""
