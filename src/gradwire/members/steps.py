"""Local steps of a replica whose others come and go."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.agreement.agree import checksum
from gradwire.comm.apart import Apart
from gradwire.sources.buffer_means import put
from gradwire.sources.local_model import Grid
from gradwire.sources.local_optimizers import LocalOptimizers
from gradwire.sources.local_steps import LocalSteps
from gradwire.step.reducer import Backward
from gradwire.unit.parameters import ParameterSpec


class MovingSteps(LocalSteps):
    """Local steps whose rounds run among the ranks of the present meeting.

    In a meeting a rank's number is replica · S + its number inside the replica, of S ranks.
    """

    weighs_steps = True

    def __init__(
        self,
        model: nn.Module,
        replicas: dist.ProcessGroup,
        optimizers: LocalOptimizers,
        *,
        every: int,
        delay: int,
        on_host: bool,
        name: str,
    ) -> None:
        """Prepare local steps of one replica. Rounds begin with its `Membership`.

        Args:
            model: the replica's model.
            replicas: a group of this rank alone, or of the ranks with its place in other replicas.
            optimizers: the replica's optimizers.
            every: attempted steps from one round to the next.
            delay: attempted steps from sending a round to landing it.
            on_host: whether the shared parameters are kept on the CPU.
            name: the name of this replica among the members.
        """
        called = f"replica {name}"
        super().__init__(
            model, replicas, optimizers, every=every, delay=delay, on_host=on_host, called=called
        )
        self.name = name
        self.due_after = every
        """Attempted steps from one round to the next."""
        self.made = 0
        """Attempted steps between the last two rounds that were due."""
        self._take: Callable[[], None] = lambda: None
        self._end: Callable[[], object] = lambda: None
        self._is_called: Callable[[], bool] = lambda: False

    def check_alone(self) -> None:
        """Check everything that concerns this replica alone, and make the outer optimizer. Raises
        `ValueError`.
        """
        super().check()
        super().applying(self.rounds.optimizers.inner)

    def go(self, take: Callable[[], None], end: Callable[[], object], is_called: Callable[[], bool]) -> None:
        """Follow the optimizers, with `check_alone` called before.

        `take` is called when a round is due, and `end` when a round sent before is to land. `is_called`
        returns, after each step, whether others wait for this replica.
        """
        self._take, self._end, self._is_called = take, end, is_called
        self.follow()

    # -- in a meeting

    def meet(self, meeting: Apart) -> None:
        """Run the next rounds among the ranks of `meeting`."""
        self.lending = meeting
        size = 1 if self.local.inside is None else self.local.inside.size()
        replica, place = divmod(meeting.rank, size)
        self.grid = Grid(
            meeting.group,
            [replica * size + each for each in range(size)],
            [*range(place, meeting.world, size)],
            has_shards=self.local.shards is not None,
        )

    def check(self) -> None:
        """Do nothing: all has been checked before the first meeting."""

    def facts(self) -> dict[str, str]:
        """Facts as of `LocalSteps`, in the order of names: healing puts values by name."""
        return {key: ";".join(sorted(text.split(";"))) for key, text in super().facts().items()}

    def begin(self, backward: Backward, uses: dict[str, float] | None, *, scaled: bool) -> None:
        """Send rounds through `backward`. No values are exchanged, and the other arguments have no effect:
        parameters are the meeting's already.
        """
        self.rounds.carry(backward)

    # -- rounds

    def is_due(self) -> bool:
        """True if a round is due: enough steps were attempted since the last one, or other members wait."""
        return self._since_due >= self.due_after or self._is_called()

    def take_round(self) -> None:
        """Hand the round that is due to the membership."""
        self.made = self._since_due
        self.rounds.round = self.rounds.round.due(self.attempts.count)
        self._take()

    def land_round(self) -> None:
        """Let the membership wait for the round that is under way."""
        self._end()

    @property
    def _since_due(self) -> int:
        return self.attempts.count - self.rounds.round.due_at

    # -- the state that all members share

    def shared_state(self) -> dict[str, Any]:
        """θ₀, the outer optimizer's state, buffers, and parameters that are not trained."""
        return self.state.shared() | {"rest": self._rest()}

    def _rest(self) -> dict[str, torch.Tensor]:
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return {name: self.local.here(each) for name, each in named.items() if name not in self.local.own}

    def checksum(self) -> int:
        """CRC-32 of θ₀ and of the outer optimizer's state."""
        state = self.rounds.optimizers.outer.state_dict()["state"]
        moments = [each for _, of in sorted(state.items()) for _, each in sorted(of.items())]
        tensors = [*self.rounds.values.of_all().values()]
        tensors += [each for each in moments if isinstance(each, torch.Tensor)]
        return zlib.crc32(str([checksum(each) for each in tensors]).encode())

    @torch.no_grad()
    def take_shared(self, saved: Mapping[str, Any]) -> None:
        """Replace the shared state by that of another member, and drop this replica's own progress.

        Raises `ValueError`, and changes nothing, if `saved` does not fit the model.
        """
        rounds, count = self.rounds, self.attempts.count
        self.state.prepared({**saved, "attempts": count}, own=False)
        for name, each in saved["shared"].items():
            self.parameters[name].copy_(each)
        rounds.values.forget_gradients()
        rounds.optimizers.outer.load_state_dict(saved["optimizer"])
        rest = self._rest()
        for name, each in saved["rest"].items():
            put(rest[name], each)
        rounds.buffer_means.take_up(saved["buffers"])
        rounds.buffer_means.restore(reshaped=True)
        rounds.round = rounds.round.anew(count)
        rounds.sync_from_shared()
        rounds.taken_up()


def fingerprint_of(specs: Sequence[ParameterSpec]) -> str:
    """Fingerprint of the names, shapes and types of `specs`: eight hexadecimal digits."""
    return f"{zlib.crc32(str([(each.name, each.shape, str(each.dtype)) for each in specs]).encode()):08x}"
