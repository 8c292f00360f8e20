"""Numbers with their units, and how the network was emulated, for people."""

from gradwire import quantities


def seconds_text(value: float | None) -> str:
    """Text of a time: milliseconds below a second, else seconds; "-" for `None`.

    >>> seconds_text(0.0421), seconds_text(2.2), seconds_text(None)
    ('42.1 ms', '2.20 s', '-')
    """
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def bytes_text(value: float | None) -> str:
    """Text of a number of bytes in decimal units, in which links are rated; "-" for `None`.

    >>> bytes_text(44_700_000), bytes_text(812), bytes_text(None)
    ('44.7 MB', '812 B', '-')
    """
    return "-" if value is None else quantities.bytes_text(value)


def ratio_text(value: float | None, *, percent: bool = False) -> str:
    """
    >>> ratio_text(3.456), ratio_text(0.934, percent=True)
    ('3.46x', '93.4 %')
    """
    if value is None:
        return "-"
    return f"{value * 100:.1f} %" if percent else f"{value:.2f}x"


# A reader must never take the fallback for a shaped link.
_MODES = {
    "root": "link shaped by the kernel (network namespaces)",
    "user": "link shaped by the kernel (network namespaces, unprivileged)",
    "backend": "NO SHAPED LINK: collectives are delayed in the process group, nothing is counted",
}


def mode_text(mode: str) -> str:
    """Phrase for a mode of emulation, for tables and reports."""
    return _MODES.get(mode, mode)
