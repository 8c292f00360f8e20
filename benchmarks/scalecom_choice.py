"""How much of the top-k do chunks hold, and what do ScaleCom's choice and its β cost in loss?

First the energy of the largest of every chunk, as a share of the energy of the exact top-k of as many
elements, layer by layer, on gradients of one rank, added up over 16 steps: for chunks of neighbours, of
elements that lie far apart, and of elements after a random permutation.

Then trainings of ranks in one process, from equal weights (`--train`). Figures are means over looks at the
first half of the steps after the dense start, and over ranks: the energy that a rank's choice sends of the
mean error-fed gradient, as a share of what the true top-k of each unit would; the Hamming distance of the two
choices; and the overlap of their histograms (Chen et al. 2020, "ScaleCom", figures 2b and 3). Losses are
those of the last tenth of the steps; "behind" is the mean difference to plain averages, seed by seed.

With `--figures` it is the paper's figures 2a to 2d and 3 over steps instead, each a mean over the looks
at a span of steps, and over ranks and seeds: learning rates, compression rates and samples per rank are the
paper's, the learning rate is constant, and nothing is dense at first. Figure A1 is how alike the quantiles of
two ranks' magnitudes are at step 100, as the share R² of a straight line. Networks without BatchNorm do not
train at the paper's learning rates; `--slower` divides them.

    python benchmarks/scalecom_choice.py [--workload convnet] [--rates 100 400] [--train] [--steps 200]
        [--seeds 2] [--recipes "scalecom(rate={rate}, warmup_steps={warm})" …]
    python benchmarks/scalecom_choice.py --figures 2a 2c 3 [--workload resnet_demo] [--steps 90] [--seeds 3]
    python benchmarks/scalecom_choice.py --figures A1 [--workload resnet_demo] [--seeds 3]
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch
from lockstep import Outcome, Ranks, Setting, spread, train
from same_loss import WORKLOADS, gap
from torch import Tensor

from gradwire.codec.select.rates import rated_top_k
from gradwire.memory import UNSENT
from gradwire.tools.diagnose import Diagnosis
from gradwire.unit.context import ExchangeContext
from gradwire_lab.workloads import catalogue

AT = ExchangeContext(step=0, unit=0, rank=0, world=1)
POINTS, ADDED, LOOKS = (32, 200), 16, 10
RECIPES = (
    "scalecom(rate={rate}, warmup_steps={warm})",
    "scalecom(rate={rate}, warmup_steps={warm}, keep=1)",
    "scalecom(rate={rate}, warmup_steps={warm}, keep=4)",
    "scalecom(rate={rate}, warmup_steps={warm}, beta=0.3)",
)


@dataclass(frozen=True)
class Shown:
    """A curve of one of the paper's figures: what chooses, on so many ranks, at which learning rate."""

    figure: str
    name: str
    world: int
    learning_rate: float


CHOOSING = {
    "local top-k, 0.1 %": "topk(ratio=0.001, fused=True)",
    "CLT-k, 0.1 %": "mergecomp(inner='leader_topk(ratio=0.001)', split='even', groups=1)",
    "CLT-k, 0.1 %, β = 0.1": "mergecomp(inner='leader_topk(ratio=0.001, beta=0.1)', split='even', groups=1)",
    "CLT-k, 400x": "mergecomp(inner='leader_topk(ratio=0.0025)', split='even', groups=1)",
    "CLT-k, 400x, by layer": "mergecomp(inner='scalecom(rate=400, warmup_steps=0)', split='layers')",
}
"""Of the whole gradient but for the last; the true top-k is that of the whole gradient, or of the layer."""
CURVES = (
    *(Shown("2a", "local top-k, 0.1 %", world, 0.01) for world in (2, 4, 8)),
    *(Shown("2c", "CLT-k, 0.1 %", 2, rate) for rate in (0.01, 0.3, 1.0)),
    *(Shown("2c", "CLT-k, 0.1 %, β = 0.1", 2, rate) for rate in (0.3, 1.0)),
    *(Shown("3", "CLT-k, 400x", world, 0.1) for world in (2, 4, 8)),
    Shown("3", "CLT-k, 400x, by layer", 4, 0.1),
)
SAMPLES, EVERY = 32, 5
"""Per rank, as in the paper; steps from one look to the next."""
SPANS = (0, 10, 30, 90, 180, 360, 720)


def of_neighbours(magnitudes: Tensor, rate: int, keep: int) -> Tensor:
    """The largest (n,) of each stretch of keep·rate elements."""
    chunks = magnitudes.split(rate * keep)
    return torch.cat([chunk.topk(min(keep, chunk.numel())).values for chunk in chunks])


def of_apart(magnitudes: Tensor, rate: int, keep: int) -> Tensor:
    """The largest of each of `RatedTopK`."""
    return magnitudes[rated_top_k(rate, keep=keep).select(magnitudes, AT)]


def of_permuted(magnitudes: Tensor, rate: int, keep: int) -> Tensor:
    """Of each stretch after a random permutation."""
    order = torch.randperm(magnitudes.numel(), generator=torch.Generator().manual_seed(0))
    return of_neighbours(magnitudes[order], rate, keep)


Choice = Callable[[Tensor, int, int], Tensor]
CHOICES: dict[str, tuple[Choice, int]] = {
    "neighbours, 1": (of_neighbours, 1),
    "neighbours, 4": (of_neighbours, 4),
    "neighbours, 64": (of_neighbours, 64),
    "permuted, 1": (of_permuted, 1),
    "apart, 1": (of_apart, 1),
    "apart, 4": (of_apart, 4),
}


def gradients(workload: str) -> Iterator[tuple[int, list[Tensor]]]:
    """(step, magnitudes (n,) of each layer that is compressed) of the last `ADDED` gradients, at `POINTS`."""
    work = catalogue.workload(workload, full=False)
    model = work.model(0)
    optimizer, batches = work.optimizer(model.parameters()), work.batches(0, 1, 0)
    layers = [p for p in model.parameters() if p.dim() > 1 and p.numel() >= 4096]
    sums: list[Tensor] = []
    for step in range(1, POINTS[-1] + 1):
        optimizer.zero_grad()
        work.loss(model, next(batches)).backward()
        own = [layer.grad.reshape(-1).clone() for layer in layers]
        at_last = min(point for point in POINTS if point >= step) - step < ADDED
        sums = [a + b for a, b in zip(sums, own, strict=True)] if at_last and sums else own
        if step in POINTS:
            yield step, [each.abs() for each in sums]
            sums = []
        optimizer.step()


def energies(workload: str, rates: Sequence[int]) -> None:
    """The first table."""
    print(f"{workload}\n\n| step, rate | {' | '.join(CHOICES)} |\n|---|{'---|' * len(CHOICES)}")
    for step, layers in gradients(workload):
        for rate in rates:
            cells = []
            for choose, keep in CHOICES.values():
                found = [choose(layer, rate, keep) for layer in layers]
                best = [layer.topk(one.numel()).values for layer, one in zip(layers, found, strict=True)]
                cells.append(sum(e.square().sum() for e in found) / sum(e.square().sum() for e in best))
            print(f"| {step}, {rate} | {' | '.join(f'{float(cell):.2f}' for cell in cells)} |", flush=True)


def row(text: str, outcomes: Sequence[Outcome], plain: Sequence[Outcome], warm: int) -> str:
    """One line of the second table."""
    early = [d for each in outcomes for d in each.diagnoses if warm <= d.step < len(each.losses) // 2 + warm]
    sent = fmean(energy_of(d) for d in early)
    hamming, overlap = fmean(d.hamming for d in early), fmean(d.histogram_overlap for d in early)
    apart, error = gap(outcomes, plain)
    shown = f"{sent:.2f} | {hamming:.2f} | {overlap:.0%}"
    return f"| `{text}` | {shown} | {spread([o.final_loss for o in outcomes])} | {apart:+.4f} ± {error:.4f} |"


def trainings(workload: str, rates: Sequence[int], recipes: Sequence[str], steps: int, seeds: int) -> None:
    """The second table."""
    world, batch, _usual = WORKLOADS[workload]
    warm, looks = steps // 10, steps // (2 * LOOKS)

    def trained(text: str) -> list[Outcome]:
        setting = Setting(workload, text, world, batch, steps, diagnose_every=looks)
        return [train(setting, seed) for seed in range(seeds)]

    plain = trained("")
    print(f"\n{workload}, {world} ranks, {steps} steps, {seeds} seeds; plain averages:")
    print(f"loss {spread([each.final_loss for each in plain])}\n")
    print("| recipe | energy of the true top-k | Hamming | overlap | loss | behind |")
    print("|---|---|---|---|---|---|")
    for rate in rates:
        for recipe in recipes:
            text = recipe.format(rate=rate, warm=warm, share=1 / rate)
            print(row(text, trained(text), plain, warm), flush=True)


def similar(options: argparse.Namespace) -> None:
    """The paper's figures, a line for each quantity of each curve."""
    workload, steps, seeds = options.workload, options.steps, range(options.seeds)
    work = catalogue.workload(workload, full=False)
    own = work.optimizer(work.model(0).parameters()).param_groups[0]["lr"]
    spans = [(low, high) for low, high in pairwise(SPANS) if high <= steps]
    columns = " | ".join(f"steps {low + 1} to {high}" for low, high in spans)
    examples = work.describe()["train_examples"]
    print(f"\n{workload}, {SAMPLES} samples per rank, {examples} in all, {len(seeds)} seeds\n")
    print(f"| figure | chosen by | ranks | of | {columns} |")
    print("|---|---|---|---|" + "---|" * len(spans))
    for curve in CURVES:
        if curve.figure in options.figures and curve.world in options.ranks:
            learning_rate = curve.learning_rate / options.slower
            scale = learning_rate / own
            text = CHOOSING[curve.name]
            setting = Setting(workload, text, curve.world, SAMPLES, steps, scale, EVERY, constant=True)
            outcomes = [train(setting, seed) for seed in seeds]
            head = f"| {curve.figure}, rate {learning_rate:g} | {curve.name} | {curve.world} |"
            for name, of in QUANTITIES.items():
                cells = [over(outcomes, of, *span) for span in spans]
                print(f"{head} {name} | {' | '.join(cells)} |", flush=True)
            losses = [fmean(fmean(each.losses[slice(*span)]) for each in outcomes) for span in spans]
            print(f"{head} loss | {' | '.join(f'{loss:.3f}' for loss in losses)} |", flush=True)


def magnitudes_at(setting: Setting, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of magnitudes (n,) in the last step of a training: what figure A1 compares."""
    before, found = [], {}

    def look(ranks: Ranks, gradients: Sequence[Tensor], mean: Tensor, number: int) -> None:
        memories = [flat_buffer.committed[UNSENT] for flat_buffer in ranks.flat_buffers]
        if number == setting.steps - 2:
            before[:] = [memory.clone() for memory in memories]
        elif number == setting.steps - 1:
            fed = torch.stack([one + gradient for one, gradient in zip(before, gradients, strict=True)])
            found["memories of two ranks"] = before[0].abs(), before[1].abs()
            found["gradients of two ranks"] = gradients[0].abs(), gradients[1].abs()
            found["a rank's error-fed gradient and the mean"] = fed[0].abs(), fed.mean(0).abs()

    train(setting, seed, look=look)
    return found


def correlation(one: Tensor, other: Tensor) -> float:
    """Pearson's. Its square is R², and that of ranks is Spearman's: ties are ranked by position."""
    return float(torch.corrcoef(torch.stack([one, other]).double())[0, 1])


def quantiles(options: argparse.Namespace) -> None:
    """The paper's figure A1: R² of sorted magnitudes, and Spearman's correlation, by rank."""
    work = catalogue.workload(options.workload, full=False)
    own = work.optimizer(work.model(0).parameters()).param_groups[0]["lr"]
    scale = 0.01 / options.slower / own
    setting = Setting(options.workload, CHOOSING["local top-k, 0.1 %"], 8, SAMPLES, 100, scale, constant=True)
    pairs = [magnitudes_at(setting, seed) for seed in range(options.seeds)]
    print(f"{options.workload}, 8 ranks of {SAMPLES} samples, step 100, {options.seeds} seeds\n")
    print("| magnitudes of | R² of the quantiles | Spearman |\n|---|---|---|")
    for name in pairs[0]:
        sorts = [correlation(*(each.sort().values for each in pair[name])) ** 2 for pair in pairs]
        ranked = [correlation(*(each.argsort().argsort() for each in pair[name])) for pair in pairs]
        print(f"| {name} | {spread(sorts)} | {spread(ranked)} |", flush=True)


QUANTITIES: dict[str, Callable[[Diagnosis], float]] = {
    "memories apart": lambda d: d.memory_distance,
    "Spearman": lambda d: d.spearman,
    "Hamming": lambda d: math.nan if d.hamming is None else d.hamming,
    "overlap": lambda d: math.nan if d.histogram_overlap is None else d.histogram_overlap,
    "energy of the true top-k": lambda d: energy_of(d),
}


def energy_of(seen: Diagnosis) -> float:
    """What a rank's choice sends of the mean's energy, as a share of what the true top-k would."""
    if seen.contraction is None or seen.best_contraction is None:
        return math.nan
    return (1.0 - seen.contraction) / max(1.0 - seen.best_contraction, 1e-30)


def over(outcomes: Sequence[Outcome], of: Callable[[Diagnosis], float], low: int, high: int) -> str:
    """Mean over the looks at steps `low` to `high`, with the standard error, if no loss is infinite."""
    looks = [[of(d) for d in each.diagnoses if low <= d.step < high] for each in outcomes]
    means = [fmean(each) for each in looks]
    lost = sum(not all(map(math.isfinite, each.losses[low:high])) for each in outcomes)
    return f"{lost} of {len(means)} diverged" if lost else spread(means, 2)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="convnet")
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--figures", nargs="+", choices=["A1", *sorted({each.figure for each in CURVES})])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="of `--figures`")
    parser.add_argument("--slower", type=float, default=1.0, help="divides the paper's learning rates")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.figures == ["A1"]:
        quantiles(options)
        return
    if options.figures:
        similar(options)
        return
    energies(options.workload, options.rates)
    if options.train:
        trainings(options.workload, options.rates, options.recipes, options.steps, options.seeds)


if __name__ == "__main__":
    main()
