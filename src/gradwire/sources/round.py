"""Where a replica stands in its rounds of local steps: a value, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_THROWN_AWAY = "gradwire: thrown away"
"""A name among those that were loaded. Its number is the step at which a round was to land; parameters that
were not loaded have not got its result."""


@dataclass(frozen=True)
class Round:
    """The last round that this replica has sent, and what the next one is about. A method returns the value
    that follows, or answers a question.

    Steps are attempted ones, counted since the replica began. `docs/engineering/design.md` has the table.

    >>> sent = Round().sent(30, delay=10)
    >>> sent.lands_by(39), sent.lands_by(40), sent.has_learned(30), sent.has_learned(31)
    (False, True, False, True)
    >>> sent.received(brings=False, told=True).has_learned(30)  # the next one brings it again
    True
    """

    sent_at: int = 0
    """Steps when the last round was sent; -1 if the next one brings what that carried."""
    lands_at: int | None = None
    """Steps at which the round under way lands; `None` without one."""
    saved_means: bool | None = None
    """Of a round that was under way in a checkpoint: whether it lands. Its means are in the buckets."""
    loaded: Mapping[str, int] = field(default_factory=dict)
    """Checksums by name of all that was loaded and is not agreed on by all ranks."""
    unsound: int = 0
    """Rounds in a row in which this replica's parameters were not finite."""
    due_at: int = 0
    """Steps when a round was last due."""
    counted_at: int = 0
    """Steps that rounds have counted which have landed."""
    carries_to: int = 0
    """Steps that the last round has carried."""

    # -- questions

    def lands_by(self, steps: int) -> bool:
        """Whether the round under way is to have landed after `steps`."""
        return self.lands_at is not None and steps >= self.lands_at

    def has_learned(self, steps: int) -> bool:
        """Whether steps were attempted that no round has carried."""
        return steps > self.sent_at

    # -- a round goes its way

    def due(self, steps: int) -> Round:
        """A round is due after `steps`."""
        return replace(self, due_at=steps)

    def checked(self, *, sound: bool) -> Round:
        """This replica's parameters have been looked at."""
        return replace(self, unsound=0 if sound else self.unsound + 1)

    def sent(self, steps: int, delay: int) -> Round:
        """A round was sent after `steps`, and lands `delay` steps later."""
        return replace(self, sent_at=steps, lands_at=steps + delay, carries_to=steps)

    def offered(self, steps: int) -> Round:
        """Others may or may not count what was carried: it is sent when they have."""
        return replace(self, carries_to=steps)

    def lands(self, at: int | None) -> Round:
        """The round under way lands after so many steps, or when it is asked for."""
        return replace(self, lands_at=at)

    def received(self, *, brings: bool, told: bool) -> Round:
        """The round under way has ended: whether it `brings` means, and whether all ranks have
        told what they have loaded.
        """
        ended = replace(self, lands_at=None, saved_means=None, loaded={} if told else self.loaded)
        return ended if brings else ended.lost()

    def lost(self) -> Round:
        """Nothing of the round lands: the next one brings what it carried."""
        return replace(self, sent_at=-1, lands_at=None)

    def landed(self) -> Round:
        """The round has landed, and counts the steps that it carried."""
        return replace(self, counted_at=self.carries_to)

    # -- otherwise than by rounds

    def begun_from(self, loaded: Mapping[str, int], was_to_land_at: int | None, *, whole: bool) -> Round:
        """The shared parameters are what was `loaded`.

        Args:
            loaded: checksums by name.
            was_to_land_at: steps at which a round was to land that was about others; `None` without one.
            whole: whether everything was loaded, so that nothing that came before counts.
        """
        thrown = {} if was_to_land_at is None else {_THROWN_AWAY: was_to_land_at}
        return replace(self, loaded=loaded if whole else {**self.loaded, **thrown, **loaded})

    def agreed(self) -> Round:
        """All ranks have loaded the same."""
        return replace(self, loaded={})

    def anew(self, steps: int) -> Round:
        """The shared parameters are another's, and what was learned until then is dropped."""
        return replace(
            self.dropped(steps), sent_at=steps, lands_at=None, saved_means=None, loaded={}, unsound=0
        )

    def dropped(self, steps: int) -> Round:
        """Count what was learned until then in no round."""
        return replace(self, counted_at=steps)

    # -- checkpoints, with keys as in states of earlier versions

    def resumed(self, flight: Mapping[str, Any] | None) -> Round:
        """Under way is the round that was so in a checkpoint, of which `flight` is what was saved."""
        if flight is None:
            return replace(self, lands_at=None, saved_means=None)
        return replace(self, lands_at=flight["lands_at"], saved_means=flight["means"] is not None)

    def state(self) -> dict[str, Any]:
        return {"left_at": self.sent_at, "unsound": self.unsound, "loaded": dict(self.loaded)}

    def state_among_members(self) -> dict[str, Any]:
        return {"counted_at": self.counted_at, "round_at": self.due_at}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Round:
        """The `Round` of a saved state. Its keys are those of earlier versions: "left_at" is `sent_at`, and
        "round_at" is `due_at`.
        """
        due_at = saved.get("round_at", 0)
        found = cls(
            sent_at=saved["left_at"],
            loaded=dict(saved.get("loaded", {})),
            unsound=saved["unsound"],
            due_at=due_at,
            counted_at=saved.get("counted_at", 0),
            carries_to=due_at,
        )
        return found.resumed(saved.get("flight"))
