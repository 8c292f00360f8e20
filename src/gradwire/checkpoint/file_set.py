"""A folder with one file of state per rank, of which a whole set is always there.

A save makes a *set*: as many files as there are ranks, whose names begin alike. Every rank writes its file
under a temporary name, makes it durable, and gives it the suffix of a *prepared* one. Once all ranks have
said so, they rename their files to *committed* ones and remove those of older sets. So a set that lacks a
file and has a committed one was damaged later. One without was cut off, and is none.

A set is found by what all ranks see together: the folder may be shared, or each rank's own.
"""

from __future__ import annotations

import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import torch

from gradwire.agreement.agree import require_success
from gradwire.checkpoint import state
from gradwire.checkpoint.state import Missing, Saved
from gradwire.checkpoint.validate import State
from gradwire.comm import Comm, gathered
from gradwire.errors import GradwireWarning, PeerFailed
from gradwire.step.reducer import Reducer

_PREPARED, _COMMITTED, _PART = ".prepared", ".pt", ".part"
_NAME = re.compile(r"wire-(\d{8,})-([0-9a-f]{8})-rank-(\d+)-of-(\d+)(\.prepared|\.pt|\.part)")
_LARGEST = 2**62
"""Bound of numbers in file names: ranks send them to each other in 64 bits."""
_OFFERS = 16
"""Most sets, the newest ones, that a rank tells the others: messages have one length."""


class Stateful(NamedTuple):
    """Functions that save and load a state on each of the ranks of `control`."""

    control: Comm
    step: Callable[[], int]
    save: Callable[[], State]
    """Return this rank's state."""
    fits: Callable[[Saved], bool]
    """True if every rank can load its own of these states; the same on all ranks. May be a collective."""
    load: Callable[[Saved, Missing, bool], None]
    """Load states, on all ranks together; if the last argument is True, their mean."""


def of_reducer(reducer: Reducer) -> Stateful:
    """Functions that save and load the state of a reducer."""
    return Stateful(
        reducer.env.control,
        lambda: reducer.step,
        lambda: state.save(reducer),
        lambda saved: state.all_fit(reducer, saved),
        lambda saved, missing, mean: state.load(reducer, saved, missing, mean=mean),
    )


class _Set(NamedTuple):
    """One save, as its files' names identify it. `number` counts saves, `token` is random."""

    number: int
    token: int
    world: int

    def path(self, folder: Path, rank: int, suffix: str) -> Path:
        return folder / f"wire-{self.number:08d}-{self.token:08x}-rank-{rank}-of-{self.world}{suffix}"


class _File(NamedTuple):
    set: _Set
    rank: int
    suffix: str
    path: Path


_WAYS: dict[Missing, str] = {
    "refuse": "Every rank needs its own, or in another world all of them. Restore them, or decide that what "
    "their ranks had not sent is lost: missing='drop' goes on with what is left, if all ranks see the same "
    "files",
    "drop": "missing='drop' goes on with what is left only where all ranks see the same files. Where nodes "
    "have folders of their own, copy what is left on each of them to all, and load again",
}
"""Advice for a set that lacks files, by the value of `missing`."""


def save(of: Stateful, folder: Path) -> int:
    """Save all ranks' states as a set of files, remove older sets, and return the step. Called by all ranks.

    If a rank cannot write, no new file is kept, and the older set stays: that rank raises its `OSError`, the
    others `PeerFailed`, which tells why.
    """
    keep(of.control, folder, lambda: state.keyed(of.save()))
    return of.step()


def keep(control: Comm, folder: Path, saved: Callable[[], Mapping[str, Any]]) -> None:
    """Write the result of `saved`, on each rank of `control`, as a set of files. See `save`."""
    rank, largest = control.rank, 0
    failure: Exception | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        largest = max((each.set.number for each in _files(folder)), default=0)
    except OSError as error:
        failure = error
    told = gathered(control, torch.tensor([largest, secrets.randbits(32)], device="cpu"))
    fresh = _Set(1 + int(told[:, 0].max()), int(told[0, 1]), control.world)
    prepared = fresh.path(folder, rank, _PREPARED)
    try:
        if failure is None:
            _write(saved(), fresh.path(folder, rank, _PART), prepared)
    except Exception as error:  # memory may run out, too: the others wait to hear of it
        failure = error
    try:
        require_success(failure, "save its state, and what was saved before is still there", control)
    except Exception as error:
        # Otherwise a rank may have heard that all is well, and have removed its older file.
        if error is failure or isinstance(error, PeerFailed):
            _remove([fresh.path(folder, rank, _PART), prepared])
        raise
    _rename(prepared, fresh.path(folder, rank, _COMMITTED))
    _remove(
        each.path
        for each in _files(folder)
        if each.set.number < fresh.number and each.rank % control.world == rank
    )


def kept(control: Comm, folder: Path) -> Any:
    """Read this rank's part of the newest set that `keep` wrote with this number of ranks; `None` if there is
    none.

    Raises as `load` does, and `ValueError` on all ranks if the files are of another number of ranks.
    """
    files = _seen(control, folder)
    chosen = _chosen(_told(files, control), control.world, "refuse")
    if chosen is None:
        return None
    if not chosen.each_its_own:
        raise ValueError(f"{folder} was written by {chosen.set.world} ranks, and here are {control.world}")
    [path] = [each.path for each in files if each.set == chosen.set and each.rank == control.rank]
    found, failure = None, None
    try:
        found = _read(path)
    except Exception as error:  # of many types, by what is damaged
        failure = ValueError(f"a file of {folder} cannot be read: {error}")
    require_success(failure, "read its state", control)
    return found


def _seen(control: Comm, folder: Path) -> list[_File]:
    """The files in `folder`, on all ranks together."""
    files, failure = list[_File](), None
    try:
        files = _files(folder) if folder.exists() else []
    except OSError as error:
        failure = error
    require_success(failure, f"look into {folder}", control)
    return [each for each in files if each.suffix != _PART]


def load(of: Stateful, folder: Path, missing: Missing) -> int | None:
    """Load the newest complete set in `folder`, on all ranks together; returns its step, `None` if there is
    no set.

    A set of another number of ranks must be visible as a whole to every rank. Raises `FileNotFoundError` on
    all ranks for a set that has lost files, unless `missing="drop"`. Raises as `state.load` for the contents
    of files.
    """
    control = of.control
    files, failure = _seen(control, folder), None
    chosen = _chosen(_told(files, control), control.world, missing)
    if chosen is None:
        return None
    mine = {each.rank: each.path for each in files if each.set == chosen.set}
    saved: Saved = []
    try:
        ranks = [control.rank] if chosen.each_its_own else sorted(mine)
        found = [_read(mine[rank]) for rank in ranks]
        saved = found[0] if chosen.each_its_own else found
    except Exception as error:  # of many types, by what is damaged
        failure = ValueError(f"a file of {folder} cannot be read: {error}").with_traceback(
            error.__traceback__
        )
    require_success(failure, "read its state", control)
    others = chosen.each_its_own and not of.fits(saved)
    of.load(_of_all(folder, mine, control) if others else saved, missing, others)
    return of.step()


def _files(folder: Path) -> list[_File]:
    """Files in `folder` that gradwire has written."""
    found = []
    for path in folder.iterdir():
        if name := _NAME.fullmatch(path.name):
            number, token, rank, world, suffix = name.groups()
            of = _Set(int(number), int(token, 16), int(world))
            if of.number < _LARGEST and int(rank) < of.world < _LARGEST:
                found.append(_File(of, int(rank), suffix, path))
    return found


class _Chosen(NamedTuple):
    set: _Set
    each_its_own: bool
    """True if a rank reads its own file; else every rank reads all files."""


class _Sight(NamedTuple):
    """The files of a set that one rank sees."""

    set: _Set
    own: bool
    """True if this rank's file is there."""
    ranks: int
    """Number of ranks whose files are there; `which` is a hash of these ranks."""
    which: int
    committed: bool


def _told(files: list[_File], control: Comm) -> list[dict[_Set, _Sight]]:
    """Tell all ranks the newest sets that this rank sees. Returns the sets by rank. One all-gather."""
    table = torch.zeros(_OFFERS, 7, dtype=torch.int64, device="cpu")
    for row, each in zip(table, sorted({each.set for each in files}, reverse=True), strict=False):
        here = {file.rank for file in files if file.set == each}
        committed = any(file.suffix == _COMMITTED for file in files if file.set == each)
        which = hash(tuple(sorted(here))) & (2**62 - 1)  # of whole numbers: the same in all processes
        own = each.world == control.world and control.rank in here
        row.copy_(torch.tensor([*each, own, len(here), which, committed], device="cpu"))
    rows = gathered(control, table.view(-1)).view(control.world, _OFFERS, 7).tolist()
    seen = [[_Sight(_Set(*row[:3]), bool(row[3]), row[4], row[5], bool(row[6])) for row in r] for r in rows]
    return [{sight.set: sight for sight in each if sight.ranks} for each in seen]


def _chosen(told: list[dict[_Set, _Sight]], world: int, missing: Missing) -> _Chosen | None:
    """Choose the newest set that all ranks can load; the same on all ranks.

    Args:
        told: by rank, the sets that it sees, as `_told` returns them.
        world: number of ranks now.
        missing: "drop" also allows sets that have lost files, if all ranks see the same files.

    Returns None, with a warning, if the very first save was cut off, and None if there are no files. Raises
    `FileNotFoundError` if a complete save has lost files.
    """
    known = sorted({each for sights in told for each in sights}, reverse=True)
    everywhere = {each: [sights[each] for sights in told if each in sights] for each in known}
    for each, sights in everywhere.items():
        if len(sights) < world:
            continue
        if all(sight.own for sight in sights):
            return _Chosen(each, each_its_own=True)
        if all(sight.ranks == each.world for sight in sights):
            return _Chosen(each, each_its_own=False)
    if missing == "drop":
        for each, sights in everywhere.items():
            if len(sights) == world and len({sight.which for sight in sights}) == 1:
                return _Chosen(each, each_its_own=False)
    for each, sights in everywhere.items():
        if any(sight.committed for sight in sights):
            seen = ", ".join(str(sights[each].ranks if each in sights else 0) for sights in told)
            raise FileNotFoundError(
                f"the set of files wire-{each.number:08d} of {each.world} ranks is not whole: ranks see "
                f"{seen} of its files. {_WAYS[missing]}"
            )
    if known:
        warnings.warn(
            "the first save was cut off, so there is nothing to load", GradwireWarning, stacklevel=2
        )
    return None


def _of_all(folder: Path, mine: Mapping[int, Path], control: Comm) -> Saved:
    """Read the states of all old ranks in `folder`, to load them on another number of ranks. A collective
    over `control`.

    `mine` are the files that this rank sees, by the rank that saved them. If a file is missing or damaged on
    any rank, all ranks raise an error.
    """
    failure: Exception | None = None
    found: list[Any] = []
    try:
        if len(mine) < control.world:
            raise FileNotFoundError(
                f"{folder} was written with other nodes, so every rank needs all files of the set; it sees "
                f"those of ranks {sorted(mine)}"
            )
        found = [_read(mine[rank]) for rank in sorted(mine)]
    except FileNotFoundError as error:
        failure = error
    except Exception as error:  # of many types, by what is damaged
        failure = ValueError(f"a file of {folder} cannot be read: {error}")
    require_success(failure, "read all states", control)
    return found


def _read(path: Path) -> Any:
    """Read a state that `_write` wrote; compare the CRC-32 of every tensor, which torch writes but never
    checks.

    Compressed files are refused: unpacked, they could be larger than memory.
    """
    with ZipFile(path) as file:
        entries = file.infolist()
        is_compressed = any(each.compress_type != ZIP_STORED for each in entries)
        if is_compressed or sum(each.file_size for each in entries) > path.stat().st_size:
            raise ValueError(f"{path.name} is compressed, which no state is")
        damaged = file.testzip()
    if damaged is not None:
        raise ValueError(f"{path.name}: {damaged} is damaged")
    return torch.load(path, map_location="cpu", weights_only=True)


class _Written:
    """File that keeps its first `OSError` in `failure`; torch's writer may raise another error instead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.flush = file, file.flush
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise


def _write(saved: Mapping[str, Any], part: Path, path: Path) -> None:
    """Write `saved` to `part`, and rename it to `path` when all of it is on the disk.

    So `path` is complete or does not exist. An `OSError` names the folder.
    """
    written: _Written | None = None
    try:
        with part.open("wb") as file:
            written = _Written(file)
            torch.save(saved, written)  # type: ignore[arg-type]  # all that it calls
            file.flush()
            os.fsync(file.fileno())
        _rename(part, path)
    except Exception as error:
        cause = error if written is None else written.failure or error
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(part.parent)) from error
        raise


def _rename(old: Path, new: Path) -> None:
    """Rename a file, and wait until the new name is on the disk."""
    os.replace(old, new)
    folder = os.open(new.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(paths: Iterable[Path]) -> None:
    """Delete `paths` where possible. A file that stays only takes space: its set is older or incomplete."""
    for path in paths:
        with suppress(OSError):
            path.unlink()
