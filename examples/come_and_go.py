"""Two sites that come and go, on one machine: one is killed in the middle, and comes back.

    python examples/come_and_go.py    # needs the extra: pip install '.[elastic]'

starts a lighthouse and both sites. Elsewhere one machine runs `gradwire lighthouse --bind ADDRESS:29510`, and
each site `python examples/come_and_go.py site-a http://ADDRESS:29510`.
"""

import subprocess
import sys
import time

import torch
from torch import nn

import gradwire

TOGETHER, EVERY, BATCH = 8, 20, 256


def site(name: str, lighthouse: str) -> None:
    """Train until there were `TOGETHER` rounds with another site."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    members = gradwire.members.torchft(lighthouse, name=name)
    wire = gradwire.outer(model, optimizer, "int4", every=EVERY, members=members)
    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(time.time_ns() % 2**31)  # each site has data of its own
    seen, together = wire.rounds, 0
    while together < TOGETHER:
        inputs = torch.randn(BATCH, 64, generator=random)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ classes).argmax(dim=1))
        loss.backward()
        optimizer.step()  # every 20th takes a round with those who are there
        if wire.rounds != seen:
            seen, together = wire.rounds, together + (len(wire.members) > 1)
            print(f"{name}: round {seen} of {' and '.join(wire.members)}, loss {loss.item():.3f}", flush=True)
            time.sleep(0.3)  # only so that there is time to watch
    for event in wire.events:
        print(f"{name}: {event}", flush=True)
    wire.detach()


def main() -> None:
    """A lighthouse and both sites here."""
    try:
        from torchft.coordination import LighthouseServer
    except ImportError:
        sys.exit("come_and_go.py needs torchft: in a copy of the source, pip install '.[elastic]'")
    server = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=1000, heartbeat_timeout_ms=2000)
    url = f"http://127.0.0.1:{server.address().rpartition(':')[2].strip('/')}"
    command, lines_since = [sys.executable, __file__], -1
    other = subprocess.Popen([*command, "site-b", url])
    one = subprocess.Popen([*command, "site-a", url], stdout=subprocess.PIPE, text=True)
    for line in one.stdout or ():
        print(line, end="", flush=True)
        lines_since += lines_since >= 0
        if lines_since < 0 and "site-a and site-b" in line:
            other.kill()
            lines_since = 0
        if lines_since == 3:
            other = subprocess.Popen([*command, "site-b", url])
    other.terminate()
    server.shutdown()
    sys.exit(one.wait())


if __name__ == "__main__":
    site(*sys.argv[1:]) if sys.argv[1:] else main()
