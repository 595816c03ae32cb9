"""OCI: runtimes and their bundles, images as files, registries."""
