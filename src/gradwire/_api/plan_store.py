"""`gradwire.plan_store`: bytes, requests and time of rounds over an object store, before anything runs there.

Assumptions, which `docs/store.md` repeats:

- Sites have links of the same rate and delay, and the store has no limit of its own. A request takes a round
  trip beside its bytes. Connections are open already.
- All sites offer at the same time, or the last one `waits_s` later. Meanwhile the others look for the seal.
- A look is one read and two lists, and a read of the heartbeat of each site that is awaited. The pauses
  between looks are those of `gradwire.members.bucket.rounds`.
- One site writes a snapshot for all, and one the seal: each site has its share of their bytes and requests.
  Looks of others at whether a snapshot is still being written are left out.
- A snapshot is as large as the parameters, and once more with an outer optimizer that has momentum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradwire._api.rounds import method_of
from gradwire._api.study import DAY_S, link_of, profile_of
from gradwire.control.forecast import specs_of_profile
from gradwire.members.bucket.coder import Coder
from gradwire.members.bucket.objects import PIECE
from gradwire.members.bucket.rounds import LONGEST_LOOK_S, LOOK_S, Rules
from gradwire.planning.shapes import Profile
from gradwire.planning.tuning import ROUNDS
from gradwire.quantities import bytes_text, columns, ms_text, table_text, titled
from gradwire.recipes import recipe
from gradwire.sources.buckets import CAP_BYTES, OwnBucket, assigned
from gradwire.step.layout import build
from gradwire.unit.parameters import ParameterSpec

CANDIDATES = (
    "sparseloco",
    "topk(ratio=0.02)",
    "onebit",
    "int4(collective='all_gather')",
    "int8(collective='all_gather')",
    "bf16",
    "diloco",
)
HEAD_BYTES, SEAL_BYTES, COUNTED_BYTES, BEAT_BYTES, POINTER_BYTES = 130, 130, 120, 150, 140
"""About the bytes of an offer beside its payload, of a seal, of each offer that it names, of a heartbeat, and
of a snapshot's pointer."""


@dataclass(frozen=True)
class Prices:
    """Prices of a store, in any currency: of a GB that is read, and of 1000 requests.

    Lists cost as writes do. Bytes that are written are taken as free, and what is stored, too.

    Raises `ValueError` for a price below 0, and for one that is not finite.
    """

    gb_read: float
    thousand_writes: float
    thousand_reads: float

    def __post_init__(self) -> None:
        for name, price in vars(self).items():
            if not 0.0 <= price < float("inf"):
                raise ValueError(f"{name}={price!r} is not a price of at least 0")


@dataclass(frozen=True)
class StoreForecast:
    """A round with one recipe. Bytes and requests are of one site and round; `day_price` is of one site."""

    recipe: str
    offer_bytes: int
    sent_bytes: float
    received_bytes: float
    puts: float
    gets: float
    lists: float
    exchange_s: float
    """From the coded offer to the last one that is read; coding is left out."""
    round_s: float
    """With its local steps."""
    day_price: float | None


@dataclass(frozen=True)
class StorePlan:
    """The recipes, the one of the shortest round first. All of it is predicted."""

    model: str
    parameters: int
    sites: int
    every: int
    waits_s: float
    rows: tuple[StoreForecast, ...]

    def as_dict(self) -> dict[str, Any]:
        """The plan's numbers and texts, for JSON."""
        return {**vars(self), "predicted": True, "rows": [dict(vars(each)) for each in self.rows]}

    def __str__(self) -> str:
        width, has_prices = columns(), any(each.day_price is not None for each in self.rows)
        told = [
            f"predicted, not measured: {self.model}, {self.parameters / 1e6:.1f} M parameters, {self.sites} "
            f"sites over a store, a round after {self.every} local steps",
            f"up, down and requests: of one site and round; the last site offers {self.waits_s:g} s after "
            "the others",
            "round: with its local steps; exchange: from coded to received. Coding is left out",
        ]
        if not has_prices:
            told.append("no prices are stated, so there is no money here")
        head = ["recipe", "round", "exchange", "up", "down", "puts", "gets", "lists"]
        rows = []
        for each in self.rows:
            cells = [each.recipe, ms_text(each.round_s), ms_text(each.exchange_s)]
            cells += [bytes_text(each.sent_bytes), bytes_text(each.received_bytes)]
            cells += [f"{number:.1f}" for number in (each.puts, each.gets, each.lists)]
            rows.append(cells if each.day_price is None else [*cells, f"{each.day_price:.2f}"])
        table = table_text([*head, *(["a day"] if has_prices else [])], rows, width)
        return f"{titled(told, width)}\n\n{table}"


def plan_store(
    model: str | Profile | nn.Module,
    *,
    sites: int,
    rate_bit_per_s: float,
    step_s: float,
    every: int = 30,
    delay_s: float = 0.0,
    waits_s: float = 0.0,
    candidates: Iterable[str] | None = None,
    beat_s: float = 10.0,
    snapshot_every: int = 10,
    prices: Prices | None = None,
) -> StorePlan:
    """Predict what rounds over an object store send, read, ask and take; a pure function.

    Args:
        model: as for `gradwire.plan`.
        sites: how many sites there are.
        rate_bit_per_s: rate of a site's link to the store, up and down.
        step_s: time of a local step.
        every: local steps from one round to the next.
        delay_s: one-way delay to the store.
        waits_s: by how much the last site's offer comes later than the others'.
        candidates: recipes; by default one of each kind that can be offered.
        beat_s: as for `gradwire.members.store`.
        snapshot_every: as for `gradwire.members.store`.
        prices: of the store. Without them there is no money in the plan.

    Raises `ValueError` for an impossible number, and for a recipe that cannot be offered.

    >>> found = plan_store("gpt2", sites=4, rate_bit_per_s=50e6, delay_s=0.025, step_s=0.5)
    >>> [f"{each.recipe}: {each.exchange_s:.1f} s" for each in found.rows[::6]]
    ['sparseloco: 2.1 s', 'diloco: 319.0 s']
    """
    texts = CANDIDATES if candidates is None else tuple(candidates)
    if not texts:
        raise ValueError("candidates=[]: there is nothing to compare")
    for name, number, least in (
        ("sites", sites, 1),
        ("every", every, 1),
        ("snapshot_every", snapshot_every, 1),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name}={number!r} is not a number of at least {least}")
    for name, seconds in (("step_s", step_s), ("beat_s", beat_s)):
        if not 0.0 < seconds < float("inf"):
            raise ValueError(f"{name}={seconds!r} is not a time above 0")
    if not 0.0 <= waits_s < float("inf"):
        raise ValueError(f"waits_s={waits_s!r} is not a time")
    link_of(rate_bit_per_s, delay_s)  # which refuses what is no link
    profile = profile_of(model)
    specs = specs_of_profile(profile)
    rules = Rules(beat_s=beat_s, snapshot_every=snapshot_every)
    rows = [
        _forecast(
            text, specs, sites, rate_bit_per_s / 8.0, 2.0 * delay_s, every * step_s, waits_s, rules, prices
        )
        for text in texts
    ]
    rows.sort(key=lambda row: row.round_s)
    return StorePlan(profile.model, profile.parameters, sites, every, waits_s, tuple(rows))


def _forecast(
    text: str,
    specs: tuple[ParameterSpec, ...],
    sites: int,
    bytes_per_s: float,
    trip_s: float,
    steps_s: float,
    waits_s: float,
    rules: Rules,
    prices: Prices | None,
) -> StoreForecast:
    payload, state = sizes_of(text, specs)
    offer, others = payload + HEAD_BYTES, sites - 1
    looks = looks_in(waits_s)
    # The offer; a look; the others' offers; the seal is created, and read.
    exchange_s = (offer + others * offer) / bytes_per_s + trip_s * (1 + 3 + others + 2) + waits_s
    round_s = steps_s + exchange_s
    beats, snapshots = round_s / rules.beat_s, 1.0 / rules.snapshot_every
    pieces = -(-state // PIECE)
    snapshot_puts = snapshots * (3.0 + (pieces + 1 if pieces > 1 else 0))
    seal = SEAL_BYTES + sites * COUNTED_BYTES
    sent = offer + beats * BEAT_BYTES + (seal + snapshots * (state + POINTER_BYTES + BEAT_BYTES)) / sites
    received = others * offer + seal + others * (looks - 1 + snapshots / sites) * BEAT_BYTES
    puts = 1.0 + beats + (1.0 + snapshot_puts) / sites
    gets = others + looks + 1.0 + others * (looks - 1 + snapshots / sites)
    lists = 2.0 * looks + (1.0 + 5.0 * snapshots) / sites
    price = None
    if prices is not None:
        writes = 1e-3 * (puts + lists) * prices.thousand_writes
        reads = 1e-3 * gets * prices.thousand_reads
        price = DAY_S / round_s * (writes + reads + 1e-9 * received * prices.gb_read)
    return StoreForecast(text, offer, sent, received, puts, gets, lists, exchange_s, round_s, price)


def looks_in(waits_s: float) -> int:
    """Looks for a seal in so many seconds, if requests take none, the last one among them.

    >>> [looks_in(seconds) for seconds in (0.0, 0.05, 0.2, 10.0)]
    [1, 2, 3, 12]
    """
    looks, pause_s, at_s = 1, LOOK_S, 0.0
    while at_s < waits_s:
        looks, at_s, pause_s = looks + 1, at_s + pause_s, min(1.5 * pause_s, LONGEST_LOOK_S)
    return looks


def sizes_of(text: str, specs: tuple[ParameterSpec, ...]) -> tuple[int, int]:
    """Bytes of a payload of recipe `text`, and of a snapshot's tensors. Raises `ValueError` for a recipe that
    cannot be offered.
    """
    travels, make = method_of(text)
    where = torch.device("meta")
    layout = build(specs, recipe(travels).build(), None, where, 2, None, ROUNDS)
    buckets = [OwnBucket(number, group, where, {}) for number, group in enumerate(assigned(specs, CAP_BYTES))]
    payload = Coder(layout, buckets, seed=0, number=0).size(0)
    outer = make([nn.Parameter(torch.zeros(1, dtype=torch.float32, device=where))])
    planes = 1 + bool(outer.defaults.get("momentum"))
    return payload, 4 * planes * sum(spec.numel for spec in specs)
