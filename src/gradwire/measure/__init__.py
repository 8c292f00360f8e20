"""The only code that reads a clock."""

from gradwire.measure.backward import BackwardWatch
from gradwire.measure.clock import Span, Trace, now_s
from gradwire.measure.probe import Probed, network_of, probe
from gradwire.measure.timed import TimedComm

__all__ = ["BackwardWatch", "Probed", "Span", "TimedComm", "Trace", "network_of", "now_s", "probe"]
