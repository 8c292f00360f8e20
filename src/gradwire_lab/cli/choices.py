"""Enumerations of options' values, so that help and completion know them."""

from enum import StrEnum


class Mode(StrEnum):
    """How a network is emulated; "auto" takes the best mode that is possible."""

    AUTO = "auto"
    ROOT = "root"
    USER = "user"
    BACKEND = "backend"


class Shards(StrEnum):
    """How samples are split between ranks."""

    IID = "iid"
    SKEWED = "skewed"
