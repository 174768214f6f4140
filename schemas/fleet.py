"""Records of a fleet: heartbeats of servers and workers, and what each of them is to do.

They commit nothing and are replaced all the time; a run is what it is without them. Each is sealed
as other records are; the signature in its envelope is for storage (`marin_rl.storage.fleet`).
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.fields import Integer, Key, Name, Number, Sha256, Text
from schemas.records import Record

LABELS_MAX = 32
SETTINGS_MAX = 200
ADAPTERS_MAX = 1024
CANARY_TOKENS_MAX = 1024
CANARIES_MAX = 16  # versions: more than any bound of staleness, which endpoints that lag may have

Count = Annotated[int, Field(ge=0, lt=2**63)]
Url = Annotated[str, Field(pattern=r"^https?://[^\s]{1,500}$")]


class HeartbeatRecord(Record):
    """A server that announces itself: where it is, what it serves and runs, and its load.

    Tokens a second, and the share of time in which its engine computed nothing, are those since the
    last heartbeat. A server of the versions of an adapter names them as `adapters`, and their base
    by its digest. `session` and `target_version` are of the target that it read last.
    Times are Unix seconds by the server's own clock: for people, never for decisions.
    """

    server: Name
    url: Url
    run_sha256: Sha256
    model: Text
    weight_version: Integer
    parameters_digest: Text
    labels: Annotated[dict[str, Text], Field(max_length=LABELS_MAX)]
    code: Sha256
    tokenizer: Text
    chat_template: Text
    settings: Annotated[dict[str, Any], Field(max_length=SETTINGS_MAX)]
    beat: Count
    slots: Count
    busy: Count
    queued: Count
    tokens_per_second: Number
    idle: Annotated[float, Field(ge=0, le=1)] | None = None
    base_digest: Sha256 | None = None
    adapters: Annotated[list[Text], Field(max_length=ADAPTERS_MAX)] | None = None
    session: Text | None = None
    target_version: Count | None = None
    started_at: Number
    beat_at: Number


class TargetRecord(Record):
    """The checkpoint that a trainer has servers serve, and until when.

    Servers go on to later checkpoints by themselves once one above `through` is committed.
    `session` is random, of one start of the trainer: heartbeats repeat it, so that they age.
    """

    run_sha256: Sha256
    version: Count
    through: Count
    parameters_digest: Sha256
    session: Text | None = None


class CanaryRecord(Record):
    """The tokens by which an endpoint is proven, and the trainer's log-probabilities of them.

    `lengths` are the tokens of each sample; none: it is one.
    """

    temperature: Number
    token_ids: Annotated[list[Count], Field(min_length=1, max_length=CANARY_TOKENS_MAX)]
    logprobs: Annotated[list[Number], Field(min_length=1, max_length=CANARY_TOKENS_MAX)]
    tolerance: Number
    lengths: Annotated[list[Count], Field(max_length=CANARY_TOKENS_MAX)] | None = None


class ProvenRecord(Record):
    """A checkpoint that the trainer has proven, and the canary that proves endpoints with it."""

    version: Count
    parameters_digest: Sha256
    canary: CanaryRecord


class CanariesRecord(Record):
    """The canaries of the newest checkpoints of a run: see `storage.fleet`."""

    run_sha256: Sha256
    canaries: Annotated[list[ProvenRecord], Field(max_length=CANARIES_MAX)]


class SamplingRecord(Record):
    """The checkpoint that workers of a pool sample by: see `storage.fleet`.

    `state` is open, or closed: no new groups until it is open again.
    """

    state: Literal["open", "closed"]
    checkpoint: Key
    checkpoint_sha256: Sha256


class HeartbeatEnvelope(Record):
    """The object that a heartbeat lies in."""

    heartbeat: HeartbeatRecord
    signature: Text = ""


class TargetEnvelope(Record):
    """The object that a target lies in."""

    target: TargetRecord
    signature: Text = ""


class CanariesEnvelope(Record):
    """The object that canaries lie in."""

    canaries: CanariesRecord
    signature: Text = ""


class SamplingEnvelope(Record):
    """The object that says what is to be sampled."""

    sampling: SamplingRecord
    signature: Text = ""
