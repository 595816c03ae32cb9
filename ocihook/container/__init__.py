"""Whose process it is: the runtime that called CRIU, what engines say of a container, and their archives."""
