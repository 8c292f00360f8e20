"""How the network was emulated, in words: a reader must never take the fallback for a shaped link."""

_TEXTS = {
    "root": "link shaped by the kernel (network namespaces)",
    "user": "link shaped by the kernel (network namespaces, unprivileged)",
    "backend": "NO SHAPED LINK: collectives are delayed in the process group, nothing is counted",
}


def mode_text(mode: str) -> str:
    """One phrase for tables and reports."""
    return _TEXTS.get(mode, mode)
