"""Comparison of arguments and states on all ranks, at attach and when a state is loaded.

Messages have a fixed size. They are on the CPU: the comm is the reducer's `control`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import torch

from gradwire.comm import Comm, Pending, gathered
from gradwire.errors import DAMAGED, PeerFailed, RanksDisagree

T = TypeVar("T")

_TEXT_BYTES = 120
_HASH_BYTES = 8
_FIELD_BYTES = _TEXT_BYTES + _HASH_BYTES


def require_agreement(fields: Mapping[str, str], comm: Comm) -> None:
    """Compare `fields` over all ranks; raise `RanksDisagree` on all of them, naming field and values.

    One all-gather of 128 bytes per field and rank: a data-dependent length would abort gloo. A difference
    beyond the first 120 bytes is found by a hash.
    """
    columns = _all(list(fields.values()), comm).unbind(1)
    for name, column in zip(fields, columns, strict=True):
        if bool((column != column[0]).any()):
            values = "; ".join(f"rank {rank}: {_unpack(row)}" for rank, row in enumerate(column))
            raise RanksDisagree(f"ranks disagree on {name}: {values}")


def is_the_same(text: str, comm: Comm) -> bool:
    """True if all ranks have the same `text`; all ranks get the same answer.

    One all-gather of 128 bytes per rank. The text may be of any length.
    """
    [column] = _all([text], comm).unbind(1)
    return bool((column == column[0]).all())


def require_success(failure: BaseException | None, what: str, comm: Comm) -> None:
    """Raise the error of this rank, or `PeerFailed` if another rank has one.

    One all-gather of 128 bytes per rank.

    Args:
        failure: the error of this rank, if there is one.
        what: completes "rank 1 could not".
        comm: over the ranks that wait for each other.
    """
    texts = [
        _text(row)
        for row in _all(["" if failure is None else f"{type(failure).__name__}: {failure}"], comm)[:, 0]
    ]
    if failure is not None:
        raise failure
    if failed := [f"rank {rank} could not {what}: {text}" for rank, text in enumerate(texts) if text]:
        raise PeerFailed("; ".join(failed))


def on_all_ranks(function: Callable[[], T], what: str, comm: Comm) -> T:
    """Call `function`, and return its result once it has returned on every rank; else raise as
    `require_success`.

    For calls that may fail on one rank alone, for lack of memory or in a user's code, while the others would
    go on to a collective.

    Args:
        function: must not issue a collective.
        what: completes "rank 1 could not".
        comm: over the ranks that wait for each other.
    """
    failure: BaseException | None = None
    try:
        found = function()
    except BaseException as error:  # `SystemExit`, too: the others wait to hear of it
        failure = error
    require_success(failure, what, comm)
    return found


def require_accepted(refusal: Exception | None, comm: Comm) -> None:
    """Raise this rank's `refusal` of a configuration, if it has one.

    The others raise `RanksDisagree` with its text then: they would wait for this rank.
    """
    fields = {"the configuration": "accepted" if refusal is None else f"refused, {refusal}"}
    try:
        require_agreement(fields, comm)
    except RanksDisagree:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal


def damage(pending: Pending) -> Exception | None:
    """Wait for a collective. Returns the error if its bytes were damaged, for `require_undamaged`."""
    try:
        pending.wait()
    except DAMAGED as error:
        return error
    return None


def require_undamaged(found: Iterable[Exception | None], control: Comm) -> None:
    """Raise on all ranks if one of them has found damage in collectives that have all taken place.

    Only the receiver knows of damage. Without checksums nothing is asked.
    """
    failures = [each for each in found if each is not None]
    if control.verifies:
        require_success(failures[0] if failures else None, "receive undamaged bytes", control)


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the bytes of `tensor`, in the order of its elements. Waits for its device."""
    plain = tensor.cpu().contiguous().view(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data)


def _all(texts: Sequence[str], comm: Comm) -> torch.Tensor:
    """The texts of all ranks, (world, texts, bytes)."""
    mine = torch.cat([_pack(text) for text in texts])
    return gathered(comm, mine).view(comm.world, len(texts), _FIELD_BYTES)


@dataclass(frozen=True)
class OptimizerText:
    """The configuration of a model's optimizers, as texts to compare.

    Of an option that is neither a number, a text, a flag nor a tuple of such, a tensor for instance, only the
    type counts.
    """

    kind: str
    groups: int
    options: dict[str, str]

    @classmethod
    def of(cls, optimizers: Collection[torch.optim.Optimizer]) -> OptimizerText:
        """The texts of all optimizers, with groups numbered through. Passes an optimizer's own errors on."""
        kinds = [f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" for optimizer in optimizers]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        options = {
            f"optimizer group {number} {name}": _described(value)
            for number, group in enumerate(groups)
            for name, value in sorted(group.items())
            if name != "params"
        }
        return cls(", ".join(kinds) or "none", len(groups), options)


def require_same_optimizer(mine: OptimizerText, comm: Comm) -> None:
    """Compare the optimizers of all ranks; raise `RanksDisagree` as above.

    Two or three all-gathers, as types and numbers of groups decide how many options there are.
    """
    options = mine.options
    shape = {
        "optimizer": mine.kind,
        "optimizer groups": str(mine.groups),
        "optimizer options": " ".join(options),
    }
    require_agreement(shape, comm)
    try:
        require_agreement({"optimizer options": str(options)}, comm)
    except RanksDisagree:
        require_agreement(options, comm)  # which of them; a hundred groups would be a long message otherwise
        raise


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_described(each) for each in value)})"
    if isinstance(value, bool | str | None):
        return repr(value)
    if isinstance(value, Real):
        return repr(float(value))  # 1 is 1.0, and numpy's numbers are numbers
    return type(value).__name__


def _pack(text: str) -> torch.Tensor:
    data = text.encode(errors="backslashreplace")  # a text from a damaged file may be none
    digest = hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
    return torch.frombuffer(
        bytearray(data[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0") + digest), dtype=torch.uint8
    )


def _unpack(row: torch.Tensor) -> str:
    return f"{_text(row)} (fingerprint {bytes(row[_TEXT_BYTES:].tolist()).hex()})"


def _text(row: torch.Tensor) -> str:
    return bytes(row[:_TEXT_BYTES].tolist()).rstrip(b"\0").decode(errors="replace")
