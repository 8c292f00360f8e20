"""The ratio by NSGA-II through pymoo, as in "Flexible communication …" (Tyagi, Swany 2023, section 3-E).

Beside the exact sweep of `gradwire.planning.ratio`. The ratio is searched on a logarithmic scale.
"""

from __future__ import annotations

import math

import numpy as np
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.optimize import minimize
from pymoo.problems.functional import FunctionalProblem

from gradwire.planning.ratio import HIGHEST, LOWEST, Evaluate, RatioCandidate, knee, pareto_front

POPULATION, GENERATIONS = 40, 40


def genetic_ratio(evaluate: Evaluate, seed: int = 1) -> RatioCandidate:
    """The knee of the front that NSGA-II finds between the smallest and the largest candidate."""
    objectives = [lambda x, i=i: evaluate(math.exp(x[0])).objectives[i] for i in range(3)]
    bounds = np.array([math.log(LOWEST)]), np.array([math.log(HIGHEST)])
    problem = FunctionalProblem(1, objectives, xl=bounds[0], xu=bounds[1])
    found = minimize(problem, NSGA2(pop_size=POPULATION), ("n_gen", GENERATIONS), seed=seed)
    ratios = sorted((float(math.exp(x)) for x in np.ravel(found.X)), reverse=True)
    return knee(pareto_front([evaluate(ratio) for ratio in ratios]))
