"""Rounds over a folder whose members are killed and come back: what is counted, and how long others wait.

    python -m benchmarks.store_kills --sites 4 --rounds 200 --kills 20 --json FILE

Each site is a process that trains a small model, and meets the others by `gradwire.members.store`. From time
to time one of them, drawn by `--seed`, is killed at a drawn moment, and starts again: every second time from
its last save. The next one is killed when that one has had a round. After so many rounds and kills all leave,
and are compared with the seals in the folder:

- shared parameters are the same bits on all sites that have landed as many rounds;
- rounds are sealed without a gap, and no site is named twice in one;
- the steps of a process that its sealed offers count are all steps that it has made, but for those that it
  still holds at its end, those that it has said to be lost, and, of one that was killed, those since its last
  offer.

Lines say the seconds from one landed round to the next, on all sites: where none was killed, and the longest
after each kill, beside the limit after which a dead site is not waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import gradwire
from gradwire.agreement.agree import checksum
from gradwire.members.bucket.objects import Bucket
from gradwire.members.bucket.records import Seal, processes, seal_key
from gradwire.members.bucket.rounds import Rules

EVERY, BEAT_S, PATIENCE_S = 4, 1.0, 20.0


def site(name: str, folder: Path, number: int, pause_s: float, from_save: bool) -> None:
    """Train until there is a file "stop", as the `number`-th process; `pause_s` passes after a step."""
    torch.manual_seed(number)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    members = gradwire.members.store(
        str(folder / "run"), name, at_least=1, beat_s=BEAT_S, patience_s=PATIENCE_S, snapshot_every=5
    )
    saves = folder / f"saves-{name}"
    wire = gradwire.outer(
        model, optimizer, "topk(ratio=0.2)", every=EVERY, members=members, resume=saves if from_save else None
    )
    began, seen = wire.attempts, wire.rounds
    with (folder / "notes" / f"{number:04d}.jsonl").open("w") as file:

        def note(**what: Any) -> None:
            file.write(json.dumps({"at": time.time(), **what}) + "\n")
            file.flush()

        note(name=name, began=began, round=seen)
        while not (folder / "stop").exists():
            optimizer.zero_grad()
            inputs = torch.randn(8, 20)
            (model(inputs) - inputs[:, :5].sin()).square().mean().backward()
            optimizer.step()
            time.sleep(pause_s)
            if wire.attempts % 10 == 0:
                wire.save(saves)
            if wire.rounds != seen:
                seen = wire.rounds
                with wire.shared_parameters():
                    shared = [checksum(each) for each in model.parameters()]
                note(round=seen, shared=shared, members=wire.members)
        wire.detach()
        lost = [str(each) for each in wire.events if each.what in ("dropped", "healed")]
        note(ended=wire.attempts, lost=lost)


def started(args: argparse.Namespace, folder: Path, name: str, number: int, from_save: bool) -> Any:
    command = [sys.executable, "-m", "benchmarks.store_kills", "--site", name, "--folder", str(folder)]
    command += ["--pause", str(args.pause), "--number", str(number)]
    command += ["--from-save"] if from_save else []
    with (folder / f"{number:04d}.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What each process has noted, by its number. A last line that is not whole does not count."""
    found = {}
    for path in sorted((folder / "notes").glob("*.jsonl")):
        whole = path.read_text().rpartition("\n")[0]
        found[int(path.stem)] = [json.loads(line) for line in whole.splitlines()]
    return found


def rounds_of(folder: Path) -> int:
    return max((line.get("round", 0) for lines in notes(folder).values() for line in lines), default=0)


def has_landed(folder: Path, number: int) -> bool:
    """Whether a process has had a round."""
    return any("shared" in line for line in notes(folder).get(number, []))


def run(args: argparse.Namespace, folder: Path) -> tuple[list[float], dict[str, list[int]]]:
    """Train, kill and start again. Returns when it killed, and the numbers of each site's processes."""
    (folder / "notes").mkdir()
    draw = random.Random(args.seed)
    names = [f"site-{number}" for number in range(args.sites)]
    here = {name: started(args, folder, name, number, False) for number, name in enumerate(names)}
    of = {name: [number] for number, name in enumerate(names)}
    kills = list[float]()
    try:
        while True:
            due = (len(kills) + 1) * args.rounds // (args.kills + 1)
            while rounds_of(folder) < due or not all(has_landed(folder, each[-1]) for each in of.values()):
                time.sleep(0.2)
                for name, process in here.items():
                    if process.poll() is not None:
                        raise SystemExit(f"{name} has ended with {process.poll()}: see its log in {folder}")
            if len(kills) == args.kills:
                break
            time.sleep(draw.uniform(0.0, 1.0))
            name = draw.choice(names)
            here[name].send_signal(signal.SIGKILL)
            here[name].wait()
            kills.append(time.time())
            number = sum(map(len, of.values()))
            of[name].append(number)
            here[name] = started(args, folder, name, number, from_save=len(kills) % 2 == 0)
        (folder / "stop").touch()
        codes = {name: process.wait() for name, process in here.items()}
    finally:
        for process in here.values():
            process.kill()
    if any(codes.values()):
        raise SystemExit(f"exit codes {codes}: see the logs in {folder}")
    return kills, of


def compare(folder: Path, of: dict[str, list[int]], rounds: int) -> dict[str, Any]:
    """Compare what processes have noted with the seals. Raises `AssertionError` for what must not be."""
    noted = notes(folder)
    shared: dict[int, Any] = {}
    for lines in noted.values():
        for line in lines:
            if "shared" in line:
                assert shared.setdefault(line["round"], line["shared"]) == line["shared"], "replicas differ"
    store, weights, sealed, empty = Bucket(str(folder / "run")), defaultdict[str, float](float), 0, 0
    while (data := store.get(seal_key(sealed))) is not None:
        seal = Seal.of(data)
        assert len(set(seal.names)) == len(seal.names), "named twice"
        empty += not seal.offers
        for each, (_key, name, number) in zip(
            seal.offers, processes(each.key for each in seal.offers), strict=True
        ):
            weights[f"{name}-{number}"] += each.weight
        sealed += 1
    assert sealed >= rounds, f"{sealed} rounds"
    told: dict[str, Any] = {"rounds": sealed, "empty": empty, "lost": []}
    told |= dict.fromkeys(("counted", "held", "killed"), 0)
    for name, numbers in of.items():
        for incarnation, number in enumerate(numbers):
            lines = noted.get(number, [])
            counted = round(EVERY * weights[f"{name}-{incarnation}"])
            told["counted"] += counted
            if not lines or "ended" not in lines[-1]:
                told["killed"] += 1
                continue
            made = lines[-1]["ended"] - lines[0]["began"]
            told["lost"] += lines[-1]["lost"]
            if not lines[-1]["lost"]:
                assert 0 <= made - counted < 2 * EVERY, f"{name}: {made} steps, {counted} counted, none lost"
                told["held"] += made - counted
    return told


def waits(folder: Path, of: dict[str, list[int]], kills: list[float]) -> tuple[float, list[float]]:
    """The median of the seconds from round to round, and the longest after each kill, on those that lived."""
    spans = list[tuple[float, float]]()
    for lines in notes(folder).values():
        at = [line["at"] for line in lines if "shared" in line]
        spans += pairwise(at)
    after = [max((b - a for a, b in spans if a <= kill < b), default=0.0) for kill in kills]
    calm = [b - a for a, b in spans if not any(a <= kill < b for kill in kills)]
    return median(calm), after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds after each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--site")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--from-save", action="store_true")
    args = parser.parse_args()
    if args.site is not None:
        site(args.site, args.folder, args.number, args.pause, args.from_save)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        kills, of = run(args, folder)
        told = compare(folder, of, args.rounds)
        calm_s, after_s = waits(folder, of, kills)
    dead_s = Rules(beat_s=BEAT_S).dead_s
    found = told | {"calm_s": calm_s, "after_kill_s": after_s, "dead_s": dead_s, "patience_s": PATIENCE_S}
    print(
        f"{told['rounds']} rounds, {len(kills)} kills: replicas alike; {told['counted']} steps counted, "
        f"{told['held']} held at the end, {told['empty']} rounds sealed without an offer"
    )
    print(
        f"a round takes {calm_s:.2f} s; one with a kill at most {max(after_s, default=0.0):.1f} s, in the "
        f"median {median(after_s or [0.0]):.1f} s; a dead site is not waited for after {dead_s:.0f} s"
    )
    for line in told["lost"]:
        print(f"  {line}")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
