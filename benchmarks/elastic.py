"""Rounds whose replicas are killed and come back: gradwire's `members=`, by torchft's lighthouse and over a
store, beside torchft's own DiLoCo.

    python -m benchmarks.elastic --rounds 40 --kill-every 10 --rate 100mbit --latency 50ms --json FILE

Each member is a process in a network namespace of its own, behind an emulated link. The lighthouse and the
store, a server of S3's protocol, have the link's delay and no limit of rate. All peers train the same model
on the same data. One member is killed after every so many rounds of the first member, at a drawn moment, and
starts again three rounds later. The first one is never killed.

For each peer, lines say

- seconds from one round to the next, on the first member, without those of its evaluations: undisturbed, and
  where a member was killed. A round whose result is thrown away is part of the next;
- bytes that left and reached a member's interface in an undisturbed round, with headers, heartbeats and
  questions, and over a store with its share of snapshots;
- steps that members have made, and those of them that no round has counted;
- open files (sockets among them), threads and resident memory, after the second round and at the end;
- losses on the held-out text after equal numbers of rounds, and the seconds until torchft's last loss;
- of gradwire, seconds of healing beside those that its bytes take at the link's rate.

Losses with churn, beside those without:

    python -m benchmarks.elastic --losses --seeds 0 1 2 3 4 --rounds 20 --kill-every 5 --json FILE

Three runs for each seed: undisturbed, with kills, and undisturbed with members in the reverse order, which
changes the order of summation and random rounding, and nothing else. Losses are compared at equal numbers of
steps that a round has counted. The line says the mean of the paired differences, and its standard error.

Needs Linux, torchft, and obstore for the store (`pip install 'gradwire[elastic,store]'`). `--peers gradwire`
leaves the others out.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import nn

import gradwire
from benchmarks import s3
from gradwire.members.bucket.objects import Bucket
from gradwire.members.bucket.progress import sealed
from gradwire.quantities import time_s
from gradwire_lab import emulate
from gradwire_lab.emulate.topology import address
from gradwire_lab.workloads.catalogue import workload

PORT, URL = 29510, f"s3://{s3.BUCKET}/run"
AWAY = 3
"""Rounds after which a killed member starts again."""
END_S = 20.0
"""So long the members of the last round have to note it once the first member has."""
HEADROOM = 0.02
"""A loss so little above another is reached."""

Note = dict[str, Any]


@dataclass(frozen=True)
class Play:
    """One run of one peer: a member's place is its share of the data, and its name gives its rank."""

    peer: str
    recipe: str
    model: str
    members: int
    rounds: int
    every: int
    look_every: int
    seed: int
    timeout_s: float
    dead_s: float
    grace_s: float
    kill_every: int
    """0 for none."""
    is_reversed: bool = False

    def name(self, place: int) -> str:
        """Of the member at `place`."""
        return f"site-{self.members - 1 - place if self.is_reversed else place}"


@dataclass
class Outcome:
    """The things that members have noted, by place, and kills: place and time."""

    play: Play
    notes: list[list[Note]] = field(default_factory=list)
    kills: list[tuple[int, float]] = field(default_factory=list)
    made: int = 0
    """Steps of all members."""
    counted: float = 0.0
    """Of these, the steps that rounds have counted."""


def main() -> None:
    """Run each peer with the kills, and print what its members have noted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every", type=int, default=30, help="steps in a round")
    parser.add_argument("--kill-every", type=int, default=10, help="rounds")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--model", default="chargpt")
    parser.add_argument("--rate", default="unlimited", help="of each member's link: 100mbit")
    parser.add_argument("--latency", default="0", help="one way: 50ms")
    parser.add_argument("--heartbeat-timeout", default="3s", help="over a store 5s at least")
    parser.add_argument("--grace", default="10s", help="over a store the patience")
    parser.add_argument("--timeout", type=float, default=60.0, help="of the first exchange, in seconds")
    parser.add_argument("--look-every", type=int, default=1, help="rounds from evaluation to evaluation")
    parser.add_argument("--peers", nargs="+", default=["gradwire", "store", "torchft"], choices=_MEMBERS)
    parser.add_argument("--losses", action="store_true", help="compare losses with churn and without")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--json", type=Path, help="write all that members have noted to this file")
    parser.add_argument("--member", nargs=3, metavar=("PLAY", "PLACE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.member:
        play, place, folder = asked.member
        train(Play(**json.loads(play)), int(place), Path(folder))
        return
    if emulate.enter() == "backend":
        parser.error("members need network namespaces: see gradwire net check")
    kept: list[Outcome] = []

    def played(peer: str, seed: int, **options: Any) -> Outcome:
        settings = {"kill_every": asked.kill_every, **options}
        play = Play(
            peer,
            asked.recipe,
            asked.model,
            asked.members,
            asked.rounds,
            asked.every,
            asked.look_every,
            seed,
            asked.timeout,
            time_s(asked.heartbeat_timeout),
            time_s(asked.grace),
            **settings,
        )
        kept.append(run(play, asked))
        if asked.json is not None:
            asked.json.write_text(json.dumps([asdict(each) for each in kept]))
        return kept[-1]

    if asked.losses:
        compare_losses(asked, played)
    else:
        for seed in asked.seeds:
            outcomes = []
            for peer in asked.peers:
                outcomes.append(played(peer, seed))
                report(outcomes[-1], emulate.parse_rate(asked.rate))
            if outcomes[-1].play.peer == "torchft":
                for each in outcomes[:-1]:
                    compare_times(each, outcomes[-1])


# -- a run


def run(play: Play, asked: argparse.Namespace) -> Outcome:
    """Start a lighthouse or a store, and all members; kill one now and then, and start it again."""
    link = emulate.EmulatedLink(emulate.parse_rate(asked.rate), emulate.parse_delay(asked.latency))
    outcome, draw = Outcome(play), random.Random(play.seed)
    with (
        tempfile.TemporaryDirectory() as name,
        emulate.EmulatedNetwork(play.members + 1, link, emulate.enter(), servers=1) as network,
    ):
        folder, environment = Path(name), dict(os.environ)

        def start(place: int) -> subprocess.Popen[Any]:
            own = ["--member", json.dumps(asdict(play)), str(place), str(folder)]
            with (folder / f"{place}.log").open("ab") as log:
                command = [sys.executable, "-m", "benchmarks.elastic", *own]
                return network.popen(place, command, env=environment, stdout=log, stderr=log)

        lighthouse = ["lighthouse", "--at-least", "1", "--bind", f"{address(play.members)}:{PORT}"]
        lighthouse += ["--grace", asked.grace, "--heartbeat-timeout", asked.heartbeat_timeout]
        with (folder / "server.log").open("ab") as log:
            if play.peer == "store":
                environment |= s3.started(network, play.members, stdout=log, stderr=log)
            else:
                command = [sys.executable, "-m", "gradwire", *lighthouse]
                network.popen(play.members, command, stdout=log, stderr=log)
        running, down = {place: start(place) for place in range(play.members)}, dict[int, int]()
        first, seen = folder / "0.jsonl", 0
        is_begun = False
        while running[0].poll() is None:
            time.sleep(0.05)
            is_begun = is_begun or _let_begin(folder, play.members)
            now = len(noted(first))
            for place in [place for place, since in down.items() if now >= since + AWAY]:
                running[place] = start(place)
                del down[place]
            is_time = play.kill_every and now % play.kill_every == play.kill_every - 1
            if now > seen and is_time and now < play.rounds - AWAY - 1:
                victim = 1 + (now // play.kill_every) % (play.members - 1)
                time.sleep(draw.uniform(0.0, noted(first)[-1]["period_s"]))
                running[victim].send_signal(signal.SIGKILL)
                running[victim].wait()
                outcome.kills.append((victim, time.time()))
                down[victim] = now
            seen = max(seen, now)
        for place, process in running.items():
            if process.poll():
                told = (folder / f"{place}.log").read_text(errors="replace").splitlines()[-12:]
                print(f"{play.name(place)} ended with {process.poll()}:", *told, sep="\n  ", file=sys.stderr)
        if running[0].poll():
            raise SystemExit(1)
        until_s, there = time.monotonic() + END_S, 0
        while there < noted(first)[-1]["members"] and time.monotonic() < until_s:
            time.sleep(0.05)
            outcome.notes = [noted(folder / f"{place}.jsonl") for place in range(play.members)]
            there = sum(bool(each) and each[-1]["round"] == play.rounds for each in outcome.notes)
        outcome.made = sum((folder / f"{place}.steps").stat().st_size for place in range(play.members))
        outcome.counted = sum(each["steps"] for notes in outcome.notes for each in notes)
        if (told := folder / "counted").exists():
            outcome.counted = float(told.read_text())
    return outcome


def _let_begin(folder: Path, members: int) -> bool:
    """Whether all members are here: then their first round is one of all."""
    are_here = all((folder / f"{place}.here").exists() for place in range(members))
    if are_here:
        (folder / "go").touch()
    return are_here


def noted(path: Path) -> list[Note]:
    """The rounds that a member has noted."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


# -- figures


def periods(outcome: Outcome) -> tuple[list[Note], list[list[Note]]]:
    """Rounds of the first member that nothing disturbed; and of each kill the round in which it came and the
    next, of which one waits for the dead member.
    """
    rounds, ends = outcome.notes[0], [each["at"] for each in outcome.notes[0]]
    hit = {next((i for i, end in enumerate(ends) if end > at), -1) for _place, at in outcome.kills} - {-1}
    after = hit | {i + 1 for i in hit}
    usual = [
        each
        for i, each in enumerate(rounds)
        if i > 1 and i not in after and each["members"] == rounds[i - 1]["members"] and not each["events"]
    ]
    return usual, [rounds[i : i + 2] for i in sorted(hit)]


def report(outcome: Outcome, rate_bit_s: float | None) -> None:
    """Print the figures of a run."""
    play, (usual, killed) = outcome.play, periods(outcome)
    who = play.peer if play.peer == "torchft" else f"{play.peer}, {play.recipe}"
    first, usual_s = outcome.notes[0], median(each["period_s"] for each in usual)
    rounds = {each["round"] for each in usual}
    moved = {
        what: median(each[what] for notes in outcome.notes for each in notes if each["round"] in rounds)
        for what in ("sent_bytes", "received_bytes")
    }
    inside = median(
        min(each["waited_s"] for notes in outcome.notes for each in notes if each["round"] == round_)
        for round_ in rounds
    )
    told = ", ".join(f"{sum(one['period_s'] - usual_s for one in each):+.2f}" for each in killed)
    print(
        f"{who}: {len(first)} rounds in {first[-1]['at'] - first[0]['at']:.0f} s, {len(killed)} with a kill"
    )
    print(f"{who}: a round takes {usual_s:.2f} s, of which {inside:.2f} s inside of step()")
    print(f"{who}: a kill costs {told or '-'} s")
    print(
        f"{who}: {moved['sent_bytes'] / 1e6:.3f} MB leave a member in a round, and "
        f"{moved['received_bytes'] / 1e6:.3f} MB reach it"
    )
    print(
        f"{who}: {outcome.made} steps made, {outcome.made - outcome.counted:.0f} of them not counted; the "
        f"first member was {sum(each['waited_s'] for each in first):.1f} s inside of step()"
    )
    print(
        f"{who}: after round {first[1]['round']} and at the end: files {first[1]['files']}, "
        f"{first[-1]['files']}; threads {first[1]['threads']}, {first[-1]['threads']}; "
        f"MB {first[1]['resident_bytes'] / 1e6:.0f}, {first[-1]['resident_bytes'] / 1e6:.0f}"
    )
    looks = ", ".join(f"{each['round']}: {each['test_loss']:.4f}" for each in first if "test_loss" in each)
    print(f"{who}: losses {looks}")
    for notes in outcome.notes:
        for what, names, seconds, moved in (event for each in notes for event in each["events"]):
            if what == "healed" and list(names) == [notes[0]["name"]]:
                least = f", its bytes alone {8 * moved / rate_bit_s:.2f} s" if rate_bit_s else ""
                print(f"{who}: healing {names[0]} took {seconds:.2f} s for {moved / 1e6:.1f} MB{least}")
        if (events := [event for each in notes for event in each["events"]]) and notes is outcome.notes[0]:
            failed = sum(what == "failed" for what, *_ in events)
            print(f"{who}: {failed} exchanges of the first member failed")


def compare_times(one: Outcome, other: Outcome) -> None:
    """The first one's seconds until the last loss of the other."""
    looks, theirs = ([each for each in of.notes[0] if "test_loss" in each] for of in (one, other))
    target = theirs[-1]["test_loss"] + HEADROOM
    there = next((each for each in looks if each["test_loss"] <= target), None)
    their_s = theirs[-1]["at"] - other.notes[0][0]["began"]
    if there is None:
        print(f"{one.play.peer} does not come to {target:.4f}")
        return
    own_s = there["at"] - one.notes[0][0]["began"]
    print(
        f"{one.play.peer} is at {other.play.peer}'s last loss and {HEADROOM}, {target:.4f}, after "
        f"{own_s:.1f} s, {own_s / their_s:.2f} of its {their_s:.1f} s"
    )


def compare_losses(asked: argparse.Namespace, played: Any) -> None:
    """Print paired differences of last losses, of kills and of another order, over the seeds."""
    differences: dict[str, list[float]] = defaultdict(list)
    for seed in asked.seeds:
        plain = curve(played("gradwire", seed, kill_every=0))
        for what, options in {"churn": {}, "order": {"kill_every": 0, "is_reversed": True}}.items():
            counted, losses = curve(played("gradwire", seed, **options))
            differences[what].append(losses[-1] - float(np.interp(counted[-1], *plain)))
        print(f"seed {seed}: loss {plain[1][-1]:.4f}", end="")
        print("".join(f", {what} {found[-1]:+.4f}" for what, found in differences.items()), flush=True)
    for what, found in differences.items():
        error = f" ± {stdev(found) / len(found) ** 0.5:.4f}" if len(found) > 1 else ""
        print(f"{what}: {fmean(found):+.4f}{error}")


def curve(outcome: Outcome) -> tuple[Sequence[float], Sequence[float]]:
    """Steps that rounds have counted so far, and losses, where the first member has looked."""
    counted: dict[int, int] = defaultdict(int)
    for each in (each for notes in outcome.notes for each in notes):
        counted[each["round"]] += each["steps"]
    looks = [each for each in outcome.notes[0] if "test_loss" in each]
    steps = [sum(n for at, n in counted.items() if at <= each["round"]) for each in looks]
    return steps, [each["test_loss"] for each in looks]


# -- a member


class Member:
    """One process: the model, its data, and a line for each round."""

    def __init__(self, play: Play, place: int, folder: Path) -> None:
        torch.set_num_threads(1)
        self.play, self.place, self.folder = play, place, folder
        self.name = play.name(place)
        self.task = workload(play.model)
        self.model = self.task.model(play.seed)
        self.optimizer = self.task.optimizer(self.model.parameters())
        self._data = self.task.batches(place, play.members, play.seed)
        self._steps = (folder / f"{place}.steps").open("ab", buffering=0)
        self.waited_s = 0.0

    def wait_for_others(self) -> None:
        """At the start of the run; a member that starts again goes on at once."""
        (self.folder / f"{self.place}.here").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.02)
        self._began = time.time()
        self._last_s, self._moved = time.perf_counter(), moved_bytes()

    def step(self) -> None:
        """One local step, and the round if one is due."""
        self.optimizer.zero_grad()
        self.task.loss(self.model, next(self._data)).backward()
        start_s = time.perf_counter()
        self._steps.write(b".")
        self.optimizer.step()
        self.waited_s += time.perf_counter() - start_s

    def note(self, round_: int, steps: int, members: int, events: list[Any], shown: nn.Module) -> None:
        """A round has landed, which has counted `steps` of this member."""
        now_s, moved = time.perf_counter(), moved_bytes() - self._moved
        told = {
            "name": self.name,
            "round": round_,
            "steps": steps,
            "members": members,
            "period_s": now_s - self._last_s,
            "waited_s": self.waited_s,
            "sent_bytes": moved.tx_bytes,
            "received_bytes": moved.rx_bytes,
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "resident_bytes": resident_bytes(),
            "events": events,
            "began": self._began,
            "at": time.time(),
        }
        if self.place == 0 and round_ % self.play.look_every == 0:
            told["test_loss"] = self.task.evaluate(shown)["test_loss"]
        with (self.folder / f"{self.place}.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")
        self._last_s, self._moved, self.waited_s = time.perf_counter(), moved_bytes(), 0.0


def moved_bytes() -> emulate.Counters:
    """Bytes that have left and reached this member's interface."""
    found = emulate.counters()
    assert found is not None, "in a network namespace"
    return found


def resident_bytes() -> int:
    """Memory of this process."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def train(play: Play, place: int, folder: Path) -> None:
    """One member, until there were enough rounds."""
    _MEMBERS[play.peer](Member(play, place, folder), f"http://{address(play.members)}:{PORT}")


def _by_lighthouse(member: Member, url: str) -> None:
    members = _once_there(lambda: gradwire.members.torchft(url, name=member.name))
    member.wait_for_others()
    _trained(member, members=members, timeout_s=member.play.timeout_s)


def _over_store(member: Member, _url: str) -> None:
    play = member.play
    s3.once_there(play.members)
    members = gradwire.members.store(
        URL, member.name, at_least=1, patience_s=play.grace_s, beat_s=play.dead_s / 3.0
    )
    member.wait_for_others()
    _trained(member, members=members)
    if member.place == 0:
        found = [weight for each in sealed(Bucket(URL)) for weight in each.weights.values()]
        (member.folder / "counted").write_text(str(play.every * sum(found)))


def _trained(member: Member, **who: Any) -> None:
    play = member.play
    wire = gradwire.outer(member.model, member.optimizer, play.recipe, every=play.every, **who)
    seen, told, counted, began = wire.rounds, 0, wire.attempts, len(wire.events)
    while wire.rounds < play.rounds:
        member.step()
        if wire.rounds != seen:
            seen = wire.rounds
            events = [[e.what, e.who, e.seconds, e.sent_bytes] for e in wire.events[told:]]
            is_dropped = any(
                each.what == "healed" and member.name in each.who for each in wire.events[max(told, began) :]
            )
            steps = 0 if is_dropped else wire.attempts - counted
            told = len(wire.events)
            with wire.shared_parameters():
                member.note(seen, steps, len(wire.members), events, member.model)
            counted = wire.attempts
    wire.detach()


def _torchft(member: Member, url: str) -> None:
    import socket
    from datetime import timedelta

    play, here = member.play, address(member.place)
    socket.gethostname = lambda: here  # torchft tells others this name, which stands for no address here
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    model, limit = member.model, timedelta(seconds=play.timeout_s)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = torch.distributed.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    manager = _once_there(
        lambda: Manager(
            pg=ProcessGroupGloo(timeout=limit),
            load_state_dict=lambda state: model.load_state_dict(state["model"]),
            state_dict=lambda: {"model": model.state_dict()},
            min_replica_size=1,
            use_async_quorum=False,
            replica_id=member.name,
            lighthouse_addr=url,
            hostname=here,
            store_addr=here,
            store_port=store.port,
            rank=0,
            world_size=1,
            timeout=limit,
            quorum_timeout=timedelta(seconds=600),
        )
    )
    member.wait_for_others()
    with DiLoCo(manager, [model], member.optimizer, outer, sync_every=play.every, use_bucketization=True):
        while manager.current_step() < play.rounds:
            seen = manager.current_step()
            member.step()
            if manager.current_step() != seen:
                # One that has just been healed sends zeros.
                steps = play.every if manager.current_step() == seen + 1 else 0
                member.note(manager.current_step(), steps, manager.num_participants(), [], model)
    manager.shutdown()


def _once_there(connect: Any) -> Any:
    """The result of `connect`, once the lighthouse has started."""
    until_s = time.monotonic() + 60.0
    while True:
        try:
            return connect()
        except Exception:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)


_MEMBERS = {"gradwire": _by_lighthouse, "store": _over_store, "torchft": _torchft}

if __name__ == "__main__":
    main()
