"""The values of a replica's parameters between rounds: its own, the shared ones, and the baseline."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.unit.parameters import ParameterSpec


class Values:
    """Of each parameter: θ, which is this replica's own; θ₀, which all share; and the *baseline*.

    Δ is measured from the baseline: what has landed, in the parameter's own type. For parameters in full
    precision it is θ₀ itself, if rounds land at once. If they land later, the baseline holds what was sent
    until that has landed.
    """

    def __init__(
        self,
        own: Mapping[str, nn.Parameter],
        specs: Sequence[ParameterSpec],
        rows: Mapping[str, int],
        device: torch.device,
        here: Callable[[Tensor], Tensor],
        *,
        is_apart: bool,
    ) -> None:
        """Make room for θ₀ and baselines.

        Args:
            own: the trained parameters by name.
            specs: of everything that has a place in θ₀, in the type in which it is summed.
            rows: of sharded parameters, how many are here.
            device: of θ₀ and baselines.
            here: the part of a tensor that is here, detached.
            is_apart: whether all baselines are tensors of their own.
        """
        self.own, self._here = own, here
        self.shared = {
            spec.name: nn.Parameter(_room(spec, rows.get(spec.name), device), spec.name in own)
            for spec in specs
        }
        self.baselines: dict[str, Tensor] = {}
        self._in_one: set[str] = set()
        """Names of the parameters whose baseline is θ₀ itself."""
        for name, each in own.items():
            shared = self.shared[name].detach()
            if is_apart or each.dtype != shared.dtype:
                self.baselines[name] = shared.clone()
            else:
                self.baselines[name] = shared
                self._in_one.add(name)

    def each(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Name, θ, θ₀ and baseline of each parameter.

        θ₀ is looked up: an outer optimizer may put other memory behind it (`p.data = p.data - lr * p.grad`).
        """
        for name in self.baselines:
            shared = self.shared[name].detach()
            if name in self._in_one:
                self.baselines[name] = shared
            yield name, self._here(self.own[name]), shared, self.baselines[name]

    def of_all(self) -> dict[str, Tensor]:
        """θ₀ by name, in the order of the specs."""
        return {name: self.shared[name].detach() for name in self.baselines}

    def forget_gradients(self) -> None:
        """No mean waits for the outer optimizer."""
        for each in self.shared.values():
            each.grad = None

    @torch.no_grad()
    def begin(self, names: Container[str] | None = None) -> None:
        """θ₀ is what this replica has now; of `names` alone, if given."""
        for name, own, shared, baseline in self.each():
            if names is None or name in names:
                shared.copy_(own)
                baseline.copy_(shared)

    @torch.no_grad()
    def land(self) -> None:
        """θ := θ₀, rounded to the parameter's type. Δ is measured from that."""
        for _name, own, shared, baseline in self.each():
            own.copy_(shared)
            if baseline.data_ptr() != shared.data_ptr():
                baseline.copy_(own)

    @torch.no_grad()
    def join(self) -> None:
        """Go on from θ₀ with what was learned since: see the function `join`."""
        for _name, own, shared, baseline in self.each():
            join(own, shared, baseline)

    def note_sent(self) -> None:
        """The baselines hold what was sent, until that lands."""
        for name, own in self.own.items():
            self.baselines[name].copy_(self._here(own))

    @torch.no_grad()
    def forget_sent(self) -> None:
        """Measure the next Δ from θ₀ again: nothing lands."""
        for _name, own, shared, baseline in self.each():
            baseline.copy_(shared.to(own.dtype))


def join(own: Tensor, shared: Tensor, baseline: Tensor) -> None:
    """θ := θ + (θ₀′ − θ_sent), where the baseline holds θ_sent; Δ is measured from where θ would be, had it
    learned nothing since.

    >>> own, sent = torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0])
    >>> join(own, torch.tensor([10.0, 20.0]), sent)
    >>> own, sent
    (tensor([11., 20.]), tensor([10., 20.]))
    """
    before = own.to(baseline.device, baseline.dtype, copy=True)
    stays = before == baseline
    own.copy_(torch.where(stays, shared, before + (shared - baseline)))
    after = own.to(baseline.device, baseline.dtype)
    baseline.copy_(torch.where(stays, after, baseline + (after - before)))


def _room(spec: ParameterSpec, rows: int | None, device: torch.device) -> Tensor:
    """Zeros in the order of a parameter, or of its part that is here."""
    if rows is not None:
        return torch.zeros((rows, *spec.shape[1:]), dtype=spec.dtype, device=device)
    return spec.shaped(torch.zeros(spec.numel, dtype=spec.dtype, device=device))
