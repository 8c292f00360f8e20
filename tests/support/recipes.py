"""The one table of recipes. A new method is tested by a row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradwire.exchange.base import parts
from gradwire.exchange.compose import Scheme
from gradwire.exchange.gcomp import Gcomp
from gradwire.memory import UNSENT
from gradwire.recipes import Composition, recipe

F16, BF16 = torch.float16, torch.bfloat16


class Sums(NamedTuple):
    """How the payloads of a recipe are added up.

    `dtype` is the type of the sums where that is not the gradient's own. Where an element is rounded together
    with others (`coarse`), its error is relative to the largest of them: as many further roundings of that.
    """

    dtype: torch.dtype | None = None
    coarse: int = 0


EXACT = Sums()


@dataclass(frozen=True)
class Row:
    """With which options a recipe is tried. What is not given is the recipe by its name alone, and `EXACT`.

    - `laws`: its exchange is held to the laws on tensors of many sizes (`tests/laws/test_exchanges.py`).
    - `steps`: it takes whole steps of a reducer on a small model (`tests/laws/test_step.py`), by a label.
    - `trains`: it trains long runs (`tests/soak`); one of each class on three gloo ranks, see `TRAINS`.
    - `decides`: ratios of communication to computation at which an adaptive one decides differently.
    """

    laws: Mapping[str, Sums] | None = None
    steps: Mapping[str, str] | None = None
    trains: tuple[str, ...] | None = None
    decides: tuple[float, ...] = ()


def low_rank_coarse(rank: int) -> int:
    """Roundings of a low-rank exchange relative to a unit's largest element, for matrices of up to 225 rows.

    A factor's error on its way is that of 1/W, W − 1 sums and r products and sums in the mean and in what is
    left: W + 2r + 3, relative to Σ_k |P_ik·Q_jk| ≤ ‖M_j‖ ≤ √rows·max|M|, as P is orthonormal (in ACP-SGD's
    even steps likewise by the columns). In the mean over ranks ‖M_j‖ is at most √(W·rows) times the largest
    mean magnitude, of which the law grants W times, and (W + 2r + 3)·√(rows/W) is largest for W = 1.
    """
    return (2 * rank + 4) * 15


# `coarse` of stochastic levels: W + 4 = 11 roundings of a step, √d/s (Euclidean) or 1/s of the largest.
ROWS = {
    "auto": Row(decides=(1.0,)),
    "acpsgd": Row(
        laws={"acpsgd(rank=2)": Sums(coarse=low_rank_coarse(2))},
        steps={"acpsgd": "acpsgd(warmup_steps=0)"},
        trains=("acpsgd(warmup_steps=0)",),
    ),
    "adacomp": Row(
        laws={"adacomp(bin_elements=50)": EXACT, "adacomp(values='fp16')": Sums(F16)},
        steps={"adacomp": "adacomp(bin_elements=50)"},
    ),
    "allreduce": Row(
        laws={"allreduce": EXACT, "allreduce(algorithm='tree')": EXACT},
        steps={
            "allreduce": "allreduce(algorithm='ring')",
            "allreduce, star": "allreduce",
        },
        trains=(
            "allreduce(algorithm='ring')",
            "allreduce(algorithm='tree')",
            "allreduce(algorithm='star')",
        ),
    ),
    "ar_topk": Row(laws={"ar_topk(ratio=0.05)": EXACT}),
    "bf16": Row(
        laws={"bf16": Sums(BF16), "bf16(sum='fp32')": EXACT},
        steps={"bf16": "bf16", "bf16, summed in fp32": "bf16(sum='fp32')"},
        trains=("bf16", "bf16(sum='fp32')"),
    ),
    "covap": Row(
        laws={
            "covap(interval=4)": EXACT,
            "covap(interval=3, sharding='paper', feedback='full', unit_mb=0.01)": EXACT,
            "covap(interval=2, sharding='off', feedback='none')": EXACT,
        },
        steps={
            "covap": "covap(interval=3)",
            "covap, paper's sharding": "covap(interval=3, sharding='paper', unit_mb=0.01)",
            "covap, no sharding": "covap(interval=3, sharding='off', feedback='full', unit_mb=0.01)",
            "covap, forgetting": "covap(interval=3, feedback='none')",
            "covap, measuring": "covap",
        },
        trains=(
            "covap(interval=4)",
            "covap",
        ),
        decides=(0.5, 3.3),
    ),
    "dense": Row(),
    "dgc": Row(
        laws={"dgc(ratio=0.05, warmup_steps=8)": EXACT, "dgc(ratio=1.0)": EXACT},
        steps={
            "dgc": "dgc(ratio=0.1, momentum=0.0, warmup_steps=0)",
            "dgc, momentum": "dgc(ratio=0.1, momentum=0.9, warmup_steps=0)",
        },
        trains=("dgc(ratio=0.05, warmup_steps=40)",),
    ),
    "efsignsgd": Row(
        laws={"efsignsgd": Sums(coarse=2), "efsignsgd(block=64)": Sums(coarse=2)},
        steps={
            "efsignsgd": "efsignsgd",
            "efsignsgd, blocks": "efsignsgd(block=64)",
        },
        trains=(
            "efsignsgd",
            "efsignsgd(block=64)",
        ),
    ),
    "flexible": Row(
        laws={"flexible(every=2)": EXACT, "flexible(ratio=0.05, way='all_gather', fused=False)": EXACT},
        steps={
            "flexible": "flexible(ratio=0.1, every=48)",
            "flexible, eager": "flexible(every=2)",
        },
    ),
    "fp16": Row(laws={"fp16": Sums(F16)}),
    "fp8": Row(laws={"fp8": Sums(coarse=4)}, steps={"fp8": "fp8(block=100)"}),
    "gcomp": Row(
        laws={
            "gcomp": EXACT,
            "gcomp(mode='levels')": EXACT,
            "gcomp(mode='lossless')": EXACT,
            "gcomp(mode='truncate', tables='static')": EXACT,
        },
        steps={
            "gcomp": "gcomp(refresh=3)",
            "gcomp, lossless": "gcomp(mode='lossless', refresh=2)",
        },
        trains=(
            "gcomp",
            "gcomp(mode='levels')",
            "gcomp(mode='lossless')",
            "gcomp(mode='truncate')",
        ),
    ),
    "gtopk": Row(
        laws={"gtopk(ratio=0.05)": EXACT}, steps={"gtopk": "gtopk(ratio=0.1)"}, trains=("gtopk(ratio=0.05)",)
    ),
    "int4": Row(
        laws={
            "int4": Sums(coarse=4),
            "int4(block=33)": Sums(coarse=4),
            "int4(collective='all_gather')": Sums(coarse=4),
        },
        steps={
            "int4": "int4(block=33)",
            "int4, gathered": "int4(collective='all_gather')",
        },
        trains=(
            "int4",
            "int4(collective='all_gather')",
        ),
    ),
    "int8": Row(
        laws={
            "int8": Sums(coarse=4),
            "int8(feedback=False)": Sums(coarse=4),
            "int8(collective='all_gather')": Sums(coarse=4),
            "int8(feedback=False, collective='all_gather')": Sums(coarse=4),
        },
        steps={
            "int8": "int8",
            "int8, forgetting": "int8(feedback=False)",
        },
        trains=(
            "int8",
            "int8(feedback=False)",
        ),
    ),
    "leader_topk": Row(
        laws={
            "leader_topk(ratio=0.05, elect='round_robin')": EXACT,
            "leader_topk(ratio=0.05, elect='norm')": EXACT,
            "leader_topk(ratio=0.3, values='fp16')": Sums(F16),
            "leader_topk(ratio=0.3, beta=0.25)": EXACT,
        },
        steps={
            "leader_topk": "leader_topk(ratio=0.1)",
            "leader_topk, low pass": "leader_topk(ratio=0.1, beta=0.25)",
            "leader_topk, norm": "leader_topk(ratio=0.1, elect='norm')",
        },
        trains=(
            "leader_topk(ratio=0.05)",
            "leader_topk(ratio=0.05, elect='norm')",
        ),
    ),
    "local_every": Row(
        laws={"local_every(interval=2)": EXACT},
        steps={"local_every": "local_every(interval=2)"},
        trains=("local_every(interval=2)",),
    ),
    "lwtopk": Row(
        laws={"lwtopk(ratio=0.05)": EXACT, "lwtopk(ratio=0.3, values='bf16')": Sums(BF16)},
        steps={"lwtopk": "lwtopk(ratio=0.1)"},
        trains=("lwtopk(ratio=0.05)",),
    ),
    "mergecomp": Row(
        laws={
            "mergecomp(inner='topk(ratio=0.05)', split='layers')": EXACT,
            "mergecomp(inner='randomk(ratio=0.2)', split='even', groups=3)": EXACT,
        },
        steps={
            "mergecomp, layers": "mergecomp(inner='topk(ratio=0.1)', split='layers')",
            "mergecomp, planned": "mergecomp(inner='topk(ratio=0.1)')",
            "mergecomp, timed": "mergecomp(inner='powersgd(warmup_steps=0)', split='timed')",
        },
        trains=(
            "mergecomp(inner='topk(ratio=0.05)')",
            "mergecomp(inner='leader_topk(ratio=0.05)', split='timed')",
        ),
    ),
    "mstopk": Row(
        laws={"mstopk(ratio=0.05)": EXACT, "mstopk(ratio=0.3, values='int4')": Sums(coarse=4)},
        steps={"mstopk": "mstopk(ratio=0.1)"},
        trains=("mstopk(ratio=0.05)",),
    ),
    "onebit": Row(laws={"onebit": Sums(coarse=2)}),
    "oktopk": Row(
        laws={"oktopk(ratio=0.05)": EXACT},
        steps={"oktopk": "oktopk(ratio=0.1)"},
        trains=("oktopk(ratio=0.05)",),
    ),
    "powersgd": Row(
        laws={"powersgd(rank=2)": Sums(coarse=low_rank_coarse(2))},
        steps={
            "powersgd": "powersgd(warmup_steps=0)",
            "powersgd, rank 3": "powersgd(rank=3, warmup_steps=0)",
        },
        trains=("powersgd(warmup_steps=0)",),
    ),
    "qsgd": Row(
        laws={
            "qsgd": Sums(coarse=2),
            "qsgd(feedback=True)": Sums(coarse=2),
            "qsgd(bits=4)": Sums(coarse=36),
            "qsgd(bits=2, norm='max')": Sums(coarse=11),
        },
        steps={
            "qsgd": "qsgd",
            "qsgd, feedback": "qsgd(feedback=True)",
            "qsgd, 4 bits": "qsgd(bits=4, bucket=100, norm='max')",
        },
        trains=(
            "qsgd",
            "qsgd(bits=4)",
        ),
    ),
    "randomk": Row(
        laws={"randomk(ratio=0.05)": EXACT},
        steps={"randomk": "randomk(ratio=0.2)"},
        trains=("randomk(ratio=0.1)",),
    ),
    "scalecom": Row(
        laws={
            "scalecom(rate=20, warmup_steps=2)": EXACT,
            "scalecom(rate=400, rates={'*.weight': 5}, warmup_steps=0, beta=0.25, keep=2)": EXACT,
            "scalecom(rate=4, warmup_steps=0, values='fp16')": Sums(F16),
        },
        steps={
            "scalecom": "scalecom(rate=10, rates={'first.*': 3}, warmup_steps=0)",
            "scalecom, low pass": "scalecom(rate=10, warmup_steps=0, beta=0.25)",
        },
        trains=(
            "scalecom(rate=20, warmup_steps=10)",
            "scalecom(rate=40, rates={'*': 10}, beta=0.3, warmup_steps=0)",
        ),
    ),
    "sidco": Row(
        laws={"sidco(ratio=0.05)": EXACT}, steps={"sidco": "sidco(ratio=0.1)"}, trains=("sidco(ratio=0.05)",)
    ),
    "signsgd": Row(
        laws={"signsgd": EXACT, "signsgd(scale='none')": EXACT},
        steps={
            "signsgd": "signsgd",
            "signsgd, units": "signsgd(scale='none')",
        },
    ),
    "signum": Row(),
    "sketchsgd": Row(
        laws={"sketchsgd(ratio=0.05)": EXACT},
        steps={"sketchsgd": "sketchsgd(ratio=0.1)"},
        trains=("sketchsgd(ratio=0.05)",),
    ),
    "sparseloco": Row(
        laws={"sparseloco": Sums(coarse=4), "sparseloco(keep=4, chunk=50, values='full')": EXACT},
        steps={"sparseloco": "sparseloco(keep=8, chunk=64)"},
        trains=("sparseloco(decay=1.0)",),
    ),
    "star_topk": Row(
        laws={"star_topk": EXACT, "star_topk(ratio=0.05, fused=False, algorithm='tree')": EXACT},
        steps={"star_topk": "star_topk(algorithm='tree')"},
        trains=(
            "star_topk(ratio=0.05)",
            "star_topk(ratio=0.05, fused=False, algorithm='tree')",
        ),
    ),
    "terngrad": Row(laws={"terngrad": Sums(coarse=11), "terngrad(clip=2.5)": Sums(coarse=11)}),
    "threshold": Row(
        laws={"threshold(threshold=3.0)": EXACT, "threshold(threshold=1e30)": EXACT},
        steps={"threshold": "threshold(threshold=1.5)"},
        trains=("threshold(threshold=0.05)",),
    ),
    "topk": Row(
        laws={
            "topk(ratio=0.05)": EXACT,
            "topk(ratio=0.3, values='int8')": Sums(coarse=4),
            "topk(ratio=0.3, values='int2')": Sums(coarse=4),
            "topk(ratio=0.05, reuse=True)": EXACT,
        },
        steps={
            "topk": "topk(ratio=0.1)",
            "topk, int8": "topk(ratio=0.2, values='int8')",
            "topk, reuse": "topk(ratio=0.1, reuse=True)",
        },
        trains=(
            "topk(ratio=0.05)",
            "topk(ratio=0.1, values='int8')",
            "topk(ratio=0.05, reuse=True)",
        ),
    ),
    "truncate": Row(
        laws={"truncate": EXACT, "truncate(bits=10, feedback=True)": EXACT},
        steps={
            "truncate": "truncate",
            "truncate, remembering": "truncate(feedback=True)",
        },
    ),
    "var_topk": Row(
        laws={"var_topk": EXACT, "var_topk(ratio=0.3, values='bf16', algorithm='ring')": Sums(BF16)},
        steps={
            "var_topk": "var_topk",
            "var_topk, units": "var_topk(fused=False, algorithm='star')",
        },
        trains=(
            "var_topk(ratio=0.05)",
            "var_topk(ratio=0.05, fused=False, algorithm='ring')",
        ),
    ),
}


def composed(text: str) -> Composition:
    """A recipe that needs no measurement."""
    composition = recipe(text).build()
    assert composition.next is None, f"{text} decides later: give its row `decides`, not `laws`"
    return composition


def kind_of(exchange: object) -> str:
    """The class by which an exchange travels, whatever memory and schedule are around it."""
    return next(type(each).__name__ for each in parts(exchange) if not isinstance(each, Scheme))


def kind(label: str) -> str:
    """Of a recipe of `EVERY_RECIPE`."""
    return kind_of_text(EVERY_RECIPE[label])


def kind_of_text(text: str) -> str:
    """How a recipe travels; of one that goes on choosing its name, and of others that choose "adaptive"."""
    built = recipe(text).build()
    if built.next is not None:
        return "adaptive"
    return kind_of(built.exchange) if built.watch is None else recipe(text).name


def _laws(name: str, row: Row) -> Mapping[str, Sums]:
    """One that decides has laws only with options with which it does not."""
    return row.laws or ({} if row.decides else {name: EXACT})


LAWS = {text: sums for name, row in ROWS.items() for text, sums in _laws(name, row).items()}
EVERY_RECIPE = {
    label: text
    for name, row in ROWS.items()
    for label, text in ({name: name} if row.steps is None else row.steps).items()
}
"""Texts by the labels of `Row.steps`."""
LONG_RUNS = tuple(
    text for name, row in ROWS.items() for text in ((name,) if row.trains is None else row.trains)
)
TRAINS = (
    "dense",
    "allreduce(algorithm='ring')",
    "bf16",
    "int8",
    "topk(ratio=0.05)",
    "threshold(threshold=0.05)",
    "leader_topk(ratio=0.05)",
    "star_topk(ratio=0.05)",
    "gtopk(ratio=0.05)",
    "oktopk(ratio=0.05)",
    "sketchsgd(ratio=0.05)",
    "signsgd",
    "powersgd(warmup_steps=0)",
    "acpsgd(warmup_steps=0)",
    "gcomp",
    "flexible",
    "auto",
    "covap",
    "mergecomp(inner='topk(ratio=0.05)')",
    "mergecomp(inner='leader_topk(ratio=0.05)', split='timed')",
)
"""What trains for a hundred steps on three gloo ranks: each class of exchange, and what measures first.

Whole steps of each recipe are `tests/laws/test_step.py`'s, on threads.
"""
DECIDES = {name: row.decides for name, row in ROWS.items() if row.decides}

LONG = 16
"""Steps that no test takes: what is looked at less often runs on unchanged."""


def _remembers(text: str) -> bool:
    """Whether one composition runs throughout, which keeps what it does not send."""
    built = recipe(text).build()
    if built.next is not None or (built.watch is not None and built.watch.every < LONG):
        return False
    return built.exchange.memory is not None and UNSENT in built.exchange.memory.planes


def _forgets(text: str) -> bool:
    """Whether the mean and what is remembered do not add up to what came.

    What is not sent is dropped, or the memory has a balance of its own (`test_memory.py`). GComp has a
    memory that forgets, but drops nothing without an optimizer.
    """
    built = recipe(text).build()
    if built.next is not None or built.exchange.memory is None:
        return False
    if any(isinstance(part, Gcomp) for part in parts(built.exchange)):
        return False
    memory = built.exchange.memory
    return UNSENT not in memory.planes or memory.weight != 1.0 or memory.covers_momentum


REMEMBERING = tuple(label for label, text in EVERY_RECIPE.items() if _remembers(text))
FORGETTING = frozenset(label for label, text in EVERY_RECIPE.items() if _forgets(text))
