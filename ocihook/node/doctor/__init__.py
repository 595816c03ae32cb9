"""Reports whether a checkpoint will work, on this node and of a workload, and what to do if not."""
