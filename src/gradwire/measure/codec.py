"""Costs of a recipe's codec on this machine: B + γ·x seconds for x elements, to encode and to decode.

Measured on the exchange itself, over a `Comm` without peers. Encoding is all local work until the last round
is issued, including the memory's compensation. Decoding is the work after the end of that round, per payload;
after an all-gather, N payloads are decoded. (MergeComp, Wang et al. 2021, measures both in figure 3, and uses
one h for them in section 4.3.) Error feedback's own decoding counts as encoding, because the worker does it
then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.comm.base import DONE, Comm, Pending, Round
from gradwire.errors import WireError
from gradwire.exchange.base import STEADY, Exchange, first_busy_step, steady_context
from gradwire.granularity import ON_HOST, granularity
from gradwire.kernels.dispatch import kernels_for
from gradwire.measure import cache
from gradwire.measure.cache import fingerprint
from gradwire.measure.clock import HOST, Timed, clock_of, now_s
from gradwire.memory import UNSENT, Gradients
from gradwire.planning.costs import CodecCost, Line
from gradwire.planning.links import Fit, straight_line
from gradwire.unit.context import ExchangeState


class EchoComm(Comm):
    """Rank 0 of a world in which all ranks hold the same data.

    Verbs complete before they return. Rank 0 gets payloads with the shapes, sizes and decoding costs of real
    peers' payloads. A sum is rank 0's own part: adding zeros changes no decoder's time. `spent_s` adds up the
    seconds spent inside of verbs, which are no local work.
    """

    def __init__(self, world: int, clock: Callable[[], float] = now_s) -> None:
        self.rank, self.world, self.spent_s = 0, world, 0.0
        self._clock = clock

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Answer at once with this rank's data; in an all-to-all, all ranks send the part that is for
        rank 0.
        """
        start_s = self._clock()
        if round_.verb == "all_gather":
            out.view(self.world, -1).copy_(tensor.view(1, -1))
        elif round_.verb == "all_to_all":
            out.view(self.world, -1).copy_(tensor.view(self.world, -1)[:1])
        elif round_.verb == "shift":
            out.copy_(tensor)
        self.spent_s += self._clock() - start_s
        return DONE


WORLD = 4
FORM = "codec-cost-2"
_REPETITIONS = (5, 15)
_DRAWN = 1 << 20
"""Normal numbers that are drawn; a longer gradient repeats them."""


@dataclass(frozen=True)
class CodecCurves:
    """Both lines with the points they were fitted to: (elements, seconds)."""

    encode: Fit
    decode: Fit

    @property
    def cost(self) -> CodecCost:
        """The lines alone."""
        return CodecCost(self.encode.line, self.decode.line)


def codec_cost(exchange: Exchange, text: str, device: Timed = HOST, *, budget_s: float = 0.3) -> CodecCost:
    """Cost of the recipe `text` with its `exchange`, in seconds, on this machine.

    On the CPU, the cost is measured once per machine and cached; on another `device`, it is measured in every
    call.

    Ranks measure different costs. To plan with them, ranks must agree first
    (`gradwire.measure.probe.slowest`).
    """
    if not device.is_host and exchange.laws.stays_on_device:
        return measure_codec(exchange, budget_s=budget_s, device=device).cost
    kept = remembered(text)
    if kept is not None:
        return kept
    cost = measure_codec(exchange, budget_s=budget_s).cost
    numbers = {"encode_s": cost.encode.base_s, "encode_slope_s": cost.encode.slope_s}
    cache.store(_key(text), numbers | {"decode_s": cost.decode.base_s, "decode_slope_s": cost.decode.slope_s})
    return cost


def remembered(text: str) -> CodecCost | None:
    """The cost that `codec_cost` has measured for the recipe `text` here; `None` if it has not."""
    kept = cache.load(_key(text))
    if kept is None or set(kept) != {"encode_s", "encode_slope_s", "decode_s", "decode_slope_s"}:
        return None
    encode = Line(kept["encode_s"], kept["encode_slope_s"])
    return CodecCost(encode, Line(kept["decode_s"], kept["decode_slope_s"]))


def _key(text: str) -> dict[str, str]:
    return {"form": FORM, "recipe": text, **fingerprint()}


def measure_codec(
    exchange: Exchange,
    sizes: Sequence[int] | None = None,
    *,
    budget_s: float = 0.3,
    clock: Callable[[], float] | None = None,
    device: Timed = HOST,
) -> CodecCurves:
    """Time `exchange` on normal numbers of several sizes.

    Args:
        exchange: the exchange to measure.
        sizes: powers of two, ascending; by default those of the granularity. On a device, sizes beyond those
            of a CPU are dropped if one repetition exceeds its share of the budget, or if memory is full.
        budget_s: seconds for all sizes, shared equally.
        clock: waits for the device, if the exchange stays there.
        device: the place of the tensors.

    Each size has at least five repetitions, after one that compiles. The shortest counts, because other
    processes only add time. If the payloads of peers must differ from this rank's, everything is measured in
    a world of one.
    """
    device = device if device.is_host or exchange.laws.stays_on_device else HOST
    clock = clock_of(device) if clock is None else clock
    sizes = granularity(is_host=device.is_host).curve if sizes is None else sizes
    try:
        return _measure(exchange, sizes, budget_s / len(sizes), clock, WORLD, device)
    except WireError:
        return _measure(exchange, sizes, budget_s / len(sizes), clock, 1, device)


def _measure(
    exchange: Exchange,
    sizes: Sequence[int],
    share_s: float,
    clock: Callable[[], float],
    world: int,
    device: Timed,
) -> CodecCurves:
    encode, decode = [], []
    for numel in sizes:
        try:
            pairs = _repeated(_Bench(exchange, numel, world, clock, device), share_s, clock)
        except (torch.OutOfMemoryError, MemoryError):
            if numel <= ON_HOST.curve[-1]:
                raise
            break
        encode.append((float(numel), max(min(pair[0] for pair in pairs), 1e-9)))
        decode.append((float(numel), max(min(pair[1] for pair in pairs), 1e-9)))
        if numel >= ON_HOST.curve[-1] and min(map(sum, pairs)) > share_s:
            break
    return CodecCurves(straight_line(encode), straight_line(decode))


def _repeated(bench: _Bench, share_s: float, clock: Callable[[], float]) -> list[tuple[float, float]]:
    """Time `bench` for about `share_s` seconds of `clock`. Returns the seconds of encoding and of decoding,
    of one repetition after another.
    """
    bench.once()
    pairs: list[tuple[float, float]] = []
    until_s = clock() + share_s
    fewest, most = _REPETITIONS
    while len(pairs) < fewest or (len(pairs) < most and clock() < until_s):
        pairs.append(bench.once())
    return pairs


def payloads(exchange: Exchange, numel: int, world: int, step: int = STEADY) -> float:
    """Number of payloads of whole units that a rank decodes: N after an all-gather of them, else 1.

    It is 1 as well if ranks gather shards of 1/N each. `numel` are the unit's elements, `world` = N the
    ranks, and `step` the step whose rounds count.

    >>> from gradwire.codec.cast import cast
    >>> from gradwire.codec.select.topk import top_k
    >>> from gradwire.codec.sparse import sparse
    >>> from gradwire.exchange.payloads import gather
    >>> from gradwire.exchange.payloads import reduce
    >>> payloads(gather(sparse(top_k(0.01))), 1000, 4), payloads(reduce(cast(torch.float16)), 1000, 4)
    (4.0, 1.0)
    """
    rounds, alone = (
        exchange.rounds(numel, torch.float32, steady_context(numel, ranks, step)) for ranks in (world, 1)
    )
    if not rounds or not alone or rounds[-1].verb != "all_gather" or alone[-1].payload_bytes == 0:
        return 1.0
    return max(world * rounds[-1].payload_bytes / alone[-1].payload_bytes, 1.0)


class _Bench:
    """Tensors of one size: gradient, planes, and the exchange's kept state."""

    def __init__(
        self, exchange: Exchange, numel: int, world: int, clock: Callable[[], float], device: Timed
    ) -> None:
        self._exchange, self._world, self._clock = exchange, world, clock
        self._step = first_busy_step(exchange, numel, world)
        self._payloads = payloads(exchange, numel, world, self._step)
        self._granularity = granularity(is_host=device.is_host)
        self._kernels = kernels_for(device.where, torch.float32)
        generator = torch.Generator("cpu").manual_seed(numel)
        drawn = torch.randn(min(numel, _DRAWN), generator=generator, dtype=torch.float32, device="cpu")
        drawn = drawn.to(device.where)
        self._grad = drawn if drawn.numel() == numel else drawn.repeat(numel // drawn.numel())
        memory = exchange.memory
        names = () if memory is None else memory.planes
        self._committed = {name: torch.zeros_like(self._grad) for name in names}
        self._working = {name: torch.zeros_like(self._grad) for name in dict.fromkeys((UNSENT, *names))}
        self._mean = torch.zeros_like(self._grad)
        self._kept = ExchangeState()

    def once(self) -> tuple[float, float]:
        """Seconds of encoding, and of decoding one payload."""
        comm = EchoComm(self._world, self._clock)
        ctx = steady_context(self._grad.numel(), self._world, self._step, self._kept)
        ctx = replace(ctx, granularity=self._granularity, kernels=self._kernels)
        start_s = self._clock()
        x = self._compensated()
        decode = self._exchange.start(x, self._mean, comm, ctx)
        issued_s, wire_s = self._clock(), comm.spent_s
        decode()
        ended_s = self._clock()
        self._kept.commit()
        return issued_s - start_s - wire_s, (ended_s - issued_s) / self._payloads

    def _compensated(self) -> Tensor:
        x, memory = self._working[UNSENT], self._exchange.memory
        if memory is None:
            return x.copy_(self._grad)
        grads = Gradients.of(self._grad)._replace(kernels=self._kernels)
        memory.compensate(self._working, self._committed, grads, self._step, self._world)
        return x
