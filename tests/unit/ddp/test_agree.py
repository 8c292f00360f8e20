"""Do all ranks mean the same?"""

from __future__ import annotations

import pytest

from gradwire.comm import Comm, run_ranks
from gradwire.ddp.agree import require_agreement
from gradwire.errors import RanksDisagree


def _asked(fields: list[dict[str, str]]) -> list[str]:
    def rank(comm: Comm) -> str:
        try:
            require_agreement(fields[comm.rank], comm)
        except RanksDisagree as error:
            return str(error)
        return ""

    return run_ranks(len(fields), rank)


def test_equal_fields_pass_on_any_world() -> None:
    for world in (1, 2, 5):
        assert _asked(world * [{"a": "x", "b": ""}]) == world * [""]


def test_the_first_field_that_differs_is_named_with_every_ranks_value() -> None:
    texts = _asked([{"a": "x", "b": "1"}, {"a": "x", "b": "2"}, {"a": "x", "b": "1"}])
    assert len(set(texts)) == 1
    assert texts[0].startswith("ranks disagree on b: rank 0: 1 ")
    assert "; rank 1: 2 " in texts[0]


def test_a_difference_beyond_what_is_shown_is_found() -> None:
    long = 500 * "é"
    texts = _asked([{"names": long + "1"}, {"names": long + "2"}])
    assert all("ranks disagree on names" in text for text in texts)
    first, second = texts[0].split("; ")
    assert first.split("fingerprint")[1] != second.split("fingerprint")[1]


@pytest.mark.parametrize("text", ["a", 119 * "a", 120 * "a", 121 * "a", 200 * "é"])
def test_a_prefix_is_not_the_whole(text: str) -> None:
    assert all("disagree" in said for said in _asked([{"x": text}, {"x": text + "b"}]))
