"""The runtime handler: a container that is created again is restored, and one that is stopped is checkpointed."""
