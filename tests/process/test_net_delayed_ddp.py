"""The delaying process group under plain DDP and torch's fp16 hook, in a script that knows nothing of it."""

import json
import sys

import pytest

from tests.support.command import gradwire

pytestmark = [pytest.mark.network, pytest.mark.process, pytest.mark.rest]
SCRIPT = """
import json, time, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
dist.init_process_group("gloo")

def seconds(action, times=2):
    dist.barrier()
    start_s = time.monotonic()
    for _ in range(times):
        action()
    return (time.monotonic() - start_s) / times

def step_of(hook):
    ddp = DDP(torch.nn.Linear(1000, 500), bucket_cap_mb=1)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    def step():
        ddp(torch.ones(1, 1000)).sum().backward()
    step()
    return step

plain, fp16 = step_of(None), step_of(fp16_compress_hook)
groups = [dist.new_group(), dist.new_group(backend="gloo")]
tensor = torch.ones(250_000)

def both():
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for group in groups]:
        work.wait()

found = {"plain": seconds(plain), "fp16": seconds(fp16), "both": seconds(both)}
other = torch.empty_like(tensor)
splits = [0, 0]
splits[1 - dist.get_rank()] = tensor.numel()
found["swap"] = seconds(lambda: dist.all_to_all_single(other, tensor, splits, splits))
gathered = [None, None]
dist.all_gather_object(gathered, dist.get_rank())
swapped = torch.empty(2)
dist.all_to_all_single(swapped, torch.full((2,), float(dist.get_rank())))
found["verbs"] = [gathered, swapped.tolist()]
dist.destroy_process_group(groups[0])
found["left"] = groups[0] not in dist.distributed_c10d._world.pg_names
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def test_ddp_hooks_and_new_groups_are_slowed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--workers", "2", "--rate", "40mbit", "--mode", "backend"]
    done = gradwire("net", "run", *options, "--", sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    step_s = 500_500 * 4 * 8 / 40e6  # two ranks send 2(N-1)/N times the gradient, which is the gradient
    assert 0.98 * step_s < found["plain"] < 3 * step_s
    assert 0.98 * step_s / 2 < found["fp16"] < 0.8 * found["plain"]
    # Two groups, one wire: 1 MB each, one after the other.
    assert found["both"] > 0.98 * 2 * 1e6 * 8 / 40e6
    # Everything goes to the peer: 1 MB, and not the half that even splits would send.
    assert found["swap"] > 0.98 * 1e6 * 8 / 40e6
    assert found["left"]
    assert found["verbs"] == [[0, 1], [0.0, 1.0]]
