"""PowerSGD and ACP-SGD: against the papers' algorithms, and what becomes of factors over steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.exchange.base import run
from gradwire.exchange.low_rank import SIDE, acp_sgd, arrange, factor_type, power_sgd
from gradwire.exchange.round_robin import Order, round_robin
from gradwire.exchange.state import LEFT, RIGHT, TURN
from gradwire.measure.metered import MeteredComm
from gradwire.recipes import recipe
from gradwire.unit.context import ExchangeContext, ExchangeState, Part
from tests.support.looped import looped
from tests.support.rig import SHAPES, Rig, gradients
from tests.unit.exchange.low_rank import (
    acp_sgd_by_the_paper,
    drawn,
    parts_of,
    power_sgd_by_the_paper,
    slices,
    steps,
)

PARTS = parts_of(bias=(30,), tall=(40, 12), wide=(12, 3, 15), same=(40, 12), tiny=(2, 2), none=(0, 4))
NUMEL = sum(part.numel for part in PARTS)
WHERE = slices(PARTS)
MATRICES = ("tall", "wide", "same")
BOTH = [power_sgd, acp_sgd]
U = torch.finfo(torch.float32).eps / 2


def normal(rank: int, step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * rank + step))


def matrix(flat: Tensor, name: str) -> np.ndarray:
    part = next(part for part in PARTS if part.name == name)
    return flat[WHERE[name]].view(part.shape[0], -1).double().numpy()


def start(rank: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """P of the second step and Q of the first, as an exchange draws them."""
    unit, ctx = arrange(NUMEL, PARTS, rank), ExchangeContext(0, 0, 0, 1)
    return drawn(unit.left, ctx), drawn(unit.right, ctx)


# The exchange in float64 beside a float64 oracle: both err by some hundreds of u of that type.
SAME = 1e-11


@looped("rank", [1, 2, 3])
@looped("world", [1, 2, 3])
def test_means_are_those_of_the_papers_power_sgd(world: int, rank: int) -> None:
    runs = steps(power_sgd(rank), lambda *ctx: normal(*ctx).double(), PARTS, world, 5)
    _, q = start(rank)
    for name in MATRICES:
        # Algorithm 2 with the authors' error: the error-fed gradient less the mean, on every rank.
        error = np.zeros((world, *matrix(normal(0, 0), name).shape))
        for step in range(5):
            m = np.stack([matrix(normal(who, step), name) for who in range(world)]) + error
            expected, q[name] = power_sgd_by_the_paper(m, q[name])
            error = m - expected
            assert np.abs(matrix(runs[0].means[step], name) - expected).max() <= SAME
        # What ranks leave differs from theirs, but not in the mean over ranks.
        left = np.mean([matrix(seen.unsent[-1], name) for seen in runs], axis=0)
        assert np.abs(left - error.mean(0)).max() <= SAME


@looped(("order", "rank", "world"), product(["paper", "random"], [1, 2, 3], [1, 3]), few=2)
def test_means_are_those_of_the_papers_acp_sgd(world: int, rank: int, order: Order) -> None:
    count = 20
    runs = steps(acp_sgd(rank, order), lambda *ctx: normal(*ctx).double(), PARTS, world, count)
    p, q = start(rank)
    lefts = [
        round_robin(ExchangeContext(step, 0, 0, world), 2, order, "factor") == 0 for step in range(count)
    ]
    again = [before == is_left for before, is_left in pairwise(lefts)]
    assert any(again) is (order == "random")
    for name in MATRICES:
        error = np.zeros((world, *matrix(normal(0, 0), name).shape))
        for step, (is_left, is_again) in enumerate(zip(lefts, [False, *again], strict=True)):
            m = np.stack([matrix(normal(who, step), name) for who in range(world)]) + error
            expected, *factors = acp_sgd_by_the_paper(m, p[name], q[name], is_left)
            if not is_again:
                p[name], q[name] = factors
            error = m - expected
            assert np.abs(matrix(runs[0].means[step], name) - expected).max() <= SAME


def test_a_factor_that_is_sent_again_is_kept_as_it_was_first_sent_also_after_rests() -> None:
    # Steps 0, 2 and 4 send the left factors, and in between the matrices rest.
    def kept(count: int) -> ExchangeState:
        def gradient(_rank: int, step: int) -> Tensor:
            return normal(0, step) * (1 - step % 2)

        return steps(acp_sgd(2, "paper"), gradient, PARTS, 1, count, feedback=False)[0].kept

    first, last = kept(1), kept(5)
    for name in MATRICES:
        assert last.get(TURN, name).tolist() == [SIDE[LEFT]]
        assert torch.equal(last.get(LEFT, name), first.get(LEFT, name))


@looped("build", BOTH)
def test_float32_is_float64_but_for_rounding(build: type) -> None:
    wide = steps(build(2), lambda *ctx: normal(*ctx).double(), PARTS, 1, 1)[0]
    narrow = steps(build(2), normal, PARTS, 1, 1)[0]
    # Factors are drawn anew in each type, so what can be compared is what their own projection leaves.
    for seen in (wide, narrow):
        for name in MATRICES:
            came, left = matrix(seen.came[0], name), matrix(seen.unsent[0], name)
            assert np.linalg.matrix_rank(came - left, tol=1e-3) == 2
            # An orthogonal projection: what is left is orthogonal to what is sent; 40 terms of u each.
            inner = np.abs((matrix(seen.means[0], name) * left).sum())
            assert inner <= 100 * U * np.square(came).sum()


@looped("build", BOTH)
def test_vectors_and_what_would_not_get_smaller_travel_raw(build: type) -> None:
    runs = steps(build(2), normal, PARTS, 2, 2)
    for name in ("bias", "tiny"):
        exact = (normal(0, 0) + normal(1, 0))[WHERE[name]] / 2
        assert torch.equal(runs[0].means[0][WHERE[name]], exact)
        assert not runs[0].unsent[0][WHERE[name]].any()


@looped("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_travels_raw_is_weighed_in_the_type_of_the_unit(dtype: torch.dtype) -> None:
    unit, before = arrange(NUMEL, PARTS, 2), normal(0, 0).to(dtype)
    x, mean, wide = before.clone(), torch.zeros_like(before), factor_type(dtype)
    raw = torch.empty(unit.raw_numel, dtype=wide)
    unit.take_raw(x, raw, 1 / 3)
    unit.land_raw(raw, mean)
    for name in ("bias", "tiny"):
        assert not x[WHERE[name]].any()
        assert torch.equal(mean[WHERE[name]], before[WHERE[name]] * (1 / 3))
    assert torch.equal(raw, torch.cat([(before[start:stop] * (1 / 3)).to(wide) for start, stop in unit.raw]))
    for name in MATRICES:
        assert torch.equal(x[WHERE[name]], before[WHERE[name]])
        assert not mean[WHERE[name]].any()


def test_which_parameters_are_matrices() -> None:
    assert arrange(NUMEL, PARTS, 1).left.names == MATRICES
    assert arrange(NUMEL, PARTS, 9).left.names == MATRICES  # 9 (40 + 12) < 40 · 12
    assert arrange(NUMEL, PARTS, 10).left.names == ()
    halves = (Part("tall", (40, 12), 0, 240), Part("other", (40, 12), 240, 480))
    assert arrange(480, halves, 1).raw == ((0, 240), (240, 480))
    assert arrange(1003, (), 1).places.tolist() == [[0, 31, 32, 0, 0]]
    assert arrange(1003, (), 1).raw == ((992, 1003),)
    assert arrange(0, (), 1).raw == ()


def test_rounds_of_both() -> None:
    ctx = ExchangeContext(0, 0, 0, 2, parts=PARTS)
    assert [each.numel for each in power_sgd(2).rounds(NUMEL, torch.float32, ctx)] == [2 * 92 + 34, 2 * 69]
    assert [each.numel for each in acp_sgd(2, "paper").rounds(NUMEL, torch.float32, ctx)] == [2 * 92 + 34]
    odd = replace(ctx, step=1)
    assert [each.numel for each in acp_sgd(2, "paper").rounds(NUMEL, torch.float32, odd)] == [2 * 69 + 34]
    for build in BOTH:
        assert build(10).rounds(NUMEL, torch.float16, ctx)[0].numel == NUMEL
        assert build().rounds(0, torch.float32, ExchangeContext(0, 0, 0, 2)) == ()
        with pytest.raises(ValueError, match="rank=0"):
            build(0)


@looped(("world", "ways"), [(2, ["library"] * 2), (4, ["library", "direct"]), (9, ["library", "tree"])])
def test_few_factors_go_the_way_of_the_fewest_latencies(world: int, ways: list[str]) -> None:
    # 8 kB of left factors, and 2 kB of right ones.
    part = Part("weight", (2000, 500), 0, 1_000_000)

    def rank(comm: Comm) -> tuple[list[str], Tensor]:
        x, metered = (
            torch.randn(part.numel, generator=torch.Generator().manual_seed(comm.rank)),
            MeteredComm(comm),
        )
        mean, ctx = torch.empty_like(x), ExchangeContext(0, 0, comm.rank, world, parts=(part,))
        run(power_sgd(), x, mean, metered, ctx)
        assert tuple(metered.rounds) == power_sgd().rounds(part.numel, torch.float32, ctx)
        return [each.algorithm for each in metered.rounds], mean

    (found, mean), *others = run_ranks(world, rank)
    assert found == ways
    assert all(torch.equal(other, mean) for _ways, other in others), "bit for bit"


def low_rank(rank: int, seed: int) -> Tensor:
    """A unit whose matrices are of this rank."""
    random, x = torch.Generator().manual_seed(seed), torch.zeros(NUMEL)
    for part in PARTS:
        if part.name in MATRICES:
            rows, columns = part.shape[0], part.numel // part.shape[0]
            left, right = (
                torch.randn(rows, rank, generator=random),
                torch.randn(rank, columns, generator=random),
            )
            x[WHERE[part.name]] = (left @ right).view(-1)
    return x


@looped("build", BOTH)
@looped("of_rank", [1, 2, 3])
def test_a_mean_of_low_rank_arrives_whole(build: type, of_rank: int) -> None:
    # The ranks' own gradients are of full rank; what they disagree in cancels.
    shared, noise = low_rank(of_rank, 5), normal(9, 9)
    runs = steps(build(3), lambda who, _: shared + (1 - 2 * who) * noise, PARTS, 2, 3, feedback=False)
    for name in MATRICES:
        # The span of M·Q for a random Q holds all of M, if M is of the rank of Q or less: in one step of
        # PowerSGD, and in the second of ACP-SGD, whose first has but a random Q. Rounding: hundreds of u.
        error = np.abs(matrix(runs[0].means[1], name) - matrix(shared, name)).max()
        assert error <= 1e-4 * np.abs(matrix(shared, name)).max()


@looped("build", BOTH)
@looped("rank", [1, 2])
def test_of_a_constant_mean_the_best_approximation_is_found(build: type, rank: int) -> None:
    # Singular values that fall by halves: the angle shrinks by half or more in each step of power iteration,
    # by a quarter in the approximation's error.
    x, best = torch.zeros(NUMEL), {}
    for name in MATRICES:
        u, _, v = np.linalg.svd(matrix(normal(3, 3), name), full_matrices=False)
        s = 0.5 ** np.arange(len(v))
        x[WHERE[name]] = torch.from_numpy((u * s) @ v).float().view(-1)
        best[name] = (u[:, :rank] * s[:rank]) @ v[:rank]
    seen = steps(build(rank), lambda *_: x, PARTS, 1, 40, feedback=False)[0]
    for name in MATRICES:
        assert np.abs(matrix(seen.means[0], name) - best[name]).max() > 1e-3
        # Rounding: a few u times a norm of 1, over the gap of a quarter.
        assert np.abs(matrix(seen.means[-1], name) - best[name]).max() <= 100 * U


@looped("build", BOTH)
def test_columns_without_a_gradient_do_not_end_the_warm_start(build: type) -> None:
    # Of rank 1 for six steps, then nothing at all for two, then of rank 3.
    kinds = [low_rank(1, 1)] * 6 + [torch.zeros(NUMEL)] * 2 + [low_rank(3, 2)] * 3
    seen = steps(build(3), lambda _who, step: kinds[step], PARTS, 1, len(kinds), feedback=False)[0]
    for step in (6, 7):
        assert not seen.means[step].any(), "nobody sends what nobody has"
    for name in MATRICES:
        for kind in seen.kept.committed.keys() & {LEFT, RIGHT}:
            factor = seen.kept.committed[kind][name].double()
            gram = factor @ factor.t()
            assert (gram - torch.eye(3)).abs().max() <= 1e-5, "all columns are there, and orthonormal"
        error = np.abs(matrix(seen.means[-1], name) - matrix(kinds[-1], name)).max()
        assert error <= 1e-4 * np.abs(matrix(kinds[-1], name)).max()


@looped("build", BOTH)
def test_rows_and_columns_of_zeros_stay_zero(build: type) -> None:
    x = normal(1, 1)
    x[WHERE["tall"]].view(40, 12)[:, 5] = 0.0
    x[WHERE["tall"]].view(40, 12)[7] = 0.0
    for exchange in (build(1), build(3)):
        # Without feedback: the random Q of ACP-SGD's first step sends and leaves something in the column.
        seen = steps(exchange, lambda *_: x, PARTS, 2, 4, feedback=False)[0]
        for mean in seen.means[1:]:
            found = matrix(mean, "tall")
            assert np.isfinite(found).all()
            assert not found[7].any()
            assert not found[:, 5].any()


@looped("build", BOTH)
def test_an_idle_rank_keeps_nothing_and_idle_everywhere_is_exactly_zero(build: type) -> None:
    def gradient(who: int, step: int) -> Tensor:
        x = normal(who, step)
        x[WHERE["wide"]] = 0.0
        if who == 1:
            x[WHERE["tall"]] = 0.0
        return x

    runs = steps(build(2), gradient, PARTS, 3, 4)
    for seen in runs:
        assert not any(mean[WHERE["wide"]].any() for mean in seen.means)
        assert not any(left[WHERE["wide"]].any() for left in seen.unsent)
    assert not any(left[WHERE["tall"]].any() for left in runs[1].unsent)
    assert runs[0].means[0][WHERE["tall"]].any()


def test_matrices_do_not_depend_on_their_neighbours() -> None:
    together = steps(power_sgd(2), normal, PARTS, 2, 1)
    kept = together[0].kept
    alone = tuple(part for part in PARTS if part.name == "same")

    def second(parts: tuple[Part, ...], where: slice) -> Tensor:
        def body(comm: Comm) -> Tensor:
            x = normal(comm.rank, 1)[where].clone()
            mean = torch.empty_like(x)
            ctx = ExchangeContext(1, 0, comm.rank, 2, parts=parts, kept=kept)
            power_sgd(2).start(x, mean, comm, ctx)()
            return mean

        return run_ranks(2, body)[0]

    assert torch.equal(second(PARTS, slice(None))[WHERE["same"]], second(alone, WHERE["same"]))


@looped("build", BOTH)
def test_another_rank_starts_anew(build: type) -> None:
    kept = steps(build(1), normal, PARTS, 1, 2)[0].kept
    ctx = ExchangeContext(2, 0, 0, 1, parts=PARTS, kept=kept)
    x, mean = normal(0, 2), torch.empty(NUMEL)
    run_ranks(1, lambda comm: build(3).start(x, mean, comm, ctx)())
    kept.commit()
    newest = kept.committed["Q" if build is power_sgd else "P"]
    assert all(tensor.shape[0] == 3 for tensor in newest.values())
    assert mean.isfinite().all()


# -- through whole steps: what is kept is state, by parameter name

TEXTS = {"powersgd(rank=2)": "Q", "acpsgd(rank=2)": "P"}
LARGE = ("first.weight", "middle.weight", "last.weight")


def kept_of(rig: Rig) -> dict[str, dict[str, Tensor]]:
    """A copy, by kind and name."""
    return state.save(rig.reducer)["kept"]


@looped("text", TEXTS)
def test_factors_are_state_by_parameter_name(text: str) -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, text, unit_elements=389)
        rig.step(gradients(comm.rank, 0))
        kept = kept_of(rig)[TEXTS[text]]
        assert kept.keys() == set(LARGE)
        for name in LARGE:
            side = SHAPES[name][1 if TEXTS[text] == "Q" else 0]
            assert kept[name].shape == (2, side)

    run_ranks(2, rank)


@looped("text", TEXTS)
def test_factors_go_along_when_a_recipe_is_installed_anew(text: str) -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, text)
        rig.step(gradients(comm.rank, 0))
        before = kept_of(rig)[TEXTS[text]]
        rig.reducer.install(recipe(text).build())
        after = kept_of(rig)[TEXTS[text]]
        assert after.keys() == before.keys() == set(LARGE)
        assert all(torch.equal(after[name], before[name]) for name in LARGE)

    run_ranks(2, rank)


@looped("text", TEXTS)
def test_a_checkpoint_of_another_world_goes_on_with_the_same_factors(text: str) -> None:
    def save(comm: Comm) -> dict[str, object]:
        rig = Rig(comm, text)
        for step in range(3):
            rig.step(gradients(comm.rank, step))
        return state.save(rig.reducer)

    saved = run_ranks(3, save)
    same = gradients(7, 7)

    def follow(comm: Comm) -> Tensor:
        rig = Rig(comm, text)
        state.load(rig.reducer, saved if comm.world != 3 else saved[comm.rank])
        assert all(torch.equal(kept_of(rig)[TEXTS[text]][name], kept) for name, kept in expected.items())
        return rig.step(same).flat()

    expected = saved[0]["kept"][TEXTS[text]]  # type: ignore[index]
    three, two = run_ranks(3, follow)[0], run_ranks(2, follow)[0]
    # The mean of what was unsent is the same, and so is the next mean: up to rounding of numbers below 32.
    assert (three - two).abs().max() <= 1e-4
