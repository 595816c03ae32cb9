"""The command line: one file a noun. click and rich live here only."""
