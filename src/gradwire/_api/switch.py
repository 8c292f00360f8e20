"""The requests that a user may make between two steps: another recipe, or all unsent gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from gradwire.agreement.agree import damage, on_all_ranks, require_agreement, require_undamaged
from gradwire.kernels import compiler
from gradwire.memory import UNSENT
from gradwire.recipes import Composition, Recipe, recipe
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.installed import META, InstalledRecipe, RecipeSnapshot
from gradwire.step.layout import Layout
from gradwire.unit.parameters import ParameterSpec


def switch(
    reducer: InstalledRecipe, asked: str | Recipe | Composition, check: Callable[[Layout], None]
) -> None:
    """Run `asked` from the next step on, with all that is unsent. A collective.

    `check` raises for a layout that does not suit the optimizer. Raises `ValueError`, or what `check` raises,
    where the recipe cannot run; `PeerFailed` on the other ranks; and `RanksDisagree` where ranks ask for
    different ones. Then everything goes on as it was, on all of them.
    """
    env = reducer.env
    control = env.control

    def built() -> tuple[Recipe, Composition]:
        compiler.forget_foreseen()
        chosen = recipe(asked)
        first = chosen.build()
        layout = reducer.layout_of(first, META)
        check(layout)  # a warning made an error, for instance
        reducer.env.compile_for(layout)
        return chosen, first

    def successor() -> RecipeSnapshot:
        return reducer.snapshot() if runs is None else reducer.successor(runs)

    reducer.env = replace(env, policy=reducer.policy)  # a detached reducer runs without it
    try:
        chosen, first = on_all_ranks(built, "switch", control)
        require_agreement({"recipe": str(chosen)}, control)
        # A recipe that was named stays in a resumed run, too, although that may be attached with "auto".
        first = replace(first, why=f"switched to at step {reducer.step}", stays=first.next is None)
        runs = reducer.first_of(first)
        ready = on_all_ranks(successor, "switch", control)
    except BaseException:
        reducer.env = env
        raise
    reducer.recipe = chosen
    reducer.restore(ready)


def mean_unsent(reducer: InstalledRecipe, *, whole: bool) -> list[tuple[ParameterSpec, Tensor]]:
    """The mean over ranks of the unsent gradient, by parameter, flat. A collective. `forget_unsent` follows.

    Tensors are valid until the next step. If ranks hold shards and `whole` is true, the shards are gathered.
    """
    found = []
    damaged: list[Exception | None] = []
    shard = reducer.shard if whole else None
    flat_buffers = _remembering(reducer)
    rooms = {}
    if shard is not None:
        parts = {
            slot.spec.name: flat_buffer.x[slot.start : slot.stop]
            for flat_buffer in flat_buffers
            for slot in flat_buffer.slots
        }
        rooms = on_all_ranks(
            lambda: {name: shard.room(part) for name, part in parts.items()},
            "make room for what is unsent",
            reducer.env.control,
        )
    for flat_buffer in flat_buffers:
        flat_buffer.x.copy_(flat_buffer.committed[UNSENT]).mul_(
            flat_buffer.memory.weight / reducer.comm.world
        )
        damaged.append(damage(reducer.comm.all_reduce(flat_buffer.x)))
        for slot in flat_buffer.slots:
            spec, unsent = slot.spec, flat_buffer.x[slot.start : slot.stop]
            if shard is not None:
                unsent = shard.gathered(spec, unsent, rooms[spec.name], damaged)
                spec = spec.whole
            found.append((spec, unsent))
    require_undamaged(damaged, reducer.env.control)
    return found


def forget_unsent(reducer: InstalledRecipe) -> None:
    """Empty the memory of what is unsent, once it has been sent."""
    for flat_buffer in _remembering(reducer):
        flat_buffer.forget_unsent()


def _remembering(reducer: InstalledRecipe) -> list[FlatBuffer]:
    return [flat_buffer for flat_buffer in reducer.layout.flat_buffers if UNSENT in flat_buffer.committed]
