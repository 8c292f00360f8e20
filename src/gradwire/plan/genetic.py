"""The ratio by NSGA-II through pymoo, as in "Flexible communication …" (Tyagi, Swany 2024, section 3-E).

For comparison with the exact sweep of `ratio.py`: `pip install gradwire[nsga2]`. The ratio is searched on a
logarithmic scale.
"""

from __future__ import annotations

import math

import numpy as np

from gradwire.plan.ratio import HIGHEST, LOWEST, Candidate, Evaluate, knee, pareto_front


def genetic_ratio(
    evaluate: Evaluate,
    low: float = LOWEST,
    high: float = HIGHEST,
    *,
    population: int = 40,
    generations: int = 40,
    seed: int = 1,
) -> Candidate:
    """The knee of the front that NSGA-II finds between `low` and `high`; `ImportError` without pymoo."""
    front = genetic_front(evaluate, low, high, population=population, generations=generations, seed=seed)
    return knee(front)


def genetic_front(
    evaluate: Evaluate, low: float, high: float, *, population: int, generations: int, seed: int
) -> list[Candidate]:
    """The front that NSGA-II finds."""
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.optimize import minimize
    from pymoo.problems.functional import FunctionalProblem

    objectives = [lambda x, i=i: evaluate(math.exp(x[0])).objectives[i] for i in range(3)]
    bounds = np.array([math.log(low)]), np.array([math.log(high)])
    problem = FunctionalProblem(1, objectives, xl=bounds[0], xu=bounds[1])
    found = minimize(problem, NSGA2(pop_size=population), ("n_gen", generations), seed=seed)
    ratios = sorted((float(math.exp(x)) for x in np.ravel(found.X)), reverse=True)
    return pareto_front([evaluate(ratio) for ratio in ratios])
