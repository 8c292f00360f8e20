"""What a codec costs, encode and decode apart, measured once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.errors import WireError
from gradwire.exchange.base import Decode
from gradwire.granularity import ON_DEVICE, ON_HOST
from gradwire.laws import Laws
from gradwire.measure import cache
from gradwire.measure.codec import EchoComm, codec_cost, measure_codec, payloads
from gradwire.memory import Memory, Residual
from gradwire.planning.costs import CodecCost, Line
from gradwire.recipes import entries, recipe
from gradwire.unit.context import ExchangeContext

ENCODE, DECODE = Line(3e-5, 2e-9), Line(1e-5, 5e-10)
CYCLE_STEPS = 3


class Clock:
    """A clock that only moves when work is done."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Paced:
    """An exchange that takes known times, in every third step."""

    grain, conserves, contractive, in_place, may_overflow = 1, True, True, False, False

    def __init__(self, clock: Clock, verb: str = "all_gather", memory: Memory | None = None) -> None:
        self.clock, self.verb, self.memory, self.needs_true_peers = clock, verb, memory, False
        self.worlds: set[int] = set()

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        self.worlds.add(comm.world)
        if self.needs_true_peers and comm.world > 1:
            raise WireError("that is what I sent")
        self.clock.now_s += ENCODE(x.numel())
        gathered = x.new_empty(comm.world, x.numel())
        comm.all_gather(gathered, x).wait()
        payloads = comm.world if self.verb == "all_gather" else 1

        def decode() -> None:
            self.clock.now_s += payloads * DECODE(x.numel())

        return decode

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return (Round(self.verb, numel, dtype),) if ctx.step % CYCLE_STEPS == 0 else ()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gradwire"


@pytest.mark.parametrize("verb", ["all_gather", "all_reduce"])
def test_known_costs_are_found_per_payload(verb: str) -> None:
    clock = Clock()
    curves = measure_codec(Paced(clock, verb), clock=clock)
    assert [x for x, _ in curves.encode.points] == list(ON_HOST.curve)
    # Sums of times up to 1 s in steps of 1e-5: 11 digits are left.
    for fit, true in ((curves.encode, ENCODE), (curves.decode, DECODE)):
        assert fit.line.base_s == pytest.approx(true.base_s, rel=1e-6)
        assert fit.line.slope_s == pytest.approx(true.slope_s, rel=1e-6)
        assert fit.residual < 1e-6


def test_what_needs_true_peers_is_measured_alone() -> None:
    clock = Clock()
    exchange = Paced(clock)
    exchange.needs_true_peers = True
    line = measure_codec(exchange, clock=clock).encode.line
    assert line.slope_s == pytest.approx(ENCODE.slope_s, rel=1e-6)
    assert exchange.worlds == {4, 1}


def test_the_memorys_compensation_is_part_of_encoding() -> None:
    clock = Clock()

    class Slow(Residual):
        def compensate(self, *arguments: object, **options: object) -> object:
            clock.now_s += 1.0
            return super().compensate(*arguments, **options)

    assert measure_codec(Paced(clock, memory=Slow()), clock=clock).encode.line.base_s > 1.0


def test_gradients_are_of_the_type_of_the_kernels_whatever_type_is_the_default(default_type: None) -> None:
    clock, types = Clock(), set[torch.dtype]()

    class Noting(Paced):
        def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
            types.add(x.dtype)
            return super().start(x, mean, comm, ctx)

    measure_codec(Noting(clock), clock=clock)
    assert types == {torch.float32}


def test_verbs_are_no_local_work() -> None:
    ticks = iter(range(100))
    comm = EchoComm(3, clock=lambda: float(next(ticks)))
    out = torch.empty(3, 2)
    comm.all_gather(out, torch.tensor([1.0, 2.0])).wait()
    assert out.tolist() == 3 * [[1.0, 2.0]]
    comm.all_to_all(out, torch.arange(6.0).view(3, 2)).wait()
    assert out.tolist() == 3 * [[0.0, 1.0]]
    comm.shift(out, torch.ones(3, 2)).wait()
    assert comm.spent_s == 3.0


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_recipe_can_be_measured(entry: object) -> None:
    built = entry.build()  # of an adaptive one dense: what it chooses is measured as what it is
    curves = measure_codec(built.exchange, (64, 256), budget_s=0.0)
    assert all(seconds > 0 for fit in (curves.encode, curves.decode) for _, seconds in fit.points)


def test_shards_that_are_gathered_make_one_unit() -> None:
    counts = {
        text: payloads(recipe(text).build().exchange, 1 << 16, 4)
        for text in ("topk", "leader_topk", "leader_topk(elect='norm')", "int8", "dense", "covap(interval=3)")
    }
    assert counts.pop("topk") == 4.0
    assert counts.pop("int8") == pytest.approx(1.0, abs=0.01)  # scales of the last block
    assert set(counts.values()) == {1.0}


def test_measured_once_then_remembered(own_cache: Path) -> None:
    calls: list[float] = []
    exchange = recipe("int8").build().exchange

    def measured(*arguments: object, **options: object) -> object:
        calls.append(0.0)
        return measure_codec(exchange, (64, 256), budget_s=0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.measure.codec.measure_codec", measured)
        first = codec_cost(exchange, "int8")
        assert codec_cost(exchange, "int8") == first
        assert len(calls) == 1
        codec_cost(exchange, "int4")
        assert len(calls) == 2
        for path in own_cache.iterdir():
            path.write_text("{")
        assert isinstance(codec_cost(exchange, "int8"), CodecCost)
        assert len(calls) == 3
        patch.setattr("gradwire.measure.codec.fingerprint", lambda: {"processor": "another"})
        codec_cost(exchange, "int8")
        assert len(calls) == 4


KEY, NUMBERS = {"recipe": "topk(ratio=0.01)", "processor": "a"}, {"encode_s": 1.5e-5}


def test_what_is_stored_comes_back_and_nothing_is_left_beside_it(own_cache: Path) -> None:
    assert cache.load(KEY) is None
    assert cache.store(KEY, NUMBERS)
    assert cache.load(KEY) == NUMBERS
    assert cache.load({**KEY, "processor": "b"}) is None
    assert [path.suffix for path in own_cache.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": {}, "numbers": {}}', '{"numbers": {"encode_s": 1.0}}', "\x00\xff"],
)
def test_a_file_that_makes_no_sense_is_no_file(text: str) -> None:
    path = cache.path_of(KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    assert cache.load(KEY) is None


@pytest.mark.parametrize("numbers", [None, 3, {"encode_s": "many"}, {"encode_s": None}])
def test_numbers_that_are_none_are_not_believed(numbers: object) -> None:
    assert cache.store(KEY, NUMBERS)
    cache.path_of(KEY).write_text(json.dumps({"key": KEY, "numbers": numbers}))
    assert cache.load(KEY) is None


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert not cache.store(KEY, NUMBERS)
    assert cache.load(KEY) is None
    assert isinstance(codec_cost(recipe("dense").build().exchange, "dense", budget_s=0.0), CodecCost)


class Near(Paced):
    """One that stays on a device, which has room for so many elements."""

    laws = Laws(stays_on_device=True)
    room = 1 << 30

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        if x.numel() > self.room:
            raise torch.OutOfMemoryError("no room")
        return super().start(x, mean, comm, ctx)


ON = SimpleNamespace(where=torch.device("cpu"), is_host=False)
LARGE = (1 << 18, 1 << 20, 1 << 21, 1 << 22)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's sizes go beyond a CPU's, but not so far that a test has no room for them."""
    monkeypatch.setattr("gradwire.granularity.ON_DEVICE", replace(ON_DEVICE, curve=LARGE))


def sizes(exchange: Near, budget_s: float) -> list[float]:
    return [
        x
        for x, _ in measure_codec(exchange, clock=exchange.clock, device=ON, budget_s=budget_s).encode.points
    ]


@pytest.mark.usefixtures("large")
def test_a_device_is_timed_on_larger_units_until_one_takes_longer_than_its_share() -> None:
    assert ON_DEVICE.curve[-1] > ON_HOST.curve[-1]
    assert sizes(Near(Clock()), budget_s=1.0) == [*LARGE]
    # 2^20 elements take 2.7 ms, and twice as many 5.3 ms.
    assert sizes(Near(Clock()), budget_s=4 * 3e-3) == [1 << 18, 1 << 20, 1 << 21]
    assert sizes(Near(Clock()), budget_s=0.0) == [1 << 18, 1 << 20]


@pytest.mark.usefixtures("large")
def test_a_device_is_timed_on_units_for_which_it_has_room() -> None:
    exchange = Near(Clock())
    exchange.room = 1 << 21
    assert sizes(exchange, budget_s=1.0) == [1 << 18, 1 << 20, 1 << 21]
    exchange.room = 1 << 19
    with pytest.raises(torch.OutOfMemoryError):
        sizes(exchange, budget_s=1.0)
