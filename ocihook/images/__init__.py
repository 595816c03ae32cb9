"""One image set as CRIU leaves it, packed where it is and unpacked again."""
