"""`make teeth`: 250 faults planted in copies of the tree, one at a time, and the tests that notice them.

- `seams`: 60 faults that were chosen by hand. `mutants`: those that a seed draws from the source.
- `recording`: which functions each test enters, in all its threads and processes, and how long it takes.
- `copies`: a tree with a fault in it, in which all processes of a test import that fault. `starter`:
  starts these without loading torch anew.
- `judging`: the tests that enter a fault's function, fastest first, until one fails.
- `report`: the table in `benchmarks/results`.
"""
