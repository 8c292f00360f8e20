"""Three sites that meet in a folder, on one machine, in one command.

    python examples/three_sites.py    # needs the extra: pip install '.[store]'

Elsewhere each site runs `python examples/three_sites.py site-a s3://bucket/run`, with a name of its own, and
`gradwire members watch s3://bucket/run` shows the rounds as they come.
"""

import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

import gradwire

ROUNDS, EVERY, BATCH = 6, 20, 256


def site(name: str, url: str) -> None:
    """Train until there were `ROUNDS` rounds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    members = gradwire.members.store(url, name, at_least=2)
    wire = gradwire.outer(model, optimizer, "sparseloco", every=EVERY, members=members)
    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(time.time_ns() % 2**31)  # each site has data of its own
    seen = wire.rounds
    while wire.rounds < ROUNDS:
        inputs = torch.randn(BATCH, 64, generator=random)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ classes).argmax(dim=1))
        loss.backward()
        optimizer.step()  # every 20th takes a round with those who are there
        if wire.rounds != seen:
            seen = wire.rounds
            print(f"{name}: round {seen} of {', '.join(wire.members)}, loss {loss.item():.3f}", flush=True)
    wire.detach()


def main() -> None:
    """All three here, over a folder."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("site-a", "site-b", "site-c")
        sites = [subprocess.Popen([sys.executable, __file__, name, folder]) for name in names]
        sys.exit(max(each.wait() for each in sites))


if __name__ == "__main__":
    site(*sys.argv[1:]) if sys.argv[1:] else main()
