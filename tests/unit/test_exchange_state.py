"""What an exchange keeps by parameter: it counts once the step is committed, and travels in checkpoints."""

from __future__ import annotations

import torch

from gradwire.unit.context import ExchangeContext, ExchangeState, Fates, Part
from gradwire.unit.parameters import WHOLE, ParameterSpec, slots_of, units_of


def test_what_was_put_is_seen_after_the_commit_only() -> None:
    kept = ExchangeState()
    kept.put("Q", "a", torch.ones(1))
    assert kept.get("Q", "a") is None
    kept.discard()
    kept.commit()
    assert kept.get("Q", "a") is None
    kept.put("Q", "a", torch.ones(1))
    kept.commit()
    kept.put("Q", "a", torch.zeros(1))
    assert kept.get("Q", "a") == 1.0


def test_another_flat_buffer_adopts_what_belongs_to_the_parameter() -> None:
    old, new = ExchangeState(), ExchangeState()
    for name in ("a", "b"):
        old.put("Q", name, torch.ones(1))
    old.commit()
    new.adopt("a", old, torch.device("cpu"))
    assert new.committed.keys() == {"Q"}
    assert new.committed["Q"].keys() == {"a"}


def test_what_is_new_in_an_open_exchange_is_not_final_and_neither_is_a_later_one() -> None:
    """Not even where another flat buffer takes it over, as in a switch, and after several exchanges."""
    old, new, waits = ExchangeState(), ExchangeState(), Fates(open=frozenset("a"), made=False)
    for number in range(3):
        for name in ("a", "b"):
            old.put("Q", name, torch.full((1,), float(number)))
        old.commit()
        old.roll_back(waits)
        assert old.final() == {"Q": {"b": torch.full((1,), float(number))}}
    new.adopt("a", old, torch.device("cpu"))
    assert new.get("Q", "a") == 2.0
    assert new.final() == {}
    new.roll_back(Fates(dropped=frozenset("a"), made=False))
    assert new.get("Q", "a") is None


def test_parts_know_whether_they_are_whole() -> None:
    assert Part("a", (2, 3), 0, 6).is_whole
    assert not Part("a", (2, 3), 1, 6).is_whole
    assert ExchangeContext(0, 0, 0, 1, parts=(Part("a", (2, 3), 1, 6), Part("b", (4,), 0, 4))).sizes(9) == (
        5,
        4,
    )
    assert ExchangeContext(0, 0, 0, 1).sizes(9) == (9,)


def test_boundaries_of_whole_parameters_move_to_the_nearest_place_between_them() -> None:
    specs = [
        ParameterSpec(name, (numel,), torch.float32, numel)
        for name, numel in (("a", 10), ("b", 5), ("c", 20))
    ]
    units = units_of(slots_of(specs), (3, 10, 13, 20), WHOLE)
    assert [(unit.start, unit.stop) for unit in units] == [(0, 10), (10, 15), (15, 35)]
