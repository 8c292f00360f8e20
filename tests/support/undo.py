"""Scripts of what people do between `backward()` and `step()`, played to one small model on one rank.

A script is words:

- `pass`: forward, backward and an exchange; `local`: without the exchange, as under `no_sync()`; `reach`: a
  pass that brings gradients of `w` alone; `rest`: an exchange that brings zeros; `look`: `autograd.grad`,
  which brings no gradient; `round`: a pass that goes round the wrapper, which nobody sees.
- `a`: optimizer a steps; `a!`: a scaler has the device leave that out; `~a` and `a~`: a hook of the user's
  clears its gradients before or after it; `a( … )`: its closure does what is between.
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
from gradwire.sources.attempts import Attempts
from gradwire.sources.local_optimizers import LocalOptimizers
from gradwire.step.fates import Steps
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


def _said(message: object) -> str:
    return next(said for text, said in SAID.items() if text in str(message))


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
        for name, optimizer in self.optimizers.items():
            optimizer.register_step_pre_hook(partial(self._hook_of_the_user, f"before {name}"))
        self.steps = Steps(dict(self.model.named_parameters()), followed, HostDevice(), **options)
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
        else:
            self._optimize(word, words)

    def _optimize(self, word: str, words: Iterator[str]) -> None:
        name = word.strip("-0!~(>")
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
        is_whole = not (fates.made or fates.open)
        self.steps.rolled_back(fates, is_dropped=is_whole)
        parts = ["made" if fates.made else "left out" if is_whole else "not yet"]
        parts += [f"dropped {''.join(sorted(fates.dropped))}"] if fates.dropped else []
        parts += [f"open {''.join(sorted(fates.open))}"] if fates.open else []
        self.answers.append(", ".join(parts))
        return fates
