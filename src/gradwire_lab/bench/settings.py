"""The settings of a bench run: one frozen value that the JSON repeats in full.

The command line writes settings to compare as a list: `dense;topk(ratio=0.01);covap(interval=4)`.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["recipe", "peer", "bound", "policy"]
Option = int | float | str | bool | tuple[Any, ...] | dict[str, Any] | None
"""Tuples and dictionaries hold the others: shares at which segments end, rates by name."""

_ENTRY = re.compile(
    r"^(?P<stem>[A-Za-z_]\w*)(?:\((?P<options>.*)\))?(?:\s*\+\s*(?P<gather>\w+))?$", re.DOTALL
)


@dataclass(frozen=True)
class BenchEntry:
    """One setting to measure; `name` is the text as typed, and identifies the row.

    Of a pair such as int4+int8, `stem` and `options` are those of the scatter, and `gather` follows the plus.
    """

    name: str
    kind: Kind
    stem: str
    options: Mapping[str, Option] = field(default_factory=lambda: MappingProxyType({}))
    gather: str | None = None


def parse_entry(text: str, kind: Kind) -> BenchEntry:
    """Read `name` or `name(key=value, …)`; after a recipe may follow + and the bits of FSDP2's gathers.
    Raises `ValueError` for other texts.

    >>> parse_entry("powersgd_hook(rank=2)", "peer").options["rank"]
    2
    """
    name = text.strip()
    match = _ENTRY.match(name)
    if match is None or (match["gather"] and kind != "recipe"):
        raise ValueError(f"{kind} {name!r}: expected `name` or `name(key=value, …)`")
    options = MappingProxyType(_options(name, match["options"]))
    return BenchEntry(name, kind, match["stem"], options, match["gather"])


def parse_entries(text: str, kind: Kind) -> tuple[BenchEntry, ...]:
    """Split at semicolons; empty pieces are dropped, a name that occurs twice is refused.

    >>> [entry.stem for entry in parse_entries("dense; covap(interval=4)", "recipe")]
    ['dense', 'covap']
    """
    entries = tuple(parse_entry(piece, kind) for piece in text.split(";") if piece.strip())
    names = [entry.name for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{kind} listed twice: {', '.join(twice)}")
    return entries


def _options(name: str, text: str | None) -> dict[str, Option]:
    if not text or not text.strip():
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{name!r}: cannot read the options: {error.msg}") from error
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError(f"{name!r}: options are written as key=value")
    keys = [str(pair.arg) for pair in call.keywords]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{name!r}: an option is given twice")
    return {str(pair.arg): _value(name, pair.value) for pair in call.keywords}


def _is_option(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_option, value))
    if isinstance(value, dict):
        return all(map(_is_option, value.values()))
    return value is None or isinstance(value, int | float | str | bool)


def _value(name: str, node: ast.expr) -> Option:
    """A literal, or a bare word taken as text: `elect=norm` means `elect="norm"`."""
    if isinstance(node, ast.Name):
        return node.id
    try:
        value = ast.literal_eval(node)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {ast.unparse(node)} is not a number, a word or a string") from error
    if _is_option(value):
        option: Option = value
        return option
    raise ValueError(f"{name!r}: {ast.unparse(node)} is not a number, a word or a string")


def stock(settings: Mapping[str, Any]) -> str:
    """The peer with which all others are compared, by the settings of a document."""
    return "fsdp2" if settings.get("sharded") else "ddp"


BOUND = BenchEntry("bound", "bound", "bound")
BOUND_AGAIN = BenchEntry("bound again", "bound", "bound")


@dataclass(frozen=True)
class TrainingTask:
    """The training that all settings share.

    - `bucket_cap_mb`: argument of `DistributedDataParallel`.
    - `decay_steps`: the learning rate falls linearly to zero over the last four fifths of this number of
      steps.
    - `policy`: the policy of all recipes, in the form that `policy_of` reads; by default that of the
      workload.
    - `sharded`: FSDP2 shards the model, and its own traffic is compared. Otherwise DDP replicates it.
    """

    workload: str
    data: str | None = None
    shards: str = "iid"
    batch_size: int | None = None
    seed: int = 0
    overlap: bool = True
    bucket_cap_mb: float | None = None
    decay_steps: int | None = None
    policy: str | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        if self.shards not in ("iid", "skewed"):
            raise ValueError(f"shards is {self.shards!r}: expected 'iid' or 'skewed'")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch size is {self.batch_size}: expected at least 1")
        if self.sharded:
            for name in ("overlap", "bucket_cap_mb", "policy"):
                if getattr(self, name) != getattr(TrainingTask, name):
                    raise ValueError(f"{name} has no meaning for FSDP2's own traffic: leave it out")


@dataclass(frozen=True)
class Repetitions:
    """The amount of measurement: `warmup` uncounted steps, then `rounds` rounds of `steps` steps per setting.

    Without `warmup` it is 25 steps, and then as many as recipes that adapt need to settle, up to 125 in all:
    as many for every setting, so that losses stay comparable. `timeout_s` is the time without any finished
    step after which a setting is taken to hang.
    """

    steps: int = 10
    rounds: int = 7
    warmup: int | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("rounds", 1), ("warmup", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: expected at least {least}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout is {self.timeout_s} s: expected more than 0")


@dataclass(frozen=True)
class NetworkSetting:
    """The link as typed, and its emulation (`root`, `user` or `backend`).

    With `nodes`, the ranks of a node share a link; otherwise each rank has its own.
    """

    workers: int
    rate: str
    delay: str
    mode: str
    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(f"workers is {self.workers}: a comparison needs at least 2")


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result of a bench run."""

    task: TrainingTask
    schedule: Repetitions
    network: NetworkSetting
    entries: tuple[BenchEntry, ...]

    @property
    def every_entry(self) -> tuple[BenchEntry, ...]:
        """The entries between the two identical bound rows that show the A/A spread."""
        return (BOUND, *self.entries, BOUND_AGAIN)

    def as_dict(self) -> dict[str, Any]:
        """The settings as one flat dictionary of plain JSON types."""
        return {
            **asdict(self.task),
            **asdict(self.schedule),
            **asdict(self.network),
            "recipes": [entry.name for entry in self.entries if entry.kind == "recipe"],
            "peers": [entry.name for entry in self.entries if entry.kind == "peer"],
        }
