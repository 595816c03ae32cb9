"""CUDA's checkpoint calls through the driver API: the four verbs and the states between them."""
