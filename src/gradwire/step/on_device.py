"""The training thread's side of the reducer where a device computes: copies, waits, and the order of streams.

A kernel runs after the thread that enqueued it has gone on. So a gradient bucket that autograd hands over may
still be computed, and means that the worker has enqueued may still be on their way into it. Each method does
what `Backward` does, before or after what the device needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from gradwire.errors import GradwireError
from gradwire.placement import TransferredBuffer, Waited
from gradwire.step.gradient_bucket import GradientBucket
from gradwire.step.moods import Mood
from gradwire.step.reducer import Backward
from gradwire.step.step import Step
from gradwire.step.worker import Job, wait_until

T = TypeVar("T")

_CAPTURED = (
    "this backward pass is captured into a graph, in which gradients cannot travel: a graph replays the same "
    "launches, while steps differ in number, seed and plan. Capture the forward pass alone, or train without "
    "graphs"
)


def _at_once() -> None:
    """Wait for nothing."""


class DeviceBackward(Backward):
    """`Backward` for gradients of a device: it adds the copies, streams and waits of the placement.

    A pass that CUDA captures into a graph is refused before the device is used: CUDA would refuse the waits
    with a message of its own.
    """

    _transferred: list[TransferredBuffer]
    """Buckets of the running step; each has its copy if it is copied."""
    _waits: list[tuple[Job, Callable[[Waited], None]]]
    """Pairs of a wait, and a function that the worker runs afterwards."""

    def before_forward(self) -> None:
        if self.mood is Mood.GIVEN and not self._is_captured:
            super().before_forward()

    def begin(self) -> None:
        """Raises `GradwireError` as well where this pass is captured into a graph."""
        self._raise_pending()
        if self._is_captured:
            self.calls.give_up_step("a backward pass that is captured into a graph")
            raise GradwireError(_CAPTURED)
        self._transferred, self._waits = [], []
        super().begin()
        # What the worker reads as the step begins, such as parameters, may still be written.
        self._placement.transfer.follow()

    @property
    def _is_captured(self) -> bool:
        return self._placement.device.is_capturing()

    def submit(self, bucket: GradientBucket) -> None:
        """Hand the bucket to the worker once it is computed, and copied if it has to be."""
        if self.reducer.is_serial and not self._placement.memory.is_host:
            # The host runs ahead of a device, and elsewhere a copy tells when the gradient was there.
            bucket = replace(bucket, at_s=self.reducer.watch.exact())
        transferred = self._placement.transfer.start(bucket.index, bucket.buffer)
        self._transferred.append(transferred)
        self._waits.append((transferred.ready, partial(self._take, bucket, transferred)))
        if not self._posts_at_end:
            self._post_waiting()

    def _line_up(self, job: Job) -> None:
        self._waits.append((_at_once, lambda _: job()))

    def _post_waiting(self) -> None:
        """Post each job once its wait is over. The worker goes on meanwhile."""
        waits, self._waits = self._waits, []
        post, post_after = self._placement.post, self._placement.post_after
        for ready, job in waits:
            if post_after is not None:
                post_after(ready, job)
            else:
                post(partial(_once_there, ready, job))

    def _take(self, bucket: GradientBucket, transferred: TransferredBuffer, waited: Waited) -> None:
        """Worker: take in a bucket after its wait.

        Args:
            bucket: as it was submitted.
            transferred: where the worker works on it.
            waited: the end of the wait, and its error.
        """
        failure = bucket.failure or waited.error
        # Where nothing is waited for, or in a serial step, it is known better when they were there.
        was_awaited = self._placement.post_after is not None and not self.reducer.is_serial
        home = None if transferred.buffer is bucket.buffer else transferred
        if home is not None or failure is not bucket.failure or was_awaited:
            buffer, at_s = transferred.buffer, waited.at_s
            bucket = replace(bucket, buffer=buffer, at_s=at_s, failure=failure, home=home)
        self._stage.bucket_ready(bucket)

    def _outside_backward(self) -> None:
        """Wait for the end of the step if this thread runs the worker's jobs: later the jobs would run in the
        next pass.
        """
        if self._placement.wait is not None:
            self._await_end()

    def _await_end(self) -> None:
        """Wait as the placement says: this thread may run the worker's jobs meanwhile."""
        (self._placement.wait or self._worker.wait)(self._ended, self.calls.look)
        self.calls.ended()

    def _complete(self) -> None:
        if not self._ended.is_set():
            self._await_end()
        self._placement.transfer.join()
        super()._complete()

    def _step_ended(self, step: Step) -> None:
        super()._step_ended(step)
        for transferred in self._transferred:
            transferred.copy_back()

    def _release(self) -> None:
        placement = self._placement  # the next step may have one of its own, once this one has ended
        self._ended.set()
        with placement.transfer.landing():
            self._source.release()

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` after the work that the caller has enqueued on the device, and before later work."""
        placement = self.placement
        placement.transfer.follow()
        try:
            return self._worker.call(partial(placement.at_work, function))
        finally:
            placement.transfer.join()


def _once_there(ready: Job, job: Callable[[Waited], None]) -> None:
    """Worker: wait for `ready`, and then call `job` with the result of the wait."""
    job(wait_until(ready))
