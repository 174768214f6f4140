"""A hostile chat template costs its own request a clear error, and nothing else.

The renderer kills what exceeds a limit and goes on with a fresh worker. A server answers /healthz
and other requests meanwhile, and SIGTERM ends it.
"""

import json
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cases import others_slow
from support.forked_python import python
from support.models import tiny_model
from support.policy_runs import small_run
from support.processes import wait_until_gone
from support.servers import CHAT, CONTEXT, ENGINE, chat_body, talk
from support.templates import CHATML, TALK

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.config import InferenceConfig, ServerConfig
from marin_rl.errors import InputError, TemplateFault, TemplateRefusal
from marin_rl.isolated.pool import Pool
from marin_rl.isolated.processes import WorkerLimits, WorkerSpec
from marin_rl.serving.server import PolicyServer
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.model import build_model

DOUBLED = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(64) %}"
DOUBLED += "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
# no constants, which Jinja would compute when it compiles
NUMBERS = "{% set x = ('f' * 1000000 * messages|length)|int(0, 16) %}"
NUMBERS += "{% set y = ('e' * 500000 * messages|length)|int(0, 16) %}"
# One call of C code, or a chain of filters: no loop of the template's own could be counted.
ONE_CALL = {
    "equality of nested lists": DOUBLED + "{% if ns.a == ns.b %}x{% endif %}",
    "lists of long ranges": "{{ (([range(99999)] * 1000000)|map('list')|list)|length }}",
    "remainders of large integers": NUMBERS + "{% set z = x % y %}" * 400,
}
LOOP = "{% for a in range(99999) %}"
NESTED = "{% set ns = namespace(x=['x' * 1000]) %}"
NESTED += "{% for i in range(26) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"

LOOPS = {
    "endless loop": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "endless output": LOOP + LOOP + "x{% endfor %}{% endfor %}",
    "formatted": "{{ '{:1000000000}'.format('x') }}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "bushy recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "output of a gigabyte": "{{ 'x' * 10**9 }}",
    "constants when compiling": "{{ 'x' * 10**8 * 10**8 }}",
    "indented json": "{{ [1] | tojson(indent=10**9) }}",
    "deep parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "deep blocks": "{% if true %}" * 20_000 + "x" + "{% endif %}" * 20_000,
    "lists in lists printed": NESTED + "{{ ns.x }}",
}
ESCAPES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of a global": "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
    "attr": "{{ messages|attr('__class__')|attr('__init__') ~ messages.__class__() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "append": "{{ messages.append(1) }}",
    "files": "{% include '/etc/passwd' %}{% import 'os' as os %}{{ os }}",
    "generator": "{% set g = messages|map('upper') %}{{ g.gi_frame.f_back.f_globals }}",
    "filter": "{{ tojson.__globals__ }}",
    "keys": "{% for key in ['__class__'] %}{{ messages[key] }}{% endfor %}",
    "environment": "{{ self._TemplateReference__context.environment.from_string.__globals__ }}",
}

HANGS_S = 60
STARTS_S = 240
MEMORY_BYTES = 256 * 2**20
TALKING = Conversation(messages=TALK, opening=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One worker with a shorter limit than users have, so that each attack ends sooner."""
    limits = WorkerLimits(
        cpu_s=0.3, wall_s=HANGS_S, memory_bytes=MEMORY_BYTES, answer_bytes=64 * 2**20
    )
    pool = Pool(WorkerSpec(module="marin_rl.isolated.templates", limits=limits), 1)
    yield pool
    pool.close()


def rendered(pool: Pool, source: str) -> str:
    return ChatTemplate(source, {}, pool).render(TALKING).text


def check_alive(pool: Pool) -> None:
    """An honest template is rendered next, by the worker that was started again."""
    assert rendered(pool, CHATML).endswith("And now?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call_or_a_chain_of_filters_is_killed(pool, name):
    with pytest.raises(TemplateFault, match="exceeds a limit") as caught:
        rendered(pool, ONE_CALL[name])
    assert re.search(r"CPU time|MiB of memory|maximum recursion|signal", str(caught.value))
    check_alive(pool)


QUICK = ("endless loop", "output of a gigabyte", "bushy recursion", "deep parentheses")


@pytest.mark.parametrize("name", others_slow(LOOPS, *QUICK))
def test_a_template_without_end_or_measure_is_an_error(pool, name):
    with pytest.raises(InputError) as caught:
        rendered(pool, LOOPS[name])
    assert len(str(caught.value)) < 500
    check_alive(pool)


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_leads_out_of_the_sandbox(pool, name):
    """Unsafe attributes are undefined: printed they are empty, used they are an error."""
    try:
        text = rendered(pool, ESCAPES[name])
    except (TemplateFault, TemplateRefusal) as error:
        text = str(error).replace("TemplateReference__context", "")
    for leak in ("root:", "uid=", "<class", "<function", "<built-in", "<module", "brief"):
        assert leak not in text


def test_a_worker_inherits_no_secret_and_may_not_touch_files_or_start_processes(monkeypatch):
    """Surroundings that an escape from the sandbox would meet."""
    monkeypatch.setenv("MARIN_RL_ADMIN_KEY", "secret")
    limits = WorkerLimits(cpu_s=5, wall_s=HANGS_S, memory_bytes=MEMORY_BYTES, answer_bytes=2**16)
    pool = Pool(WorkerSpec(module="support.processes", limits=limits), 1)
    try:
        (facts,) = pool.ask([b"null"])
    finally:
        pool.close()
    assert "secret" not in json.dumps(facts["environment"])
    assert facts["session"] != os.getsid(0)
    assert facts["written_bytes"] == 0
    assert not facts["jax"]
    assert facts["processes"] == [0, 0]


def test_an_answer_without_measure_is_cut(pool):
    limits = WorkerLimits(cpu_s=9, wall_s=HANGS_S, memory_bytes=MEMORY_BYTES, answer_bytes=1000)
    short = Pool(WorkerSpec(module="marin_rl.isolated.templates", limits=limits), 1)
    try:
        with pytest.raises(TemplateFault, match="an answer over 1000 bytes"):
            rendered(short, "{{ 'x' * 2000 }}")
        assert rendered(short, "{{ 'x' * 900 }}") == "x" * 900
    finally:
        short.close()


def test_a_worker_that_was_killed_by_others_is_replaced(pool):
    check_alive(pool)
    (supervisor,) = pool.process_ids
    workers = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(supervisor, signal.SIGKILL)
    # A call that reaches the worker while it dies would be blamed for its death.
    wait_until_gone(map(int, workers))
    check_alive(pool)


def test_a_batch_stops_at_its_first_fault(pool):
    template = ChatTemplate(
        "{% if messages[0].content == 'boom' %}{{ 'x' * 10**10 }}{% endif %}x", {}, pool
    )
    well = Conversation(messages=[{"role": "user", "content": "well"}])
    boom = Conversation(messages=[{"role": "user", "content": "boom"}])
    assert [rendering.text for rendering in template.render_all([well] * 3)] == ["x"] * 3
    with pytest.raises(TemplateFault, match="MiB of memory"):
        template.render_all([well, boom, *[well] * 1000])


# They hang on the number of messages, so that Jinja does not compute them when it compiles.
TRIGGERED = (
    "{% set n = messages|length %}{% set text = messages[-1].content %}"
    "{% if text == 'boom 1' %}" + DOUBLED + "{% if ns.a == ns.b %}x{% endif %}"
    "{% elif text == 'boom 2' %}{{ (([range(99999)] * n * 10**6)|map('list')|list)|length }}"
    "{% elif text == 'boom 3' %}{{ (([[0] * n * 10**6] * 10**6)|sum(start=[]))|length }}"
    "{% elif text == 'boom 4' %}{{ 'x' * n * 10**9 }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


def ask(url: str, text: str) -> tuple[int, Any]:
    body = chat_body(messages=[{"role": "user", "content": text}])
    status, _, answer = talk(url, "POST", CHAT, body)
    return status, answer


def check_refused(url: str, text: str) -> None:
    status, answer = ask(url, text)
    assert (status, answer["error"]["code"]) == (500, "chat_template")
    assert answer["error"]["message"].startswith("the model's chat template exceeds a limit (")


@contextmanager
def flooded(url: str, texts: list[str]) -> Iterator[list[threading.Thread]]:
    """Requests that meet the hostile branch, under way."""
    threads = [threading.Thread(target=ask, args=(url, text)) for text in texts]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join(STARTS_S)
            assert not thread.is_alive()


@pytest.mark.slow
def test_a_server_goes_on_while_its_template_is_killed(compiled_quickly):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TRIGGERED
    config = InferenceConfig(engine=ENGINE, server=ServerConfig())
    server = PolicyServer(tiny_model(), tokenizer, config, context_length=CONTEXT)
    server.start()
    try:
        url = server.base_url
        assert ask(url, "abc")[0] == 200
        with flooded(url, ["boom 1"]) as threads:
            while threads[0].is_alive():
                assert talk(url, "GET", "/healthz")[0] == 200
                text = {"model": "policy", "prompt": "abc", "max_tokens": 2}
                assert talk(url, "POST", "/v1/completions", text)[0] == 200
                assert ask(url, "abc")[0] == 200  # by the other worker
        check_refused(url, "boom 4")
        assert ask(url, "abc")[0] == 200
    finally:
        server.stop()


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`marin-rl serve --model` in a process of its own, and where it listens."""
    command = [python(), "-m", "marin_rl", "serve", "--model", str(folder), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, bufsize=0) as process:
        try:
            assert process.stderr is not None
            written, deadline = b"", time.monotonic() + STARTS_S
            while not (match := re.search(rb"^serving \S+ at (http\S+)/v1$", written, re.M)):
                ready, _, _ = select.select([process.stderr], [], [], deadline - time.monotonic())
                piece = process.stderr.read(2**16) if ready else b""
                assert piece, written.decode()
                written += piece
            yield process, match[1].decode()
        finally:
            process.kill()


@pytest.mark.slow  # a process of its own imports and compiles everything
def test_a_folder_with_a_hostile_template_is_served_and_ends_by_sigterm(compiled_quickly, tmp_path):
    tokenizer, policy = character_tokenizer(), small_run(tmp_path).config.policy
    folder = tmp_path / "model"
    save_hf(build_model(policy, len(tokenizer), 0), tokenizer, folder)
    (folder / "chat_template.jinja").write_text(TRIGGERED, encoding="utf-8")
    with served(folder) as (process, url):
        assert ask(url, "abc")[0] == 200
        for number in range(1, 5):
            check_refused(url, f"boom {number}")
            assert talk(url, "GET", "/healthz")[0] == 200
        with flooded(url, ["boom 1"] * 6):
            time.sleep(0.5)
            assert talk(url, "GET", "/healthz")[0] == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(STARTS_S) == 0
