"""The only code that reads a clock."""

from gradwire.measure.clock import Span, Trace, now_s
from gradwire.measure.timed import TimedComm

__all__ = ["Span", "TimedComm", "Trace", "now_s"]
