"""Gather and scatter of one module, which FSDP2 calls in the place of its own.

FSDP2 calls them in its own streams. Rounded gathers and scatters never make the host wait for a device, and
no thread is needed. Exact gathers do: the host reads what ranks are about to send. On the CPU a gather
returns while bytes travel, so that FSDP2's prefetching overlaps; a scatter is complete when it returns,
because FSDP2 reads it at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Pending
from gradwire.errors import TransportError
from gradwire.kernels.layouts import step_type
from gradwire.measure.clock import now_s
from gradwire.sources.fsdp.coding import Coding, Scattering, Short
from gradwire.sources.fsdp.held import Held
from gradwire.sources.fsdp.memory import Unsent
from gradwire.sources.fsdp.modules import AllGather, ReduceScatter, ShardedModule, all_gather
from gradwire.sources.fsdp.modules import reduce_scatter as _reduce_scatter
from gradwire.sources.fsdp.routes import Route, Routes

_LOG = logging.getLogger("gradwire")

_ROUNDED = " (reshard_after_forward), as these values are rounded already"
_SHORT = ", which has 16 bits already"
"""Why numbers are gathered as they are, by rule."""


@dataclass
class Account:
    """Counts of one module's collectives of one kind: how often each coding was sent, and this rank's bytes.

    `ring_bytes` are those of rings that send the numbers uncoded. On two levels, both counts are bytes over a
    node's link, and `inside_bytes` stay in the node. `coding_s` are seconds of the host.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: float = 0.0
    ring_bytes: float = 0.0
    inside_bytes: float = 0.0
    coding_s: float = 0.0

    def begin_anew(self) -> None:
        """Reset all counts."""
        self.calls.clear()
        self.sent_bytes = self.ring_bytes = self.inside_bytes = self.coding_s = 0.0

    def note(self, kind: str, sent_bytes: float, ring_bytes: float, inside_bytes: float) -> bool:
        """Count a collective of the coding `kind`, and its bytes as the class has them. Returns True if it is
        the first of its kind.
        """
        self.calls[kind] += 1
        self.sent_bytes += sent_bytes
        self.ring_bytes += ring_bytes
        self.inside_bytes += inside_bytes
        return self.calls[kind] == 1


class Decoding(dist.Work):
    """A gather in flight. `wait` goes through its collectives, and what each of them is followed by."""

    def __init__(self, steps: Iterator[Pending], account: Account, failed: Callable[[], None]) -> None:
        """Go up to the first of the `steps`, which are collectives, each to be waited for before the next.
        Seconds between them count as coding in `account`; `failed` is called if `wait` raises.
        """
        super().__init__()
        self._steps, self._account, self._failed = steps, account, failed
        self._pending: Pending | None = None
        self._go_on()

    def wait(self, timeout: object = None) -> bool:
        """Block until the gathered parameters are in place; `timeout` is ignored. Returns True. Raises
        `TransportError` if the gather fails, and what a step raises. A wait for a collective that was
        interrupted goes on when it is called again; an interrupt between collectives is a failure.
        """
        while (pending := self._pending) is not None:
            try:
                pending.wait()
            except Exception:
                self._give_up()
                raise
            try:
                self._go_on()
            except BaseException:  # also an interrupt: a generator does not go on after one
                self._give_up()
                raise
        return True

    def _give_up(self) -> None:
        self._pending, self._steps = None, iter(())  # nor are its tensors kept
        self._failed()

    def _go_on(self) -> None:
        self._pending, begin_s = None, now_s()
        self._pending = next(self._steps, None)
        if self._pending is None:
            self._steps = iter(())
        self._account.coding_s += now_s() - begin_s


class ParameterGather(AllGather):
    """Gather of a module's parameters, encoded by `coding`; `None` sends them as they are.

    A rank's own shard is encoded, too: all ranks compute with equal numbers. Coding is deterministic, so
    while parameters stay as they are, all gathers bring equal numbers. Only what `held` has is kept between
    gathers: they then send what has changed since the last one.
    """

    def __init__(
        self, of: ShardedModule, routes: Routes, coding: Coding | None, name: str, told: set[str]
    ) -> None:
        """`told` is what the log has of the model's gathers that go as they are by rule."""
        self.account = Account()
        self.is_unrounded = False
        """True while parameters are gathered unrounded."""
        self.held: Held | None = None
        """Parameters as last gathered, if gathers send what has changed since."""
        self._waiting: Decoding | None = None
        """The last gather of what has changed. FSDP2 may drop it before it is decoded."""
        self._of, self._routes = of, routes
        self.coding, self.name = coding, name
        self._told = told

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate a tensor for FSDP2: `size`, `dtype` and `device` are those of `torch.empty`."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the shards `input_tensor` (elements,) of all ranks into `output_tensor` (world · elements,).

        1. Encode this rank's shard.
        2. Send the code to all ranks, and receive theirs.
        3. Decode all codes into the output, this rank's among them.
        """
        route = self._routes.over(group)
        if (
            self.held is not None
            and self.held.fits(input_tensor)
            and group.group_name == self._of.received()[0].group_name
        ):
            self.finish()
            return self._begun(self._changes(self.held, output_tensor, input_tensor, route))
        kind, ring = self._as_it_is(input_tensor, group), route.of_rings * input_tensor.nbytes
        if kind:
            self._note(kind, ring, ring, (route.world - 1) * input_tensor.nbytes - ring)
            how = {"group": group, "async_op": async_op}
            found: dist.Work | None = _carried(all_gather, output_tensor, input_tensor, **how)
            return found
        return self._begun(self._rounded(output_tensor, input_tensor, route))

    def _begun(self, steps: Iterator[Pending]) -> dist.Work | None:
        """A gather that is begun, or on a device one that has ended for the host."""
        work = Decoding(steps, self.account, self._of.forget_gather)
        if self.held is not None:
            self._waiting = work
        if self._of.device.type == "cpu":
            return work
        work.wait()
        return None

    def _rounded(self, output: Tensor, shard: Tensor, route: Route) -> Iterator[Pending]:
        """Gather rounded numbers."""
        assert self.coding is not None, "or they go as they are"
        coding, parts, wide = self.coding, self._of.elements, step_type(shard.dtype)
        row = torch.empty(coding.row_bytes(parts, wide), dtype=torch.uint8, device=shard.device)
        coding.encode(shard.to(wide), row[None], parts, 0)
        rows = torch.empty(route.world, row.numel(), dtype=torch.uint8, device=row.device)
        pending, ring = route.gather(rows, row), route.of_rings * shard.nbytes
        self._note(self.name, route.across * row.nbytes, ring, route.inside * row.nbytes)
        yield pending
        out = output if output.dtype == wide else torch.empty_like(output, dtype=wide)
        coding.decode(rows, out, parts)
        if out is not output:
            output.copy_(out)

    def finish(self) -> None:
        """Finish a gather that FSDP2 has dropped: what this rank holds advances on all ranks alike. Raises
        `TransportError` and `WireError` as its `wait` does.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.wait()

    def _changes(self, held: Held, output: Tensor, shard: Tensor, route: Route) -> Iterator[Pending]:
        """Gather what has changed since the last gather, and write all numbers to `output`."""
        ring, inside = route.of_rings * shard.nbytes, route.inside // max(1, route.across + 1) * held.nbytes
        kind, row_bytes = yield from held.gather(shard, output, route)
        self._note(f"{self.name}: {kind}", route.across * row_bytes, ring, inside)

    def _as_it_is(self, shard: Tensor, group: dist.ProcessGroup) -> str:
        """Reason why a shard is sent unencoded, beginning with its type; empty if it is encoded."""
        kind = str(shard.dtype).removeprefix("torch.")
        if self.coding is None:
            return kind
        if self.is_unrounded:
            return f"{kind}, as wire.exact() asks"
        if group.group_name != self._of.received()[0].group_name:
            return f"{kind} over groups of {group.size()}{_ROUNDED}"
        if not shard.is_floating_point() or shard.numel() != sum(self._of.elements):
            return f"{kind}, because these are no numbers of the module's parameters"
        if isinstance(self.coding, Short) and shard.dtype.itemsize <= 2:
            return f"{kind}{_SHORT}"
        return ""

    def _note(self, kind: str, sent_bytes: float, ring_bytes: float, inside_bytes: float) -> None:
        is_first = self.account.note(kind, sent_bytes, ring_bytes, inside_bytes)
        if (
            is_first
            and kind.split(":")[0] != self.name
            and not self.is_unrounded
            and self._of.received()[0].rank() == 0
            and self.coding is not None
            and kind not in self._told
        ):
            if kind.endswith((_ROUNDED, _SHORT)):
                self._told.add(kind)
                _LOG.info("parameters are gathered in %s", kind)
            else:
                _LOG.warning("module %r is gathered in %s", self._of.label, kind)


class Scatter(ReduceScatter):
    """Adds up a module's gradients over ranks, each rank its own shard, in the bits of `scattering`.

    The first half of `gradwire.exchange.scatter_reduce`: whatever the world, a value is rounded once for the
    wire, added up in float32 (float64 for float64), and rounded once more to the type of the sum.
    """

    def __init__(
        self,
        of: ShardedModule,
        routes: Routes,
        scattering: Scattering,
        begins: Callable[[], Tensor | None],
        key: Callable[[], int],
    ) -> None:
        """Prepare the scatters of one module.

        Args:
            of: the module.
            routes: make the route over a process group.
            scattering: the coding, and whether rounding errors are remembered.
            begins: called before each scatter; returns the loss scale.
            key: draws a new key for stochastic rounding.
        """
        self.account = Account()
        self.unsent: Unsent | None = None
        self.scattering = scattering
        self._is_new = True
        self._landed: Tensor | None = None
        """The result of the first pass, until that has ended."""
        self._of, self._routes = of, routes
        self._begins, self._key = begins, key

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate a tensor for FSDP2: `size`, `dtype` and `device` are those of `torch.empty`."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write the sum over ranks of row number `rank` of `input_tensor` (world · elements,) to
        `output_tensor`.

        1. Sum the rows over the node's ranks, on two levels.
        2. Add the unsent gradient, if the module has a memory.
        3. Encode each target's row; remember the rounding errors.
        4. Send each target its row, in one all-to-all that includes scales.
        5. Sum the received rows, rank after rank.
        """
        scale, scattering, route = self._begins(), self.scattering, self._routes.over(group)
        coding, ring = scattering.coding, route.of_rings * output_tensor.nbytes
        parts = self._parts(output_tensor.numel())
        unsent = self._remembered(parts)
        if self._is_new:
            self._landed = output_tensor
        if coding is None:
            if unsent is not None:  # of a recipe before this one: it goes along, once
                rows = input_tensor.view(route.world, -1)
                mine = rows[unsent.places]
                unsent.add_to(mine, scale)
                rows[unsent.places] = mine
                unsent.keep(None, scale)
            # gloo runs an all-reduce for it, which sends twice as much as a ring.
            rings = 2 if dist.get_backend(group) == "gloo" else 1
            inside = (route.world - 1) * output_tensor.nbytes - ring
            kind = str(input_tensor.dtype).removeprefix("torch.")
            self.account.note(kind, rings * ring, ring, rings * inside)
            how = {"op": op, "group": group, "async_op": async_op}
            found: dist.Work | None = _carried(_reduce_scatter, output_tensor, input_tensor, **how)
            return found
        wide = step_type(input_tensor.dtype)
        x, kind = route.rows(input_tensor.to(wide)), scattering.text  # FSDP2 uses its buffer no more
        start_s = now_s()
        if unsent is not None:
            unsent.add_to(x, scale)
        elif scattering.feedback:
            assert scattering.unremembered is not None, "beside a coding with feedback"
            coding, kind = scattering.unremembered, f"{scattering.text}, without memory"
        rows = torch.empty(len(x), coding.row_bytes(parts, wide), dtype=torch.uint8, device=x.device)
        coding.encode(x.view(-1), rows, parts, self._key())
        received = torch.empty_like(rows)
        pending = route.scatter(received, rows)
        if unsent is not None:
            unsent.keep(x if scattering.feedback else None, scale)
        self.account.coding_s += now_s() - start_s
        pending.wait()
        begin_s = now_s()
        out = output_tensor if output_tensor.dtype == wide else torch.empty_like(output_tensor, dtype=wide)
        coding.sum(received, out, parts)
        if out is not output_tensor:
            output_tensor.copy_(out)
        self.account.coding_s += now_s() - begin_s
        sent, inside = route.across * rows[0].nbytes, route.inside * x[0].nbytes
        is_first = self.account.note(kind, sent, ring, inside)
        if is_first and kind != scattering.text and group.rank() == 0:
            _LOG.warning(
                "module %r scatters %s: only some of its parameters have a gradient", self._of.label, kind
            )
        return None

    def first_pass_ended(self) -> None:
        """Raise `ValueError` if FSDP2 packs gradients in another order than they are coded and remembered
        in.
        """
        landed, self._landed, self._is_new = self._landed, None, False
        if landed is not None and len(self._parts(landed.numel())) == len(self._of.trained()):
            self._of.refuse_other_order(landed)

    def _parts(self, elements: int) -> tuple[int, ...]:
        """Elements of each parameter's shard; one part if some parameters have no gradient, as FSDP2 does not
        tell which.
        """
        parts = tuple(self._of.elements[place] for place in self._of.trained())
        return parts if sum(parts) == elements else (elements,)

    def _remembered(self, parts: tuple[int, ...]) -> Unsent | None:
        """The memory of a scatter of shards with these `parts`; `None` if there is none, or if some trained
        parameter has no gradient: the memory would be added to others.

        Raises `ValueError` as `refuse_others` does.
        """
        unsent = self.unsent
        if unsent is None:
            return None
        self.refuse_others()
        fits = sum(parts) == unsent.elements and len(parts) == len(unsent.columns)
        return unsent if fits else None

    def refuse_others(self) -> None:
        """Raise `ValueError` if something is remembered, and the module trains other parameters now than
        those. One that trains none scatters nothing.
        """
        trained = [self._of.names[place] for place in self._of.trained()]
        if self.unsent is not None and trained and trained != list(self.unsent.columns):
            raise ValueError(
                f"parameters of module {self._of.label!r} were frozen or thawed after attach, so what is "
                "unsent fits no more: call wire.detach() before that, and attach again; or attach with int8 "
                "or int4(feedback=False), which remember nothing"
            )


def reduce_scatter(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """out (elements,) = the sum over ranks of this rank's row of x (world · elements,), uncoded."""
    _carried(_reduce_scatter, out, x, op=dist.ReduceOp.SUM, group=group)


def _carried(verb: Callable[..., Any], *tensors: Tensor, **how: Any) -> Any:
    """Run torch's own collective, and return its result. Raises `TransportError`."""
    try:
        return verb(*tensors, **how)
    except RuntimeError as error:
        raise TransportError(f"a collective failed: {error}") from error
