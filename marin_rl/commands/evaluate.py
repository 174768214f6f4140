"""The commands that measure: `marin-rl eval` and `marin-rl metrics verify`.

What they do is `evaluation` and `analysis.verify`; here are their options and what they print.
Heavy modules are imported when a command runs.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from marin_rl.commands.options import (
    AsJson,
    AsJsonLines,
    LatestRound,
    Root,
    RunName,
    Trust,
    complain,
    out,
    tell,
    tell_json,
)
from marin_rl.errors import ConfigError


def evaluate_anything(  # noqa: PLR0913 - each is an option of the command
    target: Annotated[
        str, typer.Argument(help="run id, or a folder: a run's, a checkpoint's or a model's")
    ] = "",
    *,
    env: Annotated[
        str | None, typer.Option("--env", help="name, YAML configuration, or JSONL of prompts")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", help="KEY=VALUE of the environment; repeatable")
    ] = None,
    k: Annotated[str | None, typer.Option("--k", help="like 1,8: pass@k and so on")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="held-out examples")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="completions per example")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="new tokens per completion")] = None,
    round_number: LatestRound = None,
    endpoint: Annotated[str | None, typer.Option(help="OpenAI base URL, ending in /v1")] = None,
    model: Annotated[str | None, typer.Option(help="model to ask the endpoint for")] = None,
    api_key_variable: Annotated[
        str | None, typer.Option(help="environment variable with the endpoint's key")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="your own settings, as YAML")
    ] = None,
    trust: Trust = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Parquet of rows")] = None,
    as_json: AsJson = False,
    root: Root = "runs",
) -> None:
    """Evaluate a run's checkpoint, a Hugging Face folder or an OpenAI endpoint: pass@k and more."""
    from marin_rl.display import estimates_table
    from marin_rl.evaluation import Asked, Target, evaluate_target

    if not target and endpoint is None:
        raise ConfigError("eval needs a run id, a model folder, or --endpoint URL --model NAME")
    found = evaluate_target(
        Target(
            name=target,
            root=root,
            round=round_number,
            endpoint=endpoint,
            model=model,
            config=config_file,
            api_key_variable=api_key_variable,
            trust=trust,
        ),
        Asked(
            environment=env,
            options=options or (),
            k=_numbers(k),
            examples=examples,
            samples=samples,
            temperature=temperature,
            max_tokens=max_tokens,
        ),
    )
    rows = output or Path(f"{Path(target).name or 'endpoint'}-eval.parquet")
    rows.write_bytes(found.rows)
    if as_json:
        tell_json({"model": found.model, "rows": rows, **found.metrics})
        return
    out.print(estimates_table(f"Evaluation of {found.model}", found.metrics))
    tell(f"rows: {rows}")


def verify_metrics(
    run_name: RunName,
    *,
    round_number: Annotated[int | None, typer.Option("--round", min=0, help="default: all")] = None,
    trust: Trust = False,
    as_json: AsJsonLines = False,
    root: Root = "runs",
) -> None:
    """Compute metrics again from the other files, name the rest. Exit code 1 where one differs."""
    from marin_rl.analysis.verify import not_checked, verify_run
    from marin_rl.display import findings_table
    from marin_rl.storage.runs import Run

    findings = list(verify_run(Run.open(root, run_name), round_number, trust=trust))
    wrong = [found for found in findings if found.problem]
    if as_json:
        for found in findings:
            tell_json(asdict(found))
    else:
        out.print(findings_table([found for found in findings if not found.unchecked]))
        for line in not_checked(findings):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        complain(found.told for found in wrong)
    if wrong:
        raise typer.Exit(1)


def _numbers(text: str | None) -> list[int] | None:
    """`1,8` as numbers. Raises ConfigError."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--k: expected numbers like 1,8, found {text!r}") from None
