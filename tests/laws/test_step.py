"""The three laws, and what rides with them, through whole steps of the reducer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence, Set
from random import Random

import torch
from torch import Tensor

from gradwire import recipes
from gradwire.codec.cast import cast
from gradwire.comm import Comm, run_ranks
from gradwire.exchange.compose import Scheme, remember
from gradwire.exchange.payloads import reduce
from gradwire.kernels.range import LARGEST_GRADIENT
from gradwire.memory import MOMENTUM, UNSENT, Residual
from gradwire.recipes import Composition
from gradwire.recipes.dense import dense
from gradwire.recipes.flush import flushing
from gradwire.step.history import History
from gradwire.unit.context import Fates
from tests.laws.pairwise import all_pairs
from tests.support.bits import global_generators
from tests.support.depth import FEW, FULL, seed
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, FORGETTING, REMEMBERING, kind
from tests.support.rig import BUCKETS, NAMES, REVERSED, Outcome, Rig, flat, gradients

WORLDS = (1, 2, 3, 4, 5, 7)
SEVERAL = 389 if FULL else 1000
"""Elements of a unit where there are several: 19 or 8 in the flat buffer, which begin and end within
parameters."""

UNITS = (None, 1000, 389) if FULL else (None, SEVERAL)
STEPS = 4

EPS = {
    "fp16": torch.finfo(torch.float16).eps,
    "bf16": torch.finfo(torch.bfloat16).eps,
    "bf16, summed in fp32": torch.finfo(torch.bfloat16).eps,
}
"""Recipes that round without remembering: every payload and the sum of W of them are rounded once each."""


every_recipe = functools.partial(looped, "name", by=kind, few=1)


def _cases() -> list[tuple[str, int, str, int | None]]:
    levels = (tuple(EVERY_RECIPE), WORLDS, tuple(BUCKETS), UNITS)
    if FULL:
        return list(itertools.product(*levels))
    if not FEW:
        return [tuple(row) for row in all_pairs(levels, seed())]
    # Every recipe once, in settings in which any two values meet.
    names, others = list(EVERY_RECIPE), all_pairs(levels[1:], seed())
    Random(seed()).shuffle(names)
    return [(name, *row) for name, row in zip(names, itertools.cycle(others), strict=False)]


def _run(
    name: str, world: int, buckets: Sequence[Sequence[str]], unit_elements: int | None
) -> list[list[Outcome]]:
    """Outcomes by rank and step; an outcome carries the memory after it."""

    def rank(comm: Comm) -> list[Outcome]:
        rig = Rig(comm, EVERY_RECIPE[name], unit_elements=unit_elements)
        return [rig.step(gradients(comm.rank, step), buckets) for step in range(STEPS)]

    return run_ranks(world, rank)


@functools.cache
def _memory(name: str) -> Residual:
    built = recipes.recipe(EVERY_RECIPE[name]).build()
    exchange = getattr(built, "exchange", None)
    memory = exchange.memory if isinstance(exchange, Scheme) else None
    return memory if isinstance(memory, Residual) else Residual()


def _average(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).mean(0)


def _missing(name: str, step: int, outcomes: list[list[Outcome]]) -> Tensor:
    """What is left of avg(c·memory + gradient) − mean − avg(memory afterwards), in float64."""
    coefficient = _memory(name).coefficient(step)
    given, kept = [], []
    for rank, of_rank in enumerate(outcomes):
        grads = gradients(rank, step)
        nothing = {parameter: torch.zeros_like(grads[parameter]) for parameter in NAMES}
        before = nothing | (of_rank[step - 1].memory if step else {})
        after = nothing | of_rank[step].memory
        given.append(flat(grads) + coefficient * flat(before))
        kept.append(flat(after))
    return _average(given) - outcomes[0][step].flat() - _average(kept)


@looped(("name", "world", "buckets", "unit_elements"), _cases(), by=lambda row: kind(row[0]))
def test_a_step_agrees_conserves_and_costs_what_it_predicts(
    name: str, world: int, buckets: str, unit_elements: int | None
) -> None:
    generators = global_generators()
    outcomes = _run(name, world, BUCKETS[buckets], unit_elements)
    assert global_generators() == generators, "what the user draws depends on no recipe"
    # A compensation, W products and W sums, each rounded once, of numbers below 32.
    tolerance = 32 * (2 * world + 3) * EPS.get(name, torch.finfo(torch.float32).eps)
    for step in range(STEPS):
        here = [of_rank[step] for of_rank in outcomes]
        assert [outcome.error for outcome in here] == [None] * world
        assert all(outcome.step.committed for outcome in here)
        assert all(torch.equal(outcome.flat(), here[0].flat()) for outcome in here), "consensus"
        if name in FORGETTING:
            continue
        assert _missing(name, step, outcomes).abs().max() <= tolerance, "conservation"
        assert all(outcome.step.sent.metered_bytes == outcome.step.sent.predicted_bytes for outcome in here)


COEFFICIENTS = {"covap": 0.5, "covap, paper's sharding": 0.5, "sparseloco": 0.95}
"""Factors on the memory in the first fifty steps, as their papers have them; of all others it is 1."""
BALANCED = [name for name in REMEMBERING if name not in ("dgc, momentum", "signum")]
"""Those that send the gradient itself, and no momentum of it."""
NOBODY: Mapping[int, Set[str]] = {}
VARIANTS = {"flat": {}, "committed late": {"commits": "late"}, "nodes": {"per_node": 2}}


def _balance(name: str) -> str:
    """By which memory and exchange what is sent and what is owed add up."""
    return f"{kind(name)}, {'low pass' if 'beta' in EVERY_RECIPE[name] else 'residual'}"


@looped(
    ("name", "variant"),
    itertools.product(BALANCED, VARIANTS),
    by=lambda row: _balance(row[0]) if FEW else f"{_balance(row[0])}, {row[1]}",
    few=1,
)
def test_means_and_a_flush_add_up_to_the_gradients_whatever_happens_in_between(
    name: str, variant: str
) -> None:
    """No memory is asked for what it holds. What is owed follows from gradients and means alone.

    In between are another loss scale in each exchange, parameters without a gradient, a step that is not
    finite, one that is left out, and two exchanges for one step.
    """
    world, coefficient, everyone = 4, COEFFICIENTS.get(name, 1.0), frozenset(NAMES)
    left_out, waits = Fates(dropped=everyone, made=False), Fates(open=everyone, made=False)
    # Where a single rank has no gradient, it keeps its memory without the factor.
    rests = frozenset[str]() if coefficient < 1.0 else frozenset({"middle.weight"})

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        scale, owed = 1.0, dict.fromkeys(NAMES, torch.zeros(()))
        options = {"unit_elements": SEVERAL, "loss_scale": lambda: scale, **VARIANTS[variant]}
        rig = Rig(comm, EVERY_RECIPE[name], **options)

        def exchange(
            number: int,
            loss_scale: float,
            fates: Fates | None = None,
            idle: Mapping[int, Set[str]] = NOBODY,
        ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            """The mean of all ranks' gradients, and the one that came. `idle` are parameters by rank."""
            nonlocal scale
            scale = loss_scale
            of_ranks = [gradients(each, number) for each in range(world)]
            for each, parameters in idle.items():
                for parameter in parameters:
                    of_ranks[each][parameter].zero_()
            outcome = rig.step({each: scale * grad for each, grad in of_ranks[comm.rank].items()})
            assert outcome.error is None
            if fates is not None:
                rig.reducer.catch_up(fates)
            came = {each: _average([grads[each] for grads in of_ranks]) for each in NAMES}
            return came, {each: mean.double() / scale for each, mean in outcome.mean.items()}

        def add(came: dict[str, Tensor], sent: dict[str, Tensor], factor: float = coefficient) -> None:
            for each in NAMES:
                left = factor * owed[each] if came[each].any() else owed[each]
                owed[each] = left + came[each] - sent[each]

        add(*exchange(0, 1.0))
        add(*exchange(1, 2.0**10, idle=dict.fromkeys(range(world), frozenset(["first.weight"]))))
        exchange(2, 2.0**127, left_out)  # overflows
        add(*exchange(2, 2.0**11, idle={0: rests}))
        exchange(3, 2.0**11, left_out)
        # Momentum, even of 0, may not be entered twice in a step.
        add(*exchange(3, 2.0**9, None if name == "dgc" else waits))
        add(*exchange(4, 2.0**13, Fates()))
        rig.reducer.install(flushing(dense()))
        add(*exchange(5, 2.0**8), factor=1.0)
        came, sent = exchange(6, 1.0)
        return flat(owed), flat(came) - flat(sent)

    # Six exchanges: compensation, sums and products of each as in a single step.
    tolerance = 6 * 32 * (2 * world + 3) * torch.finfo(torch.float32).eps
    for owed, more in run_ranks(world, rank):
        assert owed.abs().max() <= tolerance, "late, not lost"
        assert more.abs().max() <= tolerance, "and sent once"


@functools.cache
def _unsent(name: str, world: int) -> dict[str, int]:
    """Per parameter with memory, an element whose gradient the first step leaves unsent, by a clean run."""
    outcomes = [of_rank[0] for of_rank in _run(name, world, REVERSED, SEVERAL)]
    found = {}
    for parameter in outcomes[0].memory:
        kept = torch.stack([outcome.memory[parameter] for outcome in outcomes]).ne(0).all(0)
        if kept.any():  # dgc keeps the momentum of what is tiny, and nothing that is unsent
            found[parameter] = int(kept.nonzero()[0])
    assert found, "the case is chosen so that something stays behind"
    return found


BAD = list(itertools.product((torch.nan, torch.inf), (2, 3))) if FULL else [(torch.nan, 3), (torch.inf, 2)]


@every_recipe(REMEMBERING)
@looped(("bad", "world"), BAD)
def test_what_is_not_finite_on_one_rank_reaches_all_and_leaves_no_trace(
    name: str, world: int, bad: float
) -> None:
    spots = {**_unsent(name, world), "last.bias": 3, "scalar": 0}

    def rank(comm: Comm) -> None:
        # Two clean steps, then a bad one in each of the spots, then the clean step again.
        rig = Rig(comm, EVERY_RECIPE[name], unit_elements=SEVERAL)
        clean = Rig(comm, EVERY_RECIPE[name], unit_elements=SEVERAL)
        for step in range(2):
            rig.step(gradients(comm.rank, step))
            clean.step(gradients(comm.rank, step))
        for parameter, element in spots.items():
            before, plan, number = rig.planes, rig.reducer.fingerprint, rig.reducer.step
            grads = gradients(comm.rank, 2)
            if comm.rank == world - 1:
                grads[parameter][element] = bad
            outcome = rig.step(grads)
            assert outcome.error is None
            assert not outcome.step.committed
            assert not any(
                outcome.mean[each].isfinite().any() for each in NAMES if outcome.mean[each].numel()
            )
            assert (rig.reducer.fingerprint, rig.reducer.step) == (plan, number)
            assert all(torch.equal(now, before[each]) for each, now in rig.planes.items())
        again, expected = rig.step(gradients(comm.rank, 2)), clean.step(gradients(comm.rank, 2))
        assert torch.equal(again.flat(), expected.flat())

    run_ranks(world, rank)


@every_recipe(REMEMBERING)
def test_the_first_step_can_be_the_one_that_is_not_finite(name: str) -> None:
    spots = _unsent(name, 2)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, EVERY_RECIPE[name], unit_elements=SEVERAL)
        for parameter, element in spots.items():
            grads = gradients(comm.rank, 0)
            if comm.rank == 0:
                grads[parameter][element] = torch.nan
            outcome = rig.step(grads)
            assert outcome.flat().isnan().all()
            assert not any(plane.any() for plane in rig.planes.values())

    run_ranks(2, rank)


@looped("name", ["auto", "bf16", "bf16, summed in fp32", "covap, measuring", "dense", "fp16"])
def test_without_memory_a_value_that_is_not_finite_reaches_all_ranks(name: str) -> None:
    def rank(comm: Comm) -> bool:
        rig = Rig(comm, EVERY_RECIPE[name])
        grads = gradients(comm.rank, 0)
        if comm.rank == 1:
            grads["middle.weight"][7] = torch.inf
        return bool(rig.step(grads).mean["middle.weight"].isfinite().all())

    assert not any(run_ranks(3, rank))


@every_recipe(EVERY_RECIPE)
def test_a_step_that_is_not_finite_counts_in_no_recipe(name: str) -> None:
    def rank(comm: Comm) -> None:
        rig, counted = Rig(comm, EVERY_RECIPE[name]), History()
        for step, bad in enumerate((torch.nan, 0.0, torch.inf)):
            grads, number = gradients(comm.rank, step), rig.reducer.step
            if comm.rank == 1:
                grads["middle.weight"][7] += bad
            outcome = rig.step(grads)
            counted.add(outcome.step)
            counted.outcome_known(outcome.step)
            assert outcome.error is None
            assert outcome.step.committed == (bad == 0.0)
            assert rig.reducer.step == number + outcome.step.committed
        assert counted.skipped == 2

    run_ranks(2, rank)


LOUD = ((torch.finfo(torch.float32).max, (0, 1)), (1e38, (1,)), (0.99 * LARGEST_GRADIENT, (0, 1)))
"""Finite, and all elements so on these ranks: sums over a matrix, ranks or steps with momentum overflow."""


@looped(
    ("name", "kept"),
    [*((name, None) for name in EVERY_RECIPE), ("topk", torch.bfloat16)],
    by=lambda row: "memory in bfloat16" if row[1] else kind(row[0]),
    few=1,
)
def test_finite_gradients_however_large_leave_a_finite_memory(name: str, kept: torch.dtype | None) -> None:
    def rank(comm: Comm) -> list[bool]:
        rig = Rig(comm, EVERY_RECIPE[name], unit_elements=SEVERAL, memory_dtype=kept)
        committed = []
        for step, (value, ranks) in enumerate(LOUD):
            grads = gradients(comm.rank, step, torch.float32)
            if comm.rank in ranks:
                grads = {each: grad.sign() * value for each, grad in grads.items()}
            outcome = rig.step(grads)
            assert outcome.error is None
            committed.append(outcome.step.committed)
            after = rig.step(gradients(comm.rank, step + 1, torch.float32))
            assert after.step.committed
            assert after.flat().isfinite().all()
            assert all(plane.isfinite().all() for plane in rig.planes.values())
        return committed

    first, second = run_ranks(2, rank)
    assert first == second


@looped("parameter", ["first.bias", "scalar"])
def test_a_nan_in_a_dense_collective_beside_a_memory_commits_nothing(parameter: str) -> None:
    def rank(comm: Comm) -> None:
        # float64 vectors do not ride in the tail, so they have collectives of their own.
        rig = Rig(comm, "topk(ratio=0.1)", dtype=torch.float64)
        grads = gradients(comm.rank, 0, torch.float64)
        if comm.rank == 1:
            grads[parameter][0] = torch.nan
        assert rig.step(grads).flat().isnan().all()
        assert rig.reducer.step == 0
        assert not any(memory.any() for memory in rig.memory.values())

    run_ranks(2, rank)


def test_an_overflow_under_a_memory_commits_nothing() -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)")
        rig.reducer.install(Composition(remember(reduce(cast(torch.float16))), text="remembered cast"))
        first = rig.step(gradients(comm.rank, 0))
        grads = gradients(comm.rank, 1)
        grads["middle.weight"][5] = 1e6
        assert rig.step(grads).flat().isnan().all()
        assert all(torch.equal(rig.memory[name], kept) for name, kept in first.memory.items())

    run_ranks(2, rank)


def test_an_overflow_in_the_cast_beside_a_memory_commits_nothing() -> None:
    policy = {"middle.weight": "fp16", "*.weight": "topk(ratio=0.1)", "*": "dense"}

    def rank(comm: Comm) -> None:
        # float64 never rides in the tail, however small: what is cast here is cast on the wire.
        rig = Rig(comm, "topk(ratio=0.1)", policy=policy, dtype=torch.float64)
        grads = gradients(comm.rank, 0, torch.float64)
        grads["middle.weight"][5] = 1e6
        outcome = rig.step(grads)
        assert outcome.flat().isnan().all()
        assert not any(memory.any() for memory in rig.memory.values())

    run_ranks(2, rank)


def test_a_mean_too_large_for_the_gradients_type_commits_nothing() -> None:
    def rank(comm: Comm) -> None:
        # Of randomk values travel in float32.
        rig = Rig(comm, "randomk(ratio=0.3)", dtype=torch.float16)
        grads = gradients(comm.rank, 0, torch.float16)
        grads["first.weight"].fill_(40_000.0)
        outcomes = [rig.step(grads) for _ in range(2)]
        assert outcomes[0].step.committed
        # 40 000 sent, and beside it 80 000 by now, which float16 does not hold.
        assert not outcomes[1].step.committed
        assert outcomes[1].flat().isnan().all()
        assert all(torch.equal(rig.memory[name], kept) for name, kept in outcomes[0].memory.items())

    run_ranks(2, rank)


# PowerSGD makes an idle parameter's Q orthonormal again, which changes its last bits if it has several rows.
@looped(
    ("name", "buckets"),
    itertools.product([name for name in REMEMBERING if name != "powersgd, rank 3"], ["one", "shuffled"]),
    by=lambda row: kind(row[0]),
    few=1,
)
def test_an_idle_parameter_keeps_its_memory_and_sends_nothing(name: str, buckets: str) -> None:
    def rank(comm: Comm) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        rig = Rig(comm, EVERY_RECIPE[name], unit_elements=SEVERAL)
        for step in range(2):
            rig.step(gradients(comm.rank, step), BUCKETS[buckets])
        before = rig.planes
        grads = gradients(comm.rank, 2)
        grads["first.weight"].zero_()
        if comm.rank == 0:
            grads["middle.weight"].zero_()
        outcome = rig.step(grads, BUCKETS[buckets])
        for each, plane in rig.planes.items():
            # "kind/unit" is about a unit, such as who has led it, and merely lies by its first parameter.
            if each[0] == "first.weight" and "/" not in each[1]:
                assert torch.equal(plane, before[each]), "idle on all ranks"
        assert not outcome.mean["first.weight"].any(), "nobody sends what nobody has"
        for each, plane in rig.planes.items():
            # What exchanges keep is equal on all ranks, and goes on with what the other sends.
            if each == ("middle.weight", MOMENTUM) and before[each].any():
                assert torch.equal(plane, before[each]) == (comm.rank == 0)
        nothing = torch.zeros_like(grads["middle.weight"])
        unsent = ("middle.weight", UNSENT)
        return outcome.mean, before.get(unsent, nothing), rig.planes.get(unsent, nothing)

    # Three ranks: of what a single one sends, an owner of a shard would round off nothing.
    means, before, after = zip(*run_ranks(3, rank), strict=True)
    assert all(torch.equal(mean[name], means[0][name]) for mean in means for name in NAMES)
    if name in FORGETTING:
        return
    # The idle rank's memory waits as it is; that of others is compensated as ever.
    coefficient, sent = _memory(name).coefficient(2), means[0]["middle.weight"].double()
    compensated = [
        gradients(rank, 2)["middle.weight"] + coefficient * before[rank].double() for rank in (1, 2)
    ]
    missing = _average([before[0], *compensated]) - sent - _average(after)
    assert missing.abs().max() <= 32 * 9 * torch.finfo(torch.float32).eps, "late, not lost"


# A ring in DDP's own buckets adds in an order that depends on the position there, as gloo's does for DDP.
@every_recipe([name for name in EVERY_RECIPE if name != "allreduce"])
@looped("unit_elements", UNITS)
def test_changing_buckets_between_steps_changes_no_number(name: str, unit_elements: int | None) -> None:
    changing = ("one", "shuffled", "alone", "reversed")

    def rank(comm: Comm) -> None:
        fixed, moved = (Rig(comm, EVERY_RECIPE[name], unit_elements=unit_elements) for _ in range(2))
        for step, buckets in enumerate(changing):
            expected = fixed.step(gradients(comm.rank, step), REVERSED)
            outcome = moved.step(gradients(comm.rank, step), BUCKETS[buckets])
            assert torch.equal(outcome.flat(), expected.flat()), f"mean in step {step}"
            assert outcome.memory.keys() == expected.memory.keys()
            assert all(torch.equal(outcome.memory[each], expected.memory[each]) for each in outcome.memory)

    run_ranks(3, rank)


@every_recipe(REMEMBERING)
@looped("scale", [1024.0, 2.0**16] if FULL else [2.0**16])
def test_the_loss_scale_stays_out_of_the_memory(name: str, scale: float) -> None:
    scales = (scale, scale * 2, scale / 4)

    def rank(comm: Comm) -> None:
        given = iter(scales)
        plain = Rig(comm, EVERY_RECIPE[name], unit_elements=SEVERAL)
        scaled = Rig(comm, EVERY_RECIPE[name], unit_elements=SEVERAL, loss_scale=lambda: next(given))
        for step, factor in enumerate(scales):
            grads = gradients(comm.rank, step)
            expected = plain.step(grads)
            outcome = scaled.step({each: grads[each] * factor for each in grads})
            # Powers of two move exponents only, so not one bit may differ.
            assert torch.equal(outcome.flat(), expected.flat() * factor)
            assert all(torch.equal(outcome.memory[each], expected.memory[each]) for each in outcome.memory)

    run_ranks(2, rank)


def _mixed(name: str) -> torch.dtype:
    kinds = {"first": torch.float64, "middle": torch.bfloat16, "last": torch.float16}
    return kinds.get(name.split(".")[0], torch.float32)


BY_TYPE = (
    ("last.bias", "last.weight"),
    ("scalar", "nothing"),
    ("middle.weight",),
    ("first.bias", "first.weight"),
)


@every_recipe(EVERY_RECIPE)
def test_every_type_of_gradient_agrees_and_conserves(name: str) -> None:
    world = 3

    def rank(comm: Comm) -> list[Outcome]:
        rig = Rig(comm, EVERY_RECIPE[name], dtype=_mixed, unit_elements=500)
        return [rig.step(gradients(comm.rank, step, _mixed), BY_TYPE) for step in range(2)]

    outcomes = run_ranks(world, rank)
    for step in range(2):
        here = [of_rank[step] for of_rank in outcomes]
        assert all(outcome.step.committed for outcome in here)
        assert all(torch.equal(outcome.flat(), here[0].flat()) for outcome in here)
    if name in FORGETTING:
        return
    for parameter in ("first.weight", "middle.weight", "last.weight", "first.bias", "scalar"):
        mean = outcomes[0][0].mean[parameter]
        kept = [of_rank[0].memory.get(parameter, torch.zeros(())) for of_rank in outcomes]
        given = _average([gradients(rank, 0, _mixed)[parameter] for rank in range(world)])
        missing = (given - mean.double() - _average(kept)).abs().max()
        # The mean lands in the gradient's own type, and is summed in that or the payload's.
        eps = max(torch.finfo(mean.dtype).eps, EPS.get(name, 0.0))
        assert mean.dtype == _mixed(parameter)
        assert missing <= 8 * (2 * world + 3) * eps
