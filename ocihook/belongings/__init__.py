"""What a container has beside its processes: changes of its rootfs, and volumes that end with its pod."""
