"""How much processor time of the host does a recipe add to a step, per gradient bucket, unit and parameter?

Two ranks over loopback, with no slowed link, train 12 or 48 matrices of 64 x 64. DDP's buckets hold two of
them, and for 48 in a third shape eight, so that what a bucket takes and what a parameter takes can be told
apart. `int8` and `int4` also run cut into 24 units. Contestants are plain DDP (twice, which is the A/A
spread), torch's `fp16_compress_hook`, and recipes. torch's PowerSGD hook is left out, because it deadlocks
over gloo in such small buckets. With `--many 6000` the model has so many parameters of four elements instead.

A figure is the processor time of all threads of a rank per step, the mean of both ranks. All contestants are
alive at once, in processes of their own, and take turns of some steps, in another order each time. From turn
to turn they are compared in pairs, and the median over turns counts. That is done again in fresh processes,
and the intervals are Student's, 95 %, over these. A turn has 15 steps: whole cycles of `covap(3)`, and of the
five steps in which a verdict has its turn to go alone. Wall-clock time is not measured: two ranks on two
cores mostly wait for each other.

With `--src` recipes run by the source of another tree, too, such as that of the commit before, in the same
turns. The last table then tells what is left of what they took over DDP. Calls of `torch.distributed` are
counted in runs of their own, so that trees can be compared by number, sizes and order of what they send.

    python benchmarks/host_time.py [--src OTHER/src] [--recipes "dense;int4"] [--many 6000] [--processes 7]
        [--quick] [--json PATH]

By default it should take some ten minutes on two cores that do nothing else, up to twice that with `--src`.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from importlib import import_module
from math import sqrt
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from fast_link import MARK, OURS, Contestant, Ranks

HERE = Path(__file__).resolve()
RECIPES = "dense;fp16;int8;int4;topk(0.01);powersgd(1);covap(3)"
CUT = {f"{inner} in 24 units": f"mergecomp('{inner}', split='even', groups=24)" for inner in ("int8", "int4")}
EVERYTHING = "everything"
"""A kind of contestant: a recipe also for the parameters that are too small for it by default."""
DDP, AGAIN, HOOK = "ddp", "ddp again", "torch's fp16 hook"
OTHER = ", other tree"
STEPS = 15
"""Steps of a turn, and steps before the first one: DDP rebuilds its buckets in the second."""
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for a two-sided 95 % interval, by degrees of freedom, from one on."""
VERBS = (
    *("allreduce", "broadcast", "reduce", "allgather", "_allgather_base", "all_gather_single", "gather"),
    *("scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "alltoall"),
    *("alltoall_base", "all_to_all_single", "send", "barrier"),
)
"""Methods of a process group that send bytes; those that this version of torch does not have are left out."""


class Shape(NamedTuple):
    """A model of so many parameters. `together` of them fill one of DDP's buckets; 0 is DDP's default."""

    parameters: int
    size: tuple[int, ...]
    together: int

    def __str__(self) -> str:
        if len(self.size) == 1:
            return f"{self.parameters} parameters of {self.size[0]}"
        return f"{self.parameters} matrices, {self.buckets} buckets"

    @property
    def buckets(self) -> int:
        """As many as DDP makes."""
        return self.parameters // self.together


FEW, MANY, MERGED = (Shape(count, (64, 64), together) for count, together in ((12, 2), (48, 2), (48, 8)))


class Seat(NamedTuple):
    """A contestant with its model; it trains in two processes of its own."""

    contestant: Contestant
    shape: Shape

    def __str__(self) -> str:
        return f"{self.contestant.name} / {self.shape}"


Turns = Mapping[str, Sequence[float]]
"""Milliseconds per step of the turns of one set of processes, by seat."""


def model_of(shape: Shape, rank: int) -> tuple[Any, Any]:
    """A module, and its input. Values are such that gradients of all parameters are neither 0 nor huge."""
    import torch
    from torch import nn

    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ParameterList(nn.init.orthogonal_(torch.empty(shape.size)) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for matrix in self.each:
                x = x @ matrix
            return x.square().mean()

    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ParameterList(torch.randn(shape.size) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([vector * x for vector in self.each]).square().mean()

    count = shape.parameters
    torch.manual_seed(0)
    model = Vectors() if len(shape.size) == 1 else Matrices()
    torch.manual_seed(1 + rank)
    return model, torch.randn(shape.size) if len(shape.size) == 1 else torch.randn(4, shape.size[0])


class Calls:
    """The calls of process groups in this process, with the sizes of what they send, from now on.

    An all-to-all of two ranks counts as the message that it sends, and what is received goes without saying:
    which of both carries a sum may depend on how fast the link was measured to be.
    """

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import Backend

        self.seen: list[tuple[str, list[str]]] = []
        for kind in (dist.ProcessGroup, Backend):
            for verb in VERBS:
                if hasattr(kind, verb):
                    setattr(kind, verb, self._noting(verb, getattr(kind, verb)))

    def _noting(self, verb: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(group: Any, *arguments: Any, **named: Any) -> Any:
            if verb in ("alltoall_base", "all_to_all_single"):
                _received, sent, _splits, splits, *_ = arguments
                count = splits[1 - group.rank()] if splits else sent.numel() // 2
                self.seen.append(("message", [f"{count} {sent.dtype}"]))
            else:
                sizes = [f"{each.numel()} {each.dtype}" for each in _tensors((*arguments, *named.values()))]
                self.seen.append(("message" if verb == "send" else verb, sizes))
            return method(group, *arguments, **named)

        return noted

    def told(self, steps: int) -> dict[str, Any]:
        """Calls per step by verb, and a hash over their order and sizes."""
        counts = Counter(verb for verb, _sizes in self.seen)
        order = blake2b(json.dumps(self.seen).encode(), digest_size=4).hexdigest()
        return {"calls": {verb: count / steps for verb, count in sorted(counts.items())}, "order": order}


def _tensors(arguments: Sequence[Any]) -> Iterator[Any]:
    import torch

    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def rank_main(rank: int, port: int, seat: Sequence[Any], warm: int, counts: bool, pipe: Connection) -> None:
    """One rank of a seat: trains as many steps as it is told, until it is told `None`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    import gradwire

    entry, kind, shape = seat[0], seat[1], Shape(seat[2], tuple(seat[3]), seat[4])
    calls = Calls() if counts else None
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    module, inputs = model_of(shape, rank)
    cap = {"bucket_cap_mb": shape.together * 4096 * 4 / 2**20} if shape.together else {}
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, **cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    wire = None
    if kind != "peer":
        policy = {} if kind == EVERYTHING else None
        wire = gradwire.attach(model, optimizer, entry, policy=policy)
    elif entry == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).backward()
            optimizer.step()

    train(warm)
    pipe.send("ready")
    while (steps := pipe.recv()) is not None:
        if calls is not None:
            calls.seen.clear()
        before_s = time.process_time()
        train(steps)
        answer: dict[str, Any] = {"ms": 1e3 * (time.process_time() - before_s) / steps}
        if calls is not None:
            answer |= calls.told(steps) | _account(model, wire)
        pipe.send(answer)
    dist.destroy_process_group()


def _account(model: Any, wire: Any) -> dict[str, Any]:
    """DDP's buckets, and what the wire reports of units and bytes."""
    logged = model._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes", "")
    account: dict[str, Any] = {"buckets": len(str(sizes).split(","))}
    if wire is not None:
        report = wire.report()
        account |= {"units": report.units, "wire_bytes": report.wire_bytes_per_step}
    return account


class World:
    """The two ranks of a seat, forked from this process, which has imported torch and nothing runs in it."""

    def __init__(self, seat: Sequence[Any], warm: int, counts: bool) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        port = 0
        for rank in range(2):
            ours, theirs = context.Pipe()
            given = (rank, port, seat, warm, counts, theirs)
            context.Process(target=rank_main, args=given, daemon=True).start()
            theirs.close()  # so that a rank that dies ends what waits for it
            port = ours.recv()
            self._pipes.append(ours)
        self._answers()

    def train(self, steps: int) -> list[Any]:
        """The answers of both ranks."""
        for pipe in self._pipes:
            pipe.send(steps)
        return self._answers()

    def _answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


def serve() -> None:
    """Fork ranks and let them train, as lines of JSON say."""
    import torch

    import gradwire

    torch.set_num_threads(1)
    _ = gradwire.attach  # so that ranks are born with it, and with others' modules that they will load
    for module in ("torch._dynamo", "numba"):
        with suppress(ImportError):
            import_module(module)
    worlds: dict[str, World] = {}
    for line in sys.stdin:
        command = json.loads(line)
        name, answers = command["seat"], []
        if "shape" in command:
            worlds[name] = World(command["shape"], command["warm"], command["counts"])
        elif "steps" in command:
            answers = worlds[name].train(command["steps"])
        else:
            worlds.pop(name).end()
        print(MARK + json.dumps(answers), flush=True)


class Trees:
    """A process for each tree, from which its ranks are forked."""

    def __init__(self, sources: Sequence[Path]) -> None:
        named = {source: Contestant(f"{source}", "", "", source) for source in sources}
        self._servers = {source: Ranks(each, 1, HERE) for source, each in named.items()}

    def ask(self, seat: Seat, **command: Any) -> Any:
        """The answer of the server of the seat's tree."""
        return self._servers[seat.contestant.source].ask(seat=str(seat), **command)[0]

    def open(self, seat: Seat, warm: int, *, counts: bool = False) -> None:
        """Let the seat's ranks begin, and train `warm` steps."""
        each, shape = seat
        given = [each.entry, each.kind, shape.parameters, shape.size, shape.together]
        self.ask(seat, shape=given, warm=warm, counts=counts)

    def end(self) -> None:
        for server in self._servers.values():
            server.end()


@contextmanager
def started(seats: Sequence[Seat]) -> Iterator[Trees]:
    """Servers for all trees that `seats` name; they end with their ranks."""
    trees = Trees(sorted({seat.contestant.source for seat in seats}))
    try:
        yield trees
    finally:
        trees.end()


def counted(seats: Sequence[Seat], steps: int) -> dict[str, dict[str, Any]]:
    """What the first rank of each seat calls and reports in a turn, in a run of its own."""
    found = {}
    with started(seats) as trees:
        for seat in seats:
            trees.open(seat, steps, counts=True)
            found[str(seat)] = trees.ask(seat, steps=steps)[0]
            trees.ask(seat)
    return found


def timed(seats: Sequence[Seat], number: int, turns: int, steps: int) -> dict[str, list[float]]:
    """Processor time (ms) per step of each turn of each seat, in fresh processes, the `number`-th ones."""
    from gradwire_lab.bench.statistics import mixed

    found: dict[str, list[float]] = {str(seat): [] for seat in seats}
    with started(seats) as trees:
        for seat in seats:
            trees.open(seat, steps)
        for turn in range(turns):
            for seat in mixed(list(seats), number * turns + turn):
                found[str(seat)].append(fmean(each["ms"] for each in trees.ask(seat, steps=steps)))
    return found


class Figure(NamedTuple):
    """A mean over processes, and its 95 % interval."""

    mean: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        """Mean and interval.

        >>> Figure(1.5, 1.25, 1.75).text(2)
        '1.50 (1.25 to 1.75)'
        """
        mean, low, high = (f"{each:.{digits}f}" for each in self)
        return f"{mean} ({low} to {high})"


def figure(values: Sequence[float]) -> Figure:
    """From one value of each set of processes.

    >>> figure([1.0, 2.0, 3.0]).text(1)
    '2.0 (-0.5 to 4.5)'
    """
    freedom = len(values) - 1
    t = T_95[min(freedom, len(T_95)) - 1]
    half = t * stdev(values) / sqrt(len(values))
    return Figure(fmean(values), fmean(values) - half, fmean(values) + half)


def combined(processes: Sequence[Turns], weights: Mapping[str, float]) -> list[float]:
    """For each set of processes the median over turns of a sum of seats' times with `weights` (ms)."""
    found = []
    for turns in processes:
        rows = zip(*(turns[name] for name in weights), strict=True)
        found.append(median(sum(map(float.__mul__, weights.values(), row)) for row in rows))
    return found


def over_ddp(name: str, shape: Shape) -> dict[str, float]:
    """The weights of what a contestant takes more than DDP."""
    return {f"{name} / {shape}": 1.0, f"{DDP} / {shape}": -1.0}


def ratios(processes: Sequence[Turns], one: str, other: str) -> list[float]:
    """For each set of processes the median over turns of the ratio of two seats."""
    return [median(map(float.__truediv__, turns[one], turns[other])) for turns in processes]


def slope(
    processes: Sequence[Turns], name: str, longer: Shape, shorter: Shape, per: int, *, beside: bool
) -> Figure:
    """What a contestant takes in µs for each of the `per` things that `longer` has more than `shorter`.

    `beside` DDP: less what DDP takes for them.
    """
    names = [name, DDP] if beside else [name]
    signs = zip(names, (1.0, -1.0), strict=False)
    weights = {}
    for each, sign in signs:
        weights |= {f"{each} / {longer}": 1e3 * sign / per, f"{each} / {shorter}": -1e3 * sign / per}
    return figure(combined(processes, weights))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def times(some: Sequence[Contestant], seats: Sequence[Seat], processes: Sequence[Turns]) -> str:
    """Processor time of a step, and over DDP's."""
    shapes = list(dict.fromkeys(seat.shape for seat in seats))
    head, rows = ["contestant"], []
    for shape in shapes:
        head += [f"{shape}: ms", "over DDP's"]
    for each in some:
        row = [f"`{each.name}`"]
        for shape in shapes:
            seat = f"{each.name} / {shape}"
            if seat in processes[0]:
                row.append(figure([median(turns[seat]) for turns in processes]).text(1))
                row.append(figure(ratios(processes, seat, f"{DDP} / {shape}")).text(3))
            else:
                row += ["", ""]
        rows.append(row)
    return table(head, rows)


def slopes(
    some: Sequence[Contestant], processes: Sequence[Turns], accounts: Mapping[str, Mapping[str, Any]]
) -> str:
    """µs for each bucket, unit and parameter more; of all but DDP what it takes beyond DDP."""
    rows = []
    for each in some:
        beside = each.name != DDP
        row = [f"`{each.name}`", "", "", ""]
        if f"{each.name} / {MERGED}" in processes[0]:
            more = MANY.buckets - MERGED.buckets
            row[1] = slope(processes, each.name, MANY, MERGED, more, beside=beside).text(0)
            more = MERGED.parameters - FEW.parameters
            row[3] = slope(processes, each.name, MERGED, FEW, more, beside=beside).text(0)
        whole = each.name.replace(" in 24 units", "")
        if whole != each.name:
            cut, uncut = f"{each.name} / {MANY}", f"{whole} / {MANY}"
            more = accounts[cut]["units"] - accounts[uncut]["units"]
            row[2] = figure(combined(processes, {cut: 1e3 / more, uncut: -1e3 / more})).text(0)
        rows.append(row)
    return table(["µs", "per bucket", "per unit", "per parameter"], rows)


def per_parameter(some: Sequence[Contestant], processes: Sequence[Turns], shape: Shape) -> str:
    """µs that each of many parameters takes; of all but DDP what it takes beyond DDP."""
    rows = []
    for each in some:
        weights = {f"{each.name} / {shape}": 1.0} if each.name == DDP else over_ddp(each.name, shape)
        found = [1e3 * value / shape.parameters for value in combined(processes, weights)]
        rows.append([f"`{each.name}`", figure(found).text(1)])
    return table(["µs", "per parameter"], rows)


def traffic(seats: Sequence[Seat], accounts: Mapping[str, Mapping[str, Any]]) -> str:
    """What a step calls and sends, on the first rank."""
    rows = []
    for seat in seats:
        found, beside = accounts[str(seat)], seat.contestant.beside
        same = ""
        if beside is not None:
            before = accounts[str(Seat(seat.contestant._replace(name=beside), seat.shape))]
            same = "yes" if all(before[key] == found[key] for key in ("calls", "order", "units")) else "no"
        calls = ", ".join(f"{verb} {count:.4g}" for verb, count in found["calls"].items())
        sent = f"{found['wire_bytes']:.0f}" if "wire_bytes" in found else ""
        shown = [f"`{seat.contestant.name}`", str(seat.shape), str(found["buckets"])]
        rows.append([*shown, str(found.get("units", "")), calls, sent, found["order"], same])
    head = ["contestant", "model", "buckets", "units", "calls per step", "bytes sent", "order and sizes"]
    return table([*head, "as the other tree"], rows)


def what_is_left(some: Sequence[Contestant], shapes: Sequence[Shape], processes: Sequence[Turns]) -> str:
    """What recipes take over DDP, as a share of what they take by the other tree."""
    rows = []
    for each in some:
        if each.beside is None:
            continue
        for shape in shapes:
            if f"{each.name} / {shape}" not in processes[0]:
                continue
            here = combined(processes, over_ddp(each.name, shape))
            before = combined(processes, over_ddp(each.beside, shape))
            left = figure([one / other for one, other in zip(here, before, strict=True)])
            ms = [figure(values).text(2) for values in (before, here)]
            rows.append([f"`{each.name}`", str(shape), *ms, left.text(2)])
    return table(["contestant", "model", "over DDP, other tree: ms", "here: ms", "share left"], rows)


def contestants(recipes: Sequence[str], other: Path | None, many: bool) -> list[Contestant]:
    """Those that take turns."""
    found = [Contestant(DDP, "ddp", "peer", OURS), Contestant(AGAIN, "ddp", "peer", OURS)]
    if not many:
        found.append(Contestant(HOOK, "fp16", "peer", OURS))
    named = [(text, text, "recipe") for text in recipes]
    if many:
        named += [(f"{text} for all", text, EVERYTHING) for text in recipes if text != "dense"]
    else:
        named += [(name, text, "recipe") for name, text in CUT.items() if name.split()[0] in recipes]
    for name, text, kind in named:
        found.append(Contestant(name, text, kind, OURS, None if other is None else name + OTHER))
    if other is not None:
        found += [Contestant(name + OTHER, text, kind, other) for name, text, kind in named]
    return found


def seats_of(some: Sequence[Contestant], many: int | None) -> list[Seat]:
    """Each contestant with each model; what is cut is compared with what is not on the larger one only."""
    if many is not None:
        return [Seat(each, Shape(many, (4,), 0)) for each in some]
    return [
        Seat(each, shape)
        for shape in (FEW, MANY, MERGED)
        for each in some
        if shape is MANY or "in 24 units" not in each.name
    ]


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--src", type=Path, help="the source of another tree, such as ../before/src")
    parser.add_argument("--recipes", help=f"default: {RECIPES}; with --many dense;int4")
    parser.add_argument("--many", type=int, metavar="N", help="a model of N parameters of four elements")
    parser.add_argument("--processes", type=int, default=7, help="how many times, in fresh processes")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, help=f"of a turn; default: {STEPS}, with --many 5")
    parser.add_argument("--quick", action="store_true", help="to see that it works: figures mean nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.src is not None and not (options.src / "gradwire").is_dir():
        parser.error(f"there is no gradwire in {options.src}")
    if options.quick:
        options.processes, options.turns, options.steps = 2, 2, 3
    if options.processes < 2:
        parser.error("an interval needs two sets of processes at least")
    is_many = options.many is not None
    steps = options.steps or (5 if is_many else STEPS)
    recipes = (options.recipes or ("dense;int4" if is_many else RECIPES)).split(";")
    some = contestants(recipes, None if options.src is None else options.src.resolve(), is_many)
    seats = seats_of(some, options.many)
    shapes = list(dict.fromkeys(seat.shape for seat in seats))
    begun_s = time.monotonic()
    say = partial(print, file=sys.stderr, flush=True)
    accounts = counted(seats, steps)
    say(f"calls counted, {time.monotonic() - begun_s:.0f} s")
    processes: list[dict[str, list[float]]] = []
    for number in range(options.processes):
        processes.append(timed(seats, number, options.turns, steps))
        say(f"processes {number + 1} of {options.processes}, {time.monotonic() - begun_s:.0f} s")
    tables = [times(some, seats, processes)]
    tables.append(per_parameter(some, processes, shapes[0]) if is_many else slopes(some, processes, accounts))
    if options.src is not None:
        tables.append(what_is_left(some, shapes, processes))
    tables.append(traffic(seats, accounts))
    print("\n\n".join(tables))
    if options.json is not None:
        found = {"options": vars(options), "ms": processes, "accounts": accounts, "tables": tables}
        options.json.write_text(json.dumps(found, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
