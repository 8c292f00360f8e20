"""The path of a gradient, from a full bucket to a committed mean. It knows no wrapper.

**Begin with reducer.py.** It is the only state machine: `Backward` for the training thread, `Reducer` for the
worker. `Reducer._advance` has the algorithm in six numbered lines. The other files are what it calls, in the
order in which a gradient gets there:

- worker.py: the thread, with its queue of jobs. Where a device computes, another one waits for gradients.
- arrival.py: a gradient bucket, and where all of it goes. A *share* goes to a lane, which has a memory. A
  *run* goes past the lanes, which is called *direct*: its exchange works in the bucket itself. A small run
  beside lanes waits for the vote.
- layout.py makes lanes of recipe and policy, before the first step.
- arena.py: a lane is compensated (line 1) by its `Memory` (`gradwire/memory.py`). x lies in the arena.
- plan.py: all of a unit's exchange that stays the same from step to step. context.py: which unit it is, on
  which rank and in which step. The exchange itself (lines 2 to 4) is in `exchange/`, its codec in `codec/`.
- step.py: the state of one step: what has come, where means go, its first error, its outcome.
- verdict.py: the rows of the status vote (line 5), and small gradients, which travel beside them.
- fates.py: what optimizers make of a finished step.
- history.py and event_log.py: what a run tells.

engine.py is what changes between steps only: the installed recipe, with its memory. environment.py has all
that it is built with: placement, optimizer, buffers, reporting.

Words for what becomes of a step:

- It is *concluded* when its means are on their way to the model, or when it has failed: `Outcome` says which.
- It is *resolved* when the host knows whether it counts: most often before it is concluded. A *late* step is
  resolved when the next one begins, so that the host need not wait for a device.
- It is *settled* when optimizers have used its means, or have left them out. Until then a commit can be
  undone, and parameters whose gradient no optimizer has used yet are *open*.
- A unit *rests* in a step in which its exchange sends nothing. A slot is *idle* in a step that brings nothing
  but zeros for it: its memory stays as it is.
"""
