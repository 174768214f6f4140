"""Tasks of a taskset of verifiers v1, and rollouts by its environment server, for `host`.

The taskset is loaded here, as its clients do; the server gets each task with the policy's address,
samples and scores, and its episode comes back as messages with their ids.
"""

import asyncio
import itertools
import re
from importlib import import_module, metadata
from typing import Any

EnvClient: Any = import_module("verifiers.v1.serve").EnvClient
EnvConfig: Any = import_module("verifiers.v1.configs.env").EnvConfig
RunRequest: Any = import_module("verifiers.v1.serve").RunRequest
RunResponse: Any = import_module("verifiers.v1.serve").RunResponse
load_taskset: Any = import_module("verifiers.v1.utils.loaders").load_taskset

HEALTH_S = 10.0

# Errors of a server that knows another request than ours, or none.
_OTHER_REQUEST = re.compile(r"unknown method|validation errors? for RunRequest")


class ServerGone(Exception):
    """The environment server ended, or cannot be reached any more."""


class OtherProtocol(Exception):
    """An address answers, and not as an environment server of this version of verifiers."""

    def __init__(self, address: str, found: object) -> None:
        super().__init__(
            f"what answers at {address} does not speak the protocol of verifiers "
            f"{metadata.version('verifiers')}: start the server with this version, or install the "
            f"server's where environment.options.python is; found {str(found)[:500]}"
        )


def begin(options: dict[str, Any]) -> "Library":
    """The taskset that `taskset` describes, and its server. Raises what verifiers raises."""
    config = EnvConfig.model_validate({"taskset": {"id": options["id"], **options["taskset"]}})
    tasks = list(itertools.islice(load_taskset(config.taskset), options["tasks_max"]))
    if len(tasks) < 2:
        raise ValueError(f"the taskset has {len(tasks)} tasks: expected two or more")
    for address in options["address"]:
        if not asyncio.run(_answers(address, options["connect_timeout_s"])):
            raise ValueError(
                f"no environment server of verifiers v1 answers at {address} within "
                f"{options['connect_timeout_s']:g} s: start it, or set options.address to one that "
                "runs"
            )
    return Library(tasks, options)


async def _answers(address: str, timeout_s: float) -> bool:
    client = EnvClient(address)
    try:
        return bool(await client.health(timeout=timeout_s))
    except (TypeError, ValueError, RuntimeError) as error:  # as in `_answer`
        raise OtherProtocol(address, error) from None
    finally:
        client.socket.close()


class Library:
    """Rows are the data of tasks; the first `eval_fraction` of them are held out."""

    def __init__(self, tasks: list[Any], options: dict[str, Any]) -> None:
        rows = [task.data.model_dump(mode="json") for task in tasks]
        held_out = max(1, round(len(rows) * options["eval_fraction"]))
        self._rows = {"train": rows[held_out:], "eval": rows[:held_out]}
        self._options = options
        self._clients: dict[str, Any] = {}
        self.ready = {"sizes": {split: len(rows) for split, rows in self._rows.items()}}

    def row(self, split: str, index: int) -> dict[str, Any]:
        return self._rows[split][index]

    async def play(self, row: dict[str, Any], policy: dict[str, Any], number: int) -> Any:
        """An episode of a task, which the server plays with the policy."""
        addresses = self._options["address"]
        address = addresses[number % len(addresses)]
        if address not in self._clients:
            self._clients[address] = EnvClient(address)
        client = {
            "type": "train",
            "base_url": policy["endpoint"],
            "api_key_var": policy["api_key_variable"],
            "renderer": self._options["renderer"],
            "renderer_model_name": policy["tokenizer"],
        }
        sampled = {"model": policy["model"], "sampling": policy["sampling"]}
        request = RunRequest.model_validate({"task_data": row, "client": client, **sampled})
        episode = await self._answer(address, request)
        return {
            "ok": episode.ok,
            "errors": [f"{error.type}: {error.message}" for error in episode.errors],
            "traces": [_trace(trace) for trace in episode.traces],
        }

    async def _answer(self, address: str, request: Any) -> Any:
        """The server's episode. Raises OtherProtocol, and ServerGone once the server has gone: its
        socket does not say so.
        """
        client = self._clients[address]
        asked = asyncio.ensure_future(client._request(request, RunResponse))
        try:
            while not (await asyncio.wait({asked}, timeout=HEALTH_S))[0]:
                if not await client.health(timeout=HEALTH_S):
                    raise ServerGone(f"the environment server at {address} does not answer")
            episode = asked.result().episode
        except (TypeError, ValueError) as error:  # msgpack's and pydantic's are such
            raise OtherProtocol(address, error) from None
        except RuntimeError as error:  # what the server says of a request that failed
            if _OTHER_REQUEST.search(str(error)):
                raise OtherProtocol(address, error) from None
            raise
        finally:
            asked.cancel()
        if episode is None:
            raise OtherProtocol(address, "an answer without an episode")
        return episode


def _trace(trace: Any) -> dict[str, Any]:
    return {
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "errors": [f"{error.type}: {error.message}" for error in trace.errors],
        "rewards": {name: r and {"score": r.score, "weight": r.weight} for name, r in
                    trace.rewards.items()},
        "metrics": trace.metrics,
        "stop_condition": trace.stop_condition,
        "truncated": trace.is_truncated,
        "nodes": [_node(node) for node in trace.nodes],
    }  # fmt: skip


def _node(node: Any) -> dict[str, Any]:
    message = node.message.model_dump(mode="json")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls, names = message.get("tool_calls") or (), ("id", "name", "arguments")
    reasoning = message.get("reasoning_content")
    return {
        "parent": node.parent,
        "role": message["role"],
        "content": f"<think>{reasoning}</think>{content or ''}" if reasoning else content or "",
        "tool_calls": [{name: call[name] for name in names} for call in calls],
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
        "sampled": node.sampled,
        "token_ids": node.token_ids,
        "mask": node.mask,
        "logprobs": node.logprobs,
    }
