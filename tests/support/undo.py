"""Scripts of what people do between `backward()` and `step()`, played to one small model on one rank.

A script is words:

- `pass`: forward, backward and an exchange; `local`: without the exchange, as under `no_sync()`; `reach`: a
  pass that brings gradients of `w` alone; `rest`: an exchange that brings zeros; `look`: `autograd.grad`,
  which brings no gradient; `round`: a pass that goes round the wrapper, which nobody sees.
- `a`: optimizer a steps; `a!`: a scaler has the device leave that out; `~a` and `a~`: a hook of the user's
  clears its gradients before or after it; `a( … )`: its closure does what is between. `^a`: a hook of the
  user's raises before it, and the script catches that; `raise`: a closure does.
- `-a` clears its gradients, `0a` fills them with zeros, `>a` makes it the one that is followed.
- `ask`: a save or a report; `drop`: the user leaves the step out; `write`: the user writes parameters;
  `forget`: another state is loaded; `retire`: the recipe is detached.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import GradwireError
from gradwire.placement import HostDevice
from gradwire.sources.attempts import Attempted, Attempts, Brought, Entered, Resumed, Written, needs_look
from gradwire.sources.attempts import read as read_attempt
from gradwire.sources.local_optimizers import LocalOptimizers
from gradwire.step.events import (
    Asked,
    Changed,
    Dropped,
    Event,
    ExchangeBegan,
    Exchanged,
    KnownOptimizer,
    Loaded,
    Look,
    PassAdded,
    PassBegan,
    Retired,
    RolledBack,
    StepBegan,
    StepEnded,
    StepLooked,
    StepRaised,
)
from gradwire.step.fates import (
    PARTLY,
    UNSEEN,
    FateRules,
    State,
    fates_of,
    is_used_up,
    is_waited_for,
    may_step_instead,
    read,
    unused,
)
from gradwire.step.optimizer_log import OptimizerLog
from gradwire.unit.context import Fates


class Stepper(torch.optim.Optimizer):
    """Adds the gradients; leaves that out if a scaler has found an overflow, as fused optimizers do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Once; a closure is called first."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        if not float(getattr(self, "found_inf", 0.0)):
            for each in self.param_groups[0]["params"]:
                if each.grad is not None:
                    each.add_(each.grad)


class Model(nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor, only_w: bool) -> Tensor:
        """The loss."""
        return (self.w * inputs).sum() + (0 if only_w else (self.b * inputs).sum())


SAID = {
    "never exchanged": "unseen",
    "inside backward()": "inside",
    "only a part": "partly",
    "backward passes were exchanged": "passes",
    "attach was not given": "another",
    "no step to leave out": "nothing to drop",
}


class Raised(Exception):
    """Code of the user's has raised."""


def _said(message: object) -> str:
    return next(said for text, said in SAID.items() if text in str(message))


def _shown(fates: Fates) -> str:
    parts = ["made" if fates.made else "not yet" if fates.open else "left out"]
    parts += [f"dropped {''.join(sorted(fates.dropped))}"] if fates.dropped else []
    parts += [f"open {''.join(sorted(fates.open))}"] if fates.open else []
    return ", ".join(parts)


class Player:
    """A model whose optimizers are followed, as by `attach` and by `outer` at once."""

    def __init__(self, optimizers: str = "a=wb", given: str = "a", **options: Any) -> None:
        """`optimizers` are their names and parameters; the `given` ones were given to `attach`."""
        self.model = Model()
        self.optimizers = {
            name: Stepper([getattr(self.model, each) for each in parameters])
            for name, parameters in (each.split("=") for each in optimizers.split())
        }
        followed = tuple(self.optimizers[name] for name in given)
        self._clears: dict[str, Stepper] = {}
        self._raises = ""
        for name, optimizer in self.optimizers.items():
            optimizer.register_step_pre_hook(partial(self._hook_of_the_user, f"before {name}"))
        self.steps = OptimizerLog(dict(self.model.named_parameters()), followed, HostDevice(), **options)
        self.steps.watch(self.model)
        self._local = LocalOptimizers(None, lambda _given: followed[0])
        self._local.inner = followed
        self._told = 0
        self.attempts = Attempts(
            self.model.parameters(),
            self._local,
            self._attempted,
            before_pass=lambda _first: None,
            before_step=lambda: None,
            after_step=lambda _optimizer: None,
        )
        self.attempts.watch(self.model)
        for name, optimizer in self.optimizers.items():
            optimizer.register_step_post_hook(partial(self._hook_of_the_user, f"after {name}"))
        self.answers: list[str] = []

    def _hook_of_the_user(self, when: str, *_: Any) -> None:
        if when == self._raises:
            self._raises = ""
            raise Raised
        if (optimizer := self._clears.pop(when, None)) is not None:
            optimizer.zero_grad()

    def _attempted(self) -> None:
        self._told += 1

    def play(self, script: str) -> str:
        """The answers, in their order: fates of each exchange, what was said, and how many steps were
        attempted after each word.
        """
        words, counts = iter(script.split()), []
        for word in words:
            self._do(word, words)
            counts.append(str(self.attempts.count))
        with torch.enable_grad():
            self._pass("pass")
        counts.append(str(self.attempts.count))
        assert self._told == self.attempts.count, "each attempt is told once"
        return f"{'; '.join(self.answers)} | {' '.join(counts)}"

    def _do(self, word: str, words: Iterator[str]) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._act(word, words)
            except (GradwireError, ValueError) as error:
                self.answers.append(f"{_said(error)}!")
            except Raised:
                pass
        self.answers += [_said(each.message) for each in caught]

    def _act(self, word: str, words: Iterator[str]) -> None:
        if word in ("pass", "local", "look", "reach", "rest", "round"):
            self._pass(word)
        elif word == "ask":
            self.steps.note_cleared()
            self._ask()
        elif word == "drop":
            self.steps.drop()
            self.attempts.drop()
        elif word == "write":
            with torch.no_grad():
                for each in self.model.parameters():
                    each.add_(1.0)
        elif word == "forget":
            self.steps.forget()
            self.attempts.forget(0)
            self._told = 0
        elif word == "retire":
            self.steps.retire()
        elif word == "raise":
            raise Raised
        else:
            self._optimize(word, words)

    def _optimize(self, word: str, words: Iterator[str]) -> None:
        name = word.strip("-0!~(>^")
        optimizer = self.optimizers[name]
        if word.startswith(("-", "0")):
            optimizer.zero_grad(set_to_none=word.startswith("-"))
            return
        if word.startswith(">"):
            self.steps.change((optimizer,), self.model)
            self.attempts.change((optimizer,))
            return
        if "~" in word:
            self._clears[f"{'before' if word.startswith('~') else 'after'} {name}"] = optimizer
        if word.startswith("^"):
            self._raises = f"before {name}"
        if word.endswith("!"):
            optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
        if word.endswith("("):
            inside = []
            while (then := next(words)) != ")":
                inside.append(then)

            def closure() -> float:
                for then in inside:
                    self._act(then, iter(()))
                return 0.0

            optimizer.step(closure)
        else:
            optimizer.step()
        if word.endswith("!"):
            del optimizer.found_inf

    def _pass(self, word: str) -> None:
        exchanges = word in ("pass", "reach", "rest")
        if word == "round":
            for each in self.model.parameters():
                each.grad = torch.ones(2) if each.grad is None else each.grad + 1.0
            return
        inputs = torch.ones(2, requires_grad=word == "look")
        loss = self.model(inputs, word == "reach")
        loss.register_hook(lambda _gradient: self._entered(exchanges))  # type: ignore[no-untyped-call]
        if word == "look":
            torch.autograd.grad(loss, inputs)
            return
        loss.backward()  # type: ignore[no-untyped-call]
        if word == "rest":
            for each in self.model.parameters():
                each.grad.zero_()
        if exchanges:
            self.steps.exchange_ended()

    def _entered(self, exchanges: bool) -> None:
        self.steps.backward_begins(exchanges=exchanges)
        if exchanges:
            self.steps.exchange_begins(self._ask(), compresses=True)

    def _ask(self) -> Fates | None:
        fates = self.steps.fates()
        if fates is None:
            self.answers.append("final")
            return None
        self.steps.rolled_back(fates, is_dropped=not (fates.made or fates.open))
        self.answers.append(_shown(fates))
        return fates


class Gradient:
    """A gradient: which one it is, whether it is zero, and how often it was written."""

    def __init__(self) -> None:
        self.version, self.is_zero = 0, False

    def __call__(self) -> Gradient:
        """Itself, as a weak reference to it."""
        return self


class Told:
    """Plays scripts as events, without a model: those that hooks of torch would append."""

    def __init__(self, optimizers: str = "a=wb", given: str = "a", **options: Any) -> None:
        """As of `Player`."""
        self._raises = options.get("raises", False)
        self.state = State(
            FateRules(
                frozenset("wb"),
                takes_back=options.get("skipped") != "keep",
                is_alone=options.get("alone", False),
                may_differ=options.get("may_differ", lambda: False),
            )
        )
        self._gradients: dict[str, Gradient | None] = {"w": None, "b": None}
        self.attempted = Attempted()
        self._versions = {"w": 0, "b": 0}
        self.answers: list[str] = []
        self._warned: set[str] = set()
        self._parameters = dict(each.split("=") for each in optimizers.split())
        self._follow(given)

    def _follow(self, given: str) -> None:
        self.optimizers = {
            name: KnownOptimizer(is_given=name in given, names=frozenset(parameters))
            for name, parameters in self._parameters.items()
        }
        changed = Changed(tuple(self.optimizers[name] for name in given))
        self._see(changed)
        read_attempt(self.attempted, changed)

    def _see(self, event: Event) -> None:
        read(self.state, event)

    def play(self, script: str) -> str:
        """As of `Player`."""
        words, counts = iter([*script.split(), "pass"]), []
        for word in words:
            try:
                self._act(word, words)
            except Raised:
                while word.endswith("(") and next(words) != ")":
                    pass
                self._end_raised()
            counts.append(str(self.attempted.count))
        return f"{'; '.join(self.answers)} | {' '.join(counts)}"

    def _act(self, word: str, words: Iterator[str]) -> None:
        if word in ("pass", "local", "look", "reach", "rest"):
            self._pass(word)
        elif word == "round":
            self._write("wb", anew=True)
        elif word == "ask":
            self._see(Asked(self._looks()))
            self._ask()
        elif word == "drop":
            if is_used_up(self.state):
                self.answers.append("nothing to drop!")
                return
            self._see(Dropped())
            if self.attempted.is_pending:
                read_attempt(self.attempted, Dropped())
            else:
                self.answers.append("nothing to drop!")
        elif word == "forget":
            self._see(Loaded())
            read_attempt(self.attempted, Resumed(0))
        elif word == "retire":
            self._see(Retired())
        elif word == "raise":
            raise Raised
        elif word == "write":
            self._versions = {name: version + 1 for name, version in self._versions.items()}
        elif word.startswith(">"):
            self._follow(word[1:])
        elif word.startswith(("-", "0")):
            for name in self.optimizers[word[1:]].names:
                if word.startswith("-"):
                    self._gradients[name] = None
                elif (gradient := self._gradients[name]) is not None:
                    gradient.is_zero, gradient.version = True, gradient.version + 1
        else:
            self._step(word, words)

    def _write(self, names: str, *, anew: bool = False) -> None:
        for name in names:
            gradient = self._gradients[name]
            if gradient is None or anew:
                gradient = self._gradients[name] = Gradient()
            gradient.version, gradient.is_zero = gradient.version + 1, False

    def _enter(self) -> None:
        there = [each for each in self._gradients.values() if each is not None]
        is_cleared = needs_look(self.attempted) and all(each.is_zero for each in there)
        read_attempt(self.attempted, Entered((*self._versions.values(),) if is_cleared else None))

    def _pass(self, word: str) -> None:
        self._enter()  # forward
        self._enter()  # backward
        self._see(PassBegan(self._looks(), exchanges=word in ("pass", "reach", "rest")))
        is_waited, exchange = is_waited_for(self.state), self.state.exchange
        if word in ("pass", "reach", "rest"):
            self._ask_and_begin()
        if word != "look":
            self._write("w" if word == "reach" else "wb")
            read_attempt(self.attempted, Brought())
        read_attempt(self.attempted, Written((*self._versions.values(),)))
        if word == "rest":
            for gradient in self._gradients.values():
                assert gradient is not None
                gradient.is_zero = True
        if word in ("pass", "reach", "rest"):
            self._see(Exchanged({each for each in self.state.followed if self._look(each).are_zero}))
        elif word == "local" and is_waited:
            new = [each for each in self.state.followed if each.is_given and each not in exchange.ended]
            self._see(PassAdded({each: self._look(each).first for each in new}))

    def _ask(self) -> Fates | None:
        fates = fates_of(self.state)
        if fates is None:
            self.answers.append("final")
            return None
        self._see(RolledBack(fates, is_dropped=not (fates.made or fates.open)))
        self.answers.append(_shown(fates))
        return fates

    def _ask_and_begin(self) -> None:
        fates = self._ask()
        goes_on = fates is not None and not fates.made and bool(fates.open)
        self._see(ExchangeBegan(compresses=True, goes_on=goes_on))

    def _look(self, optimizer: KnownOptimizer) -> Look:
        mine = {name: self._gradients[name] for name in sorted(optimizer.names, reverse=True)}
        there = [each for each in mine.values() if each is not None]
        gone = frozenset(name for name, each in mine.items() if each is None)
        if not there:
            return Look(gone)
        return Look(gone, (there[0], there[0].version), all(each.is_zero for each in there))

    def _looks(self) -> dict[KnownOptimizer, Look]:
        return {each: self._look(each) for each in unused(self.state)}

    def _step(self, word: str, words: Iterator[str]) -> None:
        optimizer = self.optimizers[word.strip("!~(^")]
        is_heard = any(each.is_given for each in self.optimizers.values())  # else no hook is made
        is_new = is_heard and optimizer not in self.state.followed and may_step_instead(self.state)
        if is_new or optimizer in self.state.followed:
            self._see(StepBegan(optimizer))
        if is_new:
            self._see(StepLooked(optimizer, self._look(optimizer)))
        read_attempt(self.attempted, StepBegan(optimizer))
        if word.startswith("^"):
            raise Raised
        if word.startswith("~"):
            self._gradients |= dict.fromkeys(optimizer.names)
        if optimizer.is_given:
            self._see(StepLooked(optimizer, self._look(optimizer)))
        while word.endswith("(") and (then := next(words)) != ")":
            self._act(then, words)
        for name in optimizer.names:
            self._versions[name] += self._gradients[name] is not None and "!" not in word
        if optimizer in self.state.followed:
            self._see(StepEnded(optimizer, self._look(optimizer), (lambda: True) if "!" in word else None))
            if self._raises_as_told():
                self._end_raised()
                return
        read_attempt(self.attempted, StepEnded(optimizer))
        if word.endswith("~"):
            self._gradients |= dict.fromkeys(optimizer.names)

    def _end_raised(self) -> None:
        for each in [each for each, its in self.state.followed.items() if its.is_inside]:
            self._see(StepRaised(each))
        for each in [*self.attempted.running]:
            read_attempt(self.attempted, StepRaised(each))

    def _raises_as_told(self) -> bool:
        for said in self.state.said:
            if self._raises and said in (UNSEEN, PARTLY):
                self.answers.append(f"{said}!")
                return True
            if said not in self._warned:
                self._warned.add(said)
                self.answers.append(said)
        return False
