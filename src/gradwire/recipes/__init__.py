"""Named compositions, one paper and one file each."""
