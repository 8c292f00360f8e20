"""A small server of S3's protocol, for sites of a benchmark behind emulated links: all is in memory.

As at real stores, and unlike at `moto`'s server, connections stay open from one request to the next. It has
what rounds ask for: objects that are created only if absent, whole or in pieces, lists, reads and deletes.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import socket
import sys
import threading
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from gradwire_lab import emulate
from gradwire_lab.emulate.topology import address

PORT, BUCKET = 9000, "bucket"
WITHIN_S = 60.0


def started(network: emulate.EmulatedNetwork, node: int, **options: Any) -> dict[str, str]:
    """Start a server on `node`. The variables by which `s3://bucket/…` means that one."""
    network.popen(node, [sys.executable, "-m", "benchmarks.s3", address(node)], **options)
    return {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{address(node)}:{PORT}",
        "AWS_ALLOW_HTTP": "true",
    }


def once_there(node: int) -> None:
    """Wait until the server on `node` listens."""
    until_s = time.monotonic() + WITHIN_S
    while True:
        try:
            socket.create_connection((address(node), PORT), WITHIN_S).close()
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
        else:
            return


class _Objects:
    """Objects by key, with the time of each, and uploads in pieces that are not complete."""

    def __init__(self) -> None:
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._held: dict[str, tuple[bytes, datetime]] = {}
        self._pieces: dict[str, dict[int, bytes]] = {}

    def put(self, key: str, data: bytes, *, only_new: bool) -> bool:
        with self._lock:
            if only_new and key in self._held:
                return False
            self._held[key] = data, datetime.now(UTC)
            return True

    def get(self, key: str) -> tuple[bytes, datetime] | None:
        with self._lock:
            return self._held.get(key)

    def delete(self, key: str) -> None:
        with self._lock:
            self._held.pop(key, None)

    def listed(self, prefix: str) -> list[tuple[str, int, datetime]]:
        with self._lock:
            return [
                (key, len(data), at)
                for key, (data, at) in sorted(self._held.items())
                if key.startswith(prefix)
            ]

    def begun(self) -> str:
        with self._lock:
            name = str(next(self._numbers))
            self._pieces[name] = {}
            return name

    def put_piece(self, upload: str, number: int, data: bytes) -> None:
        with self._lock:
            self._pieces[upload][number] = data

    def complete(self, upload: str, key: str) -> None:
        with self._lock:
            pieces = self._pieces.pop(upload)
        self.put(key, b"".join(pieces[number] for number in sorted(pieces)), only_new=False)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects = _Objects()

    def do_PUT(self) -> None:
        key, asked = self._asked()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploadId" in asked:
            self.objects.put_piece(asked["uploadId"], int(asked["partNumber"]), data)
        elif not self.objects.put(key, data, only_new=self.headers.get("If-None-Match") == "*"):
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self._answer(200, ETag=_tag(data))

    def do_GET(self) -> None:
        key, asked = self._asked()
        if not key:
            self._answer(200, _list(self.objects.listed(asked.get("prefix", ""))))
        elif (found := self.objects.get(key)) is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            data, at = found
            self._answer(200, data, ETag=_tag(data), Last_Modified=format_datetime(at, usegmt=True))

    def do_POST(self) -> None:
        key, asked = self._asked()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "delete" in asked:
            keys = re.findall("<Key>(.*?)</Key>", data.decode())
            for each in keys:
                self.objects.delete(unescape(each))
            told = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in keys)
            self._answer(200, _xml("DeleteResult", told))
        elif "uploads" in asked:
            name = self.objects.begun()
            self._answer(200, _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>"))
        else:
            self.objects.complete(asked["uploadId"], key)
            self._answer(200, _xml("CompleteMultipartUploadResult", "<ETag>0</ETag>"))

    def _asked(self) -> tuple[str, dict[str, str]]:
        """The key in the bucket, and what else the URL says."""
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        return key, {name: of[0] for name, of in parse_qs(parts.query, keep_blank_values=True).items()}

    def _answer(self, code: int, data: bytes = b"", **heads: str) -> None:
        self.send_response(code)
        for name, value in heads.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _tag(data: bytes) -> str:
    return f'"{hashlib.blake2b(data, digest_size=8).hexdigest()}"'


def _xml(kind: str, inner: str) -> bytes:
    return f'<?xml version="1.0"?><{kind}>{inner}</{kind}>'.encode()


def _list(found: list[tuple[str, int, datetime]]) -> bytes:
    rows = (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{at.isoformat()}</LastModified>"
        f"<ETag>0</ETag><Size>{size}</Size></Contents>"
        for key, size, at in found
    )
    return _xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{''.join(rows)}")


def main() -> None:
    """Serve until the end of this process."""
    ThreadingHTTPServer.daemon_threads, ThreadingHTTPServer.request_queue_size = True, 64
    ThreadingHTTPServer((sys.argv[1], PORT), _Handler).serve_forever()


if __name__ == "__main__":
    main()
