"""The commands `env …`: which environments there are, and episodes of one outside of a run."""

import os
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marin_rl.commands import options as opt
from marin_rl.errors import ConfigError

if TYPE_CHECKING:
    from marin_rl.config import Config
    from marin_rl.environments.base import Environment
    from marin_rl.environments.episode import Tool
    from marin_rl.rollouts.trial import TriedEpisode
    from marin_rl.types import Message, Turn

TURNS_MAX = 8

EnvironmentName = Annotated[
    str, typer.Argument(metavar="NAME|CONFIG|RUN", help="name of an environment, or as CONFIG|RUN")
]
Episodes = Annotated[int, typer.Option(min=1, max=100, help="number of episodes")]
Turns = Annotated[int, typer.Option(min=1, max=1000, help="turns of an episode, at most")]


def env_list(*, as_json: opt.AsJsonLines = False) -> None:
    """List the environments that a configuration may name."""
    from marin_rl.display.tables import frame_table
    from marin_rl.environments.registry import described_environments

    environments = described_environments()
    if as_json:
        opt.print_json(*environments)
        return
    columns = ("name", "plays", "turns", "tools", "needs")
    opt.out.print(frame_table(columns, [astuple(each) for each in environments]))


def env_try(  # noqa: PLR0913 - each is an option of the command
    name: EnvironmentName,
    *,
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI base URL, ending in /v1; without it you play")
    ] = None,
    model: Annotated[str, typer.Option(help="model to ask the endpoint for")] = "policy",
    api_key_variable: opt.ApiKeyVariable = None,
    episodes: Episodes = 3,
    turns: Turns = TURNS_MAX,
    overrides: opt.Overrides = None,
    trust: opt.Trust = False,
    as_json: opt.AsJsonLines = False,
    root: opt.ConfigRoot = None,
) -> None:
    """Play episodes with an endpoint, or by hand.

    By hand, a line of standard input is a turn; {"name": …, "arguments": {…}} calls a tool.
    """
    import asyncio

    from marin_rl.rollouts.trial import endpoint_policy, try_episode

    if endpoint is None and as_json:
        raise ConfigError("--json goes with --endpoint: what is played by hand is shown on the way")
    config, environment = _environment(name, overrides, root, trust=trust)
    opt.key_named(api_key_variable)
    key = os.environ.get("MARIN_RL_API_KEY")

    async def play(number: int) -> "TriedEpisode":
        example = environment.example(config.environment.train_seed, number, "train")
        if endpoint is None:
            return await try_episode(environment, config.environment, example, _by_hand, turns)
        async with endpoint_policy(endpoint, model, key, config.sampling.max_tokens) as policy:
            return await try_episode(environment, config.environment, example, policy, turns)

    for number in range(episodes):
        episode = asyncio.run(play(number))
        if as_json:
            opt.print_json({"reward": episode.reward, "dialogue": episode.dialogue})
        else:
            _show(episode)


def _show(episode: "TriedEpisode") -> None:
    opt.print_info(f"Episode {episode.example_id}: reward {episode.reward:g}")
    for message in episode.dialogue:
        opt.print_info(f"  {message['role']}: {message['content']}")
        for call in message["tool_calls"]:
            opt.print_info(f"    -> {call['name']}({call['arguments']})")


async def _by_hand(dialogue: "Sequence[Message]", tools: "Sequence[Tool]") -> "Turn":
    from marin_rl.rollouts.trial import turn_of_text

    last = [message.role for message in dialogue]
    opened = len(last) - last[::-1].index("assistant") if "assistant" in last else 0
    for message in dialogue[opened:]:
        opt.print_info(f"{message.role}: {message.content}")
    for tool in tools if not opened else ():
        opt.print_info(
            f"tool {tool['function']['name']}: {tool['function'].get('description', '')}"
        )
    return turn_of_text(str(typer.prompt("turn", prompt_suffix="> ")), tools)


def env_check(
    name: EnvironmentName,
    *,
    episodes: Episodes = 3,
    turns: Turns = TURNS_MAX,
    overrides: opt.Overrides = None,
    trust: opt.Trust = False,
    as_json: opt.AsJsonLines = False,
    root: opt.ConfigRoot = None,
) -> None:
    """Check the laws of an environment; exit code 1 where one does not hold."""
    from marin_rl.rollouts.trial import check_laws

    config, environment = _environment(name, overrides, root, trust=trust)
    failed = False
    for finding in check_laws(environment, config.environment, episodes=episodes, turns=turns):
        failed = failed or finding.passed is False
        if as_json:
            opt.print_json(finding)
            continue
        opt.print_verdict(passed=finding.passed)
        opt.print_info(f"{finding.law:<8} {finding.detail}")
    if failed:
        raise typer.Exit(1)


def _environment(
    name: str, overrides: list[str] | None, root: str | None, *, trust: bool
) -> "tuple[Config, Environment]":
    """A configuration, or one of nothing but an environment's name; and the environment."""
    from marin_rl.config import override, parse_config, pin_files
    from marin_rl.environments.registry import known_environments, loaded_environment
    from marin_rl.user_code import parse_spec

    if name in known_environments() or parse_spec(name) is not None:
        tree = override({"run_id": "env", "environment": {"name": name}}, overrides or ())
        config = parse_config(pin_files(tree), name)
        return config, loaded_environment(config.environment)
    try:
        config = opt.load(Path(name), overrides, root=root, trust=trust)
    except ConfigError as error:
        if Path(name).suffix or Path(name).exists():
            raise
        hint = f"{name!r} is no environment: `marin-rl env list` names those that there are"
        raise ConfigError(f"{hint}; {error}") from None
    return config, loaded_environment(config.environment)


app = typer.Typer(help="List environments, try and check one.", no_args_is_help=True)
app.command("list")(env_list)
app.command("try")(env_try)
app.command("check")(env_check)
