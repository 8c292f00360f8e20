"""The requests that a user may make between two steps: another recipe, or all unsent gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from gradwire.arena import ParameterSpec
from gradwire.engine.agree import damage, require_agreement, require_success, require_undamaged
from gradwire.engine.engine import META, Engine
from gradwire.engine.layout import Layout
from gradwire.memory import UNSENT
from gradwire.recipes import Composition, Recipe, recipe


def switch(engine: Engine, asked: str | Recipe | Composition, check: Callable[[Layout], None]) -> None:
    """Run `asked` from the next step on, with all that is unsent. A collective.

    `check` raises for a layout that does not suit the optimizer. Raises `ValueError`, or what `check` or a
    policy raises, where the recipe cannot run; `PeerFailed` on the other ranks; and `RanksDisagree` where
    ranks ask for different ones. Then everything goes on as it was, on all of them.
    """
    refusal: Exception | None = None
    try:
        chosen = recipe(asked)
        first = chosen.build()
        layout = engine.layout_of(first, META)
        check(layout)
        engine.around.compile_for(layout)
    except Exception as error:  # a policy of the user's, or a warning made an error: peers must hear of it
        refusal = error
    require_success(refusal, "switch", engine.around.control)
    require_agreement({"recipe": str(chosen)}, engine.around.control)
    engine.recipe = chosen
    engine.follow(replace(first, why=f"switched to at step {engine.step}"))


def take_unsent(engine: Engine, *, whole: bool) -> list[tuple[ParameterSpec, Tensor]]:
    """The mean over ranks of the unsent gradient, by parameter, flat; it is forgotten here. A collective.

    Tensors are valid until the next step. Where ranks hold shards and `whole` is true, they are gathered.
    """
    found = []
    damaged: list[Exception | None] = []
    lanes = [lane for lane in engine.layout.lanes if UNSENT in lane.committed]
    for lane in lanes:
        lane.x.copy_(lane.committed[UNSENT]).mul_(lane.memory.weight / engine.comm.world)
        damaged.append(damage(engine.comm.all_reduce(lane.x)))
        for slot in lane.slots:
            spec, late = slot.spec, lane.x[slot.start : slot.stop]
            if engine.around.shard is not None and whole:
                spec, late = spec.whole, engine.around.shard.gathered(spec, late, damaged)
            found.append((spec, late))
    require_undamaged(damaged, engine.around.control)
    for lane in lanes:
        lane.committed[UNSENT].zero_()
    return found
