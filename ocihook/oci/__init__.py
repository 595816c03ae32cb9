"""OCI runtimes and bundles: which container a runtime's call to CRIU is about."""
