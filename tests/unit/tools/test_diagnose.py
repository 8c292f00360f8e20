"""The figures of a diagnosis against brute force over everything that all ranks hold."""

from __future__ import annotations

import json
import math
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comm import ThreadComm, run_ranks
from gradwire.errors import RanksDisagree
from gradwire.memory import UNSENT
from gradwire.tools.diagnose import (
    Diagnosis,
    GradientWatch,
    SeenUnit,
    diagnose,
    histogram_overlap,
    rank_correlation,
)
from tests.support.rig import Rig, gradients

WORLD, STEPS = 3, 4


def watched(text: str, world: int = WORLD) -> list[tuple[Diagnosis, list[SeenUnit], list[Tensor]]]:
    """By rank: the diagnosis of the last of some steps, what its exchanges found, and the memories after."""

    def body(comm: ThreadComm) -> tuple[Diagnosis, list[SeenUnit], list[Tensor]]:
        watch = GradientWatch()
        rig = Rig(comm, text, unit_elements=1500, observers=[watch])
        for step in range(STEPS):
            assert rig.step(gradients(comm.rank, step)).error is None
        flat_buffers = rig.reducer.layout.flat_buffers
        memories = [
            flat_buffer.committed[UNSENT] for flat_buffer in flat_buffers if UNSENT in flat_buffer.committed
        ]
        return diagnose(watch.seen, flat_buffers, comm, comm), watch.seen, memories

    return run_ranks(world, body)


def brute_spearman(left: Tensor, right: Tensor) -> float:
    """1 - 6 Σd²/(n(n² - 1)): for magnitudes that all differ."""
    ranks = [each.abs().argsort().argsort().double() for each in (left, right)]
    n = left.numel()
    return 1.0 - 6.0 * float((ranks[0] - ranks[1]).square().sum()) / (n * (n * n - 1))


def test_figures_are_those_of_brute_force() -> None:
    found = watched("leader_topk(ratio=0.05)")
    diagnoses, seen, memories = zip(*found, strict=True)
    assert len(set(diagnoses)) == 1
    assert diagnoses[0].step == STEPS - 1
    pairs = [
        1.0 - float(torch.nn.functional.cosine_similarity(torch.cat(a), torch.cat(b), dim=0))
        for a, b in combinations(memories, 2)
    ]
    # Cosines in float32 of vectors of 7 000 elements: the last few of seven digits.
    assert diagnoses[0].memory_distance == pytest.approx(sum(pairs) / len(pairs), abs=1e-5)
    units = range(len(seen[0]))
    means = [torch.stack([rank[unit].x for rank in seen]).mean(0) for unit in units]
    chosen = hits = left = least = total = spearman = 0.0
    for rank in seen:
        spearman += brute_spearman(torch.cat([each.x for each in rank]), torch.cat(means)) / WORLD
        for unit in units:
            x, mean = rank[unit].x, means[unit]
            k = max(1, round(0.05 * x.numel()))
            mine = set(x.abs().topk(k).indices.tolist())
            true = set(mean.abs().topk(k).indices.tolist())
            chosen, hits = chosen + k, hits + len(mine & true)
            energies = mean.double().square()
            total += float(energies.sum())
            left += sum(float(e) for i, e in enumerate(energies) if i not in mine)
            least += sum(float(e) for i, e in enumerate(energies) if i not in true)
    assert diagnoses[0].hamming == pytest.approx(1.0 - hits / chosen, abs=1e-12)
    assert diagnoses[0].contraction == pytest.approx(left / total, rel=1e-5)
    assert diagnoses[0].best_contraction == pytest.approx(least / total, rel=1e-5)
    assert diagnoses[0].spearman == pytest.approx(spearman, abs=1e-5)
    # Common elements are in common bins, and others may be.
    assert 1.0 - diagnoses[0].hamming <= diagnoses[0].histogram_overlap <= 1.0


def test_lemma_1_bounds_what_a_choice_leaves() -> None:
    # In expectation over which elements are common; a margin of a tenth for one draw.
    diagnosis = watched("leader_topk(ratio=0.05)")[0][0]
    assert diagnosis.hamming is not None
    assert diagnosis.contraction is not None
    assert diagnosis.best_contraction is not None
    bound = diagnosis.hamming + (1.0 - diagnosis.hamming) * diagnosis.best_contraction
    assert diagnosis.best_contraction <= diagnosis.contraction <= 1.1 * bound


def test_alone_a_rank_is_like_itself_and_its_choice_is_the_true_one() -> None:
    diagnosis = watched("leader_topk(ratio=0.05)", world=1)[0][0]
    assert diagnosis.memory_distance == 0.0
    assert (diagnosis.hamming, diagnosis.histogram_overlap, diagnosis.spearman) == (0.0, 1.0, 1.0)
    assert diagnosis.contraction == diagnosis.best_contraction


def test_what_chooses_no_elements_has_no_choice_to_judge() -> None:
    diagnosis = watched("covap(interval=3)")[0][0]
    assert diagnosis.hamming is diagnosis.contraction is diagnosis.histogram_overlap is None
    assert 0.0 < diagnosis.memory_distance < 2.0


def test_choices_by_layer_leave_more_than_the_true_choice() -> None:
    diagnosis = watched("scalecom(rate=20, rates={'first.*': 5}, warmup_steps=0)", world=1)[0][0]
    assert diagnosis.hamming is not None
    assert 0.0 < diagnosis.hamming < 1.0


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 1.0),
        ([1.0, 2.0, 3.0], [-6.0, 5.0, 4.0], -1.0),
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], 0.0),
        # Ranks 1.5, 1.5, 3 and 1, 2, 3: of centred ranks 1.5/√(1.5·2).
        ([0.0, 0.0, 9.0], [1.0, 2.0, 3.0], 1.5 / math.sqrt(3.0)),
        ([], [], 0.0),
    ],
)
def test_rank_correlation_by_hand(left: list[float], right: list[float], expected: float) -> None:
    assert rank_correlation(torch.tensor(left), torch.tensor(right)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [([], [], 0), ([0.0, 1.0], [0.0, 0.0], 1), ([1.0, 1.01, 8.0], [1.02, 7.9, 8.1], 2), ([1.0], [2.0], 0)],
)
def test_histogram_overlap_by_hand(left: list[float], right: list[float], expected: int) -> None:
    assert histogram_overlap(torch.tensor(left), torch.tensor(right)) == expected


@pytest.mark.usefixtures("world_of_one")
def test_the_handle_watches_when_asked_to_and_the_report_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire._api.attach.is_alone", lambda _comm: False)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    with pytest.raises(ValueError, match="no step was watched"):
        wire.diagnose()
    for _again in range(2):
        wire.watching = True
    assert wire.watching
    assert len(wire.attached.reducer.env.observers) == 1
    with pytest.raises(ValueError, match="no step was watched"):
        wire.diagnose()
    ddp(torch.ones(2, 64)).pow(2).sum().backward()
    assert "memories" not in str(wire.report())
    diagnosis = wire.diagnose()
    assert diagnosis.step == 0
    assert wire.report().diagnosis == diagnosis
    assert json.loads(json.dumps(wire.report().as_dict()))["diagnosis"]["hamming"] == 0.0
    assert "memories 0.00 apart" in str(wire.report())
    wire.watching = False
    assert not wire.watching
    with pytest.raises(ValueError, match="no step was watched"):
        wire.diagnose()


def test_where_only_some_ranks_watched_all_of_them_are_told() -> None:
    def body(comm: ThreadComm) -> str:
        watch = GradientWatch()
        rig = Rig(comm, "topk(ratio=0.1)", observers=[watch] if comm.rank > 0 else [])
        rig.step(gradients(comm.rank, 0))
        with pytest.raises(RanksDisagree) as caught:
            diagnose(watch.seen, rig.reducer.layout.flat_buffers, comm, comm)
        return str(caught.value)

    for message in run_ranks(WORLD, body):
        assert "that was watched: rank 0: none" in message
        assert "rank 2: 0, " in message
