"""The content store of a node: checkpoints whose pages are kept once. Knows bytes and names, never CRIU or CUDA.

The formats, their limits and what a crash leaves behind are described in docs/formats.md.
"""
