"""`marin-rl evaluate`: a run, a model folder or an endpoint on held-out examples.

What is measured is `marin_rl.evaluation`, and for a run as it is configured the flow "evaluate".
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marin_rl.commands import options as opt
from marin_rl.errors import ConfigError
from marin_rl.progress import listening, phase

if TYPE_CHECKING:
    from marin_rl.evaluation import EvaluationRequest, Target

SCHEMES = ("http://", "https://")

TargetName = Annotated[
    str,
    typer.Argument(
        help="run id; a folder: a run's, a checkpoint's or a model's; or an endpoint's URL"
    ),
]
Environment = Annotated[
    str | None, typer.Option("--env", help="name, YAML configuration, or JSONL of prompts")
]

OPTIONS = "environment.options."  # keys of --set that make the evaluation another than the run's


def evaluate(  # noqa: PLR0913 - each is an option of the command
    target: TargetName = "",
    *,
    env: Environment = None,
    suite: Annotated[
        str | None, typer.Option(help="benchmarks like gsm8k,mmlu, or NAME:PROMPT")
    ] = None,
    data: Annotated[str | None, typer.Option(help="file or folder of --suite")] = None,
    k: Annotated[str | None, typer.Option("--k", help="like 1,8: pass@k and so on")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="held-out examples")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="completions per example")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="new tokens per completion")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Parquet of rows")] = None,
    round_number: opt.LatestRound = None,
    endpoint: Annotated[str | None, typer.Option(help="OpenAI base URL, ending in /v1")] = None,
    model: Annotated[str | None, typer.Option(help="model to ask the endpoint for")] = None,
    api_key_variable: Annotated[
        str | None, typer.Option(help="environment variable with the endpoint's key")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="your own settings, as YAML")
    ] = None,
    overrides: opt.Overrides = None,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Evaluate a run, a model folder or an endpoint.

    Prints pass@k, mean@k and majority@k. A run without further options is evaluated as it is
    configured, and the rows are committed with its checkpoint. With --suite, --env, --k,
    --examples, --samples, --temperature, --max-tokens, --output or --set
    environment.options.KEY=VALUE nothing is written into the run: rows go to a Parquet file, as
    for other targets.
    """
    from marin_rl.evaluation import EvaluationRequest, Target

    if endpoint is None and target.startswith(SCHEMES):
        target, endpoint = "", target
    if not target and endpoint is None:
        raise ConfigError("evaluate needs a run id, a model folder, or --endpoint URL --model NAME")
    where = Target(
        name=target,
        root=root,
        round=round_number,
        endpoint=endpoint,
        model=model,
        config=config_file,
        api_key_variable=api_key_variable,
        trust=trust,
    )
    try:
        numbers = None if k is None else [int(part) for part in k.split(",")]
    except ValueError:
        raise ConfigError(f"--k: expected numbers like 1,8, found {k!r}") from None
    others = [item for item in overrides or () if not item.strip().startswith(OPTIONS)]
    options = [item.strip() for item in overrides or () if item not in others]
    request = EvaluationRequest(
        environment=env,
        suites=tuple(suite.split(",")) if suite else (),
        data=data,
        options=tuple(item.removeprefix(OPTIONS) for item in options),
        k=numbers,
        examples=examples,
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
    )
    if request == EvaluationRequest() and output is None and where.is_run:
        _commit(where, others, as_json=as_json)
    elif others:
        raise ConfigError(
            f"--set {others[0]} goes with the evaluation that a run commits: use --config, or "
            "leave out --suite, --env, --k, --examples, --samples, --temperature, --max-tokens, "
            f"--output and --set {OPTIONS}…"
        )
    else:
        _write_rows(where, request, output, as_json=as_json)


def _write_rows(
    target: "Target", request: "EvaluationRequest", output: Path | None, *, as_json: bool
) -> None:
    with phase("evaluating") as evaluating, listening(evaluating.listen):
        from marin_rl.evaluation import evaluate_target

        result = evaluate_target(target, request)
    rows = output or Path(f"{Path(target.name).name or 'endpoint'}-eval.parquet")
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_bytes(result.rows)
    suites: dict[str, Any] = {"suites": result.suites} if result.suites else {}
    if not as_json:
        records = result.suites.items()
        suites = {name: ", ".join(f"{k} {v}" for k, v in each.items()) for name, each in records}
    _print_metrics(result.model, {"rows": rows} | suites, result.metrics, as_json=as_json)


def _commit(target: "Target", overrides: list[str], *, as_json: bool) -> None:
    """Run the flow "evaluate", which commits the rows of a run's checkpoint next to it."""
    from marin_rl.api.training import flow_named
    from marin_rl.doctor.stages import EVALUATE
    from marin_rl.doctor.start import check_files
    from marin_rl.trust import Consent, trusted_config

    run = target.open_run()
    changes = (*overrides, *opt.key_named(target.api_key_variable))
    consent = Consent(file=target.config, overrides=changes, trust=target.trust)
    uses, sections = ("inference", "trackers", "flow"), ("environment", "evaluation", "policy")
    config = trusted_config(run, consent, uses, sections)
    check_files(config, EVALUATE)
    with phase("evaluating") as evaluating, listening(evaluating.listen):
        slot = flow_named("evaluate")(config, target.round)
    _print_metrics(run.run_id, {"slot": slot.slot}, slot.summary, as_json=as_json)


def _print_metrics(
    model: str, place: Mapping[str, Any], metrics: Mapping[str, float], *, as_json: bool
) -> None:
    if as_json:
        opt.print_json({"model": model, **place, **metrics})
        return
    from marin_rl.display.tables import estimates_table

    opt.out.print(estimates_table(f"Evaluation of {model}", metrics))
    opt.print_info(*(f"{name}: {value}" for name, value in place.items()))
