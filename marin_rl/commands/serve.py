"""Commands of servers: `serve`, and those that receive finished groups.

`serve` is an OpenAI-compatible server of a run's checkpoints or of a model folder;
`serve-trajectories` and `poll-trajectories` receive groups of environments, `sessions` hands
rollouts out to agents.
"""

import gc
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from marin_rl.commands import options as opt
from marin_rl.config import Config, load_config, override, parse_config
from marin_rl.errors import ConfigError, InputError
from marin_rl.integrations import integration
from marin_rl.progress import phase

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", metavar="NAME=PATH", help="PEFT folder served as model NAME; repeatable"
    ),
]
ServingConfig = Annotated[
    Path | None,
    typer.Option("--config", envvar="MARIN_RL_CONFIG", help="YAML file; inference.* counts"),
]
Register = Annotated[
    bool, typer.Option("--register", help="with --follow: announce this server to the run")
]
Labels = Annotated[
    list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="such as zone=eu")
]
Announce = Annotated[
    str | None, typer.Option("--announce", metavar="URL", help="address for the trainer")
]
Follow = Annotated[bool, typer.Option("--follow", help="load the run's later checkpoints too")]
Poll = Annotated[float, typer.Option("--poll-s", min=0.1, help="seconds between checks for one")]
Host = Annotated[
    str, typer.Option(envvar="MARIN_RL_HOST", help="address; others than loopback need a token")
]
Port = Annotated[int, typer.Option(envvar="MARIN_RL_PORT", help="0 takes a free one")]
KeyVariable = Annotated[
    str | None, typer.Option("--api-key-variable", help="variable with the bearer token")
]
AdminKeyVariable = Annotated[
    str | None, typer.Option("--admin-key-variable", help="variable with the admin token")
]

# Of a run's `inference`, what its servers go by. The rest is its trainer's, such as the endpoints:
# a server sends nothing anywhere, so that one of a run of another machine needs no consent to them.
SERVER_KEYS = ("inference.engine", "inference.server", "inference.api_key_variable")


def serve(  # noqa: PLR0913 - each is an option that people type
    run_name: Annotated[
        str | None, typer.Argument(metavar="RUN", help="run id; a checkpoint of it is served")
    ] = None,
    *,
    round_number: opt.LatestRound = None,
    model: Annotated[Path | None, typer.Option("--model", help="Hugging Face folder")] = None,
    adapter: Adapters = None,
    config_file: ServingConfig = None,
    overrides: opt.Overrides = None,
    api_key_variable: KeyVariable = None,
    admin_key_variable: AdminKeyVariable = None,
    trust: opt.Trust = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    root: opt.Root = "runs",
    follow: Follow = False,
    poll_s: Poll = 2.0,
    register: Register = False,
    labels: Labels = None,
    announce: Announce = None,
    as_json: opt.AsJsonLines = False,
) -> None:
    """Serve a run or a model folder as an OpenAI server.

    Ctrl-C ends it. With --follow --register it is one of the servers of a run whose
    inference.endpoints is `registered`. With --json, a line of standard output for each state:
    compiling, ready (with url and model), draining, ended.
    """
    check_flags(
        run_name,
        model,
        of_a_run={"--follow": follow, "--round": round_number is not None, "--register": register},
        of_registered={"--label": bool(labels), "--announce": announce is not None},
        adapter=bool(adapter),
    )
    adapters = adapters_named(adapter or ())
    keys = [*opt.key_named(api_key_variable), *opt.key_named(admin_key_variable, admin=True)]
    config = serving_config(config_file, [*(overrides or ()), *keys], root, run_name, trust=trust)
    from marin_rl.chat_templates import start_worker
    from marin_rl.serving.http.auth import check_address

    check_address(config.inference, host, port)
    if model is not None:
        check_folder(model)
        start_worker()
    opt.print_error(f"starting the server of {run_name or model}", style="")
    gc.disable()
    with phase("importing JAX"):
        from marin_rl.training.hf_weights import begin_reading

        begun = None if model is None else begin_reading(model)  # while the rest is imported
        from marin_rl.serving.launch import serve_checkpoint, serve_folder

    gc.freeze()  # modules live as long as the process: no collection is to look at them
    gc.enable()
    report = opt.print_json if as_json else None
    if model is not None:
        code = serve_folder(
            model, config, host, port, adapters=adapters, report=report, begun=begun
        )
        raise typer.Exit(code)
    assert run_name is not None, "one of the two was given"
    from marin_rl.serving.weights.following import announcement_of

    code = serve_checkpoint(
        root,
        run_name,
        round_number,
        host,
        port,
        config=config,
        adapters=adapters,
        follow=follow,
        poll_s=poll_s,
        register=announcement_of(labels, announce) if register else None,
        report=report,
    )
    raise typer.Exit(code)


def adapters_named(options: Sequence[str]) -> dict[str, Path]:
    """PEFT folders by the names they are served under, before JAX is imported.

    Raises ConfigError for what is not NAME=PATH or a name given twice, InputError for a name with a
    path in it and for a folder without an adapter.
    """
    from marin_rl.lora.adapter import check_adapter_name
    from marin_rl.lora.peft import check_adapter_folder

    folders: dict[str, Path] = {}
    for option in options:
        name, separator, path = option.partition("=")
        if not separator or not path:
            raise ConfigError(f"expected --adapter NAME=PATH, a PEFT folder, found {option!r}")
        if check_adapter_name(name) in folders:
            raise ConfigError(f"--adapter {name} is given twice: every adapter has its own name")
        folders[name] = Path(path)
        check_adapter_folder(folders[name])
    return folders


def check_flags(
    run_name: str | None,
    model: Path | None,
    *,
    of_a_run: Mapping[str, bool],
    of_registered: Mapping[str, bool],
    adapter: bool = False,
) -> None:
    """Raise ConfigError for flags that do not go together, each with whether it was given."""
    if (run_name is None) == (model is None):
        raise ConfigError("serve needs a RUN or --model FOLDER, and not both")
    for flag, chosen in of_a_run.items():
        if chosen and run_name is None:
            raise ConfigError(f"{flag} needs a run: marin-rl serve RUN {flag}")
    if of_a_run["--register"] and not of_a_run["--follow"]:
        raise ConfigError("--register needs --follow: registered servers take every checkpoint")
    if of_a_run["--register"] and adapter:
        raise ConfigError(
            "--adapter with --register: servers of a run's fleet have its policy alone, so that "
            "all of them sample the same bits; serve other adapters with a server of their own"
        )
    for flag, chosen in of_registered.items():
        if chosen and not of_a_run["--register"]:
            raise ConfigError(f"{flag} needs --register: marin-rl serve RUN --follow --register")


def check_folder(model: Path) -> None:
    """Raise InputError unless a folder has the files of a model, before JAX is imported."""
    from marin_rl.tokenizer_files import check_tokenizer_folder

    if not (model / "config.json").is_file():
        raise InputError(
            f"no model at {model}: expected a local Hugging Face folder with config.json, "
            "tokenizer.json and safetensors; download it first"
        )
    check_tokenizer_folder(model)


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
    Raises ConfigError for a run of another user as `trusted_config` does.
    """
    settings = load_config(file) if file else None
    if run_name is None:
        base = settings or Config()
    else:
        from marin_rl.trust import Consent, trusted_config

        run = opt.open_run(root, run_name)
        consent = Consent(file=file, overrides=tuple(overrides or ()), trust=trust)
        base = trusted_config(run, consent, SERVER_KEYS, ("policy",))
        if settings is not None:
            base = base.model_copy(update={"inference": settings.inference})
    tree = base.model_dump(mode="json", exclude_unset=True)  # a server sees which keys were not set
    return parse_config(override(tree, overrides or ()))


def serve_trajectories(  # noqa: PLR0913 - each is an option that people type
    config_file: opt.ConfigFile,
    *,
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    overrides: opt.Overrides = None,
    api_key_variable: opt.ApiKeyVariable = None,
    trust: opt.Trust = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    as_json: opt.AsJsonLines = False,
) -> None:
    """Receive rollouts from environments of atropos.

    Each group is part of the run before it is acknowledged. `marin-rl run`, in another process,
    trains on them. Ctrl-C ends it. With --json, a line of standard output for each state: ready
    (with url), ended (with counts).
    """
    changes = [*(overrides or ()), *opt.key_named(api_key_variable)]
    config = opt.load(config_file, changes, trust=trust, run_id=run_id, root=root)
    from marin_rl.serving.http.auth import check_address

    check_address(config.inference, host, port)
    atropos, receiver = _receiver(config)
    ready = partial(_print_ready, "receiving groups of run {} at", config.run_id, as_json=as_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again at the end
    with suppress(KeyboardInterrupt):
        atropos.serve_trajectories(receiver, host, port, ready)
    if as_json:
        opt.print_json({"state": "ended", **receiver.counts})


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
    config = opt.load(config_file, overrides, trust=trust, run_id=run_id, root=root)
    atropos, receiver = _receiver(config)
    doing = "taking groups of run {} from"
    ready = partial(_print_ready, doing, config.run_id, url, as_json=as_json)
    batches = 0
    with suppress(KeyboardInterrupt):
        batches = atropos.poll_trajectories(receiver, url, ready, opt.print_error)
    if as_json:
        opt.print_json({"state": "ended", "batches": batches, **receiver.counts})


def sessions(
    run_name: opt.RunName,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    as_json: opt.AsJsonLines = False,
    root: opt.Root = "runs",
) -> None:
    """Hand out rollouts of a run to agents elsewhere.

    `marin-rl run`, in another process of this machine, samples and trains. Ctrl-C ends it, and
    costs no session. With --json, a line of standard output once it is ready (with url).
    """
    from marin_rl.storage.runs import Run

    config = Run.open(root, run_name).config
    ready = partial(_print_ready, "handing out sessions of run {} at", run_name, as_json=as_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again at the end
    with suppress(KeyboardInterrupt):
        integration("agent_sessions").serve_sessions(
            config.environment.options, config.inference, (host, port), ready
        )


def _print_ready(doing: str, run_id: str, url: str, *, as_json: bool) -> None:
    opt.print_error(f"{doing.format(run_id)} {url} (Ctrl-C ends)", style="")
    if as_json:
        opt.print_json({"state": "ready", "url": url, "run_id": run_id})


def _receiver(config: Config) -> tuple[Any, Any]:
    """Return the module `atropos` and its receiver of groups for a run."""
    from marin_rl.storage.runs import Run

    if config.rollouts.source != "pushed":
        raise ConfigError(
            f"rollouts.source: expected pushed, found null: run {config.run_id} samples its own "
            "groups, and would train on none that are pushed"
        )
    atropos = integration("atropos")
    return atropos, atropos.Receiver(Run.create_or_open(config))
