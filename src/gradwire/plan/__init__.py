"""Pure functions from measured facts to a plan: numbers in, numbers out, no clock and no network."""

from gradwire.plan.calibrate import calibrated
from gradwire.plan.collectives import Transfer, fastest, time_of, total_time
from gradwire.plan.costs import Backward, CodecCost, Line, Link, Network
from gradwire.plan.cuts import even_cuts, fixed_cuts, layer_cuts, phased_cuts, ramped_cuts
from gradwire.plan.facts import Facts
from gradwire.plan.from_facts import step_from_facts
from gradwire.plan.gain import Magnitudes, gains
from gradwire.plan.groups import element_cuts, even_groups, layer_wise, units_between
from gradwire.plan.interval import interval_for
from gradwire.plan.layer_rates import RateRule, overall_rate
from gradwire.plan.merge import GroupCost, optimal_cuts, step_seconds
from gradwire.plan.merge_search import search_cuts
from gradwire.plan.merge_worker import moved_cuts, worker_cuts
from gradwire.plan.observed import Observed, Watched
from gradwire.plan.patterns import patterns_of
from gradwire.plan.predict import Prediction, Tail, UnitWork, predict
from gradwire.plan.ratio import Candidate, best_ratio, candidate_ratios
from gradwire.plan.shard import balanced_cuts, paper_cuts

__all__ = [
    "Backward",
    "Candidate",
    "CodecCost",
    "Facts",
    "GroupCost",
    "Line",
    "Link",
    "Magnitudes",
    "Network",
    "Observed",
    "Prediction",
    "RateRule",
    "Tail",
    "Transfer",
    "UnitWork",
    "Watched",
    "balanced_cuts",
    "best_ratio",
    "calibrated",
    "candidate_ratios",
    "element_cuts",
    "even_cuts",
    "even_groups",
    "fastest",
    "fixed_cuts",
    "gains",
    "interval_for",
    "layer_cuts",
    "layer_wise",
    "moved_cuts",
    "optimal_cuts",
    "overall_rate",
    "paper_cuts",
    "patterns_of",
    "phased_cuts",
    "predict",
    "ramped_cuts",
    "search_cuts",
    "step_from_facts",
    "step_seconds",
    "time_of",
    "total_time",
    "units_between",
    "worker_cuts",
]
