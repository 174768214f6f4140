"""Weights by Arrow Flight with TLS: verified by followers, else one clear error and files."""

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.cases import others_slow
from support.certificates import Authority, Files
from support.policy_runs import commit, small_run, weights

from marin_rl.config import parse_config
from marin_rl.digests import digest_of
from marin_rl.doctor.surroundings import endpoints
from marin_rl.errors import ConfigError, EndpointUnavailable
from marin_rl.inference.flight_tls import trainer_certificate, trusted_roots
from marin_rl.runtime import RunRuntime
from marin_rl.serving.launch import proven_follower
from marin_rl.serving.weights.checkpoint_watcher import CheckpointWatcher
from marin_rl.serving.weights.flight import WeightServer, fetch
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.fleet import FleetBoard, Target, run_sha256
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.runs import Run, committed_checkpoint
from marin_rl.training.model import named_parameters, parameter_shapes

pytestmark = pytest.mark.usefixtures("compiled_quickly")

HERE = "grpc+tls://127.0.0.1:0"
DIGEST = "01" * 32
ARRAYS = {"square": np.arange(15, dtype=np.float32).reshape(3, 5)}
SHAPES = {"square": (3, 5)}
PULLED = {"endpoints": "registered", "publish": "pull", "flight": HERE}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority that no system knows."""
    return Authority(tmp_path, "authority")


def options(files: Files) -> dict[str, str]:
    """The configuration's section `inference` of a trainer with these files."""
    return PULLED | {"flight_certificate": str(files.certificate), "flight_key": str(files.key)}


def trainer_with(files: Files) -> WeightServer:
    """A trainer that hands out `ARRAYS` with these files, which may be unfit."""
    from marin_rl.inference.flight_tls import Certificate

    read = Certificate(files.certificate.read_bytes(), files.key.read_bytes())
    server = WeightServer(HERE, "token", read)
    server.offer(DIGEST, ARRAYS)
    return server


@pytest.fixture
def trainer(authority: Authority) -> Iterator[WeightServer]:
    """A trainer with a certificate of `authority`."""
    server = trainer_with(authority.sign("trainer"))
    yield server
    server.close()


def test_arrays_arrive_from_a_trainer_whose_authority_is_trusted(
    trainer: WeightServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trainer.url.startswith("grpc+tls://127.0.0.1:")
    arrived = fetch(trainer.url, DIGEST, SHAPES, "token", str(authority.path))
    np.testing.assert_array_equal(arrived["square"], ARRAYS["square"])
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))  # as a system that trusts it
    np.testing.assert_array_equal(
        fetch(trainer.url, DIGEST, SHAPES, "token")["square"], ARRAYS["square"]
    )
    with pytest.raises(EndpointUnavailable, match="API token"):
        fetch(trainer.url, DIGEST, SHAPES, "another")


def test_another_authority_is_refused(trainer: WeightServer, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with pytest.raises(EndpointUnavailable, match="certificate is refused: unable to get local"):
        fetch(trainer.url, DIGEST, SHAPES, "token", str(other.path))
    with pytest.raises(EndpointUnavailable, match=r"certificate is refused.*of the system"):
        fetch(trainer.url, DIGEST, SHAPES, "token")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({"days": -1}, "certificate is refused: certificate has expired"),
        ({"host": "127.0.0.2"}, "certificate is of another host: Peer name 127.0.0.1"),
    ],
)
def test_an_expired_certificate_and_that_of_another_host_are_refused(
    authority: Authority, made: dict[str, object], expected: str
) -> None:
    server = trainer_with(authority.sign("unfit", **made))  # type: ignore[arg-type]
    with pytest.raises(EndpointUnavailable, match=expected):
        fetch(server.url, DIGEST, SHAPES, "token", str(authority.path))
    server.close()


def test_a_plain_client_and_a_plain_trainer_are_named(
    trainer: WeightServer, authority: Authority
) -> None:
    with pytest.raises(EndpointUnavailable, match=r"^grpc://"):
        fetch(trainer.url.replace("+tls", ""), DIGEST, SHAPES, "token")
    plain = WeightServer("grpc://127.0.0.1:0", "token")
    with pytest.raises(EndpointUnavailable, match="it speaks no TLS"):
        fetch(plain.url.replace("grpc", "grpc+tls"), DIGEST, SHAPES, "token", str(authority.path))
    plain.close()


def test_tls_needs_both_files_and_files_need_tls(authority: Authority) -> None:
    whole = options(authority.sign("trainer"))
    assert parse_config({"inference": whole}).inference.flight == HERE
    for missing in ("flight_certificate", "flight_key"):
        lacking = {key: value for key, value in whole.items() if key != missing}
        with pytest.raises(ConfigError, match=f"expected {missing}, a PEM file"):
            parse_config({"inference": lacking})
    with pytest.raises(ConfigError, match=r"expected grpc\+tls"):
        parse_config({"inference": whole | {"flight": "grpc://127.0.0.1:0"}})


def test_unfit_files_of_a_trainer_are_refused_before_any_work(
    authority: Authority, tmp_path: Path
) -> None:
    good, other = authority.sign("good"), authority.sign("other")
    missing = Files(certificate=tmp_path / "missing.pem", key=good.key)
    for files, expected in (
        (missing, "missing.pem: No such file"),
        (authority.sign("expired", days=-1), "certificate has expired"),
        (authority.sign("elsewhere", host="127.0.0.2"), "certificate of 127.0.0.1"),
        (Files(certificate=good.certificate, key=other.key), "its own key"),
        (authority.sign("locked", passphrase="secret"), "without a passphrase"),
        (Files(certificate=good.key, key=good.key), "expected PEM, a certificate"),
    ):
        config = parse_config({"inference": options(files)})
        with pytest.raises(ConfigError, match=expected):
            endpoints(config)
    certificate = trainer_certificate(parse_config({"inference": options(good)}).inference)
    assert certificate is not None
    assert "PRIVATE" not in repr(certificate)
    with pytest.raises(ConfigError, match="flight_ca"):
        trusted_roots(str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match="expected certificates as PEM"):
        trusted_roots(str(good.key))


def test_a_run_hands_out_its_policy_by_tls_and_records_no_key(
    tmp_path: Path, authority: Authority
) -> None:
    files = authority.sign("trainer")
    settings = (f"inference.{key}={value}" for key, value in options(files).items())
    run = small_run(tmp_path / "runs", *settings)
    ref = commit(run, 0)
    runtime = RunRuntime(run)
    weights_of_trainer = runtime._weights_of(ref)
    url = runtime._handed_out(weights_of_trainer, 0)
    assert url is not None
    digest = str(manifest_of(run.store, ref).extra["parameters_digest"])
    shapes = parameter_shapes(weights_of_trainer.model)
    assert digest_of(fetch(url, digest, shapes, None, str(authority.path))) == digest
    runtime.close()
    secret = files.key.read_bytes().splitlines()[1]
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert run.folder.read(RUN_KEY)
    assert [path for path in written if secret in path.read_bytes()] == []


@pytest.mark.parametrize("trusted", others_slow([True, False], False))
def test_a_follower_swaps_by_tls_where_it_trusts_the_trainer_else_by_files(
    trainer: WeightServer,
    authority: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    trusted: bool,  # noqa: FBT001
) -> None:
    run = small_run(f"memory://{uuid.uuid4().hex}")
    for round in range(2):
        commit(run, round)
    known = authority if trusted else Authority(tmp_path, "other")
    chosen = run.config.inference.model_copy(update={"flight_ca": str(known.path)})
    settings = run.config.model_copy(update={"inference": chosen})
    board = FleetBoard(run.folder, "token")
    follower = proven_follower(run, settings, 0, board=board)
    digest = promised(run, 1)
    trainer.offer(digest, named_parameters(weights(run, 1)))
    board.aim(
        Target(
            run_sha256=run_sha256(run.folder),
            version=1,
            through=9,
            parameters_digest=digest,
            flight=trainer.url,
        )
    )
    with caplog.at_level(logging.INFO):
        CheckpointWatcher(follower.take, run, 0, board=board).look()
    assert follower.server.engine.policy.parameters_digest == digest
    assert ("came from grpc+tls" in caplog.text) is trusted
    assert ("is read from files" in caplog.text) is not trusted
    follower.server.stop()


def promised(run: Run, round: int) -> str:
    """The digest of a round's parameters, by its manifest."""
    ref = committed_checkpoint(run, round)
    assert ref is not None
    return str(manifest_of(run.store, ref).extra["parameters_digest"])
