"""Which mood of a backward pass may follow which, for the thread that trains; and which outcome of its step,
on the worker.

    pass   IDLE ──► BEGUN ──────────────────► GIVEN ─────────────────────────────► IDLE
                     │ it broke off     ◄──────┘ │  an interrupt came before the results
                     └──► BROKEN_OFF ◄───────────┘ another pass while the step runs

    step           RUNNING ─────────────────► VOTING ──► VOTED ──┬──► COMMITTED, NOT_FINITE or FAILED
                     └── broken transport ──────┴──► FAILED      └──► DEFERRED ──► one of the three
           COMMITTED or NOT_FINITE ──► FAILED, if ranks that share a replica cannot gather its means

Two things last beside them. Before a pass has BEGUN, other ranks are told what they do not know yet: a step
was left out here, or a pass broke off before its first gradient. Over a *broken* transport
(`Reducer.broken`) all later steps go from RUNNING to FAILED.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Mood(Enum):
    """A rank's last backward pass, for the thread that trains."""

    IDLE = "no pass runs, and the model has the results of the last step"
    BEGUN = "a pass hands over gradients; if it breaks off, the next pass or call finds that out"
    GIVEN = "all gradients are handed over, and the model has not got the results"
    BROKEN_OFF = "this rank has told the others that it gave up: no pass follows"


class Outcome(Enum):
    """The outcome of a step, or its stage. All ranks find the same outcome, unless a rank fails alone."""

    RUNNING = "gradients arrive and travel"
    VOTING = "this rank's row of the status vote is on its way"
    VOTED = "all rows are here; by a plain all-reduce some gradients may still travel"
    DEFERRED = "the step has ended for the model, and a device knows whether it counts"
    COMMITTED = "memory is committed on all ranks, and the means are in the buckets"
    NOT_FINITE = "something was not finite on some rank: no memory is committed, and no mean is finite"
    FAILED = "`backward()` raises; no memory is committed, unless the error came after the vote"


PASSES: Mapping[Mood, frozenset[Mood]] = {
    Mood.IDLE: frozenset({Mood.BEGUN}),
    Mood.BEGUN: frozenset({Mood.GIVEN, Mood.BROKEN_OFF}),
    Mood.GIVEN: frozenset({Mood.IDLE, Mood.BEGUN, Mood.BROKEN_OFF}),
    Mood.BROKEN_OFF: frozenset(),
}
"""By mood: those that may follow. GIVEN is followed by BEGUN if the step has ended and an interrupt, which
the user caught, came before the model had its results."""

STEPS: Mapping[Outcome, frozenset[Outcome]] = {
    Outcome.RUNNING: frozenset({Outcome.VOTING, Outcome.FAILED}),
    Outcome.VOTING: frozenset({Outcome.VOTED, Outcome.FAILED}),
    Outcome.VOTED: frozenset({Outcome.COMMITTED, Outcome.NOT_FINITE, Outcome.FAILED, Outcome.DEFERRED}),
    Outcome.DEFERRED: frozenset({Outcome.COMMITTED, Outcome.NOT_FINITE, Outcome.FAILED}),
    Outcome.COMMITTED: frozenset({Outcome.FAILED}),
    Outcome.NOT_FINITE: frozenset({Outcome.FAILED}),
    Outcome.FAILED: frozenset(),
}
"""By outcome: those that may follow. Where ranks share a replica, their gathering of means may fail after the
vote."""
