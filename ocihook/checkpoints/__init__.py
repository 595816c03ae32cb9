"""Checkpoints in the store on their way: staged, completed, pruned, pushed and pulled."""
