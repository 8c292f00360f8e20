"""`store`: members that meet in an object store."""

from __future__ import annotations

from typing import Any, Literal

from gradwire.arguments import as_python, is_time, problem_of
from gradwire.members.bucket.objects import Bucket
from gradwire.members.bucket.records import check_name
from gradwire.members.bucket.rounds import Rules

ALONE_S = 10.0


class Stored:
    """A member's way to meet the others in an object store: see `store`."""

    def __init__(self, url: str, name: str, rules: Rules, alone_s: float | None) -> None:
        """Open the store. `alone_s` are the seconds without a seal after which local steps go on."""
        self.url, self.name, self.rules, self.alone_s = url, name, rules, alone_s
        self.objects = Bucket(url)


def store(
    url: str,
    name: str,
    *,
    at_least: int = 2,
    patience_s: float = 60.0,
    wait_s: float = 3600.0,
    alone: Literal["wait", "train"] = "wait",
    beat_s: float = 10.0,
    late_rounds: int = 2,
    snapshot_every: int = 10,
) -> Stored:
    """Replicas that meet in an object store: no port is opened, and no server runs. `docs/store.md`.

    - `url`: where the run is, the same for all: "s3://bucket/run", "gs://bucket/run",
      "az://container/run", or a folder that all share. obstore reads credentials and endpoints from
      the environment; gradwire passes none.
    - `name`: of this replica, the same when it starts again, and of no other one. If it has several ranks, by
      DDP or FSDP2, all pass the same; the first one alone reaches the store.
    - `at_least`: a round is sealed with so many replicas or more. The same for all.
    - `patience_s`: so many seconds a replica waits for others that live, from its own offer on.
    - `wait_s`: after so many seconds without a sealed round, `optimizer.step()` raises `TransportError`.
    - `alone`: with "train", local steps go on after 10 seconds without a sealed round, and the round lands
      once it is sealed. They also go on without the store, and `wait_s` has no effect.
    - `beat_s`: seconds between heartbeats. A replica that was silent for three of them, and for 5 seconds at
      least, is not waited for.
    - `late_rounds`: what has come too late for a round is offered again in so many more.
    - `snapshot_every`: rounds from one snapshot of the shared parameters to the next.

    Needs the extra `store`. Raises `ImportError` without it, and `ValueError` for a wrong argument.

    Example::

        members = gradwire.members.store("s3://bucket/run", name="site-a")
        wire = gradwire.outer(model, optimizer, "sparseloco", every=30, members=members)
    """
    if alone not in ("wait", "train"):
        raise ValueError(f"alone={alone!r} is neither 'wait' nor 'train'")
    counts = {
        "at_least": as_python(at_least),
        "late_rounds": as_python(late_rounds),
        "snapshot_every": as_python(snapshot_every),
    }
    if problem := problem_of(store, {"url": url, **counts}):
        raise ValueError(problem)
    for key, least in (("at_least", 1), ("late_rounds", 0), ("snapshot_every", 1)):
        if counts[key] < least:
            raise ValueError(f"{key}={counts[key]} must be at least {least}")
    times = {
        "patience_s": as_python(patience_s),
        "wait_s": as_python(wait_s),
        "beat_s": as_python(beat_s),
    }
    for key, value in times.items():
        if not is_time(value):
            raise ValueError(f"{key}={value!r} is not a time above 0, of 10^6 seconds at most")
    given: dict[str, Any] = {**counts, **times}
    rules = Rules(**given)
    return Stored(url, check_name(name), rules, ALONE_S if alone == "train" else None)
