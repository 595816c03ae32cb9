"""The runtime handler: a container that is made again is restored, and one that is stopped is checkpointed."""
