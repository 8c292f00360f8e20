"""Pure functions from measured facts to a plan: numbers in, numbers out, no clock and no network."""

from gradwire.planning.calibrate import calibrated
from gradwire.planning.collectives import Transfer, fastest, time_of, total_time
from gradwire.planning.costs import Backward, CodecCost, Line, Link, Network
from gradwire.planning.cuts import even_cuts, fixed_cuts, layer_cuts, phased_cuts, ramped_cuts
from gradwire.planning.facts import Facts
from gradwire.planning.from_facts import step_from_facts
from gradwire.planning.gain import Magnitudes, gains
from gradwire.planning.groups import element_cuts, even_groups, layer_wise, units_between
from gradwire.planning.interval import interval_for
from gradwire.planning.layer_rates import RateRule, overall_rate
from gradwire.planning.merge import GroupCost, optimal_cuts, step_seconds
from gradwire.planning.merge_search import search_cuts
from gradwire.planning.merge_worker import moved_cuts, worker_cuts
from gradwire.planning.observed import Observed, Watched
from gradwire.planning.patterns import patterns_of
from gradwire.planning.predict import Prediction, Tail, UnitWork, predict
from gradwire.planning.ratio import Candidate, best_ratio, candidate_ratios
from gradwire.planning.shard import balanced_cuts, paper_cuts

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
