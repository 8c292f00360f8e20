"""Gathered parameters that are held: what ranks send, and that nothing goes wrong when one of them does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.comm import Pending, ThreadComm, run_ranks
from gradwire.comm.base import DONE, Finishing
from gradwire.errors import GradwireError
from gradwire.sources.fsdp import held
from gradwire.sources.fsdp.comms import Account, Decoding
from gradwire.sources.fsdp.held import HEAD_BYTES, Held, Verdict

WORLD, NUMEL = 3, 2000


class Route:
    """All ranks of a comm, each with a row."""

    def __init__(self, comm: ThreadComm) -> None:
        self._comm = comm
        self.world, self.rank, self.place = comm.world, comm.rank, comm.rank
        self.targets = tuple(range(comm.world))
        self.calls = 0
        self.damaged: Callable[[Tensor], None] | None = None
        """Called with what the next exchange has brought."""

    def exchange(self, rows: Tensor, row: Tensor) -> Pending:
        """All rows."""
        self.calls += 1
        damaged, self.damaged = self.damaged, None
        pending = self._comm.all_gather(rows, row)
        return pending if damaged is None else Finishing(pending, lambda: damaged(rows))

    def spare(self, out: Tensor) -> Tensor:
        """Nothing."""
        return out[:0]

    def relay(self, rows: Tensor, out: Tensor, _spare: Tensor) -> Pending:
        """Copy."""
        out.view(rows.shape).copy_(rows)
        return DONE

    def heard(self, words: list[int]) -> Generator[Pending, None, list[list[int]]]:
        """What this rank has heard."""
        yield DONE
        return [words]


class Rank:
    """One rank's shard of each of two modules, and what it holds of them."""

    def __init__(self, comm: ThreadComm, dtype: torch.dtype = torch.bfloat16, guard_every: int = 0) -> None:
        self.rank, self.route = comm.rank, Route(comm)
        random = torch.Generator().manual_seed(comm.rank)
        self.shard = (0.02 * torch.randn(NUMEL, generator=random)).to(dtype)
        self.forgotten, where = list[bool](), torch.device("cpu")
        self.verdict = Verdict(["a module", "another"], lambda _same: self.forgotten.append(True))
        self.modules = [
            Held(torch.zeros(comm.world, NUMEL, dtype=dtype), number, self.verdict, where, guard_every)
            for number in range(2)
        ]
        self.held = self.modules[0]
        self.row_bytes = 0

    def step(self) -> None:
        """Move some of the weights by a unit or two in the last place."""
        self.shard.view(torch.int16)[self.rank :: 7] += 1

    def steps(self, output: Tensor, number: int = 0) -> Iterator[Pending]:
        """The collectives of a gather."""
        output.view(WORLD, -1)[self.rank] = self.shard  # as FSDP2 does
        shard = output.view(WORLD, -1)[self.rank]
        self.kind, self.row_bytes = yield from self.modules[number].gather(shard, output, self.route)  # type: ignore[arg-type]

    def begin(self, number: int = 0) -> tuple[Decoding, Tensor]:
        """Begin a gather; returns it, and where numbers will be."""
        output = torch.empty(WORLD * NUMEL, dtype=self.shard.dtype)
        return Decoding(self.steps(output, number), Account(), lambda: None), output

    def expected(self) -> Tensor:
        """The shards of all ranks."""
        found = torch.empty(WORLD, NUMEL, dtype=self.shard.dtype)
        self.route._comm.all_gather(found.view(torch.uint8), self.shard.view(torch.uint8)).wait()
        return found.view(-1).view(torch.int16)

    def gather(self, number: int = 0) -> str:
        """Gather, look whether all bits are those of the shards, and return how they came."""
        work, output = self.begin(number)
        work.wait()
        assert torch.equal(output.view(torch.int16), self.expected())
        return self.kind

    def raised(self, call: Callable[[], Any]) -> str:
        """The error of a call, and its text."""
        try:
            call()
        except (GradwireError, torch.OutOfMemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return ""


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


def test_a_change_that_was_foreseen_takes_one_collective() -> None:
    def body(rank: Rank) -> list[int]:
        found = []
        for _ in range(4):
            rank.step()
            for _ in range(3):
                before = rank.route.calls
                rank.gather()
                found.append(rank.route.calls - before)
        return found

    for found in on_ranks(body):
        assert found == [2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1]


def test_a_change_that_is_longer_than_foreseen_comes_in_two_parts() -> None:
    def body(rank: Rank) -> tuple[list[str], list[int], list[int]]:
        kinds, calls, sent = [rank.gather()], [], []
        for every in (50, 50, 5, 50, 50):
            rank.shard.view(torch.int16)[rank.rank :: every] += 1
            before = rank.route.calls
            kinds.append(rank.gather())
            calls.append(rank.route.calls - before)
            sent.append(rank.row_bytes)
        return kinds, calls, sent

    for kinds, calls, sent in on_ranks(body):  # type: ignore[misc]
        assert kinds == ["as they are", *["changes"] * 5]
        assert calls == [2, 1, 2, 1, 1]
        assert sent[2] > 1.5 * sent[1]
        assert sent[3] >= sent[2], "the room of the one before"
        assert sent[4] < sent[2]


def test_an_edit_on_one_rank_only_costs_bytes() -> None:
    def body(rank: Rank) -> tuple[str, int]:
        rank.gather()
        if rank.rank == 1:
            rank.shard[3] = torch.nan
        found = rank.gather(), rank.row_bytes
        assert rank.gather() == "unchanged"
        return found

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


def flip(rows: Tensor) -> None:
    """Damage the first rank's code."""
    rows[0, HEAD_BYTES + 90] ^= 1


def fail_to_take(rank: Rank) -> Tensor:
    """A gather with changes, whose bytes are damaged on their way to rank 1. Returns what it brought."""
    for _ in range(2):
        rank.step()
        rank.gather()
    rank.step()
    if rank.rank == 1:
        rank.route.damaged = flip
    work, output = rank.begin()
    work.wait()
    return output


def test_all_ranks_hear_of_damage_on_one_at_the_next_gather_and_begin_anew() -> None:
    def body(rank: Rank) -> tuple[bool, str, list[str]]:
        rank.gather(1)
        is_lost = bool(fail_to_take(rank).isnan().all())
        told = rank.raised(lambda: rank.gather(1))
        return is_lost, told, [rank.gather(1), rank.gather(), rank.gather()]

    found = on_ranks(body)
    assert [is_lost for is_lost, _, _ in found] == [False, True, False]  # type: ignore[misc]
    for place, (_, told, kinds) in enumerate(found):  # type: ignore[misc]
        assert kinds == ["as they are", "as they are", "unchanged"]
        if place == 1:
            assert "WireError: a frame's checksum is wrong" in told
        else:
            assert "PeerFailed: rank 1 could not take the gathered parameters of module 'a module'" in told


def test_of_two_failures_before_a_head_the_first_is_told_and_all_modules_begin_anew() -> None:
    def body(rank: Rank) -> tuple[str, int, list[str]]:
        for number in (0, 1, 0, 1):
            if not number:
                rank.step()
            rank.gather(number)
        rank.step()
        under_way = []
        for number in range(2):
            if rank.rank == 1:
                rank.route.damaged = flip
            under_way.append(rank.begin(number))
        for work, output in under_way:
            work.wait()
            assert output.isnan().all() == (rank.rank == 1)
        told = rank.raised(lambda: rank.gather(1))
        return told, len(rank.forgotten), [rank.gather(), rank.gather(1), rank.gather()]

    for place, (told, forgotten, kinds) in enumerate(on_ranks(body)):  # type: ignore[misc]
        assert forgotten == 1
        assert kinds == ["as they are", "as they are", "unchanged"]
        assert told.startswith(
            "WireError" if place == 1 else "PeerFailed: rank 1 could not take the gathered parameters of "
            "module 'a module'"
        )  # fmt: skip


def test_a_failure_keeps_nothing_of_the_pass_alive() -> None:
    def body(rank: Rank) -> list[bool]:
        output = fail_to_take(rank)
        seen = weakref.ref(output)
        del output
        gc.collect()
        found = [seen() is None]
        work, output = rank.begin(1)
        seen = weakref.ref(output)
        assert rank.raised(work.wait)
        del work, output
        gc.collect()
        return [*found, seen() is None]

    assert on_ranks(body) == [[True, True]] * WORLD


def test_without_another_gather_ranks_hear_of_damage_before_a_scatter() -> None:
    def body(rank: Rank) -> tuple[str, str, int]:
        fail_to_take(rank)
        before = rank.route.calls

        def settle() -> None:
            rank.verdict.settle(rank.route, rank.held.where)  # type: ignore[arg-type]

        return rank.raised(settle), rank.raised(settle), rank.route.calls - before

    for place, (told, later, calls) in enumerate(on_ranks(body)):  # type: ignore[misc]
        assert told.startswith("WireError" if place == 1 else "PeerFailed: rank 1 could not take")
        assert not later
        assert calls == 1, "nothing has come since"


def test_a_rank_without_memory_for_what_has_come_is_named_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = held.decode_steps

    def failing(data: Tensor, old: Tensor, *others: object) -> None:
        if lacking:
            raise torch.OutOfMemoryError("no room")
        decode(data, old, *others)  # type: ignore[arg-type]

    lacking: list[int] = []
    monkeypatch.setattr(held, "decode_steps", failing)

    def body(rank: Rank) -> list[str]:
        rank.gather()
        rank.step()
        rank.expected()  # all have come here
        lacking.append(1)
        work, output = rank.begin()
        work.wait()
        assert output.isnan().all()
        rank.expected()
        lacking.clear()
        return [rank.raised(rank.gather), rank.gather()]

    for told, kind in on_ranks(body):  # type: ignore[misc]
        assert told == "OutOfMemoryError: no room"
        assert kind == "as they are"


def test_ranks_at_different_places_of_a_pass_say_so() -> None:
    def body(rank: Rank) -> str:
        rank.gather()
        return rank.raised(lambda: rank.gather(int(rank.rank == 2)))

    for told in on_ranks(body):
        assert told.startswith("RanksDisagree")
        assert "rank 1 gathers 'a module', rank 2 gathers 'another'" in told  # type: ignore[operator]


def test_a_wait_that_was_interrupted_goes_on_when_it_is_called_again() -> None:
    class Interrupted:
        def __init__(self, inner: Pending) -> None:
            self._inner, self._is_new, self.then = inner, True, inner.then

        def wait(self) -> None:
            if self._is_new:
                self._is_new = False
                raise KeyboardInterrupt
            self._inner.wait()

    def body(rank: Rank) -> list[str]:
        rank.gather()
        rank.step()
        output = torch.empty(WORLD * NUMEL, dtype=rank.shard.dtype)

        def steps() -> Iterator[Pending]:
            for pending in rank.steps(output):
                yield Interrupted(pending) if rank.rank == 1 else pending

        work = Decoding(steps(), Account(), lambda: None)
        while True:
            try:
                work.wait()
                break
            except KeyboardInterrupt:
                pass
        assert torch.equal(output.view(torch.int16), rank.expected())
        return [rank.kind, rank.gather()]

    assert on_ranks(body) == [["changes", "unchanged"]] * WORLD


def test_a_gather_that_is_interrupted_between_collectives_has_failed() -> None:
    def steps() -> Iterator[Pending]:
        yield DONE
        raise KeyboardInterrupt

    failed: list[bool] = []
    work = Decoding(steps(), Account(), lambda: failed.append(True))
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert failed == [True], "or FSDP2 would compute with what has not come"


def test_a_gather_that_one_rank_has_not_taken_makes_all_begin_anew() -> None:
    def body(rank: Rank) -> str:
        rank.gather()
        rank.step()
        work, _output = rank.begin()
        work.wait()
        if not rank.rank:
            rank.held.state = 0  # as if an error had come between
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
        return [*found, rank.gather(), rank.gather()]

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
