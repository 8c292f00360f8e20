"""The source of rounds of local steps: torch's hooks, and when a round is sent and lands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.errors import GradwireError
from gradwire.planning.tuning import ROUNDS
from gradwire.recipes.parse import short
from gradwire.sources.attempts import Attempts
from gradwire.sources.carried import give_up, require_unclaimed
from gradwire.sources.checks import check_policy, in_words
from gradwire.sources.loads import Loads
from gradwire.sources.local_model import LocalModel
from gradwire.sources.local_optimizers import LocalOptimizers, require_steps_alone
from gradwire.sources.local_state import LocalState
from gradwire.sources.outer import Rounds
from gradwire.sources.plain import spread
from gradwire.sources.source import Source
from gradwire.sources.unwrap import Optimizers
from gradwire.step.layout import Layout, Policy, chooser
from gradwire.step.reducer import Backward
from gradwire.step.step import SideBroadcast, Step
from gradwire.unit.parameters import ParameterSpec


class LocalSteps(Source):
    """Source of Δ, with hooks that count a replica's steps. `parameters` are the shared ones, θ₀."""

    kind = "local steps"
    tuning = ROUNDS
    lands_without: ClassVar[bool] = False
    """Whether a round may land that this replica was not in, so that what it has learned stays."""
    weighs_steps: ClassVar[bool] = False
    """Whether a replica counts for as much as it has made steps, `every` of which count as one."""

    def __init__(
        self,
        model: nn.Module,
        replicas: object,
        optimizers: LocalOptimizers,
        *,
        every: int,
        delay: int,
        on_host: bool = True,
        called: str = "",
    ) -> None:
        """Prepare the local steps of a replica, `called` so in messages."""
        super().__init__(model)
        self.every, self.delay = every, delay
        self._policy: Policy | None = None
        self.local = local = LocalModel(model, replicas)
        self.grid = local.grid
        """Who averages with whom now."""
        self.where, self.specs = local.device, local.specs
        self.device = torch.device("cpu") if on_host else local.device
        self.loads = Loads(local.own, self._require_own)
        self.attempts = Attempts(
            local.own.values(),
            optimizers,
            self._step_attempted,
            before_pass=self._before_pass,
            before_step=self.note_changes,
            after_step=self.loads.stepped,
        )
        self.rounds = Rounds(
            local,
            self.device,
            optimizers,
            self.attempts,
            self.loads,
            delay=delay,
            usual=every if self.weighs_steps else None,
            is_apart=delay > 0 or self.lands_without,
            called=called or f"rank {dist.get_rank()}",
        )
        self.parameters = self.rounds.values.shared
        self.state = self.source_state = LocalState(self.rounds, every, self.land_now)

    @property
    def module(self) -> nn.Module:
        """The module inside the wrappers."""
        return self.local.module

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The replica's own, which rounds write."""
        return self.local.own

    # -- while attaching

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks where some share a replica; else those of `replicas=`."""
        return self.grid.group

    @property
    def members(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """As for shards whose gradients are averaged."""
        return self.grid.members

    @property
    def over(self) -> Sequence[int]:
        """The ranks of `replicas=`."""
        return self.local.grid.between

    def applying(self, optimizers: Optimizers) -> Optimizers:
        """The outer one. Raises `ValueError` for local ones that a round cannot go on from."""
        require_steps_alone(optimizers)
        return (self.rounds.optimizers.outer,)

    def weighed(self, policy: Policy | None) -> Policy:
        """`policy`, which `check` will look at, but weights travel whole."""
        self._policy = policy
        return lambda spec: chooser(policy)(spec) if spec.name in self.local.own else "dense"

    def check_policy(self) -> None:
        """Raise `ValueError` for a policy, given to `weighed`, that does not suit the parameters."""
        policy, self._policy = self._policy, None  # which may refer to the model
        check_policy(policy, list(self.local.own))

    def check(self) -> None:
        """Check that ranks make up a grid, and that nothing else averages; make the outer optimizer."""
        require_unclaimed(self.carrier)
        self.check_policy()
        self.local.check()
        self.rounds.optimizers.make_outer([self.parameters[name] for name in self.local.own])

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
        direct = {name: each for name, each in layout.direct.items() if name in self.local.own}
        super().suits(replace(layout, direct=direct), optimizers)

    def facts(self) -> dict[str, str]:
        """Names, shapes and types of all tensors that are sent by their number beside Δ, and the arguments of
        `outer`.
        """
        module, own = self.module, self.local.own
        return {
            "buffers": in_words(module.named_buffers()),
            "frozen parameters": in_words(each for each in module.named_parameters() if each[0] not in own),
            "every": str(self.every),
            "delay": str(self.delay),
        }

    def begin(self, backward: Backward, uses: dict[str, float] | None, *, scaled: bool) -> None:
        """Give all ranks the first one's parameters and buffers, and follow the optimizers."""
        self.rounds.carry(backward)
        local = self.local
        apart = self.group if local.shards is None else local.replicas
        spread([local.here(each) for each in local.module.parameters()], apart)
        spread(list(local.module.buffers()), self.group)
        self.follow()

    def follow(self) -> None:
        """θ₀ is what this replica has now. Follow the optimizers from here on."""
        self.rounds.begin()
        self.loads.watch(self.module, self.local.floating)
        self.attempts.watch(self.model)

    def retire(self) -> None:
        """Make no more rounds."""
        self.attempts.retire()
        self.loads.retire()
        give_up(self.carrier)

    # -- when a round is sent and lands

    def _before_pass(self, first: bool) -> None:
        """A forward pass that trains is about to change buffers: the `first` one since a step, or another."""
        self.note_changes()
        if first:
            self.loads.look()

    def _step_attempted(self) -> None:
        """Count another attempted step: land the round that is due, and send the next."""
        if self.rounds.is_shown:
            raise GradwireError("a step was made inside wire.shared_parameters(), which is for evaluation")
        self.note_changes()
        if self.rounds.round.lands_by(self.attempts.count):
            self.land_round()
        if self.is_due():
            self.take_round()

    def is_due(self) -> bool:
        """Whether a round comes after the last attempted step."""
        return self.attempts.count % self.every == 0

    def take_round(self) -> None:
        """Send a round, and land it if it is to land at once."""
        self.rounds.send()
        if self.delay == 0:
            self.land_round()

    def land_round(self) -> None:
        """Wait for the round that is under way, and go on from what it brings.

        Raises the round's error. Then no rank lands, as where something was not finite.
        """
        lands, _all_finished = self.rounds.receive()
        if lands:
            self.rounds.step()

    def land_now(self) -> None:
        """Land the round that is in flight, if there is one, before it is due."""
        self.note_changes()
        if self.rounds.round.lands_at is not None:
            self.land_round()

    def note_changes(self) -> None:
        """Make loaded values the new baseline: if parameters or buffers were loaded since the last step, θ₀
        becomes them.

        All ranks agree on the new values when the next round has been sent. A round that is still in flight
        concerns the old θ₀, so it is awaited and thrown away.
        """
        if self.loads.is_pending:
            self.attempts.written()
        if loaded := self.loads.taken(self.local.buffers()):
            self.rounds.begin_from(loaded)

    @contextmanager
    def showing_shared(self) -> Iterator[None]:
        """Context in which the model has θ₀; afterwards it has this replica's own parameters and buffers
        again, bit for bit. Raises `GradwireError` inside of such a context.
        """
        if self.rounds.is_shown:
            raise GradwireError("the model has the shared parameters already")
        self.note_changes()
        self.loads.look()
        with self.rounds.showing_shared():
            yield

    def _require_own(self) -> None:
        if self.rounds.is_shown:
            raise GradwireError(
                "load_state_dict was called inside wire.shared_parameters(), which puts this replica's own "
                "parameters back at its end: load outside of it"
            )

    # -- in a round, for the reducer

    def side_broadcast(self) -> SideBroadcast | None:
        """Means of the buffers, where there are some."""
        return self.rounds.buffer_means if self.local.floating else None

    def step_ended(self, step: Step) -> None:
        """Keep the step that has ended, with its outcome."""
        self.rounds.ended = step

    def adding(self, spec: ParameterSpec, flat: Tensor) -> Callable[[], object]:
        """A function that adds to the gradient of θ₀."""
        rows = self.local.rows
        late = spec.shaped(flat)[: rows.get(spec.name)] if rows else spec.shaped(flat)
        shared = self.parameters[spec.name]
        held = torch.zeros_like(shared) if shared.grad is None else shared.grad
        summed = held + late
        return lambda: setattr(shared, "grad", summed)
