"""What is found out by looking: times (the only code that reads a clock) and how often weights are used."""

from gradwire.measure.aligned import slowest
from gradwire.measure.backward import BackwardWatch
from gradwire.measure.clock import RoundTime, Span, Trace, now_s
from gradwire.measure.codec import codec_cost, payloads
from gradwire.measure.monitor import Change, LinkMonitor, Sample
from gradwire.measure.multiply_adds import layer_rates, multiply_adds
from gradwire.measure.observed import Observed
from gradwire.measure.probe import Probed, name_of, network_of, probe
from gradwire.measure.stopwatch import stopwatch_for

__all__ = [
    "BackwardWatch",
    "Change",
    "LinkMonitor",
    "Observed",
    "Probed",
    "RoundTime",
    "Sample",
    "Span",
    "Trace",
    "codec_cost",
    "layer_rates",
    "multiply_adds",
    "name_of",
    "network_of",
    "now_s",
    "payloads",
    "probe",
    "slowest",
    "stopwatch_for",
]
