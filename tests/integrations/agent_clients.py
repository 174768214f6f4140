"""Agents on real clients, one by name: `PYTHON agent_clients.py NAME`; prints the last answer.

Runs by the Python of an environment with the clients (`make test-agents`), in the sandbox of an
environment too, so it imports nothing of this repository. The clients find the model by the
variables that sessions set (`OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL` and their keys).
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPENAI, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
ASK, MODEL = "say done", "policy"
os.environ |= {  # nothing but the model is asked
    "HOME": str(Path.cwd()),
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": str(Path.cwd()),
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
}
COMMANDS = Path(sys.prefix) / "node_modules" / ".bin"


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: name of the city
    """
    return f"sunny in {city}"


WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def openai_chat() -> str:
    """Two turns by hand, with a call, the second one streamed."""
    import openai

    client = openai.OpenAI()
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    asked: Any = {"model": MODEL, "tools": [tool]}
    messages: list[Any] = [{"role": "developer", "content": "be short"}]
    messages.append({"role": "user", "content": ASK})
    said = client.chat.completions.create(messages=messages, **asked).choices[0].message
    messages.append(said)
    for call in said.tool_calls or ():
        city = json.loads(call.function.arguments).get("city", "")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(city)})
    messages += [] if said.tool_calls else [{"role": "user", "content": "again"}]
    with client.chat.completions.stream(messages=messages, **asked) as events:
        return str(events.get_final_completion().choices[0].message.content)


def openai_responses() -> str:
    import openai

    client = openai.OpenAI()
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    asked: Any = {"model": MODEL, "tools": [tool], "instructions": "be short"}
    items: list[Any] = [{"role": "user", "content": ASK}]
    said = client.responses.create(input=items, **asked).output
    items += said
    for call in said:
        if call.type == "function_call":
            text = weather(json.loads(call.arguments).get("city", ""))
            output = {"type": "function_call_output", "call_id": call.call_id, "output": text}
            items.append(output)
    items += [] if said[-1].type == "function_call" else [{"role": "user", "content": "again"}]
    text = ""
    with client.responses.stream(input=items, **asked) as events:
        for event in events:
            if event.type in ("response.completed", "response.incomplete"):
                text = event.response.output_text
    return text


def anthropic() -> str:
    import anthropic

    client = anthropic.Anthropic()
    tool: Any = {"name": "weather", "description": "Weather of a city", "input_schema": WEATHER}
    asked: Any = {"model": MODEL, "max_tokens": 64, "system": "be short", "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages)
    assert counted.input_tokens > 0
    said = client.messages.create(messages=messages, **asked).content
    messages.append({"role": "assistant", "content": said})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
        for block in said
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results or "again"})
    with client.messages.stream(messages=messages, **asked) as events:
        return "".join(b.text for b in events.get_final_message().content if b.type == "text")


def openai_agents() -> str:
    from agents import Agent, Runner, function_tool

    agent = Agent(name="a", instructions="be short", tools=[function_tool(weather)], model=MODEL)
    return str(Runner.run_sync(agent, ASK).final_output)


def openai_agents_streamed(api: str = "responses") -> str:
    from agents import Agent, Runner, function_tool, set_default_openai_api

    set_default_openai_api(api)  # type: ignore[arg-type]
    agent = Agent(name="a", instructions="be short", tools=[function_tool(weather)], model=MODEL)

    async def run() -> str:
        result = Runner.run_streamed(agent, ASK)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    return asyncio.run(run())


def openai_agents_chat() -> str:
    return openai_agents_streamed("chat_completions")


def smolagents() -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(MODEL, api_base=OPENAI, api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=2, verbosity_level=0)
    return str(agent.run(ASK))


def langgraph() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = ChatOpenAI(model=MODEL, base_url=OPENAI).bind_tools([weather])
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([weather]))
    graph.set_entry_point("agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return str(graph.compile().invoke({"messages": [("user", ASK)]})["messages"][-1].content)


def pydantic_ai() -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=OPENAI, api_key=KEY))
    return str(Agent(model, tools=[weather]).run_sync(ASK).output)


def litellm() -> str:
    import litellm

    asked: Any = {"model": f"openai/{MODEL}", "api_base": OPENAI, "api_key": KEY}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    said = litellm.completion(messages=messages, **asked).choices[0].message
    messages += [said.model_dump(), {"role": "user", "content": "again"}]
    parts = litellm.completion(messages=messages, stream=True, **asked)
    return "".join(part.choices[0].delta.content or "" for part in parts)


def mini_swe_agent() -> str:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    config = get_config_from_spec("mini.yaml")
    model = {name: value for name, value in config["model"].items() if name != "model_class"}
    model["model_kwargs"] = {**model.get("model_kwargs", {}), "api_base": OPENAI, "api_key": KEY}
    agent = {**config["agent"], "step_limit": 3}
    for name in ("agent_class", "mode", "confirm_exit", "whitelist_actions"):
        agent.pop(name, None)
    place = {name: v for name, v in config["environment"].items() if name != "environment_class"}
    model |= {"model_name": f"openai/{MODEL}", "cost_tracking": "ignore_errors"}
    return str(DefaultAgent(LitellmModel(**model), LocalEnvironment(**place), **agent).run(ASK))


def codex() -> str:
    home = Path.cwd() / ".codex"
    home.mkdir(exist_ok=True)
    settings = {"name": "own", "base_url": OPENAI, "env_key": "OPENAI_API_KEY"}
    provider = "\n".join(f'{name} = "{value}"' for name, value in settings.items())
    (home / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "own"\n[model_providers.own]\n{provider}\n'
        'wire_api = "responses"\n'
    )
    command = [COMMANDS / "codex", "exec", "--skip-git-repo-check"]
    return _command([*command, "--dangerously-bypass-approvals-and-sandbox", ASK])


def claude_code() -> str:
    os.environ |= {
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CONFIG_DIR": str(Path.cwd() / ".claude"),
        "IS_SANDBOX": "1",
    } | dict.fromkeys(
        (
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS",
            "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS",
            "DISABLE_AUTOUPDATER",
        ),
        "1",
    )
    options = ["--permission-mode", "bypassPermissions", "--tools", "Bash"]
    return _command([COMMANDS / "claude", "-p", ASK, *options])


def _command(command: list[Any]) -> str:
    done = subprocess.run(
        [*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr[-4000:])
    if done.returncode:
        sys.exit(f"exit status {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout.strip()


CLIENTS: dict[str, Callable[[], str]] = {
    client.__name__: client
    for client in (
        openai_chat, openai_responses, anthropic, openai_agents, openai_agents_streamed,
        openai_agents_chat, smolagents, langgraph, pydantic_ai, litellm, mini_swe_agent, codex,
        claude_code,
    )
}  # fmt: skip

if __name__ == "__main__":
    print(CLIENTS[sys.argv[1]]())
