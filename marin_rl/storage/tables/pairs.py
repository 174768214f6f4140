"""Preference pairs as files: what people give, checked row by row, and a run's own committed copy.

A file is JSONL or Parquet, of our rows or of others' (`row_of_ours`). Everything in it is checked
before any of it is used; an error names the row and the field. A run keeps what it trains on in the
slot `pairs`, tokens included, so that it goes on when the file is gone, and so that a changed file
is noticed. Rows are of these kinds; what a row has besides is refused with it:

pair            `prompt` (a text or messages) or `messages`, and `chosen` and `rejected`, each a
                text or a list of one message: ours, and TRL's explicit one
conversations   `chosen` and `rejected` are whole conversations, whose common beginning is the
                prompt: TRL's implicit one, and UltraFeedback's, which has `prompt` besides
ranked          `context`, and two `completions` with `rank`, of which the lowest is best: NeMo's
dialogues       `chosen` and `rejected` are texts of "Human: " and "Assistant: ": HH-RLHF's
labelled        `completion`, and `label`, true for a desirable one: TRL's for KTO
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from marin_rl.errors import InputError
from marin_rl.finite import REWARD_MAX
from marin_rl.storage.commits import commit_slot, manifest_of, new_attempt
from marin_rl.storage.runs import Run, pairs_slot
from marin_rl.storage.tables.parquet import TableWriter, open_part, put_part
from marin_rl.storage.tables.records import Struct
from marin_rl.types import PreferencePair, Role, SlotRef, Split, as_role
from schemas import Malformed
from schemas.manifests import Parent
from schemas.migrations import PAIRS as LADDER
from schemas.strict_json import parse_json
from schemas.tables import LABEL, LEARNED, PAIRS

_PAIR = Struct(PreferencePair, PAIRS)

TokenIds = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFile:
    """The pairs of a file, the line or row of each, and the SHA-256 of the file's bytes."""

    pairs: tuple[PreferencePair, ...]
    places: tuple[str, ...]
    sha256: str

    def learned_as(self, *, labelled: bool) -> "PairFile":
        """The rows as pairs, or as `labelled` answers, of which a pair is two.

        Raises InputError for labelled answers in place of pairs, and for answers of one label.
        """
        if not labelled and self.pairs[0].label is not None:
            raise InputError(
                f"{self.places[0]}: expected a pair, chosen and rejected, found an answer with a "
                "label, which only preference.loss.type kto learns from"
            )
        if not labelled:
            return self
        if self.pairs[0].label is None:
            answers = tuple(answer for pair in self.pairs for answer in _labelled_answers(pair))
            places = tuple(place for place in self.places for _ in range(2))
            return replace(self, pairs=answers, places=places)
        if len(labels := {pair.label for pair in self.pairs}) == 1:
            raise InputError(
                f"{self.places[-1]}: expected answers of both labels, found label "
                f"{str(*labels).lower()} in all {len(self.pairs)} rows"
            )
        return self


def _labelled_answers(pair: PreferencePair) -> Iterator[PreferencePair]:
    fields = ("", "_id", "_reward", "_token_ids", "_loss_mask")
    nothing = {f"rejected{field}": None for field in fields} | {"rejected": ""}
    for label, side in ((True, "chosen"), (False, "rejected")):
        own = {f"chosen{field}": getattr(pair, f"{side}{field}") for field in fields}
        yield replace(pair, id=f"{pair.id}/{side}", label=label, **nothing, **own)


def read_pairs(path: str | Path, key: str = "reward_model.pairs") -> PairFile:
    """Pairs of a JSONL or Parquet file, which the configuration names as `key`.

    Raises InputError naming the row and the field.
    """
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{key}: cannot read {file}: {error}") from None
    rows = _parquet_rows(file, data) if file.suffix == ".parquet" else _json_rows(file, data)
    pairs: list[PreferencePair] = []
    places: list[str] = []
    seen: set[str] = set()
    kinds: dict[str, str] = {}
    for where, raw in rows:
        pair, kind = _pair(raw, where)
        kinds.setdefault(kind, where)
        if len(kinds) > 1:
            (first, at), (other, _) = kinds.items()
            raise InputError(
                f"{where}: expected a row of the kind {first!r}, as {at}, found {other!r}: give a "
                "file for each kind of rows"
            )
        if pair.id in seen:
            raise InputError(f"{where}, field id: {pair.id!r} is there twice")
        seen.add(pair.id)
        pairs.append(pair)
        places.append(where)
    if not pairs:
        raise InputError(f"{file} has no rows: expected preference pairs")
    digest = hashlib.sha256(data).hexdigest()
    return PairFile(pairs=tuple(pairs), places=tuple(places), sha256=digest)


def write_pairs(path: str | Path, pairs: Sequence[PreferencePair]) -> None:
    """Write pairs so that `read_pairs` gives them back: JSON lines, or Parquet by the suffix."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        file.write_bytes(encode_pairs(pairs))
        return
    rows = ({k: v for k, v in _PAIR.encode(pair).items() if v is not None} for pair in pairs)
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def encode_pairs(pairs: Sequence[PreferencePair], stamp: Mapping[str, str] | None = None) -> bytes:
    writer = TableWriter(LADDER, PAIRS, stamp or {})
    writer.write(pa.Table.from_pylist([_PAIR.encode(pair) for pair in pairs], schema=PAIRS))
    return writer.finish()


def commit_pairs(
    run: Run,
    pairs: Sequence[PreferencePair],
    *,
    decided: str,
    extra: Mapping[str, Any],
    parents: Sequence[Parent] = (),
) -> SlotRef:
    """Commit the pairs that a run trains on; `parents` made their reference's log-probabilities."""
    attempt, slot = new_attempt(), pairs_slot()
    data = encode_pairs(pairs, {"attempt": attempt})
    part = put_part(run.store, slot, f"pairs-{attempt}.parquet", data, rows=len(pairs))
    held_out = sum(pair.split == "eval" for pair in pairs)
    return commit_slot(
        run.store,
        slot,
        attempt=attempt,
        fingerprint=decided,
        parents=parents,
        parts=[part],
        totals={"pairs": len(pairs), "held_out": held_out},
        extra=extra,
    )


def committed_pairs(run: Run, ref: SlotRef) -> list[PreferencePair]:
    """The pairs of a run, verified. Raises CorruptObject, ObjectMissing."""
    manifest = manifest_of(run.store, ref)
    tables = (open_part(run.store, manifest.slot, part, LADDER) for part in manifest.parts)
    rows = [row for reader in tables for row in reader.table().to_pylist()]
    return [_PAIR.decode(row) for row in rows]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[Role, BeforeValidator(as_role)]
    content: str


class _PairRow(BaseModel):
    # Nothing is converted or passed over: a misspelt field would change what is learned.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    id: str | None = Field(default=None, min_length=1)
    prompt: str | None = None
    messages: list[_Message] | None = Field(default=None, min_length=1)
    chosen: str
    rejected: str
    margin: float | None = Field(default=None, ge=0, le=REWARD_MAX)
    split: Split | None = None
    source: str | None = None
    chosen_id: str | None = None
    rejected_id: str | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    chosen_token_ids: TokenIds | None = Field(default=None, min_length=1)
    rejected_token_ids: TokenIds | None = Field(default=None, min_length=1)
    chosen_loss_mask: list[Literal[0, 1]] | None = None
    rejected_loss_mask: list[Literal[0, 1]] | None = None
    tokenizer_digest: str | None = None
    chat_template_digest: str | None = None
    label: bool | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> "_PairRow":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected exactly one of the fields prompt and messages")
        tokens = (self.chosen_token_ids, self.rejected_token_ids)
        digests = (self.tokenizer_digest, self.chat_template_digest)
        # Ids without the digests could be any tokenizer's.
        if len({item is None for item in (*tokens, *digests)}) > 1:
            raise ValueError(
                "expected chosen_token_ids, rejected_token_ids, tokenizer_digest and "
                "chat_template_digest all together, or none of them"
            )
        called = tokens[0] is None and any(each.role == "tool" for each in self.messages or ())
        if called:
            raise ValueError(
                "messages: found the result of a tool without a call, which rows of "
                "pairs have as token ids alone"
            )
        for name in ("chosen", "rejected"):
            ids, mask = getattr(self, f"{name}_token_ids"), getattr(self, f"{name}_loss_mask")
            if mask is not None and len(mask) != len(ids or ()):
                raise ValueError(
                    f"expected in {name}_loss_mask a number for each token id, {len(ids or ())}, "
                    f"found {len(mask)}"
                )
        if self.label is None and self.chosen == self.rejected and tokens[0] == tokens[1]:
            raise ValueError("the fields chosen and rejected hold the same answer")
        return self


def _pair(raw: object, where: str) -> tuple[PreferencePair, str]:
    """The pair of a row, and the kind of row that it is."""
    try:
        kind, ours = row_of_ours(raw) if isinstance(raw, dict) else ("pair", raw)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    try:
        row = _PairRow.model_validate(ours)
    except ValidationError as error:
        # One at a time: a wrong column repeats its error in every row.
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        known = f" (known: {', '.join(_PairRow.model_fields)})"
        unknown = known if first["type"] == "extra_forbidden" else ""
        shown = f", found {first['input']!r:.80}" if place and not unknown else ""
        field = f", field {place}" if place else ""
        raise InputError(f"{where}{field}: {first['msg']}{unknown}{shown}") from None
    tree = row.model_dump(exclude={"prompt"})
    if row.prompt is not None:
        tree["messages"] = [{"role": "user", "content": row.prompt}]
    if row.id is None:
        # Of the content, so that the same file gives the same names wherever it lies.
        ids = [row.chosen_id, row.rejected_id]
        text = orjson.dumps([tree["messages"], row.chosen, row.rejected, *ids])
        tree["id"] = hashlib.sha256(text).hexdigest()[:16]
    try:
        return _PAIR.decode(dict.fromkeys((*LEARNED, LABEL)) | tree), kind
    except OverflowError:
        raise InputError(f"{where}: a token id does not fit in 32 bits") from None


def _json_rows(file: Path, data: bytes) -> Iterator[tuple[str, object]]:
    for place, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            where = f"{file}, line {place}"
            try:
                yield where, parse_json(line)
            except Malformed as error:
                raise InputError(f"{where} is not JSON: {error}") from None


def _parquet_rows(file: Path, data: bytes) -> Iterator[tuple[str, object]]:
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file} cannot be read as Parquet: {error}") from error
    for index, row in enumerate(table.to_pylist()):
        # A null is an absent field, as in JSON lines: Parquet has every column in every row.
        yield f"{file}, row {index}", {k: v for k, v in row.items() if v is not None}


Row = dict[str, Any]

_RENAMED = {"score_chosen": "chosen_reward", "score_rejected": "rejected_reward"}
_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def row_of_ours(raw: Mapping[str, Any]) -> tuple[str, Row]:
    """The kind of a row, and what it says in our fields. Raises ValueError."""
    row = {_RENAMED.get(name, name): value for name, value in raw.items()}
    if "context" in row and "completions" in row:
        return "ranked", _ranked(row)
    if "completion" in row or "label" in row:
        return "labelled", _labelled(row)
    answers: tuple[Any, Any] = row.get("chosen"), row.get("rejected")
    asked = row.get("prompt") is not None or row.get("messages") is not None
    if all(isinstance(answer, list) for answer in answers):
        return _of_messages(row, *answers)
    if not asked and all(isinstance(a, str) and "\n\nAssistant:" in a for a in answers):
        rest = {k: v for k, v in row.items() if k not in ("chosen", "rejected")}
        return "dialogues", rest | _split(*(_spoken(str(answer)) for answer in answers))
    if isinstance(row.get("prompt"), list):
        row["messages"] = row.pop("prompt")
    return "pair", row


def _of_messages(row: Row, chosen: Sequence[Any], rejected: Sequence[Any]) -> tuple[str, Row]:
    """A row whose answers are lists of messages, which may begin with the prompt."""
    rest = {k: v for k, v in row.items() if k not in ("chosen", "rejected", "prompt", "messages")}
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list | None):
        raise ValueError(f"field prompt: expected a text or messages, found {prompt!r:.80}")
    if prompt is None and len(chosen) == len(rejected) == 1:
        prompt = row.get("messages")
    repeated = prompt is None or all(each[: len(prompt)] == prompt for each in (chosen, rejected))
    if not repeated:
        both = {"chosen": _answer(chosen, "chosen"), "rejected": _answer(rejected, "rejected")}
        return "pair", rest | {"messages": prompt} | both
    # UltraFeedback's id names a prompt and no pair; its `messages` are the chosen conversation.
    rest.pop("prompt_id", None)
    return "conversations", rest | _split(chosen, rejected)


def _split(chosen: Sequence[Any], rejected: Sequence[Any]) -> Row:
    """Common beginning of two conversations, and the answers that follow it."""
    # The last message of either is an answer, even where both gave the same one.
    most = min(len(chosen), len(rejected)) - 1
    same = next((n for n in range(most) if chosen[n] != rejected[n]), max(most, 0))
    return {
        "messages": list(chosen[:same]),
        "chosen": _answer(chosen[same:], "chosen"),
        "rejected": _answer(rejected[same:], "rejected"),
    }


def _answer(messages: Sequence[Any], field: str) -> Any:
    roles = [each.get("role") if isinstance(each, Mapping) else each for each in messages]
    if roles != ["assistant"]:
        raise ValueError(
            f"field {field}: expected one message of the assistant after the prompt, found "
            f"messages of {roles!r:.100}"
        )
    extra = set(messages[0]) - {"role", "content"}
    if extra:
        raise ValueError(
            f"field {field}: expected role and content in a message, found {sorted(extra)}"
        )
    return messages[0].get("content")


def _labelled(row: Row) -> Row:
    if {"completion", "label"} - row.keys() or {"chosen", "rejected"} & row.keys():
        raise ValueError(f"expected prompt, completion and label, found {sorted(row)}")
    if isinstance(row.get("prompt"), list):
        row["messages"] = row.pop("prompt")
    answer = row.pop("completion")
    if isinstance(answer, list):
        answer = _answer(answer, "completion")
    return {**row, "chosen": answer, "rejected": ""}


def _ranked(row: Row) -> Row:
    context, completions = row.pop("context"), row.pop("completions")
    try:
        best, worst = sorted(completions, key=lambda each: each["rank"])
        if best["rank"] == worst["rank"]:
            raise ValueError("of one rank")
        answers = {
            "chosen": _answer(best["completion"], "completions"),
            "rejected": _answer(worst["completion"], "completions"),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "field completions: expected two of different rank, each with rank and completion, a "
            f"list of messages, found {completions!r:.100} ({error})"
        ) from None
    return {**row, "messages": context, **answers}


def _spoken(text: str) -> list[dict[str, str]]:
    """Messages of an HH-RLHF dialogue."""
    opening, *parts = _SPEAKER.split(text)
    if opening.strip():
        raise ValueError(
            f"expected a dialogue that begins with Human, found {opening.strip()!r:.80} before it"
        )
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[speaker], "content": said.strip()} for speaker, said in pairs]
