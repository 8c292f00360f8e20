"""`gradwire members`: a store is tried, and a run in it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.cli.main import app
from gradwire.members.bucket.check import findings
from gradwire.members.bucket.objects import Bucket, _advice
from gradwire.members.bucket.records import Beat, member_key
from gradwire.members.bucket.rounds import Rules, enter, land, send, settle
from tests.support.bucket import Learner, Memory
from tests.unit.members.test_bucket import learner

pytest.importorskip("obstore")
RUN = CliRunner()


def test_a_folder_keeps_all_that_rounds_ask_for(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["members", "check", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.count("yes  ") == 7
    assert "rounds can go over this store" in done.output
    assert not Bucket(str(tmp_path)).list("")


class Overwrites(Memory):
    """A store that takes a create for a write."""

    def create(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def test_a_store_that_overwrites_is_found_out() -> None:
    found = {each.what: each.holds for each in findings(Overwrites())}
    assert not found["creates only what is absent"]
    assert found["reads back"]


def test_what_opens_no_store_is_said_before_anything_is_done() -> None:
    done = RUN.invoke(app, ["members", "check", "ftp://host/run"])
    assert done.exit_code == 2
    assert "opens no store" in done.output


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "Generic S3 error: NoSuchBucket: The specified bucket does not exist",
            "create it, or mend its name",
        ),
        ("status 403 Forbidden: AccessDenied", "the rights to read, write, list and delete"),
        ("InvalidAccessKeyId", "obstore reads them from the environment"),
        ("No space left on device (os error 28)", "the disk is full"),
        ("error sending request for url (http://10.0.0.1:9000/)", "AWS_ENDPOINT_URL"),
    ],
)
def test_errors_of_stores_say_what_to_do(text: str, advice: str) -> None:
    assert advice in _advice(text)
    assert text[:20] in _advice(text)


def test_a_run_is_shown_in_lines_and_as_a_page(tmp_path: Path) -> None:
    store = Bucket(str(tmp_path / "run"))
    done = RUN.invoke(app, ["members", "watch", str(tmp_path / "run"), "--once"])
    assert done.exit_code == 1
    assert "there is no run at" in done.output
    replica: Learner = learner("site-a")
    seat = enter(store, "site-a", {}, replica, Rules(at_least=1))
    replica.held = {"one"}
    send(seat, replica)
    land(seat, replica, *settle(seat, replica.digest()))
    seat.loss = 0.25
    seat.beat()
    store.put(member_key("<b>", 0), Beat("", 1, 0).as_bytes())
    page = tmp_path / "page.html"
    done = RUN.invoke(app, ["members", "watch", str(tmp_path / "run"), "--once", "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "round 0: site-a (1)" in done.output
    assert "loss 0.25" in done.output
    assert "<td>0</td>" in page.read_text()
    assert "&lt;b&gt;" in page.read_text()
