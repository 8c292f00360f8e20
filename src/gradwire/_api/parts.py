"""The parts of a wire. A kind of wire that has not got one has `lacking` in its place, which says why."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gradwire._api.switch import forget_unsent, mean_unsent, switch
from gradwire.agreement.agree import on_all_ranks
from gradwire.arguments import as_python
from gradwire.checkpoint import file_set, state
from gradwire.checkpoint.state import Missing, Saved
from gradwire.checkpoint.validate import State
from gradwire.errors import GradwireWarning
from gradwire.recipes import Composition, Recipe
from gradwire.sources.checks import warn_without_optimizer
from gradwire.sources.source import Source
from gradwire.sources.unwrap import Optimizers
from gradwire.step.layout import Layout
from gradwire.step.reducer import Backward, Reducer
from gradwire.step.worker import Worker
from gradwire.tools.diagnose import Diagnosis, GradientWatch, diagnose
from gradwire.unit.parameters import ParameterSpec

if TYPE_CHECKING:  # loads FSDP2
    from gradwire.sources.fsdp.traffic import Traffic

T = TypeVar("T")


@dataclass(frozen=True)
class Attached:
    """The parts of an attached model."""

    model: nn.Module  # the source refers to it weakly
    source: Source
    backward: Backward
    scaler: torch.amp.GradScaler | None
    # The worker ends with the model, and a wire without its worker could only hang.
    worker: Worker
    stop: Callable[[], object]
    """Ends the worker. Called when the model goes, and at exit."""

    @property
    def optimizers(self) -> Optimizers:
        """Optimizers of the model's parameters, as far as they were given."""
        return self.backward.optimizer_log.optimizers

    @property
    def reducer(self) -> Reducer:
        """The worker's side."""
        return self.backward.reducer

    @property
    def loss_scale(self) -> float:
        """The factor that all gradients carry now."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())


class _Lacking:
    def __init__(self, why: str | Mapping[str, str], has: Mapping[str, object]) -> None:
        self.__dict__.update(has, _why=why, _has=has)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as `copy` and `pickle` ask
            raise AttributeError(name)
        raise ValueError(self._why if isinstance(self._why, str) else self._why[name])

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._has or value != self._has[name]:
            self.__getattr__(name)


def lacking(why: str | Mapping[str, str], **has: object) -> Any:
    """A part that a kind of wire has not, but for what it `has`, which cannot be changed.

    What else is asked of it raises `ValueError` with the sentence `why`, or with that of its name.

    >>> watch = lacking("one rank has nothing to compare", watching=False)
    >>> watch.watching
    False
    >>> watch.diagnose()
    Traceback (most recent call last):
    ValueError: one rank has nothing to compare
    """
    return _Lacking(why, has)


class Steps:
    """gradwire's own steps, of which it can be told what they do."""

    def __init__(self, now: Callable[[], Attached]) -> None:
        """`now` returns the parts as they are now."""
        self._now = now

    @property
    def attached(self) -> Attached:
        return self._now()

    @property
    def overlap(self) -> bool:
        return self.attached.backward.overlap

    @overlap.setter
    def overlap(self, value: bool) -> None:
        self.attached.backward.overlap = value

    @property
    def settled(self) -> bool:
        reducer = self.attached.reducer
        watch = reducer.layout.main.watch
        return not reducer.measuring and not reducer.awaits_kernels and (watch is None or not watch.ends)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.attached.source.no_sync()

    def note_loss(self, loss: float) -> None:
        self.attached.reducer.health.note(loss)

    def trace(self, path: str | Path) -> None:
        from gradwire.telemetry.chrome import chrome_trace, write_trace

        backward = self.attached.backward
        backward.commit_deferred()
        history, rank = backward.history, backward.reducer.env.control.rank
        write_trace(path, chrome_trace(history.spans, history.started_s, rank))


class Watch:
    """Watches gradients of all ranks."""

    def __init__(self, attached: Attached) -> None:
        self._attached, self._watch = attached, GradientWatch()
        self.diagnosis: Diagnosis | None = None
        """The last one."""

    @property
    def watching(self) -> bool:
        return self._watch in self._attached.reducer.env.observers

    @watching.setter
    def watching(self, value: bool) -> None:
        observers = self._attached.reducer.env.observers
        if self.watching:
            observers.remove(self._watch)
        self._watch = GradientWatch()
        if value:
            observers.append(self._watch)

    def diagnose(self) -> Diagnosis:
        watch, reducer = self._watch, self._attached.reducer
        self.diagnosis = found = self._attached.backward.together(
            "diagnose()",
            lambda: diagnose(watch.seen, reducer.layout.flat_buffers, reducer.comm, reducer.env.control),
        )
        return found


class Ranks(ABC):
    """Calls that a fixed set of ranks makes together."""

    def __init__(self, of: file_set.Stateful, save_mean: Callable[[], State]) -> None:
        self._of, self._save_mean = of, save_mean

    @abstractmethod
    def _together(self, call: str, function: Callable[[], T]) -> T:
        """Run a function once all ranks are in the call."""

    def state_dict(self, kind: str) -> dict[str, Any]:
        if kind != "rank":
            raise ValueError(f"kind={kind!r}: call mean_state_dict() for the mean")
        return state.keyed(self._of.save())

    def mean_state_dict(self) -> dict[str, Any]:
        return state.keyed(self._together("mean_state_dict()", self._save_mean))

    def load_state_dict(self, saved: Saved, missing: Missing) -> None:
        def load() -> bool:
            # Once, as they are read more than once; on one rank this may fail, as where a file is missing.
            states: Saved = on_all_ranks(lambda: as_python(saved), "read the states", self._of.control)
            self._of.load(states, missing, False)
            return True

        self._loaded(f"load_state_dict(missing={missing!r})", load)

    def save(self, folder: str | os.PathLike[str]) -> int:
        return self._together("save()", lambda: file_set.save(self._of, Path(folder)))

    def load(self, folder: str | os.PathLike[str], missing: Missing) -> int | None:
        def load() -> int | None:
            return file_set.load(self._of, Path(folder), missing)

        return self._loaded(f"load(missing={missing!r})", load)

    def _loaded(self, call: str, load: Callable[[], T]) -> T:
        """Run `load` as a call of all ranks."""
        return self._together(call, load)

    @abstractmethod
    def switch(self, recipe: str | Recipe | Composition) -> None: ...

    @abstractmethod
    def exact(self, inside: Traffic | None) -> AbstractContextManager[None]: ...


class OwnRanks(Ranks):
    """The ranks of gradwire's own steps."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._backward, self._reducer = attached.backward, attached.reducer
        super().__init__(file_set.of_reducer(self._reducer), partial(state.save_mean, self._reducer))

    def _together(self, call: str, function: Callable[[], T]) -> T:
        return self._backward.together(call, function)

    def state_dict(self, kind: str) -> dict[str, Any]:
        if kind not in ("rank", "mean"):
            raise ValueError(f"kind={kind!r} is neither 'rank' nor 'mean'")
        if kind == "mean":
            warnings.warn(
                "state_dict('mean') will go: call mean_state_dict()", DeprecationWarning, stacklevel=3
            )
            return self.mean_state_dict()
        self._make_ready()
        return state.keyed(self._backward.call(self._of.save))

    def _make_ready(self) -> None:
        """Count, on this rank alone, what has happened so far."""
        self._backward.up_to_date()

    def _loaded(self, call: str, load: Callable[[], T]) -> T:
        self._attached.source.may_differ()  # a model is loaded beside its state
        if (loaded := super()._loaded(call, load)) is not None:
            self._backward.optimizer_log.forget()
        return loaded

    # -- what may change

    def switch(self, recipe: str | Recipe | Composition) -> None:
        optimizers = self._attached.optimizers

        def check(layout: Layout) -> None:
            self._attached.source.suits(layout, optimizers)
            warn_without_optimizer(layout, optimizers)

        covered = covers_momentum(self._reducer)
        self._backward.together("switch()", lambda: switch(self._reducer, recipe, check))
        self._backward.event_log.changed()
        if covered and not covers_momentum(self._reducer):
            warn_of_momentum(stacklevel=4)

    @contextmanager
    def exact(self, inside: Traffic | None) -> Iterator[None]:
        def begin(call: str) -> None:
            self._backward.together(call, lambda: None)

        begin("exact()")
        around: AbstractContextManager[None] = nullcontext() if inside is None else inside.exact()
        with around:
            yield
            begin("the end of exact()")


def covers_momentum(reducer: Reducer) -> bool:
    """True if the recipe that runs applies momentum."""
    return any(flat_buffer.memory.covers_momentum for flat_buffer in reducer.layout.flat_buffers)


def warn_of_momentum(*, stacklevel: int) -> None:
    """Warn the caller who is so many calls away, this one included."""
    warnings.warn(
        "momentum is no longer applied: set it in the optimizer if training goes on",
        GradwireWarning,
        stacklevel=stacklevel,
    )


class Gradients(Protocol):
    """Takes up what is unsent."""

    def flush(self, call: str, prepare: Callable[[], T]) -> T:
        """Add what is unsent to gradients, as the user's `call`; returns the result of `prepare`."""


class OwnGradients:
    """Adds what is unsent to gradients that the user's optimizer is about to use."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def flush(self, call: str, prepare: Callable[[], T]) -> T:
        """Flush if nothing fails on any rank; else raise on all ranks and change nothing.

        Args:
            call: name of the user's call, for errors.
            prepare: further preparation, run by the worker's thread before gradients change.

        Returns the result of `prepare`.
        """
        backward, source = self._attached.backward, self._attached.source
        reducer = backward.reducer
        # Where the source brings shards itself, a shard is what its optimizer steps.
        whole = source.members is None
        unsent = backward.together(call, lambda: mean_unsent(reducer, whole=whole))
        # Gradients belong to the thread that trains, whose stream the optimizer uses.
        additions, failure = self._additions(unsent)

        def ready() -> T:
            if failure is not None:
                raise failure
            return prepare()

        def hand_over() -> T:
            prepared = on_all_ranks(ready, "add what is unsent to its gradients", reducer.env.control)
            forget_unsent(reducer)
            return prepared

        prepared = backward.call(hand_over)
        for add in additions:
            add()
        backward.optimizer_log.exchange_begins(None, compresses=False)
        backward.optimizer_log.exchange_ended()
        return prepared

    def _additions(
        self, unsent: list[tuple[ParameterSpec, Tensor]]
    ) -> tuple[list[Callable[[], object]], BaseException | None]:
        """Functions that add the mean unsent gradients `unsent` to the gradients.

        Returns (functions, None), or ([], error): an error must not be raised before all ranks know of it.
        """
        source, copy_to = self._attached.source, self._attached.reducer.placement.transfer.copy_to
        try:
            scale = self._attached.loss_scale
            return [source.adding(spec, copy_to(flat * scale, source.device)) for spec, flat in unsent], None
        except BaseException as error:
            return [], error
