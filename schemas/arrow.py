"""Arrow fields and lists without nulls, and the shape of a message: words of several schemas."""

import pyarrow as pa


def required(name: str, kind: pa.DataType) -> pa.Field:
    """Field that is never null."""
    return pa.field(name, kind, nullable=False)


def list_of(kind: pa.DataType, length: int = -1) -> pa.DataType:
    """List whose elements are never null; of a fixed size where `length` is given."""
    return pa.list_(required("element", kind), length)


MESSAGE = pa.struct([required("role", pa.string()), required("content", pa.string())])
