"""Sets of files in a folder: whole or not there, wherever a rank dies, and read by other worlds."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.checkpoint import file_set
from gradwire.comm import Comm, run_ranks
from gradwire.errors import PeerFailed, RanksDisagree
from tests.support.rig import Rig, gradients

RECIPE = "topk(ratio=0.1)"


def _trained(comm: Comm, steps: int) -> Rig:
    rig = Rig(comm, RECIPE)
    for step in range(steps):
        assert rig.step(gradients(comm.rank, step)).step.committed
    return rig


def _save(folder: Path, world: int, steps: int) -> list[dict[str, Tensor]]:
    """What each rank remembers when it saves after so many steps."""

    def rank(comm: Comm) -> dict[str, Tensor]:
        rig = _trained(comm, steps)
        assert file_set.save(file_set.of_reducer(rig.reducer), folder) == steps
        return rig.memory

    return run_ranks(world, rank)


def _load(folder: Path, world: int, missing: Any = "refuse") -> list[tuple[int | None, dict[str, Tensor]]]:
    def rank(comm: Comm) -> tuple[int | None, dict[str, Tensor]]:
        rig = Rig(comm, RECIPE)
        return file_set.load(file_set.of_reducer(rig.reducer), folder, missing), rig.memory

    return run_ranks(world, rank)


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_folder_that_is_empty_or_not_there_holds_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert [step for step, _ in _load(folder, 2)] == [None, None]


def test_each_rank_gets_its_own_from_the_newest_set_and_older_ones_are_gone(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    for steps in (1, 2, 3):
        saved = _save(folder, 2, steps)
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 2
    assert all(name.endswith(f"-rank-{rank}-of-2.pt") for rank, name in enumerate(names))
    for (step, found), expected in zip(_load(folder, 2), saved, strict=True):
        assert step == 3
        assert _same(found, expected)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_another_world_starts_with_the_mean_and_leaves_its_own_set_alone(tmp_path: Path, world: int) -> None:
    saved = _save(tmp_path, 3, 2)
    for step, found in _load(tmp_path, world):
        assert step == 2
        for name, memory in found.items():
            assert torch.equal(memory, torch.stack([each[name] for each in saved]).mean(0))
    again = _save(tmp_path, world, 4)
    assert len(list(tmp_path.iterdir())) == world
    assert all(_same(found, own) for (_, found), own in zip(_load(tmp_path, world), again, strict=True))


def test_each_rank_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    def save(comm: Comm) -> dict[str, Tensor]:
        rig = _trained(comm, 2)
        file_set.save(file_set.of_reducer(rig.reducer), tmp_path / str(comm.rank))
        return rig.memory

    def load(comm: Comm) -> tuple[int | None, dict[str, Tensor]]:
        rig = Rig(comm, RECIPE)
        return file_set.load(
            file_set.of_reducer(rig.reducer), tmp_path / str(comm.rank), "refuse"
        ), rig.memory

    saved = run_ranks(2, save)
    for (step, found), expected in zip(run_ranks(2, load), saved, strict=True):
        assert step == 2
        assert _same(found, expected)


def test_a_set_of_another_world_that_some_ranks_see_in_part_is_not_read_in_part(tmp_path: Path) -> None:
    """An older one of which all see everything is taken; without one, all ranks refuse."""
    here, there = tmp_path / "0", tmp_path / "1"

    def load(comm: Comm) -> int | None:
        rig = Rig(comm, RECIPE)
        return file_set.load(file_set.of_reducer(rig.reducer), tmp_path / str(comm.rank), "refuse")

    def refused(comm: Comm) -> str:
        with pytest.raises(FileNotFoundError) as caught:
            load(comm)
        return str(caught.value)

    _save(here, 3, 1)
    older = {path: path.read_bytes() for path in here.iterdir()}
    _save(here, 3, 2)
    there.mkdir()
    for path in here.glob("*-rank-[12]-of-3.pt"):
        shutil.copy(path, there)
    assert all("ranks see 3, 2 of its files" in said for said in run_ranks(2, refused))
    for path, data in older.items():
        path.write_bytes(data)
        (there / path.name).write_bytes(data)
    assert run_ranks(2, load) == [1, 1]


def test_a_set_that_has_lost_a_file_is_refused_on_all_ranks_unless_that_is_asked_for(tmp_path: Path) -> None:
    saved = _save(tmp_path, 3, 2)
    (lost,) = tmp_path.glob("*-rank-1-of-3.pt")
    lost.unlink()

    def refused(comm: Comm) -> str:
        with pytest.raises(FileNotFoundError) as caught:
            file_set.load(file_set.of_reducer(Rig(comm, RECIPE).reducer), tmp_path, "refuse")
        return str(caught.value)

    assert all("ranks see 2, 2, 2 of its files" in said for said in run_ranks(3, refused))
    with pytest.warns(UserWarning, match="old rank 1 had not sent is lost"):
        loaded = _load(tmp_path, 2, "drop")
    for step, found in loaded:
        assert step == 2
        for name, memory in found.items():
            assert torch.equal(memory, torch.stack([saved[0][name], saved[2][name]]).mean(0))


@pytest.mark.filterwarnings("ignore:what old rank .* had not sent is lost")  # threads share what is ignored
def test_what_is_left_in_folders_of_nodes_is_dropped_to_only_where_all_ranks_see_it(tmp_path: Path) -> None:
    def made(comm: Comm) -> Rig:
        return Rig(comm, RECIPE, per_node=2)

    def place(comm: Comm) -> Path:
        return tmp_path / f"node {comm.rank // 2}"

    def save(comm: Comm) -> dict[str, Tensor]:
        rig = made(comm)
        assert rig.step(gradients(comm.rank, 0)).step.committed
        file_set.save(file_set.of_reducer(rig.reducer), place(comm))
        return rig.memory

    def load(comm: Comm) -> tuple[str, dict[str, Tensor]]:
        rig = made(comm)
        try:
            return str(file_set.load(file_set.of_reducer(rig.reducer), place(comm), "drop")), rig.memory
        except FileNotFoundError as error:
            return str(error), rig.memory

    saved = run_ranks(4, save)
    assert all(
        said == "1" and _same(now, own) for (said, now), own in zip(run_ranks(4, load), saved, strict=True)
    )
    for lost in (3, 2):  # the second node has one file left, and then none, as a new machine
        (path,) = tmp_path.glob(f"node 1/*-rank-{lost}-of-4.pt")
        path.unlink()
        for said, now in run_ranks(4, load):
            assert f"ranks see 2, 2, {lost - 2}, {lost - 2} of its files" in said
            assert "copy what is left on each of them to all" in said
            assert not any(memory.any() for memory in now.values()), "nothing has changed"
    for path in tmp_path.glob("node 0/*"):
        (tmp_path / "node 1" / path.name).write_bytes(path.read_bytes())
    for rank, (said, now) in enumerate(run_ranks(4, load)):
        assert said == "1"
        assert _same(now, saved[rank % 2]), "the shard of the node that is left"


def test_a_damaged_file_is_refused_on_all_ranks(tmp_path: Path) -> None:
    _save(tmp_path, 2, 2)
    (path,) = tmp_path.glob("*-rank-1-of-2.pt")
    path.write_bytes(path.read_bytes()[:100])

    def rank(comm: Comm) -> str:
        with pytest.raises((ValueError, PeerFailed)) as caught:
            file_set.load(file_set.of_reducer(Rig(comm, RECIPE).reducer), tmp_path, "refuse")
        return f"{type(caught.value).__name__}: {caught.value}"

    healthy, damaged = run_ranks(2, rank)
    assert healthy.startswith("PeerFailed: rank 1 could not read its state: ValueError: a file of")
    assert damaged.startswith("ValueError: a file of")


class Died(BaseException):
    """The process is gone, and does nothing any more."""


Act = Callable[..., Any]


class Disk:
    """Counts what ranks do to the disk; from its `fatal`th act on, `victim` does nothing but `raises`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.victim, self.fatal, self.acts = -1, 1_000, 0
        self.raises: BaseException = Died()
        self._rank = threading.local()
        for name in ("fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))
        monkeypatch.setattr(torch, "save", self._torn(torch.save))

    def belongs_to(self, rank: int) -> None:
        """What this thread does from now on."""
        self._rank.number = rank

    def _act(self) -> None:
        if getattr(self._rank, "number", None) == self.victim:
            self.acts += 1
            if self.acts >= self.fatal:
                raise self.raises

    def _watched(self, real: Act) -> Act:
        def act(*arguments: Any, **options: Any) -> Any:
            self._act()
            return real(*arguments, **options)

        return act

    def _torn(self, real: Act) -> Act:
        def save(saved: Any, file: Any) -> None:
            try:
                self._act()
            except BaseException:
                file.write(b"half of it")
                raise
            real(saved, file)

        return save


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)
    monkeypatch.undo()


def _saved_until_death(folder: Path, disk: Disk, steps: int) -> tuple[list[dict[str, Tensor]], bool]:
    """What ranks would save after so many steps, and whether `disk` has let them come to the end."""
    memories: list[dict[str, Tensor]] = [{}, {}]

    def rank(comm: Comm) -> bool:
        rig = _trained(comm, steps)
        memories[comm.rank] = rig.memory
        disk.belongs_to(comm.rank)
        try:
            file_set.save(file_set.of_reducer(rig.reducer), folder)
        except (Died, RanksDisagree):  # of which the second says here that a rank has gone
            return False
        finally:
            disk.belongs_to(-2)
        return True

    return memories, all(run_ranks(2, rank))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_at_any_act_leaves_the_old_set_or_the_new_one(
    tmp_path: Path, disk: Disk, victim: int
) -> None:
    outcomes = []
    for fatal in range(1, 20):
        folder = tmp_path / str(fatal)
        disk.victim = -1
        old = _save(folder, 2, 1)
        disk.victim, disk.fatal, disk.acts = victim, fatal, 0
        new, is_through = _saved_until_death(folder, disk, 2)
        disk.victim = -1
        loaded = _load(folder, 2)
        steps = {step for step, _ in loaded}
        assert steps in ({1}, {2}), f"death at act {fatal}"
        expected = old if steps == {1} else new
        assert all(_same(found, own) for (_, found), own in zip(loaded, expected, strict=True))
        # The next save goes through, and clears away what was left.
        again = _save(folder, 2, 3)
        assert all(_same(found, own) for (_, found), own in zip(_load(folder, 2), again, strict=True))
        assert len(list(folder.iterdir())) == 2
        outcomes.append(steps.pop())
        if is_through:
            break
    # Written, made durable, renamed, the folder made durable; committed, durable; the old file removed.
    assert len(outcomes) == 1 + 7
    assert outcomes == sorted(outcomes), "once the new set is whole, it stays"
    assert outcomes[:3] == [1, 1, 1]


def test_a_first_save_that_was_cut_off_is_none_and_the_next_one_goes_through(
    tmp_path: Path, disk: Disk
) -> None:
    disk.victim, disk.fatal = 1, 3
    _saved_until_death(tmp_path, disk, 1)
    disk.victim = -1
    with pytest.warns(UserWarning, match="the first save was cut off"):
        assert [step for step, _ in _load(tmp_path, 2)] == [None, None]
    saved = _save(tmp_path, 2, 2)
    assert all(_same(found, own) for (_, found), own in zip(_load(tmp_path, 2), saved, strict=True))


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("fatal", "error"), [(1, FULL), (2, FULL), (3, FULL), (1, MemoryError("no room"))])
def test_a_full_disk_is_said_on_all_ranks_and_the_old_set_stays(
    tmp_path: Path, disk: Disk, fatal: int, error: Exception
) -> None:
    old = _save(tmp_path, 2, 1)
    before = sorted(path.name for path in tmp_path.iterdir())
    disk.victim, disk.fatal, disk.raises = 1, fatal, error

    def rank(comm: Comm) -> str:
        rig = _trained(comm, 2)
        disk.belongs_to(comm.rank)
        with pytest.raises((OSError, MemoryError, PeerFailed)) as caught:
            file_set.save(file_set.of_reducer(rig.reducer), tmp_path)
        return f"{type(caught.value).__name__}: {caught.value}"

    other, full = run_ranks(2, rank)
    disk.victim = -1
    assert full == f"{type(error).__name__}: {error}" + f": '{tmp_path}'" * (error is FULL)
    assert other.startswith("PeerFailed: rank 1 could not save its state, and what was saved before is still")
    assert str(error) in other
    assert {path.name for path in tmp_path.iterdir()} >= set(before)
    assert all(_same(found, own) for (_, found), own in zip(_load(tmp_path, 2), old, strict=True))


def test_wherever_the_space_ends_the_error_is_the_disks_and_names_the_folder(tmp_path: Path) -> None:
    _save(tmp_path, 1, 1)
    (whole,) = tmp_path.iterdir()
    size = whole.stat().st_size

    def rank(comm: Comm) -> list[str]:
        rig, said = _trained(comm, 2), []
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for most in [*range(0, size, size // 40), size - 1]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))  # as a full disk, and needs no disk
            try:
                file_set.save(file_set.of_reducer(rig.reducer), tmp_path)
            except OSError as error:
                said.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return said

    [said] = run_ranks(1, rank)
    assert len(said) > 40
    assert set(said) == {f"[Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}: '{tmp_path}'"}
    assert list(tmp_path.iterdir()) == [whole]


ODD = [
    "wire-00000009-00000000-rank-0-of-99999999999999999999.pt",
    "wire-99999999999999999999-00000000-rank-0-of-2.pt",
    "wire-00000009-00000000-rank-7-of-2.pt",
    f"wire-{2**63 - 1}-00000000-rank-0-of-2.pt",
]


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_no_save_gives_is_no_file_of_a_set(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert [step for step, _ in _load(tmp_path, 2)] == [None, None]
    saved = _save(tmp_path, 2, 1)
    assert all(_same(found, own) for (_, found), own in zip(_load(tmp_path, 2), saved, strict=True))
    assert (tmp_path / name).exists()


def test_numbers_of_saves_may_have_more_digits(tmp_path: Path) -> None:
    (tmp_path / "wire-99999999-00000000-rank-0-of-2.pt").touch()
    for steps in (1, 2):
        saved = _save(tmp_path, 2, steps)
        assert all(_same(found, own) for (_, found), own in zip(_load(tmp_path, 2), saved, strict=True))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_would_inflate_is_refused_before_it_does(tmp_path: Path) -> None:
    _save(tmp_path, 1, 1)
    (path,) = tmp_path.iterdir()
    with zipfile.ZipFile(path) as stored:
        contents = {each.filename: stored.read(each) for each in stored.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in contents.items():
            packed.writestr(name, data)

    def rank(comm: Comm) -> str:
        with pytest.raises(ValueError, match="is compressed, which no state is") as caught:
            file_set.load(file_set.of_reducer(Rig(comm, RECIPE).reducer), tmp_path, "refuse")
        return str(caught.value)

    run_ranks(1, rank)


def test_entries_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    _save(tmp_path, 1, 1)
    (path,) = tmp_path.iterdir()
    with zipfile.ZipFile(path, "a") as file:
        largest = max(file.infolist(), key=lambda each: each.file_size)
        file.filelist += [largest] * 3  # three more names of one place, which a central directory may have
        file.comment = b"or it would not be written anew"

    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match="is compressed, which no state is"):
            file_set.load(file_set.of_reducer(Rig(comm, RECIPE).reducer), tmp_path, "refuse")

    run_ranks(1, rank)
