"""Resources servers of NeMo Gym: `environment.name: nemo_gym`, `options: {url: http://…, path: …}`.

Gym's own package needs another Python, so its servers are asked over HTTP. This side is the agent:
it opens a session for each episode (/seed_session), posts each call of the model to the tool's
route, and lets the server score the finished episode (/verify). Rows are those of Gym's data files.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from pydantic import Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.base import RewardedElsewhere
from marin_rl.environments.episode import StepResult, Tool, function_tool
from marin_rl.environments.http_answers import HttpAnswer, UnfitAnswer, ask, ask_once, is_number
from marin_rl.environments.registry import parse_options, register
from marin_rl.errors import EndpointUnavailable, InputError, RewardFault
from marin_rl.finite import reward_number
from marin_rl.integrations.hosted import HeldOutRows, HttpAddress
from marin_rl.types import Example, Message, Role, Split, ToolCall, Turn

PARAMETERS = "responses_create_params"  # of a row: the request that an agent would make
ROUTES = ("/seed_session", "/verify")
CONNECT_TIMEOUT_S = 30.0
_ROLES: Mapping[str, Role] = {
    "developer": "system", "system": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip


class NemoGymOptions(Section):
    """Options of `nemo_gym`."""

    url: HttpAddress = Field(
        description="address of a resources server, such as http://127.0.0.1:8080"
    )
    path: str = Field(description="data file of the environment, as JSON lines")
    eval_fraction: float = Field(
        default=0.1, gt=0, lt=1, description="share of the rows kept for evaluation"
    )


@register("nemo_gym", NemoGymOptions, server=True)
class NemoGym(RewardedElsewhere):
    """Rewards the end of an episode as the server's /verify does."""

    name = "nemo_gym"
    workers = 0  # servers are only waited for

    def __init__(self, config: EnvironmentConfig) -> None:
        self.options = parse_options(NemoGymOptions, config)
        self.timeout_s = config.step_timeout_s or config.reward_timeout_s
        self.turns_max = config.turns_max

    def load_examples(self) -> None:
        self._rows = rows = HeldOutRows(self.options.path, self.options.eval_fraction)
        for number, row in enumerate(rows):
            try:
                _start_of(row)
            except ValueError as error:
                raise InputError(f"{rows.place(number)}: {error}") from None
        self.size, self.eval_size, self.rows_digest = rows.size, rows.eval_size, rows.digest
        self.version = f"1+{_title(self.options.url)}+{rows.digest}"

    def tools_offered(self) -> Sequence[Tool]:
        return _start_of(next(iter(self._rows)))[1]

    def example(self, seed: int, index: int, split: Split) -> Example:
        row = self._rows.row(seed, index, split)
        return self.make_example(
            _start_of(row)[0], seed=seed, index=index, split=split, metadata={"row": row}
        )

    def episode(self, example: Example) -> "NemoGymEpisode":
        return NemoGymEpisode(self, example)


class NemoGymEpisode:
    """A session; cookies tell the server which one."""

    def __init__(self, environment: NemoGym, example: Example) -> None:
        self._environment = environment
        self._row: Mapping[str, Any] = example.metadata["row"]
        self._client: httpx.AsyncClient | None = None
        self._output: list[dict[str, Any]] = []
        self._turns = 0

    async def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        options = self._environment.options
        self._client = httpx.AsyncClient(
            base_url=options.url, timeout=self._environment.timeout_s, trust_env=False
        )
        answer = await self._post("/seed_session", self._row)
        if not answer.ok:
            raise RewardFault(f"{options.url}/seed_session answers {answer.words}")
        messages, tools = _start_of(self._row)
        return messages, tools

    async def step(self, turn: Turn) -> StepResult:
        self._turns += 1
        if turn.content:
            part = {"type": "output_text", "text": turn.content, "annotations": []}
            message = {"type": "message", "id": f"msg_{self._turns}", "role": "assistant"}
            self._output.append({**message, "status": "completed", "content": [part]})
        for call in turn.tool_calls:
            named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            self._output.append({"type": "function_call", **named, "status": "completed"})
        messages = [await self._called(call) for call in turn.tool_calls]
        if messages and self._turns != self._environment.turns_max:
            return StepResult(messages=tuple(messages))
        return await self._verified()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _called(self, call: ToolCall) -> Message:
        """The result of a call; what the server says against it is for the model too."""
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError) as error:
            text = json.dumps({"error": f"Invalid tool call arguments: {error}"})
        else:
            names = [tool["function"]["name"] for tool in _start_of(self._row)[1]]
            if call.name in names:
                text = (await self._post(f"/{call.name}", arguments)).text
            else:
                text = json.dumps({"error": f"no tool {call.name}: there are {', '.join(names)}"})
        self._output.append({"type": "function_call_output", "call_id": call.id, "output": text})
        return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)

    async def _verified(self) -> StepResult:
        url = f"{self._environment.options.url}/verify"
        parameters = self._row[PARAMETERS]
        response = {  # the episode as the Responses API has it
            "id": "resp_marin_rl",
            "object": "response",
            "created_at": 0,
            "model": "policy",
            "status": "completed",
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": parameters.get("tool_choice", "auto"),
            "tools": parameters.get("tools") or [],
        }
        answer = await self._post("/verify", {**self._row, "response": response})
        if not answer.ok:
            raise RewardFault(f"{url} answers {answer.words}")
        try:
            body = answer.object()
            reward: Any = body.get("reward")
            if isinstance(reward, bool) or not is_number(reward):
                raise ValueError(f"expected a number as reward, found {reward!r:.80}")
            reward = reward_number(reward, "reward")
        except (UnfitAnswer, ValueError) as error:
            raise RewardFault(f"{url}: {error}") from None
        known = {*self._row, "response", "reward"}
        info = {name: value for name, value in body.items() if name not in known}
        return StepResult(reward=reward, done=True, info=info)

    async def _post(self, route: str, body: Any) -> HttpAnswer:
        assert self._client is not None, "started first"
        url, timeout_s = f"{self._environment.options.url}{route}", self._environment.timeout_s
        try:
            return await ask(self._client, "POST", url, timeout_s=timeout_s, json=body)
        except httpx.HTTPError as error:
            raise EndpointUnavailable(f"{url}: {type(error).__name__}: {error}") from None
        except UnfitAnswer as error:
            raise RewardFault(f"{url} {error}") from None
        except ValueError as error:  # of what the row or the model's call holds
            raise RewardFault(f"{url}: the request cannot be written as JSON: {error}") from None


def _title(url: str) -> str:
    """Name and version of the application behind a URL. Raises InputError."""
    hint = "start the resources server, or set the URL of one (`ng_run` prints it)"
    try:
        answer = ask_once("GET", f"{url}/openapi.json", timeout_s=CONNECT_TIMEOUT_S)
        described = answer.object() if answer.ok else {}
    except (httpx.HTTPError, UnfitAnswer) as error:
        raise InputError(
            f"environment.options.url: no resources server of NeMo Gym answers at {url} "
            f"({type(error).__name__}: {error}); {hint}"
        ) from None
    routes, info = described.get("paths") or {}, described.get("info") or {}
    if not isinstance(routes, dict) or not isinstance(info, dict):
        raise InputError(
            f"environment.options.url: {url}/openapi.json: expected objects as paths and info, "
            f"found {routes!r:.80} and {info!r:.80}; {hint}"
        )
    if missing := [route for route in ROUTES if route not in routes]:
        raise InputError(
            f"environment.options.url: {url} has no route {', '.join(missing)}: expected a "
            f"resources server of NeMo Gym, found {', '.join(sorted(routes)) or 'no API'}; {hint}"
        )
    return f"{info.get('title', 'nemo_gym')}.{info.get('version', '')}"


def _start_of(row: Any) -> tuple[list[Message], list[Tool]]:
    """Messages and tools of a row. Raises ValueError for what a text policy cannot take."""
    parameters = row.get(PARAMETERS) if isinstance(row, dict) else None
    if not isinstance(parameters, dict):
        raise ValueError(f"expected a row with {PARAMETERS}, as data files of NeMo Gym have it")
    items = parameters.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ValueError(f"{PARAMETERS}.input: expected messages, found {items!r:.80}")
    messages = [_message_of(item) for item in items]
    if instructions := parameters.get("instructions"):
        messages.insert(0, Message(role="system", content=str(instructions)))
    tools = parameters.get("tools") or []
    if not isinstance(tools, list):
        raise ValueError(f"{PARAMETERS}.tools: expected a list, found {tools!r:.80}")
    return messages, [_tool_of(tool) for tool in tools]


def _message_of(item: Any) -> Message:
    role = _ROLES.get(str(item.get("role"))) if isinstance(item, dict) else None
    content = item.get("content") if isinstance(item, dict) else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        strings = [text for text in texts if isinstance(text, str)]
        content = "".join(strings) if len(strings) == len(content) else None
    if role is None or not isinstance(content, str):
        raise ValueError(f"{PARAMETERS}.input: expected messages of text, found {item!r:.80}")
    return Message(role=role, content=content)


def _tool_of(tool: Any) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ValueError(f"{PARAMETERS}.tools: expected functions, found {tool!r:.80}")
    name: Any = tool.get("name")
    description: Any = tool.get("description") or name
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    texts = isinstance(name, str) and isinstance(description, str)
    if not texts or not isinstance(parameters, dict):
        raise ValueError(
            f"{PARAMETERS}.tools: expected functions with a name, a description and an object as "
            f"parameters, found {tool!r:.80}"
        )
    return function_tool(name, description, parameters)
