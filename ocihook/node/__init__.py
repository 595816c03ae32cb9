"""The node: ocihook installed on it, taken off it, examined and shown at work."""
