"""The report: an account of what was chosen, why, and what it costs. It can be printed and written as
JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from gradwire.comm import Round
from gradwire.engine.engine import Engine
from gradwire.engine.news import what_runs, why_placed
from gradwire.engine.predicted import predicted_step_s
from gradwire.exchange.state import times_led
from gradwire.measure.link import Change
from gradwire.planning.costs import Link
from gradwire.sources.backward import Backward
from gradwire.tools.diagnose import Diagnosis

if TYPE_CHECKING:  # loaded by what chooses
    from gradwire.decide.choice import Considered


@dataclass(frozen=True)
class Report:
    """Bytes are sent per rank and step, averaged over ranks; times are this rank's, per step.

    Means are over the last 50 steps under the current recipe.

    - `wire_bytes`: the bytes of all steps since the model was attached, under all recipes.
    - `memory_bytes`: the two buffers of unsent gradient, which plain DDP does not need.
    - `skipped_steps`: steps that were not finite on some rank. `dropped_steps`: steps that were left out,
      because no optimizer stepped before the gradients were cleared.
    - `late`: how many steps' worth of gradient wait in memory, as measured under the current recipe; `None`
      before enough steps were looked at.
    - `facts`: the numbers from which an adaptive recipe has decided. `collectives_s` in them says how long
      each collective of a dense step took.
    - `timeline`: the spans of the last step.
    - `diagnosis`: the result of the last `wire.diagnose()`.
    - `times_led`: by rank, how often it chose for all, for recipes in which one rank does (`ar_topk`).
    - `link`: latency and bandwidth as seen by gradwire's own traffic under the current recipe, once there
      were enough steps. `link_changes` are the last changes noticed, each with its step.
    - `health`: signs that training suffers from unsent gradient, each with its step.
    - `predicted_step_s`: how long a whole step should take by the facts; `None` without facts. `step_s` is
      the median of the measured times. Both include all that precedes the backward pass.
    - `compile_s`: how long this rank compiled kernels within steps. `gradwire warmup` does that beforehand.
    - `placement`: where memory and codecs are. `placement_why` says why, if there is more to say.
    - `pinned_bytes`: host memory for copies, if gradients are on a device. `copied_s` is how long the device
      copied in the last step, both ways, beside its computation.
    - `per_node`: how many ranks add up inside their node first. `inside_bytes_per_step` are the bytes inside
      nodes; all other bytes travel between nodes.
    - `checksum_bytes`: the bytes that `attach(checksums=True)` has added so far.
    - `computing_by_rank_s`: the median seconds that each rank took from the end of a step to its last
      gradient of the next one. All wait for the slowest.
    - `choices`: the recipes among which `auto` chose, the fastest first.
    """

    recipe: str
    why: str
    step: int
    world: int
    skipped_steps: int
    dropped_steps: int
    late: float | None
    wire_bytes_per_step: float
    metered_bytes_per_step: float
    dense_bytes_per_step: float
    compress_s: float
    backward_s: float
    exposed_comm_s: float
    memory_bytes: int
    units: int
    facts: dict[str, Any] | None
    timeline: list[dict[str, object]]
    diagnosis: Diagnosis | None = None
    times_led: list[int] | None = None
    link: Link | None = None
    link_changes: tuple[tuple[int, Change], ...] = ()
    health: tuple[tuple[int, str], ...] = ()
    predicted_step_s: float | None = None
    step_s: float = 0.0
    compile_s: float = 0.0
    placement: str = "host"
    placement_why: str = ""
    pinned_bytes: int = 0
    copied_s: float = 0.0
    per_node: int = 1
    inside_bytes_per_step: float = 0.0
    checksum_bytes: float = 0.0
    computing_by_rank_s: tuple[float, ...] = ()
    wire_bytes: float = 0.0
    choices: tuple[Considered, ...] = ()

    @property
    def ratio(self) -> float:
        """Bytes on the wire as a share of those of plain all-reduce."""
        return self.wire_bytes_per_step / self.dense_bytes_per_step if self.dense_bytes_per_step else 1.0

    @property
    def slowest_rank(self) -> int | None:
        """The rank that takes longest to compute a step; `None` for a single rank, or if nothing is known."""
        times_s = self.computing_by_rank_s
        return times_s.index(max(times_s)) if len(times_s) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers, strings, lists and dictionaries."""
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        nodes = f" on {self.world // self.per_node} nodes" if self.per_node > 1 else ""
        lines = [
            f"gradwire: {self.recipe}, step {self.step}, {self.world} ranks{nodes}",
            f"  why          {self.why}",
            f"  on the wire  {_mib(self.wire_bytes_per_step)} per rank and step, "
            f"{self.ratio:.1%} of plain all-reduce (metered {_mib(self.metered_bytes_per_step)})",
            f"  per step     backward {_ms(self.backward_s)}, encode and decode {_ms(self.compress_s)}, "
            f"exposed communication {_ms(self.exposed_comm_s)}",
            f"  memory       {_mib(self.memory_bytes)} in {self.units} units",
        ]
        if self.slowest_rank is not None:
            slowest_s, middle_s = max(self.computing_by_rank_s), median(self.computing_by_rank_s)
            lines.insert(
                4,
                f"  by rank      {_ms(middle_s)} of computing per step in the median, "
                f"{_ms(slowest_s)} on rank {self.slowest_rank}",
            )
        if self.pinned_bytes or self.placement != "host":
            copies = f"{_mib(self.pinned_bytes)} pinned, {_ms(self.copied_s)} of copies in the last step"
            said = copies if self.pinned_bytes else "gradients stay on their device"
            why = f"; {self.placement_why}" if self.placement_why else ""
            lines.append(f"  placement    {self.placement}: {said}{why}")
        if self.per_node > 1 and self.inside_bytes_per_step:
            lines.insert(
                3, f"  in nodes     {_mib(self.inside_bytes_per_step)} per rank and step, beside that"
            )
        if self.predicted_step_s is not None:
            took = f"{_ms(self.predicted_step_s)} by the facts, {_ms(self.step_s)} measured"
            lines.append(f"  whole step   {took}")
        lines += [f"  {line}" for line in table_of(self.choices)]
        if self.diagnosis is not None:
            lines.append(f"  ranks        {self.diagnosis}")
        if self.times_led is not None:
            lines.append(f"  led          {', '.join(map(str, self.times_led))} times by rank")
        if self.link_changes:
            step, change = self.link_changes[-1]
            told = f"{_link(change.before)}, then {_link(change.after)}"
            lines.append(f"  link         changed in step {step}: {told}")
        if self.health:
            step, sign = self.health[-1]
            lines.append(f"  health       step {step}: {sign}")
        if self.compile_s > 0.0:
            lines.append(f"  kernels      compiled for {self.compile_s:.1f} s within steps")
        if self.late:
            lines.append(f"  late         {self.late:.2g} steps' worth of gradient waits in memory")
        if self.skipped_steps:
            lines.append(
                f"  skipped      {self.skipped_steps} steps with NaN, Inf or gradients too large to remember"
            )
        if self.dropped_steps:
            lines.append(f"  left out     {self.dropped_steps} steps, without a trace in the memory")
        return "\n".join(lines)


SHOWN = 8
"""Recipes in the printed table; `choices` has all."""


def table_of(choices: tuple[Considered, ...]) -> list[str]:
    """The lines of a table of the recipes considered, the fastest first. It always has `dense` and what runs.

    >>> from gradwire.decide.choice import Considered
    >>> row = Considered("int4", 0.1, 0.8, 2**20, 0.17, 0.104, "runs")
    >>> print(*table_of((row,)), sep="\\n")
    recipe  predicted    measured  linear      sent     late
    int4     100.0 ms    104.0 ms     80%  1.00 MiB     0.17  runs
    """
    if not choices:
        return []
    must = [each for each in choices if each.verdict == "runs" or each.recipe == "dense"]
    others = [each for each in choices if each not in must][: SHOWN - len(must)]
    shown = [each for each in choices if each in must or each in others]
    wide = max(len("recipe"), *(len(each.recipe) for each in shown))
    head = f"{'recipe':<{wide}}  {'predicted':>9}  {'measured':>10}  linear  {'sent':>8}  {'late':>7}"
    return [head, *(_row(each, wide) for each in shown)]


def _row(each: Considered, wide: int) -> str:
    measured = "-" if each.measured_step_s is None else _ms(each.measured_step_s)
    late = "not run" if each.late is None else f"{each.late:.2g}"
    return (
        f"{each.recipe:<{wide}}  {_ms(each.predicted_step_s):>9}  {measured:>10}  "
        f"{each.share_of_linear:>6.0%}  {_mib(each.wire_bytes):>8}  {late:>7}  {each.verdict}"
    )


def _link(link: Link) -> str:
    """A link in words. Messages of one size, or times that do not rise, leave one of the two numbers open."""
    latency = f"{_number(link.alpha_s * 1e3)} ms" if link.alpha_s > 0.0 else "latency not resolved"
    rate = f"{_number(8e-6 / link.beta_s)} Mbit/s" if link.beta_s > 0.0 else "bandwidth not resolved"
    return f"{latency}, {rate}"


def _number(positive: float) -> str:
    """A whole number from 10 on, else two digits, so that nothing is rounded to 0."""
    return f"{positive:.0f}" if positive >= 10.0 else f"{positive:.2g}"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.2f} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def report_of(backward: Backward, diagnosis: Diagnosis | None) -> Report:
    """`Wire.report`; `diagnosis` is the last one that was asked for."""
    backward.up_to_date()
    engine, history = backward.engine, backward.history
    dense = sum(Round("all_reduce", s.numel, s.dtype).wire_bytes(engine.comm.world) for s in engine.specs)
    facts = None
    if engine.facts is not None:
        # The forecasts are in the table of choices, and too much to print.
        facts = {**asdict(replace(engine.facts, forecasts={})), "ccr": engine.facts.ccr}
    recipe, why = what_runs(engine)
    return Report(
        recipe=recipe,
        why=why,
        choices=engine.layout.main.table,
        step=engine.step,
        world=engine.around.control.world,
        per_node=1 if engine.around.shard is None else engine.around.shard.parts,
        inside_bytes_per_step=history.mean("inside_bytes"),
        skipped_steps=history.skipped,
        dropped_steps=backward.steps.dropped,
        late=engine.late,
        wire_bytes_per_step=history.mean("predicted_bytes"),
        metered_bytes_per_step=history.mean("metered_bytes"),
        dense_bytes_per_step=dense,
        compress_s=history.mean("compress_s"),
        backward_s=history.mean("backward_s"),
        exposed_comm_s=history.mean("exposed_comm_s"),
        memory_bytes=engine.layout.memory_bytes,
        units=sum(len(lane.units) for lane in engine.layout.lanes),
        facts=facts,
        link=engine.traffic.link,
        link_changes=tuple(engine.link_changes),
        health=tuple(engine.health.complaints),
        timeline=history.timeline(),
        diagnosis=diagnosis,
        times_led=times_led(lane.kept for lane in engine.layout.lanes),
        predicted_step_s=_predicted_step_s(engine),
        step_s=history.median("step_s"),
        compile_s=history.compile_s,
        placement=engine.around.placement.name,
        placement_why=why_placed(engine),
        pinned_bytes=engine.around.placement.bringing.pinned_bytes,
        copied_s=engine.around.placement.bringing.copied_s(),
        checksum_bytes=engine.around.checksum_bytes,
        computing_by_rank_s=history.computing_by_rank_s(),
        wire_bytes=history.predicted_bytes,
    )


def _predicted_step_s(engine: Engine) -> float | None:
    """The predicted step for which the recipe was chosen, codec included; else the one that the facts
    predict."""
    chosen = [row.predicted_step_s for row in engine.layout.main.table if row.verdict == "runs"]
    if chosen:
        return chosen[0]
    return predicted_step_s(engine.facts, engine.layout, engine.specs, engine.step)
