"""Board of a fleet: heartbeats of servers, and what servers and workers are to serve and sample by.

Private objects below `.fleet/`, written again and again by one writer each. They commit nothing,
and gc may delete them. No clock says that a server is alive: who wants to know asks the server.
With an API token records are signed, so that who can write into a root, and knows no token, can
neither collect prompts nor send servers elsewhere. A heartbeat repeats the session and version of
the target that its server read last, so that an old one, put back, leads no request to who has the
address now.
"""

import hmac
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from marin_rl.config import Config, fingerprint_fields
from marin_rl.errors import CorruptObject, ObjectMissing, StorageError
from marin_rl.storage.commits import record_errors
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.types import Canary, SlotRef
from schemas.manifests import canonical_json, open_sealed_json, sealed_json, sha256_of
from schemas.records import Integer, Key, Name, Number, Record, Sha256, Size, Text, validated
from schemas.strict_json import parse_json

FLEET = ".fleet"
TARGET_KEY = f"{FLEET}/target.json"
CANARIES_KEY = f"{FLEET}/canaries.json"
SAMPLING_KEY = f"{FLEET}/sampling.json"
VERSION = 1
READERS = 16  # a listing names the heartbeats, and each is a request of its own in a bucket
LABELS_MAX, SETTINGS_MAX, ADAPTERS_MAX = 32, 200, 1024
CANARY_TOKENS_MAX = 1024
CANARIES_MAX = 16  # versions: more than any bound of staleness, which endpoints that lag may have

_SUFFIX = ".heartbeat.json"
_SETTINGS = ("policy.compute_dtype", "policy.context_length")

Shape = TypeVar("Shape")
Url = Annotated[str, Field(pattern=r"^https?://[^\s]{1,500}$")]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A server that announces itself: where it is, what it serves and runs, and its load.

    Tokens a second, and the share of time in which its engine computed nothing (`idle`), are those
    since the last heartbeat. A server of the versions of an adapter names them as `adapters`, and
    their base by its digest. `session` and `target_version` are of the target that it read last.
    Times are Unix seconds by the server's own clock: for people, never for decisions.
    """

    __pydantic_config__: ClassVar[ConfigDict] = Record.model_config

    server: Name
    url: Url
    run_sha256: Sha256
    model: Text
    weight_version: Integer
    parameters_digest: Text
    labels: Annotated[Mapping[str, Text], Field(max_length=LABELS_MAX)]
    code: Sha256
    tokenizer: Text
    chat_template: Text
    settings: Annotated[Mapping[str, Any], Field(max_length=SETTINGS_MAX)]
    beat: Size
    slots: Size
    busy: Size
    queued: Size
    tokens_per_second: Number
    started_at: Number
    beat_at: Number
    idle: Share | None = None
    base_digest: Sha256 | None = None
    adapters: Annotated[Sequence[Text], Field(max_length=ADAPTERS_MAX)] | None = None
    session: Text | None = None
    target_version: Size | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The checkpoint that a trainer has servers serve, until one above `through` is committed.

    `session` is random, of one start of the trainer: heartbeats repeat it, so that they age.
    """

    __pydantic_config__: ClassVar[ConfigDict] = Record.model_config

    run_sha256: Sha256
    version: Size
    through: Size
    parameters_digest: Sha256
    session: Text | None = None

    def aged(self, heartbeat: Heartbeat, version: int) -> str:
        """Why a heartbeat is too old for those who sample by `version`; empty where it is not.

        Its server must have read a target of this session, of that version or a later one.
        """
        # The target may be an old one that was put back, too.
        if self.version < version:
            return f"the target of the run is version {self.version}, expected {version} or later"
        if not self.session or heartbeat.session != self.session:
            return "its heartbeat is older than this start of the trainer"
        if heartbeat.target_version is None or heartbeat.target_version < version:
            return f"its heartbeat is older than the target of version {version}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Facts that a server and its trainer must have in common, by digest; `settings` by key."""

    run_sha256: str
    code: str
    tokenizer: str
    chat_template: str
    settings: Mapping[str, Any]

    def refusal(self, heartbeat: Heartbeat) -> str:
        """Why a server may not sample for this run; empty where it may."""
        # Digests first: settings of another run or code need no comparison.
        for what, expected, actual in (
            ("another run of this name", self.run_sha256, heartbeat.run_sha256),
            ("other code", self.code, heartbeat.code),
            ("another tokenizer", self.tokenizer, heartbeat.tokenizer),
            ("another chat template", self.chat_template, heartbeat.chat_template),
        ):
            if actual != expected:
                return f"{what}: expected digest {expected[:12]}, found {actual[:12]}"
        keys = sorted(set(self.settings) | set(heartbeat.settings))
        for key in keys:
            expected, actual = self.settings.get(key), heartbeat.settings.get(key)
            if expected != actual:
                return (
                    f"another configuration: {key} is {actual!r}, expected {expected!r} (digests "
                    f"{_digest(heartbeat.settings)[:12]} and {_digest(self.settings)[:12]})"
                )
        return ""


def _digest(settings: Mapping[str, Any]) -> str:
    return sha256_of(canonical_json(dict(settings)))


def served_settings(config: Config) -> dict[str, Any]:
    flat = _flat(fingerprint_fields(config.inference), "inference.")
    tree = _flat(config.policy.model_dump(mode="json"), "policy.")
    return flat | {key: tree[key] for key in _SETTINGS}


def _flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value
    return result


def run_sha256(folder: ObjectStore) -> str:
    # Another run under the same name has another.
    return sha256_of(folder.read(RUN_KEY))


def _bounded(canary: Canary) -> Canary:
    arrays = canary.token_ids, canary.logprobs, canary.lengths
    if not all(arrays[:2]) or max(map(len, arrays)) > CANARY_TOKENS_MAX:
        raise ValueError(f"expected 1 to {CANARY_TOKENS_MAX} tokens with their logprobs")
    if min(*canary.token_ids, *canary.lengths) < 0:
        raise ValueError("expected token ids and lengths from 0")
    return canary


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenVersion:
    """A version, the digest of its parameters, and the canary that proves endpoints with it."""

    __pydantic_config__: ClassVar[ConfigDict] = Record.model_config

    version: Size
    parameters_digest: Sha256
    canary: Annotated[Canary, AfterValidator(_bounded)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Canaries:
    __pydantic_config__: ClassVar[ConfigDict] = Record.model_config

    run_sha256: Sha256
    canaries: Annotated[Sequence[ProvenVersion], Field(max_length=CANARIES_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTarget:
    """The checkpoint that workers of a pool sample by, while `open`; no new groups otherwise."""

    checkpoint: SlotRef
    open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampling:
    """A `SamplingTarget` as it lies in its object."""

    __pydantic_config__: ClassVar[ConfigDict] = Record.model_config

    state: Literal["open", "closed"]
    checkpoint: Key
    checkpoint_sha256: Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Heartbeat that cannot be read, and the error."""

    name: str
    error: str


class FleetBoard:
    """Records below `.fleet/` in a run's own folder, signed and read with one API token.

    A record is replaced by its next one. Methods that write raise StorageError; those that read
    raise CorruptObject for a record of another token, NewerSchema, StoreUnavailable.
    """

    def __init__(self, folder: ObjectStore, api_key: str | None) -> None:
        self.folder, self.api_key = folder, api_key

    def announce(self, heartbeat: Heartbeat) -> None:
        self.folder.replace(_key(heartbeat.server), self.signed("heartbeat", asdict(heartbeat)))

    def withdraw(self, server: str) -> None:
        self.folder.delete(_key(server))

    def heartbeats(self) -> list[Heartbeat | Unreadable]:
        """Every heartbeat, the last one of each address; what cannot be read says why."""
        names = [name for name in self.folder.children(FLEET) if name.endswith(_SUFFIX)]
        # At once: in a bucket each record is a request, and a fleet has many.
        with ThreadPoolExecutor(min(READERS, len(names) or 1)) as pool:
            read = [item for item in pool.map(self._heartbeat, names) if item is not None]
        # A server that was killed and started again at its address has two; its clock is one.
        latest: dict[str, Heartbeat] = {}
        for item in read:
            if isinstance(item, Heartbeat):
                before = latest.setdefault(item.url, item)
                latest[item.url] = max(before, item, key=lambda each: each.started_at)
        return [*latest.values(), *(item for item in read if isinstance(item, Unreadable))]

    def _heartbeat(self, name: str) -> Heartbeat | Unreadable | None:
        try:
            # None: it was withdrawn since the listing.
            return self._opened("heartbeat", Heartbeat, f"{FLEET}/{name}")
        except StorageError as error:
            if error.transient:
                raise
            return Unreadable(name=name, error=str(error))

    def aim(self, target: Target) -> None:
        said = {name: value for name, value in asdict(target).items() if value is not None}
        self.folder.replace(TARGET_KEY, self.signed("target", said))

    def release(self) -> None:
        self.folder.delete(TARGET_KEY)

    def target(self) -> Target | None:
        return self._opened("target", Target, TARGET_KEY)

    def prove(self, run_sha256: str, proven: ProvenVersion) -> None:
        """Add the canary of a version to those of the newest ones, in the place of its last one."""
        try:
            known = self.canaries(run_sha256)
        except CorruptObject:  # of another token: none of it can be trusted
            known = {}
        known[proven.version] = proven
        newest = [known[version] for version in sorted(known)[-CANARIES_MAX:]]
        record = asdict(_Canaries(run_sha256=run_sha256, canaries=newest))
        self.folder.replace(CANARIES_KEY, self.signed("canaries", record))

    def canaries(self, run_sha256: str) -> dict[int, ProvenVersion]:
        """The proven versions; none where no trainer of this run has proven one.

        Clients of endpoints whose weights change while they answer prove by them whatever version
        an endpoint names.
        """
        record = self._opened("canaries", _Canaries, CANARIES_KEY)
        if record is None or record.run_sha256 != run_sha256:
            return {}
        return {proven.version: proven for proven in record.canaries}

    def direct(self, target: SamplingTarget) -> None:
        """Write the checkpoint by which workers of a pool sample a window, or their flow's pause.

        One that reads an old record samples by an older policy, which its groups say.
        """
        record = _Sampling(
            state="open" if target.open else "closed",
            checkpoint=target.checkpoint.slot,
            checkpoint_sha256=target.checkpoint.sha256,
        )
        self.folder.replace(SAMPLING_KEY, self.signed("sampling", asdict(record)))

    def sampling_target(self) -> SamplingTarget | None:
        """The checkpoint to sample by; None where no flow has written one."""
        record = self._opened("sampling", _Sampling, SAMPLING_KEY)
        if record is None:
            return None
        checkpoint = SlotRef(slot=record.checkpoint, sha256=record.checkpoint_sha256)
        return SamplingTarget(checkpoint=checkpoint, open=record.state == "open")

    def signed(self, kind: str, record: Mapping[str, Any]) -> bytes:
        full = {kind: dict(record), "format": f"marin-rl/{kind}", "version": VERSION}
        return sealed_json({**full, "signature": self._signature(full)})

    def _opened(self, kind: str, shape: type[Shape], key: str) -> Shape | None:
        try:
            data = self.folder.read(key)
        except ObjectMissing:
            return None
        source = self.folder.url_of(key)
        with record_errors(source):
            record = open_sealed_json(data, format=f"marin-rl/{kind}", version=VERSION)
        signature = str(record.pop("signature", ""))
        # In constant time, before any field is used: who writes there is not yet trusted.
        if not hmac.compare_digest(signature.encode(), self._signature(record).encode()):
            raise CorruptObject(
                f"{source}: expected a record signed with this process's API token, found "
                f"{'another signature' if signature else 'none'}: set the same token on the "
                "trainer, on every server and on every worker (inference.api_key_variable)"
            )
        with record_errors(source):
            fields = canonical_json(record.get(kind))
            return validated(lambda: _adapter(shape).validate_json(fields))

    def _signature(self, record: Mapping[str, Any]) -> str:
        """Code of a record under the API token; empty where there is no token."""
        if self.api_key is None:
            return ""
        # Over the canonical bytes: another order of keys is the same record.
        return hmac.digest(self.api_key.encode(), canonical_json(dict(record)), "sha256").hex()


@cache
def _adapter(shape: type[Any]) -> Any:
    return TypeAdapter(shape)


def heartbeat_age_s(key: str, data: bytes, now: float) -> float | None:
    """Seconds since a heartbeat was written, by its writer's clock; None for other objects."""
    if not (key.endswith(_SUFFIX) and key.startswith(f"{FLEET}/")):
        return None
    try:
        return now - float(parse_json(data)["heartbeat"]["beat_at"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _key(server: str) -> str:
    return f"{FLEET}/{server}{_SUFFIX}"
