"""The path of a gradient, from a full bucket to a committed mean. It knows no wrapper.

The stations in order. `Engine` calls each of them, on one thread, in the same order on every rank:

1. A source submits a bucket on autograd's thread (`sources/backward.py`), as a job for the `Worker`.
   worker.py
2. `Engine.open`, `arrive` for each bucket, `close`: a step begins, takes buckets by number, has them all.
   engine.py
3. The bucket is an `Arrival`. Its `Intake` says where all of it goes: to lanes with a memory, or past them.
   arrival.py; layout.py makes lanes of recipe and policy, before the first step
4. *Fold*: a lane adds the gradient to what is unsent. The sum lies in the arena.
   arena.py
5. A unit whose last piece has been folded is complete. The `Step` counts pieces, and knows where means go.
   step.py
6. The unit's exchange starts. Its `ExchangeContext` says where and when it runs.
   runner.py, context.py; the exchange itself is in `exchange/`, its codec in `codec/`
7. Once its last collective has come, it decodes, and the mean *lands* in the bucket.
   runner.py, step.py
8. Small gradients and one row per rank travel in the last all-reduce, the *tail*. Its rows are the verdict.
   verdict.py
9. `Engine` commits the memory on all ranks or on none, lets the controller look, and tells the source.
   engine.py; controllers are in `control/`

`environment.py` has all that an engine is built with: placement, optimizer, buffers, reporting.
"""
