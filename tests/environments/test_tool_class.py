"""Classes of tools: TRL's contract, schemas, malformed calls, and what tools may return."""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from transformers.utils import get_json_schema

from marin_rl.config import EnvironmentConfig, load_config
from marin_rl.environments.base import Environment
from marin_rl.environments.checks import environment_of
from marin_rl.environments.episode import StepResult
from marin_rl.environments.tool_class import ToolClass, ToolEpisode, ToolOptions, ToolsOverExamples
from marin_rl.environments.tool_schemas import ToolMethod
from marin_rl.errors import ConfigError, InputError
from marin_rl.types import Message, ToolCall, Turn

CONFIG = """
run_id: shop
rounds: 1
policy:
  init: random
  context_length: 64
  model: {hidden_size: 32, layers: 2, heads: 2, kv_heads: 2, intermediate_size: 64}
environment: {name: "shop.py:Shop", options: {path: PATH}}
sampling: {max_tokens: 4}
evaluation: {examples: 2}
"""
PAGE = (Path(__file__).parents[2] / "docs/your-environment.md").read_text(encoding="utf-8")
SHOP = PAGE.partition("# shop.py\n")[2].partition("```")[0]


def call(name: str, arguments: Any, number: int = 0) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(id=f"c0000{number:04d}", name=name, arguments=text)


def turn(*calls: ToolCall, malformed: str | None = None) -> Turn:
    return Turn(role="assistant", content="", tool_calls=calls, malformed=malformed)


class Odd:
    """Tools with every way to fail."""

    def reset(self, seed: int) -> None:
        self.log: list[str] = []

    def raises(self) -> str:
        """Raise."""
        raise RuntimeError("the table fell over")

    def exits(self) -> str:
        """Leave the process."""
        raise SystemExit(3)

    def large(self) -> str:
        """Return 100 MB."""
        return "x" * 100_000_000

    def unserialisable(self) -> object:
        """Return what has no text."""
        return object()

    def surrogate(self) -> str:
        """Return what is no Unicode."""
        return "a\ud800"

    def mapping(self) -> dict[str, int]:
        """Return a mapping."""
        return {"a": 1}

    async def later(self, word: str) -> str:
        """Return a word, later."""
        await asyncio.sleep(0)
        self.log.append(word)
        return " ".join(self.log)

    def get_reward(self) -> float:
        return float(len(self.log))


def odd(**options: Any) -> ToolEpisode:
    limits = EnvironmentConfig(turns_max=3, tool_output_characters_max=1000)
    tool_class = ToolClass(Odd, {}, ToolOptions(**options), limits)
    tool_class.check()
    episode = ToolsOverExamples(tool_class)
    made = episode.episode(episode.example(0, 0, "train"))
    assert isinstance(made, ToolEpisode)
    made.start()
    return made


def step(episode: ToolEpisode, *calls: ToolCall, malformed: str | None = None) -> StepResult:
    return asyncio.run(episode.step(turn(*calls, malformed=malformed)))


def test_a_class_in_a_file_plays_the_rows_of_a_prompt_file(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"Buy tea {i}.", "item": "tea"}) for i in range(20)]
    rows.write_text("\n".join(lines))
    (tmp_path / "shop.yaml").write_text(CONFIG.replace("PATH", str(rows)))
    config = load_config(tmp_path / "shop.yaml", [])
    environment = environment_of(config)
    assert isinstance(environment, Environment)
    assert environment.name == "Shop"
    assert environment.size is not None
    assert environment.size > 10
    episode = environment.episode(environment.example(0, 0, "train"))
    (message,), (tool, _) = episode.start()
    assert message.content.endswith(". You have 10 coins.")
    assert tool["function"]["name"] == "buy"
    result = asyncio.run(episode.step(turn(call("buy", {"item": "tea", "count": 2}))))
    assert result.messages == (
        Message(role="tool", content="bought 2 tea", tool_call_id="c00000000", name="buy"),
    )
    assert (result.done, result.reward) == (False, None)
    end = asyncio.run(episode.step(turn()))
    assert (end.done, end.reward, end.messages) == (True, 1.0, ())
    rows.write_text("\n".join(json.dumps({"prompt": f"Buy {i}."}) for i in range(20)))
    with pytest.raises(InputError, match="reset needs item, but the columns of the row are prompt"):
        environment.load_examples()
    rows.write_text("\n".join([*lines, json.dumps({"prompt": "Buy nothing."})]))
    with pytest.raises(InputError, match=r"rows.jsonl, line 21: Shop.reset needs item, but"):
        environment.load_examples()
    with pytest.raises(ConfigError, match="larges"):
        environment_of(load_config(tmp_path / "shop.yaml", ["environment.options.larges=1"]))


def test_calls_of_one_turn_are_answered_in_order() -> None:
    calls = [call("later", {"word": word}, number) for number, word in enumerate("abc")]
    result = step(odd(), *calls)
    assert [message.content for message in result.messages] == ["a", "a b", "a b c"]
    assert [message.tool_call_id for message in result.messages] == [c.id for c in calls]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raises", "{'error': 'the table fell over'}"),
        ("exits", "{'error': '3'}"),
        ("unserialisable", "{'error': 'the tool returned a object, which has no text'}"),
        ("surrogate", "a\\ud800"),
        ("mapping", "{'a': 1}"),
    ],
)
def test_whatever_a_tool_does_is_its_text(name: str, text: str) -> None:
    (message,) = step(odd(), call(name, {})).messages
    assert (message.content, message.cut) == (text, False)


def test_a_large_result_is_cut_and_says_so() -> None:
    (message,) = step(odd(), call("large", {})).messages
    assert (len(message.content), message.cut) == (1000, True)


WRONG = [call("none", {}), call("later", {}), call("later", {"word": 3}), call("later", "[1")]


@pytest.mark.parametrize("wrong", WRONG)
def test_malformed_calls_are_answered_as_configured(wrong: ToolCall) -> None:
    result = step(odd(), wrong, call("later", {"word": "a"}, 1))
    assert result.messages[0].content.startswith("{'error': ")
    assert result.messages[1].content == "a", "a call beside a malformed one is made"
    assert (result.done, result.reward, result.info) == (False, None, {"malformed": 1})
    end = step(odd(malformed="end"), wrong)
    assert (end.done, end.reward, end.messages) == (True, 0.0, ())
    penalty = step(odd(malformed="penalty", malformed_penalty=0.25), wrong)
    assert (penalty.done, penalty.reward) == (False, -0.25)
    assert len(penalty.messages) == 1


def test_text_that_was_meant_as_a_call_gets_an_answer_with_an_id() -> None:
    (message,) = step(odd(), malformed="<tool_call>{").messages
    assert message.role == "tool"
    assert "<tool_call>{" in message.content
    assert len(message.tool_call_id or "") == 9
    assert step(odd(malformed="end"), malformed="<tool_call>{").done


def test_the_last_turn_that_is_allowed_has_the_reward() -> None:
    episode = odd()
    rewards = [step(episode, call("later", {"word": "a"})).reward for _ in range(3)]
    assert rewards == [None, None, 3.0]


class Described:
    """A method with parameters of every simple type."""

    def search(
        self,
        query: str,
        limit: int = 3,
        exact: bool = False,  # noqa: FBT001, FBT002
        weight: Optional[float] = None,  # noqa: UP045
        tags: list[str] | None = None,
        order: Literal["up", "down"] = "up",
        limits: dict[str, int] | None = None,
        either: int | str = 1,
        unit: str = "C",
    ) -> str:
        """Search the index
        for a query.

        Args:
            query: What to
                search for.
            limit: Largest number of hits.
            exact: Match exactly.
            weight: Weight of a hit.
            tags: Tags of a hit.
            order: Order of hits.
            limits: Limit by tag.
            either: A number or a name.
            unit: Unit of numbers. (choices: ["C", "F"])

        Returns:
            The hits.
        """
        return query


def test_schemas_are_those_of_transformers() -> None:
    schema = ToolMethod("search", Described.search).schema
    expected = get_json_schema(Described().search)
    expected["function"].pop("return", None)
    assert schema == expected


@pytest.mark.parametrize(
    ("method", "words"),
    [(lambda self, x: x, "expected a docstring"), (None, "parameter x: expected a type")],
)
def test_a_method_that_no_schema_describes_is_refused(method: Any, words: str) -> None:
    def untyped(self, x):
        """Do it."""

    with pytest.raises(ConfigError, match=words):
        ToolMethod("tool", method or untyped)


def test_a_class_without_tools_rows_or_reward_is_refused() -> None:
    def check(kind: type) -> None:
        ToolClass(kind=kind, arguments={}, options=ToolOptions()).check()

    def tool(self: object) -> str:
        """Do it."""
        return ""

    def reset(self: object) -> None:
        pass

    def get_reward(self: object) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="expected at least one tool"):
        check(type("Empty", (), {"reset": reset, "get_reward": get_reward}))
    with pytest.raises(ConfigError, match="has no reward: expected a method `get_reward`"):
        check(type("Free", (), {"reset": reset, "tool": tool}))
    with pytest.raises(ConfigError, match="has no rows: expected"):
        check(type("Rowless", (), {"reset": reset, "tool": tool, "get_reward": get_reward}))
    assert EnvironmentConfig().tool_output_characters_max is None
