"""Parts of a conversation as OpenAI's clients send it: messages, tools, response format.

Owns the shapes and their limits. Leaves out how they become a prompt (`templates`), how calls are
read back (`tool_calls`), and how a form is enforced (`constraints`).
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from marin_rl.serving.http.errors import Body
from marin_rl.types import Role, as_role

TOOLS_MAX = 128
TOOL_CALLS_MAX = 128
CONTENT_PARTS_MAX = 4096
SCHEMA_VALUES_MAX = 2**14
NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,64}$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Label = Annotated[str, Field(max_length=1024)]


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """Free-form JSON is checked for its size, and for what JSON has not: NaN and infinities."""
    remaining: list[Any] = [schema]
    count = 0
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict | list):
            count += len(value)
            if count > SCHEMA_VALUES_MAX:
                raise ValueError(f"expected at most {SCHEMA_VALUES_MAX} values")
            remaining.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError("expected JSON, found NaN or an infinity")
    return schema


JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded)]


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """Function name and arguments of a call; `arguments` is a JSON object as text."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCallBody(Body):
    """One call that an earlier answer made."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


TextParts = Annotated[list[TextPart], Field(fail_fast=True, max_length=CONTENT_PARTS_MAX)]
ToolCalls = Annotated[list[ToolCallBody], Field(fail_fast=True, max_length=TOOL_CALLS_MAX)]


AnyRole = Annotated[Role, BeforeValidator(as_role)]


class ChatMessage(Body):
    """One message. Content in parts is joined; only an assistant's may be null or left out.

    `refusal`, `annotations`, `audio` and `function_call` are in the message objects of clients:
    empty, or refused.
    """

    role: AnyRole
    content: str | TextParts | None = None
    name: Label | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], Field(fail_fast=True, max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise ValueError("content: Field required")
        if self.tool_call_id is None and self.role == "tool":
            raise ValueError("tool_call_id: Field required")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id: expected in messages of the role 'tool' only")
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise ValueError(f"{name}: expected in messages of the role 'assistant' only")
        return self

    def as_template_message(self) -> dict[str, Any]:
        """Message as templates see it: role, content, and the other fields that are set."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if not isinstance(self.content, str | None):
            message["content"] = "".join(part.text for part in self.content)
        if len(self.model_fields_set) > 2:
            message |= self.model_dump(
                include={"name", "tool_calls", "tool_call_id", "reasoning_content"},
                exclude_none=True,
            )
        return message


class FunctionBody(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class TextFormat(Body):
    type: Literal["text"]


class JsonFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema with a name, as OpenAI wraps it."""

    name: Name
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]
