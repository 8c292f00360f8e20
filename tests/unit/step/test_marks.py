"""Marks of a step: whose they are."""

from __future__ import annotations

import torch

from gradwire.memory import Gradients
from gradwire.recipes import recipe
from gradwire.step.layout import build
from gradwire.step.marks import Marks
from gradwire.unit.parameters import ParameterSpec


def test_idle_parameters_are_those_of_their_own_flat_buffer() -> None:
    specs = [ParameterSpec(name, (64, 64), torch.float32, 4096) for name in "abcd"]
    composition = recipe("int8").build()
    layout = build(
        specs, composition, lambda spec: "topk" if spec.name in "bd" else None, torch.device("cpu"), 2
    )
    first, second = layout.flat_buffers
    marks = Marks(layout.flat_buffers, torch.device("cpu"))
    for _step in range(2):
        assert marks.begin().tolist() == [0]
        for each, bad in ((first, 1.0), (second, torch.inf)):
            grad = torch.cat([torch.zeros(4096), torch.full((4096,), bad)])
            each.compensate_marked(Gradients(grad, each.pieces), each.numbers_of(each.slots), 0, marks.values)
        found = {id(owner): [slot.spec.name for slot in slots] for owner, slots in marks.idle(marks.values)}
        assert found == {id(first): ["a"], id(second): ["b"]}
        assert marks.values[-1] == 1
