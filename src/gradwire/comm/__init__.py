"""The only way out of the process: five verbs and their implementations."""

from gradwire.comm.base import Comm, Pending, Round
from gradwire.comm.metered import Metered, owe_zeros
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.comm.threads import ThreadComm, run_ranks

__all__ = ["Comm", "Metered", "Pending", "ProcessGroupComm", "Round", "ThreadComm", "owe_zeros", "run_ranks"]
