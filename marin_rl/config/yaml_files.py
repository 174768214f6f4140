"""YAML of configurations: values that JSON has, each read as it is written.

A file may come from somebody else. Its size, its levels and what its aliases stand for are bounded,
tags are refused, and so is every spelling that YAML 1.1 takes for another number than it shows.
Leaves out what the keys mean.
"""

import re
from typing import Any, NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

FILE_BYTES_MAX = 2**20
VALUES_MAX = 20_000  # each alias counts as all that it stands for
DEPTH_MAX = 64

_PREFIX = "tag:yaml.org,2002:"
_INT, _STR, _MERGE = f"{_PREFIX}int", f"{_PREFIX}str", f"{_PREFIX}merge"
_NOT_READ = {f"{_PREFIX}timestamp", f"{_PREFIX}value"}  # their texts stay texts
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # no file has such a name, and no record such a text
_OCTAL = re.compile(r"[-+]?0[0-7_]+")


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document. Raises ValueError with the line and what is wrong."""
    if len(text) > FILE_BYTES_MAX:
        raise ValueError(f"expected at most {FILE_BYTES_MAX} bytes, found {len(text)}")
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader with bounds, without tags, and with each key once."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth, self._values = 0, 0
        self._sizes: dict[Node, int] = {}  # of what is composed whole

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose a node within the bounds."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = self.anchors.get(event.anchor)
            if node is not None and node not in self._sizes:
                _refuse(f"the alias *{event.anchor} stands inside of what it stands for", event)
            self._count(1 if node is None else self._sizes[node], event)
            return super().compose_node(parent, index)
        if event.tag not in (None, "!", _STR):
            _refuse(f"the tag {event.tag!r:.80} is not read: write a plain value", event)
        before, self._depth = self._values, self._depth + 1
        if self._depth > DEPTH_MAX:
            _refuse(f"expected at most {DEPTH_MAX} levels", event)
        self._count(1, event)
        node = super().compose_node(parent, index)
        assert node is not None, "the parser has an event"
        self._sizes[node] = self._values - before
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Compose a mapping whose keys are texts or whole numbers, each there once."""
        # Here, before merging adds the keys of others.
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.tag not in (_STR, _INT, _MERGE):
                _refuse("expected a text as key: write it in quotes", key)
            if key.value in lines:
                _refuse(
                    f"the key {key.value!r:.80} is there twice, first in line {lines[key.value]}",
                    key,
                )
            lines[key.value] = key.start_mark.line + 1
        return node

    def compose_scalar_node(self, anchor: Any) -> ScalarNode:
        """Compose a value whose text can be written and be a path."""
        node = super().compose_scalar_node(anchor)
        if wrong := _NO_TEXT.search(node.value):
            _refuse(f"expected a text in UTF-8 without NUL, found {wrong[0]!a}", node)
        return node

    def construct_yaml_int(self, node: ScalarNode) -> int:
        """Return a decimal integer; octal and base 60 are refused."""
        shown = node.value[:40]
        if ":" in shown or _OCTAL.fullmatch(shown):
            kind = "in base 60" if ":" in shown else "octal"
            _refuse(f"{shown} is {kind} in YAML 1.1: write the decimal number, or quotes", node)
        try:
            return super().construct_yaml_int(node)
        except ValueError:  # Python converts 4,300 digits at most
            _refuse(f"expected an integer, found {shown}…", node)

    def construct_yaml_float(self, node: ScalarNode) -> float:
        """Return a finite decimal number; base 60 is refused."""
        number = super().construct_yaml_float(node)
        if ":" in node.value or not abs(number) < float("inf"):
            _refuse(f"expected a finite decimal number, found {node.value:.40}", node)
        return number

    def _count(self, values: int, event: yaml.Event) -> None:
        self._values += values
        if self._values > VALUES_MAX:
            _refuse(f"expected at most {VALUES_MAX} values, those of aliases included", event)


def _refuse(problem: str, place: Any) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NOT_READ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
_Loader.add_constructor(f"{_PREFIX}float", _Loader.construct_yaml_float)
