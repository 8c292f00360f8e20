"""QSGD and TernGrad: variances as the papers state them, parts, draws, and when feedback is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.contrib.stochastic_levels import qsgd_codec, tern_grad
from gradwire.kernels.layouts import Norm
from gradwire.recipes import recipe
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.steps import step
from tests.support.tiers import rest
from tests.support.whole import parts_of

AT = ExchangeContext(step=3, unit=1, rank=0, world=3, seed=2)
DRAWS = 400


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def decoded(codec: Codec, x: Tensor, ctx: ExchangeContext = AT) -> Tensor:
    out = torch.zeros_like(x)
    codec.add_decoded(codec.encode(x, ctx), out, 1.0, ctx)
    return out


def errors(codec: Codec, x: Tensor) -> Tensor:
    """‖C(x) − x‖² (draws,) in many steps."""
    contexts = (replace(AT, step=step) for step in range(DRAWS))
    return torch.stack([(decoded(codec, x, ctx) - x).double().square().sum() for ctx in contexts])


def below(found: Tensor, bound: float) -> bool:
    """Whether the mean of draws is at most `bound`, within 4 standard errors."""
    return float(found.mean()) <= bound + 4 * float(found.std()) / DRAWS**0.5


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("d", rest([1, 10, 100, 512], but=[1, 100]))
def test_qsgd_is_within_its_variance(bits: int, norm: Norm, d: int) -> None:
    levels = 2 ** (bits - 1) - 1
    bound = min(d / (4 * levels**2), math.sqrt(d) / levels)
    for x in (normal(d), normal(d) ** 5, torch.ones(d)):
        found = errors(qsgd_codec(bits, 512, norm), x)
        length = float(x.double().square().sum())
        assert below(found, bound * length)
        # In every draw; roundings of levels, steps and results are 2^-20 of the norm at most.
        assert float(found.max()) <= d * (1 / levels + 2**-20) ** 2 * length


@looped("d", [1, 2, 9, 100, 1000])
def test_tern_grads_variance_and_its_worst_case(d: int) -> None:
    worst = torch.full((d,), 1 / (1 + math.sqrt(d)))
    worst[0] = 1.0
    for x, bound in ((worst, (math.sqrt(d) - 1) / 2), (normal(d), None)):
        found, y = errors(tern_grad(), x), x.double()
        exact = float(y.abs().max() * y.abs().sum() - y.square().sum())
        assert below(found, exact + 1e-6 * float(y.square().sum()))
        assert below(-found, -exact + 1e-6 * float(y.square().sum()))
        if bound is not None:
            assert exact == pytest.approx(bound * float(y.square().sum()), rel=1e-6, abs=1e-9)


def test_tern_grad_sends_three_numbers_per_part() -> None:
    ctx = replace(AT, parts=parts_of(300, 0, 500))
    x = normal(800) * torch.cat([torch.ones(300), torch.full((500,), 100.0)])
    found = decoded(tern_grad(), x, ctx)
    for part in (slice(0, 300), slice(300, 800)):
        scale = x[part].abs().max()
        assert set(found[part].tolist()) == {-float(scale), 0.0, float(scale)}
        assert (found[part] * x[part] >= 0).all()


def test_terngrad_clips_at_so_many_deviations_only_if_told_to() -> None:
    x = normal(4000)
    x[17] = 1000.0
    clipped = 2.5 * float(x.double().square().mean().sqrt())
    for text, largest in (("terngrad(clip=2.5)", clipped), ("terngrad", 1000.0)):
        composition = recipe(text).build()
        mean = step(composition.exchange, lambda _rank: x, world=1)[0].mean
        assert float(mean.max()) == pytest.approx(largest, rel=1e-6)


@looped(
    ("bits", "bucket", "contractive"),
    [(8, 512, True), (8, 16_128, True), (8, 16_129, False), (4, 48, True), (4, 49, False), (2, 1, False)],
)
def test_contraction_follows_from_bits_and_bucket(bits: int, bucket: int, contractive: bool) -> None:
    for norm in ("l2", "max"):
        assert qsgd_codec(bits, bucket, norm).laws.contractive == contractive


def test_payload_depends_on_parts() -> None:
    ctx = replace(AT, parts=parts_of(1000, 0, 3, 21))
    # Two buckets, one and one; 500, 2 and 11 bytes of codes; padding to whole steps.
    assert qsgd_codec(bits=4).payload(1024, torch.float32, ctx) == (16 + 513 + 3, torch.uint8)
    assert qsgd_codec(bits=4).payload(1024, torch.float64, ctx) == (32 + 513 + 7, torch.uint8)
    assert tern_grad().payload(1024, torch.float32, ctx) == (12 + 250 + 1 + 6 + 3, torch.uint8)
    assert qsgd_codec().payload(0, torch.float32, AT) == (0, torch.uint8)


@pytest.mark.parametrize("codec", [qsgd_codec(), qsgd_codec(2, norm="max"), tern_grad()], ids=repr)
def test_an_idle_part_stays_zero_beside_a_loud_one(codec: Codec) -> None:
    ctx = replace(AT, parts=parts_of(100, 200))
    x = torch.cat([torch.zeros(100), 1e6 * normal(200)])
    payload = codec.take(x, ctx)
    assert not x[:100].any()
    out = torch.zeros(300)
    codec.add_decoded(payload, out, 1.0, ctx)
    assert not out[:100].any()


@pytest.mark.parametrize("codec", [qsgd_codec(bits=2), tern_grad()], ids=repr)
def test_steps_ranks_units_and_seeds_draw_anew(codec: Codec) -> None:
    x = normal(1000)
    contexts = [AT, *(replace(AT, **{what: 0 if what == "unit" else 1}) for what in ("step", "rank", "unit"))]
    contexts.append(replace(AT, seed=3))
    payloads = [bytes(codec.encode(x, ctx).tolist()) for ctx in contexts]
    assert len(set(payloads)) == len(payloads)
    assert bytes(codec.encode(x, AT).tolist()) == payloads[0]


@looped(("arguments", "message"), [({"bits": 5}, "bits=5"), ({"bucket": 0}, "bucket=0")])
def test_qsgd_says_what_is_wrong(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qsgd_codec(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip=-1"):
        tern_grad(-1.0)


def test_feedback_is_for_contractions() -> None:
    composition = recipe("qsgd(feedback=True)").build()
    assert composition.exchange.laws.contractive
    for text in ("qsgd(bits=4, feedback=True)", "qsgd(bits=2, norm='max', feedback=True)"):
        with pytest.raises(ValueError, match="not contractive"):
            recipe(text).build()
    recipe("qsgd(bits=4, bucket=32, feedback=True)").build()
