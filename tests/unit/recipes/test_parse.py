"""Recipe strings: what is read, and what is said about what cannot be."""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace

import pytest
import torch

from gradwire.codec.cast import cast
from gradwire.exchange.compose import remember
from gradwire.exchange.dense import dense
from gradwire.exchange.payloads import reduce
from gradwire.recipes import Composition, Recipe, RecipeEntry, entries, names, recipe, register
from gradwire.recipes.base import REGISTRY
from gradwire.recipes.parse import short
from tests.support.looped import looped
from tests.support.recipes import LAWS


@looped(
    ("text", "canonical"),
    [
        ("dense", "dense"),
        (" topk ( ratio = 0.5 ) ", "topk(ratio=0.5)"),
        ("leader_topk(elect=norm, ratio=0.2)", "leader_topk(elect='norm', ratio=0.2)"),
        ("leader_topk(elect='norm')", "leader_topk(elect='norm')"),
        ("covap()", "covap"),
        ("topk(0.1)", "topk(ratio=0.1)"),
        ("topk(0.1, values=fp16)", "topk(ratio=0.1, values='fp16')"),
        ("gcomp(lossless)", "gcomp(mode='lossless')"),
    ],
)
def test_spaces_quotes_and_empty_brackets_do_not_matter(text: str, canonical: str) -> None:
    assert str(recipe(text)) == canonical
    assert recipe(canonical) == recipe(text)


@looped("name", names())
def test_every_recipe_builds_without_options_and_has_a_summary(name: str) -> None:
    assert isinstance(recipe(name).build(), Composition)


@looped("entry", entries())
def test_every_recipe_documents_itself(entry: RecipeEntry) -> None:
    assert entry.summary.endswith(".")
    for heading in ("Travels", "Paper", "Use when"):
        assert entry.says(heading).endswith("."), heading


@looped(
    "text",
    [
        "topk(ratio=0.25, values='bf16', reuse=False, fused=False)",
        "leader_topk(ratio=0.5, elect='norm', values='bf16', beta=0.25)",
        "covap(interval=3)",
        "fp16",
    ],
)
def test_a_composition_names_itself_so_that_a_state_can_find_it_again(text: str) -> None:
    built = recipe(text).build()
    assert built.text == text
    again = recipe(built.text).build()
    assert (again.text, again.exchange) == (built.text, built.exchange)


@looped("text", sorted(LAWS))
def test_the_short_text_is_the_same_recipe(text: str) -> None:
    built = recipe(text).build()
    again = recipe(short(built.text)).build()
    assert (again.text, again.exchange) == (built.text, built.exchange)


@looped(
    ("text", "wanted"),
    [
        ("int4(block=128, feedback=True, collective='all_reduce')", "int4"),
        ("int4(block=64, feedback=True, collective='all_gather')", "int4(block=64, collective='all_gather')"),
        ("topk(ratio=0.1, values='full', reuse=False, fused=False)", "topk(ratio=0.1)"),
        ("auto(target=0.95, late=0.15)", "auto"),
        ("auto(late=1)", "auto(late=1)"),
        ("covap(interval=4)", "covap(interval=4)"),
        ("auto (measuring, dense so far)", "auto (measuring, dense so far)"),
        ("mine(block=128)", "mine(block=128)"),
    ],
)
def test_the_short_text_says_only_what_is_not_the_default(text: str, wanted: str) -> None:
    assert short(text) == wanted


def test_equal_values_of_other_types_are_told_apart() -> None:
    # A composition's text has the value as it was given, and ranks compare texts: the default is 1.0.
    given = recipe("leader_topk(beta=1)").build().text
    assert recipe(short(given)).build().text == given != recipe("leader_topk").build().text


@looped(
    ("text", "message"),
    [
        ("covapp", "unknown recipe 'covapp'; did you mean 'covap'"),
        ("zzz", "unknown recipe 'zzz'. Known: acpsgd, adacomp, "),
        ("topk(ratoi=0.1)", "recipe 'topk' has no option 'ratoi'; did you mean 'ratio'"),
        ("dense(ratio=0.1)", "recipe 'dense' has no option 'ratio'. Known: none"),
        ("topk(ratio=0)", "ratio=0 is outside (0, 1]"),
        ("topk(ratio=1.0001)", "ratio=1.0001 is outside (0, 1]"),
        ("randomk(ratio=-0.1)", "ratio=-0.1 is outside (0, 1]"),
        ("topk(ratio=nan)", "ratio=nan is outside (0, 1]"),
        ("leader_topk(elect='loudest')", "elect='loudest' is none of round_robin, norm"),
        ("leader_topk(values='int4')", "values='int4' is none of full, fp16, bf16"),
        ("covap(interval=0)", "interval=0 must be at least 1 step"),
        ("covap(interval=2.5)", "interval=2.5 must be at least 1 step"),
        ("covap(interval='four')", "interval='four' must be at least 1 step"),
        ("int8(feedback=false)", "feedback='false' is neither True nor False"),
        ("topk(reuse=None)", "reuse=None is neither True nor False"),
        ("powersgd(rank=2.0)", "rank=2.0 is not a whole number"),
        ("gcomp(bits=all)", "bits='all' is not a whole number"),
        ("int4(collective='ring')", "collective='ring' is none of all_reduce, all_gather"),
        ("auto(target=0)", "target=0 is outside (0, 1]"),
        ("topk(0.1, 'fp16')", "only the first option may go without its name"),
        ("topk(0.1, ratio=0.2)", "recipe 'topk' was given 'ratio' twice"),
        ("topk(1.5)", "ratio=1.5 is outside (0, 1]"),
        ("topk(*[0.1])", "'*[0.1]' is not a plain value"),
        ("dense(0.1)", "recipe 'dense' has no options"),
        ("topk(ratio=0.1", "cannot read recipe"),
        ("topk(ratio=0.1, ratio=0.2)", "cannot read recipe"),
        ("topk(ratio=1/10)", "'1/10' is not a plain value"),
        ("topk(**{'ratio': 0.1})", "has no option '**'"),
        ("os.system('true')", "cannot read recipe"),
        ("", "cannot read recipe"),
        ("\0", "cannot read recipe"),
        ("topk(" + 700 * "-" + "1)", "--1' is not a plain value"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_can(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the text is compared below without escapes
        recipe(text)
    assert message in str(caught.value)


def test_a_recipe_object_is_checked_like_its_text() -> None:
    assert recipe(Recipe("topk", {"ratio": 0.5})) == Recipe("topk", {"ratio": 0.5})
    with pytest.raises(ValueError, match="did you mean 'topk'"):
        recipe(Recipe("topkk"))
    with pytest.raises(ValueError, match="outside"):
        recipe(Recipe("topk", {"ratio": 7}))


def half() -> Composition:
    """What a user might write: it is registered nowhere."""
    return Composition(remember(reduce(cast(torch.float16))), text="half_with_memory")


def test_a_composition_of_ones_own_needs_a_text_and_no_registration() -> None:
    mine = half()
    taken = recipe(mine)
    assert taken.build() is mine
    assert recipe(taken) is taken
    assert str(taken) == "half_with_memory"
    assert "half_with_memory" not in names()
    with pytest.raises(ValueError, match="a composition needs a text"):
        recipe(replace(mine, text=""))


@looped("name", names())
def test_a_composition_of_a_registered_recipe_is_that_recipe(name: str) -> None:
    built = recipe(name).build()
    assert recipe(built).build().text == built.text


def test_a_composition_under_the_text_of_another_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'topk\(ratio=0.1\)' is the text of another recipe"):
        recipe(replace(half(), text="topk(ratio=0.1)"))


def test_no_recipe_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="None"):
        recipe(None)  # type: ignore[arg-type]


def test_threads_may_parse_at_the_same_time() -> None:
    failures: list[BaseException] = []

    def parse() -> None:
        try:
            for _ in range(300):
                recipe("leader_topk(ratio=0.1, elect='norm')")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_users_recipe_replaces_ours_of_the_same_name_even_where_ours_is_imported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe("bf16")
    ours = REGISTRY["bf16"]
    monkeypatch.delitem(REGISTRY, "bf16")  # as before its first use

    @register
    def bf16(scale: float = 2.0) -> Composition:
        """Not ours."""
        return Composition(dense())

    monkeypatch.setitem(REGISTRY, "mine", RecipeEntry("mine", bf16))
    register(inspect.unwrap(ours.build))
    built = recipe("bf16(scale=3.0)").build()
    assert isinstance(built, Composition)
    assert built.text == "bf16(scale=3.0)"
    assert "mine" in names()
