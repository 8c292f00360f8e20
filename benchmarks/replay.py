"""Would `auto` choose better if it corrected its predictions otherwise? Its choice replayed over a sweep.

Nothing is timed. A line of `benchmarks.sweep` has what `auto` predicted, what its trials measured, and what
recipes took in the race. From them the choice is made again, trial by trial, with predictions corrected in
different ways. Corrections that have a constant are fitted on one half of the settings; the table is of the
other half, and of all.

What the lines do not say is filled in:

- A recipe that ran neither on trial nor in the race takes what one did that sends alike, and as much more as
  it is predicted to. The machine was more or less busy in the race than before: what a trial would have
  measured is the race's time by the median ratio, in that setting, of recipes that ran in both.
- A recipe that did not run is as late as it was in other settings with real, or with random, gradients.
- Collectives and elements are counted in the layout that the model would have on that link.
- Steps count from their beginning: what precedes the backward pass is not known apart.
- Where a setting has a training, its ordinary steps tell how much steps vary; 3 % elsewhere.

The columns, in the mean over settings:

- error: how far the predictions of the recipes on trial were from what they took, |log| of the ratio;
- of what ran: how far that of the recipe that `auto` chose, if not dense, was from its steps in the race;
- predicted over measured: of the recipes on trial, the mean of logarithms;
- short: settings in which that recipe was predicted too short, or, if it is dense, those on trial;
- regret: the race's step of the recipe chosen in the replay, over that of the best within the limit, or DDP;
- worse: settings in which the choice is worse by more than 2 % than with predictions as they are.

    python -m benchmarks.replay benchmarks/results/sweep.jsonl [--seed 0] [--settings]
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from benchmarks.sweep import SETTINGS, Setting
from benchmarks.time_to_quality import read

from gradwire.control.forecast import ClusterForecasts
from gradwire.lab import emulate
from gradwire.lab.workloads import catalogue
from gradwire.planning.change_detection import error_of, noise_of
from gradwire.planning.choice import LATE, Comparison, Option
from gradwire.planning.cluster import Cluster
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Link
from gradwire.planning.profiler import DISCARDED, ORDINARY
from gradwire.recipes.auto import CANDIDATES
from gradwire.recipes.trial import COUNTED, MOST_TRIALS
from gradwire.step.flat_buffers import ParameterSpec, specs_of

GATHERED = "int4(collective='all_gather')"
LIKE = {
    "bf16": ("fp16",),
    "bf16(sum='fp32')": ("fp16",),
    "gcomp": ("fp16",),
    "fp8": ("int8",),
    "int8(collective='all_gather')": ("int8", GATHERED),
}
"""Recipes of the race that send like one that was not in it."""

CODEC_NS: Mapping[str, tuple[float, float]] = {
    "gcomp": (0.34, 0.0),
    "fp16": (0.41, 0.18),
    "bf16": (0.38, 0.19),
    "bf16(sum='fp32')": (0.65, 0.20),
    "int8": (1.31, 0.21),
    "int8(collective='all_gather')": (1.45, 0.13),
    "fp8": (2.48, 0.34),
    "int4": (2.25, 0.33),
    GATHERED: (1.83, 0.31),
}
"""Nanoseconds to encode an element and to decode one, alone on a core: AMD EPYC, 27 November 2026."""

NOISE = 0.03
"""The relative standard deviation of steps where no training tells it."""

WORSE = 0.02


@dataclass(frozen=True)
class Case:
    """One setting: the comparison as `auto` had it, and what all recipes take and how late they are."""

    name: str
    before: Comparison
    trial_s: Mapping[str, float]
    race_s: Mapping[str, float]
    late: Mapping[str, float]
    settled: Mapping[str, bool]
    tried: Sequence[str]
    chosen: str
    auto_s: float
    """A step of `auto` in the race."""
    codec_s: Mapping[str, float]
    shared: float
    """Ranks per core."""

    @property
    def best_s(self) -> float:
        """The least time of a step, of recipes within the limit and dense."""
        within = [name for name, late in self.late.items() if late <= LATE]
        return min(self.race_s[name] for name in ("dense", *within))


Correct = Callable[[Case, Comparison], Comparison]
"""Gives options that have not been tried other predictions."""


def as_they_are(_case: Case, comparison: Comparison) -> Comparison:
    """No correction but that of `Comparison` itself."""
    return comparison


def _predicting(comparison: Comparison, seconds: Callable[[Option], float]) -> Comparison:
    """With other predictions, none of which is below the step without communication, or what it was."""
    options = [
        replace(each, predicted_s=max(seconds(each), min(each.predicted_s, comparison.backward_s)))
        for each in comparison.options
    ]
    return replace(comparison, options=tuple(options))


def _dense_off(comparison: Comparison) -> tuple[float, float]:
    """Of dense, what was measured over what was predicted, and less it."""
    assert comparison.dense_predicted_s is not None, "a line has it"
    predicted_s = comparison.dense_predicted_s
    return comparison.dense_s / predicted_s, comparison.dense_s - predicted_s


def by_ratio(_case: Case, comparison: Comparison) -> Comparison:
    """Times what dense took over its own prediction."""
    ratio, _ = _dense_off(comparison)
    return _predicting(comparison, lambda each: ratio * each.predicted_s)


def by_ratio_if_longer(_case: Case, comparison: Comparison) -> Comparison:
    """The same where dense took longer than predicted."""
    ratio, _ = _dense_off(comparison)
    return _predicting(comparison, lambda each: max(ratio, 1.0) * each.predicted_s)


def by_bytes(_case: Case, comparison: Comparison) -> Comparison:
    """As much longer per byte sent as dense took longer than predicted."""
    _, off_s = _dense_off(comparison)
    return _predicting(
        comparison, lambda each: each.predicted_s + off_s * each.wire_bytes / comparison.dense_bytes
    )


def by_exposed(_case: Case, comparison: Comparison) -> Comparison:
    """What communication adds, times what it added to dense over what it was predicted to, if above 1."""
    assert comparison.dense_predicted_s is not None, "a line has it"
    alone_s = comparison.backward_s
    predicted_s = max(comparison.dense_predicted_s - alone_s, 1e-9)
    times = max((comparison.dense_s - alone_s) / predicted_s, 1.0)
    return _predicting(
        comparison, lambda each: each.predicted_s + (times - 1.0) * max(each.predicted_s - alone_s, 0.0)
    )


def by_codec(slowed: float, case: Case, comparison: Comparison) -> Comparison:
    """Codecs take `slowed` times as long for each rank that shares a core, beside what was predicted."""
    return _predicting(
        comparison,
        lambda each: each.predicted_s + slowed * case.shared * case.codec_s[each.recipe],
    )


def by_bytes_and_codec(slowed: float, case: Case, comparison: Comparison) -> Comparison:
    """Both."""
    return by_codec(slowed, case, by_bytes(case, comparison))


def by_constant(times: float, _case: Case, comparison: Comparison) -> Comparison:
    """Times one number for all settings."""
    return _predicting(comparison, lambda each: times * each.predicted_s)


class Replayed(NamedTuple):
    """The recipe that was chosen, and those that were tried before."""

    chosen: str
    tried: tuple[str, ...]


def replayed(case: Case, correct: Correct) -> Replayed:
    """The choice, trial by trial."""
    comparison = correct(case, case.before)
    tried: list[str] = []
    while len(tried) < MOST_TRIALS and (following := comparison.next_trial()) is not None:
        name = following.recipe
        tried.append(name)
        took_s = case.trial_s[name]
        late = 0.0 if case.late[name] == 0.0 else case.late[name]
        error_s = took_s * error_of(case.before.noise, COUNTED)
        comparison = comparison.after_trial(
            name, took_s, late, settled=case.settled.get(name, True), error_s=error_s
        )
    best = comparison.best()
    return Replayed("dense" if best is None else best.recipe, tuple(tried))


def errors(case: Case, correct: Correct) -> dict[str, float]:
    """Logarithms of predicted over measured times, by recipe on trial in the sweep."""
    corrected = correct(case, case.before)
    return {name: log(corrected.option(name).predicted_s / case.trial_s[name]) for name in case.tried}


def cases(lines: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Of all settings in a file."""
    known = {each.name: each for each in SETTINGS}
    rows = [line for line in lines if "setting" in line]
    typical: dict[tuple[bool, str], list[float]] = {}
    for line in rows:
        for row in line["choices"]:
            if row["late"] is not None and row["recipe"] != "dense":
                typical.setdefault((bool(line["seeds"]), row["recipe"]), []).append(row["late"])
    usual = {key: median(values) for key, values in typical.items()}
    return [_case(known[line["setting"]], line, usual) for line in rows]


def _case(setting: Setting, line: Mapping[str, Any], usual: Mapping[tuple[bool, str], float]) -> Case:
    by_name = {row["recipe"]: row for row in line["choices"]}
    dense = by_name.pop("dense")
    compute_s = dense["share_of_linear"] * dense["measured_step_s"]
    predicted_s = {name: row["predicted_step_s"] for name, row in by_name.items()}
    tried = {name: row["measured_step_s"] for name, row in by_name.items() if row["measured_step_s"]}
    race_s = {name: line["step_s"][name] for name in ("fp16", "int8", "int4", GATHERED)}
    race_s["dense"] = fmean(line["step_s"][name] for name in ("ddp", "ddp again"))
    both = [race_s[name] / took_s for name, took_s in tried.items() if name in race_s]
    busier = median([*both, race_s["dense"] / dense["measured_step_s"]])
    if line["chosen"] not in race_s:
        race_s[line["chosen"]] = line["step_s"]["auto"]
    for name in predicted_s:
        if name not in race_s:
            like = [race_s[one] + predicted_s[name] - predicted_s[one] for one in LIKE[name]]
            race_s[name] = busier * tried[name] if name in tried else fmean(like)
    work = _work(setting, compute_s)
    dense_bytes = dense["wire_bytes"]
    steps_s = line["seeds"][0]["step_s"][DISCARDED : DISCARDED + ORDINARY] if line["seeds"] else []
    noise = noise_of(steps_s) if steps_s else NOISE
    options = tuple(
        Option(
            name,
            name,
            predicted_s[name],
            by_name[name]["wire_bytes"],
            CANDIDATES[name],
            calls=work[name].calls,
        )
        for name in predicted_s
    )
    before = Comparison(
        options,
        0.0,
        compute_s,
        dense["measured_step_s"],
        dense_bytes,
        dense["predicted_step_s"],
        dense["measured_step_s"] * error_of(noise, ORDINARY),
        noise=noise,
    )
    real = bool(line["seeds"])
    late = {
        name: row["late"] if row["late"] is not None else usual.get((real, name), CANDIDATES[name])
        for name, row in by_name.items()
    }
    return Case(
        line["setting"],
        before,
        {name: tried.get(name, race_s[name] / busier) for name in predicted_s},
        race_s,
        {name: each if CANDIDATES[name] >= 0.01 else 0.0 for name, each in late.items()},
        {name: row["verdict"] != "its lateness still rose" for name, row in by_name.items()},
        tuple(tried),
        line["chosen"],
        line["step_s"]["auto"],
        {name: each.codec_s for name, each in work.items()},
        setting.workers / line["machine"]["cores"],
    )


class Work(NamedTuple):
    """Collectives of a step, and seconds of its codec alone on a core."""

    calls: float
    codec_s: float


@cache
def _specs(workload: str) -> tuple[ParameterSpec, ...]:
    return specs_of(catalogue.workload(workload).model(seed=0))


def _work(setting: Setting, compute_s: float) -> dict[str, Work]:
    """By recipe, cut as it would be on that link."""
    specs = _specs(setting.workload)
    numel = tuple(spec.numel for spec in specs)
    ready_s = tuple(compute_s * (place + 1) / len(numel) for place in range(len(numel)))
    backward = BackwardTiming(0.0, ready_s, numel, compute_s)
    rate = emulate.parse_rate(setting.rate)
    link = Link(max(emulate.parse_delay(setting.delay), 1e-4), 8.0 / rate if rate else 1e-10)
    world = setting.nodes or setting.workers
    forecasts, found = ClusterForecasts(specs, backward, Cluster(world, link)), {}
    for name, (encode_ns, decode_ns) in CODEC_NS.items():
        codec = CodecCost(Line(0.0, 1e-9 * encode_ns), Line(0.0, 1e-9 * decode_ns))
        _, cut = forecasts.as_cut(name, codec)
        found[name] = Work(cut.calls, cut.coded_s * world / setting.workers)
    return found


def halves(all_cases: Sequence[Case], seed: int) -> tuple[list[Case], list[Case]]:
    """One half to fit by, and the one that is held back."""
    mixed = random.Random(seed).sample(list(all_cases), len(all_cases))
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]


def fitted(
    make: Callable[[float], Correct], values: Sequence[float], fit: Sequence[Case]
) -> tuple[float, Correct]:
    """The correction with the constant that errs least."""
    best = min(values, key=lambda value: mean_error(fit, make(value)))
    return best, make(best)


def mean_error(some: Sequence[Case], correct: Correct) -> float:
    """Mean over settings of the mean |log| over their recipes."""
    return fmean(fmean(map(abs, errors(case, correct).values())) for case in some if case.tried)


def corrections(fit: Sequence[Case]) -> dict[str, Correct]:
    """All that are compared, by a name for the table."""
    tenths = [0.1 * tenth for tenth in range(121)]
    times, constant = fitted(
        lambda value: partial(by_constant, value), [1.0 + each / 10 for each in tenths], fit
    )
    slowed, codec = fitted(lambda value: partial(by_codec, value), tenths, fit)
    beside, both = fitted(lambda value: partial(by_bytes_and_codec, value), tenths, fit)
    return {
        "as they are": as_they_are,
        "times dense's ratio": by_ratio,
        "times dense's ratio, if above 1": by_ratio_if_longer,
        "dense's error per byte": by_bytes,
        "dense's ratio of what is exposed": by_exposed,
        f"codecs slowed, {slowed:.1f} per rank and core": codec,
        f"per byte, and codecs slowed by {beside:.1f}": both,
        f"times {times:.2f}": constant,
    }


def regret(case: Case, correct: Correct) -> float:
    """Of the recipe that is chosen."""
    return case.race_s[replayed(case, correct).chosen] / case.best_s


def row(name: str, some: Sequence[Case], correct: Correct) -> str:
    """A line of the table."""
    off = [errors(case, correct) for case in some if case.tried]
    short = [
        each for case, each in zip((c for c in some if c.tried), off, strict=True) if _is_short(case, each)
    ]
    regrets = [regret(case, correct) for case in some]
    now = [regret(case, as_they_are) for case in some]
    worse = sum(one > (1.0 + WORSE) * other for one, other in zip(regrets, now, strict=True))
    trials = fmean(len(replayed(case, correct).tried) for case in some)
    ran = [
        abs(correct(case, case.before).option(case.chosen).predicted_s / case.auto_s - 1.0)
        for case in some
        if case.chosen != "dense"
    ]
    signed = exp(fmean(fmean(each.values()) for each in off))
    return (
        f"| {name} | {exp(mean_error(some, correct)) - 1.0:.1%} | {fmean(ran):.1%} | {signed:.2f} "
        f"| {len(short)} of {len(off)} "
        f"| {fmean(regrets):.3f} | {max(regrets):.3f} | {worse} | {trials:.1f} |"
    )


def _is_short(case: Case, off: Mapping[str, float]) -> bool:
    return (off[case.chosen] if case.chosen in off else fmean(off.values())) < 0.0


def table(some: Sequence[Case], ways: Mapping[str, Correct]) -> str:
    """A row for each correction."""
    return "\n".join(
        [
            "| predictions | error | of what ran | predicted over measured | short | regret | at worst "
            "| worse | trials |",
            "|---|---|---|---|---|---|---|---|---|",
            *(row(name, some, correct) for name, correct in ways.items()),
        ]
    )


def by_setting(some: Sequence[Case], ways: Mapping[str, Correct]) -> str:
    """What each correction would choose in each setting."""
    lines = []
    for case in some:
        lines.append(f"{case.name}: chose {case.chosen}, tried {', '.join(case.tried) or 'none'}")
        for name, correct in ways.items():
            again = replayed(case, correct)
            lines.append(f"    {name}: {again.chosen} {regret(case, correct):.3f} ({', '.join(again.tried)})")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="splits the settings into halves")
    parser.add_argument("--settings", action="store_true", help="also what is chosen in each setting")
    options = parser.parse_args()
    torch.manual_seed(0)
    every = cases(read(options.file))
    fit, held_back = halves(every, options.seed)
    ways = corrections(fit)
    print(f"The half to fit by, {len(fit)} settings\n\n{table(fit, ways)}\n")
    print(f"The half that is held back, {len(held_back)} settings\n\n{table(held_back, ways)}\n")
    print(f"All {len(every)} settings\n\n{table(every, ways)}")
    if options.settings:
        print(f"\n{by_setting(every, ways)}")


if __name__ == "__main__":
    main()
