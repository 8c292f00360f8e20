"""What the runs of `lateness.py` say: tables, rank correlations and a picture of gap against lateness.

python benchmarks/lateness_table.py RUNS.jsonl [--picture PATH] [--summary PATH]
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from lateness import partly  # registers a recipe that runs may have  # noqa: F401

from gradwire.planning.lateness import Lateness, Weighed
from gradwire.recipes import recipe
from gradwire_lab.report import svg

SOON = (4, 8, 16, 24)
"""Steps after which lateness is told, too."""
FAMILIES = {
    "few bits": ("int8", "fp8", "int4", "truncate"),
    "choices": ("topk", "leader_topk", "scalecom"),
    "low rank": ("powersgd", "acpsgd"),
    "intervals": ("covap", "partly"),
}


Told = tuple[float | None, float | None, bool]
"""How late, what error, and whether that is known."""


def told(norms: dict[str, list[float]], cycle: int) -> list[Told]:
    """The package's own numbers before every step, from what all ranks said together. What is lost is
    averaged as what is unsent is.
    """
    seen: list[Told] = [(None, None, False)]
    lateness, error = Lateness(cycle), Lateness(cycle)
    for number in range(1, len(norms["fresh"])):
        # A look before a step's exchange finds what the step before has left, and not what led to it.
        fresh, unsent, lost = (norms[name][at] for name, at in looked(norms, number).items())
        lateness.add([Weighed(fresh, unsent)])
        error.add([Weighed(fresh, lost)])
        seen.append((lateness.late, error.late, lateness.is_known))
    return seen


def looked(norms: dict[str, list[float]], number: int) -> dict[str, int]:
    """The step to which each norm of a look belongs."""
    keeps = norms["unsent"][number - 1] > 0.0
    return {"fresh": number, "unsent": number - 1, "lost": number - 1 if keeps else number}


def summary(line: dict[str, Any]) -> dict[str, Any]:
    """One run in a few numbers."""
    kept = ("model", "recipe", "seed", "world", "optimizer", "steps", "part", "loss", "test_accuracy")
    found = {name: line[name] for name in kept}
    norms = line["norms"]
    if not norms["fresh"]:
        return found
    seen = told(norms, recipe(line["recipe"]).build().exchange.laws.cycle)
    late = [each for each, _error, _known in seen if each is not None]
    errors = [error for _late, error, _known in seen if error is not None]
    usual, usual_mean = median(norms["fresh"]), median(norms["mean_fresh"])
    numbers = {
        "late": median(late),
        "late_at_the_end": late[-1],
        **{f"late_after_{n}": seen[n][0] or 0.0 for n in SOON},
        "lost": median(errors),
        "late_mean": math.sqrt(fmean(x * x for x in norms["mean_unsent"])) / usual_mean,
        "error": fmean(norms["error"]) / usual_mean,
        "signal": ratio(norms["next_unsent"], norms["next_fresh"]),
        "progress": ratio(norms["next_sent"], norms["next_fresh"]),
        "noise": noise(norms, line["world"]),
        "worst": max(line["layers"]),
        "usual": usual,
    }
    return found | {name: float(f"{value:.4g}") for name, value in numbers.items()}


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Of sums."""
    return sum(above) / sum(below)


def noise(norms: dict[str, list[float]], world: int) -> float:
    """How far ranks' gradients are from their mean, beside that mean: of the middle step."""
    each = [
        math.sqrt(max(own * own / world - mean * mean, 0.0)) / mean
        for own, mean in zip(norms["fresh"], norms["mean_fresh"], strict=True)
    ]
    return median(each)


def paired(runs: Sequence[dict[str, Any]]) -> None:
    """Give every run the gap to plain averages of the same seed, in loss and in points of accuracy."""
    settings = ("model", "seed", "world", "optimizer", "steps")
    plain = {tuple(run[name] for name in settings): run for run in runs if not run["recipe"]}
    for run in runs:
        first = plain[tuple(run[name] for name in settings)]
        run["gap"] = run["loss"] - first["loss"]
        run["points"] = 100 * (run["test_accuracy"] - first["test_accuracy"])


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rank correlation; equal values share a rank."""
    left, right = ([fmean(n for n, y in enumerate(sorted(zs)) if y == z) for z in zs] for zs in (xs, ys))
    a, b = ([each - fmean(ranks) for each in ranks] for ranks in (left, right))
    norms = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else math.nan


def grouped(runs: Iterable[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """By what `names` say, in order of appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[tuple(run[name] for name in names)].append(run)
    return groups


def mean_of(runs: Sequence[dict[str, Any]], name: str) -> float:
    """Over seeds."""
    return fmean(run[name] for run in runs)


def said(values: Sequence[float], form: str = "+.3f") -> str:
    """Mean ± standard error."""
    if len(values) < 2:
        return f"{values[0]:{form}}"
    return f"{fmean(values):{form}} ± {stdev(values) / len(values) ** 0.5:{form.lstrip('+')}}"


COLUMNS = {
    "late": ".2f",
    "late_mean": ".2f",
    "lost": ".2f",
    "worst": ".2f",
    "signal": ".2f",
    "error": ".2f",
    "progress": ".2f",
    "noise": ".2f",
    **{f"late_after_{n}": ".2f" for n in SOON},
    "late_at_the_end": ".2f",
}
GAPS = {"gap": "+.4f", "points": "+.1f"}


def table(runs: Sequence[dict[str, Any]]) -> Iterable[str]:
    """One setting: a line per recipe, the latest last."""
    by_recipe = grouped(runs, "recipe")
    plain = by_recipe.pop(("",))
    losses, accuracies = ([run[name] for run in plain] for name in ("loss", "test_accuracy"))
    percent = said([100 * each for each in accuracies], ".1f")
    yield f"plain averages: loss {said(losses, '.3f')}, accuracy {percent} %"
    yield "| recipe | seeds | gap | points | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 4) + "|"
    for (text,), group in sorted(by_recipe.items(), key=lambda item: item[1][0].get("late", -1.0)):
        gap, points = (said([run[name] for run in group], form) for name, form in GAPS.items())
        numbers = [f"{mean_of(group, c):{form}}" if c in group[0] else "" for c, form in COLUMNS.items()]
        yield f"| `{text}` | {len(group)} | {gap} | {points} | {' | '.join(numbers)} |"


def remembers(run: dict[str, Any]) -> bool:
    """Whether its recipe keeps what it does not send."""
    return "late" in run and (run["late"] > 0.0 or run["recipe"].startswith("scalecom"))


def correlations(runs: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Of one setting: of the gap (means over seeds) with each number, with memories and with all."""
    lossy = [group for group in grouped(runs, "recipe").values() if "late" in group[0]]
    with_memory = [group for group in lossy if remembers(group[0])]
    for name in ("late", "late_mean", "worst", "signal", "error", "progress"):
        sign = -1 if name == "progress" else 1
        found = [
            spearman(
                [sign * mean_of(each, name) for each in groups], [mean_of(each, "gap") for each in groups]
            )
            for groups in (with_memory, lossy)
        ]
        yield f"| {name} | {found[0]:.2f} ({len(with_memory)}) | {found[1]:.2f} ({len(lossy)}) |"
    for family, names in FAMILIES.items():
        inside = [each for each in with_memory if each[0]["recipe"].partition("(")[0] in names]
        if len(inside) > 2:
            rho = spearman([mean_of(g, "late") for g in inside], [mean_of(g, "gap") for g in inside])
            yield f"| late, {family} | {rho:.2f} ({len(inside)}) | |"


# -- the picture

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640.0, 400.0, 64.0, 16.0, 32.0, 64.0
COLOURS = {"convnet": "#3465a4", "gpt": "#cc0000", "resnet": "#4e9a06"}
STYLE = (
    "<style>text{font:12px sans-serif;fill:#444}.grid{stroke:#ddd}"
    ".limit{stroke:#888;stroke-dasharray:4}</style>"
)
LEAST_LATE = 0.01
GRID = (-0.01, -0.003, 0.0, 0.003, 0.01, 0.03, 0.1, 0.3)


def root(gap: float) -> float:
    """A scale for small gaps, of either sign, beside large ones."""
    return math.copysign(math.sqrt(abs(gap)), gap)


def spanned(group: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The mean gap less and plus its standard error."""
    gaps = [run["gap"] for run in group]
    error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    return fmean(gaps) - error, fmean(gaps) + error


def picture(runs: Sequence[dict[str, Any]], limit: float) -> str:
    """Gap against lateness; a dot per recipe and model, the mean of its seeds, with its standard error."""
    groups = [g for g in grouped(runs, "model", "recipe").values() if remembers(g[0]) and mean_of(g, "late")]
    across = svg.Scale(math.log10(LEAST_LATE), math.log10(16.0), LEFT, WIDTH - RIGHT)
    gaps_of = [spanned(group) for group in groups]
    lowest, highest = min(low for low, _high in gaps_of), max(high for _low, high in gaps_of)
    up = svg.Scale(1.1 * root(lowest), 1.05 * root(highest), HEIGHT - BOTTOM, TOP)
    parts = [STYLE, '<rect width="100%" height="100%" fill="white"/>']
    for value in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0):
        x = across(math.log10(value))
        parts += [
            svg.line(x, up.start, x, up.stop, "grid"),
            svg.text(x, up.start + 16, f"{value:g}", "middle"),
        ]
    for value in (each for each in GRID if up.low <= root(each) <= up.high):
        y = up(root(value))
        parts += [svg.line(LEFT, y, across.stop, y, "grid"), svg.text(LEFT - 6, y + 4, f"{value:g}", "end")]
    parts.append(svg.line(across(math.log10(limit)), up.start, across(math.log10(limit)), up.stop, "limit"))
    for group in groups:
        x = across(math.log10(max(mean_of(group, "late"), LEAST_LATE)))
        colour = COLOURS[group[0]["model"]]
        low, high = (up(root(end)) for end in spanned(group))
        parts.append(svg.element("line", x1=x, y1=low, x2=x, y2=high, stroke=colour))
        title = svg.element("title", f"{group[0]['model']}: {group[0]['recipe']}")
        parts.append(
            svg.element("circle", title, cx=x, cy=up(root(mean_of(group, "gap"))), r=3.5, fill=colour)
        )
    for number, (name, colour) in enumerate(COLOURS.items()):
        parts.append(svg.element("circle", cx=LEFT + 16, cy=TOP + 12 + 18 * number, r=4, fill=colour))
        parts.append(svg.text(LEFT + 26, TOP + 16 + 18 * number, name))
    parts.append(svg.text((LEFT + across.stop) / 2, HEIGHT - 24, "late: steps' worth of gradient", "middle"))
    parts.append(svg.text(8, 16, "final training loss above plain averages"))
    drawn = svg.drawing(WIDTH, HEIGHT, parts, "loss above plain averages against lateness")
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def main() -> None:
    """Print the tables; draw on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--summary", type=Path, help="write one short line per run")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--limit", type=float, default=0.3, help="where the picture has a line")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.runs.read_text().splitlines()]
    runs = [line if "norms" not in line else summary(line) for line in lines]
    if options.summary is not None:
        options.summary.write_text("".join(json.dumps(run) + "\n" for run in runs))
    paired(runs)
    for (part, model), setting in grouped(runs, "part", "model").items():
        first = setting[0]
        ranks, by = first["world"], first["optimizer"] or "the usual optimizer"
        print(f"\n### {part}: {model}, {ranks} ranks, {by}, {first['steps']} steps\n")
        print("\n".join(table(setting)))
        print("\n| rank correlation with the gap | with a memory | all |\n|---|---|---|")
        print("\n".join(correlations(setting)))
    if options.picture is not None:
        base = [run for run in runs if run["part"] == "base"]
        options.picture.write_text(picture(base, options.limit) + "\n")


if __name__ == "__main__":
    main()
