"""The life of checkpoints in the store: staged, completed, pruned, pushed and pulled."""
