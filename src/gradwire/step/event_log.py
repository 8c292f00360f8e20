"""Events of a run in the log of rank 0: the attached model, decisions, switches, skipped steps."""

from __future__ import annotations

import logging
from dataclasses import replace

from gradwire.comm import Round
from gradwire.exchange.base import STEADY
from gradwire.quantities import bytes_text, counted
from gradwire.recipes.parse import short
from gradwire.step.installed import InstalledRecipe
from gradwire.unit.context import ExchangeContext
from gradwire.version import __version__

_LOG = logging.getLogger("gradwire")
_UNTRIED = (
    "gradients on %s are carried by the placement %r. That is experimental: it has run on one GPU, "
    "with ranks that share it over gloo and over NCCL, and not on several. Compare with plain training "
    "before you rely on it"
)
_MANY = 10
_STEPS = 24
"""The bytes may depend on the step: the mean is over as many as hold every interval up to 4, 6 and 8."""


class EventLog:
    """Log of decisions and skipped steps: rank 0 writes it at level INFO; other ranks decide the same in the
    same step.

    `running` is the recipe that was last reported.
    """

    def __init__(self, reducer: InstalledRecipe) -> None:
        self._reducer, self.running = reducer, reducer.running
        self._speaks = reducer.env.control.rank == 0
        self._has_warned = False

    def attached(self) -> None:
        placement = self._reducer.placement
        if self._speaks and not placement.device.is_host:
            _LOG.warning(_UNTRIED, placement.device.where.type, placement.name)
        self._placed()
        if self._speaks and _LOG.isEnabledFor(logging.INFO):
            _LOG.info("gradwire %s: %s", __version__, account(self._reducer))

    def changed(self) -> None:
        """Log that another recipe runs from the next step on: an adaptive recipe has decided, or has
        gone back.
        """
        reducer, self.running = self._reducer, self._reducer.running
        if self._speaks:
            main = reducer.layout.main
            why = what_runs(reducer)[1] if reducer.layout.alone else main.why
            _LOG.info(
                "from step %d on: %s; %s", reducer.step, short(reducer.running or str(reducer.recipe)), why
            )
            if main.warning:  # in the log only: a user may have made Python's warnings errors
                _LOG.warning("%s", main.warning)
        self._placed()

    def _placed(self) -> None:
        """Warn once that gradients are carried on the host although they could stay on their device."""
        reducer = self._reducer
        if reducer.placement is reducer.env.on_host and not self._has_warned:
            self._has_warned = True
            if self._speaks:
                _LOG.warning("%s", why_placed(reducer))

    def unhealthy(self) -> None:
        """Log that training suffers from unsent gradient. No warning is issued, as the user may have made
        warnings errors.
        """
        health = self._reducer.health
        step, sign = health.complaints[-1]
        health.told = len(health.complaints)
        if self._speaks:
            _LOG.warning("step %d: %s; less compression would help, such as wire.switch('int8')", step, sign)

    def dropped(self, step: int, dropped: int, in_a_row: int) -> None:
        """Log that the user has left out step number `step`: the first of them in the run, and when there
        have been many `in_a_row`. `dropped` counts them all. No warning, as in `unhealthy`.
        """
        if self._speaks and dropped == 1:
            _LOG.warning(
                "step %d is left out: its gradients were cleared, or wire.drop_step() was called, before the "
                "optimizer stepped, so that nothing of them stays in the memory. If you add up gradients in "
                "buffers of your own, pass skipped='keep' to attach",
                step,
            )
        if self._speaks and in_a_row == _MANY:
            _LOG.warning(
                "%d steps in a row were left out: if something other than an optimizer steps, nothing is "
                "remembered: pass skipped='keep'",
                in_a_row,
            )

    def skipped(self, step: int, skipped: int) -> None:
        """Log that a step did not count on any rank; `skipped` counts these steps."""
        if self._speaks:
            _LOG.info(
                "step %d is skipped: NaN, Inf or a gradient too large to remember on some rank (%d so far)",
                step,
                skipped,
            )


def what_runs(reducer: InstalledRecipe) -> tuple[str, str]:
    """The recipe that runs, and why."""
    if reducer.layout.alone:
        return reducer.running or str(reducer.recipe), "one rank: nothing to send, so gradients are dense"
    if reducer.measuring:
        return f"{short(str(reducer.recipe))} (measuring, dense so far)", "dense steps are being measured"
    if reducer.awaits_kernels:
        return f"{short(str(reducer.recipe))} (dense until its kernels are compiled)", reducer.layout.main.why
    return reducer.layout.main.text, reducer.layout.main.why


def why_placed(reducer: InstalledRecipe) -> str:
    """The rule by which memory and codecs are where they are; empty where gradients are on the CPU."""
    placement, recipe = reducer.placement, short(reducer.layout.main.text)
    if placement.device.is_host:
        return ""
    if not placement.memory.is_host:
        if reducer.layout.stays_on_device:
            return "the host need not read any number"
        return f"{recipe} reads numbers on the host, but no process group carries tensors on the CPU"
    if placement is reducer.env.on_host:
        return f"{recipe} reads numbers on the host, so gradients are carried there"
    return "as placement='host' asks"


def account(reducer: InstalledRecipe) -> str:
    """The running recipe, its number of units, its share of the gradient's bytes, and its memory.

    Never raises: this rank would stop, and its peers would wait.
    """
    dense_bytes = sum(spec.numel * spec.dtype.itemsize for spec in reducer.specs)
    size, recipe = bytes_text(dense_bytes), short(reducer.running or str(reducer.recipe))
    if reducer.layout.alone:
        return f"{recipe}, one rank: nothing to send of {size}"
    if reducer.measuring:
        return f"{recipe}, {size}, measuring dense steps first"
    if reducer.awaits_kernels:
        return (
            f"{recipe}, {size}, dense until its kernels are compiled, which another process does; `gradwire "
            "warmup` does it beforehand"
        )
    try:
        share = f"{_share(reducer):.1%}".replace("%", " %")
    except Exception as error:
        share = f"an unknown share ({error!r})"
    if reducer.layout.is_plain:
        return f"{recipe}, {share} of {size}, no memory"
    units = counted(sum(len(flat_buffer.units) for flat_buffer in reducer.layout.flat_buffers), "unit")
    return f"{recipe}, {units}, {share} of {size}, memory {bytes_text(reducer.layout.memory_bytes)}"


def _share(reducer: InstalledRecipe) -> float:
    """Announced bytes of a steady step as a share of a plain all-reduce's."""
    layout, world = reducer.layout, reducer.comm.world
    steady = ExchangeContext(STEADY, 0, 0, world, flat_buffer=-1, granularity=reducer.placement.granularity)
    sent = 0.0
    for step in range(STEADY, STEADY + _STEPS):
        for flat_buffer in layout.flat_buffers:
            for unit in flat_buffer.units:
                ctx = replace(
                    steady, step=step, unit=unit.index, flat_buffer=flat_buffer.number, parts=unit.parts
                )
                rounds = flat_buffer.exchange.rounds(
                    unit.numel, flat_buffer.dtype, replace(ctx, narrow=flat_buffer.narrow)
                )
                sent += sum(each.wire_bytes(world) for each in rounds)
        for spec in reducer.specs:
            if (exchange := layout.direct.get(spec.name)) is not None:
                rounds = exchange.rounds(spec.numel, spec.dtype, replace(steady, step=step))
                sent += sum(each.wire_bytes(world) for each in rounds)
    dense = sum(Round("all_reduce", each.numel, each.dtype).wire_bytes(world) for each in reducer.specs)
    return sent / _STEPS / dense if dense else 1.0
