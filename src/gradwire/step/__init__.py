"""The path of a gradient, from a full bucket to a committed mean. It knows no wrapper.

The stations in order. `Engine` calls each of them, on one thread, in the same order on every rank:

1. A source hands a bucket to `Backward.submit`, on autograd's thread. That posts a job, by `Placement.post`:
   to the `Worker`, or, where collectives are work in a stream, to the thread that brings gradients. By
   `post_after` another thread of the worker waits first until a device has computed the bucket.
   sources/backward.py, worker.py
2. `Engine.open`, `arrive` for each bucket, `close`: a step begins, takes buckets by number, has them all.
   Features that are on hear of its beginning, as a `StepObserver`.
   engine.py; environment.py
3. The bucket is an `Arrival`. Its `BucketPlan` says where all of it goes. A *share* goes to a lane with a
   memory. A *run* goes past the lanes, which is called *direct*: its exchange works in the bucket itself. A
   small run beside lanes waits for 8.
   arrival.py; layout.py makes lanes of recipe and policy, before the first step
4. *Fold*: a lane adds the gradient to what is unsent. The sum lies in the arena.
   arena.py, and the lane's `Memory` (`gradwire/memory.py`)
5. A unit whose last piece has been folded is complete. The `Step` counts pieces, and knows where means go.
   step.py
6. The unit's exchange starts. Its `ExchangePlan` has all that stays the same from step to step. Its
   `ExchangeContext` says which unit it is, on which rank and in which step.
   runner.py, plan.py, context.py; the exchange itself is in `exchange/`, its codec in `codec/`
7. Once its last collective has come, it decodes, and the mean *lands* in the bucket.
   runner.py, step.py
8. The last all-reduce, the *tail*, carries one row per rank. These rows are the verdict. Small gradients
   travel in the tail, too, or in an all-reduce of their own before it.
   verdict.py
9. `Engine` judges: it commits the memory on all ranks or on none, lets the controller look, and calls
   `concluded`, which tells the source (`Backward.deliver`). The source gives the means to the model.
   engine.py; controllers are in `control/`

`environment.py` has all that an engine is built with: placement, optimizer, buffers, reporting.

Words for what becomes of a step:

- It is *concluded* when its means are on their way to the model, or when it has failed.
- It is *resolved* when the host knows whether it counts: most often before it is concluded. A *late* step is
  resolved when the next one begins, so that the host need not wait for a device.
- It is *settled* when optimizers have used its means, or have left them out. Until then a commit can be
  undone, and parameters whose gradient no optimizer has used yet are *open*.
- A unit *rests* in a step in which its exchange sends nothing. A slot is *idle* in a step that brings nothing
  but zeros for it: its memory stays as it is.
"""
