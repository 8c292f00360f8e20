"""Progress bars of both contestants."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from gradwire.lab.bench.process_set import OnStep
from gradwire.lab.bench.samples import StepSample
from gradwire.lab.bench.units import seconds_text


class LiveProgress:
    """One bar per contestant and seed, with its loss and step time."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._bars: dict[tuple[str, int], TaskID] = {}

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(text, highlight=False)

    def follow(self, name: str, seed: int, total: int, done: int) -> OnStep:
        """A callback that moves the bar of this contestant."""
        label = {"ddp": "plain DDP"}.get(name, name)
        if (name, seed) not in self._bars:
            self._bars[name, seed] = self._progress.add_task(f"{label}, seed {seed}", total=total, state="")
        bar = self._bars[name, seed]

        def on_step(rank: int, sample: StepSample) -> None:
            if rank == 0:
                loss = "-" if sample.loss is None else f"{sample.loss:.3f}"
                state = f"{seconds_text(sample.step_s)}/step, loss {loss}"
                self._progress.update(bar, advance=1, state=state)

        return on_step


@contextmanager
def live_progress(console: Console) -> Iterator[LiveProgress]:
    """Bars for as long as the block lasts; they stay on screen afterwards."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=8) as progress:
        yield LiveProgress(progress, console)
