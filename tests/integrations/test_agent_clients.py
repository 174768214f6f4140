"""Agents on ten real clients: what they send is read, matched and answered as they need it.

Their requests were recorded, with the answers of a scripted policy (`transcripts`): these play
here. The clients themselves run where an environment has them (`make test-agents`), in the sandbox
of the environment `agent`, and against the server.
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
from support.models import tiny_model
from support.sandboxes import reason_to_skip
from support.scripted_policies import call, play, tokenizer_of, tool_run
from support.servers import serving
from support.templates import QWEN

from marin_rl.config import ServerConfig
from marin_rl.integrations import agent_gateway, agent_relay
from marin_rl.integrations.agent import VARIABLES, Conversations
from marin_rl.model_apis.call import ModelAnswer, ModelApi, ModelCall
from marin_rl.model_apis.chat import ChatCompletions
from marin_rl.model_apis.messages import AnthropicMessages
from marin_rl.model_apis.responses import Responses
from marin_rl.models.module import LanguageModel
from marin_rl.tool_calls import parameters_of, parse_tool_calls, tool_format
from marin_rl.types import Message, ToolCall

HERE = Path(__file__).parent
TRANSCRIPTS = HERE / "transcripts"
APIS: dict[str, type[ModelApi]] = {
    "chat": ChatCompletions,
    "responses": Responses,
    "messages": AnthropicMessages,
}
AGENTS, RECORD = os.environ.get("MARIN_RL_AGENTS"), "MARIN_RL_RECORD_AGENTS"
WEATHER = call("weather", city="Rome")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done"
# Turns of the policy for each client, and what the second call does: it extends the first, or, with
# the history written anew, begins a segment.
SCRIPTS = {
    "openai_chat": (WEATHER, "done"),
    "openai_responses": (WEATHER, "done"),
    "anthropic": (WEATHER, "done"),
    "openai_agents": (WEATHER, "done"),
    "openai_agents_streamed": (WEATHER, "done"),
    "openai_agents_chat": (WEATHER, "done"),
    "smolagents": (WEATHER, call("final_answer", answer="done")),
    "langgraph": (WEATHER, "done"),
    "pydantic_ai": (WEATHER, "done"),
    "litellm": ("so", "done"),
    "mini_swe_agent": (call("bash", command="echo hi"), call("bash", command=SUBMIT)),
    "codex": (call("exec_command", cmd="echo hi"), "done"),
    "claude_code": (call("Bash", command="echo hi"), "done"),
}
REWRITES = {"smolagents"}
CLIENT_S = 120.0  # of one that waits for an answer that never comes
SHOWN = 120  # characters of a text in a transcript


def transcript(name: str) -> list[Any]:
    return json.loads((TRANSCRIPTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_recorded_calls_go_on_or_begin_anew(name: str) -> None:
    conversations, parents = Conversations(), list[Any]()
    for recorded in transcript(name):
        asked = APIS[api_of(recorded["body"])].parse(recorded["body"])
        parents.append(conversations.parent(asked))
        calls = [ToolCall(**each) for each in recorded["answer"]["tool_calls"]]
        text = recorded["answer"]["text"]
        conversations.add(asked, Message(role="assistant", content=text, tool_calls=tuple(calls)))
    if name in REWRITES:
        assert parents == [None, None]
    else:
        ((number, added),) = filter(None, parents)
        assert number == 0
        assert parents[0] is None
        assert [m.role for m in added] in (["tool"], ["user"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_recorded_calls_are_those_of_chat_with_the_same_conversation(name: str) -> None:
    """The server reads all of them so."""
    for recorded in transcript(name):
        asked = APIS[api_of(recorded["body"])].parse(recorded["body"])
        again = ChatCompletions.parse(asked.chat_body("policy"))
        assert again.messages == asked.messages
        assert again.tools == asked.tools
        assert again.stream == asked.stream


needs_agents = pytest.mark.skipif(
    AGENTS is None, reason="MARIN_RL_AGENTS names an environment with clients (make test-agents)"
)


def shortened(value: Any) -> Any:
    """A body without long texts, and without what names a machine or a session."""
    if isinstance(value, str) and len(value) > SHOWN:
        return f"{value[:SHOWN]}… ({len(value)} characters)"
    if isinstance(value, list):
        return [*map(shortened, value)]
    if isinstance(value, dict):
        private = (*agent_gateway._BOOKKEEPING, "user_id")
        return {name: "…" if name in private else shortened(each) for name, each in value.items()}
    return value


async def answered_by_a_session(name: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Run a client against a session; its requests with their answers, and what it printed."""
    session, recorded = agent_gateway.Session("policy"), list[dict[str, Any]]()
    form = tool_format(tokenizer_of(QWEN, "<|im_end|>"))
    assert form is not None
    paths = folder / "model", folder / "control"
    await session.open(*paths)
    setup = {
        "socket": str(paths[0]),
        "control": str(paths[1]),
        "values": {"key": session.key, "model": "policy"},
        "variables": VARIABLES,
        "command": [f"{AGENTS}/bin/python", str(HERE / "agent_clients.py"), name],
    }
    relay = await asyncio.create_subprocess_exec(
        sys.executable, agent_relay.__file__, cwd=folder, stdin=-1, stdout=-1
    )
    enqueue = session._enqueued

    def enqueued(body: Mapping[str, Any], call: ModelCall) -> Any:
        recorded.append({"body": shortened(body)})
        return enqueue(body, call)

    session._enqueued = enqueued  # type: ignore[method-assign]

    async def serve() -> None:
        for text in SCRIPTS[name]:
            waiting = await session.calls.get()
            parsed = parse_tool_calls(form, text, parameters_of(waiting.call.tools))
            answer = ModelAnswer(
                text=parsed.content or "",
                tool_calls=parsed.calls,
                prompt_tokens=7,
                completion_tokens=2,
            )
            calls = [asdict(call) for call in answer.tool_calls]
            recorded[-1]["answer"] = {"text": answer.text, "tool_calls": calls}
            waiting.answered.set_result(answer)

    try:
        run = relay.communicate(json.dumps(setup).encode())
        (printed, _), _ = await asyncio.wait_for(asyncio.gather(run, serve()), CLIENT_S)
    finally:
        await session.close()
    assert relay.returncode == 0
    anywhere = json.dumps(recorded).replace(str(folder), "/agent")
    return json.loads(anywhere), printed.decode()


def api_of(body: Mapping[str, Any]) -> str:
    is_messages = "max_tokens" in body or "system" in body
    return "responses" if "input" in body else "messages" if is_messages else "chat"


@needs_agents
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client_is_answered_by_a_session(name: str, tmp_path: Path) -> None:
    recorded, printed = asyncio.run(answered_by_a_session(name, tmp_path))
    assert "done" in printed
    assert len(recorded) == len(SCRIPTS[name])
    if RECORD in os.environ:
        text = json.dumps(recorded, indent=1, ensure_ascii=False)
        (TRANSCRIPTS / f"{name}.json").write_text(text + "\n")


@needs_agents
@pytest.mark.slow
@pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client_is_played_in_the_environment(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "agent_clients.py").write_text((HERE / "agent_clients.py").read_text())
    (tmp_path / "rewards.py").write_text("def score(example, text):\n    return 'done' in text\n")
    rows = [{"prompt": f"say done {row}", "answer": "x"} for row in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "path": str(tmp_path / "rows.jsonl"),
        "reward": "rewards.py:score",
        "folder": str(folder),
        "command": ["{python}", "agent_clients.py", name],
        "interpreter": f"{AGENTS}/bin/python",
        "memory_bytes_max": 8 << 30,
        "processes_max": 512,
        "eval_fraction": 0.5,
    }
    environment = {"name": "agent", "step_timeout_s": 300.0, "options": options}
    config = tool_run(tmp_path, environment, groups=1, size=2, context_length=1 << 17)

    def script(messages: Sequence[Message], _: int) -> str:
        said = sum(message.role == "assistant" for message in messages)
        return SCRIPTS[name][said]

    (group,) = play(config, script)
    for rollout in group.rollouts:
        assert (rollout.status, rollout.reward) == ("complete", 1.0), rollout.error
        sampled = [turn for turn in rollout.turns if turn.role == "assistant" and turn.start]
        assert len(sampled) == 2
        assert len(rollout.segment_lengths or (0,)) == (2 if name in REWRITES else 1)


def model_that_says(ids: Sequence[int], vocabulary: int, context_length: int) -> LanguageModel:
    """A model whose next token follows from the last alone: each of `ids` from the one before."""
    rng = np.random.default_rng(0)
    embedded = rng.standard_normal((vocabulary, 32)).astype(np.float32)
    head = np.zeros_like(embedded)
    for last, following in itertools.pairwise(ids):
        head[following] = 10 * embedded[last]

    def fill(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, hax.NamedArray):
            return leaf
        name = str(getattr(path[-2], "name", path[-2]))
        chosen = {"token_embeddings": embedded, "lm_head": head}.get(name)
        if name in ("o_proj", "down_proj"):
            chosen = np.zeros([axis.size for axis in leaf.axes], np.float32)
        return leaf if chosen is None else hax.named(chosen, leaf.axes)

    model = tiny_model(vocabulary=vocabulary, context_length=context_length)
    is_named = lambda node: isinstance(node, hax.NamedArray)
    return jax.tree_util.tree_map_with_path(fill, model, is_leaf=is_named)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server whose model says "done", with a context that is long enough for any client."""
    context, bytes_only = 1 << 15, tokenizer_of(QWEN, "<|im_end|>")
    pages = [page.read_text() for page in (HERE.parents[1] / "docs").glob("*.md")]
    tokenizer = bytes_only.train_new_from_iterator(pages, 4096)  # codex sends 40,000 bytes
    tokenizer.chat_template = QWEN
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    said = tokenizer.encode("done<|im_end|>", add_special_tokens=False)
    model = model_that_says([opening[-1], *said], len(tokenizer), context)
    limits = ServerConfig(new_tokens_max=48)
    with serving(limits, tokenizer=tokenizer, model=model, context_length=context) as server:
        yield server.base_url


@needs_agents
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client_is_answered_by_the_server(name: str, address: str, tmp_path: Path) -> None:
    root = address.removesuffix("/v1")
    values = {"{base_url}": address, "{root_url}": root, "{key}": "none"}
    done = subprocess.run(
        [f"{AGENTS}/bin/python", str(HERE / "agent_clients.py"), name],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]} | {key: values[each] for key, each in VARIABLES.items()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if name not in ("smolagents", "mini_swe_agent"):  # which go on until a tool ends them
        assert done.stdout.strip() == "done"
