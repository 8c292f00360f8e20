"""Rounds of local steps: what replicas have learned comes as the gradient of shared parameters.

Douillard et al. 2023 (DiLoCo, arXiv 2311.08105), algorithm 1: θ₀ are the shared parameters and θ a replica's
own; Δ = θ₀ − θ is the gradient with which an outer optimizer steps on θ₀. `docs/local-steps.md` has the
formulas of landing. What differs: Δ goes by any recipe, and may land later.

`LocalSteps` says when a round is sent and lands, and `Rounds` what is done then.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.comm import gathered
from gradwire.errors import GradwireError, RanksDisagree
from gradwire.sources.attempts import Attempts
from gradwire.sources.buffer_means import BufferMeans, number_of, put
from gradwire.sources.delta import Delta
from gradwire.sources.loads import Loads
from gradwire.sources.local_model import LocalModel
from gradwire.sources.local_optimizers import LocalOptimizers
from gradwire.sources.round import Round
from gradwire.sources.values import Values
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.reducer import Backward
from gradwire.step.step import Step

_LOG = logging.getLogger("gradwire")

PATIENCE = 3
"""After so many rounds in a row in which its parameters were not finite, a replica raises."""


class Rounds:
    """The rounds of one replica, and where it stands in them, which is `round`.

    A round is sent (`send`), comes (`receive`), and lands, which is a step of the outer optimizer (`step`).
    Values may be loaded while a round is under way (`begin_from`).
    """

    def __init__(
        self,
        local: LocalModel,
        device: torch.device,
        optimizers: LocalOptimizers,
        attempts: Attempts,
        loads: Loads,
        *,
        delay: int,
        usual: int | None,
        is_apart: bool,
        called: str,
    ) -> None:
        """Make room for θ₀ and Δ on `device`.

        Args:
            local: the replica's model.
            device: of θ₀, Δ and means.
            optimizers: of the replica; held weakly.
            attempts: the log of its steps.
            loads: what was loaded into the model.
            delay: attempted steps from sending a round to landing it.
            usual: how many steps count as one, where replicas count by their steps; else `None`.
            is_apart: as for `Values`.
            called: the name of this rank or replica in messages.
        """
        self.local, self.attempts, self.delay, self.called = local, attempts, delay, called
        self._held, self._loads, self._usual = weakref.ref(optimizers), loads, usual
        self.values = Values(local.own, local.specs, local.rows, device, local.here, is_apart=is_apart)
        self.delta = Delta(local.specs, self.values, device, local.rows)
        self.buffer_means = BufferMeans(local.buffers, device)
        self.round = Round()
        self.ended: Step | None = None
        """The last step of the reducer, with its outcome."""
        self.counted = 0
        """Steps that the last round has counted, of all ranks, where replicas count by their steps."""
        self.is_shown = False
        """True while the model has θ₀, for evaluation."""

    @property
    def optimizers(self) -> LocalOptimizers:
        """The replica's optimizers, which the model and the wire hold."""
        held = self._held()
        assert held is not None, "asked by the user of the model"
        return held

    def carry(self, backward: Backward) -> None:
        """Send all further rounds through `backward`, and observe its reducer."""
        self._backward = backward
        backward.reducer.env.observers.insert(0, self)

    def begin(self) -> None:
        """θ₀ is what this replica has now."""
        self.local.know()
        self.values.begin()
        self.buffer_means.begin()
        self.optimizers.note_began()

    # -- sent

    @property
    def has_learned(self) -> bool:
        """Whether steps were attempted since the last round was sent."""
        return self.round.has_learned(self.attempts.count)

    @property
    def steps(self) -> int:
        """Attempted steps that no round has counted yet."""
        return self.attempts.count - self.round.counted_at

    @property
    def share(self) -> tuple[int, int]:
        """The weight of this replica's Δ in the mean, as a fraction of that of a usual one."""
        return (1, 1) if self._usual is None else (self.steps, self._usual)

    def send(self, *, finished: bool = False) -> None:
        """Send this replica's Δ without waiting for the others. Raises as `Backward.begin` does.

        A replica counts only if it has made optimizer steps since its last round. `finished` tells the others
        that this replica has no more steps to make.
        """
        backward, count = self._backward, self.attempts.count
        backward.reducer.env.await_kernels()
        backward.begin()
        backward.reducer.watch.begin()
        bad, failure = self.packed()
        counts = self.has_learned and not bad and failure is None
        weight, usual = self.share if counts else (0, 1)
        self.delta.weigh(weight / usual)
        self.delta.tell(weight, finished=finished)
        self.buffer_means.pack(backward.placement.transfer, counts=counts)
        if self.delay:
            self.values.note_sent()
        self.round = self.round.sent(count, self.delay)
        for bucket in self.delta.buckets:
            bucket.failure, failure = failure, None
            backward.submit(bucket.gradient_bucket)
        backward.all_brought()

    def packed(self) -> tuple[str, BaseException | None]:
        """Write Δ into the buckets. Returns the name of what is not finite, or "", on all ranks of this
        replica; θ₀ is taken back then. And the error of this rank, or of a replica that is not finite too
        often.
        """
        bad, failure = "", None
        try:
            self.local.require_known()
            bad = self.delta.pack()
        except BaseException as error:  # peers wait for this rank
            failure = error
        if self.local.is_sound_everywhere(sound=not bad):
            self.round = self.round.checked(sound=True)
            return "", failure
        bad = bad or "something on another rank of this replica"
        return bad, failure or self._begin_anew(bad)

    def before(self, step: Step, _env: ReducerEnvironment) -> None:
        """Tell the other ranks what was loaded here, and shapes of buffers, as an observer of the reducer."""
        step.tell(self._place_and_loaded, _different_loads)
        step.tell(self.buffer_means.told, self.buffer_means.heard)

    def _begin_anew(self, name: str) -> BaseException | None:
        """Take θ₀ back, as `name` is not finite. Returns the error of a replica that did so too often."""
        self.sync_from_shared()
        self.optimizers.make_finite()
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

    # -- come

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
            brings = self.brings
            heard = self.heard() if brings else None
        finally:
            self.round = self.round.received(brings=brings, told=told)
            if not brings:
                self._restore_baselines()
        if heard is None:
            _LOG.warning(
                "a round ended without a result, as something was not finite; the next brings it all"
            )
            return False, None
        counted, finished, world = heard
        if not counted:
            self._restore_baselines()
            return False, finished == world
        for name, view in self.delta.by_name().items():
            if counted != world:
                view.mul_(world / counted)
            self.values.shared[name].grad = view
        return True, finished == world

    @property
    def brings(self) -> bool:
        """Whether the round that is under way, and has ended, brings means."""
        saved = self.round.saved_means
        return bool(self.ended and self.ended.committed) if saved is None else saved

    def heard(self) -> tuple[float, int, int]:
        """The weight of the replicas that count in the round that has come, the number of those that have
        finished, and of all.

        One with an unusual weight counts for as much. A round that was saved with its mean needs no others.
        """
        if self.round.saved_means is not None:
            return 1.0, 0, 1
        world = self._backward.reducer.comm.world
        weight, finished = self.delta.told(world)
        self.counted = weight
        return weight / (self._usual or 1), finished, world

    def state_among_members(self) -> dict[str, Any]:
        """The values that a checkpoint has beside `Round.state`, where replicas count by their steps."""
        return {} if self._usual is None else self.round.state_among_members() | {"counted": self.counted}

    def _restore_baselines(self) -> None:
        """Measure the next Δ from θ₀ again, as before the round was sent: nothing lands."""
        if self.delay:
            self.values.forget_sent()

    def drop(self) -> None:
        """Discard what has come, because another rank of this replica failed to receive it."""
        self.values.forget_gradients()
        self._restore_baselines()
        self.round = self.round.lost()

    # -- lands

    @torch.no_grad()
    def step(self) -> None:
        """The outer optimizer steps, and this replica goes on from θ₀′."""
        self.buffer_means.land()
        self.optimizers.outer.step()
        if self.delay:
            self.values.join()
        else:
            self.values.land()
        self.values.forget_gradients()
        self.written()
        self.round = self.round.landed()

    def sync_from_shared(self) -> None:
        """Go on from θ₀: it becomes this replica's parameters and its baseline."""
        self.values.land()
        self.buffer_means.restore()
        self.written()

    def written(self) -> None:
        """Note that gradwire has written parameters."""
        self._loads.note(self.local.own.values())
        self.attempts.written()
        self.local.reshard()

    # -- values loaded while a round is under way

    def begin_from(self, loaded: Mapping[str, int]) -> None:
        """θ₀ is what was `loaded`, by checksums of names. Momentum and memory begin anew.

        A round under way is about other parameters: what comes is thrown away, and the next round brings what
        is learned from here on.
        """
        was_to_land_at = self.round.lands_at
        try:
            if was_to_land_at is not None:
                self.receive()
                self._restore_baselines()
                self.round = self.round.lost()
        finally:
            self.values.forget_gradients()
            self.values.begin(loaded)
            self.buffer_means.begin(loaded)
            self.optimizers.begin_outer_anew()
            self._backward.call(self._forget_unsent)
            is_whole = self.local.own.keys() | self.buffer_means.base.keys() <= loaded.keys()
            self.round = self.round.begun_from(loaded, was_to_land_at, whole=is_whole)

    def taken_up(self) -> None:
        """Another state was taken up: the same values, loaded beside it, count as no load."""
        self._loads.taken_up(self.local.buffers())

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
        loaded = self.round.loaded
        number = (number_of(sorted(loaded.items())) or 1.0) if loaded else 0.0
        return float(self.local.place), number

    # -- shown

    @contextmanager
    def showing_shared(self) -> Iterator[None]:
        """Context in which the model has θ₀; afterwards it has what it had."""
        self.is_shown = True
        with torch.no_grad():
            kept = {name: each.clone() for name, each in self.local.buffers().items()}
            for name, own, shared, _baseline in self.values.each():
                kept[name] = own.clone()
                own.copy_(shared)
            self.buffer_means.restore()
            self.written()
        try:
            yield
        finally:
            self.is_shown = False
            with torch.no_grad():
                for name, own, _shared, _baseline in self.values.each():
                    own.copy_(kept[name])
                for name, each in self.local.buffers().items():
                    if name in kept:
                        put(each, kept[name])
                self.written()


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
