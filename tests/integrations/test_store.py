"""Rounds over S3's protocol, against the server of `moto`."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gradwire.members.bucket.check import findings
from gradwire.members.bucket.objects import PIECE, Bucket, StoreError, created
from gradwire.members.bucket.progress import sealed
from gradwire.members.bucket.rounds import Rules, enter, land, send, settle, write_snapshot
from tests.process.stored_job import check_that_no_kill_costs_a_sealed_round
from tests.support.source import ROOT
from tests.unit.members.test_bucket import learner

pytest.importorskip("obstore")
pytest.importorskip("moto")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with the bucket "bucket", to which the environment points."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    for key, value in (
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", url),
        ("AWS_ALLOW_HTTP", "true"),
    ):
        monkeypatch.setenv(key, value)
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    yield url
    server.stop()


def test_it_keeps_all_that_rounds_ask_for(endpoint: str) -> None:
    found = list(findings(Bucket("s3://bucket/check")))
    assert [each.what for each in found if not each.holds] == []


def test_one_creation_of_six_has_an_effect(endpoint: str) -> None:
    store = Bucket("s3://bucket/races")
    for race in range(10):
        won, starts = list[int](), threading.Barrier(6)

        def run(
            number: int, race: int = race, won: list[int] = won, starts: threading.Barrier = starts
        ) -> None:
            starts.wait()
            if created(store, f"seals/{race:08d}", str(number).encode()):
                won.append(number)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(won) == 1
        assert store.get(f"seals/{race:08d}") == str(won[0]).encode()


def test_rounds_snapshots_and_a_newcomer(endpoint: str) -> None:
    store, a = Bucket("s3://bucket/run"), learner("a")
    seat = enter(store, "a", {}, a, Rules(at_least=1))
    for round_ in range(4):
        a.held = {str(round_)}
        send(seat, a)
        land(seat, a, *settle(seat))
        write_snapshot(seat, seat.round, a.give())
    late = learner("b")
    assert enter(store, "b", {}, late, Rules()).round == 4
    assert late.shared == a.shared == set("0123")
    assert [each.round for each in sealed(store)] == [0, 1, 2, 3]


def test_an_object_in_pieces_is_read_back_whole(endpoint: str) -> None:
    store, data = Bucket("s3://bucket/run"), bytes(range(256)) * ((2 * PIECE) // 256 + 3)
    store.upload("theta/0", data)
    assert store.get("theta/0") == data


def test_a_bucket_that_is_not_there_is_said(endpoint: str) -> None:
    with pytest.raises(StoreError, match="there is no such bucket: create it, or mend its name"):
        Bucket("s3://another/run").put("spec", b"")


@pytest.mark.timeout(900)
def test_kills_and_newcomers_cost_no_sealed_round_and_a_job_goes_on_from_the_bucket(
    endpoint: str, tmp_path: Path
) -> None:
    check_that_no_kill_costs_a_sealed_round("s3://bucket/job", tmp_path)


@pytest.mark.timeout(600)
def test_three_sites_train_over_it(endpoint: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "three_sites.py")]
    with ExitStack() as started:
        sites = []
        for name in ("site-a", "site-b", "site-c"):
            sites.append(subprocess.Popen([*command, name, "s3://bucket/sites"]))
            started.callback(sites[-1].kill)
        assert [each.wait(timeout=500) for each in sites] == [0, 0, 0]
