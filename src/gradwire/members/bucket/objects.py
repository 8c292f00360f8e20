"""The interface of an object store, and the one implementation: `obstore`. The one file about obstore."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from gradwire.errors import TransportError
from gradwire.measure.clock import now_s
from gradwire.version import EXTRA

TRIES = 8
"""Attempts to create an object whose answers are lost, before that is an error."""
TRIES_S = 60.0
"""No further one begins after so long: training may stand still meanwhile. If packets are lost, one takes a
minute.
"""
PAUSE_S = 0.5
"""Between two of them."""
REQUEST_S = 600.0
"""One request takes so long at most."""
PIECE = 5 << 20
"""Bytes of a piece of a large object: the least that S3 takes."""
LARGEST = 5 * 10**9
"""Bytes that a store creates in one request: S3's limit, and the lowest one."""
METADATA = ("169.254.169.254", "metadata.google.internal")
"""Where credentials are asked for if the environment has none."""


class StoreError(TransportError):
    """A store that does not answer, or refuses. The text says what to do."""


class Objects(Protocol):
    """A store of objects by key. Methods may raise `StoreError`; what was asked may then have happened."""

    def create(self, key: str, data: bytes) -> bool:
        """Create an object, at once and whole. Returns False, and changes nothing, if there is one."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over the one that is there."""

    def upload(self, key: str, data: bytes, bytes_per_s: float = math.inf) -> None:
        """Write a large object that nobody reads yet, in pieces, at so many bytes a second at most."""

    def get(self, key: str) -> bytes | None:
        """Read an object; `None` if there is none."""

    def list(self, prefix: str) -> dict[str, float]:
        """Keys that begin with `prefix`, a path, with the seconds at which each was last written, by the
        store's clock.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Those that are gone already are no error."""

    def pause(self, seconds: float) -> None:
        """Let time pass."""

    def now_s(self) -> float:
        """Seconds of a clock of this process, for the length of a wait."""


def created(objects: Objects, key: str, data: bytes) -> bool:
    """Create an object whose bytes no one else would write. Returns whether it is there with these bytes.

    Raises as `held_after` does.
    """
    return held_after(objects, key, data) == data


def held_after(objects: Objects, key: str, data: bytes) -> bytes:
    """Create an object unless there is one. Returns the bytes of the one that is there then.

    If an answer is lost, the object is read back: its bytes tell whose it is.

    Raises `StoreError` if there is still no answer after some attempts.
    """
    last: StoreError | None = None
    began_s = objects.now_s()
    for tried in range(TRIES):
        if tried and objects.now_s() - began_s > TRIES_S:
            break
        try:
            if objects.create(key, data):
                return data
            found = objects.get(key)
        except StoreError as error:
            last = error
            try:
                found = objects.get(key)
            except StoreError:
                found = None
        if found is not None:
            return found
        objects.pause(PAUSE_S)
    raise last or StoreError(f"{key} can neither be created nor read")


def paced(
    data: bytes, bytes_per_s: float, pause: Callable[[float], None], clock: Callable[[], float]
) -> Iterator[bytes]:
    """Pieces of `data`, of which none comes before those before it have had their time."""
    began_s = clock()
    for start in range(0, max(len(data), 1), PIECE):
        if (early_s := began_s + start / bytes_per_s - clock()) > 0.0:
            pause(early_s)
        yield data[start : start + PIECE]


def check_size(url: str, size: int) -> None:
    """Raise `ValueError` if no object of `size` bytes can be created at `url`."""
    if size > LARGEST and not is_folder(url):
        raise ValueError(
            f"an offer of this model has {size / 1e9:.1f} GB with this recipe, and a store creates an object "
            f"of {LARGEST / 1e9:.1f} GB at most: take a recipe that sends less, such as 'sparseloco'"
        )


_NO_STORE = "{!r} opens no store: write a folder, or a URL such as s3://bucket/run, gs://bucket/run or az://container/run"


class Bucket:
    """`Objects` under a URL, or in a folder."""

    def __init__(self, url: str, *, makes: bool = True) -> None:
        """Open the store at `url`: a folder, or a URL of `s3`, `gs`, `az`, `https` or `file`.

        If `makes`, a folder that is not there is made.

        Raises `ImportError` without obstore, `ValueError` for a URL that is none of these, and `StoreError`
        for a folder that is not there.
        """
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            raise ImportError(f"gradwire.members.store needs obstore: {EXTRA.format('store')}") from error
        if re.match(r"\w{2,}:(?!//)", url):
            raise ValueError(_NO_STORE.format(url))
        self.url, self._engine = url, obstore
        self._store: Any
        try:
            if is_folder(url):
                folder = Path(url.removeprefix("file://")).absolute()
                if makes:
                    folder.mkdir(parents=True, exist_ok=True)
                elif not folder.is_dir():
                    raise StoreError(f"there is no run at {url}: there is no such folder")
                self._store = LocalStore(folder)
            else:
                # Options that are given here take the place of all that the environment says of clients.
                plain = os.environ.get("AWS_ALLOW_HTTP", "").casefold() in ("1", "true")
                options: Any = {"timeout": timedelta(seconds=REQUEST_S), "allow_http": plain}
                self._store = from_url(url, client_options=options)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{url} cannot be made a folder: {_advice(str(error), url)}") from error
        except Exception as error:  # of several types
            raise ValueError(f"{_NO_STORE.format(url)} ({_first_line(error)})") from error

    def create(self, key: str, data: bytes) -> bool:
        """See `Objects.create`."""
        try:
            self._engine.put(self._store, key, data, mode="create")
        except self._engine.exceptions.AlreadyExistsError:
            return False
        except Exception as error:
            raise self._error("write", error) from error
        return True

    def put(self, key: str, data: bytes) -> None:
        """See `Objects.put`."""
        try:
            self._engine.put(self._store, key, data)
        except Exception as error:
            raise self._error("write", error) from error

    def upload(self, key: str, data: bytes, bytes_per_s: float = math.inf) -> None:
        """See `Objects.upload`."""
        try:
            self._engine.put(
                self._store, key, paced(data, bytes_per_s, self.pause, self.now_s), chunk_size=PIECE
            )
        except Exception as error:
            raise self._error("write", error) from error

    def get(self, key: str) -> bytes | None:
        """See `Objects.get`."""
        try:
            return bytes(self._engine.get(self._store, key).bytes())
        except (FileNotFoundError, self._engine.exceptions.NotFoundError) as error:
            if "NoSuchBucket" in str(error):
                raise self._error("read", error) from error
            return None
        except Exception as error:
            raise self._error("read", error) from error

    def list(self, prefix: str) -> dict[str, float]:
        """See `Objects.list`."""
        return {str(each["path"]): each["last_modified"].timestamp() for each in self._listed(prefix)}

    def sizes(self, prefix: str) -> dict[str, int]:
        """Keys that begin with `prefix`, a path, with the bytes of each."""
        return {str(each["path"]): each["size"] for each in self._listed(prefix)}

    def _listed(self, prefix: str) -> Sequence[Any]:
        try:
            return self._engine.list(self._store, prefix=prefix).collect()
        except Exception as error:
            raise self._error("list", error) from error

    def delete(self, keys: Sequence[str]) -> None:
        """See `Objects.delete`."""
        for key in keys:
            try:
                self._engine.delete(self._store, key)
            except (FileNotFoundError, self._engine.exceptions.NotFoundError):
                pass
            except Exception as error:
                raise self._error("delete", error) from error

    def pause(self, seconds: float) -> None:
        """See `Objects.pause`."""
        threading.Event().wait(seconds)

    def now_s(self) -> float:
        """See `Objects.now_s`."""
        return now_s()

    def _error(self, what: str, error: Exception) -> StoreError:
        """The error of a request, in words that say what to do."""
        return StoreError(f"{self.url}: cannot {what}: {_advice(str(error), self.url)}")


def _advice(text: str, url: str) -> str:
    """Advice about an error of the store at `url`, by its text, and what the store has said."""
    # Names of folders and keys may hold each of the signs, and digits.
    plain = re.sub(r"</?|>", " ", text).replace(url, " ")
    told = re.sub(r"\S*/\S*", " ", plain).casefold()
    status = re.search(r"\bstatus\b\D{0,10}(\d{3})\b", told)
    told += f" <{status[1]}>" if status is not None else ""
    known = {
        (
            "no space left",
            "quotaexceeded",
            "disk quota",
            "storagefull",
        ): "the disk is full: make room, or point to another one; the run goes on from what is there",
        ("read-only file system",): "the file system is read only: write to another folder",
    }
    if not is_folder(url):
        told += " <no credentials>" if any(each in text for each in METADATA) else ""
        known |= {
            (
                "nosuchbucket",
                "no such bucket",
                "containernotfound",
            ): "there is no such bucket: create it, or mend its name in the URL",
            (
                "requesttimetooskewed",
            ): "the clock of this machine is wrong, and the store takes no request that "
            "was signed at another time: set the clock",
            (
                "<401>",
                "unauthorized",
                "unauthenticated",
                "authenticationfailed",
                "invalidaccesskeyid",
                "signaturedoesnotmatch",
                "expiredtoken",
            ): "the credentials are not accepted, or have expired: gradwire passes none, obstore reads them "
            "from the environment (AWS_ACCESS_KEY_ID and so on)",
            (
                "incorrectly configured region",
                "authorizationheadermalformed",
            ): "the bucket is in another region: set AWS_REGION to that",
            ("<no credentials>", "missing credential"): "no credentials were found: set them in the "
            "environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            ("builder error",): "the endpoint has no TLS: write https://, or set AWS_ALLOW_HTTP=true",
            ("connection refused", "dns error", "error sending request", "timed out"): "it does not answer: "
            "look at the endpoint (AWS_ENDPOINT_URL for R2 and MinIO) and the network",
        }
    known[
        ("accessdenied", "<403>", "forbidden", "permission denied")
    ] = (  # stores say so of other things, too
        "no right to do that: give this account the rights to read, write, list and delete below the URL"
    )
    for signs, advice in known.items():
        if any(sign in told for sign in signs):
            return f"{advice} ({_first_line(text)})"
    return _first_line(text)


def is_folder(url: str) -> bool:
    """Whether `url` means a folder of this machine."""
    return "://" not in url or url.startswith("file://")


def _first_line(error: object) -> str:
    """The first line of an error, in which code and message take the place of a store's XML."""
    text = str(error).strip()
    line, has_xml, _rest = text.partition("\n")[0].partition("<?xml")
    told = re.findall(r"<(?:Code|Message)>(.*?)</", text)[:2] if has_xml else []
    return (line + ": ".join(told))[:500]
