"""Episodes of verifiers' classic environments, for `host`.

An environment runs its own loop, unchanged, against a client that hands each prompt to the parent
and waits for the parent's completion. So whatever it overrides holds: prompts, tools, stop
conditions, rubrics. A prompt must go on from the last one with new messages after the completion,
since its tokens are those that were sampled.
"""

import asyncio
import json
from importlib import import_module
from typing import Any

vf: Any = import_module("verifiers")
Client: Any = import_module("verifiers.legacy.clients").Client
kinds: Any = import_module("verifiers.legacy.types")


def begin(options: dict[str, Any]) -> "Library":
    """The environment that `id` names, made with `args`. Raises what verifiers raises."""
    return Library(vf.load_environment(options["id"], **options["args"]), options)


class Library:
    """Rows of an environment's data sets, and an episode for a row.

    An environment without evaluation data holds back the first `eval_fraction` of its rows.
    """

    def __init__(self, environment: Any, options: dict[str, Any]) -> None:
        self._grouped = bool(environment.requires_group_rollouts)
        if self._grouped != options["group_rewards"]:
            has = "functions" if self._grouped else "no function"
            raise ValueError(
                f"its rubric has {has} that score a whole group together: set environment.options."
                f"group_rewards to {str(self._grouped).lower()}"
            )
        if environment.provides_advantages:
            raise ValueError(
                "it sets advantages by itself, which are not used here: expected rewards alone"
            )
        self._environment = environment
        rows = environment.get_dataset()
        if environment.build_eval_dataset() is not None:
            self._rows = {"train": rows, "eval": environment.get_eval_dataset()}
        else:
            held_out = max(1, round(len(rows) * options["eval_fraction"]))
            self._rows = {
                "train": rows.select(range(held_out, len(rows))),
                "eval": rows.select(range(held_out)),
            }
        self.ready = {"sizes": {split: len(rows) for split, rows in self._rows.items()}}

    def row(self, split: str, index: int) -> dict[str, Any]:
        return json.loads(json.dumps(self._rows[split][index], default=str))

    def episode(self, row: dict[str, Any], seed: int) -> "Episode":
        return Episode(self._environment, row, grouped=self._grouped)

    async def score(self, episodes: "list[Episode]") -> list[dict[str, Any]]:
        states = [episode.state for episode in episodes]
        await self._environment.rubric.score_group(states)
        return [{"reward": float(state["reward"]), "metrics": _metrics(state)} for state in states]


class Episode:
    """A rollout of verifiers as a task, and the prompts and completions that it exchanges.

    One that is scored with its group keeps its `state` until it is closed.
    """

    def __init__(self, environment: Any, row: dict[str, Any], *, grouped: bool) -> None:
        self._environment, self._row, self._grouped = environment, row, grouped
        self.state: Any = None
        self._client = Relay()
        self._rollout: asyncio.Task[Any] | None = None
        self._known: list[dict[str, Any]] = []

    async def start(self) -> dict[str, Any]:
        environment = self._environment
        run = environment.rollout if self._grouped else environment.run_rollout
        self._rollout = asyncio.ensure_future(run(self._row, self._client, "policy", {}))
        return await self._next()

    async def step(self, turn: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", **turn}
        self._known.append(_plain(message))
        self._client.completions.put_nowait(message)
        return await self._next()

    async def _next(self) -> dict[str, Any]:
        """The next prompt's new messages, or the end of the rollout, whichever comes first."""
        assert self._rollout is not None
        asked = asyncio.ensure_future(self._client.prompts.get())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return self._end(self._rollout.result())
        messages, tools = asked.result()
        prompt = [_plain(message) for message in messages]
        if prompt[: len(self._known)] != self._known:
            raise ValueError(
                "it rewrites earlier messages of its prompt, and the tokens of those were sampled "
                "and stay: expected the last prompt, the completion, and new messages"
            )
        new = prompt[len(self._known) :]
        self._known = prompt
        return {"messages": new, "tools": tools, "done": False}

    def _end(self, output: Any) -> dict[str, Any]:
        error = output.get("error")
        if error:
            chain = error.get("error_chain_str", error) if isinstance(error, dict) else repr(error)
            raise RuntimeError(str(chain))
        info = {"stop_condition": output.get("stop_condition")}
        if self._grouped:
            self.state = output
            return {"done": True, "reward": None, "info": info, "messages": []}
        info = {"metrics": _metrics(output), **info}
        return {"done": True, "reward": float(output["reward"]), "info": info, "messages": []}

    async def close(self) -> None:
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            await asyncio.wait({self._rollout})
        if self.state is not None:
            await self._environment.rubric.cleanup(self.state)


def _metrics(output: Any) -> dict[str, float]:
    return {name: float(value) for name, value in (output["metrics"] or {}).items()}


async def _never(*_: Any) -> Any:
    """Refuse to convert: `get_response` hands prompts over as verifiers has them."""
    raise RuntimeError("expected no call: no provider's format is used")


class Relay(Client):
    """A client that hands prompts to its episode, and takes completions from it."""

    to_native_tool = to_native_prompt = get_native_response = _never
    raise_from_native_response = from_native_response = _never

    def __init__(self) -> None:
        super().__init__(None)
        self.prompts: asyncio.Queue[Any] = asyncio.Queue()
        self.completions: asyncio.Queue[Any] = asyncio.Queue()

    def setup_client(self, config: Any) -> None:
        """Need no client."""

    async def close(self) -> None:
        """Release nothing."""

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        """The completion of the next turn of the policy."""
        names = ("name", "description", "parameters")
        functions = [{name: getattr(tool, name) for name in names} for tool in tools or ()]
        schemas = [{"type": "function", "function": function} for function in functions]
        self.prompts.put_nowait((prompt, schemas))
        message = await self.completions.get()
        calls = [kinds.ToolCall(**call) for call in message["tool_calls"]]
        return kinds.Response(
            id="turn",
            created=0,
            model=model,
            message=kinds.ResponseMessage(
                content=message["content"],
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            ),
        )


def _plain(message: Any) -> dict[str, Any]:
    """A message with what is compared and sent: role, text, tool calls, id of a call."""
    get, names = message.get, ("id", "name", "arguments")
    return {
        "role": get("role"),
        "content": _text(get("content")),
        "tool_calls": [{n: call[n] for n in names} for call in get("tool_calls") or ()],
        "tool_call_id": get("tool_call_id"),
    }


def _text(content: Any) -> str:
    """The text of a content. Raises ValueError for images and sound."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    other = sorted({part["type"] for part in parts} - {"text"})
    if other:
        raise ValueError(f"a message has parts of type {', '.join(other)}: expected text alone")
    return "".join(part["text"] for part in parts)
