"""Base of every section of the configuration: frozen, typed, ranged, with marks on its fields.

Fields marked `RUNTIME_ONLY` may differ when a run is continued: they change how, when or how far a
run goes, never what its slots contain. All others are the run's *content* and are part of
fingerprints. Of the free ones, those marked `PLAN` are numbers whose effect stays in the run's own
folder; a run.json says them to all commands, while no other free key is ever taken from one.
Sections marked `OMIT_IF_NONE` leave no trace while they are null: runs from before them stay what
they were. A key marked `AS_BEGUN` is chosen by a new run where it is null; its run.json says the
choice to all later commands, and earlier runs continue without it. Of a mapping, single entries may
be marked so.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    model_serializer,
)
from pydantic.fields import FieldInfo

from marin_rl.config.files import as_written
from marin_rl.user_code import SPEC_PATTERN

RUNTIME_ONLY: dict[str, Any] = {"free": True}
PLAN: dict[str, Any] = {**RUNTIME_ONLY, "plan": True}
OMIT_IF_NONE: dict[str, Any] = {"absent": True}
AS_BEGUN: dict[str, Any] = {**OMIT_IF_NONE, "as_begun": True}

CONTENT = "content"  # what is written: the keys that decide what a run's slots contain
Count = Annotated[int, Field(ge=1)]
CodeName = Annotated[str, Field(pattern=SPEC_PATTERN)]  # FILE.py:name or module:name
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
# Variables of a chat template by name; an empty mapping is none.
TemplateOptions = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")], JsonValue],
    Field(max_length=64),
    AfterValidator(lambda options: options or None),
]
OneOrMany = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]

Node = TypeVar("Node", bound="Section")


def null_if(default: Any) -> AfterValidator:
    """Take a value for null, so that a run which says it is the run that says nothing."""
    return AfterValidator(lambda value: None if value == default else value)


class Section(BaseModel):
    """Base of every node: unknown keys are errors, values never change, NaN is refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @model_serializer(mode="wrap")
    def _written(self, dump: Callable[[Any], dict[str, Any]], info: Any) -> dict[str, Any]:
        """Leave out absent keys, and of the content free keys and sections without any other."""
        fields, written = type(self).model_fields, dict[str, Any]()
        for name, value in dump(self).items():
            empty = value == {} and isinstance(getattr(self, name), Section)
            free = info.context == CONTENT and (empty or is_runtime_only(fields[name]))
            if not free and (value is not None or not omitted_if_none(fields[name])):
                written[name] = value
        return written


def fingerprint_fields(node: Section) -> dict[str, Any]:
    """The part of a section that decides the content of slots: everything but free fields.

    Paths are as their user wrote them, wherever they lie.
    """
    return as_written(content_fields(node))


def content_fields(node: Section) -> dict[str, Any]:
    """The same part as a tree to read a configuration from: paths are placed."""
    return node.model_dump(mode="json", context=CONTENT)


def with_choices(node: Node, choice: Callable[[str], Any], prefix: str = "") -> Node:
    """Return a section with `choice` of each key in it that is marked `AS_BEGUN` and null.

    `choice` takes the dotted name of a key, below `prefix`; None leaves the key as it is.
    """
    update: dict[str, Any] = {}
    for name, info in type(node).model_fields.items():
        value, key = getattr(node, name), prefix + name
        if isinstance(value, Section):
            value = with_choices(value, choice, f"{key}.")
        elif entries := _mark(info, "entries_as_begun"):
            chosen = choice(key) or {}
            kept = {entry: chosen[entry] for entry in entries if entry in chosen}
            value = {**kept, **(value or {})} or None if kept else value
        elif isinstance(value, tuple) and any(isinstance(each, Section) for each in value):
            value = tuple(with_choices(v, choice, f"{key}.{n}.") for n, v in enumerate(value))
        elif isinstance(value, dict) and any(isinstance(v, Section) for v in value.values()):
            value = {n: with_choices(v, choice, f"{key}.{n}.") for n, v in value.items()}
        elif is_left_to_the_run(info, value):
            chosen = choice(key)
            value = value if chosen is None else chosen
        if value != getattr(node, name):
            update[name] = value
    return node.model_copy(update=update) if update else node


def _mark(info: FieldInfo, name: str) -> Any:
    extra = info.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


def is_runtime_only(info: FieldInfo) -> bool:
    return bool(_mark(info, "free"))


def is_plan(info: FieldInfo) -> bool:
    return bool(_mark(info, "plan"))


def is_left_to_the_run(info: FieldInfo, value: Any) -> bool:
    """Return True for a value that a new run replaces by a choice, which its run.json records."""
    mark = _mark(info, "as_begun")
    return value is None if mark is True else mark is not None and value == mark


def omitted_if_none(info: FieldInfo) -> bool:
    return bool(_mark(info, "absent"))


def field(default: Any, description: str, **limits: Any) -> Any:
    return Field(default=default, description=description, **limits)


def plan_field(default: Any, description: str, **limits: Any) -> Any:
    """A free key that the run itself says to all commands (`PLAN`)."""
    return field(default, description, json_schema_extra=PLAN, **limits)


def runtime_field(default: Any, description: str, **limits: Any) -> Any:
    """A key that changes no result, so that a run's fingerprint leaves it out."""
    return field(default, description, json_schema_extra=RUNTIME_ONLY, **limits)


def optional_field(
    description: str,
    *,
    as_begun: bool | str | Sequence[str] = False,
    runtime_only: bool = False,
    plan: bool = False,
    **limits: Any,
) -> Any:
    """A key that is null by default, and then left out of all that is written.

    `as_begun` marks it `AS_BEGUN`, at a word in place of null, or the named entries of a mapping;
    `runtime_only` and `plan` mark it `RUNTIME_ONLY` and `PLAN` as well.
    """
    marks = dict(AS_BEGUN if as_begun is True else OMIT_IF_NONE)
    if isinstance(as_begun, str):
        marks["as_begun"] = as_begun
    elif not isinstance(as_begun, bool):
        marks["entries_as_begun"] = list(as_begun)
    marks |= PLAN if plan else RUNTIME_ONLY if runtime_only else {}
    return field(None, description, json_schema_extra=marks, **limits)


def section_of(annotation: Any) -> type[Section] | None:
    """The section behind an annotation `Section` or `Section | None`, if it is one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
