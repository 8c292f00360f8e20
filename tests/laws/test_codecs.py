"""What a codec declares, it does: one test per flag, over every codec."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.unit.context import ExchangeContext
from tests.laws.cases import AT, BF16, CODECS, F16, F32, F64, CodecCase, ScaledRandomK
from tests.support.bits import bits, global_generators
from tests.support.depth import drawn
from tests.support.gradients import KINDS, Kind, coded, generator
from tests.support.looped import looped

SIZES = (0, 1, 2, 7, 127, 4097, 40_009)
DTYPES = (F32, F64, F16, BF16)

by_kind = partial(looped, "case", by=lambda case: case.kind)
every_codec = looped("case", CODECS)
every_dtype = looped("dtype", DTYPES)
FINITE = KINDS[:-1]


def declaring(flag: str) -> list[CodecCase]:
    """All codecs whose `flag` is set."""
    return [case for case in CODECS if getattr(case.codec.laws, flag)]


def finite(case: CodecCase, law: str, dtype: torch.dtype = F32) -> list[tuple[Kind, int]]:
    """Kinds and sizes of gradients: all, or a few for each codec, law and type."""
    return drawn(product(FINITE, SIZES), 3, f"{law} {case} {dtype}")


def make(kind: Kind, size: int, dtype: torch.dtype, rank: int = 0) -> Tensor:
    # 2^14 is within the range of every payload type.
    return kind(rank, size, dtype, generator(kind.__name__, size, str(dtype), rank), 2.0**14)


def decode(codec: Codec, payload: Tensor, like: Tensor, ctx: ExchangeContext = AT) -> Tensor:
    out = torch.zeros_like(like)
    codec.add_decoded(payload, out, 1.0, ctx)
    return out


@every_codec
@every_dtype
def test_payload_is_of_the_announced_size_and_type(case: CodecCase, dtype: torch.dtype) -> None:
    for size in SIZES:
        payload = case.codec.encode(make(coded, size, dtype), AT)
        assert (payload.numel(), payload.dtype) == case.codec.payload(size, dtype, AT), size
        assert payload.dim() == 1
        assert payload.is_contiguous()


@every_codec
@every_dtype
def test_encode_reads_and_returns_new_memory(case: CodecCase, dtype: torch.dtype) -> None:
    x = make(coded, 127, dtype)
    before = bits(x)
    payload = case.codec.encode(x, AT)
    payload.zero_()
    assert bits(x) == before


@every_codec
def test_nothing_passes_from_encode_to_decode_but_the_payload(case: CodecCase) -> None:
    x = make(KINDS[1], 1000, F32)
    payload = case.codec.encode(x, AT)
    here, there = decode(case.codec, payload, x), decode(copy.deepcopy(case.codec), payload.clone(), x)
    assert bits(here) == bits(there)


@every_codec
def test_generators_are_not_touched(case: CodecCase) -> None:
    before = global_generators()
    x = make(coded, 1000, F32)
    decode(case.codec, case.codec.encode(x, AT), x)
    assert global_generators() == before


@every_codec
@every_dtype
def test_decoding_adds_with_its_weight(case: CodecCase, dtype: torch.dtype) -> None:
    # Integers up to 13, weights and sums below 256: exact in every type.
    x = make(coded, 127, dtype)
    payload = case.codec.encode(x, AT)
    plain = decode(case.codec, payload, x)
    for weight in (1.0, -1.0, 2.0, 0.5):
        out = torch.full_like(x, 8.0)
        case.codec.add_decoded(payload, out, weight, AT)
        assert torch.equal(out, 8.0 + weight * plain)


@every_codec
def test_what_is_encoded_minus_what_is_decoded_leaves_what_was_not_sent(case: CodecCase) -> None:
    x = make(coded, 127, F32)
    left = x.clone()
    case.codec.add_decoded(case.codec.encode(x, AT), left, -1.0, AT)
    sent = decode(case.codec, case.codec.encode(x, AT), x)
    assert torch.allclose(left + sent, x, rtol=0.0, atol=1e-5)
    if case.exact:
        assert torch.equal(left + sent, x)
        assert ((left == 0) | (sent == 0)).all()  # small integers are sent whole or not at all


@by_kind(CODECS)
@every_dtype
def test_taking_is_encoding_and_subtracting(case: CodecCase, dtype: torch.dtype) -> None:
    for kind, size in finite(case, "taking", dtype):
        x = make(kind, size, dtype)
        left, payload = x.clone(), case.codec.encode(x, AT)
        case.codec.add_decoded(payload, left, -1.0, AT)
        taken = case.codec.take(x, AT)
        assert bits(taken) == bits(payload), (kind.__name__, size)
        assert torch.equal(x, left), (kind.__name__, size)


@by_kind(declaring("unbiased"), few=1)
# One copy shows what is wrong with a place, or a draw; many show what is slightly wrong everywhere.
@looped(("copies", "draws"), [(1, 2000), (500, 200)])
def test_declared_unbiased(case: CodecCase, copies: int, draws: int) -> None:
    values = make(KINDS[1], 40, F32)
    x = values.repeat(copies)
    samples = []
    for step in range(draws):
        ctx = replace(AT, step=step)
        sent = decode(case.codec, case.codec.encode(x, ctx), x, ctx).double()
        samples.append(sent.view(copies, 40).mean(0))
    error = torch.stack(samples) - values.double()
    # One of 40 is beyond 4 sigma once in 400 runs; the draws are those of the steps, always the same.
    rounding = values.abs().max().double() * torch.finfo(F32).eps
    assert (error.mean(0).abs() <= 4 * error.square().mean(0).sqrt() / draws**0.5 + rounding).all()


@looped("case", declaring("linear"))
@every_dtype
def test_declared_linear(case: CodecCase, dtype: torch.dtype) -> None:
    for kind, world in product(FINITE, (2, 3, 7)):
        _check_linear(case, dtype, kind, world)


def _check_linear(case: CodecCase, dtype: torch.dtype, kind: Kind, world: int) -> None:
    inputs = [make(kind, 127, dtype, rank) / world for rank in range(world)]
    payloads = [case.codec.encode(x, AT) for x in inputs]
    total = payloads[0].clone()
    for payload in payloads[1:]:
        total += payload
    summed_first = decode(case.codec, total, inputs[0]).double()
    each = torch.stack([decode(case.codec, payload, inputs[0]) for payload in payloads]).double()
    # W − 1 roundings of the payload's type against none, and one of the conversion back; conversions of
    # results below the normal range err by a smallest subnormal of the tensor's type.
    u = max(torch.finfo(payloads[0].dtype).eps, torch.finfo(dtype).eps) / 2
    floor = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = each.abs().sum(0) * (world * u / (1 - world * u)) + world * floor
    assert ((summed_first - each.sum(0)).abs() <= bound).all(), (kind.__name__, world)
    if kind is coded and world == 2:
        assert torch.equal(summed_first, each.sum(0))


@looped("case", declaring("lossless"))
@every_dtype
def test_declared_lossless(case: CodecCase, dtype: torch.dtype) -> None:
    for kind, size in product(FINITE, SIZES):
        x = make(kind, size, dtype)
        assert torch.equal(decode(case.codec, case.codec.encode(x, AT), x), x), (kind.__name__, size)


@looped("case", declaring("contractive"))
def test_declared_contractive(case: CodecCase) -> None:
    for kind, size in finite(case, "contraction"):
        _check_contraction(case, kind, size)


def _check_contraction(case: CodecCase, kind: Kind, size: int) -> None:
    # Squares in float64: those of float32 neither overflow nor vanish there. The sums of two norms of n
    # squares err by a relative n·2^-53 at most, below the 1e-11 that is granted.
    x = make(kind, size, F32)
    draws = 100 if case.in_mean and size < 1000 else 1
    shares = []
    for step in range(draws):
        ctx = ExchangeContext(step, 0, 0, 1)
        left = x - decode(case.codec, case.codec.encode(x, ctx), x, ctx)
        shares.append(left.double().square().sum())
    norm = x.double().square().sum()
    absolute = size * case.floor**2
    spread = 4 * torch.stack(shares).std() / draws**0.5 if draws > 1 else 0.0
    if case.in_mean and draws == 1:
        assert shares[0] <= norm, (kind.__name__, size)
    else:
        mean = torch.stack(shares).mean()
        bound = case.gamma(size) * norm * (1 + 1e-11) + absolute + spread
        assert mean <= bound, (kind.__name__, size)


@looped("case", declaring("contractive"))
def test_contraction_is_strict_within_the_normal_range(case: CodecCase) -> None:
    for size in SIZES[1:]:
        assert case.gamma(size) < 1.0


@looped("case", declaring("covers"))
@every_dtype
def test_declared_covers(case: CodecCase, dtype: torch.dtype) -> None:
    for size in (0, 127, 4097):
        _check_cover(case, dtype, size)


def _check_cover(case: CodecCase, dtype: torch.dtype, size: int) -> None:
    x = make(coded, size, dtype)
    sent = decode(case.codec, case.codec.encode(x, AT), x)
    if case.exact:
        assert torch.equal(sent.sign(), x.sign())
    # Rounded to few levels an element may be zero in one step: not in the mean of many.
    for step in range(0 if case.exact else 100):
        ctx = replace(AT, step=step)
        sent = sent + decode(case.codec, case.codec.encode(x, ctx), x, ctx)
    assert (sent != 0).all(), size


@looped("case", [case for case in CODECS if not case.codec.laws.may_overflow])
@every_dtype
def test_no_overflow_unless_declared(case: CodecCase, dtype: torch.dtype) -> None:
    x = torch.full((127,), torch.finfo(dtype).max, dtype=dtype)
    x[::2] *= -1
    assert decode(case.codec, case.codec.encode(x, AT), x).isfinite().all()


@looped("case", declaring("may_overflow"))
def test_declared_overflow_happens(case: CodecCase) -> None:
    x = torch.full((3,), torch.finfo(F32).max)
    assert not decode(case.codec, case.codec.encode(x, AT), x).isfinite().any()


@looped("case", [case for case in CODECS if case.exact])
@every_dtype
def test_poison_that_travels_is_seen_and_stays_in_its_place(case: CodecCase, dtype: torch.dtype) -> None:
    x = make(coded, 127, dtype)
    x[40], x[41] = torch.nan, torch.inf
    decoded = decode(case.codec, case.codec.encode(x, AT), x)
    clean = torch.ones_like(x, dtype=torch.bool)
    clean[40:42] = False
    assert decoded[clean].isfinite().all()
    sent = decoded[~clean] != 0
    assert not decoded[~clean][sent].isfinite().any()


@looped("case", [case for case in CODECS if not case.exact])
@every_dtype
def test_poison_is_seen_though_it_spreads(case: CodecCase, dtype: torch.dtype) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = make(coded, 127, dtype)
        x[40] = bad
        assert not decode(case.codec, case.codec.encode(x, AT), x).isfinite().all(), bad


def test_scaled_random_choice_is_larger_than_what_came() -> None:
    # The law of contraction can fail: what the tests' own codec leaves is (1/ratio − 1) times x.
    x, codec = torch.ones(1000), ScaledRandomK(0.1)
    left = x - decode(codec, codec.encode(x, AT), x)
    assert left.square().sum() > 5 * x.square().sum()
