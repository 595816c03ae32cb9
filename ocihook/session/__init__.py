"""The record of one dump or restore: what it knows, what it did to the node, and how that is undone."""
