"""How long is an offer on its way over a slow link to a store, beside what its bytes take?

    python -m benchmarks.store_link --sites 4 --rate 50mbit --delay 50ms --rounds 12 --json FILE

Each site is a process in a network namespace of its own, behind an emulated link, and meets the others by
`gradwire.members.store` over a server of S3's protocol, which has the delay and no limit of rate. The model
is a stack of square matrices, with `--millions` of parameters. Sites begin over a fast network, which is slow
once all are there. They share this machine's cores, so each one waits with its coded offer until all have
coded: sites of equal speed would offer at the same time.

Lines say, of all rounds but the first,

- the seconds from coded to received (the offers are read, and the seal), on the last site and in the median,
  beside those of the offers' bytes (one up, all others down) and 8 round trips: the goal is 1.3 times that;
- the requests in them, one after the other;
- coding, from `optimizer.step()` to the coded offer, and landing, from received to its end;
- the same of rounds during which a snapshot was written, and its rate beside the link's.

Needs Linux, and obstore. A site takes about 40 bytes of memory a parameter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import gradwire
from benchmarks import s3
from gradwire.members.bucket.objects import Objects
from gradwire.members.bucket.records import OFFERS, THETAS, offers_of, seal_key
from gradwire_lab import emulate

WIDTH, EVERY, BATCH = 2048, 2, 4
TRIPS, TIMES = 8, 1.3
"""Of the goal."""
WITHIN_S = 900.0

Note = dict[str, Any]


class Noted:
    """`Objects` whose requests are noted, and which waits with an offer until all sites have coded theirs."""

    def __init__(self, objects: Objects, folder: Path, place: int, sites: int) -> None:
        self._objects, self._folder, self._place, self._sites = objects, folder, place, sites
        self.pause, self.now_s = objects.pause, objects.now_s
        self.requests: list[Note] = []
        self.coded_s = 0.0
        """When this site had coded its last offer."""

    def _noted(self, what: str, key: str, ask: Any, size: int = 0) -> Any:
        note = {"what": what, "key": key, "from": time.monotonic(), "size": size}
        self.requests.append(note)
        try:
            found = ask()
            note["size"] = size or len(found or b"") if what == "get" else size
            return found
        finally:
            note["to"] = time.monotonic()

    def create(self, key: str, data: bytes) -> bool:
        if key.startswith(f"{OFFERS}/"):
            self.coded_s = time.monotonic()
            meet(self._folder, key.split("/")[1], self._place, self._sites)
        found: bool = self._noted("create", key, lambda: self._objects.create(key, data), len(data))
        return found

    def put(self, key: str, data: bytes) -> None:
        self._noted("put", key, lambda: self._objects.put(key, data), len(data))

    def upload(self, key: str, data: bytes, bytes_per_s: float = math.inf) -> None:
        self._noted("upload", key, lambda: self._objects.upload(key, data, bytes_per_s), len(data))

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._noted("get", key, lambda: self._objects.get(key))
        return found

    def list(self, prefix: str) -> dict[str, float]:
        found: dict[str, float] = self._noted("list", prefix, lambda: self._objects.list(prefix))
        return found

    def delete(self, keys: Sequence[str]) -> None:
        self._noted("delete", str(len(keys)), lambda: self._objects.delete(keys))


def meet(folder: Path, what: str, place: int, sites: int) -> None:
    """Wait until all sites are here."""
    (folder / f"{what}.{place}").touch()
    until_s = time.monotonic() + WITHIN_S
    while not all((folder / f"{what}.{other}").exists() for other in range(sites)):
        if time.monotonic() > until_s:
            raise TimeoutError(f"others have not come to {what}")
        time.sleep(0.005)


def site(args: argparse.Namespace, place: int, folder: Path) -> None:
    """Train until there were enough rounds; write what was noted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = max(1, round(1e6 * args.millions / WIDTH**2))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    s3.once_there(args.sites)
    if place:  # the first one begins the run, and the others read from it one after the other
        meet(folder, "here", place, place)
    members = gradwire.members.store(
        f"s3://{s3.BUCKET}/run",
        f"site-{place}",
        at_least=args.sites,
        patience_s=WITHIN_S,
        snapshot_every=args.snapshot_every,
    )
    members.objects = noted = Noted(members.objects, folder, place, args.sites)  # type: ignore[assignment]
    wire = gradwire.outer(model, optimizer, args.recipe, every=EVERY, members=members)
    meet(folder, "here", place, args.sites)
    while not (folder / "go").exists():
        time.sleep(0.05)
    noted.requests.clear()
    steps, before = list[Note](), emulate.counters()
    while wire.rounds < args.rounds:
        for _ in range(EVERY):
            optimizer.zero_grad()
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            start_s = time.monotonic()
            optimizer.step()
        steps.append({"from": start_s, "coded": noted.coded_s, "to": time.monotonic()})
    after = emulate.counters()
    assert before is not None
    assert after is not None
    meet(folder, "end", place, args.sites)
    told = {
        "steps": steps,
        "requests": noted.requests,
        "bytes": [after.tx_bytes - before.tx_bytes, after.rx_bytes - before.rx_bytes],
        "parameters": sum(each.numel() for each in model.parameters()),
        "resident_kib": peak_kib(),
    }
    (folder / f"{place}.json").write_text(json.dumps(told))
    os._exit(0)  # without the rest of a snapshot, which takes minutes


def peak_kib() -> int:
    """The most memory that this process has had."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1])


def run(args: argparse.Namespace) -> list[Note]:
    """The notes of all sites."""
    link = emulate.EmulatedLink(emulate.parse_rate(args.rate), emulate.parse_delay(args.delay))
    with (
        tempfile.TemporaryDirectory() as name,
        emulate.EmulatedNetwork(
            args.sites + 1, emulate.EmulatedLink(), emulate.enter(), servers=1
        ) as network,
    ):
        folder = Path(name)
        with (folder / "server.log").open("w") as log:
            environment = os.environ | s3.started(network, args.sites, stdout=log, stderr=log)
        sites = []
        for place in range(args.sites):
            command = [sys.executable, "-m", "benchmarks.store_link", *sys.argv[1:]]
            command += ["--site", str(place), "--folder", name]
            sites.append(network.popen(place, command, env=environment))
        while not all((folder / f"here.{place}").exists() for place in range(args.sites)):
            ended(sites)
        network.reshape(link)
        (folder / "go").touch()
        while any(each.poll() is None for each in sites):
            ended(sites)
        ended(sites)
        return [json.loads((folder / f"{place}.json").read_text()) for place in range(args.sites)]


def ended(sites: Sequence[subprocess.Popen[Any]]) -> None:
    """Wait a moment. Raises `SystemExit` if a site has failed."""
    time.sleep(0.1)
    if codes := [each.returncode for each in sites if each.poll()]:
        raise SystemExit(f"sites ended with {codes}")


def rounds_of(notes: Sequence[Note]) -> list[Note]:
    """Of each round: when the last site had coded, and the times of each site."""
    found = []
    for number in range(1, len(notes[0]["steps"])):
        sent_s, sites = 0.0, []
        for told in notes:
            step = told["steps"][number]
            asked = [each for each in told["requests"] if step["from"] <= each["from"] <= step["to"]]
            created = (each for each in asked if each["what"] == "create")
            (offer,) = (each for each in created if each["key"].startswith(offers_of(number)))
            those = (offers_of(number), seal_key(number))
            received_s = max(
                each["to"]
                for each in asked
                if each["key"].startswith(those) and each["what"] in ("create", "get")
            )
            inside = [
                each
                for each in asked
                if offer["from"] <= each["from"] < received_s and each["what"] in ("create", "get", "list")
            ]
            sent_s = max(sent_s, offer["from"])
            sites.append(
                {
                    "offer": offer["size"],
                    "received": received_s,
                    "requests": len(inside),
                    "coding": step["coded"] - step["from"],
                    "landing": step["to"] - received_s,
                }
            )
        writes = [
            each
            for told in notes
            for each in told["requests"]
            if each["key"].startswith(THETAS)
            and each["from"] < max(one["received"] for one in sites)
            and each.get("to", math.inf) > sent_s
        ]
        found.append({"sent": sent_s, "sites": sites, "snapshot": bool(writes)})
    return found


def report(args: argparse.Namespace, notes: Sequence[Note]) -> Note:
    """Print the figures."""
    rate, delay_s = emulate.parse_rate(args.rate), emulate.parse_delay(args.delay)
    rounds = rounds_of(notes)
    offer = max(one["offer"] for each in rounds for one in each["sites"])
    bytes_s = 8.0 * offer * args.sites / rate if rate else 0.0
    least_s = bytes_s + TRIPS * 2.0 * delay_s
    print(
        f"{notes[0]['parameters'] / 1e6:.1f} M parameters, {args.sites} sites, {args.recipe}: an offer has "
        f"{offer / 1e6:.3f} MB; {args.sites} of them take {bytes_s:.2f} s, with {TRIPS} round trips "
        f"{least_s:.2f} s; at most {TIMES * least_s:.2f} s wanted"
    )
    told: Note = {"offer": offer, "bytes_s": bytes_s, "least_s": least_s}
    for is_beside in (False, True):
        those = [each for each in rounds if each["snapshot"] == is_beside]
        if not those:
            continue
        last = [max(one["received"] for one in each["sites"]) - each["sent"] for each in those]
        each_one = [one["received"] - each["sent"] for each in those for one in each["sites"]]
        what = "beside a snapshot" if is_beside else "without a snapshot"
        print(
            f"{len(those)} rounds {what}: from coded to received {median(each_one):.2f} s in the median of "
            f"sites, {median(last):.2f} s ({min(last):.2f} to {max(last):.2f}) on the last one, "
            f"{median(last) / least_s:.2f} of that"
        )
        told[what] = {"last_s": last, "all_s": each_one}
    for what in ("coding", "landing"):
        took_s = [one[what] for each in rounds for one in each["sites"]]
        print(f"{what}: {median(took_s):.2f} s in the median, {max(took_s):.2f} s at most")
        told[what] = took_s
    asked = [one["requests"] for each in rounds for one in each["sites"]]
    print(f"requests from coded to received: {median(asked):.0f} in the median, {max(asked)} at most")
    least = min(each["bytes"][0] for each in notes)
    for each in notes:
        for write in (one for one in each["requests"] if one["what"] == "upload"):
            took_s = min(write.get("to", math.inf), each["steps"][-1]["to"]) - write["from"]
            told["snapshot_bit_per_s"] = 8.0 * (each["bytes"][0] - least) / took_s
            print(
                f"a snapshot of {write['size'] / 1e6:.0f} MB is written at "
                f"{told['snapshot_bit_per_s'] / 1e6:.2f} Mbit/s ({took_s:.0f} s of it were seen)"
            )
    print(f"memory of a site: {max(each['resident_kib'] for each in notes) / 2**20:.2f} GiB at most")
    return told


def main() -> None:
    """Run all sites, and print what they have noted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--millions", type=float, default=100.0, help="of parameters")
    parser.add_argument("--recipe", default="sparseloco")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--snapshot-every", type=int, default=6, help="rounds")
    parser.add_argument("--rate", default="50mbit", help="of each site's link")
    parser.add_argument("--delay", default="50ms", help="one way")
    parser.add_argument("--json", type=Path, help="write all that sites have noted to this file")
    parser.add_argument("--site", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.site is not None:
        site(args, args.site, args.folder)
        return
    if emulate.enter() == "backend":
        parser.error("sites need network namespaces: see gradwire net check")
    notes = run(args)
    found = report(args, notes)
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": found, "notes": notes}))


if __name__ == "__main__":
    main()
