"""(shared) Training on many ranks in one process: gradients one after the other, recipes on threads.

Loss over steps does not depend on the link, so that nothing here waits for one. Weights are equal on all
ranks at all times, so that one model serves; batches differ, and so do the memories, which each rank keeps in
a flat buffer of its own. Vectors and tiny tensors are averaged, as beside every lossy recipe.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import torch
from torch import Tensor, nn

from gradwire.comm import Comm, run_ranks
from gradwire.comm.base import Round
from gradwire.exchange.base import run
from gradwire.exchange.compose import forget
from gradwire.memory import UNSENT, Gradients
from gradwire.recipes import recipe
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.layout import by_size
from gradwire.tools.diagnose import Diagnosis, GradientWatch, diagnose
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import specs_of
from gradwire_lab.workloads import catalogue
from gradwire_lab.workloads.base import Workload


@dataclass(frozen=True)
class Setting:
    """What is trained, by how many ranks, for how long; `text` is a recipe, empty for plain averages."""

    workload: str
    text: str
    world: int
    batch_size: int
    steps: int
    lr_scale: float = 1.0
    diagnose_every: int = 0
    constant: bool = False
    """Whether the learning rate neither rises nor falls."""


@dataclass(frozen=True)
class Outcome:
    """Losses by step, what the test set says, and diagnoses on the way.

    `sent_bytes` are those that a rank sends in a step, as announced, in the mean over the second half of the
    steps. Vectors and tiny tensors are in it.
    """

    losses: list[float]
    test: dict[str, float]
    diagnoses: list[Diagnosis]
    sent_bytes: float = 0.0

    @property
    def final_loss(self) -> float:
        """Mean over the last tenth of the steps, of the training set."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return fmean(tail)


class Ranks:
    """One flat buffer per rank, and what one step makes of all ranks' gradients."""

    def __init__(self, text: str, model: nn.Module, world: int) -> None:
        composition = recipe(text).build()
        tiny = by_size()
        self.specs = tuple(spec for spec in specs_of(model) if tiny(spec) is None)
        exchange = composition.exchange if composition.exchange.memory else forget(composition.exchange)
        boundaries = replace(composition, exchange=exchange).boundaries(self.specs, world)
        self.flat_buffers = [
            FlatBuffer(0, self.specs, exchange, boundaries, torch.device("cpu")) for _ in range(world)
        ]

    def step(self, gradients: Sequence[Tensor], number: int, look: bool) -> tuple[Tensor, Diagnosis | None]:
        """The mean that every rank applies, flat in layout order."""
        found = run_ranks(
            len(self.flat_buffers),
            lambda comm: carry(self.flat_buffers[comm.rank], gradients[comm.rank], number, comm, look),
        )
        return found[0]

    def sent_bytes(self, number: int) -> float:
        """What a rank announces for a step, of what is compressed."""
        flat_buffer, world = self.flat_buffers[0], len(self.flat_buffers)
        sent_bytes = 0.0
        for unit in flat_buffer.units:
            ctx = ExchangeContext(number, unit.index, 0, world, parts=unit.parts, kept=flat_buffer.kept)
            rounds = flat_buffer.exchange.rounds(unit.numel, flat_buffer.dtype, ctx)
            sent_bytes += sum(each.wire_bytes(world) for each in rounds)
        return sent_bytes


def carry(
    flat_buffer: FlatBuffer, gradient: Tensor, number: int, comm: Comm, look: bool
) -> tuple[Tensor, Diagnosis | None]:
    """What one rank applies in one step of its flat buffer, and a diagnosis on request. A collective."""
    mean, watch = torch.zeros_like(flat_buffer.x), GradientWatch()
    flat_buffer.compensate(Gradients(gradient, flat_buffer.pieces), number, comm.world)
    for unit in flat_buffer.units:
        here = slice(unit.start, unit.stop)
        unsent = flat_buffer.committed[UNSENT][here] if UNSENT in flat_buffer.committed else None
        ctx = ExchangeContext(
            number, unit.index, comm.rank, comm.world, parts=unit.parts, unsent=unsent, kept=flat_buffer.kept
        )
        if look:
            watch.take(flat_buffer, unit, flat_buffer.x[here], ctx)
        if flat_buffer.exchange.rounds(unit.numel, flat_buffer.dtype, ctx):
            run(flat_buffer.exchange, flat_buffer.x[here], mean[here], comm, ctx)
    flat_buffer.commit(())
    return mean, diagnose(watch.seen, [flat_buffer], comm, comm) if look else None


Look = Callable[["Ranks", Sequence[Tensor], Tensor, int], None]
"""Is shown a step that is over: flat buffers, the ranks' gradients, and what all applied, flat in layout
order."""


def train(setting: Setting, seed: int, *, work: Workload | None = None, look: Look | None = None) -> Outcome:
    """Train from `seed`, with the learning rate of `learning_rate`.

    `work` stands for the workload that the setting names. `look` sees every step of a recipe.
    """
    work = work or catalogue.workload(setting.workload, batch_size=setting.batch_size, full=False)
    model = work.model(seed)
    optimizer = work.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(setting))
    batches = [work.batches(rank, setting.world, seed) for rank in range(setting.world)]
    ranks = Ranks(setting.text, model, setting.world) if setting.text else None
    compressed = 0 if ranks is None else sum(spec.numel for spec in ranks.specs)
    plain = Round("all_reduce", sum(p.numel() for p in model.parameters()) - compressed, torch.float32)
    losses, diagnoses, sent = [], [], []
    for number in range(setting.steps):
        gathered, rank_losses = [], []
        for own in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = work.loss(model, next(own))
            loss.backward()
            rank_losses.append(loss.item())
            gathered.append([p.grad for p in model.parameters()])
        losses.append(fmean(rank_losses))
        for parameter, *grads in zip(model.parameters(), *gathered, strict=True):
            parameter.grad = torch.stack(grads).mean(0)
        if ranks is not None:
            every = setting.diagnose_every
            asked = bool(every) and number % every == every - 1
            if number >= setting.steps // 2:
                sent.append(ranks.sent_bytes(number))
            diagnoses += _exchange(model, ranks, gathered, number, asked, look)
        optimizer.step()
        schedule.step()
    sent_bytes = plain.wire_bytes(setting.world) + (fmean(sent) if sent else 0.0)
    return Outcome(losses, work.evaluate(model), diagnoses, sent_bytes)


def _exchange(
    model: nn.Module,
    ranks: Ranks,
    gathered: list[list[Tensor]],
    number: int,
    asked: bool,
    look: Look | None,
) -> list[Diagnosis]:
    parameters = dict(model.named_parameters())
    places = {name: place for place, name in enumerate(parameters)}
    flat = [torch.cat([grads[places[spec.name]].reshape(-1) for spec in ranks.specs]) for grads in gathered]
    mean, diagnosis = ranks.step(flat, number, asked)
    if look is not None:
        look(ranks, flat, mean, number)
    for slot in ranks.flat_buffers[0].slots:
        parameter = parameters[slot.spec.name]
        parameter.grad = mean[slot.start : slot.stop].view_as(parameter)
    return [] if diagnosis is None else [diagnosis]


def learning_rate(setting: Setting) -> Callable[[int], float]:
    """Linearly up over the first twentieth (Goyal et al. 2017), then linearly down to zero."""
    if setting.constant:
        return lambda _step: setting.lr_scale
    rise = max(1, setting.steps // 20)
    return lambda step: (
        setting.lr_scale * min((step + 1) / rise, (setting.steps - step) / (setting.steps - rise))
    )


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard error."""
    if len(values) < 2:
        return f"{fmean(values):.{digits}f}"
    return f"{fmean(values):.{digits}f} ± {stdev(values) / len(values) ** 0.5:.{digits}f}"
