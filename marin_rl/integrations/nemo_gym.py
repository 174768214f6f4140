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
from marin_rl.environments.episode import StepResult, Tool
from marin_rl.environments.http_answers import HttpAnswer, UnfitAnswer, ask, ask_once, is_number
from marin_rl.environments.registry import parse_options, register
from marin_rl.errors import EndpointUnavailable, InputError, RewardFault
from marin_rl.finite import reward_number
from marin_rl.integrations.hosted import HeldOutRows, HttpAddress
from marin_rl.model_apis.call import ModelAnswer, ModelCall
from marin_rl.model_apis.responses import Responses
from marin_rl.types import Example, Message, Split, ToolCall, Turn

PARAMETERS = "responses_create_params"  # of a row: the request that an agent would make
ROUTES = ("/seed_session", "/verify")
CONNECT_TIMEOUT_S = 30.0


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
        return _start_of(next(iter(self._rows))).tools

    def example(self, seed: int, index: int, split: Split) -> Example:
        row = self._rows.row(seed, index, split)
        return self.make_example(
            _start_of(row).messages, seed=seed, index=index, split=split, metadata={"row": row}
        )

    def episode(self, example: Example) -> "NemoGymEpisode":
        return NemoGymEpisode(self, example)


class NemoGymEpisode:
    """A session; cookies tell the server which one."""

    def __init__(self, environment: NemoGym, example: Example) -> None:
        self._environment = environment
        self._row: Mapping[str, Any] = example.metadata["row"]
        self._client: httpx.AsyncClient | None = None
        self._asked = _start_of(self._row)
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
        return self._asked.messages, self._asked.tools

    async def step(self, turn: Turn) -> StepResult:
        self._turns += 1
        said = ModelAnswer(
            text=turn.content, tool_calls=turn.tool_calls, prompt_tokens=0, completion_tokens=0
        )
        response = Responses(self._asked, model="policy", prompt_tokens=0).whole(said)
        self._output += response["output"]
        messages = [await self._called(call) for call in turn.tool_calls]
        if messages and self._turns != self._environment.turns_max:
            return StepResult(messages=tuple(messages))
        return await self._verified(response)

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
            names = [tool["function"]["name"] for tool in self._asked.tools]
            if call.name in names:
                text = (await self._post(f"/{call.name}", arguments)).text
            else:
                text = json.dumps({"error": f"no tool {call.name}: there are {', '.join(names)}"})
        self._output.append({"type": "function_call_output", "call_id": call.id, "output": text})
        return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)

    async def _verified(self, last: Mapping[str, Any]) -> StepResult:
        url = f"{self._environment.options.url}/verify"
        parameters = self._row[PARAMETERS]
        asked = {"tool_choice": parameters.get("tool_choice", "auto"), "usage": None}
        asked |= {"tools": parameters.get("tools") or [], "output": self._output}
        answer = await self._post("/verify", {**self._row, "response": {**last, **asked}})
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


def _start_of(row: Any) -> ModelCall:
    """The request of a row. Raises ValueError for what a text policy cannot take."""
    parameters = row.get(PARAMETERS) if isinstance(row, dict) else None
    if not isinstance(parameters, dict):
        raise ValueError(f"expected a row with {PARAMETERS}, as data files of NeMo Gym have it")
    tools = parameters.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
    ):
        raise ValueError(f"{PARAMETERS}.tools: expected functions, found {tools!r:.80}")
    described = [{**tool, "description": tool.get("description") or tool["name"]} for tool in tools]
    try:
        return Responses.read({**parameters, "tools": described})
    except ValueError as error:
        raise ValueError(f"{PARAMETERS}: expected messages of text: {error}") from None
