"""`gradwire members`: a store is tried, and a run in it is shown."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.cli.main import app
from gradwire.members.bucket.check import findings
from gradwire.members.bucket.objects import Bucket, _advice
from gradwire.members.bucket.progress import sealed
from gradwire.members.bucket.records import Beat, member_key, seal_key
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
    ("status", "code", "advice"),
    [
        (404, "NoSuchBucket", "create it, or mend its name in the URL"),
        (403, "AccessDenied", "the rights to read, write, list and delete below the URL"),
        (
            403,
            "InvalidAccessKeyId",
            "not accepted, or have expired: .* obstore reads them from the environment",
        ),
        (403, "SignatureDoesNotMatch", "the credentials are not accepted"),
        (400, "ExpiredToken", "the credentials are not accepted, or have expired"),
        (403, "RequestTimeTooSkewed", "the clock of this machine is wrong, .*: set the clock"),
        (400, "AuthorizationHeaderMalformed", "in another region: set AWS_REGION"),
        (301, "PermanentRedirect", "in another region: set AWS_REGION"),
        (403, "QuotaExceeded", "the disk is full: make room"),
    ],
)
def test_refusals_of_a_server_say_what_to_do(
    status: int, code: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing(status, code) as url, monkeypatch.context() as patched:
        for key, value in (
            *(("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "us-east-1")),
            *(("AWS_ENDPOINT_URL", url), ("AWS_ALLOW_HTTP", "true")),
        ):
            patched.setenv(key, value)
        done = RUN.invoke(app, ["members", "check", "s3://bucket/run"])
    assert done.exit_code == 1
    assert re.search(f"gradwire: s3://bucket/run: cannot write: .*{advice}", done.output)
    assert status == 301 or f"{code}: its message" in done.output


@contextmanager
def refusing(status: int, code: str) -> Iterator[str]:
    """The URL of a server that answers each request with this error, as S3 does."""

    class Refuses(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            head = '<?xml version="1.0" encoding="UTF-8"?>\n'
            self.wfile.write(
                f"{head}<Error><Code>{code}</Code><Message>its message</Message></Error>".encode()
            )

        do_POST = do_PUT

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("No space left on device (os error 28)", "the disk is full"),
        ("error sending request for url (http://10.0.0.1:9000/)", "AWS_ENDPOINT_URL"),
        (
            "Error performing PUT http://10.0.0.1:9000/x in 22 µs - HTTP error: builder error",
            "AWS_ALLOW_HTTP",
        ),
    ],
)
def test_errors_of_stores_say_what_to_do(text: str, advice: str) -> None:
    assert advice in _advice(text, "s3://bucket/run")
    assert text[:20] in _advice(text, "s3://bucket/run")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("Unable to open /mnt/run/offers/00000403/site-401: Input/output error (os error 5)", "/mnt/run"),
        ("Unable to walk dir /mnt/my metadata/run: Is a directory", "/mnt/my metadata/run"),
        ("Generic S3 error: 500 PUT http://host/run/offers/00000401/forbidden-000000", "s3://bucket/run"),
        ("<Code>InternalError</Code><Resource>/run/seals/00000403</Resource>", "s3://bucket/run"),
        ("Unable to copy: Connection timed out (os error 110)", "/mnt/run"),
    ],
)
def test_names_and_digits_in_errors_of_stores_are_no_signs(text: str, url: str) -> None:
    assert _advice(text, url) == text


def test_statuses_and_the_place_of_credentials_are_signs_also_in_xml_and_urls() -> None:
    url = "s3://bucket/run"
    assert "the rights to read" in _advice("status code: 403, <Code>AccessDenied</Code>", url)
    assert "the rights to read" in _advice("Server returned status code: 403: ", url)
    assert "not accepted" in _advice("status 401 for http://host/run", url)
    place = "Error performing PUT http://169.254.169.254/latest/api/token in 3 s"
    assert "no credentials were found" in _advice(place, url)


def test_a_run_is_shown_in_lines_and_as_a_page(tmp_path: Path) -> None:
    store = Bucket(str(tmp_path / "run"))
    done = RUN.invoke(app, ["members", "watch", str(tmp_path / "run"), "--once"])
    assert done.exit_code == 1
    assert "there is no run at" in done.output
    assert not list((tmp_path / "run").iterdir())
    done = RUN.invoke(app, ["members", "watch", str(tmp_path / "not there"), "--once"])
    assert done.exit_code == 1
    assert "there is no such folder" in done.output
    assert not (tmp_path / "not there").exists()
    replica: Learner = learner("site-a")
    seat = enter(store, "site-a", {}, replica, Rules(at_least=1))
    replica.held = {"one"}
    send(seat, replica)
    land(seat, replica, *settle(seat))
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
    store.put(seal_key(1), b"no seal")
    done = RUN.invoke(app, ["members", "watch", str(tmp_path / "run"), "--once"])
    assert done.exit_code == 1
    assert "the seal of round 1 at" in done.output
    assert "is damaged" in done.output


def test_a_watch_reads_no_offer(tmp_path: Path) -> None:
    store, read = Bucket(str(tmp_path)), list[str]()
    replica: Learner = learner("site-a")
    seat = enter(store, "site-a", {}, replica, Rules(at_least=1))
    replica.held = {"one"}
    send(seat, replica)
    land(seat, replica, *settle(seat))
    [(key, size)] = store.sizes("offers").items()
    get = store.get
    store.get = lambda key: read.append(key) or get(key)  # type: ignore[method-assign,func-returns-value]
    [one] = sealed(store)
    assert one.offered_bytes == size == len(get(key) or b"")
    assert {each.partition("/")[0] for each in read} == {"seals"}
