"""`marin-rl serve`: an OpenAI-compatible server of a run's checkpoints or of a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from marin_rl.commands.options import LatestRound, Overrides, Root, Trust, key_named
from marin_rl.config import Config, load_config, override, parse_config
from marin_rl.errors import ConfigError
from marin_rl.machine import share_one_heap


def serve(  # noqa: PLR0913 - each is an option that people type
    *,
    run_name: Annotated[str | None, typer.Option("--run", help="serve a run's checkpoint")] = None,
    round_number: LatestRound = None,
    model: Annotated[Path | None, typer.Option("--model", help="Hugging Face folder")] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", envvar="MARIN_RL_CONFIG", help="YAML file; inference.* counts"),
    ] = None,
    overrides: Overrides = None,
    api_key_variable: Annotated[
        str | None, typer.Option("--api-key-variable", help="variable with the bearer token")
    ] = None,
    admin_key_variable: Annotated[
        str | None, typer.Option("--admin-key-variable", help="variable with the admin token")
    ] = None,
    trust: Trust = False,
    host: Annotated[
        str, typer.Option(envvar="MARIN_RL_HOST", help="address; others than loopback need a token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="MARIN_RL_PORT", help="0 takes a free one")] = 8000,
    root: Root = "runs",
    follow: Annotated[
        bool, typer.Option("--follow", help="load the run's later checkpoints too")
    ] = False,
    poll_s: Annotated[
        float, typer.Option("--poll-s", min=0.1, help="seconds between checks for one")
    ] = 2.0,
) -> None:
    """Serve a model through the OpenAI protocol until interrupted."""
    share_one_heap()
    if (run_name is None) == (model is None):
        raise ConfigError("serve needs exactly one of --run RUN_ID and --model FOLDER")
    for flag, chosen in (("--follow", follow), ("--round", round_number is not None)):
        if chosen and run_name is None:
            raise ConfigError(f"{flag} needs a run: --run RUN_ID")
    keys = [*key_named(api_key_variable), *key_named(admin_key_variable, admin=True)]
    config = serving_config(config_file, [*(overrides or ()), *keys], root, run_name, trust=trust)
    from marin_rl.serving.http.auth import check_address

    check_address(config.inference, host, port)
    from marin_rl.serving.launch import serve_checkpoint, serve_folder

    if run_name is not None:
        code = serve_checkpoint(
            root, run_name, round_number, host, port, config=config, follow=follow, poll_s=poll_s
        )
        raise typer.Exit(code)
    if model is not None:
        raise typer.Exit(serve_folder(model, config, host, port))


def serving_config(
    file: Path | None,
    overrides: list[str] | None,
    root: str,
    run_name: str | None,
    *,
    trust: bool = False,
) -> Config:
    """Return a server's configuration: that of the file or the defaults, or of the run.

    With a run, only the section `inference` of the file is used: the rest is the run's content.
    Raises ConfigError for a run of another user as `settings_of` and `check_named` do.
    """
    settings = load_config(file) if file else None
    if run_name is None:
        base = settings or Config()
    else:
        from marin_rl.storage.runs import Run
        from marin_rl.trust import Consent, check_named, settings_of

        run = Run.open(root, run_name)
        consent = Consent(file=file, overrides=tuple(overrides or ()), trust=trust)
        base = settings_of(run, consent, ("inference",))
        check_named(run, base, consent, ("policy",))
        if settings is not None:
            base = base.model_copy(update={"inference": settings.inference})
    tree = base.model_dump(mode="json", exclude_unset=True)  # a server sees which keys were not set
    return parse_config(override(tree, overrides or ()))
