"""Between DDP's threads and the engine's: buckets in, futures out, errors to `backward()`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from gradwire.engine.engine import Engine
from gradwire.engine.history import History
from gradwire.engine.step import Step
from gradwire.engine.worker import Job, Worker
from gradwire.errors import GradwireError
from gradwire.measure.clock import now_s
from gradwire.sources.ddp.buckets import BucketMap
from gradwire.sources.ddp.buffers import Buffers

_BROKE_OFF = (
    "a backward pass broke off before all gradients were there: its step can get no verdict, and other ranks "
    "may wait for it. Start all ranks again, from their last checkpoint"
)


class Session:
    """One backward pass at a time. `take` runs on autograd's thread, `deliver` on the engine's.

    A callback queued at the last bucket waits for the verdict at the very end of the backward pass and
    raises there, so that errors keep their type. Under `join()` a finished rank's hook runs outside a
    backward pass, where no callback can be queued: its error waits for the next call.
    """

    def __init__(
        self,
        buckets: BucketMap,
        buffers: Buffers,
        worker: Worker,
        engine: Callable[[Callable[[Step], None]], Engine],
    ) -> None:
        """`engine` makes one that concludes its steps with the function it is given."""
        self.buffers = buffers
        self.overlap = True
        self.history = History()
        self.compressed = 0  # steps that a memory has been through
        self._buckets, self._worker = buckets, worker
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._held: list[Job] = []
        self._ended = threading.Event()
        self._ended.set()
        self._all_given = True
        self._error: BaseException | None = None
        self.engine = engine(self.deliver)

    def take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Queue a bucket for the engine and promise its mean."""
        if bucket.index() == 0:
            self._open()
        is_last = bucket.is_last()
        arrival = self._buckets.arrival(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._futures.append((future, arrival.buffer))
        self._held.append(partial(self.engine.arrive, arrival))
        if is_last:
            self.buffers.look()
            self._held.append(self.engine.close)
        # In a step taken apart, communication would slow the computation that shares its cores.
        if is_last or (self.overlap and not self.engine.apart):
            held, self._held = self._held, []
            for job in held:
                self._worker.post(job)
        if is_last:
            self._all_given = True
            self._wait_at_the_end()
        return future

    @property
    def is_sound(self) -> bool:
        """Whether every step has ended, and all ranks' collectives are paired: nobody waits for this one."""
        return self._all_given and self._ended.is_set() and self.engine.runner.broken is None

    def rest(self) -> None:
        """Return when no step is under way, because nothing else may be asked of the ranks meanwhile.

        Whoever caught an interruption of `backward()` left a step behind which all ranks still end. Raises
        `GradwireError` where it cannot end, since not all of its buckets came.
        """
        if not self._all_given:
            raise GradwireError(_BROKE_OFF)
        self._worker.wait(self._ended)
        self.buffers.land()

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """Spare DDP its broadcast of buffers, where a backward pass has brought them (`Buffers`).

        After an interruption that was caught, land what is still to come.
        """
        if self._all_given:
            self.rest()
        self.buffers.before_forward(ddp)

    def _open(self) -> None:
        self._raise_pending()
        if not self._ended.is_set():
            raise GradwireError(_BROKE_OFF)
        self._ended.clear()
        self._all_given = False
        self._held = [partial(self.engine.open, now_s())]
        self.buffers.pack(self.engine.apart)

    def _wait_at_the_end(self) -> None:
        # Not before the last bucket: a reentrant checkpoint nests backward passes, and at the end of an
        # inner one there may be buckets that only the outer one will deliver.
        with suppress(RuntimeError):  # "can only be installed during backward pass": see `join()` above
            Variable._execution_engine.queue_callback(self._wait)

    def _wait(self) -> None:
        start_s = now_s()
        self._worker.wait(self._ended)
        self.history.waited(start_s, now_s())
        self.engine.watch.end()
        self.buffers.land()
        if self._error is not None:
            # Behind DDP's own callback, which it could not do without in the next step.
            Variable._execution_engine.queue_callback(self._raise_pending)

    def _raise_pending(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def deliver(self, step: Step) -> None:
        """End a step: set every future, whatever happened, and let `backward()` go on."""
        self._error = step.error
        self.buffers.arrived(step.buffers is not None and step.error is None, step.stale)
        futures, self._futures = self._futures, []
        try:
            self.history.add(step)
            self.compressed += step.committed and not self.engine.layout.is_plain
        finally:
            # Before the futures, because a finished rank under `join()` waits for nothing else.
            self._ended.set()
            for future, buffer in futures:
                future.set_result(buffer)
