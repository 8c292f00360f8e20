"""Faults chosen by hand, at seams that stay wherever the code behind them moves.

Those of `tests.faults.teeth` are among them: each breaks a promise about faults. The others are of what
kernels compute, payloads carry, memories add up, optimizers are seen to do, and checkpoints hold.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.faults.teeth import CHANGES, planted
from tests.support.source import ROOT
from tests.teeth.mutants import Fault, changed


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
    *(Seam(each.what, each.where, each.old, each.new) for each in CHANGES),
    Seam(
        "A fold leaves the loss scale in.",
        "kernels.folding:fold",
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
        "Gather.start.finish",
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
        "Steps._after",
        "record.skipped = …",
        "record.skipped = None",
    ),
    Seam(
        "Gradients that were cleared count as used.",
        "Steps._before",
        "self._clear(record)",
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
        "engine.resolve()",
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
