"""Packs and manifests: where checkpointed memory is kept. Knows bytes and names, never CRIU or CUDA.

The formats, their limits and what a crash leaves behind are described in README.md beside this file.
"""
