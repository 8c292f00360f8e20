"""`attach` for FSDP2's own traffic, and the wire that it returns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from gradwire._api.configuration import Configuration, Gathered
from gradwire._api.parts import Ranks, lacking
from gradwire._api.prepare import compiled_beside, prepare
from gradwire._api.report import Report, account_of
from gradwire._api.wire import Wire
from gradwire.agreement.agree import (
    OptimizerText,
    on_all_ranks,
    require_accepted,
    require_agreement,
    require_same_optimizer,
)
from gradwire.agreement.board import Board
from gradwire.agreement.calls import Calls
from gradwire.checkpoint import file_set
from gradwire.checkpoint.state import Missing, Saved
from gradwire.comm import Comm, ProcessGroupComm
from gradwire.comm import groups as lending
from gradwire.kernels import compiler
from gradwire.measure.probe import slowest
from gradwire.placement import device_at
from gradwire.quantities import bytes_text, counted
from gradwire.recipes import Composition, Recipe
from gradwire.recipes import recipe as parsed
from gradwire.sources.carried import Carrier, claim, give_up, require_unclaimed
from gradwire.sources.fsdp import state
from gradwire.sources.fsdp.coding import GATHERS, Drawn, scattering
from gradwire.sources.fsdp.modules import ShardedModule, check_parameters, modules_of, shards_in
from gradwire.sources.fsdp.routes import ByNodes, targets_of
from gradwire.sources.fsdp.traffic import Traffic, Wished, close_with
from gradwire.sources.nodes.members import Members, agreed, kind_of, neighbours
from gradwire.sources.unwrap import Optimizers, optimizers_of
from gradwire.step.optimizer_log import OptimizerLog
from gradwire.tools.guard import check_guard
from gradwire.version import __version__

T = TypeVar("T")

_LOG = logging.getLogger("gradwire")

_NOT_HERE = ("policy", "target", "placement", "checksums", "cuda_graphs")
"""Arguments of `attach` that have no meaning for FSDP2's own traffic."""


def attach_to_fsdp(
    model: nn.Module, optimizer: object, asked: Configuration, process_group: dist.ProcessGroup | None
) -> FSDPWire:
    """`attach` without `replicas=`, for a model under `fully_shard`. A collective over its mesh.

    Args:
        model: has one or more modules under `fully_shard`.
        optimizer: one optimizer or several.
        asked: the arguments of `attach`.
        process_group: must be `None`.

    Raises as `attach` does.
    """
    if process_group is not None:
        raise ValueError("process_group= has no meaning for FSDP2, which sends over its own: leave it out")
    modules = modules_of(model)
    group = check_parameters(model, modules)  # a script shards alike on all ranks
    where = modules[0].device
    control = lending.Borrowed(group if lending.carries_cpu(group) else lending.borrow(group, where, "gloo"))
    lent = [control.group]
    with lending.given_back_if_refused(lambda: lent):
        carrier = _carrier(model, modules)
        wished, optimizers, neighbourhood = _accepted(carrier, modules, optimizer, asked, control)
        require_agreement(_fingerprint(modules, wished, asked, where), control)
        require_same_optimizer(OptimizerText.of(optimizers), control)
        nodes, why_flat = agreed(kind_of(asked.nodes), neighbourhood, control)
        parameters = {name: each for module in modules for name, each in module.parameters.items()}
        optimizer_log = OptimizerLog(
            parameters, optimizers, device_at(where), skipped=asked.skipped, alone=control.world == 1
        )
        traffic = Traffic(
            modules,
            wished,
            optimizer_log,
            nodes=nodes,
            why_flat=why_flat,
            loss_scale=_loss_scale_of(asked.scaler, where),
            seed=asked.seed,
            memory_dtype=asked.memory_dtype,
            can_go_back=asked.skipped == "drop",
            held_on_host=asked.held_on == "host",
            guard_every=asked.guard_every,
        )
        traffic.routes.control = control
        _connect(traffic, wished, control)
        lent += traffic.routes.groups
        _say(traffic, control)
        all_have_kernels = _awaited(traffic, control)
        memory, held = on_all_ranks(
            lambda: (traffic.make_room(wished.scattering), traffic.make_held(wished)),
            "make room for what is unsent or held",
            control,
        )
    traffic.install(model, memory, held, all_have_kernels)
    optimizer_log.watch(model)
    claim(carrier)
    close_with(model, traffic.routes)
    calls = Calls(Board.of(group) if control.world > 1 else None)
    return FSDPWire(TrafficRanks(model, traffic, control, calls, asked.scaler))


def check_inside(model: nn.Module, asked: Configuration) -> tuple[tuple[ShardedModule, ...], Wished]:
    """Modules of FSDP2 in `model`, and the codings asked for its own traffic.

    Raises `ValueError` for options that cannot work.
    """
    wished = Wished(scattering(parsed(asked.inside or "dense")), _gather(asked.gather))
    if wished.scattering.feedback or isinstance(wished.scattering.coding, Drawn):
        raise ValueError(
            f"inside={asked.inside!r} would need a state beside that of the recipe between nodes: choose "
            "dense, bf16, fp8 or int8, without feedback"
        )
    modules = modules_of(model)
    for each in modules:
        each.refuse_taken()
        if wished.gather is not None:
            each.refuse_raw_bytes()
    return modules, wished


def carry_inside(model: nn.Module, asked: Configuration) -> Traffic:
    """Carry FSDP2's own traffic inside nodes, as was checked and agreed on. A collective inside each node."""
    modules, wished = check_inside(model, asked)
    where = modules[0].device
    traffic = Traffic(modules, wished, OptimizerLog({}, (), device_at(where)))
    all_have_kernels = None
    if where.type == "cpu":
        control = traffic.routes.control = lending.Borrowed(traffic.group)
        all_have_kernels = _awaited(traffic, control)
    traffic.install(model, [None] * len(modules), [None] * len(modules), all_have_kernels)
    close_with(model, traffic.routes)
    if dist.get_rank() == 0:
        _LOG.info("FSDP2's own traffic: %s", _summary(traffic))
    return traffic


def _carrier(model: nn.Module, modules: tuple[ShardedModule, ...]) -> Carrier:
    over = dist.get_process_group_ranks(modules[0].received()[0])
    named = (named for module in modules for named in module.parameters.items())
    trained = {name: each for name, each in named if each.requires_grad}
    return Carrier("traffic of FSDP2", model, model, over, trained)


def _accepted(
    carrier: Carrier,
    modules: tuple[ShardedModule, ...],
    optimizer: object,
    asked: Configuration,
    control: ProcessGroupComm,
) -> tuple[Wished, Optimizers, Members]:
    """Check everything that may differ between ranks, and tell a refusal to the others. A collective over
    `control`.

    Args:
        carrier: what the wire would carry.
        modules: the modules under `fully_shard`.
        optimizer: one optimizer or several.
        asked: the arguments of `attach`.
        control: all ranks.

    Returns the wished traffic, the optimizers, and the ranks of this rank's node. Raises `ValueError` for
    arguments that FSDP2's own traffic cannot have, and `RanksDisagree` if another rank refuses.
    """
    refusal: Exception | None = None
    try:
        usual = Configuration(asked.recipe)
        for name in _NOT_HERE:
            if getattr(asked, name) != getattr(usual, name):
                raise ValueError(f"{name}= has no meaning for FSDP2's own traffic: leave it out")
        if asked.inside is not None:
            raise ValueError("inside= goes with replicas=: without it the recipe is that of FSDP2's scatters")
        asked.check_values()
        wished = Wished(scattering(parsed(asked.recipe)), _gather(asked.gather))
        require_unclaimed(carrier)
        for each in modules:
            each.refuse_taken()
        _check_gather(modules, wished, asked)
        optimizers = optimizers_of(optimizer)
        _check_optimizers(optimizers, carrier.module)
        OptimizerText.of(optimizers)
        mine = neighbours(asked.nodes, dist.get_process_group_ranks(control.group), control.rank)
    except Exception as error:  # a warning made an error: peers must hear of it
        refusal = error
    require_accepted(refusal, control)
    return wished, optimizers, mine


def _check_gather(modules: tuple[ShardedModule, ...], wished: Wished, asked: Configuration) -> None:
    """Raise `ValueError` for gathers that cannot be coded, or not be exact, and for arguments that are for
    exact ones alone.
    """
    if wished.gather is not None:
        for each in modules:
            each.refuse_raw_bytes()
    if wished.gather != "exact":
        usual = Configuration(asked.recipe)
        for name in ("guard_every", "held_on"):
            if getattr(asked, name) != getattr(usual, name):
                raise ValueError(f'{name}= is for gather="exact" here: leave it out')
        return
    check_guard(asked.guard_every, is_replicated=True)
    for each in modules:
        [dtype] = each.gathered_types
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f'gather="exact" is for parameters that are gathered in 16 bits, and module {each.label!r} '
                f"gathers {dtype}: pass mp_policy=MixedPrecisionPolicy("
                'param_dtype=torch.bfloat16) to fully_shard, or gather="int8" or "bf16"'
            )


def _gather(asked: object) -> Gathered:
    if asked not in GATHERS:
        raise ValueError(f"gather={asked!r} is none of None, 'bf16', 'int8' and 'exact'")
    return asked  # type: ignore[return-value]  # one of them


def _check_optimizers(optimizers: Optimizers, model: nn.Module) -> None:
    ours = shards_in(model)
    for optimizer in optimizers:
        if not any(id(each) in ours for group in optimizer.param_groups for each in group["params"]):
            raise ValueError(
                f"the optimizer {type(optimizer).__name__} has no parameter of this model: build it from "
                "model.parameters() after fully_shard, or leave it out"
            )


def _fingerprint(
    modules: tuple[ShardedModule, ...], wished: Wished, asked: Configuration, where: torch.device
) -> dict[str, str]:
    shapes = [tuple(parameter.shape) for each in modules for parameter in each.parameters.values()]
    types = [str(parameter.dtype) for each in modules for parameter in each.parameters.values()]
    frozen = [str(len(each.names) - len(each.trained())) for each in modules]
    return {
        "recipe": wished.scattering.text,
        "gather": str(wished.gather),
        "memory_dtype": str(asked.memory_dtype),
        "skipped": asked.skipped,
        "nodes": kind_of(asked.nodes),
        "seed": str(asked.seed),
        "guard_every": str(asked.guard_every),
        "held_on": asked.held_on,
        "scaler": "none" if asked.scaler is None else "given",
        "device": where.type,
        "gradwire version": __version__,
        # Without it plain torch computes, which draws and adds up in another order.
        "kernels of numba": str(find_spec("numba") is not None),
        "modules": " ".join(each.label for each in modules),
        "parameter names": " ".join(name for each in modules for name in each.names),
        "parameter shapes": str(shapes),
        "parameter dtypes": " ".join(types),
        "frozen parameters": " ".join(frozen),
    }


def _connect(traffic: Traffic, wished: Wished, control: ProcessGroupComm) -> None:
    """Make groups inside and between the nodes of `traffic`, if ranks share some and `wished` codes anything.
    A collective over `control`.

    Raises `ValueError`, on all ranks, if torch cannot make them.
    """
    nodes, rank = traffic.nodes, control.rank
    if nodes is None or not wished.is_coded or traffic.routes.by_nodes is not None:
        return
    where = traffic.modules[0].device
    members = nodes.inside(rank), targets_of(nodes, rank, control.world)
    groups = lending.borrow_parts(control.group, *((each, traffic.group, where) for each in members))
    if groups is None:
        raise ValueError(
            f"fully_shard's mesh spans {len(nodes.nodes)} nodes of {nodes.per_node} ranks each. There an "
            f"all-to-all among all ranks sends up to {nodes.per_node} times as much over a node's link as "
            "FSDP2's own ring. Ranks are in different numbers of process groups, so torch cannot make groups "
            "inside and between nodes: create groups of some ranks only after attaching, or pass nodes=None "
            "to send all the same"
        )
    inside, between = groups
    traffic.routes.by_nodes = ByNodes(nodes, rank, inside, between, where)


def _awaited(traffic: Traffic, control: Comm) -> Callable[[], bool] | None:
    """A collective over `control` that tells whether all ranks have the kernels of `traffic`, while another
    process compiles them; `None` if there is nothing to wait for. A collective.
    """
    subjects = _subjects(traffic)
    load = partial(_prepare, traffic, control)
    has_kernels = compiled_beside(subjects, control)
    if has_kernels is None:
        load()
        return None
    if control.rank == 0:
        _LOG.info(
            "FSDP2's own traffic is uncoded until its kernels are compiled, which another process does; "
            "`gradwire warmup` does it beforehand"
        )

    def all_have_kernels() -> bool:
        if slowest(control, [float(not has_kernels())]) != [0.0]:
            return False
        load()
        return True

    return all_have_kernels


def _prepare(traffic: Traffic, control: Comm) -> None:
    """Load the kernels of `traffic`, or compile them. Raises nothing."""
    prepare(traffic.asked.scattering.text, _subjects(traffic), control.rank)


def _subjects(traffic: Traffic) -> frozenset[str]:
    """Kernels for the CPU that `traffic` may call. Those of a device are compiled by their first calls."""
    is_needed = traffic.asked.is_coded and traffic.modules[0].device.type == "cpu"
    return compiler.imported() if is_needed else frozenset()


def _loss_scale_of(
    scaler: torch.amp.GradScaler | None, where: torch.device
) -> Callable[[], torch.Tensor | None]:
    """The scale of gradients, as a number at `where`: the host reads nothing."""
    if scaler is None:
        return lambda: None
    one = torch.ones((), dtype=torch.float32, device=where)
    return lambda: scaler.scale(one)


def _say(traffic: Traffic, control: Comm) -> None:
    """Log on rank 0 the coding of each kind of traffic, and its cost in memory."""
    if control.rank:
        return
    wished = traffic.wished
    if memory := traffic.memory_bytes(wished.scattering):
        twice = (
            " Half of it is for undoing steps that are left out: skipped='keep' saves that."
            if traffic.can_go_back
            else ""
        )
        _LOG.warning(
            "%s keeps a residual of %s on every rank, %s.%s "
            "memory_dtype=torch.bfloat16 halves it; %s(feedback=False) needs none",
            wished.scattering.text,
            bytes_text(memory),
            "a world times the shard"
            if traffic.nodes is None
            else f"{len(traffic.nodes.nodes)} times the shard, once per node",
            twice,
            wished.scattering.text.split("(")[0],
        )
    if held := traffic.held_bytes(wished):
        _LOG.warning(
            "exact gathers hold the parameters of %s as last gathered: %s on every rank%s",
            "all ranks" if traffic.nodes is None else "as many ranks as there are nodes",
            bytes_text(held),
            "" if traffic.modules[0].group.device.type == "cpu" else '. held_on="host" keeps them there',
        )
    if control.world == 1:
        _LOG.info("one rank: FSDP2 sends nothing")
        return
    if traffic.why_flat and wished.is_coded:
        _LOG.warning(
            "%s: each rank sends codes to all others, and not by two levels. Over the link of a node of S "
            "ranks that is up to S times as much. nodes=None asks for the same, without this warning",
            traffic.why_flat,
        )
    _LOG.info("FSDP2's own traffic: %s", _summary(traffic))


def _summary(traffic: Traffic) -> str:
    scattered, gathered = traffic.wished.scattering.text, traffic.wished.gather or "they are"
    modules = counted(len(traffic.modules), "module")
    levels = ", in nodes first" if traffic.routes.by_nodes is not None else ""
    return f"{modules}, gradients scattered as {scattered}, parameters gathered as {gathered}{levels}"


@dataclass(frozen=True, repr=False)
class FSDPReport(Report):
    """The report on FSDP2's own traffic, which has no more of `Report` than follows; the rest is 0 or empty.

    `recipe` is that of the scatters. `dense_bytes_per_step` are the bytes that rings would have sent of the
    same numbers, uncoded. `compress_s` are seconds of the host for coding. `why_flat` says why each
    rank sends codes to all others, although `nodes="auto"` found ranks that share a node; else it is empty.
    `held_bytes` are those of gathered parameters that exact gathers hold.
    """

    why_flat: str = ""
    held_bytes: int = 0

    @property
    def _rows(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        parts = {"unsent gradient": self.memory_bytes, "gathered parameters": self.held_bytes}
        kept = [f"{bytes_text(each)} of {name}" for name, each in parts.items() if each]
        sent = bytes_text(self.wire_bytes_per_step)
        rows = [
            ("memory", f"{' and '.join(kept)} on every rank" if kept else "none"),
            ("on the wire", f"{sent} per rank and step, {self.ratio:.1%} of uncoded rings"),
            *self._traffic,
            *self._inside,
            *([("nodes", f"{self.why_flat}: each rank sends codes to all others")] if self.why_flat else []),
            ("per step", f"encode and decode {self.compress_s * 1e3:.1f} ms"),
        ]
        return rows, self._events


_NOT_KNOWN = (
    "FSDP2 carries out its steps itself, so that this is not known of its own traffic. With replicas= a wire "
    "between nodes has it"
)


def _load(traffic: Traffic, control: Comm, saved: Saved, missing: Missing, mean: bool) -> None:
    """Load states, for the recipe that was asked for: what is unsent is of that one."""
    if traffic.awaits_kernels:
        _prepare(traffic, control)
        traffic.begin_awaited()
    state.load(traffic, control, saved, missing, mean=mean or not state.fits(traffic, saved))


class TrafficRanks(Ranks):
    """Calls that the ranks of one mesh make together, about FSDP2's own traffic."""

    def __init__(
        self,
        model: nn.Module,
        traffic: Traffic,
        control: ProcessGroupComm,
        calls: Calls,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.model, self.traffic, self.control, self._calls = model, traffic, control, calls
        self._scaler, self._is_attached = scaler, True
        of = file_set.Stateful(
            control,
            lambda: traffic.made,
            lambda: state.save(traffic, control),
            lambda saved: state.fits(traffic, saved),
            partial(_load, traffic, control),
        )
        super().__init__(of, partial(state.save_mean, traffic, control))

    def begin(self, call: str) -> None:
        if not self._is_attached:
            raise ValueError(f"{call}: the wire was detached, and FSDP2 carries its traffic itself")
        self._calls.require_between_steps(call)
        self._calls.begin(call, self.traffic.made)

    def _together(self, call: str, function: Callable[[], T]) -> T:
        self.begin(call)
        return function()

    @contextmanager
    def exact(self, _inside: Traffic | None) -> Iterator[None]:
        self.begin("exact()")
        with self.traffic.exact():
            yield
            self.begin("the end of exact()")
            # Nothing is sent after it. Without this, a rank that then ends would take the store along, before
            # others have seen that all are here.
            require_agreement({"call": "the end of exact()"}, self.control)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        root: Any = self.model
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def switch(
        self, recipe: str | Recipe | Composition, gather: Gathered | Literal["as before"] = "as before"
    ) -> None:
        self.begin("switch()")
        traffic = self.traffic

        def made() -> tuple[Wished, Any, Any]:
            wanted = traffic.asked.gather if gather == "as before" else _gather(gather)
            wished = Wished(scattering(parsed(recipe)), wanted)
            _check_gather(traffic.modules, wished, Configuration(recipe))
            return wished, traffic.make_room(wished.scattering), traffic.make_held(wished)

        wished, memory, held = on_all_ranks(made, "switch", self.control)
        texts = {"recipe": wished.scattering.text, "gather": str(wished.gather)}
        require_agreement(texts, self.control)
        _connect(traffic, wished, self.control)
        traffic.change(wished, memory, held)
        _prepare(traffic, self.control)
        _say(traffic, self.control)

    def flush(self, call: str, prepare: Callable[[], T]) -> T:
        """It takes a float32 reduce-scatter of what is unsent."""
        self.begin(call)
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        self.traffic.add_unsent_to_gradients(scale)
        return prepare()

    def retire(self) -> None:
        """Let FSDP2 carry its traffic itself."""
        self.traffic.remove()
        self.traffic.optimizer_log.change((), self.model)
        give_up(_carrier(self.model, self.traffic.modules))
        self._is_attached = False


class FSDPWire(Wire):
    """The handle on FSDP2's own traffic: as `Wire`, as far as its methods have a meaning there.

    `exact`, `save`, `load`, `mean_state_dict`, `load_state_dict`, `switch`, `flush` and `detach` are
    collectives. Methods that look into gradwire's own steps (`diagnose`, `trace`, `watching`, `overlap`, …)
    raise `ValueError`.
    """

    _ranks: TrafficRanks

    def __init__(self, ranks: TrafficRanks) -> None:
        steps = lacking(_NOT_KNOWN, no_sync=ranks.no_sync)
        super().__init__(steps, lacking(_NOT_KNOWN), ranks, ranks)
        self._traffic, self._control, self._model = ranks.traffic, ranks.control, ranks.model

    def __repr__(self) -> str:
        report = self.report()
        sends = f", {report.ratio:.0%} of rings".replace("%", " %") if report.wire_bytes_per_step else ""
        return f"FSDPWire({report.recipe}, gather={report.gather!r}, step {report.step}{sends})"

    # -- what it tells

    @property
    def settled(self) -> bool:
        """False while everything travels uncoded, until kernels are compiled."""
        return not self._traffic.awaits_kernels

    def report(self) -> FSDPReport:
        """An account of what each module sends, and what it costs. It sends nothing.

        Example::

            print(wire.report())
        """
        traffic = self._traffic
        if not traffic.optimizer_log.is_in_step:  # which may still be left out
            traffic.up_to_date()
        own, (*_, ring, inside, coding_s) = account_of(traffic), traffic.per_pass()
        nodes = traffic.nodes if traffic.routes.by_nodes is not None else None
        sent = own["gather_bytes_per_step"] + own["scatter_bytes_per_step"]
        waits = " (dense until its kernels are compiled)" if traffic.awaits_kernels else ""
        return FSDPReport(
            recipe=f"{traffic.asked.scattering.text}{waits}",
            why="as configured",
            step=traffic.made,
            world=self._control.world,
            skipped_steps=0,
            dropped_steps=traffic.dropped,
            late=None,
            wire_bytes_per_step=sent,
            metered_bytes_per_step=sent,
            dense_bytes_per_step=ring,
            compress_s=coding_s,
            backward_s=0.0,
            exposed_comm_s=0.0,
            memory_bytes=traffic.unsent_bytes,
            units=len(traffic.modules),
            facts=None,
            timeline=[],
            wire_bytes=traffic.sent_bytes,
            per_node=1 if nodes is None else nodes.per_node,
            inside_bytes_per_step=inside,
            why_flat=traffic.why_flat if traffic.wished.is_coded else "",
            held_bytes=traffic.held_bytes(traffic.asked),
            **own,
        )

    def metrics(self) -> dict[str, float]:
        """Flat numbers for dashboards, as of `Wire.metrics`: those that are known here."""
        report = self.report()
        found = {
            "step": report.step,
            "dropped_steps": report.dropped_steps,
            "bytes_sent_mean": report.wire_bytes_per_step,
            "gather_bytes_mean": report.gather_bytes_per_step,
            "scatter_bytes_mean": report.scatter_bytes_per_step,
            "dense_bytes": report.dense_bytes_per_step,
            "ratio_mean": report.ratio,
            "compress_s_mean": report.compress_s,
            "memory_bytes": report.memory_bytes,
        }
        return {f"gradwire/{name}": float(value) for name, value in found.items()}

    def log_to(self, target: Any, *, every: int = 50) -> None:
        """Write `metrics()` to `target` at the end of each `every`-th backward pass; see `Wire.log_to`."""
        from gradwire.telemetry.targets import Listener, write_to

        write = write_to(target, self._control.rank)
        self._traffic.ended.append(Listener(self.metrics, write, every))

    # -- what may change

    def switch(
        self, recipe: str | Recipe | Composition, gather: Gathered | Literal["as before"] = "as before"
    ) -> None:
        """Change what scatters and gathers send, from the next step on. A collective.

        Unsent gradient is kept; if the new recipe has no memory, the next step sends all of it. Raises as
        `Wire.switch` does.
        """
        self._ranks.switch(recipe, gather)

    def switch_optimizer(self, optimizer: Any) -> None:
        """Let another optimizer, or several, step the parameters from now on. A collective; as of `Wire`."""
        self._ranks.begin("switch_optimizer()")

        def given() -> tuple[Optimizers, OptimizerText]:
            optimizers = optimizers_of(optimizer)
            _check_optimizers(optimizers, self._model)
            return optimizers, OptimizerText.of(optimizers)

        optimizers, text = on_all_ranks(given, "switch_optimizer", self._control)
        require_same_optimizer(text, self._control)
        self._traffic.roll_back_unused()
        self._traffic.optimizer_log.change(optimizers, self._model)

    def drop_step(self) -> None:
        """Leave this step out: call it after `backward()`, instead of `optimizer.step()`, as of `Wire`.

        Raises `ValueError` if no gradient waits for an optimizer, and where `attach(skipped="keep")` keeps
        nothing to go back to.
        """
        if not self._traffic.can_go_back and any(True for _ in self._traffic.unsent):
            raise ValueError("skipped='keep' spares the memory that a step to be left out would need")
        self._traffic.optimizer_log.drop()

    def detach(self) -> None:
        """Flush, and let FSDP2 carry its traffic itself from then on. A collective.

        Call `optimizer.step()` next, as after `flush`, if the recipe remembers.
        """
        self.flush()
        self._ranks.retire()
