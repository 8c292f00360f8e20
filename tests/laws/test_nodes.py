"""The laws on two levels: ranks of a node add up first, and shards of their sums travel between nodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from gradwire import recipes
from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.comm.checksums import CheckedComm, Watchman
from gradwire.errors import RanksDisagree
from gradwire.exchange.compose import Scheme
from gradwire.memory import Residual
from gradwire.placement import CommitTime
from gradwire.sources.nodes import level
from gradwire.sources.nodes.level import Packing
from gradwire.step.layout import Layout
from gradwire.step.shards import shards_of
from gradwire.unit.parameters import ParameterSpec
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, FORGETTING, REMEMBERING, kind
from tests.support.rig import BUCKETS, Outcome, Rig, flat, gradients, specs

NODES = [(2, 2), (2, 3), (3, 2)]
"""How many, and ranks on each."""

SEVERAL = 500
"""Elements of a unit, so that there are several in a shard."""

STEPS = 3
EPS = {
    "fp16": torch.finfo(torch.float16).eps,
    "bf16": torch.finfo(torch.bfloat16).eps,
    "bf16, summed in fp32": torch.finfo(torch.bfloat16).eps,
}
WHOLE = {spec.name: spec for spec in specs()}

CASES = [
    (name, *NODES[number % len(NODES)], list(BUCKETS)[number % len(BUCKETS)])
    for number, name in enumerate(EVERY_RECIPE)
] + [(name, *nodes, "reversed") for nodes in NODES for name in ("dense", "int8", "topk", "powersgd")]


def _run(name: str, nodes: int, per_node: int, buckets: str) -> list[list[Outcome]]:
    def rank(comm: Comm) -> list[Outcome]:
        rig = Rig(comm, EVERY_RECIPE[name], per_node=per_node, unit_elements=SEVERAL)
        return [rig.step(gradients(comm.rank, step), BUCKETS[buckets]) for step in range(STEPS)]

    return run_ranks(nodes * per_node, rank)


def _whole_mean(memories: Sequence[Mapping[str, Tensor]], per_node: int) -> Tensor:
    """The mean memory of all nodes (elements,), from the shards of the ranks."""
    found = {}
    for name, spec in WHOLE.items():
        shards = []
        for number in range(per_node):
            here = [each[name].double() for each in memories[number::per_node] if name in each]
            shards.append(torch.stack(here).mean(0) if here else torch.zeros(-(-spec.numel // per_node)))
        found[name] = torch.cat([each.double() for each in shards])[: spec.numel]
    return flat(found)


def _coefficient(name: str, step: int) -> float:
    exchange = recipes.recipe(EVERY_RECIPE[name]).build().exchange
    memory = exchange.memory if isinstance(exchange, Scheme) else None
    return (memory if isinstance(memory, Residual) else Residual()).coefficient(step)


@looped(("name", "nodes", "per_node", "buckets"), CASES, by=lambda row: kind(row[0]), few=1)
def test_a_step_agrees_and_conserves_over_all_ranks(
    name: str, nodes: int, per_node: int, buckets: str
) -> None:
    outcomes, world = _run(name, nodes, per_node, buckets), nodes * per_node
    # A compensation, W products and W sums as on one level, and the node's: each rounded once, of numbers
    # below 32.
    tolerance = 32 * (2 * world + 2 * per_node + 3) * EPS.get(name, torch.finfo(torch.float32).eps)
    for step in range(STEPS):
        here = [of_rank[step] for of_rank in outcomes]
        assert all(outcome.step.committed and outcome.error is None for outcome in here)
        assert all(torch.equal(outcome.flat(), here[0].flat()) for outcome in here), "consensus"
        assert all(outcome.step.sent.inside_bytes == here[0].step.sent.inside_bytes > 0 for outcome in here)
        if name in FORGETTING:
            continue
        assert all(outcome.step.sent.metered_bytes == outcome.step.sent.predicted_bytes for outcome in here)
        given = torch.stack([flat(gradients(rank, step)) for rank in range(world)]).mean(0)
        if step:
            before = _whole_mean([of_rank[step - 1].memory for of_rank in outcomes], per_node)
            given = given + _coefficient(name, step) * before
        kept = _whole_mean([outcome.memory for outcome in here], per_node)
        assert (given - here[0].flat() - kept).abs().max() <= tolerance, "conservation"


@looped(("nodes", "per_node"), NODES)
def test_dense_is_the_mean_of_all_ranks(nodes: int, per_node: int) -> None:
    world = nodes * per_node
    for of_rank in _run("dense", nodes, per_node, "shuffled"):
        for step, outcome in enumerate(of_rank):
            expected = torch.stack([flat(gradients(rank, step)) for rank in range(world)]).mean(0)
            # W products with 1/S and 1/K, and W sums: each rounded once, of numbers below 8.
            assert (outcome.flat() - expected).abs().max() <= 8 * 3 * world * torch.finfo(torch.float32).eps


@looped("name", ["dense", "int8", "topk", "dgc"])
def test_memory_and_traffic_are_those_of_a_shard(name: str) -> None:
    def rank(comm: Comm) -> tuple[int, float, int, float]:
        text, found = EVERY_RECIPE[name], []
        for world in (comm.split([(0, 1), (2, 3)]), comm):
            rig = Rig(world, text, per_node=1 if world.world == 2 else 2)
            outcome = rig.step(gradients(comm.rank, 0))
            found += [rig.reducer.layout.memory_bytes, outcome.step.sent.metered_bytes]
        return tuple(found)

    for memory, sent, of_shard, between in run_ranks(4, rank):
        # Halves are rounded up, by a row of a matrix; the tail of two levels has no status vote in it.
        assert memory / 2 <= of_shard <= memory / 2 + 8 * (61 + 41 + 3 + 59)
        assert between <= 0.56 * sent


@looped(
    ("name", "commits"),
    product([*REMEMBERING, "dense", "fp16"], get_args(CommitTime)),
    by=lambda row: f"{kind(row[0]) if row[0] in REMEMBERING else row[0]}, {row[1]}",
    few=1,
)
def test_what_is_not_finite_on_one_rank_reaches_all_and_leaves_no_trace(
    name: str, commits: CommitTime
) -> None:
    def rank(comm: Comm) -> None:
        options = {"per_node": 2, "unit_elements": SEVERAL, "commits": commits}
        rig, clean = (Rig(comm, EVERY_RECIPE[name], **options) for _ in range(2))
        rig.step(gradients(comm.rank, 0))
        rig.reducer.commit_deferred()
        clean.step(gradients(comm.rank, 0))
        for spot in (0, -1):
            before, number = rig.planes, rig.reducer.step
            grads = gradients(comm.rank, 1)
            if comm.rank == 2:
                grads["middle.weight"][spot] = torch.nan
            outcome = rig.step(grads)
            rig.reducer.commit_deferred()
            assert outcome.error is None
            assert not outcome.step.committed
            assert outcome.flat().isnan().all()
            assert rig.reducer.step == number
            assert all(torch.equal(now, before[each]) for each, now in rig.planes.items())
        again, expected = rig.step(gradients(comm.rank, 1)), clean.step(gradients(comm.rank, 1))
        assert torch.equal(again.flat(), expected.flat())

    run_ranks(4, rank)


def test_a_decision_is_about_ranks_that_exchange_and_the_shards_that_they_do() -> None:
    def rank(comm: Comm) -> tuple[int, float, str]:
        rig = Rig(comm, "auto", per_node=2)
        while rig.reducer.measuring:
            rig.step(gradients(comm.rank, rig.reducer.step))
        facts = rig.reducer.facts
        assert facts is not None
        return facts.world, facts.gradient_bytes, rig.reducer.layout.main.text

    shard_bytes = 4.0 * sum(-(-spec.numel // 2) for spec in specs())
    first, *others = run_ranks(6, rank)
    assert first[0] == 3
    # Rows of 61 and of 41 elements fill up matrices with an odd number of them.
    assert shard_bytes <= first[1] <= shard_bytes + 4 * (61 + 41 + 59)
    assert others == [first] * 5


@looped("order", [(2, 0, 1), (1, 2, 0)])
def test_the_order_of_arrival_may_differ_between_ranks(order: tuple[int, ...]) -> None:
    def rank(comm: Comm) -> list[Tensor]:
        here = order if comm.rank % 2 else None
        rig = Rig(comm, "topk(ratio=0.1)", per_node=2)
        return [rig.step(gradients(comm.rank, step), order=here).flat() for step in range(2)]

    in_order = _run_in_order()
    for found in run_ranks(4, rank):
        assert all(torch.equal(mean, expected) for mean, expected in zip(found, in_order, strict=True))


def _run_in_order() -> list[Tensor]:
    def rank(comm: Comm) -> list[Tensor]:
        rig = Rig(comm, "topk(ratio=0.1)", per_node=2)
        return [rig.step(gradients(comm.rank, step)).flat() for step in range(2)]

    return run_ranks(4, rank)[0]


@looped(("name", "since", "to"), product(["topk", "dgc", "powersgd", "int8"], (1, 2), (1, 2, 3)), few=6)
def test_the_mean_unsent_moves_to_other_nodes(name: str, since: int, to: int) -> None:
    """From flat (1) or two ranks per node to any other."""

    def saved(comm: Comm) -> tuple[dict[str, object], dict[str, object], Mapping[str, Tensor]]:
        rig = Rig(comm, EVERY_RECIPE[name], per_node=since, unit_elements=SEVERAL)
        outcome = [rig.step(gradients(comm.rank, step)) for step in range(2)][-1]
        return state.save(rig.reducer), state.save_mean(rig.reducer), outcome.memory

    found = run_ranks(4, saved)
    expected = _whole_mean([memory for _own, _mean, memory in found], since)

    def loaded(comm: Comm) -> list[Mapping[str, Tensor]]:
        memories = []
        for given in ([own for own, _mean, _memory in found], found[comm.rank % 4][1]):
            rig = Rig(comm, EVERY_RECIPE[name], per_node=to, unit_elements=SEVERAL)
            state.load(rig.reducer, given)
            assert rig.reducer.step == 2
            memories.append(rig.memory)
        return memories

    world = 6 if to == 3 else 4
    results = run_ranks(world, loaded)
    # A sum of four and its quarter, in float32, of numbers below 32.
    for way in range(2):
        mean = _whole_mean([memories[way] for memories in results], to)
        assert (mean - expected).abs().max() <= 32 * 5 * torch.finfo(torch.float32).eps


@looped(("since", "to"), [(2, 2), (2, 1), (1, 2)])
def test_the_mean_unsent_of_transposed_matrices_moves_in_their_order_of_memory(
    since: int, to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def transposed(*asked: Any) -> tuple[ParameterSpec, ...]:
        found = specs(*asked)
        return tuple(
            replace(s, stride=(1, s.shape[0])) if len(s.shape) == 2 and s.numel else s for s in found
        )

    monkeypatch.setattr("tests.support.rig.specs", transposed)

    def saved(comm: Comm) -> tuple[dict[str, object], Mapping[str, Tensor]]:
        rig = Rig(comm, "topk(ratio=0.1)", per_node=since)
        rig.step(gradients(comm.rank, 0))
        return state.save_mean(rig.reducer), rig.memory

    found = run_ranks(4, saved)

    def loaded(comm: Comm) -> Mapping[str, Tensor]:
        rig = Rig(comm, "topk(ratio=0.1)", per_node=to)
        state.load(rig.reducer, found[comm.rank][0])
        return rig.memory

    expected = _whole_mean([memory for _mean, memory in found], since)
    # A sum of four and its quarter, in float32, of numbers below 8.
    error = _whole_mean(run_ranks(4, loaded), to) - expected
    assert error.abs().max() <= 8 * 5 * torch.finfo(torch.float32).eps


FEW_ROWS = {"conv": (5, 600), "matrix": (64, 32)}
"""Of which nodes cut the first between elements, and FSDP between rows."""


@looped("others", ["nodes", "cuts"])
def test_the_mean_unsent_moves_to_as_many_ranks_in_other_nodes_or_with_other_cuts(
    others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(comm: Comm) -> Rig:
        return Rig(comm, "topk(ratio=0.1)", per_node=2, shapes=FEW_ROWS)

    def saved(comm: Comm) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        rig, draw = made(comm), torch.Generator().manual_seed(comm.rank)
        rig.step(
            {s.name: torch.randn(s.numel, generator=draw) for s in specs(shapes=FEW_ROWS)},
            [[each] for each in FEW_ROWS],
        )
        return state.save(rig.reducer), state.save_mean(rig.reducer)["memory"]

    found = run_ranks(4, saved)
    if others == "nodes":
        monkeypatch.setattr(
            "tests.support.rig.parted",
            lambda comm, _per_node: (comm.split([(0, 2), (1, 3)]), comm.split([(0, 1), (2, 3)])),
        )
    else:
        monkeypatch.setattr("gradwire.sources.nodes.level.shards_of", partial(shards_of, by_rows=True))

    def loaded(comm: Comm) -> Mapping[str, Tensor]:
        rig = made(comm)
        state.load(rig.reducer, [own for own, _mean in found])
        return state.save_mean(rig.reducer)["memory"]

    # Halves of two numbers are added as the two are, and halved: not a bit differs.
    for memory in run_ranks(4, loaded):
        assert all(torch.equal(memory[name], expected) for name, expected in found[0][1].items())


@looped("name", ["topk", "powersgd", "signsgd"])
def test_a_rank_takes_up_its_own_shard_bit_for_bit(name: str) -> None:
    def rank(comm: Comm) -> None:
        rig, other = (Rig(comm, EVERY_RECIPE[name], per_node=2) for _ in range(2))
        for step in range(2):
            rig.step(gradients(comm.rank, step))
        state.load(other.reducer, state.save(rig.reducer))
        ours, theirs = (each.step(gradients(comm.rank, 2)) for each in (rig, other))
        assert torch.equal(ours.flat(), theirs.flat())
        assert all(torch.equal(plane, other.planes[each]) for each, plane in rig.planes.items())

    run_ranks(4, rank)


def test_a_state_of_other_nodes_is_refused_alone_and_a_digest_differs_in_words() -> None:
    def rank(comm: Comm) -> None:
        sharded, plain = Rig(comm, "topk(ratio=0.1)", per_node=2), Rig(comm, "topk(ratio=0.1)")
        with pytest.raises(ValueError, match="other nodes"):
            state.load(plain.reducer, state.save(sharded.reducer))
        with pytest.raises(ValueError, match="other nodes"):
            state.load(sharded.reducer, state.save(plain.reducer))

    run_ranks(4, rank)


def test_ranks_with_one_shard_must_keep_the_same() -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, EVERY_RECIPE["powersgd"], per_node=2)
        for step in range(2):
            rig.step(gradients(comm.rank, step))
        saved = state.save(rig.reducer)
        if comm.rank == 3:
            for tensors in saved["kept"].values():
                for tensor in tensors.values():
                    tensor.neg_()
        with pytest.raises(RanksDisagree, match="what exchanges keep"):
            state.load(rig.reducer, saved)

    run_ranks(4, rank)


def test_a_gradient_that_could_not_be_brought_stops_the_step_on_all_ranks() -> None:
    def rank(comm: Comm) -> tuple[str, bool]:
        rig, grads = Rig(comm, "topk(ratio=0.1)", per_node=2), gradients(comm.rank, 0)
        failure = ValueError("a sparse gradient") if comm.rank == 1 else None
        outcome = rig.step(grads, failures={0: failure})
        return type(outcome.error).__name__, outcome.step.committed

    told = ("PeerFailed", False)
    assert run_ranks(4, rank) == [told, ("ValueError", False), told, told]


WITHOUT_ROOM: dict[str, tuple[object, str]] = {
    "room for what comes": (Packing, "rows"),
    "room for what is sent": (Packing, "pack"),
    "checksums": (Watchman, "sealed"),
    "the sum": (level, "_mean"),
}
"""What takes memory on the way from a buffer to the node's sum, in the order of a step."""


@looped("where", WITHOUT_ROOM)
@looped("raises", [MemoryError, RuntimeError])  # Python's own, and torch's
def test_a_rank_without_memory_inside_its_node_fails_the_step_on_all_ranks(
    where: str, raises: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = WITHOUT_ROOM[where]
    honest, left = getattr(owner, name), threading.local()

    def once(*arguments: Any) -> Any:
        if left.accidents:
            left.accidents -= 1
            raise raises("no room")
        return honest(*arguments)

    monkeypatch.setattr(owner, name, once)

    def rank(comm: Comm) -> tuple[str, list[bool], Tensor]:
        left.accidents = 0
        rig = Rig(comm, "topk(ratio=0.1)", per_node=2, wrap=CheckedComm)
        good = rig.step(gradients(comm.rank, 0)).step.committed
        before, left.accidents = rig.planes, int(comm.rank == 1)
        failed = rig.step(gradients(comm.rank, 1))
        intact = all(torch.equal(now, before[each]) for each, now in rig.planes.items())
        again = rig.step(gradients(comm.rank, 1))
        found = [good, failed.step.committed, intact, failed.flat().isnan().all().item()]
        return type(failed.error).__name__, [*found, again.step.committed], again.flat()

    kinds, found, means = zip(*run_ranks(4, rank), strict=True)
    assert kinds == ("PeerFailed", raises.__name__, "PeerFailed", "PeerFailed")
    assert all(each == [True, False, True, True, True] for each in found)
    assert all(torch.equal(each, means[0]) for each in means)


def test_a_late_step_whose_means_one_rank_cannot_unpack_stays_failed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, left = Packing.unpack, threading.local()

    def unpack(*arguments: Any) -> None:
        if left.fails:
            raise MemoryError("no room for means")
        honest(*arguments)

    monkeypatch.setattr(Packing, "unpack", unpack)

    def rank(comm: Comm) -> str:
        left.fails = False
        rig = Rig(comm, "topk(ratio=0.1)", per_node=2, commits="late")
        rig.step(gradients(comm.rank, 0))
        rig.reducer.commit_deferred()
        before, left.fails = rig.planes, comm.rank == 1
        try:
            failed = rig.step(gradients(comm.rank, 1))
        except RanksDisagree:  # threads notice that rank 1 is gone
            return "left alone"
        rig.reducer.commit_deferred()
        if comm.rank == 1:
            assert not failed.step.committed
            assert all(torch.equal(now, before[each]) for each, now in rig.planes.items())
        return type(failed.error).__name__

    assert run_ranks(4, rank)[1] == "MemoryError"


def test_an_error_of_our_own_ends_the_step_where_it_happened() -> None:
    def rank(comm: Comm) -> str:
        def before(*_: object) -> None:
            if comm.rank == 1:
                raise MemoryError("no room to look on")

        rig = Rig(comm, "topk(ratio=0.1)", per_node=2, observers=[SimpleNamespace(before=before)])
        try:
            outcome = rig.step(gradients(comm.rank, 0))
        except RanksDisagree:  # threads notice that rank 1 is gone
            return "left alone"
        return type(outcome.error).__name__

    assert run_ranks(4, rank)[1] == "TransportError"


def test_an_error_of_our_own_over_a_nodes_sum_ends_the_step_and_keeps_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, left = Layout.bucket_plan, threading.local()

    def planned(*arguments: Any) -> Any:
        if left.fails:
            raise MemoryError("no room for a plan")
        return honest(*arguments)

    monkeypatch.setattr(Layout, "bucket_plan", planned)

    def rank(comm: Comm) -> tuple[str, str]:
        left.fails = comm.rank == 1
        try:
            error = Rig(comm, "topk(ratio=0.1)", per_node=2).step(gradients(comm.rank, 0)).error
        except RanksDisagree:  # threads notice that rank 1 is gone
            return "left alone", ""
        return type(error).__name__, repr(error and error.__cause__)

    assert run_ranks(4, rank)[1] == ("TransportError", "MemoryError('no room for a plan')")


@pytest.mark.filterwarnings("ignore:what old rank . had not sent is lost")  # threads share what is ignored
def test_survivors_of_a_shard_go_on_without_the_others() -> None:
    def saved(comm: Comm) -> state.State:
        rig = Rig(comm, "topk(ratio=0.1)", per_node=2)
        rig.step(gradients(comm.rank, 0))
        return state.save(rig.reducer)

    states = run_ranks(4, saved)

    def loads(left: Sequence[int]) -> list[str]:
        def rank(comm: Comm) -> str:
            rig = Rig(comm, "topk(ratio=0.1)", per_node=2)
            try:
                state.load(rig.reducer, [states[each] for each in left], "drop")
            except ValueError as error:
                return str(error)
            return _sum_of(rig.memory)

        return run_ranks(4, rank)

    # Ranks 0 and 2 hold one shard, 1 and 3 the other; a mean of one is that one.
    for number, told in enumerate(loads([0, 1, 3])):
        if number % 2 == 0:
            assert told == _sum_of(states[0]["memory"])
    assert all("for some shard no state is left" in told for told in loads([0, 2]))


def _sum_of(memory: Mapping[str, Tensor]) -> str:
    return repr(sum(float(memory[name].double().abs().sum()) for name in sorted(memory)))
