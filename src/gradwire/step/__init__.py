"""The path of a gradient, from a full gradient bucket to a committed mean. Nothing here knows a wrapper.

**The path begins at `DDPBuckets.on_bucket`** (`gradwire/sources/ddp/source.py`), the communication hook that
DDP calls for each gradient bucket. It calls `Backward.begin` for the first bucket, `Backward.submit` for
each, and `Backward.close` for the last. Other sources do so, too. **From there, read reducer.py.** It has the
state machine: `Backward` is the side of the training thread, `Reducer` the side of the worker. On the worker
`Reducer._advance` has the algorithm in six numbered lines.

**The path ends at `Backward.deliver`.** `gradwire.attach` (`_assemble` in `_api/attach.py`) ties the two
sides together: it makes the `ReducerEnvironment`, whose `finished` is `Backward.deliver` and whose
`outcome_known` is `Backward.note`. The reducer calls these for each step. `deliver` sets the event for which
the training thread waits, and lets the source set DDP's futures. So the backward pass ends, with means in
`p.grad`. An optimizer that steps is noted by optimizer_log.py. The commit of the step is final when the next
`Backward.begin` finds that optimizers have used its means.

The other files are in the order in which a gradient gets to them:

- worker.py: the thread, with its queue of jobs. on_device.py is the training thread's side where a device
  computes: another thread waits for gradients then.
- gradient_bucket.py: a gradient bucket, and the place of each gradient in it. A `BufferShare` of it goes to a
  flat buffer, which has a memory. A `DirectShare` bypasses the flat buffers, as biases do beside most
  recipes: an exchange works in the bucket itself. A small direct share beside flat buffers travels with the
  vote.
- layout.py: flat buffers, made of recipe and policy before the first step. shards.py: the part of each
  parameter that a rank holds, where ranks share a replica.
- flat_buffers.py: a flat buffer, in which x lies. Its `Memory` (`gradwire/memory.py`) has line 1, and its
  kernel is in `kernels/compensation.py`.
- plan.py: everything about a unit's exchange that stays the same from step to step, such as its kernels.
  `unit/context.py` has the unit, the rank and the step of an exchange. The exchange itself (lines 2 to 4) is
  in `exchange/`, its codec in `codec/`, and its kernels in `kernels/`. With `topk`, for instance, the plan
  has found a `Gather` (`exchange/payloads.py`) in the `Scheme` (`exchange/compose.py`), and `Reducer._start`
  calls `Gather.start`. There `Sparse.take` (`codec/sparse.py`) is line 2. The all-gather is line 3, which
  `ProcessGroupComm.issue` (`comm/process_group.py`) sends. The function that `start` returns is line 4.
- ahead.py: gradients that a device encodes bucket by bucket. marks.py: findings that stay on a device.
- intake.py: what has come of a step's gradients, and where their means land.
- step.py: the state of one step: what has come, is in flight, and was sent; the first error, the outcome.
- moods.py: which outcome of a step, and which mood of a backward pass, may follow which.
- status_vote.py: the rows of the status vote (line 5), and small gradients, which travel with them.
- optimizers.py and optimizer_log.py: hooks that tell when optimizers step, and with which gradients.
  events.py: what they have seen. fates.py: what has become of a finished step's gradients, read from events.
- history.py and event_log.py: costs and events of a run.

installed.py has the installed recipe with its memory, which changes between steps only. `Reducer` is derived
from its `InstalledRecipe`. environment.py has everything that it is built with, and the protocols of
features: a *step observer* is in a list while it is on, and a *controller* decides which recipe follows.
`Reducer._features` lists the features of the installed recipe. A feature that is off is in neither list, and
no step asks for it.

Types that say "elements a to b", and of what:

| type | elements of | what for |
|---|---|---|
| `Slot` (`unit/parameters.py`) | a flat buffer or a gradient bucket | where one whole parameter lies |
| `Unit` (`unit/parameters.py`) | a flat buffer | what is exchanged together |
| `Part` (`unit/context.py`) | a parameter | what a unit holds of it |
| `BufferShare` (gradient_bucket.py) | a gradient bucket | what goes to one flat buffer, by slots |
| `DirectShare` (gradient_bucket.py) | a gradient bucket | neighbours that bypass flat buffers together |
| `Pieces` (`kernels/pieces.py`) | a gradient bucket and a flat buffer | what compensation adds to what |
| `Route` (gradient_bucket.py) | gradient buckets | where the means of a unit land |
| `Segment` (`exchange/scatter_reduce.py`) | a unit | what a scatter and a gather carry at a time |
| `SegmentShard` (`exchange/scatter_reduce.py`) | a segment | what one rank owns, and sums up |
| `CodedPieces` (`kernels/layouts.py`) | as `Pieces`, and rows of codes | what is encoded as it comes |
| `UnitForecast` (`control/forecast.py`) | a flat buffer | a unit in numbers, for predictions |

A `Shard` (shards.py) is no such range: it says who holds which part of each parameter, where ranks share a
replica.

Words for the outcome of a step:

- It is *finished* when its means are on their way to the model, or when it has failed: see `Outcome`.
- It is *committed*, or forgotten, when the host knows whether it counts: most often before it is finished.
  The outcome of a *deferred* step is known when the next one begins, so the host need not wait for a device.
- It is *final* when optimizers have used its means, and *rolled back* when they have left them out. Until
  then a commit can be undone. Parameters whose gradient no optimizer has used yet are *open*.
- A mean *lands* when it is written to the place from which the gradients came. A backward pass is *complete*
  when the training thread has what the step has brought.
- A unit *rests* in a step in which its exchange sends nothing. A slot is *idle* in a step in which its
  gradient is zero throughout: its memory stays as it is.
- `Reducer._finish` is line 6, which ends in `_finish_running`, or in `_defer`. `Backward.close` ends the
  intake of gradients.
"""
