"""The report: an account of what was chosen, why, and what it costs. It can be printed and written as
JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from html import escape
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Any

from gradwire.comm import Round
from gradwire.environment import cores_text
from gradwire.exchange.state import times_led
from gradwire.kernels.slices import all_threads
from gradwire.measure.link import Change
from gradwire.planning.costs import Link
from gradwire.quantities import bytes_text, columns, counted, ms_text, table_text, wrapped
from gradwire.recipes.parse import short
from gradwire.step.event_log import what_runs, why_placed
from gradwire.step.installed import InstalledRecipe
from gradwire.step.reducer import Backward
from gradwire.tools.diagnose import Diagnosis

if TYPE_CHECKING:  # loaded by what chooses, and with FSDP2
    from gradwire.planning.choice import ChoiceRow
    from gradwire.sources.fsdp.traffic import Traffic


@dataclass(frozen=True)
class ModuleTraffic:
    """Numbers of gathers and of scatters of one FSDP2 module, by coding, since `attach` or `switch`."""

    name: str
    elements: int
    gathered: dict[str, int]
    scattered: dict[str, int]


@dataclass(frozen=True, repr=False)
class Report:
    """Bytes are sent per rank and step, averaged over ranks; times are this rank's, per step.

    Bytes are means over the last 50 steps under the current recipe, times are medians over them. So a time
    never exceeds that of the whole step, whatever an evaluation in between takes.

    - `recipe`: the recipe that runs, with all options; `asked` is the one that was asked for, such as "auto".
    - `wire_bytes`: the bytes of all steps since the model was attached, under all recipes.
    - `memory_bytes`: the two buffers of unsent gradient, which plain DDP does not need. `graph_bytes` is the
      memory on the device that captured graphs keep on top of it, with the means that they write
      (`attach(cuda_graphs=True)`).
    - `skipped_steps`: steps that were not finite on some rank. `dropped_steps`: steps that were left out,
      because no optimizer stepped before the gradients were cleared.
    - `late`: the residual ratio: the norm of the unsent gradient over that of a step's gradient, as measured
      under the current recipe; `None` before enough steps were looked at.
    - `facts`: the numbers from which an adaptive recipe has decided. `collectives_s` in them says how long
      each collective of a dense step took.
    - `timeline`: the spans of the last step that was timed. A fixed recipe times its first 64 steps, and then
      one step in 16.
    - `diagnosis`: the result of the last `wire.diagnose()`.
    - `times_led`: by rank, how often it chose for all, for recipes in which one rank does (`ar_topk`).
    - `link`: latency and bandwidth as seen by gradwire's own traffic under the current recipe, once there
      were enough steps. `link_changes` are the last changes noticed, each with its step.
    - `health`: signs that training suffers from unsent gradient, each with its step.
    - `predicted_step_s`: how long a whole step was predicted to take when the recipe was chosen; `None`
      without a prediction. `step_s` is what it takes. Both include all that precedes the backward pass.
    - `compile_s`: how long this rank compiled kernels within steps. `gradwire warmup` does that beforehand.
    - `placement`: where memory and codecs are. On a device, `placement_why` says why.
    - `pinned_bytes`: host memory for copies, if gradients are on a device. `copied_s` is how long the device
      copied in the last step, both ways, beside its computation.
    - `codec_cores`: how many cores encode and decode where gradients go by way of the host; 0 elsewhere.
      `cores_needed` is how many would do that within a backward pass, if they are more and share the work
      evenly; 0 where they are not.
    - `per_node`: how many ranks add up inside their node first. `inside_bytes_per_step` are the bytes inside
      nodes; all other bytes travel between nodes.
    - `checksum_bytes`: the bytes that `attach(checksums=True)` has added so far.
    - `computing_by_rank_s`: the median seconds that each rank took from the end of a step to its last
      gradient of the next one. All wait for the slowest.
    - `connections`: over how many connections a long message travels from one rank to another.
    - `members`: with `outer(members=…)`, those in the last round. `rounds_committed` have landed here
      since this process started; `rounds_lost` were given up, or their Δ was dropped in healing.
    - `choices`: the recipes among which `auto` chose, the fastest first.
    - `modules`: what each module of FSDP2 has gathered and scattered as what, where gradwire carries FSDP2's
      own traffic. `gather` is the bits of its gathers, and says so if they are not sent yet.
      `gather_bytes_per_step` and `scatter_bytes_per_step` are what this rank sends in gathers and scatters
      per backward pass, evaluations in between included.
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
    codec_cores: int = 0
    cores_needed: int = 0
    per_node: int = 1
    inside_bytes_per_step: float = 0.0
    graph_bytes: int = 0
    checksum_bytes: float = 0.0
    computing_by_rank_s: tuple[float, ...] = ()
    wire_bytes: float = 0.0
    choices: tuple[ChoiceRow, ...] = ()
    connections: int = 1
    gather: str | None = None
    gather_bytes_per_step: float = 0.0
    scatter_bytes_per_step: float = 0.0
    modules: tuple[ModuleTraffic, ...] = ()
    members: tuple[str, ...] = ()
    rounds_committed: int = 0
    rounds_lost: int = 0
    asked: str = ""

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
        """The report in lines, as wide as the terminal, or 100 columns where there is none."""
        return self.text(columns())

    def text(self, width: int) -> str:
        """The printed report, in lines of at most `width` columns; the table of choices may be wider."""
        before, after = self._rows
        lines = [wrapped(self._title, width, hanging="  ")]
        lines += [wrapped(text, width, f"  {label:<{LABEL}} ", " " * (LABEL + 3)) for label, text in before]
        lines += [f"  {line}" for line in choices_text(self.choices)]
        lines += [wrapped(text, width, f"  {label:<{LABEL}} ", " " * (LABEL + 3)) for label, text in after]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Tables, in a notebook."""
        before, after = self._rows
        rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in before)
        rows += "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in after)
        return f"<table><caption>{escape(self._title)}</caption>{rows}</table>{_html_of(self.choices)}"

    @property
    def _title(self) -> str:
        nodes = f" on {counted(self.world // self.per_node, 'node')}" if self.per_node > 1 else ""
        asked, runs = short(self.asked), self._runs
        runs = runs if not asked or runs.startswith(asked) else f"{asked} runs {runs}"
        return f"gradwire: {runs}, step {self.step}, {counted(self.world, 'rank')}{nodes}"

    @property
    def _runs(self) -> str:
        """The recipe that runs, by the name that it has in the table of choices: without its boundaries."""
        return next((each.recipe for each in self.choices if each.verdict == "runs"), short(self.recipe))

    @property
    def _rows(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Labels and texts: those before the table of choices, and those after it."""
        sent, metered = bytes_text(self.wire_bytes_per_step), bytes_text(self.metered_bytes_per_step)
        rows = [
            ("why", NOT_COMPARED if self.why == "as configured" else self.why),
            (
                "on the wire",
                f"{sent} per rank and step, {self.ratio:.1%} of plain all-reduce (metered {metered})",
            ),
        ]
        if self.connections > 1:
            rows.append(("connections", f"{self.connections} per link share long messages"))
        rows += self._traffic
        rows += self._inside
        times_s = (self.backward_s, self.compress_s, self.exposed_comm_s)
        backward, codec, exposed = (ms_text(each, 1) for each in times_s)
        spent = f"backward {backward}, encode and decode {codec}, exposed communication {exposed}"
        rows.append(("per step", spent))
        if self.slowest_rank is not None:
            slowest_s, middle_s = max(self.computing_by_rank_s), median(self.computing_by_rank_s)
            slowest = f"{ms_text(slowest_s, 1)} on rank {self.slowest_rank}"
            rows.append(("by rank", f"{ms_text(middle_s, 1)} of computing per step in the median, {slowest}"))
        residual = f"{bytes_text(self.memory_bytes)} in {counted(self.units, 'unit')}"
        if self.late:
            residual += f"; its norm is {self.late:.2g} of that of a step's gradient"
        rows.append(("residual", residual if self.units else "none"))
        if self.pinned_bytes or self.placement != "host":
            pinned, copied = bytes_text(self.pinned_bytes), ms_text(self.copied_s, 1)
            copies = f"{pinned} pinned, {copied} of copies in the last step"
            said = copies if self.pinned_bytes else "gradients stay on their device"
            said += f", {bytes_text(self.graph_bytes)} kept by graphs" if self.graph_bytes else ""
            why = f"; {self.placement_why}" if self.placement_why else ""
            rows.append(("placement", f"{self.placement}: {said}{why}"))
        if self.cores_needed:
            longer = f"encode and decode take {codec} with {counted(self.codec_cores, 'core')}"
            behind = f"longer than the backward pass, with which {self.cores_needed} would keep up"
            rows.append(("cores", f"{longer}, {behind}; {cores_text()}"))
        if self.predicted_step_s is not None:
            predicted = f"{ms_text(self.predicted_step_s, 1)} were predicted at the choice"
            rows.append(("whole step", f"{ms_text(self.step_s, 1)} now; {predicted}"))
        return rows, self._events

    @property
    def _inside(self) -> list[tuple[str, str]]:
        """Row of the report on traffic inside nodes; none if there is none."""
        if self.per_node == 1 or not self.inside_bytes_per_step:
            return []
        return [("in nodes", f"{bytes_text(self.inside_bytes_per_step)} per rank and step, beside that")]

    @property
    def _traffic(self) -> list[tuple[str, str]]:
        """Rows of the report on FSDP2's own traffic; none without FSDP2."""
        if not self.modules:
            return []
        gathered, scattered = map(bytes_text, (self.gather_bytes_per_step, self.scatter_bytes_per_step))
        return [
            ("FSDP2 sends", f"{gathered} in gathers, {scattered} in scatters per rank and step"),
            ("gathered as", _kinds(each.gathered for each in self.modules)),
            ("scattered as", _kinds(each.scattered for each in self.modules)),
        ]

    @property
    def _events(self) -> list[tuple[str, str]]:
        rows = []
        if self.members:
            rounds = f"{counted(self.rounds_committed, 'round')} committed here, {self.rounds_lost} lost"
            rows.append(("members", f"{', '.join(self.members)}; {rounds}"))
        if self.diagnosis is not None:
            rows.append(("ranks", str(self.diagnosis)))
        if self.times_led is not None:
            rows.append(("led", f"{', '.join(map(str, self.times_led))} times by rank"))
        if self.link_changes:
            step, change = self.link_changes[-1]
            told = f"{_link(change.before)}, then {_link(change.after)}"
            rows.append(("link", f"changed in step {step}: {told if change.is_resolved else TOO_FEW}"))
        if self.health:
            step, sign = self.health[-1]
            rows.append(("health", f"step {step}: {sign}"))
        if self.compile_s > 0.0:
            rows.append(("kernels", f"compiled for {self.compile_s:.1f} s within steps"))
        if self.skipped_steps:
            steps = counted(self.skipped_steps, "step")
            rows.append(("skipped", f"{steps} with NaN, Inf or gradients too large to remember"))
        if self.dropped_steps:
            steps = counted(self.dropped_steps, "step")
            rows.append(("left out", f"{steps}, without a trace in the memory"))
        return rows


def _kinds(modules: Iterable[Mapping[str, int]]) -> str:
    total: Counter[str] = Counter()
    for each in modules:
        total.update(each)
    return (
        "; ".join(f"{kind} ({counted(count, 'time')})" for kind, count in total.most_common())
        or "nothing yet"
    )


NOT_COMPARED = "as asked; nothing was compared with it. `gradwire advise` tells whether it helps"
TOO_FEW = "messages are too small to tell how fast it is"

LABEL = 12
"""Columns of a label."""
SHOWN = 8
"""Recipes in the printed table; `choices` has all."""


HEAD = ("recipe", "predicted", "measured", "efficiency", "sent", "residual", "")


def choices_text(choices: tuple[ChoiceRow, ...]) -> list[str]:
    """The lines of a table of the recipes considered, the fastest first. It always has `dense` and what runs.

    Both times are of when it was chosen. "efficiency" is scaling efficiency, "residual" the residual ratio.

    >>> from gradwire.planning.choice import ChoiceRow
    >>> row = ChoiceRow("int4", 0.1, 0.8, 1.05e6, 0.17, 0.104, "runs")
    >>> print(*choices_text((row,)), sep="\\n")
    recipe  predicted  measured  efficiency     sent  residual
    int4     100.0 ms  104.0 ms         80%  1.05 MB      0.17  runs
    """
    if not choices:
        return []
    return table_text(HEAD, _cells_of(choices), left=(0, len(HEAD) - 1)).splitlines()


def _cells_of(choices: tuple[ChoiceRow, ...]) -> list[tuple[str, ...]]:
    """A row for each recipe that is shown."""
    must = [each for each in choices if each.verdict == "runs" or each.recipe == "dense"]
    others = [each for each in choices if each not in must][: SHOWN - len(must)]
    return [_cells(each) for each in choices if each in must or each in others]


def _cells(each: ChoiceRow) -> tuple[str, ...]:
    return (
        each.recipe,
        ms_text(each.predicted_step_s, 1),
        "-" if each.measured_step_s is None else ms_text(each.measured_step_s, 1),
        f"{each.share_of_linear:.0%}",
        bytes_text(each.wire_bytes),
        "not run" if each.late is None else f"{each.late:.2g}",
        each.verdict,
    )


def _html_of(choices: tuple[ChoiceRow, ...]) -> str:
    if not choices:
        return ""
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in HEAD)
    rows = _cells_of(choices)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _link(link: Link) -> str:
    """A link in words. Messages of one size, or times that do not rise, leave one of the two numbers open."""
    latency = f"{_number(link.alpha_s * 1e3)} ms" if link.alpha_s > 0.0 else "latency not resolved"
    rate = f"{_number(8e-6 / link.beta_s)} Mbit/s" if link.beta_s > 0.0 else "bandwidth not resolved"
    return f"{latency}, {rate}"


def _number(positive: float) -> str:
    """A whole number from 10 on, else two digits, so that nothing is rounded to 0."""
    return f"{positive:.0f}" if positive >= 10.0 else f"{positive:.2g}"


def account_of(traffic: Traffic) -> dict[str, Any]:
    """The fields of `Report` about FSDP2's own traffic."""
    gathered, scattered, *_ = traffic.per_pass()
    modules = tuple(
        ModuleTraffic(each.label, sum(each.elements) * traffic.group.size(), dict(gathers), dict(scatters))
        for each, gathers, scatters in traffic.calls()
    )
    gather, waits = traffic.asked.gather, " (uncoded until its kernels are compiled)"
    return {
        "gather": f"{gather}{waits}" if gather and traffic.awaits_kernels else gather,
        "gather_bytes_per_step": gathered,
        "scatter_bytes_per_step": scattered,
        "modules": modules,
    }


def report_of(backward: Backward, diagnosis: Diagnosis | None) -> Report:
    """`Wire.report`; `diagnosis` is the last one that was asked for."""
    if not backward.optimizer_log.is_in_step:  # which may still be left out: nothing is final before
        backward.up_to_date()
    reducer, history = backward.reducer, backward.history
    dense = sum(Round("all_reduce", s.numel, s.dtype).wire_bytes(reducer.comm.world) for s in reducer.specs)
    facts = None
    if reducer.facts is not None:
        # The forecasts are in the table of choices, and too much to print.
        facts = {**asdict(replace(reducer.facts, forecasts={})), "ccr": reducer.facts.ccr}
    recipe, why = what_runs(reducer)
    compress_s, backward_s = history.median("compress_s"), history.median("backward_s")
    cores = all_threads() if reducer.placement.copies else 0
    return Report(
        recipe=recipe,
        why=why,
        choices=reducer.layout.main.table,
        step=reducer.step,
        world=reducer.env.control.world,
        per_node=1 if reducer.shard is None else reducer.shard.parts,
        inside_bytes_per_step=history.mean("inside_bytes"),
        skipped_steps=history.skipped,
        dropped_steps=backward.optimizer_log.dropped,
        late=reducer.late,
        wire_bytes_per_step=history.mean("predicted_bytes"),
        metered_bytes_per_step=history.mean("metered_bytes"),
        dense_bytes_per_step=dense,
        compress_s=compress_s,
        backward_s=backward_s,
        exposed_comm_s=history.median("exposed_comm_s"),
        memory_bytes=reducer.layout.memory_bytes,
        units=sum(len(flat_buffer.units) for flat_buffer in reducer.layout.flat_buffers),
        facts=facts,
        link=reducer.traffic.link,
        link_changes=tuple(reducer.link_changes),
        health=tuple(reducer.health.complaints),
        timeline=history.timeline(),
        diagnosis=diagnosis,
        times_led=times_led(flat_buffer.kept for flat_buffer in reducer.layout.flat_buffers),
        predicted_step_s=_predicted_step_s(reducer),
        step_s=history.median("step_s"),
        compile_s=history.compile_s,
        placement=reducer.placement.name,
        placement_why=why_placed(reducer),
        pinned_bytes=reducer.placement.transfer.pinned_bytes,
        graph_bytes=reducer.graph_bytes,
        copied_s=reducer.placement.transfer.copied_s(),
        codec_cores=cores,
        cores_needed=ceil(cores * compress_s / backward_s) if 0.0 < backward_s < compress_s else 0,
        checksum_bytes=reducer.placement.checksum_bytes,
        computing_by_rank_s=history.computing_by_rank_s(),
        wire_bytes=history.predicted_bytes,
        connections=reducer.comm.connections,
        asked=str(reducer.recipe),
    )


def _predicted_step_s(reducer: InstalledRecipe) -> float | None:
    """The predicted step for which the recipe was chosen, codec included; else the one that the facts
    predict."""
    chosen = [row.predicted_step_s for row in reducer.layout.main.table if row.verdict == "runs"]
    if chosen:
        return chosen[0]
    if reducer.facts is None:
        return None
    from gradwire.control.forecast import predicted_step_s  # what has no facts predicts nothing

    return predicted_step_s(reducer.facts, reducer.layout, reducer.specs, reducer.placement.granularity)
