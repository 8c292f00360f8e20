"""Gathered 16-bit parameters that a module's ranks keep, so that a gather sends what has changed.

A rank codes its shard against what it last sent, by value, at the gather. So whatever moves parameters costs
bytes, and never truth: no flag can go stale. A gather begins with a collective whose size all ranks know. In
it ranks tell what they are about to send, and a number that stands for all that they hold. They act on this
one table: nobody sends, all send codes, or all send their numbers as they are.

Behind its head a rank sends the beginning of its code, up to a length that follows from earlier tables, which
are the same on all ranks. Where codes are no longer than that, there is no second collective.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.codec.exact_steps import HEADER_BYTES, Layout, StepsKey, decode_steps, digest_of, encode_steps
from gradwire.comm import Pending
from gradwire.errors import PeerFailed, RanksDisagree
from gradwire.sources.fsdp.routes import Route

_LOG = logging.getLogger("gradwire")

MOST_BITS = 12
"""Bits per parameter above which numbers are sent as they are: decoding would take longer than it saves."""
AS_IT_IS = -1
"""In the place of a length: the numbers themselves will come."""
FAILED = -2
"""In the place of a length: this rank could not take what an earlier gather has brought, of the module whose
number is in the place of the state."""
HEAD_BYTES = 32
"""Of a rank's head: number of the module, length, state and digest."""
SCATTER = -1
"""In the place of a module's number: this rank is about to scatter."""
_SLACK = 64
"""One part in so many is added to the length of the last code, as the room for the next one."""


@dataclass
class Verdict:
    """Failures in earlier gathers of a model's modules (`labels`), which ranks tell each other.

    A rank that could not take what has come computes with NaN up to the next head, of whatever module; there
    all ranks raise. If no gather follows before a scatter, they tell each other before that. All ranks then
    gather all modules anew: more may have failed by then than a head tells.
    """

    labels: Sequence[str]
    forget: Callable[[bool], None]
    """Lets FSDP2 gather all modules anew, after a pass that has broken off on all ranks. True if ranks are at
    one place of it, so that the same gathers are in flight: these are ended."""
    failure: tuple[int, Exception] | None = None
    """Number of a module, and what went wrong there on this rank: the first one since a head told of one."""
    is_untold: bool = False
    """True if numbers have come to any rank since a head was last sent. Equal on all ranks."""
    _told: Exception | None = None
    """The failure that this rank's last head of one told."""

    def note(self, number: int, error: Exception) -> None:
        """Note for the next head what went wrong with the module `number` on this rank."""
        if self.failure is None:
            self.failure = number, error.with_traceback(None)  # or it would keep the pass's activations

    def head(self, number: int, length: int, state: int, digest: int) -> Tensor:
        """The head of a gather of the module `number`, as bytes; or that of a failure, once."""
        self.is_untold = False
        if self.failure is not None:
            (failed, self._told), self.failure = self.failure, None
            length, state, digest = FAILED, failed, 0
        words = [number, length, _signed(state), _signed(digest)]
        return torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8)

    def table(self, heads: Tensor, route: Route) -> Generator[Pending, None, list[list[int]]]:
        """Columns of a table of `heads` (targets, bytes): modules, lengths, states, digests.

        Raises the error of this rank, or `PeerFailed` if another rank has failed, and `RanksDisagree` if
        ranks gather different modules. On nodes, the ranks of a node tell each other, too.
        """
        columns: list[list[int]] = heads[:, :HEAD_BYTES].contiguous().cpu().view(torch.int64).T.tolist()
        numbers, lengths, states, digests = columns
        told = zip(route.targets, states, lengths, strict=True)
        failures = [route.world * (failed + 1) + rank for rank, failed, length in told if length == FAILED]
        comes = any(lengths) or len({*states}) > 1 or len({*digests}) > 1
        heard = yield from route.heard([max(failures, default=0), min(numbers), max(numbers), int(comes)])
        failed, lowest, highest, coming = zip(*heard, strict=True)
        word, is_apart = max(failed), min(lowest) != max(highest)
        if word or is_apart:  # NaN of one rank are gathered anew, and so by all
            mine, self._told = self._told, None
            self.forget(not is_apart)
            self.failure = self._told = None  # what gathers in flight have brought is of this pass, too
            if mine is not None:
                raise mine
        if word:
            number, rank = divmod(word, route.world)
            raise PeerFailed(
                f"rank {rank} could not take the gathered parameters of module {self.labels[number - 1]!r}: "
                "its own error says why. The next gather of that module sends them as they are"
            )
        if is_apart:
            places = ", ".join(
                f"rank {rank} {'scatters' if each == SCATTER else f'gathers {self.labels[each]!r}'}"
                for rank, each in zip(route.targets, numbers, strict=True)
            )
            raise RanksDisagree(
                f"ranks are at different places of a pass: {places}. One of them has left out a module, or "
                "has gone on after an error"
            )
        self.is_untold |= any(coming)
        return columns

    def settle(self, route: Route, where: torch.device) -> None:
        """Tell and hear of failures before a scatter. One small collective, if any numbers came since the
        last head. Raises as `table`.
        """
        if not self.is_untold:
            return
        mine = self.head(SCATTER, 0, 0, 0).to(where)
        heads = mine.new_empty(len(route.targets), HEAD_BYTES)
        route.exchange(heads, mine).wait()
        for pending in self.table(heads, route):
            pending.wait()


@dataclass
class Held:
    """Parameters of a module as last gathered: `values` (targets, elements of a shard).

    `number` is that of the module among all, `verdict` is of all. After `guard_every` gathers with changes,
    the next gather compares all values over ranks, once; 0 means never.
    """

    values: Tensor
    number: int
    verdict: Verdict
    where: torch.device
    guard_every: int = 0
    state: int = 0
    """Stands for the values, and is equal on all ranks that hold the same; 0 if they may not be used."""
    changes: int = 0
    """Gathers with changes since values were compared or sent as they are."""
    _longest: int = field(default=0, init=False)
    """Length of the longest code of the last gather with changes."""
    _since: int = field(default=0, init=False)
    _usual: int = field(default=0, init=False)
    """Gathers without changes since the last one with changes, and between the last two such."""

    @property
    def label(self) -> str:
        """The module's name in messages."""
        return self.verdict.labels[self.number]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.values.nbytes

    @property
    def _room(self) -> int:
        """Bytes behind a head: those of a code, if the next gather is the one that usually brings changes."""
        return self._longest + self._longest // _SLACK // 8 * 8 if self._since == self._usual else 0

    def fits(self, shard: Tensor) -> bool:
        """True if `shard` may be one of the rows of `values`."""
        return shard.dtype == self.values.dtype and shard.numel() == self.values.shape[1]

    def gather(
        self, shard: Tensor, output: Tensor, route: Route
    ) -> Generator[Pending, None, tuple[str, int]]:
        """Tell the other targets of `route` what this rank sends, send it, and fill `output` (world,
        elements) with the numbers of all ranks. Yields each collective, to be waited for.

        `shard` (elements,) are this rank's numbers now; it may be its row of `output`. What comes before the
        first collective may fail on one rank alone, as in stock FSDP2. After it nothing is allocated that
        others wait for.

        Returns how the numbers went, and the bytes that this rank sent to each target. Raises
        `TransportError`, and as `Verdict.table`. If what came cannot be taken on this rank, its output is
        NaN, and the next head tells.
        """
        frame = self._code(shard, self.values[route.place])
        state, self.state = self.state, 0
        is_turn = bool(state) and 0 < self.guard_every <= self.changes
        if is_turn:
            self.changes = 0
        room, place = self._room, route.place
        length = AS_IT_IS if frame is None else frame.numel()
        digest = digest_of(self.values) if is_turn else 0
        first = torch.zeros(len(route.targets), HEAD_BYTES + room, dtype=torch.uint8, device=self.where)
        spare = route.spare(output)
        first[place, :HEAD_BYTES] = self.verdict.head(self.number, length, state, digest).to(self.where)
        if frame is not None:
            first[place, HEAD_BYTES : HEAD_BYTES + length] = frame[:room]
        yield route.exchange(first, first[place])
        _numbers, lengths, states, digests = yield from self.verdict.table(first, route)
        self._warn_of_others(states, digests, route.targets)
        # Rows as they come lie in the output, in which this rank's is at its place already.
        begin = route.rank - place
        rows = output.view(route.world, -1)[begin : begin + len(route.targets)]
        is_raw = AS_IT_IS in lengths or len({*states}) > 1 or len({*digests}) > 1
        rest = 0 if is_raw else max(0, max(lengths) - room)
        self._foresee(0 if is_raw else max(lengths), is_changed=is_raw or any(lengths))
        if is_raw:
            rows[place].copy_(shard)
            data = rows.view(torch.uint8)
            yield route.exchange(data, data[place])
        elif rest:
            assert frame is not None, "or the numbers go as they are"
            data = rows.view(torch.uint8).view(-1)[: len(rows) * rest].view(len(rows), rest)
            data[place, max(0, length - room) :] = 0
            data[place, : max(0, length - room)] = frame[room:]
            yield route.exchange(data, data[place])
        try:
            if is_raw:
                self.values.copy_(rows)
                self.state, self.changes = digest_of(self.values) | 1, 0
            else:
                later = data if rest else first[:, :0]
                self.state = self._take([first[:, HEAD_BYTES:], later], lengths, state)
                self.changes += any(lengths)
            gathered = self.values.to(output.device)
        except Exception as error:  # others are told at the next head: they do not wait for this rank
            self.state = 0
            self.verdict.note(self.number, error)
            _LOG.error(
                "module %r: what was gathered cannot be taken, so that it is NaN up to the next gather, in "
                "which all ranks raise: %s: %s", self.label, type(error).__name__, str(error),
            )  # fmt: skip
            gathered = rows.fill_(torch.nan)
        yield route.relay(gathered, output, spare)
        kind = "as they are" if is_raw else "changes" if any(lengths) else "unchanged"
        return kind, first.shape[1] + (rows[0].nbytes if is_raw else rest)

    def _take(self, parts: Sequence[Tensor], lengths: Sequence[int], state: int) -> int:
        """Decode rows of codes, which lie in several `parts` (targets, bytes), into the values. Returns the
        state that stands for the new values. Raises `WireError`.
        """
        if not any(lengths):
            return state
        seals = []
        for number, (length, values) in enumerate(zip(lengths, self.values, strict=True)):
            if length:
                row = [part[number] for part in parts if part.shape[1]]
                code = (row[0] if len(row) == 1 else torch.cat(row))[:length]
                here = values.to(self.where)
                decode_steps(code, here, StepsKey(self.number, len(self.values), state))
                values.copy_(here)
                seals.append(code[-8:])
        return digest_of(torch.cat(seals)) ^ state | 1

    def _code(self, shard: Tensor, last: Tensor) -> Tensor | None:
        """The code of what has changed, empty if nothing has; `None` if numbers should go as they are."""
        if not self.state:
            return None
        try:
            old = last.to(self.where)
            if torch.equal(shard.view(torch.int16), old.view(torch.int16)):
                return shard.new_empty(0, dtype=torch.uint8)
            layout: Layout | None = None if shard.is_cpu else "widths"
            frame = encode_steps(shard, old, StepsKey(self.number, len(self.values), self.state), layout)
        except (MemoryError, RuntimeError) as error:  # torch's and CUDA's lack of memory are RuntimeErrors
            # Others wait for this rank's head, so it does not raise. Numbers as they are need no coding.
            _LOG.warning(
                "module %r: what has changed could not be coded, so all parameters are sent as they are: "
                "%s: %s", self.label, type(error).__name__, error,
            )  # fmt: skip
            return None
        is_short = 8 * (frame.numel() - HEADER_BYTES) <= MOST_BITS * shard.numel() + 1024
        return frame if is_short and frame.numel() <= shard.nbytes else None

    def _foresee(self, longest: int, *, is_changed: bool) -> None:
        """Note what a table says, for the room behind the next head."""
        if not is_changed:
            self._since += 1
            return
        self._longest, self._usual, self._since = longest, self._since, 0

    def _warn_of_others(self, states: list[int], digests: list[int], targets: Sequence[int]) -> None:
        if len(set(states)) == 1 and len(set(digests)) > 1:
            usual = Counter(digests).most_common(1)[0][0]
            wrong = [rank for rank, each in zip(targets, digests, strict=True) if each != usual]
            _LOG.warning(
                "module %r: what ranks %s keep of gathered parameters differs from what others keep, so all "
                "parameters are sent as they are", self.label, wrong,
            )  # fmt: skip


def _signed(number: int) -> int:
    """Read 64 bits as an integer with a sign."""
    return number - (number >> 63 << 64)
