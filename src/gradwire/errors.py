"""The errors and the warning that are gradwire's own; wrong configuration is a plain `ValueError`."""


class GradwireError(RuntimeError):
    """Base of what gradwire raises at run time."""


class RanksDisagree(GradwireError):
    """Ranks differ in configuration or in the order of collectives; raised on all of them."""


class PeerFailed(GradwireError):
    """Another rank failed, in a step or while saving or loading; raised on every rank that did not."""


class WireError(GradwireError):
    """Bytes from a peer are not what they claim to be."""


class TransportError(GradwireError):
    """The process group could not carry a collective: a peer died, or its time ran out."""


DAMAGED = (PeerFailed, WireError)
"""What a comm that checks raises for damaged bytes; the order of collectives is intact."""


class GradwireWarning(UserWarning):
    """Every warning of gradwire's but deprecations, for `warnings.filterwarnings(category=…)`."""
