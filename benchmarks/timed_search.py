"""How far above the best grouping does MergeComp's search end, when the steps that it times vary?

Random problems of `tests.support.planning_problems`: ready times, sizes, and costs at which everything
competes. A step takes the model's seconds (Wang et al. 2021, equation 7) times a normal number around 1.
Printed is by how much what the search keeps takes longer than the best of one and two groups, in the mean
over problems: where the cuts that it compares are neighbours, and where they lie an eighth and a quarter of
its bracket apart; with the steps that it has by default, and with 49; beside a cut at random.

    python -m benchmarks.timed_search [--problems 150] [--tensors 54 105] [--varies 0 0.01 0.03]
"""

import argparse
from random import Random
from statistics import fmean

from tests.support.planning_problems import all_groupings, backward, cost

from gradwire.control import timed_merge
from gradwire.control.timed_merge import MOST_STEPS, TimedMerge, timed_search
from gradwire.planning.cuts import Cuts
from gradwire.planning.facts import StepObservation
from gradwire.planning.merge import step_seconds

COLUMNS = {
    "neighbours": (0.0, MOST_STEPS),
    "an eighth apart": (0.125, MOST_STEPS),
    "a quarter apart": (0.25, MOST_STEPS),
    "an eighth apart, 49 steps": (0.125, 49),
}
"""Share of the bracket, and steps."""


def kept(merge: TimedMerge, seconds: dict[Cuts, float], varies: float, draw: Random) -> Cuts:
    """The grouping that stays at the end of a training."""
    now, age = Cuts(), 0
    for step in range(2 * MOST_STEPS):
        previous_s = seconds[now] * draw.gauss(1.0, varies) if age else 0.0
        trial, age = merge.observe(StepObservation(step, previous_s, compressed_s=0.0)), age + 1
        if trial is not None:
            now, age = trial.cuts, 0
            if trial.is_last:
                break
    return now


def excess(tensors: int, varies: float, steps: int, problems: int) -> tuple[float, float]:
    """Of what is kept, and of a cut at random: shares above the best, means over problems."""
    draw, found, at_random = Random(tensors), [], []
    for _ in range(problems):
        of = backward(draw, tensors)
        at = cost(draw, of)
        seconds = {cuts: step_seconds(of, cuts, at) for cuts in all_groupings(tensors, most=2)}
        best_s = min(seconds.values())
        found.append(
            seconds[kept(timed_search(tensors, most_steps=steps), seconds, varies, draw)] / best_s - 1
        )
        at_random.append(fmean(took_s for cuts, took_s in seconds.items() if cuts) / best_s - 1)
    return fmean(found), fmean(at_random)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=150)
    parser.add_argument("--tensors", type=int, nargs="+", default=[54, 105])
    parser.add_argument("--varies", type=float, nargs="+", default=[0.0, 0.01, 0.03])
    options = parser.parse_args()
    print(f"| tensors | steps vary by | {' | '.join(COLUMNS)} | a cut at random |")
    print("|---|---|" + "---|" * (len(COLUMNS) + 1))
    for tensors in options.tensors:
        for varies in options.varies:
            cells, at_random = [], 0.0
            for apart, steps in COLUMNS.values():
                timed_merge.APART = apart
                found, at_random = excess(tensors, varies, steps, options.problems)
                cells.append(f"{found:.2%}")
            print(f"| {tensors} | {varies:.0%} | {' | '.join(cells)} | {at_random:.1%} |", flush=True)


if __name__ == "__main__":
    main()
