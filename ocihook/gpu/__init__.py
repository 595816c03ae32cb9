"""GPU state: the driver's calls, what they are made on, what refuses them, and the part of a dump and restore."""
