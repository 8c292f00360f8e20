"""What one rank measured in one step."""

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StepSample:
    """Seconds of one step on one rank.

    step_s           from asking for the batch to the end of the optimizer's step
    data_s           waiting for the batch
    forward_s        forward pass and loss (DDP's buffer broadcast included)
    backward_s       from the start of backward until the last *local* gradient was computed
    exposed_comm_s   from then until backward returned: what communication was not hidden
    optimizer_s      the optimizer's step and zero_grad
    hook_s           inside the communication hook of a peer, before it returned (None: no such hook)
    cpu_s            processor time of all threads of the process
    loss             local training loss
    """

    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    exposed_comm_s: float
    optimizer_s: float
    cpu_s: float
    loss: float | None
    hook_s: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StepSample":
        """The inverse of `as_dict`; unknown keys are ignored."""
        known: dict[str, Any] = {item.name: values.get(item.name) for item in fields(cls)}
        return cls(**known)
