"""Local steps: what replicas have learned since the last round comes as the gradient of shared parameters.

Douillard et al. 2023 (DiLoCo, arXiv 2311.08105), algorithm 1: θ₀ are the shared parameters and θ a replica's
own; Δ = θ₀ − θ is the gradient with which an outer optimizer steps on θ₀. `docs/local-steps.md` has the
formulas of landing. What differs: Δ goes by any recipe, and may land later.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm import gathered
from gradwire.errors import GradwireError, RanksDisagree
from gradwire.kernels.range import LARGEST_GRADIENT
from gradwire.planning.tuning import ROUNDS
from gradwire.recipes.parse import short
from gradwire.sources.attempts import Attempts
from gradwire.sources.buckets import CAP_BYTES, Bucket, assigned
from gradwire.sources.buffer_means import BufferMeans, number_of, put
from gradwire.sources.carried import give_up, require_unclaimed
from gradwire.sources.checks import check_policy, in_words
from gradwire.sources.loads import Loads
from gradwire.sources.local_optimizers import LocalOptimizers
from gradwire.sources.plain import group_in, spread
from gradwire.sources.round import Round
from gradwire.sources.same_parameters import Known
from gradwire.sources.sharded import ShardedParameters, is_sharded
from gradwire.sources.source import Source
from gradwire.sources.unwrap import Optimizers, inside, optimizers_of, replicated_in
from gradwire.sources.values import Values
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.layout import Layout, Policy, chooser
from gradwire.step.optimizers import local
from gradwire.step.reducer import Backward
from gradwire.step.shards import shards_of
from gradwire.step.step import SideBroadcast, Step
from gradwire.unit.parameters import ParameterSpec, specs_of

_LOG = logging.getLogger("gradwire")

WEIGHT = "gradwire: weight"
"""In a round, beside parameters: does this replica count (1 or 0), has it finished (1 or 0)."""

PATIENCE = 3
"""After so many rounds in a row in which its parameters were not finite, a replica raises."""


class LocalSteps(Source):
    """Δ of a replica's parameters, in buckets as those of plain modules.

    `parameters` are the shared ones, θ₀, which the outer optimizer steps; `Values` has them beside the
    replica's own. `round` says what was sent, and when it lands.
    """

    kind = "local steps"
    tuning = ROUNDS
    lands_without: ClassVar[bool] = False
    """Whether a round may land that this replica was not in, so that what it has learned stays."""

    def __init__(
        self,
        model: nn.Module,
        replicas: object,
        optimizers: LocalOptimizers,
        *,
        every: int,
        delay: int,
        on_host: bool = True,
    ) -> None:
        super().__init__(model)
        self.source_state = self
        self.every, self.delay = every, delay
        self._held = weakref.ref(optimizers)
        self._policy: Policy | None = None
        wrapped = inside(model)
        self._shared_by: dist.ProcessGroup | None = None
        """The ranks that hold this replica together, or alike."""
        self._left_out: frozenset[str] = frozenset()
        """Names of parameters that DDP was told to ignore."""
        if isinstance(wrapped, DistributedDataParallel):
            inner: nn.Module = wrapped.module
            self._shared_by, self._left_out = wrapped.process_group, frozenset(wrapped.parameters_to_ignore)
        else:
            inner = replicated_in(model)
        self._replicas = group_in(replicas)
        self._shards = ShardedParameters(inner, self._replicas) if is_sharded(inner) else None
        if self._shards is not None:
            self._shared_by = self._shards.inside
        trained = specs_of(inner, self._left_out) if self._shards is None else self._shards.specs
        if not trained:
            raise ValueError("no parameter of the model needs a gradient: leave at least one unfrozen")
        named = dict(inner.named_parameters())
        self._own = {spec.name: named[spec.name] for spec in trained}
        self.where = self._here(next(iter(self._own.values()))).device
        self.device = torch.device("cpu") if on_host else self.where
        weight = ParameterSpec(WEIGHT, (2,), torch.float32, 2)
        if self._shards is not None:
            weight = _own_part(weight, self._shards.inside.size())
        self.specs = (*map(_wide, trained), weight)
        self._rows = {} if self._shards is None else self._shards.rows
        self._values = Values(
            self._own,
            self.specs,
            self._rows,
            self.device,
            self._here,
            is_apart=delay > 0 or self.lands_without,
        )
        self.parameters = self._values.shared
        self._floating = [name for name, each in inner.named_buffers() if each.is_floating_point()]
        self._buffer_means = BufferMeans(self._buffers_here, self.device)
        groups = enumerate(assigned(self.specs, CAP_BYTES))
        self._buckets = [Bucket(index, group, self.device, self._rows) for index, group in groups]
        self._shown: dict[str, Tensor] | None = None
        self._loads = Loads(self._own, self._require_own)
        self.attempts = Attempts(
            self._own.values(),
            optimizers,
            self._step_attempted,
            before_pass=self._before_pass,
            before_step=self.note_changes,
            after_step=self._loads.stepped,
        )
        self.round = Round()
        self._step: Step | None = None

    @property
    def optimizers(self) -> LocalOptimizers:
        """The replica's optimizers, which the model and the wire hold."""
        held = self._held()
        assert held is not None, "asked by the user of the model"
        return held

    # -- who averages with whom

    @property
    def module(self) -> nn.Module:
        """The module inside the wrappers."""
        wrapped = inside(self.model)
        found = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        assert isinstance(found, nn.Module), "it was one"
        return found

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The replica's own, which rounds write."""
        return self._own

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks where some share a replica; else those of `replicas=`."""
        if self._shards is None and self.machine is None:
            return self._replicas
        everyone = dist.group.WORLD
        assert everyone is not None, "asked for after the default group was made"
        return everyone

    @property
    def members(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """As for shards whose gradients are averaged."""
        return None if self._shards is None else self._shards.members

    @property
    def over(self) -> Sequence[int]:
        """The ranks of `replicas=`."""
        return dist.get_process_group_ranks(self._replicas)

    @property
    def called(self) -> str:
        """The name of this rank in messages."""
        return f"rank {dist.get_rank()}"

    @property
    def machine(self) -> Sequence[int] | None:
        """The ranks that hold this replica alike, by DDP; `None` if it is this one alone, or has a shard."""
        if self._shards is not None or self._shared_by is None or self._shared_by.size() == 1:
            return None
        return dist.get_process_group_ranks(self._shared_by)

    def applying(self, optimizers: Optimizers) -> Optimizers:
        """The outer one. Raises `ValueError` for local ones that a round cannot go on from."""
        for each in optimizers:
            if all(callable(getattr(each, mode, None)) for mode in ("train", "eval")):
                raise ValueError(
                    f"{type(each).__name__} has train() and eval(), as schedule-free optimizers do: it keeps "
                    "parameters of its own, which a round would not reach. Take an optimizer that steps the "
                    "model's parameters alone, or gradwire.attach, which averages gradients"
                )
        return (self.optimizers.outer,)

    def change(self, optimizers: Optimizers) -> None:
        """Others make the local steps from now on. Call it between two steps, on all ranks."""
        self.attempts.change(optimizers)

    def weighed(self, policy: Policy | None) -> Policy:
        """`policy`, which `check` will look at, but weights travel whole."""
        self._policy = policy
        return lambda spec: chooser(policy)(spec) if spec.name in self._own else "dense"

    def check_policy(self) -> None:
        """Raise `ValueError` for a policy, given to `weighed`, that does not suit the parameters."""
        policy, self._policy = self._policy, None  # which may refer to the model
        check_policy(policy, list(self._own))

    def check(self) -> None:
        """Check that ranks make up a grid, and that nothing else averages; make the outer optimizer."""
        require_unclaimed(self.carrier)
        self.check_policy()
        if self._shards is not None:
            self._shards.check()
        for name, each in self._own.items():
            if each.is_complex():
                raise ValueError(f"parameter {name!r} is complex; keep it as two real ones")
        if self.machine is not None:
            mine, between, world = set(self.machine), set(self.over), dist.get_world_size()
            if len(mine & between) != 1 or len(mine) * len(between) != world:
                raise ValueError(
                    f"DDP's process group has ranks {sorted(mine)}, and replicas= has {sorted(between)}: "
                    f"they must have one rank in common, and make up all {world} ranks as a grid. Take both "
                    "from one mesh: process_group=mesh.get_group('ranks'), replicas=mesh['nodes']"
                )
        optimizers = self.optimizers
        optimizers.inner, optimizers.given = optimizers_of(optimizers.given), None
        if not optimizers.inner:
            raise ValueError("outer() counts an optimizer's steps: write outer(model, optimizer, …)")
        shared = [self.parameters[name] for name in self._own]
        optimizers.outer = optimizers.make(shared)
        made = type(optimizers.outer).__name__
        if not isinstance(optimizers.outer, torch.optim.Optimizer):
            raise ValueError(
                f"outer= made a {made}; it takes a function that makes an optimizer "
                "of the parameters that it is given: outer=lambda given: torch.optim.SGD(given, lr=1.0)"
            )
        stepped = {id(each) for group in optimizers.outer.param_groups for each in group["params"]}
        if stepped != set(map(id, shared)):
            raise ValueError("outer= made an optimizer of other parameters than those that it was given")

    def suits(self, layout: Layout, optimizers: Optimizers) -> None:
        """Raise `ValueError` for recipes whose numbers are about steps, or about an optimizer's state.

        Nothing steps weights, which travel whole beside a recipe that applies momentum.
        """
        main = layout.main
        if main.next is not None or main.watch is not None:
            raise ValueError(
                "auto and other recipes that measure, before or while they run, have limits that are about "
                "steps, not rounds: name a fixed recipe, such as 'int4' or 'topk(ratio=0.02)'"
            )
        exchanges = [*(flat_buffer.exchange for flat_buffer in layout.flat_buffers), *layout.direct.values()]
        if any(each.laws.asks_optimizer for each in exchanges):
            raise ValueError(
                f"{short(main.text)} reads the state of the optimizer that uses the gradients, but between "
                "rounds every replica has an optimizer of its own: choose another recipe"
            )
        direct = {name: each for name, each in layout.direct.items() if name in self._own}
        super().suits(replace(layout, direct=direct), optimizers)

    def facts(self) -> dict[str, str]:
        """Names, shapes and types of all tensors that are sent by their number beside Δ, and the arguments of
        `outer`.
        """
        named = self.module.named_parameters()
        return {
            "buffers": in_words(self.module.named_buffers()),
            "frozen parameters": in_words((name, each) for name, each in named if name not in self._own),
            "every": str(self.every),
            "delay": str(self.delay),
        }

    def begin(self, backward: Backward, uses: dict[str, float] | None, *, scaled: bool) -> None:
        """Give all ranks the first one's parameters and buffers, and follow the optimizers."""
        self.carry(backward)
        module = self.module
        apart = self.group if self._shards is None else self._replicas
        spread([self._here(each) for each in module.parameters()], apart)
        spread(list(module.buffers()), self.group)
        self.follow()

    def carry(self, backward: Backward) -> None:
        """Send all further rounds through `backward`, and observe its reducer."""
        self._backward = backward
        backward.reducer.env.observers.insert(0, self)

    def follow(self) -> None:
        """θ₀ is what this replica has now. Follow the optimizers from here on."""
        module = self.module
        self._trained = Known(dict(module.named_parameters()), list(self._own), self._left_out)
        self._values.begin()
        self._buffer_means.begin()
        self._outer_began = deepcopy(self.optimizers.outer.state_dict()["state"])
        self._loads.watch(module, self._floating)
        self.attempts.watch(self.model)

    def retire(self) -> None:
        """Make no more rounds."""
        self.attempts.retire()
        self._loads.retire()
        give_up(self.carrier)

    # -- a replica's own tensors

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if self._shards is None else self._shards.local(tensor).detach()

    def _buffers_here(self) -> dict[str, Tensor]:
        """The floating buffers, as they are now: modules put new tensors in their place."""
        buffers = dict(self.module.named_buffers())
        return {name: buffers[name] for name in self._floating if name in buffers}

    def sync_from_shared(self) -> None:
        """Go on from θ₀: it becomes this replica's parameters and its baseline."""
        self._values.land()
        self._buffer_means.restore()
        self._written()

    def _written(self) -> None:
        """Note that parameters were written here, so that gathered ones that FSDP may hold are dropped: they
        are out of date.
        """
        self._loads.note(self._own.values())
        self.attempts.written()
        if self._shards is not None:
            for each in self.module.modules():
                if (reshard := getattr(each, "reshard", None)) is not None:
                    reshard()

    @contextmanager
    def showing_shared(self) -> Iterator[None]:
        """Context in which the model has θ₀; afterwards it has this replica's own parameters and buffers
        again, bit for bit. Raises `GradwireError` inside of such a context.
        """
        if self._shown is not None:
            raise GradwireError("the model has the shared parameters already")
        self.note_changes()
        self._loads.look()
        with torch.no_grad():
            self._shown = {name: each.clone() for name, each in self._buffers_here().items()}
            for name, own, shared, _baseline in self._values.each():
                self._shown[name] = own.clone()
                own.copy_(shared)
            self._buffer_means.restore()
            self._written()
        try:
            yield
        finally:
            kept, self._shown = self._shown, None
            with torch.no_grad():
                for name, own, _shared, _baseline in self._values.each():
                    own.copy_(kept[name])
                for name, each in self._buffers_here().items():
                    if name in kept:
                        put(each, kept[name])
                self._written()

    def _require_own(self) -> None:
        if self._shown is not None:
            raise GradwireError(
                "load_state_dict was called inside wire.shared_parameters(), which puts this replica's own "
                "parameters back at its end: load outside of it"
            )

    # -- what is loaded

    def _before_pass(self, first: bool) -> None:
        """A forward pass that trains is about to change buffers: the `first` one since a step, or another."""
        self.note_changes()
        if first:
            self._loads.look()

    def note_changes(self) -> None:
        """Make loaded values the new baseline: if parameters or buffers were loaded since the last step, θ₀
        becomes them.

        All ranks agree on the new values when the next round has been sent. A round that is still in flight
        concerns the old θ₀, so it is awaited and thrown away.
        """
        if self._loads.is_pending:
            self.attempts.written()
        if not (loaded := self._loads.taken(self._buffers_here())):
            return
        thrown_away = self.round.lands_at
        try:
            if thrown_away is not None:
                self.receive()
                self._restore_baselines()
                self.round = self.round.lost()  # the next one brings what was learned of other parameters
        finally:
            self._begin_from(loaded)
            is_whole = self._own.keys() | self._buffer_means.base.keys() <= loaded.keys()
            self.round = self.round.begun_from(loaded, thrown_away, whole=is_whole)

    def _begin_from(self, loaded: Mapping[str, int]) -> None:
        """θ₀ is what this replica has of the `loaded` names; momentum and memory are about another one."""
        self._values.forget_gradients()
        self._values.begin(loaded)
        self._buffer_means.begin(loaded)
        groups = self.optimizers.outer.state_dict()["param_groups"]
        self.optimizers.outer.load_state_dict({"state": deepcopy(self._outer_began), "param_groups": groups})
        self._backward.call(self._forget_unsent)
        self._backward.steps.forget()

    def _forget_unsent(self) -> None:
        reducer = self._backward.reducer
        reducer.restore(reducer.prepared(reducer.layout_to_run(reducer.layout_of(reducer.layout.main))))
        reducer.begin_anew()

    def agree(self) -> None:
        """Raise `RanksDisagree` on all ranks where they have loaded different values. A collective."""
        mine = torch.tensor(self._place_and_loaded, dtype=torch.float32, device="cpu")
        rows = gathered(self._backward.reducer.env.control, mine).tolist()
        if (error := _different_loads(rows)) is not None:
            raise error
        self.round = self.round.agreed()

    @property
    def _place_and_loaded(self) -> tuple[float, float]:
        """The number of this rank's shard, and 24 bits over all that it has loaded; 0 for nothing."""
        place = 0 if self._shards is None else self._shards.inside.rank()
        loaded = self.round.loaded
        number = (number_of(sorted(loaded.items())) or 1.0) if loaded else 0.0
        return float(place), number

    # -- when a round is sent and lands

    @property
    def is_mid_round(self) -> bool:
        """Whether steps were attempted since the last round landed, or one is under way."""
        return self.attempts.count % self.every != 0 or self.round.lands_at is not None

    @property
    def has_learned(self) -> bool:
        """Whether steps were attempted since the last round was sent."""
        return self.round.has_learned(self.attempts.count)

    def _step_attempted(self) -> None:
        """Count another attempted step: land the round that is due, and send the next."""
        if self._shown is not None:
            raise GradwireError("a step was made inside wire.shared_parameters(), which is for evaluation")
        self.note_changes()
        if self.round.lands_by(self.attempts.count):
            self.land_round()
        if self.is_due():
            self.take_round()

    def is_due(self) -> bool:
        """Whether a round comes after the last attempted step."""
        return self.attempts.count % self.every == 0

    def take_round(self) -> None:
        """Send a round, and land it if it is to land at once."""
        self.send_round()
        if self.delay == 0:
            self.land_round()

    def share(self) -> tuple[int, int]:
        """The weight of this replica's Δ in the mean, as a fraction of that of a usual one."""
        return 1, 1

    def send_round(self, *, finished: bool = False) -> None:
        """Send this replica's Δ without waiting for the others. Raises as `Backward.open` does.

        A replica counts only if it has made optimizer steps since its last round. `finished` tells the others
        that this replica has no more steps to make.
        """
        backward, count = self._backward, self.attempts.count
        backward.open()
        backward.reducer.watch.begin()
        bad, failure = "", None
        try:
            self._trained.require(self._current())
            bad = self._pack()
        except BaseException as error:  # peers wait for this rank
            failure = error
        if not self._is_sound_everywhere(sound=not bad):
            failure = failure or self._begin_anew(bad or "something on another rank of this replica")
            bad = bad or "another"
        else:
            self.round = self.round.checked(sound=True)
        counts = self.has_learned and not bad and failure is None
        weight, usual = self.share() if counts else (0, 1)
        if weight != usual:
            for bucket in self._buckets:
                bucket.buffer.mul_(weight / usual) if counts else bucket.buffer.zero_()
        self._weight.copy_(torch.tensor([weight, finished], dtype=torch.float32, device="cpu"))
        self._buffer_means.pack(backward.placement.transfer, counts=counts)
        if self.delay:
            self._values.note_sent()
        self.round = self.round.sent(count, self.delay)
        for bucket in self._buckets:
            bucket.failure, failure = failure, None
            backward.submit(bucket.gradient_bucket)
        backward.all_brought()

    def land_round(self) -> bool:
        """Wait for the round that is under way, and go on from what it brings. Returns whether all have
        finished.

        Raises the round's error. Then no rank lands, as where something was not finite.
        """
        lands, all_finished = self.receive()
        if lands:
            self.outer_step()
        return bool(all_finished)

    def land_now(self) -> None:
        """Land the round that is in flight, if there is one, before it is due."""
        self.note_changes()
        if self.round.lands_at is not None:
            self.land_round()

    def receive(self) -> tuple[bool, bool | None]:
        """Wait for the round: the mean Δ becomes the gradient of θ₀.

        Returns whether it lands, and whether all replicas have finished; `None` if that is not known, as
        something was not finite. Raises the round's error.
        """
        brings = told = False
        try:
            if self.round.saved_means is None:
                self._backward.wait_for_outcome()
                told = True
            brings = self._has_means
        finally:
            self.round = self.round.received(brings=brings, told=told)
            if not brings:
                self._restore_baselines()
        if not brings:
            _LOG.warning(
                "a round ended without a result, as something was not finite; the next brings it all"
            )
            return False, None
        counted, finished, world = self._said()
        if not counted:
            self._restore_baselines()
        for name, view in self._views() if counted else ():
            if counted != world:
                view.mul_(world / counted)
            self.parameters[name].grad = view
        return counted > 0, finished == world

    def _said(self) -> tuple[float, int, int]:
        """Numbers of replicas in the round that has come: that count, that have finished, and of all.

        One with an unusual weight counts for as much.
        """
        world = self._backward.reducer.comm.world
        weight, finished = (round(float(each) * world) for each in self._weight)
        return weight / self.share()[1], finished, world

    @torch.no_grad()
    def outer_step(self) -> None:
        """The outer optimizer steps, and this replica goes on from θ₀′."""
        self._buffer_means.land()
        self.optimizers.outer.step()
        if self.delay:
            self._values.join()
        else:
            self._values.land()
        self._values.forget_gradients()
        self._written()
        self.round = self.round.landed()

    def side_broadcast(self) -> SideBroadcast | None:
        """Means of the buffers, where there are some."""
        return self._buffer_means if self._floating else None

    def before(self, step: Step, _env: ReducerEnvironment) -> None:
        """Tell the other ranks what was loaded here, and shapes of buffers."""
        step.tell(self._place_and_loaded, _different_loads)
        step.tell(self._buffer_means.told, self._buffer_means.heard)

    def step_ended(self, step: Step) -> None:
        """Keep the step that has ended, with its outcome."""
        self._step = step

    def _restore_baselines(self) -> None:
        """Measure the next Δ from θ₀ again, as before the round was sent: nothing lands."""
        if self.delay:
            self._values.forget_sent()

    # -- what is brought

    def _current(self) -> Mapping[str, Tensor]:
        """The module's parameters, as they are now."""
        return dict(self.module.named_parameters()) if self._shards is None else self._shards.current()

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        """Places in the buckets by name, but for the weight: new tensors, to hand out."""
        for bucket in self._buckets:
            for name, view in bucket.views.items():
                if name != WEIGHT:
                    yield name, view.view(self.parameters[name].shape)

    @property
    def _weight(self) -> Tensor:
        return next(bucket.views[WEIGHT] for bucket in self._buckets if WEIGHT in bucket.views)

    @torch.no_grad()
    def _pack(self) -> str:
        """Write Δ into the buckets; the name of a tensor in which it is not a number to be sent, or ""."""
        if self._rows:
            for bucket in self._buckets:
                bucket.buffer.zero_()
        views = dict(self._views())
        found = ""
        for name, own, _shared, baseline in self._values.each():
            torch.sub(baseline, own.to(baseline.device), out=views[name])
            if views[name].numel():
                low, high = views[name].aminmax()
                if not (abs(float(low)) < LARGEST_GRADIENT and abs(float(high)) < LARGEST_GRADIENT):
                    found = found or name
        return found

    def _is_sound_everywhere(self, *, sound: bool) -> bool:
        """Whether all ranks that hold this replica say so."""
        if self._shared_by is None or self._shared_by.size() == 1:
            return sound
        flag = torch.tensor(float(sound), dtype=torch.float32, device=self.where)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._shared_by)
        return bool(flag)

    def _begin_anew(self, name: str) -> BaseException | None:
        """Take θ₀ back, as `name` is not finite. Returns the error of a replica that did so too often."""
        self.sync_from_shared()
        for optimizer in self.optimizers.inner:
            _make_finite(optimizer)
        self.round = self.round.checked(sound=False)
        if self.round.unsound >= PATIENCE:
            return GradwireError(
                f"{self.called}: {name} was not finite in {self.round.unsound} rounds in a row, although "
                "this replica took the shared parameters back each time: look at its data and learning rate"
            )
        _LOG.warning(
            "%s: %s is not finite: this replica takes the shared parameters back, and does not count in "
            "this round",
            self.called,
            name,
        )
        return None

    def adding(self, spec: ParameterSpec, flat: Tensor) -> Callable[[], object]:
        """A function that adds to the gradient of θ₀."""
        late = spec.shaped(flat)[: self._rows.get(spec.name)] if self._rows else spec.shaped(flat)
        shared = self.parameters[spec.name]
        held = torch.zeros_like(shared) if shared.grad is None else shared.grad
        summed = held + late
        return lambda: setattr(shared, "grad", summed)

    # -- checkpoints

    def save(self) -> dict[str, Any]:
        """Of this replica: its parameters, buffers and optimizers, θ₀, and the round that is under way."""
        own = {name: each for name, each, _shared, _baseline in self._values.each()}
        flight: dict[str, Any] | None = None
        lands_at = self.round.lands_at
        if lands_at is not None:
            counted, _finished, world = self._said() if self._has_means else (0.0, 0, 1)
            scale = world / counted if counted else 1.0
            means = {name: view * scale for name, view in self._views()} if counted else None
            buffers = self._buffer_means.come() if counted else {}
            flight = {"lands_at": lands_at, "means": means, "buffers": buffers}
        return {
            **self._save_shared(),
            "own": own | dict(self.module.named_buffers()),
            "anchors": self._values.baselines,  # as in states of earlier versions
            "inner": [_local_state(optimizer) for optimizer in self.optimizers.inner],
            **self.round.state(),
            "flight": flight,
        }

    @property
    def _has_means(self) -> bool:
        """Whether the round that is under way, and has ended, has brought something."""
        saved = self.round.saved_means
        return saved if saved is not None else bool(self._step and self._step.committed)

    def _save_shared(self) -> dict[str, Any]:
        return {
            "attempts": self.attempts.count,
            "shared": self._values.of_all(),
            "optimizer": self.optimizers.outer.state_dict(),
            "buffers": self._buffer_means.base,
        }

    def save_mean(self) -> dict[str, Any]:
        """θ₀ and the outer optimizer's state. Raises `ValueError` in the middle of a round."""
        if self.is_mid_round:
            raise ValueError(
                f"{self.attempts.count} steps were attempted, which is in the middle of a round of "
                f"{self.every}: what each replica has learned since would be lost. Save from one rank after "
                "a round has landed, or call wire.save() on all ranks, at any time"
            )
        return self._save_shared()

    def prepared(self, saved: Mapping[str, Any], *, own: bool) -> tuple[str, Callable[[], None]]:
        """Validate a saved state. Returns a fingerprint for all ranks to compare, and a function that applies
        the state. Changes nothing itself.

        Args:
            saved: the state, as `state_dict` returned it.
            own: whether it is this rank's own. Otherwise only shared parameters, a mean that has not landed,
                and optimizers are taken from it.

        Raises `ValueError` if the state does not fit this model and its optimizers.
        """
        shared = self._values.of_all()
        _require_like("shared parameters", saved["shared"], shared)
        # A state from before buffers travelled beside a round fits a model without floating ones.
        base = _require_names("buffers", saved.get("buffers", {}), self._buffer_means.base)
        _require_fits("the outer optimizer", saved["optimizer"], self.optimizers.outer)
        inner = saved.get("inner")
        if inner is not None:
            if len(inner) != len(self.optimizers.inner):
                raise ValueError(
                    f"state has {len(inner)} optimizers, and outer() was given {len(self.optimizers.inner)}"
                )
            for each, optimizer in zip(inner, self.optimizers.inner, strict=True):
                _require_fits("an optimizer", each, optimizer)
        if own and "own" in saved:
            found = _require_names(
                "parameters and buffers", saved["own"], self._own | dict(self.module.named_buffers())
            )
            own_parameters = {name: each for name, each, _shared, _baseline in self._values.each()}
            _require_like("parameters", {name: found[name] for name in self._own}, own_parameters)
            _require_like("baselines", saved["anchors"], self._values.baselines)
        flight = saved.get("flight")
        if flight is not None and flight["means"] is not None:
            _require_like("means", flight["means"], shared)
        whole = own and "own" in saved
        shapes = number_of([each.shape for each in base.values()])
        text = f"{saved['attempts'] % self.every} steps after a round, {flight is not None} {whole} {shapes}"
        return text, lambda: self._take_up(saved, whole=whole)

    @torch.no_grad()
    def _take_up(self, saved: Mapping[str, Any], *, whole: bool) -> None:
        flight, count = saved.get("flight"), int(saved["attempts"])
        for name, each in saved["shared"].items():
            self.parameters[name].copy_(each)
        self.optimizers.outer.load_state_dict(saved["optimizer"])
        for each, optimizer in zip(saved.get("inner", ()), self.optimizers.inner, strict=False):
            optimizer.load_state_dict(_sharded_state(optimizer, each))
        self._buffer_means.take_up(saved.get("buffers", {}))
        self.round = Round.of(saved) if whole else self.round.resumed(flight)
        if flight is not None:
            self._weight.copy_(torch.tensor([self.share()[1], 0], dtype=torch.float32, device="cpu"))
            for name, view in self._views() if flight["means"] is not None else ():
                view.copy_(flight["means"][name])
            self._buffer_means.resume(flight.get("buffers", {}))
        if whole:
            buffers = dict(self.module.named_buffers())
            tensors = buffers | {name: own for name, own, _shared, _baseline in self._values.each()}
            for name, each in saved["own"].items():
                put(tensors[name], each)
            for name, each in saved["anchors"].items():
                self._values.baselines[name].copy_(each)
            self._written()
        else:
            self._buffer_means.restore(reshaped=True)
            self.sync_from_shared()
            self.land_now()
            self.sync_from_shared()
            count -= count % self.every
            self.round = self.round.anew(count)
        self.attempts.forget(count)
        self._loads.taken_up(self._buffers_here())


def _different_loads(rows: Sequence[Sequence[float]]) -> RanksDisagree | None:
    """The error if ranks have loaded different values, by place and number of each; the same on all ranks."""
    places, numbers = zip(*rows, strict=True)
    first = dict(zip(reversed(places), reversed(numbers), strict=True))
    has = {bool(number) for number in numbers}
    if len(has) == 1 and all(first[place] == number for place, number in rows):
        return None
    told = "; ".join(
        f"rank {rank}: {f'values of fingerprint {number:.0f}' if number else 'nothing'}"
        for rank, number in enumerate(numbers)
    )
    return RanksDisagree(
        f"ranks disagree on what load_state_dict has brought since the last round: {told}. No rank has "
        "landed. A rank that had the values already counts as one that has loaded nothing. Load the same new "
        "values on all ranks before the next round, or go on from a save"
    )


def _wide(spec: ParameterSpec) -> ParameterSpec:
    """`spec` in the type in which it is summed."""
    whole = None if spec.shard_of is None else _wide(spec.shard_of)
    return replace(spec, dtype=spec.plane_dtype, shard_of=whole)


def _own_part(spec: ParameterSpec, parts: int) -> ParameterSpec:
    """The spec of a rank's own values, as if they were its part of something as many times as long."""
    shape = (parts * (spec.shape[0] if spec.shape else 1), *spec.shape[1:])
    (part,) = shards_of([replace(spec, shape=shape, numel=parts * spec.numel)], parts, by_rows=True)
    return part


def _make_finite(optimizer: torch.optim.Optimizer) -> None:
    """Reset the optimizer's state of each parameter that has a value which is not finite: to zeros, as most
    optimizers begin.
    """
    for state in optimizer.state.values():
        tensors = {key: local(each) for key, each in state.items() if isinstance(each, Tensor)}
        if all(bool(each.isfinite().all()) for each in tensors.values()):
            continue
        for each in tensors.values():
            each.zero_()
        if isinstance(state.get("step"), int | float):
            state["step"] = 0


def _local_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its `state_dict()`, of sharded tensors this rank's part."""
    found = optimizer.state_dict()
    state = {
        number: {key: local(each) if isinstance(each, Tensor) else each for key, each in of.items()}
        for number, of in found["state"].items()
    }
    return {**found, "state": state}


def _sharded_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: tensors in the shape of this rank's part of a parameter are sharded like it."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def placed(parameter: Tensor, each: Any) -> Any:
        if isinstance(parameter, DTensor) and isinstance(each, Tensor) and each.ndim:
            return ShardedParameters.sharded_as(parameter, each)
        return each

    state = {
        number: {key: placed(parameters[number], each) for key, each in of.items()}
        for number, of in saved["state"].items()
    }
    return {**saved, "state": state}


def _require_names(what: str, saved: object, here: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """`saved`. Raises `ValueError` unless it has tensors of the names that are `here`."""
    if not isinstance(saved, Mapping) or saved.keys() != here.keys():
        raise ValueError(f"the state's {what} are not those of this model, by name")
    if strange := [name for name in here if not isinstance(saved[name], Tensor)]:
        raise ValueError(f"the state's {what} have no tensor of {strange[0]!r}")
    return saved


def _require_like(what: str, saved: object, here: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` unless `saved` has tensors of the same names and shapes as are `here`."""
    found = _require_names(what, saved, here)
    for name, each in here.items():
        if found[name].shape != each.shape:
            raise ValueError(f"the state's {what} have another shape of {name!r} than this model")


def _require_fits(what: str, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` unless `saved`, the state of `what`, has the groups of `optimizer`."""
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        raise ValueError(f"the state of {what} has groups of {theirs} parameters, and here they have {ours}")
