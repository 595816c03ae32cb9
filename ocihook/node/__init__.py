"""The node: ocihook installed, removed, examined and demonstrated on it."""
