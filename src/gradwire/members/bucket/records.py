"""The objects of a run: their keys, and what is in them.

    spec                                what all members agree on, and the key of the first θ₀
    theta/<round>-<random>              a shared state: θ₀, outer optimizer, buffers
    snapshots/<round>                   small: which of them is the state before that round
    members/<name>-<number>             heartbeat of a process, written again and again
    offers/<round>/<name>-<number>      what a member has learned
    seals/<round>                       small, never deleted: which offers count; none, if parameters differ

All but heartbeats are created once and never change. Rounds are numbered from 0, and the round of a state is
the number of rounds that have landed in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TypeVar
from uuid import uuid4

from gradwire.errors import WireError

FORMAT = 1
"""Version of the objects' format, which the spec names."""
SPEC, THETAS, SNAPSHOTS, MEMBERS, OFFERS, SEALS = "spec", "theta", "snapshots", "members", "offers", "seals"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*(-[A-Za-z0-9_.]+)*")
"""Names that are keys on all stores, and from which the number after them can be told."""
_OF_A_ROUND = re.compile(r"[a-z]+/(\d{8})\b.*")
_NUMBERED = re.compile(r"(.+)-(\d{6})")

T = TypeVar("T", bound="_Record")


class _Record:
    """A record of texts and numbers, as JSON."""

    def as_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()  # type: ignore[call-overload]

    @classmethod
    def of(cls: type[T], data: bytes) -> T:
        """The inverse of `as_bytes`. Raises `WireError` for what no member of gradwire would write."""
        try:
            found = json.loads(data)
            return cls(**{each.name: found[each.name] for each in fields(cls)})  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"an object of the run is no {cls.__name__}: {error!r}") from error


@dataclass(frozen=True)
class Spec(_Record):
    """Settings that all members share."""

    run: str
    """Random, the name of the run."""
    terms: Mapping[str, str]
    theta: str
    """Key of the shared state before round 0."""
    format: int = FORMAT


@dataclass(frozen=True)
class Beat(_Record):
    """Heartbeat of a member."""

    nonce: str
    round: int
    """Rounds that have landed here; below 0 if it has not begun."""
    joined: int = -1
    """The round in which it began; below 0 before."""
    reads: int = -1
    """Round of the snapshot from which it catches up; below 0 if it reads none."""
    passes: int = -1
    """Last round to which it offers nothing; after all rounds if it has failed."""
    writes: int = -1
    """Round of the snapshot that it writes for all; below 0 if it writes none."""
    step: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class Snapshot(_Record):
    """A shared state."""

    round: int
    theta: str
    digest: str
    """Of its bytes."""


@dataclass(frozen=True)
class Counted(_Record):
    """An offer in a seal."""

    key: str
    digest: str
    """Of its bytes."""
    weight: float


@dataclass(frozen=True)
class Seal(_Record):
    """Offers that count in a round, by name: the order in which all members add them up."""

    round: int
    theta: str
    """Digest of the shared parameters that they were offered against."""
    by: str
    """Member that created it, as "name-number"."""
    nonce: str
    offers: tuple[Counted, ...]

    @classmethod
    def of(cls, data: bytes) -> Seal:
        """See `_Record.of`."""
        told = super().of(data)
        try:
            offers = tuple(Counted(**each) for each in told.offers)  # type: ignore[arg-type]
        except TypeError as error:
            raise WireError(f"an object of the run is no seal: {error!r}") from error
        return cls(told.round, told.theta, told.by, told.nonce, offers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _key, name, _number in processes(each.key for each in self.offers))


@dataclass(frozen=True)
class Offer:
    """Payload of a member for one round."""

    round: int
    theta: str
    """Digest of the shared parameters against which it is."""
    weight: float
    """Its weight in the mean: 1 for `every` steps."""
    payload: bytes
    nonce: str = ""

    def as_bytes(self) -> bytes:
        head = {"round": self.round, "theta": self.theta, "weight": self.weight, "nonce": self.nonce}
        return json.dumps(head).encode() + b"\n" + self.payload

    @classmethod
    def of(cls, data: bytes) -> Offer:
        """The inverse. Raises `WireError`."""
        head, _, payload = data.partition(b"\n")
        try:
            told = json.loads(head)
            weight = float(told["weight"])
            if not 0.0 < weight < 1e9:
                raise ValueError(f"weight {weight}")
            return cls(int(told["round"]), str(told["theta"]), weight, payload, str(told["nonce"]))
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"an object of the run is no offer: {error!r}") from error


def check_name(name: object) -> str:
    """Return `name`. Raises `ValueError` unless it can be part of a key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 100 or _NUMBERED.fullmatch(name):
        raise ValueError(
            f"name={name!r} is no name of this replica: take letters, digits, '.', '_' and single '-', such "
            "as 'site-a'"
        )
    return name


def who(name: str, number: int) -> str:
    """A process of a member: its name, and how many processes had that name before.

    >>> who("site-a", 3)
    'site-a-000003'
    """
    return f"{name}-{number:06d}"


def processes(keys: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Key, name and number of each of `keys` that ends with a process; others are no matter of the run.

    >>> list(processes(["offers/00000007/site-a-000003", "members/.DS_Store"]))
    [('offers/00000007/site-a-000003', 'site-a', 3)]
    """
    for key in keys:
        found = _NUMBERED.fullmatch(key.rpartition("/")[2])
        if found is not None:
            yield key, found[1], int(found[2])


def member_key(name: str, number: int) -> str:
    return f"{MEMBERS}/{who(name, number)}"


def seal_key(round_: int) -> str:
    return f"{SEALS}/{round_:08d}"


def snapshot_key(round_: int) -> str:
    return f"{SNAPSHOTS}/{round_:08d}"


def offers_of(round_: int) -> str:
    return f"{OFFERS}/{round_:08d}"


def by_round(keys: Iterable[str]) -> list[tuple[int, str]]:
    """Rounds and keys of those of `keys` that are of a round, the first round first; others are no matter of
    the run.

    >>> by_round(["theta/00000006-8c7d", "theta/.DS_Store", "theta/00000003-1f00"])
    [(3, 'theta/00000003-1f00'), (6, 'theta/00000006-8c7d')]
    """
    return sorted((int(found[1]), key) for key in keys if (found := _OF_A_ROUND.fullmatch(key)) is not None)


def new_theta(round_: int) -> str:
    return f"{THETAS}/{round_:08d}-{random_text()}"


def random_text() -> str:
    """A text that nobody else has."""
    return uuid4().hex


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
