"""`plan_store`: beside rounds of three sites over a folder, and what it refuses."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gradwire
from gradwire._api.plan_store import Prices, looks_in, plan_store
from gradwire.cli.main import app

SITES, ROUNDS, EVERY, SNAPSHOTS = 3, 6, 2, 3
OF: dict[str, Any] = {"sites": 4, "rate_bit_per_s": 50e6, "delay_s": 0.025, "step_s": 0.5}


def trained(folder: Path, number: int, wires: dict[int, Any], begun: threading.Event) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    members = gradwire.members.store(
        str(folder), f"site-{number}", at_least=SITES, snapshot_every=SNAPSHOTS, beat_s=1000.0
    )
    wires[number] = gradwire.outer(model, optimizer, "diloco", every=EVERY, members=members)
    begun.set()
    for _ in range(EVERY * ROUNDS):
        optimizer.zero_grad()
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()


def test_bytes_and_requests_are_those_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    wires: dict[int, Any] = {}
    begun = threading.Event()
    threads = [threading.Thread(target=trained, args=(tmp_path, n, wires, begun)) for n in range(SITES)]
    for each in threads:
        each.start()
        assert begun.wait(300.0)  # of sites that begin at once each would write a first state
    for each in threads:
        each.join()
    (row,) = plan_store(
        torch.nn.Linear(200, 100),
        sites=SITES,
        rate_bit_per_s=1e9,
        step_s=1e-3,
        every=EVERY,
        candidates=["diloco"],
        beat_s=1000.0,
        snapshot_every=SNAPSHOTS,
    ).rows
    told = [wire.metrics() for wire in wires.values()]
    waits_s = max(each["gradwire/waited_s"] for each in told)
    # The first state, which one site writes and the others read, is no part of a round.
    state, rounds = 4 * 20_100, SITES * ROUNDS
    up = ROUNDS * sum(each["gradwire/wire_bytes_per_step"] for each in told) - state
    down = ROUNDS * sum(each["gradwire/received_bytes_per_step"] for each in told) - (SITES - 1) * state
    assert up == pytest.approx(rounds * row.sent_bytes, rel=0.05)
    assert down == pytest.approx(rounds * row.received_bytes, rel=0.05)
    puts = ROUNDS * sum(each["gradwire/puts_per_step"] for each in told)
    assert rounds * 1.0 <= puts <= rounds * (row.puts + 1.0) + 4 * SITES
    # Looks are no more than in all of the longest wait; each is one read and two lists.
    most = rounds * (looks_in(waits_s) + 1)
    lists = ROUNDS * sum(each["gradwire/lists_per_step"] for each in told)
    assert 2 * rounds <= lists <= 2 * most + 5 * rounds + 4 * SITES
    for wire in wires.values():
        wire.detach()


def test_prices_are_stated_or_there_is_no_money() -> None:
    without, stated = plan_store("gpt2", **OF), plan_store("gpt2", **OF, prices=Prices(0.09, 0.005, 0.0004))
    assert "a day" not in str(without)
    assert "no prices are stated, so there is no money here" in str(without)
    assert "a day" in str(stated)
    first = stated.rows[0]
    requests = 1e-3 * (0.005 * (first.puts + first.lists) + 0.0004 * first.gets)
    day = 86_400 / first.round_s * (requests + 0.09 * 1e-9 * first.received_bytes)
    assert first.day_price == pytest.approx(day)


def test_a_longer_wait_takes_more_requests_and_no_more_bytes_of_offers() -> None:
    short, long = (plan_store("gpt2", **OF, waits_s=each).rows[0] for each in (0.0, 10.0))
    assert long.exchange_s == pytest.approx(short.exchange_s + 10.0)
    assert long.lists - short.lists == pytest.approx(2 * 11)
    assert long.received_bytes - short.received_bytes < 1e4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sites": 0}, "sites=0 is not a number of at least 1"),
        ({"step_s": 0.0}, "step_s=0.0 is not a time above 0"),
        ({"rate_bit_per_s": 0.0}, "rate_bit_per_s"),
        ({"waits_s": -1.0}, "waits_s=-1.0 is not a time"),
        ({"candidates": []}, "there is nothing to compare"),
        ({"candidates": ["int4"]}, "take one in which each replica's payload is made without the others"),
    ],
)
def test_what_cannot_be_is_refused_in_words(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_store("resnet18", **OF | wrong)


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_what_is_no_price_is_refused(price: float) -> None:
    with pytest.raises(ValueError, match=f"thousand_writes={price} is not a price of at least 0"):
        Prices(0.09, price, 0.0004)


WORDS = [
    *("plan", "--store", "--model", "resnet18", "--workers", "4", "--rate", "50mbit", "--delay", "25ms"),
    *("--step", "500ms", "--recipes", "sparseloco;bf16"),
]


def test_the_command_prints_it_and_takes_prices() -> None:
    done = CliRunner().invoke(app, [*WORDS, "--every", "20"])
    assert done.stdout.startswith("predicted, not measured: resnet18")
    assert "a round after 20 local steps" in " ".join(done.stdout.split())
    found = json.loads(
        CliRunner().invoke(app, [*WORDS, "--prices", "0.09,0.005,0.0004", "--json", "-"]).stdout
    )
    assert found["every"] == 30  # as of plan_store
    assert [each["recipe"] for each in found["rows"]] == ["sparseloco", "bf16"]
    assert all(each["day_price"] > 0.0 for each in found["rows"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prices", "1,2"], "are not three numbers of at least 0"),
        (["--prices", "a"], "are not three numbers of at least 0"),
        (["--prices=-1,nan,0"], "are not three numbers of at least 0"),
        (["--json", "/no/such/x.json"], "the folder /no/such does not exist"),
        (["--params", "30M"], "give one of --model"),
        (["--every", "0"], "--every 0 is not a number of at least 1"),
        (["--sharded", "--all"], "--sharded, --all: not for --store"),
        (["--nodes", "2", "--per-node", "2", "--inside", "1gbit"], "--nodes, --per-node, --inside: not for"),
        (["--inside-delay", "1ms", "--no-overlap"], "--inside-delay, --overlap: not for --store"),
        (["--codec", "free", "--backward", "1ms", "--target", "0.9"], "--backward, --target, --codec: not"),
    ],
)
def test_what_the_command_cannot_take_is_refused_in_words(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, [*WORDS, *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
