"""Advice on a run: which part bounds its steps, and which changes would help.

    observed = traces.read([Path("rank0.json.gz"), Path("rank1.json.gz")])

`observed` has the numbers of a run. `kineto`, `recorded` and `traces` read them from files that
torch.profiler has written.
"""
