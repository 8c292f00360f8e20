"""Gathered parameters that are held: what ranks send, and that nothing goes wrong when one of them does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.comm import Pending, ThreadComm, run_ranks
from gradwire.errors import WireError
from gradwire.sources.fsdp import held
from gradwire.sources.fsdp.held import HEAD_BYTES, Held, Sending

WORLD, NUMEL = 3, 2000


class Route:
    """All ranks of a comm, each with a row."""

    def __init__(self, comm: ThreadComm) -> None:
        self._comm = comm
        self.world, self.place, self.targets = comm.world, comm.rank, tuple(range(comm.world))

    def exchange(self, rows: Tensor, row: Tensor) -> Pending:
        """All rows."""
        return self._comm.all_gather(rows, row)


class Rank:
    """One rank's shard of a module, and what it holds."""

    def __init__(self, comm: ThreadComm, dtype: torch.dtype = torch.bfloat16, guard_every: int = 0) -> None:
        self.rank, self.route = comm.rank, Route(comm)
        random = torch.Generator().manual_seed(comm.rank)
        self.shard = (0.02 * torch.randn(NUMEL, generator=random)).to(dtype)
        values = torch.zeros(comm.world, NUMEL, dtype=dtype)
        self.held = Held(values, 0, "a module", torch.device("cpu"), guard_every)

    def step(self) -> None:
        """Move some of the weights by a unit or two in the last place."""
        self.shard.view(torch.int16)[self.rank :: 7] += 1

    def send(self) -> Sending:
        """Begin a gather."""
        return self.held.send(self.shard, self.route)  # type: ignore[arg-type]

    def gather(self) -> str:
        """Gather, look whether all bits are those of the shards, and return how they came."""
        sent = self.send()
        sent.pending.wait()
        self.held.take(sent)
        expected = torch.empty_like(self.held.values)
        self.route.exchange(expected.view(torch.uint8), self.shard.view(torch.uint8)).wait()
        assert torch.equal(self.held.values.view(torch.int16), expected.view(torch.int16))
        return sent.kind


def on_ranks(body: Callable[[Rank], object], **how: object) -> list[object]:
    """What `body` returns on each rank."""
    return run_ranks(WORLD, lambda comm: body(Rank(comm, **how)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_come_as_they_are_once_then_changes_or_nothing(dtype: torch.dtype) -> None:
    def body(rank: Rank) -> list[str]:
        found = [rank.gather(), rank.gather()]
        rank.step()
        return [*found, rank.gather(), rank.gather()]

    for found in on_ranks(body, dtype=dtype):
        assert found == ["as they are", "unchanged", "changes", "unchanged"]


def test_an_edit_on_one_rank_only_costs_bytes() -> None:
    def body(rank: Rank) -> tuple[str, int]:
        rank.gather()
        if rank.rank == 1:
            rank.shard[3] = torch.nan
        sent = rank.send()
        sent.pending.wait()
        rank.held.take(sent)
        assert rank.gather() == "unchanged"
        return sent.kind, sent.row_bytes

    for kind, row_bytes in on_ranks(body):  # type: ignore[misc]
        assert kind == "changes"
        assert row_bytes < HEAD_BYTES + 120


def test_numbers_without_likeness_on_one_rank_come_as_they_are_from_all() -> None:
    def body(rank: Rank) -> str:
        rank.gather()
        if rank.rank == 2:
            rank.shard = torch.randint(-(1 << 15), 1 << 15, (NUMEL,)).to(torch.int16).view(torch.bfloat16)
        return rank.gather()

    assert on_ranks(body) == ["as they are"] * WORLD


def test_damage_on_one_rank_is_raised_there_and_all_begin_anew() -> None:
    def body(rank: Rank) -> tuple[str, str]:
        rank.gather()
        rank.step()
        sent = rank.send()
        sent.pending.wait()
        said = ""
        if rank.rank == 1:
            sent.rows[0, 60] ^= 1
        try:
            rank.held.take(sent)
        except WireError as error:
            said = str(error)
        return said, rank.gather()

    found = on_ranks(body)
    assert [kind for _, kind in found] == ["as they are"] * WORLD  # type: ignore[misc]
    assert [("checksum" in said) for said, _ in found] == [False, True, False]  # type: ignore[misc]


def test_a_gather_that_one_rank_has_not_taken_makes_all_begin_anew() -> None:
    def body(rank: Rank) -> str:
        rank.gather()
        rank.step()
        sent = rank.send()
        sent.pending.wait()
        if rank.rank:
            rank.held.take(sent)
        return rank.gather()

    assert on_ranks(body) == ["as they are"] * WORLD


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("no room")])
def test_numbers_of_a_rank_that_cannot_code_them_come_as_they_are_from_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    encode = held.encode_steps

    def failing(new: Tensor, *others: object) -> Tensor:
        if new[0] == 7:
            raise error
        return encode(new, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(held, "encode_steps", failing)

    def body(rank: Rank) -> list[str]:
        rank.gather()
        rank.step()
        first = rank.shard[0].clone()
        if rank.rank == 1:
            rank.shard[0] = 7.0
        found = [rank.gather()]
        rank.shard[0] = first
        return [*found, rank.gather()]

    for found in on_ranks(body):
        assert found == ["as they are", "changes"]
    assert (
        f"could not be coded, so all parameters are sent as they are: {type(error).__name__}" in caplog.text
    )


def test_values_that_have_changed_by_themselves_are_found_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(rank: Rank) -> list[str]:
        found = [rank.gather()]
        for _ in range(2):
            rank.step()
            found.append(rank.gather())
        if rank.rank == 2:
            rank.held.values[0, 5] = 1.0
        sent = rank.send()
        sent.pending.wait()
        rank.held.take(sent)
        return [*found, sent.kind, rank.gather()]

    for found in on_ranks(body, guard_every=2):
        assert found == ["as they are", "changes", "changes", "as they are", "unchanged"]
    assert "'a module': what ranks [2] keep" in caplog.text


def test_values_are_compared_once_after_so_many_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    digest_of = held.digest_of
    compared: list[Tensor] = []

    def counted(x: Tensor) -> int:
        if x.dtype == torch.bfloat16:
            compared.append(x)
        return digest_of(x)

    monkeypatch.setattr(held, "digest_of", counted)

    def body(rank: Rank) -> list[str]:
        found = [rank.gather()]
        for _ in range(4):
            rank.step()
            found += [rank.gather() for _ in range(3)]
        return found

    for found in on_ranks(body, guard_every=2):
        assert found == ["as they are", *["changes", "unchanged", "unchanged"] * 4]
    assert len(compared) == (1 + 2) * WORLD, "the first gather, and twice"
