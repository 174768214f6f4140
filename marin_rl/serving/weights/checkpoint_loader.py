"""Weights from disk into memory: read whole, verified, and fit for the place they are to take.

Owns the two kinds of source, a Hugging Face folder and a committed checkpoint of a run, and what
must be true of either before its weights may serve anyone: tokenizer and architecture are the
served ones, every number is finite, and the digest is the promised one. Also the places that an
admin may load from: the admin token is no right to have the server read any file of its user, so a
place is taken only below a root that the server was started with. Leaves out the switch itself
(`weight_updates`) and the canary (`canary`).
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from marin_rl.config import InferenceConfig
from marin_rl.errors import CorruptObject, InputError, MarinRLError, ObjectMissing, StalePolicy
from marin_rl.models.module import LanguageModel
from marin_rl.models.spec import Spec
from marin_rl.storage.runs import Run, checkpoint_at, round_of
from marin_rl.tokenizers import TokenizerIdentity, load_tokenizer, tokenizer_for
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.hf_weights import hf_template
from marin_rl.training.model import named_parameters, parameter_shapes, parameters_digest
from marin_rl.types import SlotRef

# Not what follows a word, a colon or another slash: those are URLs and fractions.
_PATH = re.compile(r"(?<![\w:/.])/[^\s:;,'\"()\[\]]+")
_LOCAL_SCHEMES = ("file", "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Facts in which new weights must agree with the served ones.

    Of the tokenizer, and of all that decides a model's outputs except the weights: models that
    agree here run the same compiled programs. Both are made for `positions` at least.
    """

    tokenizer: TokenizerIdentity
    spec: Spec
    shapes: Mapping[str, tuple[int, ...]]
    positions: int

    def check_model(self, model: LanguageModel) -> None:
        """Raise InputError, saying what differs, for a model of another architecture."""
        check_positions(model, self.positions)
        shapes = parameter_shapes(model)
        differing = {name for name, _ in self.shapes.items() ^ shapes.items()}
        if differing:
            name = min(differing)
            raise InputError(
                f"another architecture: parameter {name} expected "
                f"{self.shapes.get(name, 'absent')}, found {shapes.get(name, 'absent')} "
                f"({len(differing)} such parameters)"
            )
        if self.spec != model.spec:
            raise InputError(f"another architecture: {self.spec.difference(model.spec)}")


def check_positions(model: LanguageModel, positions: int) -> None:
    """Raise InputError for a model that was made for a shorter context."""
    longest = int(model.spec.context_length)
    if longest < positions:
        raise InputError(
            f"expected a model made for at least {positions} positions, the context that is "
            f"served, found one for {longest}: set policy.context_length to that"
        )


def _check_tokenizer(expected: TokenizerIdentity, other: TokenizerIdentity) -> None:
    """Raise InputError unless texts and messages become the same ids with both."""
    for what, ours, theirs in (
        ("tokenizer", expected.tokenizer_digest, other.tokenizer_digest),
        ("chat template", expected.chat_template_digest, other.chat_template_digest),
    ):
        if ours != theirs:
            raise InputError(
                f"expected the {what} that is served (digest {ours[:12]}), found another "
                f"({theirs[:12]}): these weights were trained with it; serve them on their own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model in memory, and its identity. `round` is None for weights of no run."""

    model: LanguageModel
    parameters_digest: str
    round: int | None = None

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in named_parameters(self.model).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source of new weights: `kind` for the metrics, `place` as the caller wrote it."""

    kind: str
    place: str
    read: Callable[[Served], Loaded]

    def error_text(self, error: Exception) -> str:
        return without_paths(str(error), self.place)


def without_paths(text: str, place: str) -> str:
    """Hide the paths in a message, except `place`, which the caller wrote."""
    for path in (Path(place).absolute(), Path(place).resolve()):
        # not where it is the end of another path, such as the one that the caller wrote
        text = re.sub(rf"(?<![\w./~-]){re.escape(str(path))}", lambda _: place, text)

    def shown(path: str) -> str:
        return path if path.startswith(place) else f"…/{path.rstrip('/').rpartition('/')[2]}"

    return _PATH.sub(lambda match: shown(match[0]), text)


def folder(path: str, promised: str | None = None, policy: str | None = None) -> Source:
    """A Hugging Face folder; `promised` is the parameters' digest that the caller expects.

    `policy` identifies them where they are no policy's own parameters, but an adapter and its base.
    """

    def read(served: Served) -> Loaded:
        loaded = read_folder(path, promised, served)
        return loaded if policy is None else dataclasses.replace(loaded, parameters_digest=policy)

    return Source(kind="disk", place=path, read=read)


def checkpoint(root: str, run_id: str, round: int | None, promised: str | None = None) -> Source:
    """A run's committed checkpoint: of a round, or the latest when it is read."""

    def read(served: Served) -> Loaded:
        try:
            run = Run.open(root, run_id)
        except ObjectMissing as error:
            # which runs there are instead is for those who may list the root
            raise ObjectMissing(f"no run {run_id!r} under {root}: expected its run.json") from error
        return read_checkpoint(run, round, promised, served)

    return Source(kind="disk", place=root, read=read)


def read_folder(
    path: str,
    promised: str | None = None,
    served: Served | None = None,
    begun: "Future[tuple[LanguageModel, str]] | None" = None,
) -> Loaded:
    """Read and verify the weights of a Hugging Face folder, to replace the `served` ones if any.

    `promised` is the parameters' digest that the caller expects, if any. `begun` are its weights,
    where they are being read already; its tokenizer is then the caller's. Raises InputError for a
    folder that is unfit, StalePolicy for one with other weights than promised.
    """
    try:
        if served is not None:
            _check_tokenizer(served.tokenizer, TokenizerIdentity.of(load_tokenizer(path)))
            # by its settings: no weights are read for a model that does not fit
            served.check_model(hf_template(path))
        if begun is None:
            model = load_hf(path)
            digest = parameters_digest(model)
        else:
            model, digest = begun.result()
    # ours say what is wrong already; a lack of memory is no fault of the folder
    except (MarinRLError, MemoryError):
        raise
    except Exception as error:
        # a damaged folder fails somewhere inside of other libraries, some of which raise just this
        raise InputError(
            f"cannot load {path}: {type(error).__name__} while reading it ({error}); copy it again"
        ) from error
    _check_digest(digest, promised)  # its numbers were checked as they were read
    return Loaded(model=model, parameters_digest=digest)


def read_checkpoint(
    run: Run, round: int | None, promised: str | None = None, served: Served | None = None
) -> Loaded:
    """`read_slot` of a checkpoint (None: the latest). Raises ObjectMissing if not committed."""
    return read_slot(run, checkpoint_at(run, round), promised, served)


def read_slot(
    run: Run, ref: SlotRef, promised: str | None = None, served: Served | None = None
) -> Loaded:
    """The parameters in a committed slot, a warm start's too, verified as `read_folder` does.

    Every file is compared with the manifest first. Raises CorruptObject, what the store raises,
    InputError for another tokenizer or architecture, and StalePolicy where the parameters are not
    those that the manifest, or the caller, promises.
    """
    # here, because a server of a folder starts sooner without the trainer's modules
    from marin_rl.training.policy_source import dtype_of, read_policy, served_template
    from marin_rl.training.state import identity_of, template_of

    try:
        identity = identity_of(run, ref)
    except KeyError as error:
        raise CorruptObject(
            f"{run.store.url_of(ref.slot)}: its manifest does not say its {error}"
        ) from None
    tokenizer = tokenizer_for(run.config.policy)
    _check_tokenizer(
        TokenizerIdentity.of(tokenizer) if served is None else served.tokenizer,
        TokenizerIdentity(
            tokenizer_digest=identity.tokenizer_digest,
            chat_template_digest=identity.chat_template_digest,
        ),
    )
    template = template_of(run.config.policy, tokenizer)
    dtype = dtype_of(run)
    if served is not None:
        served.check_model(served_template(identity, template, dtype))
    policy = read_policy(run, ref, template)
    _check_digest(policy.digest, identity.parameters_digest, promised)
    for name, array in policy.trained.items():
        wrong = int(array.size - np.isfinite(array).sum())
        if wrong:
            raise InputError(f"parameter {name} has {wrong} values of {array.size} not finite")
    return Loaded(
        model=policy.served(template, dtype),
        parameters_digest=policy.digest,
        round=round_of(ref.slot.rpartition("/")[2]),
    )


def _check_digest(digest: str, *promises: str | None) -> None:
    for promised in promises:
        if promised not in (None, digest):
            raise StalePolicy(
                f"expected parameters with the digest {promised}, found {digest}: these are other "
                "weights than promised, or they were damaged; copy them again, or ask for theirs"
            )


def with_update_root(config: InferenceConfig, root: str | Path) -> InferenceConfig:
    roots = (*config.server.update_roots, str(root))
    server = config.server.model_copy(update={"update_roots": roots})
    return config.model_copy(update={"server": server})


class Places:
    """Places below a list of roots: local folders, symbolic links followed, or URLs."""

    def __init__(self, roots: Sequence[str]) -> None:
        # these are the user's own words, so `~` is their home
        folders = {root: _local(os.path.expanduser(root)) for root in roots}  # noqa: PTH111 - or a URL
        self._folders = [folder for folder in folders.values() if folder is not None]
        self._urls = [root.rstrip("/") for root, folder in folders.items() if folder is None]

    def holds(self, place: str) -> bool:
        folder = _local(place)
        if folder is not None:
            return any(folder.is_relative_to(root) for root in self._folders)
        parts = place.split("/")
        # fsspec chains file systems by `::`, and `..` would lead out of the root
        if "://" not in place or "::" in place or ".." in parts or "." in parts:
            return False
        # with the slash: `s3://b/runs-2` is not below `s3://b/runs`
        return any(place.rstrip("/") == url or place.startswith(f"{url}/") for url in self._urls)

    def only(self, source: Source) -> Source:
        """The same source, but that reading it raises InputError where no root holds it."""

        def read(served: Served) -> Loaded:
            self.check(source.place)
            folder = Path(source.place)
            for path in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")):
                if path.is_file() and not self.holds(str(path)):
                    raise InputError(
                        f"{path} is a link that leads out of the server's roots: copy it"
                    )
            return source.read(served)

        return dataclasses.replace(source, read=read)

    def check(self, place: str) -> None:
        if not self.holds(place):
            raise InputError(
                f"expected a place below a root that this server was started with, found "
                f"{place!r:.200}: list its folder in inference.server.update_roots"
            )


def _local(place: str) -> Path | None:
    """The folder that a local place names, links resolved; None for URLs of object stores.

    A place that begins with `~` names no folder: it would be another user's home.
    """
    scheme, separator, remainder = place.partition("://")
    if separator and scheme not in _LOCAL_SCHEMES:
        return None
    path = remainder if separator else place
    return None if path.startswith("~") or "\0" in path else Path(os.path.realpath(path))
