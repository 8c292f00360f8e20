"""Simulated worlds beside the papers' figures; `pytest -s` prints both, as does `docs/engineering/costs.md`.

What a paper does not give (compute times, latencies) is derived from one of its figures, and others of the
same paper are then compared.
"""

from __future__ import annotations

import pytest

import gradwire
from gradwire._api.simulate import Simulated
from gradwire.planning.shapes import load
from tests.papers.covap_tables import TABLE_I, TABLE_VII

LED, OWN = "leader_topk(ratio=0.01)", "topk(ratio=0.01)"  # 100 times fewer elements


def rate_bit_per_s(model: str, allreduce_s: float, workers: int) -> float:
    """Of a link over which a ring takes so long for the model's gradient."""
    return 8 * 2 * (workers - 1) / workers * 4 * load(model).parameters / allreduce_s


def scalecom(share: float, faster: float, workers: int) -> dict[str, Simulated]:
    """ResNet-50 where a dense all-reduce takes this share of a step of 8 workers, without overlap."""
    compute_s = 0.01
    found = gradwire.simulate(
        "resnet50",
        workers=[workers],
        rate_bit_per_s=rate_bit_per_s("resnet50", share / (1 - share) * compute_s, 8),
        step_s=compute_s / faster,
        overlap=False,
        candidates=["dense", LED, OWN],
    )
    return {each.recipe: each for each in found.outcomes}


# (share of communication, peak TFLOPs over 100, reported speed-up) of ScaleCom's section 5.
BATCH_32 = [(0.20, 1, 1.23), (0.20, 3, 1.75)]
# Its 56 % would make 2.23 and 4.56. Both speed-ups follow from 51 %.
BATCH_8 = [(0.51, 1, 2.0), (0.51, 3, 4.1)]


@pytest.mark.parametrize(("share", "faster", "reported"), BATCH_32 + BATCH_8)
def test_scalecoms_speed_ups_with_faster_chips_and_small_batches(
    share: float, faster: float, reported: float
) -> None:
    """Within goal 20's 5 %; the largest difference is 4 %, of the 4.1."""
    found = scalecom(share, faster, 8)
    predicted = found["dense"].step_s / found[LED].step_s
    print(f"ScaleCom: dense {share:.0%}, {faster * 100} TFLOPs: {predicted:.2f}, reported {reported}")
    assert predicted == pytest.approx(reported, rel=0.05)


def test_scalecoms_56_percent_does_not_give_its_speed_up_of_2() -> None:
    found = scalecom(0.56, 1, 8)
    assert found["dense"].step_s / found[LED].step_s == pytest.approx(2.23, abs=0.005)


def test_scalecoms_communication_stays_below_3_percent_and_own_choices_grow() -> None:
    shares = {text: [1 - scalecom(0.56, 1, n)[text].efficiency for n in (8, 32, 128)] for text in (LED, OWN)}
    print(f"ScaleCom: share of communication on 8, 32, 128 workers, {shares}")
    assert all(share < 0.03 for share in shares[LED])
    # An all-gather's bytes are those of N − 1 others: in times of compute, 31/7 and 127/7 as much. Norms are
    # 5 % of its bytes on 8 workers and travel in a ring, so they do not grow.
    times = [share / (1 - share) for share in shares[OWN]]
    assert [each / times[0] for each in times] == pytest.approx([1, 31 / 7, 127 / 7], rel=0.05)


MODELS = {"ResNet-101": "resnet101", "VGG-19": "vgg19", "Bert": "bert_base"}
SIZES = (8, 16, 32, 64)


def covap(name: str) -> dict[str, list[float]]:
    """Speed-up over one GPU by recipe, on 8 to 64 with the link that table I implies at 64."""
    row, model = TABLE_I[name], MODELS[name]
    found = gradwire.simulate(
        model,
        workers=SIZES,
        rate_bit_per_s=rate_bit_per_s(model, 1e-3 * row.allreduce, 64),
        step_s=1e-3 * (row.before + row.backward),
        backward_s=1e-3 * row.backward,
        candidates=["dense", f"covap(interval={row.interval}, order='paper')", "fp16", "efsignsgd"],
    )
    curves = {text.partition("(")[0]: each for text, each in found.curves.items()}
    return {text: [each.workers * each.efficiency for each in curve] for text, curve in curves.items()}


@pytest.mark.parametrize("name", MODELS)
def test_covap_on_8_to_64(name: str) -> None:
    """Figure 11 has no numbers; its text and table VII do."""
    found = covap(name)
    told = {text: [round(each, 1) for each in curve] for text, curve in found.items()}
    print(f"COVAP: {name} on 8, 16, 32, 64: {told}; reported at 64 {TABLE_VII['COVAP'][name]}")
    best = [max(curve[place] for curve in found.values()) for place in range(len(SIZES))]
    assert found["covap"][-1] == best[-1]
    # "EFsignSGD obtained only 3.2x acceleration while the GPU number increased by 8x": it gathers.
    assert found["efsignsgd"][-1] / found["efsignsgd"][0] < 5 < 7 < found["covap"][-1] / found["covap"][0]
    if name == "ResNet-101":  # "speedups of only 5% less than linear scaling under four different clusters"
        assert all(speed > 0.95 * size for speed, size in zip(found["covap"], SIZES, strict=True))
    if name == "Bert":  # the one network whose table VII follows from table I
        assert found["dense"][-1] == pytest.approx(TABLE_VII["DDP"][name], rel=0.05)
        assert found["covap"][-1] == pytest.approx(TABLE_VII["COVAP"][name], rel=0.05)


# What GComp leaves of an all-reduce's time, codec included (figure 10); the throughput it gains on 4 workers
# (figure 16); the least on 4 to 128 (figure 17), taken to be that on 128. The compute times are those that
# give the gain on 4 workers over 10 Gbit/s.
GCOMP = {"resnet50": (0.616, 0.534, 0.353, 0.0205), "bert_base": (0.470, 1.07, 0.708, 0.0052)}
HOP_S = 8e-6


@pytest.mark.parametrize("model", GCOMP)
def test_gcomp_on_4_to_128(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One latency, 8 µs a hop, makes both networks' gains fall to the least that is reported, within 5 %."""
    left, at_4, least, compute_s = GCOMP[model]
    monkeypatch.setattr("gradwire.exchange.gcomp.NEAR_LOSSLESS_SHARE", left)

    def gains(delay_s: float) -> list[float]:
        found = gradwire.simulate(
            model,
            workers=(4, 8, 16, 32, 64, 128),
            rate_bit_per_s=1e10,
            delay_s=delay_s,
            step_s=compute_s,
            candidates=["dense", "gcomp"],
        ).curves
        return [
            dense.step_s / near.step_s for dense, near in zip(found["dense"], found["gcomp"], strict=True)
        ]

    faster = gains(HOP_S)
    print(f"GComp: {model}, times as fast on 4 to 128: {[round(each, 3) for each in faster]}")
    assert faster[0] == pytest.approx(1 + at_4, rel=0.01)
    assert faster[-1] == min(faster) == pytest.approx(1 + least, rel=0.05)
    # All of an all-reduce's time is the most that there is to gain of what figure 10 leaves of it.
    assert max(gains(0.0)) < 1 / left
