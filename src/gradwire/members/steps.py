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
from gradwire.sources.local_optimizers import LocalOptimizers
from gradwire.sources.outer import LocalSteps
from gradwire.step.reducer import Backward
from gradwire.unit.parameters import ParameterSpec


class MovingSteps(LocalSteps):
    """Local steps whose rounds run among the ranks of the present meeting.

    In a meeting a rank's number is replica · S + its number inside the replica, of S ranks.
    """

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
        super().__init__(model, replicas, optimizers, every=every, delay=delay, on_host=on_host)
        self.name = name
        self.due_after = every
        """Attempted steps from one round to the next."""
        self._meeting: Apart | None = None
        self.made = 0
        """Attempted steps between the last two rounds that were due."""
        self.counted = 0
        """Steps that the last round has counted, of all ranks."""
        self._take: Callable[[], None] = lambda: None
        self._end: Callable[[], bool] = lambda: False
        self._is_called: Callable[[], bool] = lambda: False

    def check_alone(self) -> None:
        """Check everything that concerns this replica alone, and make the outer optimizer. Raises
        `ValueError`.
        """
        super().check()
        super().applying(self.optimizers.inner)

    def go(self, take: Callable[[], None], end: Callable[[], bool], is_called: Callable[[], bool]) -> None:
        """Follow the optimizers, with `check_alone` called before.

        `take` is called when a round is due, and `end` when a round sent before is to land. `is_called`
        returns, after each step, whether others wait for this replica.
        """
        self._take, self._end, self._is_called = take, end, is_called
        self.follow()

    # -- in a meeting

    def meet(self, meeting: Apart) -> None:
        """Run the next rounds among the ranks of `meeting`."""
        self._meeting = self.lending = meeting

    @property
    def inside(self) -> dist.ProcessGroup | None:
        """Ranks that share this replica, or hold it alike; `None` for a single one."""
        return None if self._shared_by is None or self._shared_by.size() == 1 else self._shared_by

    @property
    def is_sharded(self) -> bool:
        """True if each of these ranks has a shard of it."""
        return self._shards is not None

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks of the meeting."""
        return super().group if self._meeting is None else self._meeting.group

    def _grid(self) -> tuple[list[int], list[int]]:
        """(Ranks of this replica, ranks with this rank's place in all replicas), numbered in the meeting."""
        assert self._meeting is not None, "asked in one"
        size = 1 if self.inside is None else self.inside.size()
        replica, place = divmod(self._meeting.rank, size)
        return [replica * size + each for each in range(size)], [*range(place, self._meeting.world, size)]

    @property
    def members(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """(Ranks of this replica, ranks with the same shard in all replicas), in the present meeting.

        `None` if parameters are whole.
        """
        return super().members if self._meeting is None or self._shards is None else self._grid()

    @property
    def machine(self) -> Sequence[int] | None:
        """Ranks that each hold all parameters of this replica; `None` for shards, or if it is one rank."""
        is_alike = self._meeting is not None and self._shards is None and self.inside is not None
        return self._grid()[0] if is_alike else super().machine if self._meeting is None else None

    @property
    def called(self) -> str:
        """The replica's name."""
        return f"replica {self.name}"

    def check(self) -> None:
        """Do nothing: all has been checked before the first meeting."""

    def facts(self) -> dict[str, str]:
        """Facts as of `LocalSteps`, in the order of names: healing puts values by name."""
        return {key: ";".join(sorted(text.split(";"))) for key, text in super().facts().items()}

    def begin(self, backward: Backward, uses: dict[str, float] | None, *, scaled: bool) -> None:
        """Send rounds through `backward`. No values are exchanged, and the other arguments have no effect:
        parameters are the meeting's already.
        """
        self.carry(backward)

    # -- rounds

    def is_due(self) -> bool:
        """True if a round is due: enough steps were attempted since the last one, or other members wait."""
        return self.steps_since_round >= self.due_after or self._is_called()

    def take_round(self) -> None:
        """Hand the round that is due to the membership."""
        self.made, self.round = self.steps_since_round, self.round.due(self.attempts.count)
        self._take()

    def land_round(self) -> bool:
        """Let the membership wait for the round that is under way."""
        return self._end()

    @property
    def steps_since_round(self) -> int:
        """Attempted steps since a round was last due."""
        return self.attempts.count - self.round.due_at

    @property
    def steps(self) -> int:
        """Attempted steps that no round has counted yet."""
        return self.attempts.count - self.round.counted_at

    def share(self) -> tuple[int, int]:
        """This replica's weight in the mean, as (attempted steps, steps of a whole round)."""
        return self.steps, self.every

    def drop(self) -> None:
        """Discard the result of the round, because another rank of this replica failed to receive it."""
        self._values.forget_gradients()
        self._restore_baselines()
        self.round = self.round.lost()

    # -- the state that all members share

    def save(self) -> dict[str, Any]:
        """State as of `LocalSteps.save`, with the number of steps already counted."""
        return super().save() | self.round.state_among_members() | {"counted": self.counted}

    def _take_up(self, saved: Mapping[str, Any], *, whole: bool) -> None:
        super()._take_up(saved, whole=whole)
        self.counted = saved.get("counted", 0)

    def _said(self) -> tuple[float, int, int]:
        """As `LocalSteps._said`. A round that was saved with its mean needs no other ranks."""
        if self.round.saved_means is not None:
            return 1.0, 0, 1
        counted, finished, world = super()._said()
        self.counted = round(counted * self.every)
        return counted, finished, world

    def shared_state(self) -> dict[str, Any]:
        """θ₀, the outer optimizer's state, buffers, and parameters that are not trained."""
        return self._save_shared() | {"rest": self._rest()}

    def _rest(self) -> dict[str, torch.Tensor]:
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return {name: self._here(each) for name, each in named.items() if name not in self._own}

    def checksum(self) -> int:
        """CRC-32 of θ₀ and of the outer optimizer's state."""
        state = self.optimizers.outer.state_dict()["state"]
        moments = [each for _, of in sorted(state.items()) for _, each in sorted(of.items())]
        tensors = [*self._values.of_all().values()]
        tensors += [each for each in moments if isinstance(each, torch.Tensor)]
        return zlib.crc32(str([checksum(each) for each in tensors]).encode())

    @torch.no_grad()
    def take_shared(self, saved: Mapping[str, Any]) -> None:
        """Replace the shared state by that of another member, and drop this replica's own progress.

        Raises `ValueError`, and changes nothing, if `saved` does not fit the model.
        """
        self.prepared({**saved, "attempts": self.attempts.count}, own=False)
        for name, each in saved["shared"].items():
            self.parameters[name].copy_(each)
        self._values.forget_gradients()
        self.optimizers.outer.load_state_dict(saved["optimizer"])
        rest = self._rest()
        for name, each in saved["rest"].items():
            put(rest[name], each)
        self._buffer_means.take_up(saved["buffers"])
        self._buffer_means.restore(reshaped=True)
        self.round = self.round.anew(self.attempts.count)
        self.sync_from_shared()
        self._loads.taken_up(self._buffers_here())


def fingerprint_of(specs: Sequence[ParameterSpec]) -> str:
    """Fingerprint of the names, shapes and types of `specs`: eight hexadecimal digits."""
    return f"{zlib.crc32(str([(each.name, each.shape, str(each.dtype)) for each in specs]).encode()):08x}"
