"""Several connections per link: as many as the environment says, or as a measurement finds useful."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from gradwire.comm import ProcessGroupComm, ahead, gathered, groups
from gradwire.comm.apart import Lending
from gradwire.comm.groups import backend_at, give_back
from gradwire.environment import connections_asked
from gradwire.errors import TransportError
from gradwire.measure.connections import Tried, round_trip_s, tried
from gradwire.planning.costs import LONG_S

_LOG = logging.getLogger("gradwire")
_CPU = torch.device("cpu")


def connect_more(
    carrier: ProcessGroupComm,
    everyone: ProcessGroupComm,
    lending: Lending = groups,
    known: Tried | None = None,
) -> Tried | None:
    """Give long messages of `carrier` as many connections as its links need; returns what is known of these
    links.

    On links with a long round trip, receives are posted ahead. `everyone` is over all ranks, each of which
    has a `carrier` over some of them. A collective over both. Only gloo's connections are measured; none, if
    the environment gives their number, or the result is `known` (equal on all ranks). If no more can be made,
    all ranks go on with the present ones, and a warning says so.
    """
    if everyone.world == 1 or backend_at(carrier.group, _CPU) != "gloo":
        return known
    asked = connections_asked()
    numbers = dist.get_process_group_ranks(everyone.group)
    members = [numbers.index(rank) for rank in dist.get_process_group_ranks(carrier.group)]
    more: list[dist.ProcessGroup] = []

    def over(count: int) -> ProcessGroupComm | None:
        missing = count - 1 - len(more)
        if missing > 0:
            try:
                made = lending.borrow_parts(everyone.group, *[(members, carrier.group, _CPU)] * missing)
            except TransportError as error:  # on all ranks
                made, why = None, str(error)
            else:
                why = "ranks are in different numbers of process groups, so torch cannot make one more"
            if made is None:
                _LOG.warning("%s: gradwire sends over %d connections per link", why, 1 + len(more))
                return None
            more.extend(made)
        carrier.spread(more[: count - 1])
        return carrier

    if asked is not None or known is not None:
        over(asked or (known.connections if known is not None else 1))
        carrier.spread(more)
        trip_s = round_trip_s(carrier, everyone) if known is None else known.round_trip_s
        _announce_ahead(carrier, everyone, trip_s, lending)
        return known
    found = tried(over, everyone)
    _announce_ahead(carrier, everyone, found.round_trip_s, lending)
    carrier.spread(more[: found.connections - 1])
    for group in more[found.connections - 1 :]:
        give_back(group)
    if everyone.rank == 0 and found.times_s:
        _LOG.info("%s", found)
    return found


def _announce_ahead(
    carrier: ProcessGroupComm, everyone: ProcessGroupComm, trip_s: float, lending: Lending
) -> None:
    """Begin a series of receives that are announced ahead on `carrier` and `everyone`, if the round trip
    `trip_s`, in seconds, is long.

    One all-gather, unless `lending` makes new groups, which have had no model before.
    """
    if trip_s < LONG_S:
        return
    last = -1
    if not lending.LENDS_NEW:
        last = int(gathered(everyone, torch.tensor([ahead.ReceiveSeries.last], device="cpu")).max())
    series = ahead.ReceiveSeries.after(last)
    carrier.announce(series)
    everyone.announce(series)
