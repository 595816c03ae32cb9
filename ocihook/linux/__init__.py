"""What the kernel offers: processes, cgroups, files. Knows nothing of containers."""
