"""An S3 server on loopback, which counts requests, and faults in the calls of a store's driver."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.moto_server.werkzeug_app import DomainDispatcherApplication


@dataclass
class Traffic:
    """Requests by method, and the bytes that were sent and received with them."""

    requests: dict[str, int] = field(default_factory=dict)
    put: int = 0
    got: int = 0

    def note(self, method: str, put: int, got: int) -> None:
        self.requests[method] = self.requests.get(method, 0) + 1
        self.put += put
        self.got += got


class S3:
    """A server of moto with one bucket. `environment` makes clients of a process use it."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def new_bucket(self) -> str:
        """Makes a bucket, and returns its URL."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
        return f"s3://{name}"

    @contextmanager
    def counted(self) -> Iterator[Traffic]:
        """Counts the requests of a block."""
        self.traffic = Traffic()
        with pytest.MonkeyPatch.context() as patch:
            real = DomainDispatcherApplication.__call__

            def call(app: Any, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
                kind = environ["REQUEST_METHOD"]
                if kind == "GET" and "list-type" in environ.get("QUERY_STRING", ""):
                    kind = "LIST"
                body = list(real(app, environ, start))
                got = sum(map(len, body)) if kind == "GET" else 0
                self.traffic.note(kind, int(environ.get("CONTENT_LENGTH") or 0), got)
                return body

            patch.setattr(DomainDispatcherApplication, "__call__", call)
            yield self.traffic

    def stop(self) -> None:
        self._server.stop()


CALLS = ("cat_file", "pipe_file", "_open", "_rm", "ls", "info", "exists")
BEFORE, AFTER, PARTLY = "before its effect", "after its effect", "of a part"


@dataclass
class Faults:
    """Makes the n-th call of the driver of memory:// fail; 0: none. Counts the calls."""

    at: int = 0
    kind: str = BEFORE
    calls: int = 0
    has_failed: bool = False

    @contextmanager
    def active(self) -> Iterator[Faults]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(MemoryFileSystem, name, self._faulty(getattr(MemoryFileSystem, name)))
            yield self

    def _faulty(self, real: Callable[..., Any]) -> Callable[..., Any]:
        inside: list[int] = []

        def call(*args: Any, **options: Any) -> Any:
            if inside:  # a call of a driver calls others
                return real(*args, **options)
            self.calls += 1
            is_due = self.calls == self.at
            if is_due:
                self.has_failed = True
                if self.kind == BEFORE:
                    raise ConnectionError("the store does not answer")
            inside.append(1)
            try:
                result = real(*args, **options)
            finally:
                inside.pop()
            if is_due and self.kind == PARTLY and isinstance(result, bytes):
                return result[: len(result) // 2]
            if is_due:
                raise ConnectionError("the answer is lost")
            return result

        return call


def forget_memory() -> None:
    """Empties memory://."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def copied_memory() -> Callable[[], None]:
    """Returns a call that brings what is in memory:// now back."""
    fs = MemoryFileSystem()
    files = {path: file.getvalue() for path, file in fs.store.items()}

    def restore() -> None:
        forget_memory()
        for path, data in files.items():
            fs.pipe_file(path, data)

    return restore
