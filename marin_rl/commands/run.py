"""Commands that train through the flows: `run`, `sft`, `reward-model`, `preference`.

Flows are loaded through the entry-point group `marin_rl.flows`: the library knows no orchestrator.
"""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marin_rl.commands import options as opt
from marin_rl.commands.hosts import on_all_processes
from marin_rl.config import Config, PreferenceConfig
from marin_rl.display.tables import size
from marin_rl.errors import INTERRUPTED, ConfigError, InputError, StorageError
from marin_rl.machine import room

if TYPE_CHECKING:
    from marin_rl.planning import Devices, Plan

SAID_BYTES = 10**9  # checkpoints of this size are announced before a run


def run(  # noqa: PLR0913 - each is an option of the command
    config_file: opt.ConfigFile,
    *,
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="rounds to reach")] = None,
    overrides: opt.Overrides = None,
    api_key_variable: opt.ApiKeyVariable = None,
    trust: opt.Trust = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and stop")] = False,
    on: Annotated[
        str | None,
        typer.Option(metavar="KIND:COUNT", help="devices to plan for, such as H100:8"),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Start a run, or continue it where it stopped.

    The same command does both. With --json, progress and warnings go to standard error.
    """
    changes = [*(overrides or ()), *opt.key_named(api_key_variable)]
    config = opt.load(config_file, changes, trust=trust, run_id=run_id, root=root, rounds=rounds)
    if dry_run:
        _print_plan(config, on, as_json=as_json)
        return
    if on is not None:
        raise InputError("--on plans for devices that are not here: give --dry-run with it")
    from marin_rl.doctor.start import before_engines

    again = run_again(config, config_file, changes)
    with on_all_processes(config):
        checkpoint = before_engines(config, "rl-loop")
        if checkpoint is None:
            play("rl-loop", config, as_json=as_json)
    if checkpoint is None or as_json:
        _print_result(config, again, as_json=as_json)
        return
    trained = checkpoint.number
    if trained >= config.rounds:
        opt.print_info(f"complete: {trained} rounds")
    further = _further(config, again, trained)
    opt.try_next(f"status {config.run_id}{root_option(config)}", further)


def sft(
    config_file: opt.ConfigFile,
    *,
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    overrides: opt.Overrides = None,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
) -> None:
    """Run only the supervised warm start of a run."""
    config = opt.load(config_file, overrides, trust=trust, run_id=run_id, root=root)
    from marin_rl.doctor.start import before_engines

    with on_all_processes(config):
        checkpoint = before_engines(config, "sft") or play("sft", config, as_json=as_json)
    place = f"{config.folder}/{checkpoint.slot}"
    if as_json:
        opt.print_json({"checkpoint": place, **checkpoint.summary})
        return
    opt.print_info(f"warm start: {place}")
    if config.policy.init == "sft":
        opt.try_next(run_again(config, config_file, overrides or ()))
        return
    # Another start is another content, so it is another run.
    start = ("policy.init=checkpoint", f"policy.checkpoint={place}")
    changes = [*(overrides or ()), *start]
    opt.try_next(_run_file(config_file, config, f"{config.run_id}-rl", changes))


def reward_model(
    config_file: opt.ConfigFile,
    *,
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    overrides: opt.Overrides = None,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a reward model from preference pairs.

    Or continue where it stopped.
    """
    config = opt.load(config_file, overrides, trust=trust, run_id=run_id, root=root)
    slot = _learn_from_pairs("reward-model", config, as_json=as_json)
    if not as_json:
        opt.print_info(f"use it: --set environment.reward_model.checkpoint={shlex.quote(slot)}")
        opt.try_next(f"status {config.run_id}{root_option(config)}")


def preference(
    config_file: opt.ConfigFile,
    *,
    from_run: Annotated[
        Path | None, typer.Option("--from-run", help="folder of a run whose groups give the pairs")
    ] = None,
    run_id: opt.RunId = None,
    root: opt.ConfigRoot = None,
    overrides: opt.Overrides = None,
    trust: opt.Trust = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and stop")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a policy on preference pairs: DPO and others.

    Or continue where it stopped.
    """
    changes = [*(overrides or ())]
    if from_run is not None:
        changes.append(f"preference.pairs={json.dumps(str(from_run.resolve()))}")
    config = opt.load(config_file, changes, trust=trust, run_id=run_id, root=root)
    if dry_run:
        _print_pair_plan(config, as_json=as_json)
        return
    slot = _learn_from_pairs("preference", config, as_json=as_json)
    if not as_json:
        opt.print_info(
            f"start from it: --set policy.init=checkpoint --set policy.checkpoint={slot}"
        )
        opt.try_next(f"export {config.run_id} --hf FOLDER{root_option(config)}")


def _print_pair_plan(config: Config, *, as_json: bool) -> None:
    """Print what `preference` would do with its pairs. Raises InputError for unfit ones."""
    from marin_rl.batching.pairs import is_held_out
    from marin_rl.display.tables import key_values
    from marin_rl.doctor.data import learned_pairs
    from marin_rl.planning import plan
    from marin_rl.rollouts.rewards import given_pairs

    settings, planned = config.pair_training("preference"), plan(config)
    assert isinstance(settings, PreferenceConfig), "it is the class of that section"
    file = given_pairs(settings, "preference")
    learned_pairs(config, file, "preference")
    loss, share = settings.loss, settings.held_out_fraction
    splits = [p.split or ("eval" if is_held_out(p.messages, share) else "") for p in file.pairs]
    kept = len(splits) - splits.count("eval")
    facts: dict[str, Any] = {
        "answers with labels" if settings.labelled else "pairs": kept,
        "held out": splits.count("eval"),
        "steps": settings.steps,
        "passes": round(settings.steps * settings.pairs_per_step / max(kept, 1), 2),
        "loss": f"{loss.type}, beta {loss.beta:g}, of {'means' if loss.of_means else 'sums'}",
        "reference": "the policy as it begins" if loss.has_reference else "none",
        "checkpoints": -(-settings.steps // settings.steps_per_checkpoint),
        "checkpoint bytes": planned.checkpoint_bytes,
        "parameters": planned.parameters,
    }
    if as_json:
        opt.print_json({name.replace(" ", "_"): value for name, value in facts.items()})
        return
    shown = {n: f"{v:,}" if isinstance(v, int) else str(v or "unknown") for n, v in facts.items()}
    opt.out.print(key_values(f"Plan of {config.run_id}", shown))


def _learn_from_pairs(flow: str, config: Config, *, as_json: bool) -> str:
    """Run a flow that learns from pairs, print its metrics, and return its last checkpoint."""
    from marin_rl.display.tables import key_values
    from marin_rl.doctor.start import before_engines

    with on_all_processes(config):
        checkpoint = before_engines(config, flow) or play(flow, config, as_json=as_json)
    place = f"{config.folder}/{checkpoint.slot}"
    if as_json:
        opt.print_json({"checkpoint": place, **checkpoint.summary})
    else:
        metrics = {name: f"{value:.4g}" for name, value in checkpoint.summary.items()}
        opt.out.print(key_values(f"{flow.capitalize().replace('-', ' ')} {config.run_id}", metrics))
    return place


def play(flow: str, config: Config, *, as_json: bool = False) -> Any:
    """Run a flow on a configuration with live progress and warnings; return its last checkpoint.

    With `as_json` progress and warnings are on standard error. `before_engines` comes before it.
    Raises what the flow raises.
    """
    from marin_rl.analysis.warnings import NewWarnings
    from marin_rl.api.training import flow_named
    from marin_rl.display.live import RunDisplay, showing
    from marin_rl.display.tables import plain
    from marin_rl.doctor.stages import OF_PAIRS
    from marin_rl.doctor.system import tight
    from marin_rl.planning import plan
    from marin_rl.progress import listening
    from marin_rl.rollouts.data_warnings import data_warnings, has_more_examples

    start = flow_named(flow)
    console = opt.err if as_json else opt.out

    def show(text: str, style: str = "yellow") -> None:
        console.print(plain(text, style), soft_wrap=True)

    warn = NewWarnings(
        config.run_id,
        lambda text: show(f"! {text}"),
        more_examples=flow == "rl-loop" and has_more_examples(config),
    )
    if flow not in OF_PAIRS:
        for text in data_warnings(config, scored=flow != "sft"):
            show(f"! {text}")
    if flow == "rl-loop":
        planned = plan(config)
        if (text := tight(config)) is not None:
            show(f"! {text}", "")
        if (planned.checkpoint_disk_bytes or 0) >= SAID_BYTES:
            show(f"checkpoints: {checkpoints_kept(config, planned)}", "")
    try:
        with showing(RunDisplay(config.run_id, config.rounds), console), listening(warn.listen):
            return start(config)
    except KeyboardInterrupt:  # a line in place of its trace
        opt.err.print("interrupted: what is committed stays; the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None


def _print_plan(config: Config, on: str | None, *, as_json: bool) -> None:
    """Print the plan, and whether the run exists. Raises ConfigError if it has another content."""
    from marin_rl.display.tables import key_values
    from marin_rl.doctor.start import rounds_trained
    from marin_rl.planning import Devices, plan
    from marin_rl.storage.runs import refuse_other_content

    devices = None if on is None else Devices.named(on)
    planned = plan(config, devices)
    if as_json:
        refuse_other_content(config)
        known = {"run_id": config.run_id, "root": config.root, "trained": rounds_trained(config)}
        opt.print_json(known | asdict(planned))
        return
    opt.out.print(key_values(f"Plan of {config.run_id}", plan_rows(config, planned, devices)))
    _print_data_warnings(config)
    try:
        refuse_other_content(config)
        trained = rounds_trained(config)
    except StorageError as error:
        opt.print_info(f"whether run {config.run_id} exists is not known: {error}")
        return
    known = f"exists with the same content: {trained} rounds are trained"
    opt.print_info(
        f"run {config.run_id} {f'is new under {config.root}' if trained is None else known}"
    )


def plan_rows(config: Config, plan: "Plan", devices: "Devices | None" = None) -> dict[str, str]:
    """A plan as text; sizes are unknown without the model's folder."""

    def or_unknown(n_bytes: int | None) -> str:
        return "unknown: the model folder is not here" if n_bytes is None else size(n_bytes)

    parameters = "unknown" if plan.parameters is None else f"{plan.parameters / 1e6:,.2f}M"
    if config.policy.lora is not None and plan.trained_parameters is not None:
        parameters += f"; an adapter of {plan.trained_parameters / 1e6:,.2f}M is trained"
    embedded = not config.inference.endpoints
    rows = {
        "rounds": f"{plan.rounds:,}",
        "shards": f"{plan.shards:,} ({config.rollouts.shards_per_round} a round)",
        "rollouts": f"{plan.rollouts:,}"
        + (f" to {plan.rollouts_max:,}" if plan.rollouts_max > plan.rollouts else ""),
        "tokens sampled": f"at most {plan.tokens_sampled_max:,}",
        "tokens trained on": f"at most {plan.tokens_trained_max:,}",
        "parameters": parameters,
        "training memory": f"{or_unknown(plan.training_bytes)} between steps ({_kinds(config)})",
        "activations": f"about {or_unknown(plan.activation_bytes)} a microbatch",
        "training step": f"about {or_unknown(plan.step_bytes)}, with gradients and copies",
        "engine cache": or_unknown(plan.engine_cache_bytes) if embedded else "remote endpoints",
        "engine weights": or_unknown(plan.engine_weight_bytes) if embedded else "remote endpoints",
        "memory together": _together(config, plan, devices) or or_unknown(None),
        "disk, rollouts": f"at most {size(plan.rollout_disk_bytes)}",
        "disk, batches": f"at most {size(plan.batch_disk_bytes)}",
        "disk, scores": f"at most {size(plan.score_disk_bytes)}",
        "disk, checkpoints": checkpoints_kept(config, plan) or or_unknown(None),
        "root": config.root,
    }
    if devices is not None:
        rows["memory of hosts"] = f"about {or_unknown(plan.host_bytes)} in each process"
    if not embedded:
        saves = f"up to {plan.overlap_saves:.0%} of a round (estimate)"
        rows["overlap"] = f"sampling during training saves {saves}"
        if not config.max_staleness:
            would = f"asynchrony.max_staleness 1 would save {saves}"
            rows["overlap"] = f"sampling and training alternate; {would}"
    return rows


def _kinds(config: Config) -> str:
    kinds = "weights, Adam"
    if config.policy.lora is not None:
        base = config.policy.quantize_base
        whose = "frozen base" if base is None else f"base in {base}"
        kinds = f"{whose}; the adapter's weights, Adam"
    if config.distillation is not None and not config.distillation.endpoint:
        kinds += ", the teacher's weights"
    return kinds


def _together(config: Config, plan: "Plan", devices: "Devices | None") -> str:
    """The peak of the process, on each device where there are several; empty where unknown."""
    from marin_rl.planning import keys_that_lower

    if not plan.peak_bytes:
        return ""
    together = f"about {size(plan.peak_bytes)} at the peak"
    together += f" on each of {plan.devices} devices" if plan.devices > 1 else ""
    if devices is None:
        return f"{together}; {here}" if (here := room()) else together
    together += f", of {size(devices.bytes)} that {devices.kind} has"
    if plan.peak_bytes > devices.bytes:
        together += f": too much, lower it by {'; or '.join(keys_that_lower(config, plan))}"
    return together


def checkpoints_kept(config: Config, plan: "Plan") -> str:
    """The most that checkpoints take at once, and what all rounds write; empty where unknown."""
    if plan.checkpoint_disk_bytes is None or plan.checkpoint_written_bytes is None:
        return ""
    at_once = size(plan.checkpoint_disk_bytes)
    if config.retention.checkpoints_last is None:
        return (
            f"{at_once}: all {plan.checkpoints_kept:,} of at most "
            f"{size(plan.checkpoint_bytes or 0)} are kept (retention.checkpoints_last keeps fewer)"
        )
    return (
        f"at most {at_once}, of at most {plan.checkpoints_kept:,} checkpoints; "
        f"{size(plan.checkpoint_written_bytes)} are written in all"
    )


def _print_data_warnings(config: Config) -> None:
    """Print what is unexpected in the prompts, where they can be read, and in reward and loss."""
    from marin_rl.doctor.data import own_reward
    from marin_rl.rollouts.data_warnings import data_warnings

    try:
        for text in data_warnings(config):
            opt.print_info(f"! {text}")
    except InputError as error:
        opt.print_info(f"! {error}")
        return
    checks = [own_reward]
    if config.objective.loss is not None:
        from marin_rl.doctor.engines import loss

        checks.append(loss)
    for check in checks:
        try:
            check(config)
        except (InputError, ConfigError) as error:
            opt.print_info(f"! {error}")


def _print_result(config: Config, again: str, *, as_json: bool) -> None:
    from marin_rl.analysis.dialogues import before_and_after, episodes_table
    from marin_rl.analysis.status import run_status
    from marin_rl.display.tables import rounds_table
    from marin_rl.pages.charts import write_learning_curve
    from marin_rl.storage.runs import Run

    opened = Run.open(config.root, config.run_id, config.storage_options)
    status = run_status(config.root, config.run_id, config.storage_options)
    curve = write_learning_curve(opened, status.rounds)
    if as_json:
        opt.print_json({**asdict(status), "learning_curve": curve})
        return
    opt.out.print(rounds_table(status.rounds, f"Run {config.run_id}"))
    if (compared := before_and_after(opened)) is not None:
        opt.out.print(episodes_table(compared))
    opt.print_summary(status)
    opt.print_info(f"learning curve: {curve}")
    average = "select round, avg(reward) as reward from rollouts group by round order by round"
    root = root_option(config)
    opt.try_next(
        f'sql {config.run_id} "{average}"{root}',
        f"rollouts {config.run_id} --round {min(3, status.trained - 1)}{root}",
        _further(config, again, status.trained),
    )


def _further(config: Config, again: str, trained: int) -> str:
    """The command that trains more rounds of a run that ended, whose early end is told."""
    if trained >= config.rounds:
        return f"{again} --rounds {trained + 20}"
    opt.print_info(
        f"ended early, after {trained} of {config.rounds} rounds: of its last evaluations, "
        f"{config.evaluation.patience} in a row were no better than the best (evaluation.patience)"
    )
    return f"{again} --set evaluation.patience=null"


def run_again(config: Config, file: Path, overrides: Sequence[str] = ()) -> str:
    """Return the command that continues the run of `config`."""
    if "://" not in config.root:
        return f"run {shlex.quote(f'{config.root}/{config.run_id}')}"
    # Only a local folder can stand in place of a file, so the command is given again.
    return _run_file(file, config, config.run_id, overrides)


def _run_file(file: Path, config: Config, run_id: str, overrides: Sequence[str]) -> str:
    changes = "".join(f" --set {shlex.quote(item)}" for item in overrides)
    return f"run {shlex.quote(str(file))} --run-id {run_id}{root_option(config)}{changes}"


def root_option(config: Config) -> str:
    """Return the option that names the root of runs; empty for the one that commands take."""
    usual = os.environ.get(opt.ROOT_VARIABLE) or "runs"
    return "" if config.root == usual else f" --root {shlex.quote(config.root)}"
