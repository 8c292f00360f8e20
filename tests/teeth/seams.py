"""Faults chosen by hand, at seams that stay wherever the code behind them moves.

Those that come first break promises about faults, in the order of docs/engineering/reliability.md. The others
are of what kernels compute, payloads carry, memories add up, optimizers are seen to do, and checkpoints hold.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.support.source import ROOT
from tests.teeth.mutants import Fault, changed
from tests.teeth.planted import planted


class Seam(NamedTuple):
    """`where`, `old` and `new` are as `planted` takes them."""

    what: str
    where: str
    old: str
    new: str

    def fault(self) -> Fault:
        """Raises `ValueError` where the row is out of date."""
        path, text = planted(self.where, self.old, self.new)
        found = changed(path.read_text(encoding="utf-8"), text)
        inner = [name for name in found if not any(each.startswith(f"{name}.") for each in found)]
        if len(inner) != 1:
            raise ValueError(f"mend the row: {self.where} changes {sorted(found)}")
        file = path.relative_to(ROOT).as_posix()
        return Fault(file, f"{file}:{inner[0]}", self.what, text)


SEAMS = (
    Seam(
        "The error of a lost peer does not say where it was.",
        "Reducer._advance",
        "raise self.broken",
        "raise TransportError('lost')",
    ),
    Seam(
        "gradwire's own group has torch's timeout, not the model's.",
        "_terms",
        "timeout = …_timeout",
        "timeout = None",
    ),
    Seam(
        "The wait for a verdict never wakes up, and another thread gets the signal.",
        "wait_for",
        "while …:",
        "getattr(__import__('signal'), 'pthread_sigmask')(0, {2})\nwhile not event.wait():",
    ),
    Seam(
        "Every rank says its own time for all.", "Reducer._finish", "…row.computing_s…", "…step.computing_s…"
    ),
    Seam("A rank that fails pays no rounds.", "Reducer._start", "owe_zeros(…)", "pass"),
    Seam(
        "A failure is not told to the others.",
        "Votes.error",
        "failed = …if row.failed]",
        "failed = …if False]",
    ),
    Seam(
        "`SystemExit` ends the worker's thread.",
        "Reducer._start",
        "except BaseException…",
        "except Exception…",
    ),
    Seam(
        "A checksum is computed, and not compared.",
        "SealedLayout.open",
        "sound = …if …]",
        "sound = …if checksum(copy) is not None]",
    ),
    Seam("Ranks compare only what a message shows.", "_pack", "digest = …", "digest = bytes(_HASH_BYTES)"),
    Seam("What a file of state says of its own bytes is not compared.", "_read", "if damaged…:", "if False:"),
    Seam(
        "A damaged table of exponents ends in an error of no type of ours.",
        "CodeTable.__post_init__",
        "raise WireError(…is {what}…)",
        "raise ValueError(…is {what}…)",
    ),
    Seam("A length that a peer announces is believed.", "_length", "if not 0 <= length…:", "if False:"),
    Seam(
        "A message does not say to which round and rank it belongs.", "Watchman._mark", "return …", "return 0"
    ),
    Seam(
        "A rank in a call does not look at what others do.", "Calls.begin", "if board.count(…:", "if False:"
    ),
    Seam("A rank in a step does not look at calls.", "Calls.look", "self._compare(…)", "pass"),
    Seam(
        "A rank that waits in a call reads what every other wrote.",
        "Calls.begin",
        "if board.count(…:",
        "if True:",
    ),
    Seam(
        "A rank that fails between a call's collectives is not told of.",
        "on_all_ranks",
        "require_success(…)",
        "if failure is not None:\n    raise failure",
    ),
    Seam(
        "What is unsent is forgotten while a rank cannot add it to its gradients.",
        "hand_over",
        "prepared = on_all_ranks(…)",
        "prepared = ready()",
    ),
    Seam("Memory is committed in steps that do not count.", "Reducer._commit", "if finite:", "if True:"),
    Seam("After a NaN the mean stays as it is.", "Reducer._decide_now", "elif …:", "elif False:"),
    Seam(
        "A memory takes every gradient that is finite.", "judged", "bounds = …", "bounds = (np.inf, np.inf)"
    ),
    Seam(
        "A part of the memory is lost in every step.",
        "Residual.compensate",
        "weights = (…)",
        "weights = (0.99 * …)",
    ),
    Seam("The guard hears, and says nothing.", "Guard.error", "if …(_NOT_DUE,) in rows:", "if rows:"),
    Seam(
        "A rank alone compresses what it sends to nobody.",
        "layout_to_run",
        "if …only_compresses(…):",
        "if False:",
    ),
    Seam(
        "Buffers are exchanged as they arrive.",
        "InTurn.next_turns",
        "while …:",
        "while self._waiting:\n    turn = next(iter(self._waiting))",
    ),
    Seam("Chosen values of a model in 16 bits travel in 32.", "narrow_for", "return …", "return None"),
    Seam(
        "A parameter that nothing used is sent like the others.",
        "judged",
        "return Findings(…)",
        "return Findings((), small)",
    ),
    Seam(
        "A step counts without the gradients of parameters that were frozen later.",
        "require_all_units",
        "if …:",
        "if False:",
    ),
    Seam(
        "A parameter that was added after attach is none of gradwire's concern.",
        "_changes",
        "changes.append(…was added…)",
        "pass",
    ),
    Seam(
        "A parameter that is gone counts as carried.",
        "_changes",
        "if id(parameter) not in present:",
        "if False:",
    ),
    Seam(
        "A rank that refuses its changed parameters tells nobody.",
        "refuse_changed",
        "backward.calls.give_up_step(…)",
        "pass",
    ),
    Seam(
        "The module inside Lightning Fabric's wrapper is not looked for.",
        "inside",
        "name = next(… in _INSIDE …)",
        "name = next(… in _INSIDE[:1] …)",
    ),
    Seam(
        "A damaged state is refused by its own rank alone.",
        "load",
        "require_agreement(facts | mine, …)",
        "require_agreement(mine if refusal is None else absent, …)",
    ),
    Seam("NaN in a loaded memory is taken.", "_check_memory", "raise ValueError(…NaN…)", "return"),
    Seam(
        "Another number of ranks starts with the sum of what was unsent, not the mean.",
        "mean_of",
        "…torch.stack([m[name] for m…mean(0)…",
        "…torch.stack([m[name] for m…sum(0)…",
    ),
    Seam("A rank does not wait until all have written their files.", "keep", "require_success(…)", "pass"),
    Seam(
        "A file of state gets its last name before all ranks have written theirs.",
        "keep",
        "prepared = ….path(…, _PREPARED)",
        "prepared = ….path(…, _COMMITTED)",
    ),
    Seam(
        "Places among more than 2^31 elements are counted in 32 bits.",
        "index_type",
        "return …",
        "return torch.int32",
    ),
    Seam("The history of steps has no end.", "History.__init__", "…deque(maxlen=…)", "…deque()"),
    Seam("A resumed run forgets what was unsent.", "_made", "…copy_(memory.detach())", "pass"),
    Seam("What was not sent is forgotten.", "Reducer._commit", "flat_buffer.commit(…)", "pass"),
    Seam(
        "Compensation leaves the loss scale in.",
        "kernels.compensation:compensate",
        "out.add_(new, alpha=scale)",
        "out.add_(new)",
    ),
    Seam(
        "The last element of a block does not count for its scale.",
        "kernels.cpu.blocks:_largest_bits",
        "for i in range(bits.shape[1]):",
        "for i in range(bits.shape[1] - 1):",
    ),
    Seam(
        "The elements that are chosen come in the order of their magnitudes.",
        "kernels.topk:topk_indices",
        "return order[:k].sort().values",
        "return order[:k]",
    ),
    Seam(
        "A bit of 0 stands for the level of 1.",
        "kernels.signs:add_signs",
        "out[elements] += torch.where(is_high, …",
        "out[elements] += torch.where(~is_high, …",
    ),
    Seam(
        "Codes begin one bit late.",
        "kernels.layouts:pack_codes",
        "places = torch.arange(8, …",
        "places = torch.arange(1, 9, …",
    ),
    Seam(
        "A payload is summed before it is divided.",
        "Reduce.start",
        "payload = …1.0 / comm.world…",
        "payload = …1.0…",
    ),
    Seam(
        "A mean counts one rank too few.",
        "Gather.start.decode",
        "self.codec.add_decoded(received, mean, 1.0 / comm.world, ctx)",
        "self.codec.add_decoded(received, mean, 1.0 / max(1, comm.world - 1), ctx)",
    ),
    Seam("A broadcast comes from rank 0.", "Comm.broadcast", "round_ = …src=src…", "round_ = …src=0…"),
    Seam(
        "A shift goes to the next rank only.",
        "Comm.shift",
        "return …by, tells=tells…",
        "return …1, tells=tells…",
    ),
    Seam(
        "An all-reduce counts half of its bytes.",
        "Round.wire_bytes",
        "share = …2 * others / world…",
        "share = …others / world…",
    ),
    Seam(
        "The low-pass filter's weights are swapped.",
        "LowPass.update",
        "torch.lerp(old, working[UNSENT], self.beta, …",
        "torch.lerp(old, working[UNSENT], 1.0 - self.beta, …",
    ),
    Seam(
        "A flush hands over the filtered memory as it is.",
        "LowPass.weight",
        "return 1.0 / self.beta",
        "return 1.0",
    ),
    Seam(
        "No rank says that its buffers are out of date.",
        "RankReport.write",
        "values = …float(self.stale)…",
        "values = …0.0…",
    ),
    Seam(
        "Every rank's report is written to the first row.",
        "RankReport.write",
        "table[rank] = …",
        "table[0] = …",
    ),
    Seam(
        "A scaler's skipped step counts as made.",
        "OptimizerLog.optimizer_ended",
        "skipped = …",
        "skipped = None",
    ),
    Seam(
        "Gradients that were cleared count as used.",
        "step.fates:read",
        "_clear(state, optimizer, look)",
        "pass",
    ),
    Seam(
        "Of several planes a checkpoint has the first.",
        "checkpoint.state:_copied",
        "for plane in layout.planes_of(spec.name):",
        "for plane in layout.planes_of(spec.name)[:1]:",
    ),
    Seam(
        "A checkpoint has the memory of gradients that no optimizer has used.",
        "checkpoint.state:_copied",
        "reducer.commit_deferred()",
        "pass",
    ),
    Seam(
        "A file gets its name before its bytes are on the disk.",
        "checkpoint.file_set:_write",
        "os.fsync(file.fileno())",
        "pass",
    ),
)


def faults() -> list[Fault]:
    """All of them."""
    return [each.fault() for each in SEAMS]
