"""`Wire`, which `attach` returns: the handle on one attached model."""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from gradwire._api.parts import Attached, Gradients, Ranks, Steps, Watch, covers_momentum, warn_of_momentum
from gradwire._api.report import Report, account_of, report_of
from gradwire.agreement.agree import OptimizerText, on_all_ranks, require_same_optimizer
from gradwire.checkpoint.state import Missing, Saved
from gradwire.recipes import Composition, Recipe
from gradwire.sources.checks import check_optimizers
from gradwire.sources.observe import hold
from gradwire.sources.unwrap import Optimizers, optimizers_of
from gradwire.step.installed import META
from gradwire.step.layout import Layout
from gradwire.step.reducer import Backward, Reducer
from gradwire.tools.diagnose import Diagnosis

if TYPE_CHECKING:  # loads FSDP2
    from gradwire.sources.fsdp.traffic import Traffic


class Wire:
    """The handle on one attached model. Its methods are for the training thread, between steps.

    `save`, `load`, `mean_state_dict`, `load_state_dict`, `diagnose`, `switch`, `switch_optimizer`, `flush`
    and `detach` are collectives: call them on all ranks, between the same steps. If some ranks make another
    call, or are in a step, all those ranks raise `RanksDisagree`, which names ranks and calls. If some ranks
    make no call, the others raise `TransportError` at the process group's timeout, with the same names.
    """

    inside: Traffic | None = None
    """FSDP2's own traffic inside nodes, where gradwire carries that, too."""

    def __init__(self, steps: Steps, watch: Watch, ranks: Ranks, gradients: Gradients) -> None:
        self._steps, self._watch, self._ranks, self._gradients = steps, watch, ranks, gradients

    def __repr__(self) -> str:
        reducer, report = self._backward.reducer, self.report()
        name = report.recipe.split("(")[0].strip()
        runs = name
        if reducer.measuring:
            runs = f"{name}, measuring"
        elif reducer.awaits_kernels:
            runs = f"{name}, dense so far"
        elif reducer.layout.alone:
            runs = "dense, one rank"
        # Where dense runs, the mean of recent steps may still be that of what ran before.
        is_known = report.wire_bytes_per_step > 0.0 and not reducer.layout.is_dense
        sends = f", {report.ratio:.0%} of dense".replace("%", " %") if is_known else ""
        return f"Wire({runs}, step {reducer.step}{sends})"

    def _repr_html_(self) -> str:
        """The report, in a notebook."""
        return self.report()._repr_html_()

    @property
    def attached(self) -> Attached:
        """The parts, as they are now."""
        return self._steps.attached

    @property
    def _backward(self) -> Backward:
        return self.attached.backward

    @property
    def overlap(self) -> bool:
        """True if exchanges run during the backward pass, which is the default; False if all run after it."""
        return self._steps.overlap

    @overlap.setter
    def overlap(self, value: bool) -> None:
        """Takes effect from the next backward pass."""
        self._steps.overlap = value

    @property
    def settled(self) -> bool:
        """True if the recipe is decided and runs; `False` while an adaptive one still measures or tries
        things out, or while kernels are compiled. FSDP2's traffic inside nodes is no part of it: nodes may
        have their kernels at different times.
        """
        return self._steps.settled

    @property
    def watching(self) -> bool:
        """True if every step keeps a copy of its error-fed gradient, for `diagnose`; off by default."""
        return self._watch.watching

    @watching.setter
    def watching(self, value: bool) -> None:
        """Takes effect from the next backward pass. It costs memory and a pass over the memory of unsent
        gradient."""
        self._watch.watching = value

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward passes add to `p.grad` on this rank and send nothing, for accumulation.

        With DDP it is `ddp.no_sync()`, which must contain the forward passes, too.

        Example::

            with wire.no_sync():
                loss_of(first_half).backward()
            loss_of(second_half).backward()  # sends the sum
        """
        return self._steps.no_sync()

    def diagnose(self) -> Diagnosis:
        """Compare the ranks' gradients of the last step: is one rank's choice good for all? A collective.

        It takes two all-reduces of the gradient's size. Raises `ValueError` if nothing was watched. Raises
        `RanksDisagree` on all ranks if they watched different steps. Later reports show the result.

        Example::

            wire.watching = True
            train_one_step()
            print(wire.diagnose())
        """
        return self._watch.diagnose()

    def report(self) -> Report:
        """An account of the recipe that runs, why it runs, and what it costs.

        Example::

            print(wire.report())
            json.dump(wire.report().as_dict(), file)
        """
        report = report_of(self._backward, self._watch.diagnosis)
        if self.inside is None:
            return report
        return replace(report, **account_of(self.inside))

    def metrics(self) -> dict[str, float]:
        """Flat numbers for dashboards: this rank's last step, and the mean of the last 50 under its recipe.

        Names begin with "gradwire/" and say the unit: `docs/telemetry.md` has the list. Unknown numbers are
        left out. It sends nothing, so one rank alone may call it.

        `gradwire/residual_to_gradient` takes a pass over memory and gradients. They must be as backward left
        them, so call this before unscaling, clipping, and `zero_grad`.

        Example::

            wandb.log(wire.metrics())
        """
        # Loaded on demand, so that attaching stays fast.
        from gradwire.telemetry.metrics import metrics_of

        attached = self.attached
        return metrics_of(attached.backward, attached.source, attached.loss_scale)

    def note_loss(self, loss: float | Tensor) -> None:
        """Note this rank's loss of a step, so that gradwire notices if losses rise. It sends nothing by
        itself.

        Every 32 steps the ranks compare the mean of the noted losses with the lowest mean of 32 steps so far.
        If it has risen twice in a row by more than losses of single steps vary, the log warns once, and the
        report shows it. `auto` then goes back to dense and stays there; any other recipe stays. Checkpoints
        contain the losses noted, so a resumed run finds the same in the same step. The call reads `loss`, so
        with a tensor on a GPU it waits for the GPU. Raises `ValueError` unless it is one number.

        Example::

            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            wire.note_loss(loss)
        """
        try:
            number = float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"loss={loss!r} is not one number") from error
        self._steps.note_loss(number)

    def log_to(self, target: Any, *, every: int = 50) -> None:
        """Write `metrics()` to `target` at the end of each `every`-th backward pass, on this rank.

        `target` is a TensorBoard `SummaryWriter`; "prometheus", or a registry of `prometheus_client`; the
        `Path` of a file for the node exporter's textfile collector; a `logging.Logger`, at level INFO;
        `wandb.log`; an `Accelerator`, whose trackers get them on the main process; or a function, called as
        `target(metrics, step=step)`. W&B plots the metrics over "gradwire/step", and keeps its own count of
        steps. A target that raises is dropped with a line in the log, and training goes on. The model holds
        the target, which is called as long as the model lives.

        Raises `TypeError` for another target, `ValueError` unless `every` is at least 1, and `ImportError`
        without `prometheus_client`.

        Example::

            wire = gradwire.attach(model, optimizer)
            if dist.get_rank() == 0:
                wire.log_to(SummaryWriter(), every=10)
        """
        from gradwire.telemetry.metrics import metrics_of
        from gradwire.telemetry.targets import Listener, write_to

        attached = self.attached
        backward, source = attached.backward, attached.source
        write = write_to(target, attached.reducer.env.control.rank)
        listener = Listener(lambda: metrics_of(backward, source, attached.loss_scale), write, every)
        hold(attached.model, listener)
        backward.listeners.append(weakref.ref(listener))

    def trace(self, path: str | Path) -> None:
        """Write this rank's last timed step as a trace that chrome://tracing and ui.perfetto.dev open.

        Example::

            wire.trace("step.json")
        """
        self._steps.trace(path)

    def state_dict(self, kind: Literal["rank", "mean"] = "rank") -> dict[str, Any]:
        """This rank's state as plain tensors, under a key that names the rank: "rank0", "rank1", …

        For an exact resume, save the state of every rank. Dictionaries of several ranks may be merged into
        one. With `outer` it has this replica's parameters and optimizers, too, and waits for a round under
        way. `kind="mean"` is deprecated: call `mean_state_dict()`. Raises `ValueError` for any other kind.

        Example::

            torch.save(wire.state_dict(), f"wire-{rank}.pt")
        """
        return self._ranks.state_dict(kind)

    def mean_state_dict(self) -> dict[str, Any]:
        """The mean of all ranks' states, the same on all ranks, under the key "mean". A collective.

        It is for code that saves from one rank only. All ranks of any world can load it. It takes one
        all-reduce per parameter, and a small all-gather.

        Example::

            mean = wire.mean_state_dict()
            if rank == 0:
                torch.save(mean, "wire.pt")
        """
        return self._ranks.mean_state_dict()

    def load_state_dict(self, saved: Saved, *, missing: Missing = "refuse") -> None:
        """Resume from this rank's state, from a mean, or from the states of all ranks of any world. A
        collective.

        Pass the states of several ranks as a list or in one dictionary. If they come from another world, all
        ranks start with their mean. With `missing="drop"` some states may be missing: all ranks start with
        the mean of the others, and the unsent gradient of the missing ranks is lost. The model may then have
        other parameters, as after freezing or thawing some: those that fit by name and shape are taken up,
        and a warning names the others.

        Raises `ValueError` when a state belongs to another rank, world or model, and `RanksDisagree`
        when ranks load different steps or plans.

        Example::

            wire.load_state_dict(torch.load(f"wire-{rank}.pt"))
        """
        self._ranks.load_state_dict(saved, missing)

    def save(self, folder: str | os.PathLike[str]) -> int:
        """Save every rank's state in `folder`, one file per rank, and return their step. A collective.

        The ranks may share the folder, or each may have its own. It belongs to this attached model alone. If
        the run is killed, at whatever moment, `load` finds either this save or the one before it, complete.
        Older ones are removed. Save the model first, under the step's name (`wire.report().step`). The step
        that `load` returns then says which file of the model belongs to it.

        If a rank cannot write, raises `OSError` on that rank and `PeerFailed` on the others.

        Example::

            if rank == 0:
                torch.save(model.state_dict(), f"model-{wire.report().step}.pt")
            wire.save("wire")
        """
        return self._ranks.save(folder)

    def load(self, folder: str | os.PathLike[str], *, missing: Missing = "refuse") -> int | None:
        """Resume from the newest complete set of files that `save` left in `folder`. A collective.

        Returns the step of that save, or `None` if nothing has been saved. On the same number of ranks, each
        resumes bit for bit with its own state. On another number, all start with the mean, and each rank must
        see all files. `missing` is as for `load_state_dict`.

        Raises `FileNotFoundError` on all ranks when files of the set have been lost. For a damaged file,
        raises `ValueError` on the rank that reads it and `PeerFailed` on the others. Raises what
        `load_state_dict` raises, too.

        Example::

            if (step := wire.load("wire")) is not None:
                model.load_state_dict(torch.load(f"model-{step}.pt"))
        """
        return self._ranks.load(folder, missing)

    def switch(self, recipe: str | Recipe | Composition) -> None:
        """Change the recipe, from the next step on. A collective. Unsent gradient is kept.

        `recipe` is as for `attach`, or for `outer`, whose optimizer stays, as does the policy. If the new
        recipe has no memory, like `dense`, the next step sends all unsent gradient. If the old recipe applied
        momentum, that momentum is dropped with a warning: the optimizer must apply it from then on. On a
        single rank nothing is compressed, before or after.

        Raises `ValueError` for a recipe that `attach` would refuse, and `PeerFailed` on the other ranks.
        Raises `RanksDisagree` if ranks name different recipes. In these cases nothing has changed on any
        rank.

        Example, to compress more once the first thousand steps are done::

            if step == 1000:
                wire.switch("topk(0.01)")
        """
        self._ranks.switch(recipe)

    def switch_optimizer(self, optimizer: Any) -> None:
        """Let another optimizer, or several, step the parameters from now on. A collective.

        It is for a second phase of training. `optimizer` is as for `attach`. Recipes go by its momentum and
        state from then on. With `outer` the count of local steps goes on, and rounds come as before. Without
        this call its steps count as well, with a warning. Those of an optimizer of some parameters only count
        when the next pass begins.

        Raises `ValueError` for optimizers that `attach` would refuse, `PeerFailed` on the other ranks, and
        `RanksDisagree` if optimizers differ between ranks. In these cases nothing has changed on any rank.

        Example::

            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # after a phase with Adam
            wire.switch_optimizer(optimizer)
        """
        attached = self.attached
        source, control = attached.source, attached.reducer.env.control

        def given() -> tuple[Optimizers, OptimizerText]:
            optimizers = optimizers_of(optimizer)
            check_optimizers(optimizers, source.module)
            source.suits(_layout_asked(attached.reducer), source.applying(optimizers))
            return optimizers, OptimizerText.of(optimizers)

        def agreed() -> Optimizers:
            optimizers, text = on_all_ranks(given, "switch_optimizer", control)
            require_same_optimizer(text, control)
            return optimizers

        self._change(attached.backward.together("switch_optimizer()", agreed))

    def _change(self, optimizers: Optimizers) -> None:
        self._backward.optimizer_log.change(optimizers, self.attached.model)

    def drop_step(self) -> None:
        """Leave this step out: call it after `backward()`, instead of `optimizer.step()`, on all ranks.

        The memory goes back to what it was before the step, when the next one begins. A step is recognised as
        left out by itself if its gradients are cleared before the optimizer has stepped (`docs/training.md`),
        so this is for code in which that cannot be seen: without an optimizer given to `attach`, or before
        its first step. It sends nothing. If some ranks do not call it, the next backward pass raises
        `RanksDisagree` on all of them.

        Raises `ValueError` if no gradient waits for an optimizer.

        Example::

            loss = loss_of(batch)
            loss.backward()
            if float(loss.detach()) > 1e6:  # the same answer on all ranks
                wire.drop_step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        """
        self._backward.optimizer_log.drop()

    def exact(self) -> AbstractContextManager[None]:
        """Within it, modules of FSDP2 gather their parameters unrounded, as for an evaluation. A collective.

        All modules are resharded on entry and exit, so the next forward pass gathers anew. Where `attach`
        was given no `gather=`, parameters are unrounded anyway.

        Example::

            with wire.exact(), torch.no_grad():
                evaluate(model)
        """
        return self._ranks.exact(self.inside)

    def flush(self) -> None:
        """Add the mean of all unsent gradient to `p.grad`, and forget it. A collective.

        If no optimizer steps before the gradients are cleared, the memory gets back what it had. Call
        `optimizer.step()` next, or `scaler.step(optimizer)`: with a scaler, the added gradient carries
        the loss scale, as every gradient does. It takes one all-reduce of the memory. Without a memory,
        as under `dense`, gradients stay as they are: torch's scaler refuses an optimizer that has none.

        Example, at the end of training::

            optimizer.zero_grad()
            wire.flush()
            optimizer.step()
        """
        self._gradients.flush("flush()", lambda: None)

    def detach(self) -> None:
        """Flush, and then run plain all-reduce, because wrappers cannot unregister hooks. A collective.

        Call `optimizer.step()` next, as after `flush`. Warns if the recipe has applied momentum: the
        optimizer must apply it from then on.

        Example::

            optimizer.zero_grad()
            wire.detach()
            optimizer.step()
        """
        backward, reducer = self._backward, self._backward.reducer
        covered = covers_momentum(reducer)
        retired = self._gradients.flush("detach()", reducer.retired)
        backward.call(lambda: reducer.restore(retired))
        self.attached.source.retire()
        backward.optimizer_log.retire()
        if self.inside is not None:
            self.inside.remove()
            self.inside = None
        if covered:
            warn_of_momentum(stacklevel=3)


def _layout_asked(reducer: Reducer) -> Layout:
    """The layout in which to stay: not one that sends what is unsent first, or waits for kernels."""
    watch = reducer.layout.main.watch
    is_passing = reducer.awaits_kernels or (watch is not None and watch.ends)
    return reducer.layout_of(reducer.recipe.build(), META) if is_passing else reducer.layout
