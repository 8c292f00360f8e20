"""Calls that all ranks must make: each writes its name on a board before it moves bytes.

A rank that calls something while another is in a step, or in another call, finds that out here: within
seconds, with the names of ranks and calls. Their collectives never meet.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import torch

from gradwire.agreement.board import Board
from gradwire.errors import GradwireError, RanksDisagree, TransportError
from gradwire.measure.clock import now_s

_PAUSE_S = (0.001, 0.05)
_EACH_S = 0.001
"""Between two questions of a rank, for each rank there is: the store has to answer them all."""
_LOOK_S = 0.25
"""A call asks why it waits only after this long, because a rank may simply be late."""
_PATIENCE = 3
"""A step looks for calls of others at every third wake-up, of two a second."""


class CallEntry(NamedTuple):
    """The last call of a rank, or its present step."""

    what: str
    """The call, with the step that it was made at; empty in a step."""
    steps: int
    """Steps that it has begun since it was attached, with the current one."""

    def __str__(self) -> str:
        return self.what or "a training step"


class Calls:
    """Calls of one attached model on this rank, such as saving a checkpoint, that all ranks must make in the
    same order.

    Each call has a page on the board, by its number; a step that waits looks at the page of the next call. A
    rank that makes a call increments the counter of this very call, writes its `CallEntry`, and increments
    the page's counter. If the page's counter is larger, some rank is in another call, and only then are the
    entries read. So a waiting rank asks the store two questions at a time, whatever the number of ranks.
    """

    def __init__(self, board: Board | None) -> None:
        """`board` is `None` for a single rank, which asks nothing."""
        self.steps = 0
        self._board, self._made, self._looks = board, 0, 0
        self._lost = ""
        self._told: deque[str] = deque()

    def require_between_steps(self, what: str) -> None:
        """Raise `GradwireError` inside a backward pass, whose step may not have begun, or not ended."""
        if torch._C._current_graph_task_id() != -1:
            raise GradwireError(
                f"{what} was called inside a backward pass, as by a hook of a gradient: call it between "
                "steps, on all ranks"
            )

    def begin(self, what: str, step: int) -> None:
        """Return once all ranks have made the call `what` at `step`. Not while a step is running.

        Raises `RanksDisagree` where a rank has made another one or is in a step that waits for this rank,
        and `TransportError` at the group's timeout, with the ranks that made none.
        """
        self.require_order()
        if (board := self._board) is None:
            return
        page, self._made = str(self._made), self._made + 1
        mine = CallEntry(f"{what} at step {step}", self.steps)
        mark, pause_s, start_s = f"{page}/{mine.what}", _PAUSE_S[0], now_s()
        # Before its entry, so that a rank on its way does not look like one in another call.
        here, look_s = board.count(mark, 1), _LOOK_S
        _put(board, page, mine)
        while here < board.world:
            threading.Event().wait(pause_s)
            pause_s = min(2 * pause_s, max(_PAUSE_S[1], _EACH_S * board.world))
            here, waited_s = board.count(mark, 0), now_s() - start_s
            if here < board.world and waited_s > look_s:
                if board.count(page, 0) > board.count(mark, 0):
                    self._compare(mine, _entries(board, page), board.rank)
                look_s = waited_s + _LOOK_S
            if here < board.world and waited_s > board.timeout_s:
                raise self._nobody_came(mine, _entries(board, page), waited_s)
        self._told.extend((page, mark))
        if len(self._told) > 4:  # all ranks are through the last but one, as they have made the last
            board.clear(self._told.popleft())
            board.clear(self._told.popleft())

    def give_up_step(self, what: str) -> None:
        """Give up a step before it begins, because this rank is in `what`.

        Ranks that are in the step take it for a call. If all ranks give it up, nothing is lost.
        """
        if self._board is not None:
            page, self._made = str(self._made), self._made + 1
            with suppress(TransportError):  # the caller raises what matters more
                _put(self._board, page, CallEntry(what, self.steps))

    def look(self) -> None:
        """Raise `RanksDisagree` if a rank is in a call while this one waits for a step; called twice a
        second.

        A rank in a call that has begun fewer steps than this one will never bring what the step needs.
        """
        self.require_order()
        self._looks += 1
        if self._board is None or self._looks % _PATIENCE:
            return
        page, mine = str(self._made), CallEntry("", self.steps)
        try:
            if self._board.count(page, 0) == 0:
                return
            entries = _entries(self._board, page)
        except TransportError:
            return  # the step itself will say so
        try:
            self._compare(mine, entries, self._board.rank)
        except RanksDisagree:
            with suppress(TransportError):
                _put(self._board, page, mine)
            raise

    def ended(self) -> None:
        """Note that the wait for a step has ended."""
        self._looks = 0

    def require_order(self) -> None:
        """Raise `RanksDisagree` if a step has waited for a rank in a call: some collectives are lost."""
        if self._lost:
            raise RanksDisagree(self._lost)

    def _compare(self, mine: CallEntry, others: Mapping[int, CallEntry], rank: int) -> None:
        entries = {**others, rank: mine}
        calls = [each for each in entries.values() if each.what]
        in_steps = [each for each in entries.values() if not each.what]
        waits_in_vain = any(step.steps > call.steps for step in in_steps for call in calls)
        if len({call.what for call in calls}) < 2 and not waits_in_vain:
            return
        told = "; ".join(f"rank {each}: {entry}" for each, entry in sorted(entries.items()))
        error = RanksDisagree(
            f"not all ranks are in the same call: {told}. All ranks must make it, between the same steps"
        )
        if waits_in_vain:
            self._lost = f"{error}. Start all ranks again: the step has lost collectives"
        raise error

    def _nobody_came(
        self, mine: CallEntry, entries: Mapping[int, CallEntry], waited_s: float
    ) -> TransportError:
        board = self._board
        assert board is not None, "or nothing would be waited for"
        silent = [rank for rank in range(board.world) if not entries.get(rank, CallEntry("", 0)).what]
        ranks = ", ".join(map(str, silent))
        self._lost = f"{mine} was given up, because rank {ranks} did not make it"
        return TransportError(
            f"{mine} waited {waited_s:.1f} s for rank {ranks}, which made no call: make it on all ranks"
        )


def _put(board: Board, page: str, mine: CallEntry) -> None:
    board.write(page, json.dumps(mine))
    board.count(page, 1)


def _entries(board: Board, page: str) -> dict[int, CallEntry]:
    return {rank: CallEntry(*json.loads(text)) for rank, text in board.read(page).items()}
