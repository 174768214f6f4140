"""A teacher behind an endpoint: our own server by two routes, and servers that answer wrongly."""

import json
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.http_threads import HttpThread
from support.models import full_logprobs, tiny_model
from support.policy_runs import play_round
from support.servers import CONTEXT, serving, talk
from tokenizers import normalizers

from marin_rl.analysis.query import sql
from marin_rl.analysis.verify import verify_run
from marin_rl.config import Config, load_config
from marin_rl.doctor.policy import teacher
from marin_rl.errors import (
    BadResponse,
    ConfigError,
    EndpointUnavailable,
    InputError,
    MarinRLError,
    StalePolicy,
)
from marin_rl.rollouts.teaching import EndpointTeacher
from marin_rl.runtime import RunRuntime
from marin_rl.serving.server import PolicyServer
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import rollouts_manifest
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.model import named_parameters, with_parameters
from marin_rl.training.replay import replay_round

IDENTITY = "policy@00003-01234567"
SCORES = ("/v1/completions", "/generate")
Spoil = Callable[[dict[str, Any]], None]


def configured(url: str, root: Path | str = "runs", *items: str) -> Config:
    given = (f"root={root}", "objective.ratio_level=token", f"distillation.endpoint={url}")
    return load_config("configs/debug.yaml", [*given, "rollouts.shards_per_round=1", *items])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class Spoiling(HttpThread):
    """The server at `url`, with `spoil` done to every answer that scores."""

    def __init__(self, url: str, spoil: Spoil) -> None:
        self.requests: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                handler.answer("GET", None)

            def do_POST(handler) -> None:
                handler.answer("POST", handler.rfile.read(int(handler.headers["content-length"])))

            def answer(handler, method: str, data: bytes | None) -> None:
                self.requests.append(handler.path)
                status, _, body = talk(url, method, handler.path, data)
                if handler.path in SCORES:
                    spoil(body)
                sent = json.dumps(body).encode()
                handler.send_response(status)
                handler.send_header("content-length", str(len(sent)))
                handler.end_headers()
                handler.wfile.write(sent)

            def log_message(handler, format: str, *args: object) -> None:
                pass

        super().__init__(_Server(("127.0.0.1", 0), Handler), "/v1")


@pytest.mark.slow
@pytest.mark.parametrize("route", ["completions", "sglang"])
def test_both_routes_give_the_models_own_logprobs(server: PolicyServer, route: str) -> None:
    config = configured(server.base_url, "runs", f"distillation.route={route}")
    found = EndpointTeacher(config)
    assert found.identity == IDENTITY
    ids = [np.arange(7, 7 + n, dtype=np.int32) for n in (5, 40, 5)]
    scores = found.score(ids, [1, 3, 4])
    for scored, sequence, first in zip(scores, ids, (1, 3, 4), strict=True):
        truth = full_logprobs(tiny_model(), sequence[:first], sequence[first:])
        np.testing.assert_allclose(scored, truth, atol=1e-4)
    shown = f"{IDENTITY}, which reads 0 tokens more; 50 texts alike, the same ends"
    assert teacher(config) == shown


def test_its_model_is_chosen_by_name_or_is_the_only_one(server: PolicyServer) -> None:
    url = server.base_url
    for named in ("policy", IDENTITY):
        assert EndpointTeacher(configured(url, "runs", f"distillation.model={named}")).identity == (
            IDENTITY
        )
    with pytest.raises(InputError, match=f"serves .*{IDENTITY}.*: set distillation.model .* other"):
        EndpointTeacher(configured(url, "runs", "distillation.model=other"))


def of_completions(work: Callable[[list[Any]], None]) -> tuple[str, Spoil]:
    return "completions", lambda body: work(body["choices"][0]["prompt_logprobs"])


def of_sglang(work: Callable[[list[Any]], None]) -> tuple[str, Spoil]:
    return "sglang", lambda body: work(body["meta_info"]["input_token_logprobs"])


def changed(place: dict[str, Any], value: object) -> None:
    next(iter(place.values()))["logprob"] = value


def renamed(body: dict[str, Any]) -> None:
    body["model"] = "policy@00004-89abcdef"


@pytest.mark.parametrize(
    ("spoiling", "kind", "message"),
    [
        (of_completions(list.pop), BadResponse, r"expected prompt_logprobs of the \d+ tokens sent"),
        (of_sglang(list.pop), BadResponse, r"expected meta_info.input_token_logprobs of the \d+"),
        (of_completions(lambda p: changed(p[2], float("nan"))), BadResponse, "is not JSON"),
        (of_completions(lambda p: changed(p[2], -1e9)), BadResponse, "expected finite logprobs"),
        (of_completions(lambda p: p.insert(1, p.pop())), BadResponse, "expected prompt_logprobs"),
        (of_sglang(lambda p: p[2].__setitem__(0, None)), BadResponse, "expected logprobs as"),
        (("completions", renamed), StalePolicy, "the answer is from 'policy@00004-89abcdef'"),
    ],
)  # fmt: skip
def test_a_teacher_that_answers_wrongly_is_one_error_before_work(
    server: PolicyServer,
    tmp_path: Path,
    spoiling: tuple[str, Spoil],
    kind: type[MarinRLError],
    message: str,
) -> None:
    route, spoil = spoiling
    with Spoiling(server.base_url, spoil) as proxy:
        config = configured(proxy.url, tmp_path, f"distillation.route={route}")
        with pytest.raises(kind, match=f"distillation: the teacher at {proxy.url}: .*{message}"):
            teacher(config)
    assert not [*tmp_path.iterdir()]


def test_a_teacher_that_contradicts_itself_is_refused(server: PolicyServer) -> None:
    given: list[int] = []

    def drift(places: list[Any]) -> None:
        given.append(len(given))
        changed(places[2], -float(len(given)))

    with (
        Spoiling(server.base_url, of_completions(drift)[1]) as proxy,
        pytest.raises(InputError, match=r"23 tokens .* differ by 0\.318182 nats on average"),
    ):
        teacher(configured(proxy.url))
    # 7 nats at one of the 22 tokens that have a score.
    assert len(given) == 8  # several replicas may be behind one address


def test_another_tokenizer_other_ends_and_a_short_context_are_refused() -> None:
    other = character_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Replace("e", "a")
    ended = character_tokenizer()
    ended.chat_template = str(ended.chat_template).replace("eos_token", "pad_token")
    for theirs, message in (
        (other, r"distillation\.endpoint: the teacher has another tokenizer"),
        (ended, r"the policy ends an answer with \['<\|end\|>'\], the teacher with"),
    ):
        with serving(tokenizer=theirs) as running, pytest.raises(InputError, match=message):
            teacher(configured(running.base_url))
    long = f"policy.context_length={CONTEXT}", "batching.length_buckets=[]"
    with serving() as running:
        message = f"{IDENTITY}, less a token to sample, was made for {CONTEXT - 1} positions"
        with pytest.raises(InputError, match=message):
            teacher(configured(running.base_url, "runs", *long))
    with pytest.raises(EndpointUnavailable, match="distillation: the teacher at "):
        teacher(configured(running.base_url))


@pytest.mark.slow
def test_an_endpoint_is_asked_once_for_a_shard_and_must_stay_the_same(server, tmp_path):
    with Spoiling(server.base_url, lambda _: None) as proxy:
        run = Run.create_or_open(configured(proxy.url, tmp_path))
        runtime = RunRuntime(run)
        first = runtime.init_policy()
        trained = play_round(runtime, run, 0, first)
        asked = len(proxy.requests)
        assert play_round(runtime, run, 0, first) == replace(trained, reused=True)
        assert [f for f in verify_run(run) if f.problem] == []
        assert replay_round(run, 0).equal
        assert len(proxy.requests) == asked
        found = runtime.teacher()
        assert found is not None
        columns = "select token_ids, loss_mask, teacher_logprobs from rollouts"
        for ids, mask, stored in sql(tmp_path, run.run_id, columns).iter_rows():
            (scores,) = found.score([np.array(ids, np.int32)], [1])
            expected = np.where(np.array(mask[1:]) != 0, scores, 0)
            assert stored[1:] == pytest.approx(expected.tolist(), abs=1e-4)
        sealed = rollouts_manifest(run, 0)
        assert sealed.extra["teacher"] == [IDENTITY]
        assert teacher(run.config).startswith(IDENTITY)
        runtime.close()
    with serving(weight_version=4) as later:
        moved = configured(later.base_url, tmp_path)
        with pytest.raises(InputError, match=f"policy@00004.* that of round 0 was {IDENTITY}"):
            teacher(moved)
    with serving(model=warmer()) as same_name:
        moved = configured(same_name.base_url, tmp_path)
        with pytest.raises(InputError, match="it has other weights under the same id"):
            teacher(moved)


def warmer() -> Any:
    model = tiny_model()
    halved = {name: np.asarray(array) * 0.5 for name, array in named_parameters(model).items()}
    return with_parameters(model, halved)


def test_keys_of_an_endpoint_need_one() -> None:
    for items in (("distillation.model=a",), ("distillation.route=sglang",)):
        with pytest.raises(ConfigError, match="route and model are those of an endpoint"):
            load_config("configs/debug.yaml", ["objective.ratio_level=token", *items])
    with pytest.raises(ConfigError, match="folder and endpoint are two teachers"):
        configured("http://127.0.0.1:9/v1", "runs", "distillation.folder=a")
