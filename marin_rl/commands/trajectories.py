"""Commands that receive finished groups: `serve-trajectories`, `poll-trajectories`."""

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from marin_rl.commands import options as opt
from marin_rl.commands.options import key_named, load, print_error, print_json
from marin_rl.errors import ConfigError
from marin_rl.integrations import integration

if TYPE_CHECKING:
    from marin_rl.config import Config


def serve_trajectories(  # noqa: PLR0913 - each is an option that people type
    config_file: opt.ConfigFile,
    *,
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    overrides: opt.Overrides = None,
    api_key_variable: opt.ApiKeyVariable = None,
    trust: opt.Trust = False,
    host: Annotated[
        str, typer.Option(envvar="MARIN_RL_HOST", help="address; others than loopback need a token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="MARIN_RL_PORT", help="0 takes a free one")] = 8000,
    as_json: opt.AsJsonLines = False,
) -> None:
    """Receive rollouts from environments of atropos.

    Each group is part of the run before it is acknowledged. `marin-rl run`, in another process,
    trains on them. Ctrl-C ends it. With --json, a line of standard output for each state: ready
    (with url), ended (with counts).
    """
    changes = [*(overrides or ()), *key_named(api_key_variable)]
    config = load(config_file, changes, trust=trust, run_id=run_id, root=root)
    _check_pushed(config)
    from marin_rl.serving.http.auth import check_address

    check_address(config.inference, host, port)
    from marin_rl.storage.runs import Run

    atropos = integration("atropos")
    receiver = atropos.Receiver(Run.create_or_open(config))

    def ready(url: str) -> None:
        print_error(f"receiving groups of run {config.run_id} at {url} (Ctrl-C ends)", style="")
        if as_json:
            print_json({"state": "ready", "url": url, "run_id": config.run_id})

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again at the end
    with suppress(KeyboardInterrupt):
        atropos.serve_trajectories(receiver, host, port, ready)
    if as_json:
        print_json({"state": "ended", **receiver.counts})


def poll_trajectories(
    config_file: opt.ConfigFile,
    *,
    url: Annotated[str, typer.Option(help="API server of atropos, such as http://127.0.0.1:8000")],
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    overrides: opt.Overrides = None,
    trust: opt.Trust = False,
    as_json: opt.AsJsonLines = False,
) -> None:
    """Take rollouts from an API server of atropos.

    Registers there as the trainer, and commits each batch before it asks for the next.
    `marin-rl run`, in another process, trains on them. It ends with the run. With --json, a line of
    standard output for each state: ready, ended (with counts).
    """
    config = load(config_file, overrides, trust=trust, run_id=run_id, root=root)
    _check_pushed(config)
    from marin_rl.storage.runs import Run

    atropos = integration("atropos")
    receiver = atropos.Receiver(Run.create_or_open(config))

    def ready() -> None:
        print_error(f"taking groups of run {config.run_id} from {url} (Ctrl-C ends)", style="")
        if as_json:
            print_json({"state": "ready", "url": url, "run_id": config.run_id})

    batches = 0
    with suppress(KeyboardInterrupt):
        batches = atropos.poll_trajectories(receiver, url, ready, print_error)
    if as_json:
        print_json({"state": "ended", "batches": batches, **receiver.counts})


def _check_pushed(config: "Config") -> None:
    if config.rollouts.source != "pushed":
        raise ConfigError(
            f"rollouts.source: expected pushed, found null: run {config.run_id} samples its own "
            "groups, and would train on none that are pushed"
        )
