"""Does `gradwire advise` name the cause that was planted, and never another one?

Fourteen settings of two ranks on an emulated link. Each script waits for one thing that is known, and is
watched as a user would. An answer is wrong if it names another cause, or a remedy for something that the
script does not have. "Cannot tell" is not wrong, but counted.

    python benchmarks/planted.py --json planted.json              # about four minutes on two cores
    python benchmarks/planted.py --settings turns ten-far
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from gradwire_lab import emulate

WORKERS, STEPS = 2, 45
LONGEST_S = 300.0


class Setting(NamedTuple):
    """A link, what a script does on it, and which bounds are right.

    The answer has all of `said`, and none of `not_said`.
    """

    link: tuple[str, str]
    modes: tuple[str, ...]
    right: tuple[str, ...]
    said: tuple[str, ...] = ()
    not_said: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


NO_LOADER = ("DataLoader more workers",)
SETTINGS = {
    "bandwidth": Setting(("80mbit", "0"), (), ("bandwidth",), ("attach(model, optimizer)",), NO_LOADER),
    "below-rate": Setting(
        ("80mbit", "0"), (), ("link rate",), ("the link at its rate",), NO_LOADER, ("--rate", "800mbit")
    ),
    "fp16-hook": Setting(("80mbit", "0"), ("fp16",), ("bandwidth",), ("fp16_compress_hook",), NO_LOADER),
    "attached": Setting(("80mbit", "0"), ("attached",), ("unknown",), ("wire.report()",), ("0% of a step",)),
    "no-sync": Setting(("600mbit", "0"), ("no_sync",), ("computing", "bandwidth"), (), NO_LOADER),
    "each-pass": Setting(("80mbit", "0"), ("each_pass",), ("no_sync",), ("no_sync()",), NO_LOADER),
    "loader": Setting(("600mbit", "0"), ("loader",), ("input",), ("DataLoader",)),
    "loader-of-one": Setting(("600mbit", "0"), ("loader_of_one",), ("late rank",), ("rank 1", "for data")),
    "late": Setting(("600mbit", "0"), ("late",), ("late rank",), ("rank 1",), NO_LOADER),
    "turns": Setting(
        ("600mbit", "0"),
        ("turns",),
        ("late ranks", "computing"),
        (),
        (*NO_LOADER, "one rank", "a machine like"),
    ),
    "after": Setting(("600mbit", "0"), ("after",), ("between",), ("between steps",), NO_LOADER),
    "optimizer": Setting(("600mbit", "0"), ("optimizer",), ("optimizer",), ("optimizer",), NO_LOADER),
    "ten": Setting(("600mbit", "0"), ("ten",), ("latency", "computing"), (), (*NO_LOADER, "bit/s")),
    "ten-far": Setting(("600mbit", "20ms"), ("ten",), ("latency",), (), (*NO_LOADER, "bit/s")),
}


def train(modes: list[str]) -> None:
    """The script that is watched: what it waits for, it does by sleeping, or by work that is counted."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return 8 * STEPS

        def __getitem__(self, place: int) -> Any:
            is_slow = "loader" in modes or ("loader_of_one" in modes and dist.get_rank() == 1)
            time.sleep(0.015 if is_slow else 0.0)
            return torch.full((512,), 1.0 + place % 7)

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(0.15)
            return super().step(closure)

    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    width = 1 if "ten" in modes else 512
    inside = [] if "ten" in modes else [nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(9 if "ten" in modes else 512, width), *inside))
    optimizer = (Slow if "optimizer" in modes else torch.optim.SGD)(model.parameters(), lr=1e-6)
    if "fp16" in modes:
        model.register_comm_hook(None, fp16_compress_hook)
    if "attached" in modes:
        import gradwire

        gradwire.attach(model, optimizer, "int8")
    chosen = Random(7)  # alike on all ranks
    passes = 4 if {"no_sync", "each_pass"} & set(modes) else 1

    def step(inputs: Any) -> None:
        late = chosen.randrange(WORKERS) if "turns" in modes else 1
        if {"turns", "late"} & set(modes) and dist.get_rank() == late:
            time.sleep(0.08)
        for number in range(passes):
            model.require_backward_grad_sync = "no_sync" not in modes or number == passes - 1
            loss = model(inputs).square().mean()
            time.sleep(0.03)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "after" in modes:
            time.sleep(0.1)

    if {"loader", "loader_of_one"} & set(modes):
        for inputs in DataLoader(Samples(), batch_size=8):
            step(inputs)
    else:
        for _ in range(STEPS):
            step(torch.ones(8, 9 if "ten" in modes else 512))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo may hang when its connections are freed


def answer(setting: Setting, mode: str) -> tuple[dict[str, Any], str]:
    """What `gradwire advise` says, as a document and as text."""
    rate, delay = setting.link
    link = emulate.EmulatedLink(emulate.parse_rate(rate), emulate.parse_delay(delay))
    with tempfile.TemporaryDirectory() as name, emulate.EmulatedNetwork(WORKERS, link, mode) as network:
        path = Path(name) / "advice.json"
        advise = [sys.executable, "-m", "gradwire", "advise", "--json", str(path), *setting.options]
        ranks: list[subprocess.Popen[Any]] = [
            network.popen(
                rank,
                [*advise, __file__, "--train", *setting.modes],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(WORKERS)
        ]
        printed = ranks[0].communicate(timeout=LONGEST_S)[0]
        codes = [each.wait(timeout=LONGEST_S) for each in ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return json.loads(path.read_text()), " ".join(printed.decode().split())


def judged(setting: Setting, found: dict[str, Any], text: str) -> str:
    """ "right", "cannot tell", or what is wrong."""
    missing = [words for words in setting.said if words not in text]
    false = [words for words in setting.not_said if words in text]
    if found["bound"] == "unknown" and "unknown" not in setting.right:
        return "cannot tell"
    if found["bound"] not in setting.right:
        return f"WRONG: {found['bound']}"
    return f"WRONG: missing {missing}, false {false}" if missing or false else "right"


def main() -> None:
    """Measure all settings, or some, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return
    mode = emulate.enter("auto")  # which may start this file again
    answers: dict[str, Any] = {}
    print("| planted | bound by | verdict |\n|---|---|---|")
    for name in options.settings:
        setting = SETTINGS[name]
        found, text = answer(setting, mode)
        answers[name] = {"verdict": judged(setting, found, text), "text": text, "advice": found}
        print(f"| {name} | {found['bound_by']} | {answers[name]['verdict']} |", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    wrong = [name for name, each in answers.items() if each["verdict"].startswith("WRONG")]
    print(f"\n{len(answers)} settings, {len(wrong)} wrong {wrong}")


if __name__ == "__main__":
    main()
