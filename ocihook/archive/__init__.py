"""Archives that engines wrote: packed, unpacked, verified, compared, and made into images."""
