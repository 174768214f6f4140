"""Commands that write files for others, or of theirs: `export`, `pairs`, `merge`, `import`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marin_rl.commands import options as opt
from marin_rl.errors import ConfigError
from marin_rl.integrations import integration
from marin_rl.progress import phase

if TYPE_CHECKING:
    from marin_rl.storage.runs import Run

DTYPES = ("float32", "bfloat16", "float16")
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")
PAIRS_SUFFIXES = (".jsonl", ".parquet")


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    return dtype


Output = Annotated[Path, typer.Option("--output", "-o", help="new folder for the model")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="of the files: float32, bfloat16 or float16", callback=_known_dtype
    ),
]


def export(  # noqa: PLR0913 - each is an option of the command
    run_name: opt.RunName,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="default: RUN.tar")] = None,
    everything: Annotated[bool, typer.Option("--all", help="every committed object")] = False,
    hf: Annotated[
        Path | None, typer.Option("--hf", help="instead: a checkpoint as a Hugging Face folder")
    ] = None,
    peft: Annotated[
        Path | None, typer.Option("--peft", help="instead: an adapter as a PEFT folder")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option("--gguf", help="instead: a checkpoint as a file of llama.cpp")
    ] = None,
    gguf_type: Annotated[
        str, typer.Option("--gguf-type", help="of its weights: f32, f16, bf16 or q8_0")
    ] = "f16",
    rollouts: Annotated[
        str | None,
        typer.Option("--format", help="instead: rollouts as trl, verl, atropos, traces or otel do"),
    ] = None,
    verl: Annotated[
        Path | None,
        typer.Option("--verl", help="instead: a folder with which verl trains on CONFIG|RUN"),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(
            "--round", help="with --hf, --peft, --gguf one, the latest; with --format like 0-9, all"
        ),
    ] = None,
    overrides: opt.Overrides = None,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Write a run as one file, or what others read of it.

    `marin-rl verify` checks such a file by its root hash. With --hf, one checkpoint is written as
    a Hugging Face folder instead, with --gguf as a file of llama.cpp, with --peft its adapter as a
    PEFT folder; with --format, rollouts are written as another library has them; with --verl, what
    runs the environment of a configuration under verl's trainer.
    """
    if verl is not None:
        _export_verl(run_name, verl, overrides, root, trust=trust, as_json=as_json)
        return
    if overrides:
        raise ConfigError("--set changes a configuration: expected --verl too")
    chosen = _rounds(rounds)

    run = opt.open_run(root, run_name)
    weights = {"--hf": hf, "--peft": peft, "--gguf": gguf}
    asked = [(option, path) for option, path in weights.items() if path is not None]
    if len(asked) > 1:
        raise ConfigError("--hf, --peft and --gguf write different things: expected one of them")
    if gguf_type not in GGUF_TYPES:
        raise ConfigError(f"--gguf-type: expected one of {', '.join(GGUF_TYPES)}")
    if asked:
        _export_weights(run, *asked[0], chosen, gguf_type=gguf_type, as_json=as_json)
        return
    if rollouts is not None:
        _export_rollouts(run, rollouts, output, chosen, as_json=as_json)
        return
    if rounds is not None:
        raise ConfigError(
            "--round chooses a checkpoint or rollouts: expected --hf, --peft, --gguf or --format"
        )
    from marin_rl.display.tables import size
    from marin_rl.storage.upkeep.archive import write_archive

    archive = write_archive(run, output or Path(f"{run_name}.tar"), everything=everything)
    left = f"{archive.left_out} committed objects are left out: --all exports them too"
    opt.print_result(
        archive,
        f"{archive.path}: {archive.objects} objects, {size(archive.bytes)}",
        f"root hash {archive.root_hash}",
        *([left] if archive.left_out else ()),
        as_json=as_json,
    )


def _export_weights(
    run: "Run", option: str, path: Path, rounds: list[int] | None, *, gguf_type: str, as_json: bool
) -> None:
    if rounds is not None and len(rounds) > 1:
        raise ConfigError(f"--round: expected one checkpoint with {option}, found {len(rounds)}")
    round = rounds[0] if rounds else None
    facts: dict[str, object] = {"file" if option == "--gguf" else "folder": str(path)}
    with phase("exporting"):
        from marin_rl.serving.weights.export import export_hf, export_peft
        from marin_rl.storage.runs import policy_at

        if option == "--peft":
            identity, exported_round = export_peft(run, round, path)
            facts |= {"round": exported_round, "parameters": identity.parameters_digest}
            facts |= {"adapter": identity.adapter_digest}
        elif option == "--hf":
            exported = export_hf(run, round, path)
            facts |= {"round": exported.round, "parameters": exported.parameters_digest}
        else:
            from marin_rl.gguf.conversion import export_gguf  # before a model is read
            from marin_rl.serving.weights.checkpoint_loader import read_slot
            from marin_rl.tokenizers import tokenizer_for
            from marin_rl.training.adapters import merged_model

            loaded = read_slot(run, policy_at(run, round))
            tokenizer = tokenizer_for(run.config.policy)
            export_gguf(merged_model(loaded.model), tokenizer, path, gguf_type)
            facts |= {"round": loaded.round, "parameters": loaded.parameters_digest}
            facts |= {"type": gguf_type}
    of = policy_at(run, round).slot if facts["round"] is None else f"checkpoint {facts['round']}"
    what = f"{'adapter of ' if option == '--peft' else ''}{of}"
    line = f"{path}: {what}, parameters {facts['parameters']}"
    opt.print_result(facts, line, as_json=as_json)


def import_(
    *,
    gguf: Annotated[Path, typer.Option("--gguf", help="file of llama.cpp")],
    output: Output,
    dtype: Dtype = "bfloat16",
    as_json: opt.AsJson = False,
) -> None:
    """Write the Hugging Face folder of a GGUF file.

    With its configuration, tokenizer, chat template, and weights, dequantised; nothing is
    overwritten. Runs, `serve --model` and transformers read such a folder.
    """
    with phase("importing"):
        from marin_rl.gguf.conversion import import_gguf

        imported = import_gguf(gguf, output, dtype)
    types = ", ".join(f"{count} {kind}" for kind, count in sorted(imported.tensors.items()))
    facts = asdict(imported) | {"dtype": dtype}
    opt.print_result(facts, f"{output}: {imported.family}, {dtype} of {types}", as_json=as_json)
    if not imported.chat_template:
        opt.print_error(
            f"{gguf} has no chat template: add chat_template.jinja to {output}, with the template "
            "that the model was trained with, before a run or a server takes it",
            style="yellow",
        )


def merge(
    *,
    base: Annotated[Path, typer.Option("--base", help="Hugging Face folder of the base")],
    adapter: Annotated[Path, typer.Option("--adapter", help="PEFT folder")],
    output: Output,
    dtype: Dtype = "float32",
    push_to_hub: Annotated[
        str | None, typer.Option("--push-to-hub", help="upload as this repository, too")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Write the model that an adapter makes of its base.

    As a Hugging Face folder; nothing is overwritten. `marin-rl export RUN --hf FOLDER` does the
    same for a run's checkpoint.
    """
    with phase("merging"):
        from marin_rl.serving.weights.export import check_hub_name, push_folder
        from marin_rl.serving.weights.export import merge as merge_folders

        if push_to_hub is not None:
            check_hub_name(push_to_hub)  # before minutes of work
        digest = merge_folders(base, adapter, output, dtype)
    if push_to_hub is not None:
        push_folder(output, push_to_hub)
    facts = {"folder": output, "parameters": digest, "dtype": dtype}
    opt.print_result(facts, f"{output}: {dtype}, parameters {digest}", as_json=as_json)


def _export_verl(
    name: str, folder: Path, overrides: list[str] | None, root: str, *, trust: bool, as_json: bool
) -> None:
    config = opt.load(Path(name), overrides, trust=trust, root=None if root == "runs" else root)
    written = integration("verl").export_verl(config, folder)
    if as_json:
        opt.print_json(asdict(written) | {"folder": str(folder)})
        return
    opt.print_info(f"{folder}: {written.train} prompts to train on, {written.val} held out")
    if written.unmapped:
        lines = [f"  {each}" for each in written.unmapped]
        opt.print_error("Not exported to verl:", *lines, style="yellow")
    opt.print_info(
        f"PYTHONPATH={folder.absolute()} python -m verl.trainer.main_ppo "
        f"--config-path {folder.absolute()} --config-name verl"
    )


def _export_rollouts(
    run: "Run", name: str, output: Path | None, rounds: list[int] | None, *, as_json: bool
) -> None:
    target = output or Path(f"{run.run_id}-{name}.jsonl")
    written = integration("exchange").export_rollouts(run, name, target, rounds)
    line = f"{target}: {written.lines} lines; {written.left_out} rollouts failed and are left out"
    opt.print_result(asdict(written) | {"path": target}, line, as_json=as_json)


def pairs(
    run_name: opt.RunName,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL or Parquet file")],
    component: Annotated[
        str | None, typer.Option(help="reward component to rank by; default: the reward")
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, help="least difference of best and worst in a group")
    ] = 0.0,
    rounds: Annotated[
        str | None, typer.Option("--round", help="like 3 or 0-9; default: all")
    ] = None,
    as_json: opt.AsJson = False,
    root: opt.Root = "runs",
) -> None:
    """Write preference pairs from the groups of a run.

    A pair is the best and the worst answer of a group; `marin-rl reward-model` trains on them.
    """
    if output.suffix not in PAIRS_SUFFIXES:
        raise ConfigError(
            f"--output {output}: expected a name ending in {' or '.join(PAIRS_SUFFIXES)}"
        )
    chosen = _rounds(rounds)
    from marin_rl.rollouts.rewards import pairs_of_run
    from marin_rl.storage.tables.pairs import write_pairs

    run = opt.open_run(root, run_name)
    ranked = pairs_of_run(run, component=component, margin_min=margin, rounds=chosen)
    write_pairs(output, ranked)
    facts = {"path": output, "pairs": len(ranked)}
    opt.print_result(facts, f"wrote {len(ranked)} pairs to {output}", as_json=as_json)


def _rounds(text: str | None) -> list[int] | None:
    """Parse `3` or `0-9` of --round, the last one included. Raises BadParameter."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    try:
        numbers = list(range(int(first), int(last or first) + 1))
    except ValueError:
        numbers = []
    if not numbers:
        raise typer.BadParameter(
            f"expected a round or a span like 0-9, found {text!r}", param_hint="'--round'"
        )
    return numbers
