"""signSGD and SIGNUM with majority vote: every rank sends signs, and the sign of their sum is what all apply.
`signsgd` takes the signs of gradients, `signum` those of every rank's own momentum; what is unsent is lost.

Bernstein, Wang, Azizzadenesheli and Anandkumar 2018, "signSGD: compressed optimisation for non-convex
problems", algorithm 3, and for SIGNUM algorithm 2: m ← β·m + (1 − β)·g, and what travels is the sign of m;
Bernstein, Zhao, Azizzadenesheli and Anandkumar 2019, "signSGD with majority vote is communication efficient
and fault tolerant".

Differences from the papers:

- No parameter server. On few ranks all gather the bits of all and count; on more, each rank counts a share
  of the elements (all-to-all) and spreads the results (all-gather), whichever moves clearly less.
- A tie is 0: with two ranks, wherever they disagree. The papers leave it open. A result has three values
  and takes two bits.
- One bit has no room for 0, so an element that is 0 votes as positive; but where all of a *group*, up to 64
  elements of a parameter in a row, is 0 on a rank, that rank abstains. Unused parameters and the rows of an
  embedding that a batch has not touched stay where they are.
- By default, `scale="l1"` multiplies the votes on each parameter by the mean over ranks of its mean
  magnitude. Learning rates, clipping and the parameters that travel densely then keep their meaning.
  `scale="none"` is the papers' ±1, for which vectors and tiny tensors vote too, and the learning rate is
  the step of every parameter: take a thousandth of SGD's, or Adam's.
- With `signum` vectors and tiny tensors always vote, because nothing else would apply momentum to them. A
  parameter whose gradient is exactly zero on a rank keeps its momentum there in that step and does not
  vote; in the paper the momentum would decay and vote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import Decode
from gradwire.exchange.compose import forget
from gradwire.kernels.compensation import Findings, compensate
from gradwire.kernels.votes import apply_votes, ballot_words, cast_votes, count_groups, tally
from gradwire.laws import Laws
from gradwire.memory import MOMENTUM, UNSENT, Gradients, Planes
from gradwire.recipes.base import Composition, register
from gradwire.unit.context import ExchangeContext

Scale = Literal["none", "l1"]
WORD = torch.int64


@dataclass(frozen=True)
class MajorityVote:
    """The sign of the sum of signs, times the scale of its parameter; x stays as it came.

    Bytes that each rank sends for n elements in whole groups, beside 4 per parameter with `scale="l1"`
    (8 for float64): (W − 1)·n·65/512 where all bits are gathered (up to three ranks), else
    (W − 1)/W·n·65/512 for the bits and (W − 1)/W·n/4 for the results: less than 3/8 of a byte per element on
    any number of ranks.

    Inf and NaN vote like a negative number; the step's status vote sees it.
    """

    scale: Scale = "none"
    laws = Laws(conserves=False, stays_on_device=True, fixed_rounds=True)
    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """An all-gather of ballots; or all-to-all of them and all-gather of results."""
        if x.numel() == 0:
            return lambda: None
        sizes = ctx.sizes(x.numel())
        shares = self._shares(x.numel(), x.dtype, ctx)
        groups = -(-count_groups(sizes) // shares)
        rows = torch.zeros(shares, ballot_words(groups), dtype=WORD, device=x.device)
        means = torch.empty(len(sizes), dtype=_level_type(x.dtype), device=x.device)
        ctx.kernels[cast_votes](x, sizes, groups, rows, means)
        mine = rows.view(-1)
        if shares > 1:
            ballots = torch.empty_like(rows)
            comm.all_to_all(ballots, rows).wait()
            mine = ctx.kernels[tally](ballots, groups).view(-1)
        payload = torch.cat([mine, self._packed(means)])
        gathered = payload.new_empty(comm.world, payload.numel())
        pending = comm.all_gather(gathered, payload)

        def decode() -> None:
            pending.wait()
            votes, scales = gathered[:, : mine.numel()], gathered[:, mine.numel() :]
            words = votes.contiguous()
            results = words.view(shares, 2, groups) if shares > 1 else ctx.kernels[tally](words, groups)[None]
            ctx.kernels[apply_votes](results, sizes, self._levels(scales, means), mean)

        return decode

    def _packed(self, means: Tensor) -> Tensor:
        """Pack this rank's mean magnitudes (parts,) into int64 words, as they travel; no words without a
        scale.
        """
        if self.scale == "none":
            return torch.empty(0, dtype=WORD, device=means.device)
        words = torch.zeros(_words(means.numel(), means.dtype), dtype=WORD, device=means.device)
        words.view(means.dtype)[: means.numel()] = means
        return words

    def _levels(self, scales: Tensor, like: Tensor) -> Tensor:
        """Level of each parameter (parts,), by which its votes are multiplied: the mean of all ranks'
        `scales`, as `_packed` made them, added in rank order. Ones without a scale. `like` has the shape
        and type.
        """
        if self.scale == "none":
            return torch.ones_like(like)
        levels = torch.zeros_like(like)
        for words in scales:
            levels.add_(words.view(like.dtype)[: like.numel()] * (1.0 / scales.shape[0]))
        return levels

    def _shares(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> int:
        """Number of shares into which counting is divided, for a unit of `numel` elements of type `dtype`: 1,
        or one per rank.

        On three ranks, dividing would save one byte in a hundred, which is not worth a second round.
        """
        few, many = (
            sum(round_.wire_bytes(ctx.world) for round_ in self._rounds(shares, numel, dtype, ctx))
            for shares in (1, ctx.world)
        )
        return ctx.world if many < 0.9 * few else 1

    def _rounds(self, shares: int, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        sizes = ctx.sizes(numel)
        groups = -(-count_groups(sizes) // shares)
        ballot = ballot_words(groups)
        scales = 0 if self.scale == "none" else _words(len(sizes), _level_type(dtype))
        if shares == 1:
            return (Round("all_gather", ballot + scales, WORD),)
        return (
            Round("all_to_all", shares * ballot, WORD),
            Round("all_gather", 2 * groups + scales, WORD),
        )

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return self._rounds(self._shares(numel, dtype, ctx), numel, dtype, ctx) if numel else ()


def _level_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _words(count: int, dtype: torch.dtype) -> int:
    return -(-count * dtype.itemsize // WORD.itemsize)


def majority_vote(scale: Scale = "none") -> MajorityVote:
    """Apply the majority's sign, alone or times the mean magnitude of its parameter (`scale="l1"`).

    Outvoted signs are not remembered: wrap the exchange in `forget`.

    Raises `ValueError` for an unknown `scale`.

    >>> from gradwire.exchange.compose import forget
    >>> from gradwire.unit.context import ExchangeContext
    >>> rounds = forget(majority_vote()).rounds(2**20, torch.float32, ExchangeContext(0, 0, 0, world=8))
    >>> [(round_.verb, round_.payload_bytes) for round_ in rounds]
    [('all_to_all', 133120), ('all_gather', 32768)]
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale={scale!r} is none of {', '.join(get_args(Scale))}")
    return MajorityVote(scale)


@dataclass(frozen=True)
class Signum:
    """x = m with m = β·m + (1 − β)·g; what x leaves unsent is dropped, so a flush hands over nothing."""

    momentum: float = 0.9
    planes = (MOMENTUM,)
    weight = 1.0
    as_arrived = False
    stays_on_device = True
    whole = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum={self.momentum} is outside [0, 1); the usual value is 0.9")

    @property
    def covers_momentum(self) -> bool:
        return self.momentum > 0.0

    def coefficient(self, step: int) -> float:
        return 0.0

    def compensate(
        self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int
    ) -> Findings:
        weights = self.momentum, (1.0 - self.momentum) * grads.scale
        planes = working[MOMENTUM], committed[MOMENTUM]
        seen = grads.kernels[compensate](*planes, grads.bucket, *weights, grads.pieces)
        for plane, _bucket in grads.pieces.slices():
            working[UNSENT][plane] = working[MOMENTUM][plane]
        return seen

    def update(self, working: Planes, committed: Planes) -> None:
        """Do nothing: `compensate` has updated the memory."""


@register
def signsgd(scale: Scale = "l1") -> Composition:
    """The sign that most ranks have, times the mean magnitude of the parameter; a tie is 0.

    Travels: one bit per element to be counted, two bits per result.
    Paper: Bernstein et al. 2018, "signSGD: compressed optimisation for non-convex problems".
    Use when: there are many ranks, some of which may be wrong, and a biased gradient does no harm.

    Args:
        scale: "l1" multiplies the votes on a parameter by its mean magnitude over ranks; "none" sends ±1.
    """
    exchange = forget(majority_vote(scale))
    units = scale == "none"
    return Composition(exchange, tiny=f"signsgd({scale=})" if units else "dense", alone=units)


@register
def signum(momentum: float = 0.9, scale: Scale = "l1") -> Composition:
    """The sign of momentum that most ranks have; for SGD without a momentum of its own.

    Travels: one bit per element to be counted, two bits per result.
    Paper: Bernstein et al. 2018, "signSGD: compressed optimisation for non-convex problems".
    Use when: as signsgd, and gradients are noisy: signs of averages are wrong less often.

    Args:
        momentum: factor of each rank's momentum.
        scale: as in `signsgd`.
    """
    exchange = forget(majority_vote(scale), Signum(momentum))
    return Composition(exchange, tiny=f"signum({momentum=}, {scale=})", alone=scale == "none")
