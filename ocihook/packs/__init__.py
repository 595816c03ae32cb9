"""Packs: the format that memory is kept in, how it is written, read, encrypted, and what lists it."""
