"""What GComp makes of real gradients: sizes over training, exponents, mantissas, and how far training strays.

`sizes` trains a model on the mean of several ranks' gradients and codes one rank's gradient every so many
steps: bytes in every mode with a table per layer made anew when the recipe would, and near-lossless with a
table per unit as the recipe cuts them; beside them zlib and zstd on the same bytes; bits per exponent with
the static table, one dynamic table for everything and one per layer, beside the entropy; the share of the 15
most frequent exponents and of zeros; the median ratio of gradient to parameter; bits per mantissa and sign,
by which of the paper's means are used. Paper (sections 3.1, 7.2, 7.3): 32.9 % of the size for ResNet-50 and
36.5 % for BERT, exponents 14.5 % and with dynamic tables 11.6 % of the original, top 15 exponents about 95 %.

With `--tuned` the model is first trained for as many steps on a stretch of the data of its own, and then
tuned on others by AdamW at the learning rate `--lr`: the paper's BERT is trained on SST, presumably from a
trained checkpoint.

`strays` trains the same model by several recipes, ranks as threads, on the same batches, and says by how much
the loss differs from that of exact means, averaged over steps, and in which step the mean of ten losses is
first as low as that of exact training after a half, three quarters and all of the steps, but for 0.1 %: the
paper's figure 20 in steps. Figures are means over seeds. Paper (section 7.6): 73.6 to 93.1 % less than with
18 bits truncated, 77.4 to 96.8 % less than with one all-reduce in 8 steps. "start" is training by exact means
from parameters that differ in their last bit: what a loss strays for no reason at all. `local_every` hands
the optimizer the sum of eight gradients at once, which overshoots. The paper does not say what its workers do
in between, so two more comparators stand here: the mean of eight gradients in every eighth step, and ranks
that train alone and take the mean of their parameters after every eighth step.

`--workload words` has an embedding of words, of which a batch touches few rows (`words.py`).

    python benchmarks/gcomp_report.py sizes [--workload resnet18] [--steps 200] [--every 25] [--json PATH]
    python benchmarks/gcomp_report.py sizes --tuned 300 --lr 2e-5 [--steps 100]
    python benchmarks/gcomp_report.py strays [--workload chargpt] [--steps 100] [--seeds 3] [--by adamw]
"""

import argparse
import ctypes.util
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from huffman import Zstd
from torch import Tensor
from words import Words

from gradwire import recipes
from gradwire.codec.gcomp import CodeTable, Key, frame, histogram
from gradwire.comm import Comm, run_ranks
from gradwire.exchange.base import run
from gradwire.exchange.compose import forget
from gradwire.exchange.gcomp import Gcomp
from gradwire.kernels.terms import mantissa_levels
from gradwire.memory import UNSENT, Gradients
from gradwire.metric import numerators, thresholds
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.unit.context import ExchangeContext, Part, Replicated
from gradwire.unit.parameters import Unit, specs_of
from gradwire_lab.report import svg
from gradwire_lab.report.charts import Series, line_chart
from gradwire_lab.workloads import catalogue

MANTISSA = 23
TRUNCATED = "truncate(bits=18)"
"""The paper's baseline, which cuts towards zero; `gcomp(mode='truncate')` rounds to nearest."""
SETTINGS = ("gcomp", "gcomp(mode='levels')", TRUNCATED, "local_every(interval=8)")
START = "start"
MEAN, ALONE = "the mean of 8 gradients in every 8th step", "parameters averaged after every 8th step"
EVERY = 8
SHARE = ", share of 4 bytes"
COLOURS = ("#3465a4", "#cc0000", "#4e9a06", "#f57900", "#75507b", "#888a85")
PICTURED = ("near", "levels", "lossless", "truncate 18", "zlib 1", "zstd 1")
WINDOW = 10
"""Losses that are averaged where one is compared with another step's."""
SHARES = (0.5, 0.75, 1.0)
"""Of the steps, after which exact training has the losses that all others are to reach."""
AS_LOW = 1.001
"""Where exact training ends, another that differs in the last bits only may be just above."""


def draw(path: Path, curves: Mapping[str, Sequence[svg.Point]], across: str, up: str) -> None:
    """Write a picture of at most six `curves`, with their names above."""
    style = "text{font:11px sans-serif;fill:#444}.paper{fill:white}.grid{stroke:#ddd}"
    style += "polyline{fill:none;stroke-width:2}"
    style += "".join(f".c{k}{{stroke:{c}}}.fill-c{k}{{fill:{c}}}" for k, c in enumerate(COLOURS))
    chart = line_chart(
        [Series(tuple(points), f"c{k}") for k, points in enumerate(curves.values())], across, up
    )
    legend = [(f"c{k}", name) for k, name in enumerate(curves)]
    path.write_text(svg.alone(chart, legend, style) + "\n", encoding="utf-8")


class Training:
    """A model, and the gradients that several ranks would have of it."""

    def __init__(self, arguments: argparse.Namespace, seed: int = 0) -> None:
        shards = "skewed" if arguments.tuned else "iid"
        workload = (
            Words()
            if arguments.workload == "words"
            else catalogue.workload(arguments.workload, shards=shards)
        )
        self.world, self.loss, self.model = arguments.ranks, workload.loss, workload.model(seed)
        self.optimizer = workload.optimizer(self.model.parameters())
        self.parameters = dict(self.model.named_parameters())
        self.specs = specs_of(self.model)
        stretches = self.world + (arguments.tuned > 0)
        self.batches = [workload.batches(rank, stretches, seed) for rank in range(stretches)]
        for _ in range(arguments.tuned):
            self.optimizer.zero_grad()
            self.loss(self.model, next(self.batches[-1])).backward()
            self.optimizer.step()
        if arguments.by or arguments.tuned:
            by = torch.optim.SGD if arguments.by == "sgd" else torch.optim.AdamW
            self.optimizer = by(self.model.parameters(), lr=arguments.lr)

    def gradients(self) -> tuple[list[Tensor], float]:
        """Every rank's gradient, flat in layout order, and the mean of their losses."""
        found, losses = zip(*(self.gradient(rank) for rank in range(self.world)), strict=True)
        return list(found), fmean(losses)

    def gradient(self, rank: int) -> tuple[Tensor, float]:
        """That of a rank's next batch, and its loss."""
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.loss(self.model, next(self.batches[rank]))
        loss.backward()
        return torch.cat([_flat(self.parameters[spec.name]) for spec in self.specs]), float(loss.detach())

    def apply(self, mean: Tensor) -> None:
        """One step of the optimizer."""
        done = 0
        for spec in self.specs:
            parameter = self.parameters[spec.name]
            parameter.grad = mean[done : done + spec.numel].view_as(parameter).clone()
            done += spec.numel
        self.optimizer.step()

    def replica(self, name: str) -> Replicated:
        """What all ranks hold alike."""
        parameter = self.parameters[name]
        state = self.optimizer.state.get(parameter, {})
        return Replicated(parameter.detach(), self.optimizer.param_groups[0], state, type(self.optimizer))

    def layers(self, flat: Tensor) -> Iterator[tuple[str, Tensor, ExchangeContext]]:
        """Name, part of `flat`, and moment of each parameter."""
        done = 0
        for spec in self.specs:
            part = Part(spec.name, spec.shape, 0, spec.numel)
            ctx = ExchangeContext(0, 0, 0, 1, parts=(part,), replicas=self.replica)
            yield spec.name, flat[done : done + spec.numel], ctx
            done += spec.numel

    def units(self, flat: Tensor, units: Sequence[Unit]) -> Iterator[tuple[str, Tensor, ExchangeContext]]:
        """The same of each unit."""
        for unit in units:
            ctx = ExchangeContext(0, unit.index, 0, 1, parts=unit.parts, replicas=self.replica)
            yield str(unit), flat[unit.start : unit.stop], ctx


def _flat(parameter: Tensor) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()).reshape(-1)


# -- sizes


class Tables:
    """The tables in use: one for everything, one per layer, and near's own per layer and per unit.

    near's count what it sends, as the recipe does.
    """

    def __init__(self) -> None:
        self.static = self.whole = CodeTable.prior()
        self.layers: dict[str, CodeTable] = {}
        self.near: dict[str, CodeTable] = {}

    def renew(self, training: Training, units: Sequence[Unit], gradient: Tensor) -> None:
        """Make all but the static one anew."""
        counts = {name: histogram(x, flush=True) for name, x, _at in training.layers(gradient)}
        self.layers = {name: CodeTable.from_histogram(each) for name, each in counts.items()}
        self.whole = CodeTable.from_histogram(torch.stack(list(counts.values())).sum(0))
        for name, x, ctx in (*training.layers(gradient), *training.units(gradient, units)):
            limits = thresholds(x.numel(), ctx)
            self.near[name] = CodeTable.from_histogram(histogram(x, limits, flush=bool(limits.any())))


class Libraries:
    """General compressors on the bytes of float32; zstd where the system has it."""

    def __init__(self, numel: int) -> None:
        self.zstd: dict[int, Zstd] = {}
        if ctypes.util.find_library("zstd") is None:
            print("libzstd is not installed (apt-get install libzstd1): zstd is left out")
        else:
            self.zstd = {level: Zstd({Zstd.LEVEL: level}, 4 * numel) for level in (1, 3)}

    def shares(self, gradient: Tensor) -> dict[str, float]:
        """Of 4 bytes, for each."""
        data = gradient.numpy().view(np.uint8)
        sizes = {"zlib 1": len(zlib.compress(data, 1))}
        sizes |= {f"zstd {level}": zstd.compress(data) for level, zstd in self.zstd.items()}
        return {name + SHARE: size / data.size for name, size in sizes.items()}


def by_unit(training: Training, units: Sequence[Unit], gradient: Tensor, tables: Tables) -> float:
    """Near-lossless bytes with the recipe's units and a table for each, as a share of float32's."""
    size = 0
    for name, x, ctx in training.units(gradient, units):
        limits = thresholds(x.numel(), ctx)
        table, flush = tables.near.get(name, tables.static), bool(limits.any())
        size += frame(x, limits, table, Key(0, 0, 0), explicit=False, flush=flush).numel()
    return size / (4 * gradient.numel())


def measured(training: Training, gradient: Tensor, tables: Tables) -> dict[str, float]:
    """The figures of one step; everything per element of the gradient."""
    sums: dict[str, float] = {}
    whole = torch.zeros(256, dtype=torch.int64)
    ratios = []

    def add(name: str, amount: float) -> None:
        sums[name] = sums.get(name, 0.0) + amount / gradient.numel()

    for name, x, ctx in training.layers(gradient):
        table, counts = tables.layers.get(name, tables.static), histogram(x, flush=True)
        whole += counts
        levels, limits = torch.empty(x.numel(), dtype=torch.uint8), thresholds(x.numel(), ctx)
        mantissa_levels(x, numerators(x.numel(), ctx), levels)
        modes = {"near": limits, "levels": levels, "lossless": 0, "truncate 18": 18}
        for mode, dropped in modes.items():
            explicit, flush = mode == "levels", mode != "lossless"
            fitting = tables.near.get(name, table) if mode == "near" else table
            data = frame(x, dropped, fitting, Key(0, 0, 0), explicit=explicit, flush=flush)
            add(mode + SHARE, data.numel() / 4)
        add("exponent bits, static", tables.static.bits(counts))
        add("exponent bits, dynamic", tables.whole.bits(counts))
        add("exponent bits, per layer", table.bits(counts))
        add("exponent entropy, per layer", _entropy(counts))
        for what, amount in _mantissas(x, levels, limits).items():
            add(what, amount)
        parameter = training.parameters[name].detach().reshape(-1)
        ratios.append((x.abs() / parameter.abs())[(x != 0) & (parameter != 0)])
    exponents = whole[1:].sort(descending=True).values
    sums["exponent entropy"] = _entropy(whole) / gradient.numel()
    sums["top 15 of exponents other than 0"] = float(exponents[:15].sum() / exponents.sum().clamp_min(1))
    sums["top 15 of exponents"] = float(whole.sort(descending=True).values[:15].sum() / whole.sum())
    sums["zeros"] = float(whole[0] / whole.sum())
    sums["gradient / parameter, median"] = float(torch.cat(ratios).median())
    return sums


def _entropy(counts: Tensor) -> float:
    """Bits of all symbols together."""
    share = counts[counts > 0].double() / counts.sum()
    return float(-(share * share.log2()).sum() * counts.sum())


def _mantissas(x: Tensor, levels: Tensor, limits: Tensor) -> dict[str, float]:
    """Bits of signs, mantissas and levels, by what is done to them (paper, section 7.4)."""
    there = x.abs() >= 2.0**-126
    single, last = torch.where(levels >= 12, 12, 0), torch.where(levels >= 18, 18, 0)
    exponents = (x.view(torch.int32) >> 23 & 255).short()
    finer = (limits.short() - exponents).clamp(0, MANTISSA)
    every, some = float(x.numel()), float(there.sum())
    sent = limits.short() - exponents < MANTISSA + 2
    return {
        "mantissa bits, whole": 24 * every,
        "mantissa bits, zeros pruned": 24 * some,
        "mantissa bits, one level of 12": 25 * every - float(single.sum()),
        "mantissa bits, one level of 18 (the paper's)": 25 * every - float(last.sum()),
        "mantissa bits, four levels": 26 * every - float(levels.sum()),
        "mantissa bits, four levels and zeros pruned": 26 * some - float(levels[there].sum()),
        "mantissa bits, thresholds": float((24 - finer)[there & sent].sum()),
    }


def sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, and code a gradient every so many steps."""
    training, tables, rows = Training(arguments), Tables(), []
    numel = sum(spec.numel for spec in training.specs)
    libraries, units = Libraries(numel), _flat_buffer(training, recipes.recipe("gcomp").build()).units
    for step in range(arguments.steps + 1):
        gradients, loss = training.gradients()
        if step % arguments.every == 0 and step:
            cut = {"near, as the recipe cuts it" + SHARE: by_unit(training, units, gradients[0], tables)}
            figures = cut | libraries.shares(gradients[0]) | measured(training, gradients[0], tables)
            rows.append({"step": step, "loss": loss, **figures})
            print(f"step {step}, loss {loss:.4f}", file=sys.stderr, flush=True)
        if Gcomp().renews(ExchangeContext(step, 0, 0, training.world)):
            tables.renew(training, units, gradients[0])
        training.apply(torch.stack(gradients).mean(0))
    columns = " | ".join(f"step {row['step']}" for row in rows)
    print(f"| {arguments.workload} | {columns} |")
    print("|---|" + "---|" * len(rows))
    for name in [each for each in rows[0] if each != "step"]:
        print(f"| {name} | {' | '.join(_figure(name, row[name]) for row in rows)} |")
    return {"rows": rows}


def _figure(name: str, amount: float) -> str:
    if name.endswith(SHARE) or name.startswith(("top 15", "zeros")):
        return f"{amount:.1%}"
    return f"{amount:.2f}" if "bits" in name or "entropy" in name else f"{amount:.4f}"


def picture_sizes(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Bytes of every mode over steps."""
    series = {
        mode: [(row["step"], row[mode + SHARE]) for row in found["rows"]]
        for mode in PICTURED
        if mode + SHARE in found["rows"][0]
    }
    path = arguments.pictures / f"gcomp-sizes-{arguments.workload}.svg"
    draw(path, series, "step", "share of 4 bytes per element")


# -- how far training strays


def carried(arguments: argparse.Namespace, text: str | None, seed: int) -> list[float]:
    """Losses of a training whose gradients are carried by a recipe, or exactly."""
    training = Training(arguments, seed)
    if text == START:
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    composition = None if text in (None, START) else recipes.recipe(text).build()
    flat_buffers = [_flat_buffer(training, composition) for _ in range(training.world)] if composition else []
    losses = []
    for step in range(arguments.steps):
        gradients, loss = training.gradients()
        losses.append(loss)
        mean = torch.stack(gradients).mean(0)
        if flat_buffers:
            mean = run_ranks(training.world, _ranks_step(training, flat_buffers, gradients, step))[0]
        training.apply(mean)
    return losses


def mean_of_eight(arguments: argparse.Namespace, seed: int) -> list[float]:
    """Losses of a training whose optimizer has the mean of eight steps' gradients in every eighth, and waits
    in the others."""
    training, losses, kept = Training(arguments, seed), [], list[Tensor]()
    for _ in range(arguments.steps):
        gradients, loss = training.gradients()
        losses.append(loss)
        kept.append(torch.stack(gradients).mean(0))
        if len(kept) == EVERY:
            training.apply(torch.stack(kept).mean(0))
            kept.clear()
    return losses


def alone(arguments: argparse.Namespace, seed: int) -> list[float]:
    """Losses of ranks that train alone, and have the mean of their parameters after every eighth step."""
    ranks, losses = [Training(arguments, seed) for _ in range(arguments.ranks)], []
    for step in range(1, arguments.steps + 1):
        here = []
        for rank, training in enumerate(ranks):
            gradient, loss = training.gradient(rank)
            training.apply(gradient)
            here.append(loss)
        losses.append(fmean(here))
        if step % EVERY == 0:
            with torch.no_grad():
                for same in zip(*(training.model.parameters() for training in ranks), strict=True):
                    mean = torch.stack(list(same)).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
    return losses


def _flat_buffer(training: Training, composition: Any) -> FlatBuffer:
    exchange = composition.exchange
    exchange = forget(exchange) if exchange.memory is None else exchange
    boundaries = replace(composition, exchange=exchange).boundaries(training.specs, training.world)
    return FlatBuffer(0, training.specs, exchange, boundaries, torch.device("cpu"))


def _ranks_step(
    training: Training, flat_buffers: list[FlatBuffer], gradients: list[Tensor], step: int
) -> Callable[[Comm], Tensor]:
    """What a rank does in a step."""
    return lambda comm: _step(training, flat_buffers[comm.rank], gradients[comm.rank], step, comm)


def _step(training: Training, flat_buffer: FlatBuffer, gradient: Tensor, step: int, comm: Comm) -> Tensor:
    mean = torch.zeros_like(gradient)
    flat_buffer.compensate(Gradients(gradient, flat_buffer.pieces), step, comm.world)
    for unit in flat_buffer.units:
        here = slice(unit.start, unit.stop)
        ctx = ExchangeContext(
            step,
            unit.index,
            comm.rank,
            comm.world,
            parts=unit.parts,
            unsent=flat_buffer.committed[UNSENT][here] if UNSENT in flat_buffer.committed else None,
            kept=flat_buffer.kept,
            replicas=training.replica,
        )
        if flat_buffer.exchange.rounds(unit.numel, flat_buffer.dtype, ctx):
            run(flat_buffer.exchange, flat_buffer.x[here], mean[here], comm, ctx)
    flat_buffer.commit(())
    return mean


def strays(arguments: argparse.Namespace) -> dict[str, Any]:
    """Mean distance of losses from those of exact means, and steps to the losses of exact training."""
    seeds = range(arguments.seeds)
    exact = [carried(arguments, None, seed) for seed in seeds]
    losses = {text: [carried(arguments, text, seed) for seed in seeds] for text in (*SETTINGS, START)}
    losses[MEAN] = [mean_of_eight(arguments, seed) for seed in seeds]
    losses[ALONE] = [alone(arguments, seed) for seed in seeds]
    apart = {
        text: [
            [abs(a - b) for a, b in zip(one, true, strict=True)]
            for one, true in zip(found, exact, strict=True)
        ]
        for text, found in losses.items()
    }
    away = {text: [fmean(each) for each in found] for text, found in apart.items()}
    reached = {
        text: [
            [first_reaching(one, true, share) for one, true in zip(found, exact, strict=True)]
            for share in SHARES
        ]
        for text, found in {"exact": exact, **losses}.items()
    }
    columns = " | ".join(f"steps to its loss after {share:.0%}" for share in SHARES)
    print(f"| {arguments.workload}, by | mean of loss − exact | of truncation's | {columns} |")
    print("|---|---|---|" + "---|" * len(SHARES))
    for text, found in reached.items():
        shown, share = distance(away[text], away[TRUNCATED]) if text in away else ("-", "-")
        print(f"| `{text}` | {shown} | {share} | {' | '.join(map(steps_text, found))} |", flush=True)
    return {"exact": exact, "losses": losses, "away": away, "apart": apart, "reached": reached}


def distance(away: Sequence[float], truncated: Sequence[float]) -> tuple[str, str]:
    """Mean over seeds with its standard error, and as a share of that of truncation."""
    if not all(map(isfinite, away)):
        return "diverged", "-"
    error = stdev(away) / len(away) ** 0.5 if len(away) > 1 else 0.0
    return f"{fmean(away):.2e} ± {error:.0e}", f"{fmean(away) / fmean(truncated):.1%}"


def steps_text(reached: Sequence[int | None]) -> str:
    """Mean over seeds; not reached by some seed is not reached.

    >>> steps_text([10, 13]), steps_text([10, None])
    ('11.5', 'not reached')
    """
    known = [each for each in reached if each is not None]
    return f"{fmean(known):.1f}" if len(known) == len(reached) else "not reached"


def first_reaching(losses: list[float], exact: list[float], share: float = 1.0) -> int | None:
    """After how many steps the mean of ten losses is as low as that of `exact` after this share of its steps.

    >>> first_reaching([3.0, 1.0, 1.0], [4.0, 3.0, 2.0, 2.0])  # of fewer than ten, all
    3
    """
    window, end = min(WINDOW, len(losses)), round(share * len(exact))
    final = fmean(exact[max(0, end - window) : end])
    means = (fmean(losses[step - window : step]) for step in range(window, len(losses) + 1))
    return next((window + k for k, mean in enumerate(means) if mean <= AS_LOW * final), None)


def picture_strays(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """How far losses are apart over steps, each point the mean of ten, with the first seed."""
    series = {
        text: [(end, fmean(first[end - WINDOW : end])) for end in range(WINDOW, len(first) + 1, WINDOW)]
        for text, (first, *_others) in found["apart"].items()
    }
    optimizer = f"-{arguments.by}" if arguments.by else ""
    path = arguments.pictures / f"gcomp-strays-{arguments.workload}{optimizer}.svg"
    draw(path, series, "step", "|loss − loss of exact means|, mean of 10 steps")


def main() -> None:
    """One part of the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("sizes", "strays"))
    parser.add_argument("--workload", default="chargpt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1, help="of `strays`")
    parser.add_argument("--by", choices=("adamw", "sgd"), help="optimizer, instead of the workload's own")
    parser.add_argument("--lr", type=float, default=3e-4, help="of `--by`")
    parser.add_argument("--tuned", type=int, default=0, help="steps of training before the model is tuned")
    parser.add_argument("--pictures", type=Path, help="folder")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = sizes(arguments) if arguments.part == "sizes" else strays(arguments)
    if arguments.pictures:
        (picture_sizes if arguments.part == "sizes" else picture_strays)(found, arguments)
    if arguments.json:
        options = {key: str(value) for key, value in vars(arguments).items()}
        arguments.json.write_text(json.dumps({**options, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
