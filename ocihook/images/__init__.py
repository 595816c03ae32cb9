"""One image set as CRIU writes it, packed in place and unpacked again."""
