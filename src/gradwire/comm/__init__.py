"""The only way out of the process: rounds, and what carries them."""

from gradwire.comm.base import Comm, Pending, Round, gathered, owe_zeros
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.comm.threads import ThreadComm, run_ranks

__all__ = ["Comm", "Pending", "ProcessGroupComm", "Round", "ThreadComm", "gathered", "owe_zeros", "run_ranks"]
