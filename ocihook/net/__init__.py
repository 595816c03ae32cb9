"""Connections of a container: what becomes of them, the hold on its network meanwhile, and their new addresses."""
