"""The errors and the warning that are gradwire's own; wrong configuration is a plain `ValueError`."""


class GradwireError(RuntimeError):
    """The base class of the errors that gradwire raises at run time."""


class RanksDisagree(GradwireError):
    """Ranks differ in configuration or in the order of collectives. It is raised on all of them."""


class PeerFailed(GradwireError):
    """Another rank failed, in a step or while saving or loading. It is raised on every rank that did not
    fail."""


class WireError(GradwireError):
    """Bytes from a peer are not what they claim to be."""


class TransportError(GradwireError):
    """The process group could not carry a collective: a peer died, or its time ran out."""


DAMAGED = (PeerFailed, WireError)
"""The errors that a `CheckedComm` raises for damaged bytes. The order of collectives is intact after them."""


class GradwireWarning(UserWarning):
    """The class of all gradwire warnings but deprecations, for `warnings.filterwarnings(category=…)`."""
