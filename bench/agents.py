"""Cost of a call of an agent: at the gateway of sessions, and at the server's own routes.

    python bench/agents.py [--sessions 200] [--calls 20] [--requests 500]

The agents are another process, and send the first requests that real clients sent, at their real
sizes (`tests/integrations/transcripts`). `gateway`: all sessions at once in one event loop, which
answers each call at once; CPU of the whole process per call, the opening of sessions apart.
`server`: the same short conversation by each API to a model of the demo's size, one new token; CPU
per request of the threads that serve, without the engine's. One JSON line for each.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from load import post
from machine import print_head
from server import SERVING, usage

TRANSCRIPTS = Path(__file__).parents[1] / "tests" / "integrations" / "transcripts"
APIS = {
    "chat/completions": "openai_agents_chat",
    "responses": "codex",
    "messages": "claude_code",
}
_SHORTENED = re.compile(r"(.*)… \((\d+) characters\)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--agents", help="of the process that asks: its work, as JSON")
    options = parser.parse_args()
    if options.agents is not None:
        asyncio.run(ask(**json.loads(options.agents)))
        return
    print_head()
    for api, name in APIS.items():
        asyncio.run(gateway(api, name, options))
    server(options)


def body_of(name: str) -> dict[str, Any]:
    """The first request of a client, with texts as long as they were."""

    def lengthened(value: Any) -> Any:
        if isinstance(value, str) and (cut := _SHORTENED.fullmatch(value)) is not None:
            return cut[1] + "x" * (int(cut[2]) - len(cut[1]))
        if isinstance(value, list):
            return [*map(lengthened, value)]
        if isinstance(value, dict):
            return {key: lengthened(each) for key, each in value.items()}
        return value

    return lengthened(json.loads((TRANSCRIPTS / f"{name}.json").read_text())[0]["body"])


async def gateway(api: str, name: str, options: argparse.Namespace) -> None:
    from marin_rl.integrations.agent_gateway import Session
    from marin_rl.model_apis.call import ModelAnswer

    answer = ModelAnswer(text="done " * 40, prompt_tokens=2000, completion_tokens=41)

    async def serve(session: Session) -> None:
        while True:
            (await session.calls.get()).answered.set_result(answer)

    with tempfile.TemporaryDirectory() as folder:
        sessions = [Session("policy") for _ in range(options.sessions)]
        places = [Path(folder, str(number)) for number in range(options.sessions)]
        began = time.process_time()
        for session, place in zip(sessions, places, strict=True):
            await session.open(place, place.with_suffix(".control"))
        opened = time.process_time() - began
        serving = [asyncio.ensure_future(serve(session)) for session in sessions]
        agents = [[str(place), s.key] for place, s in zip(places, sessions, strict=True)]
        work = {"agents": agents, "api": api, "name": name, "calls": options.calls}
        began, cpu = time.perf_counter(), time.process_time()
        command = [sys.executable, __file__, "--agents", json.dumps(work)]
        process = await asyncio.create_subprocess_exec(*command)
        assert await process.wait() == 0
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        for task in serving:
            task.cancel()
        await asyncio.gather(*(session.close() for session in sessions))
    calls = options.sessions * options.calls
    found = {
        "measure": "gateway",
        "api": api,
        "body_bytes": len(json.dumps(body_of(name))),
        "sessions": options.sessions,
        "cpu_ms": round(1000 * cpu / calls, 3),
        "open_cpu_ms": round(1000 * opened / options.sessions, 3),
        "calls_per_s": round(calls / wall),
    }
    print(json.dumps(found), flush=True)


async def ask(agents: list[tuple[str, str]], api: str, name: str, calls: int) -> None:
    """Each agent sends its calls one after the other, all agents at once."""
    data = json.dumps(body_of(name)).encode()

    async def agent(place: str, key: str) -> None:
        reader, writer = await asyncio.open_unix_connection(place)
        lines = f"POST /v1/{api} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n"
        head = f"{lines}Content-Type: application/json\r\nx-api-key: {key}\r\n\r\n".encode()
        for _ in range(calls):
            writer.write(head + data)
            answered = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b" 200 " in answered.split(b"\r\n", 1)[0], answered
            if (length := re.search(rb"content-length: (\d+)", answered)) is not None:
                await reader.readexactly(int(length[1]))
                continue
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        writer.close()

    await asyncio.gather(*(agent(*each) for each in agents))


def server(options: argparse.Namespace) -> None:
    from marin_rl.config import EngineConfig, load_config
    from marin_rl.serving.server import PolicyServer
    from marin_rl.tokenizers import character_tokenizer
    from marin_rl.training.model import build_model

    demo = load_config(Path(__file__).parents[1] / "configs" / "demo.yaml")
    policy = demo.policy.model_copy(update={"context_length": 64})
    inference = demo.inference.model_copy(update={"engine": EngineConfig(slots=16)})
    model, tokenizer = build_model(policy, 128, seed=0), character_tokenizer()
    served = PolicyServer(model, tokenizer, inference, context_length=policy.context_length)
    url = served.start(warm_up=True)
    asked = {"messages": [{"role": "user", "content": "reverse abc"}], "max_tokens": 1}
    fields = {
        "chat/completions": asked,
        "responses": {"input": "reverse abc", "max_output_tokens": 1},
        "messages": asked,
    }
    for api, body in fields.items():
        data = json.dumps({"model": "policy", "seed": 1, **body}).encode()
        post(f"{url}/{api}", [data] * 50, 16)
        before = usage()
        load = post(f"{url}/{api}", [data] * options.requests, 16)
        assert load.errors == 0
        names = [f"{name}_cpu_s" for name in SERVING]
        cpu = sum(usage().get(name, 0.0) - before.get(name, 0.0) for name in names)
        found = {"measure": "server", "api": api, "cpu_ms": round(1000 * cpu / options.requests, 3)}
        print(json.dumps(found), flush=True)
    served.stop()


if __name__ == "__main__":
    main()
