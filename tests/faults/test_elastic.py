"""torchrun starts workers again after a kill: they go on from the newest save, on as many ranks or others."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.process.test_examples import torchrun
from tests.support.command import eventually
from tests.support.ranks import ROOT

pytestmark = [pytest.mark.process, pytest.mark.rest]

UNTIL, KILLED_AT, GUARD_S = 200, 50, 90.0
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else torchrun keeps one store for all starts, in which gloo finds where dead workers listened."""
SAID = re.compile(r"(\d) ranks, steps (\d+) to (\d+): loss ([\d.]+)")


def _children(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for each in threads for child in (each / "children").read_text().split()]


def _said(text: str) -> tuple[int, int, int, str]:
    found = SAID.search(text)
    assert found is not None, text
    ranks, start, stop, loss = found.groups()
    return int(ranks), int(start), int(stop), loss


def _killed_in_the_middle(folder: Path) -> str:
    """What torchrun prints, one of whose workers is killed by `kill -9` once it has saved a few times."""
    said = folder.parent / "said"
    with _agent(folder, said, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1") as agent:
        saved = folder / f"model-{KILLED_AT}.pt"
        assert eventually(saved.exists, GUARD_S), said.read_text()
        os.kill(_children(agent.pid)[1], signal.SIGKILL)
        agent.wait(GUARD_S)
    return said.read_text()


@contextmanager
def _agent(folder: Path, said: Path, *how: str) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with the example, while it runs; what it leaves is ended, as with its machine."""
    command = ["torch.distributed.run", *how, "examples/elastic.py", str(folder), "--until", str(UNTIL)]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src"), **OWN_STORE}
    with said.open("wb") as out:
        agent = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=out,
            stderr=out,
        )
    try:
        yield agent
    finally:
        _end(agent)


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its workers, in this order: it must not start others."""
    workers = _children(agent.pid) if agent.poll() is None else []
    agent.kill()
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def _one_of_two_is_lost(folder: Path) -> str:
    """What the agent prints that is left, of two machines with one worker each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    how = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    how += ["--rdzv-id", "elastic", "--rdzv-endpoint", endpoint]
    # How long the first one waits for a second, and the survivor, once that is gone, for another.
    how += ["--rdzv-conf", "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"]
    kept, lost = folder.parent / "kept", folder.parent / "lost"
    with _agent(folder, kept, *how) as agent:
        # The first agent has the store of the rendezvous, which a machine that is lost must not have.
        assert eventually(partial(_listens, endpoint), GUARD_S), kept.read_text()
        with _agent(folder, lost, *how) as unlucky:
            saved = folder / f"model-{KILLED_AT}.pt"
            assert eventually(saved.exists, GUARD_S), kept.read_text() + lost.read_text()
            _end(unlucky)
            assert agent.wait(GUARD_S) == 0, kept.read_text()
    return kept.read_text()


def _listens(endpoint: str) -> bool:
    host, port = endpoint.split(":")
    with suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


def test_the_example_goes_on_where_it_was_on_as_many_ranks_and_on_more(tmp_path: Path) -> None:
    folder, straight = tmp_path / "broken", tmp_path / "straight"

    def run(world: int, where: Path, until: int) -> tuple[int, int, int, str]:
        return _said(torchrun(world, "elastic.py", str(where), "--until", str(until), folder=tmp_path))

    assert run(2, folder, 20)[:3] == (2, 0, 20)
    *_, loss = run(2, straight, 30)
    assert run(2, folder, 30) == (2, 20, 30, loss)
    assert run(3, folder, 40)[:3] == (3, 30, 40)


@pytest.mark.full
@pytest.mark.timeout(6 * GUARD_S)
def test_when_one_of_two_machines_is_lost_the_other_goes_on_alone_with_what_both_had_not_sent(
    tmp_path: Path,
) -> None:
    folder, straight = tmp_path / "elastic", tmp_path / "straight"
    ranks, start, stop, loss = _said(_one_of_two_is_lost(folder))
    assert (ranks, stop) == (1, UNTIL)
    assert KILLED_AT - 10 <= start < UNTIL, "from the newest whole save"
    # The same in order: two ranks up to there, of which one goes on.
    torchrun(2, "elastic.py", str(straight), "--until", str(start), folder=tmp_path)
    states = [torch.load(path, weights_only=True) for path in sorted((straight / "wire").glob("*.pt"))]
    unsent = [state[f"rank{rank}"]["memory"] for rank, state in enumerate(states)]
    assert len(unsent) == 2
    assert all(memory.any() for each in unsent for memory in each.values()), "both have something"
    model = torch.load(straight / f"model-{start}.pt", weights_only=True)
    alone = torchrun(1, "elastic.py", str(straight), "--until", str(UNTIL), folder=tmp_path)
    assert _said(alone) == (1, start, UNTIL, loss)
    mean = {name: torch.stack([each[name] for each in unsent]).mean(0) for name in unsent[0]}
    # Sums of other orders, over a hundred steps of a loss of about 1.
    assert _by_hand(model, mean, start) == pytest.approx(float(loss), abs=1e-5)
    assert _by_hand(model, {}, start) != pytest.approx(float(loss), abs=1e-4), "as without what was unsent"


def _by_hand(model: dict[str, Tensor], unsent: dict[str, Tensor], start: int) -> float:
    """The last loss of the example's training on one rank, whose first step takes `unsent` along."""
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    net.load_state_dict({name.removeprefix("module."): value for name, value in model.items()})
    optimizer, last = torch.optim.SGD(net.parameters(), lr=0.1), 0.0
    for step in range(start, UNTIL):
        inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), inputs[:, :10].argmax(dim=1))
        loss.backward()
        for name, parameter in net.named_parameters():
            if step == start and name in unsent:
                assert parameter.grad is not None
                parameter.grad += unsent[name]
        optimizer.step()
        last = loss.item()
    return last


@pytest.mark.full
@pytest.mark.timeout(4 * GUARD_S)
def test_a_killed_worker_leaves_no_trace(tmp_path: Path) -> None:
    folder, straight = tmp_path / "killed", tmp_path / "straight"
    ranks, start, stop, loss = _said(_killed_in_the_middle(folder))
    assert (ranks, stop) == (2, UNTIL)
    # The model's file is there before the wire's, so the newest whole save may be the one before it.
    assert KILLED_AT - 10 <= start < UNTIL, "without a hand on it"
    whole = torchrun(2, "elastic.py", str(straight), "--until", str(UNTIL), folder=tmp_path)
    assert _said(whole) == (2, 0, UNTIL, loss)
