"""Tables for kernels on a device: the host does not wait for their upload, and each stream has its own."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gradwire.kernels.pieces import Pieces
from gradwire.kernels.uploads import TooEarly, holding, kept_by_stream, sent_to
from tests.support.elsewhere import WHERE, Elsewhere, There
from tests.support.inputs import normal
from tests.support.looped import looped

pytest.importorskip("triton", reason="kernels for devices need Triton")

from gradwire.kernels.device import tables, topk
from tests.support.counted import Counting, kernels_elsewhere

UPLOADS: dict[str, Callable[[], object]] = {
    "pieces": lambda: tables.piece_tiles(Pieces([(0, 0, 5000), (5000, 5001, 3)]), WHERE),
    "pointers": lambda: tables.pointer_tiles(((16, 4096), (8192, 6)), WHERE),
    "codes": lambda: tables.coded_tiles((5000, 3), 256, 4, 1, None, WHERE),
    "blocks": lambda: tables.block_spans((5000, 3), 256, 64, WHERE),
}


@looped("name", UPLOADS)
def test_the_host_waits_for_no_table(name: str) -> None:
    with Elsewhere() as elsewhere:
        UPLOADS[name]()
    assert elsewhere.reads == []


def test_the_host_waits_for_no_sample() -> None:
    with kernels_elsewhere(), Counting() as counting:
        topk.topk_indices(There(normal(4099)), 16)
    asked = {each.kind for each in counting.asked}
    assert "launch" in asked
    assert "wait" not in asked


def test_numbers_go_to_a_gpu_from_pinned_memory_once() -> None:
    gpu = torch.device("cuda", 0)
    there = Mock(device=gpu)
    sent_to(there, gpu)
    there.pin_memory.assert_not_called()
    numbers = Mock(device=torch.device("cpu"))
    assert sent_to(numbers, gpu) is numbers.pin_memory.return_value.to.return_value
    numbers.pin_memory.return_value.to.assert_called_once_with(gpu, non_blocking=True)


def test_who_holds_tables_has_those_that_a_cache_drops() -> None:
    @kept_by_stream(maxsize=1)
    def table(number: int, device: torch.device) -> list[int]:
        return [number]

    made = table(1, WHERE)
    with holding() as held:
        assert table(1, WHERE) is made
        with holding() as inner:
            assert table(1, WHERE) is made
        with pytest.raises(TooEarly):
            table(2, WHERE)
    assert [*map(id, held)] == [*map(id, inner)] == [id(made)]
    table(3, WHERE)
    assert len(held) == 1, "nobody holds any more"


def test_another_stream_does_not_get_what_may_still_be_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made, cpu, pieces = [], torch.device("cpu"), Pieces([(0, 0, 5)])

    @kept_by_stream(maxsize=8)
    def table(number: int, device: torch.device) -> int:
        made.append(number)
        return len(made)

    def in_stream(stream: int) -> tuple[int, torch.Tensor]:
        for module in ("uploads", "device.tables"):
            monkeypatch.setattr(f"gradwire.kernels.{module}.stream_of", lambda _device: stream)
        return table(7, cpu), tables.piece_tiles(pieces, cpu).rows

    (first, rows), (second, other), (third, again) = map(in_stream, (1, 2, 1))
    assert (first, second, third) == (1, 2, 1)
    assert again is rows is not other
    assert np.array_equal(rows, other)
