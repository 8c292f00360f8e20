"""Replicas that come and go: what `gradwire.outer` takes as `members=`."""

from gradwire.members.base import Card, Entry, Event, Members, Roster
from gradwire.members.bucket.meet import Stored, store
from gradwire.members.lighthouse import torchft
from gradwire.members.standing import fixed

__all__ = ["Card", "Entry", "Event", "Members", "Roster", "Stored", "fixed", "store", "torchft"]
