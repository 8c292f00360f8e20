"""A round among members that come and go, from the quorum to the landing."""

from __future__ import annotations

from typing import Protocol

from gradwire.errors import PeerFailed, RanksDisagree, TransportError, WireError
from gradwire.members.base import Card, Members
from gradwire.members.plan import RoundPlan, planned

LOST = (TransportError, PeerFailed, WireError, RanksDisagree)
"""Errors that other members have caused, or the links to them: a round ends by them, and no member."""

PATIENCE = 10
"""Number of failures in a row after which living members are taken to be unable to reach each other."""


class Participant(Protocol):
    """One member's side of a round. All methods but `card`, `land` and `lose` may raise those in `LOST`, and
    errors of this replica's own.
    """

    def card(self) -> Card:
        """The things to say of this replica."""

    def meet(self, plan: RoundPlan) -> None:
        """Make the groups of a new meeting."""

    def heal(self, plan: RoundPlan) -> None:
        """Send the shared parameters, or receive them. The receiver is then at the round of the source."""

    def be_ready(self, plan: RoundPlan) -> None:
        """Prepare for the next round; no exchange takes place in this one."""

    def exchange(self, plan: RoundPlan) -> bool:
        """Send Δ and wait for the vote. Returns True if there is a mean to land."""

    def land(self, number: int) -> None:
        """Apply the mean of round `number` to the shared parameters, and continue from them."""

    def lose(self, error: BaseException) -> None:
        """Abort everything that runs, so that the others notice; the next plan has new groups."""


def take_round(members: Members, replica: Participant) -> None:
    """Take part in one round. Returns when it has landed here, or was sent if it is to land later.

    A member lands only after everybody's vote. A member that has missed the vote cannot know whether others
    have landed. The next roster tells: if one has, this replica's round is behind, and it is healed. Its Δ
    may be in the state that it takes, so it is dropped. If no member has landed, Δ is sent again.

    An error of one member's own ends that member: it raises it, and the others go on without it.

    Raises `TransportError` if there is no roster in time, `GradwireError` if this member is refused, and the
    error of the last failure after too many in a row. A member that has only just come raises `RanksDisagree`
    at once: it is the one that differs.
    """
    failures = 0
    while True:
        # 1. The quorum, just before Δ leaves: it is about those who are there now.
        card = replica.card()
        roster = members.ask(card)
        # 2. The plan, which all members make alike.
        plan = planned(roster, members.id)
        try:
            # 3. New groups, after every change of the roster and every failed exchange.
            if plan.is_new:
                replica.meet(plan)
            # 4. The latest shared parameters, for those who do not have them.
            if plan.heals or plan.begins:
                replica.heal(plan)
            if not plan.exchanges:
                replica.be_ready(plan)
                return
            # 5. Δ, and with it the vote. Nobody lands before it has come.
            lands = replica.exchange(plan)
        except BaseException as error:
            replica.lose(error)
            failures += 1
            is_own = not isinstance(error, LOST) or (
                isinstance(error, RanksDisagree) and not card.established
            )
            if is_own or failures == PATIENCE:
                raise
            continue
        # 6. Each lands by itself.
        if lands:
            replica.land(plan.number)
        return
