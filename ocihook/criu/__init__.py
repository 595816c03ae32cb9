"""What CRIU reads and writes: its images, its configuration files, its version."""
