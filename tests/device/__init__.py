"""Devices, simulated: what was expected to break or to be slow on a first GPU, and the test of each mend.

- B1, an all-to-all leaves a node once for each GPU: `test_streaming.py` and `test_levels_processes.py`, two
  levels on the device; `tests/unit/control/test_forecast.py`, bytes over a node's link.
- B2, `auto` took the all-reduce's link for the all-to-all's: `tests/unit/control/test_controller.py`.
- B3, segments, and B8, buckets, of a CPU; B9, an idle wire: `test_granularity.py`.
- B4, a context on the first GPU: `test_placement.py`; counted: `tests/unit/cli/test_gpu_check.py`.
- B5, no C compiler: `test_dispatch.py`.
- B6, uploads that wait: `test_uploads.py`. That nothing else waits in lossy recipes only a GPU can show:
  `tests/gpu/nccl.py`; here `test_streaming.py` looks at what torch is asked for.
- B7, no numba: `tests/process/test_without_numba.py`, `test_gpu_runner.py`.
- B10, TF32 in products: `tests/unit/kernels/test_low_rank.py`, of the setting; a CPU has no TF32.
- B11, a ring's latencies for the status vote: `tests/laws/test_status_vote.py`, `tests/process/test_many.py`,
  `tests/faults/test_tree.py`.
- B12, a mark on another device's stream: `tests/unit/measure/test_clock.py`.
- B13, what is said of pinned memory: `test_placement.py`.
- B14, waits that hide nothing: `test_placement.py`.
- B15, codecs timed where only launches show: `tests/unit/measure/test_codec.py`.
- B16, other accelerators: none is possible here; the GPU guide says what is known by reading.
"""
