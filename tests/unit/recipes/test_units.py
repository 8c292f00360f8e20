"""Choices over the whole gradient and scales by layer, as the papers have them, in whole steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.recipes import RecipeEntry, entries, recipe
from gradwire.unit.parameters import ParameterSpec
from tests.support.looped import looped
from tests.support.rig import Rig, gradients

WORLD = 2
MATRICES = ("last.weight", "middle.weight", "first.weight")


def largest(x: Tensor) -> Tensor:
    """x (n,) where it is among the largest 5 %, zeros elsewhere."""
    sent = torch.zeros_like(x)
    places = x.abs().topk(round(0.05 * x.numel())).indices
    sent[places] = x[places]
    return sent


def scaled_signs(x: Tensor) -> Tensor:
    return x.sign() * x.abs().mean()


def two_means(x: Tensor) -> Tensor:
    return torch.where(x >= 0, x[x >= 0].mean(), x[x < 0].mean())


def over_all(send: Callable[[Tensor], Tensor], grads: list[Tensor]) -> Tensor:
    return send(torch.cat(grads))


def by_layers(send: Callable[[Tensor], Tensor], grads: list[Tensor]) -> Tensor:
    return torch.cat([send(grad) for grad in grads])


def means(text: str) -> Tensor:
    """Of the first step, all matrices in a row."""

    def rank(comm: Comm) -> Tensor:
        outcome = Rig(comm, text).step(gradients(comm.rank, 0))
        return torch.cat([outcome.mean[name].view(-1) for name in MATRICES])

    return run_ranks(WORLD, rank)[0]


@looped(
    ("text", "option", "send", "range_of"),
    [
        ("topk(ratio=0.05)", "fused", largest, over_all),
        ("mstopk(ratio=0.05)", "fused", largest, over_all),
        ("dgc(ratio=0.05, warmup_steps=0, momentum=0.0)", "fused", largest, over_all),
        ("sidco(ratio=0.05)", "fused", None, over_all),
        ("lwtopk(ratio=0.05)", "layers", largest, by_layers),
        ("efsignsgd()", "layers", scaled_signs, by_layers),
        ("onebit()", "layers", two_means, by_layers),
    ],
)
def test_what_travels_is_chosen_as_in_the_paper(
    text: str, option: str, send: Callable[[Tensor], Tensor] | None, range_of: Callable[..., Tensor]
) -> None:
    separator = "" if "()" in text else ", "
    asked, usual = text.replace(")", f"{separator}{option}=True)"), means(text)
    grads = [[gradients(rank, 0)[name].view(-1) for name in MATRICES] for rank in range(WORLD)]
    found = means(asked)
    assert not torch.equal(found, usual), "units as usual divide a parameter, and choose in each"
    if send is None:  # a fit whose threshold is not worked out here
        assert found.count_nonzero() > 0
        return
    expected = torch.stack([range_of(send, own) for own in grads]).mean(0)
    # Sums of at most 3000 numbers of about 1, in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@looped("text", ["topk(fused=1)", "dgc(fused='no')", "lwtopk(layers=None)", "star_topk(fused=2)"])
def test_another_value_than_true_or_false_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is neither True nor False"):
        recipe(text)


@looped("entry", entries())
def test_a_buffer_without_elements_is_not_cut(entry: RecipeEntry) -> None:
    """As where the empty parameters of a model have a type of their own."""
    specs = [ParameterSpec("placeholder", (0, 3), torch.float32, 0)]
    assert tuple(entry.build().boundaries(specs, WORLD)) == ()
