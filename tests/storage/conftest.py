"""The four backends that every test of storage runs on: local, memory, fake GCS, fake S3."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.fake_stores import FakeGCS, FakeS3, fake_gcs, fake_s3

from marin_rl.storage.stores.filesystem import ObjectStore, open_store

BACKENDS = ("local", "memory", "gs", "s3")


class Root(NamedTuple):
    """An empty root: its URL and the fsspec options that reach it."""

    url: str
    options: dict[str, Any]


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[FakeGCS]:
    """A fake GCS with an empty bucket named `bucket`."""
    with fake_gcs() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[FakeS3]:
    """moto's S3 with an empty bucket named `bucket`."""
    with fake_s3() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture
def gcs(gcs_server: FakeGCS) -> Iterator[FakeGCS]:
    """The fake GCS, well behaved before and after each test."""
    yield gcs_server
    gcs_server.faults.clear()
    gcs_server.honours_preconditions, gcs_server.readonly = True, False
    gcs_server.page_size = 1000


@pytest.fixture
def s3(s3_server: FakeS3) -> Iterator[FakeS3]:
    """The fake S3, well behaved before and after each test."""
    yield s3_server
    s3_server.faults.clear()


@pytest.fixture(params=BACKENDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """An empty root on each backend."""
    name = uuid.uuid4().hex
    if request.param == "local":
        return Root(str(tmp_path / "root"), {})
    if request.param == "memory":
        return Root(f"memory://{name}", {})
    server = request.getfixturevalue({"gs": "gcs", "s3": "s3"}[request.param])
    return Root(f"{request.param}://bucket/{name}", server.options)


@pytest.fixture
def store_url(root: Root) -> str:
    """URL of an empty root on each backend; `store_options` reach it."""
    return root.url


@pytest.fixture
def store_options(root: Root) -> dict[str, Any]:
    """The fsspec options for `store_url`."""
    return root.options


@pytest.fixture
def store(root: Root) -> ObjectStore:
    """An empty store on each backend."""
    return open_store(root.url, root.options)
