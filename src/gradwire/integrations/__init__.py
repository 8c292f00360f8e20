"""gradwire in other people's hands: one file each, imported only on demand."""
