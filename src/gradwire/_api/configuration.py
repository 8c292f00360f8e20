"""The arguments of `attach` as one value, which is validated here and compared over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from gradwire.environment import CONNECTIONS, TIMED_EVERY, connections_asked, timed_every
from gradwire.planning.boundaries import largest_unit
from gradwire.recipes import Composition, Recipe, recipe
from gradwire.sources.checks import check_policy
from gradwire.sources.nodes.members import Nodes, kind_of
from gradwire.sources.source import Source
from gradwire.step.layout import Policy, chooser
from gradwire.step.optimizer_log import SkippedStep
from gradwire.tools.guard import check_guard
from gradwire.unit.parameters import layout_hash
from gradwire.version import __version__

TARGET = 0.95
PlacementName = Literal["auto", "host", "device"]
Gathered = Literal["bf16", "int8", "exact"] | None
"""The bits in which FSDP2 gathers parameters; "exact": what has changed; `None`: as they are."""
HeldOn = Literal["device", "host"]


@dataclass(frozen=True)
class Configuration:
    """Arguments of `attach`, which documents them. All but `cuda_graphs` must be equal on all ranks.

    A new argument is a field here, with its check in `validated` and its text in `fingerprint`.
    """

    recipe: str | Recipe | Composition
    target: float = TARGET
    policy: Policy | None = None
    scaler: torch.amp.GradScaler | None = None
    seed: int = 0
    memory_dtype: torch.dtype | None = None
    placement: PlacementName = "auto"
    nodes: Nodes = "auto"
    guard_every: int = 0
    checksums: bool = False
    skipped: SkippedStep = "drop"
    inside: str | Recipe | None = None
    gather: Gathered = None
    held_on: HeldOn = "device"
    cuda_graphs: bool = False

    def validated(self, source: Source) -> Recipe:
        """Check the options and return the recipe. Raises `ValueError` for options that cannot work with
        `source`.
        """
        for name in ("checksums", "cuda_graphs"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r} is neither True nor False")
        if self.placement not in get_args(PlacementName):
            raise ValueError(f"placement={self.placement!r} is none of 'auto', 'host' and 'device'")
        self.check_values()
        if source.members is not None and kind_of(self.nodes) == "given":
            raise ValueError(
                "nodes= is for whole parameters; fully_shard shares them within a node already: leave it out"
            )
        check_policy(self.policy, list(source.parameters))
        if source.members is None and (self.inside is not None or self.gather is not None):
            raise ValueError("inside= and gather= are for modules under fully_shard: leave them out")
        if self.gather == "exact" or self.held_on != "device":
            raise ValueError(
                'gather="exact" and held_on= are not for replicas=: FSDP2\'s own traffic then stays inside a '
                "node, where decoding takes longer than sending. Leave them out"
            )
        connections_asked()
        timed_every()
        check_guard(self.guard_every, is_replicated=source.members is None)
        return self._chosen()

    def check_values(self) -> None:
        """Raise `ValueError` for what an argument can be for no model."""
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r} is not a whole number")
        if isinstance(self.target, bool) or not isinstance(self.target, int | float):
            raise ValueError(f"target={self.target!r} is not a number")
        if self.scaler is not None and not callable(getattr(self.scaler, "get_scale", None)):
            raise ValueError(f"scaler={self.scaler!r} is not a torch.amp.GradScaler")
        if self.skipped not in get_args(SkippedStep):
            raise ValueError(f"skipped={self.skipped!r} is neither 'drop' nor 'keep'")
        if self.memory_dtype not in (None, torch.bfloat16):
            raise ValueError(f"memory_dtype={self.memory_dtype}; choose torch.bfloat16, or leave it out")
        if self.held_on not in get_args(HeldOn):
            raise ValueError(f"held_on={self.held_on!r} is neither 'device' nor 'host'")

    def answered(self, source: Source) -> Configuration:
        """These arguments, with what the policy answers for each parameter of `source` in its place.

        gradwire's thread keeps the answers. A function of the user's may refer to the model, with which that
        thread ends. Raises what the policy raises.
        """
        if self.policy is None:
            return self
        choose = chooser(self.policy)
        answers = {spec.name: choose(spec.whole) for spec in source.specs}
        return replace(self, policy=lambda spec: answers[spec.name])

    def fingerprint(self, chosen: Recipe, source: Source, device: torch.device) -> dict[str, str]:
        """Texts of everything that must be equal on all ranks, by name.

        Args:
            chosen: the recipe that `recipe` stands for.
            source: names the parameters, with their shapes, types and order in memory.
            device: where gradients are computed.
        """
        choose, specs = chooser(self.policy), source.specs
        flat_buffers = ",".join(choose(spec.whole) or "-" for spec in specs)
        # With the order in memory, in which buckets are filled: equal shapes are not enough to add up.
        shapes = ";".join(f"{spec.shape}{spec.stride or ''}" for spec in specs)
        dtypes = ";".join(str(spec.dtype) for spec in specs)
        return {
            "memory_dtype": str(self.memory_dtype),
            "device": device.type,
            "placement": self.placement,
            "nodes": kind_of(self.nodes),
            "guard_every": str(self.guard_every),
            "checksums": str(self.checksums),
            "skipped": self.skipped,
            "inside": str(self.inside),
            "gather": str(self.gather),
            CONNECTIONS: str(connections_asked()),
            TIMED_EVERY: str(timed_every()),
            "gradwire version": __version__,
            # Without it plain torch computes, which adds up in another order.
            "kernels of numba": str(find_spec("numba") is not None),
            "most elements of a unit": str([largest_unit(stays_on_device=each) for each in (False, True)]),
            "source of gradients": source.kind,
            "recipe": str(chosen),
            "seed": str(self.seed),
            "policy": "default" if self.policy is None else flat_buffers,
            "scaler": "none" if self.scaler is None else "given",
            "parameter names": " ".join(spec.name for spec in specs),
            "parameter shapes": shapes,
            "parameter dtypes": dtypes,
            "layout": layout_hash(specs),
        } | source.facts()

    def _chosen(self) -> Recipe:
        chosen, target = recipe(self.recipe), self.target
        if not 0.0 < target <= 1.0:
            raise ValueError(
                f"target={target} is outside (0, 1]; 0.95 means 95 % of the no-communication speed"
            )
        if chosen.name == "auto" and "target" not in chosen.options:
            return recipe(Recipe("auto", {"target": target, **chosen.options}))
        if target not in (TARGET, chosen.options.get("target")):
            raise ValueError(f"target={target} is for the recipe auto; {chosen} would ignore it")
        return chosen
