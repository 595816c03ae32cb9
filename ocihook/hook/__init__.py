"""What CRIU calls. Standard library only: every millisecond here is downtime of a container."""
