"""Who leads in AR-Topk: the ranks in turn, the one with the largest variance, or whichever serves better.

Tyagi and Swany 2024, "Flexible communication …", section III-B, leave the choice between the first two to
the user; to switch by what is observed is their future work (section V). Here it is the *gain* that
decides, how much of what all ranks have they send, (Σ‖sent‖/Σ‖x‖)²: a figure that they find to follow
accuracy, and that is known in the step itself, because norms ride on the values' all-reduce as two
elements more (norms, not squares: 16 bits must hold them). In cycles of 16N steps each way is tried for 2N,
of which the first N let the memories settle, and the better one leads the other 12N.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.exchange.state import GAINS, LED
from gradwire.moment import Moment

Election = Literal["round_robin", "variance", "auto"]

CYCLE, TRIAL = 16, 2
"""In steps per rank."""

MARGIN = 1.02
"""The variance must gain so much more: it costs a round, and a choice on every rank instead of one."""


def in_turn(elect: Election, at: Moment) -> bool:
    """Whether the leader of this step is step mod N. The same answer on all ranks."""
    if elect != "auto":
        return elect == "round_robin"
    way, _counts = _trial(at)
    if way is not None:
        return way == 0
    gains = _recall(GAINS, at, 2)
    return not bool(gains[1] > MARGIN * gains[0])


def _trial(at: Moment) -> tuple[int | None, bool]:
    """Which way is tried in this step (0 in turn, 1 by variance, None: the better one), and if it counts."""
    turn, step = divmod(at.step % (CYCLE * at.world), TRIAL * at.world)
    return (turn if turn < 2 else None), step >= (TRIAL - 1) * at.world


def strongest(values: Tensor, comm: Comm) -> int:
    """The rank with the largest ‖values‖², the lowest among equals. One all-gather of a float, waited for."""
    norms = torch.empty(comm.world, 1, dtype=torch.float32, device=values.device)
    comm.all_gather(norms, torch.linalg.vector_norm(values).float().view(1)).wait()
    # With a NaN any rank may lead; all ranks see the same norms, and the verdict rejects the step.
    return int(norms.view(-1).argmax())


def election_round() -> Round:
    """What `strongest` issues."""
    return Round("all_gather", 1, torch.float32)


def gain(sent_norms: float, norms: float) -> float:
    """(Σ‖sent‖/Σ‖x‖)²: 1 where there was nothing to send, 0 if it can't be told.

    >>> gain(3.0, 5.0)
    0.36
    """
    if norms == 0.0:
        return 1.0
    share = sent_norms / norms
    return share * share if math.isfinite(share) else 0.0


def note(at: Moment, leader: int, gained: float | None) -> None:
    """Keep who has led, and the gain if that is measured, for when the step is committed."""
    led = _recall(LED, at, at.world)
    led[leader] += 1
    _keep(LED, at, led)
    way, counts = _trial(at)
    if gained is not None and way is not None and counts:
        gains = _recall(GAINS, at, 2)
        is_first = at.step % (TRIAL * at.world) == (TRIAL - 1) * at.world
        gains[way] = gained / at.world + (0.0 if is_first else gains[way])
        _keep(GAINS, at, gains)


def _key(kind: str, at: Moment) -> tuple[str, str]:
    """By the unit's number too: two units may begin within the same parameter."""
    return f"{kind}/{at.unit}", at.parts[0].name if at.parts else ""


def _recall(kind: str, at: Moment, size: int) -> Tensor:
    """A copy of what is kept (size,), zeros at first and where it belongs to another world."""
    kept = at.kept.get(*_key(kind, at))
    if kept is None or kept.numel() != size:
        return torch.zeros(size, dtype=torch.float64, device="cpu")
    return kept.clone()


def _keep(kind: str, at: Moment, tensor: Tensor) -> None:
    at.kept.put(*_key(kind, at), tensor)
