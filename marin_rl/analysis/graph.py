"""A lineage as a picture: SVG or PNG drawn by Matplotlib, or the text of Mermaid.

Sources stand to the left of what was made from them. The picture leaves out edges that a longer way
tells too; text and JSON have them all.
"""

import io
from collections.abc import Mapping
from pathlib import Path

from marin_rl.analysis.lineage import Edge, Lineage, Node
from marin_rl.errors import InputError

COLUMN_INCHES, ROW_INCHES = 2.9, 0.7
WIDTH, HEIGHT = 0.84, 0.7  # of a box, in columns and rows
TITLE_CHARACTERS = 34
COLOURS: Mapping[str, str] = {
    "run": "#e2e8f0", "checkpoint": "#bfdbfe", "warm start": "#bfdbfe", "update": "#fde68a",
    "batch row": "#fef3c7", "batches": "#fef3c7", "rollout": "#bbf7d0", "rollouts": "#dcfce7",
    "shard": "#dcfce7", "disposition": "#fecaca",
}  # fmt: skip


def write_graph(graph: Lineage, target: Path) -> None:
    """Write the picture that the ending of `target` names: .svg, .png or .mmd.

    Raises InputError for other endings.
    """
    match target.suffix:
        case ".svg" | ".png":
            target.write_bytes(drawn(graph, target.suffix[1:]))
        case ".mmd":
            target.write_text(mermaid(graph), encoding="utf-8")
        case other:
            raise InputError(
                f"{target}: expected a picture named .svg, .png or .mmd, found {other}"
            )


def mermaid(graph: Lineage) -> str:
    """The graph as a Mermaid flowchart, sources first."""
    ids = {name: f"n{number}" for number, name in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for node in graph.nodes.values():
        title = f"{node.kind}: {node.name}".replace('"', "#quot;")
        lines.append(f'    {ids[node.name]}["{title}"]')
    edges = (edge for edge in _needed(graph) if edge.source in ids)
    lines += [f"    {ids[edge.source]} --> {ids[edge.made]}" for edge in edges]
    return "\n".join(lines) + "\n"


def drawn(graph: Lineage, form: str) -> bytes:
    """The graph as the bytes of an SVG or PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    places = _places(graph)
    columns = 1 + max(column for column, _ in places.values())
    rows = 1 + max(row for _, row in places.values())
    figure = Figure(figsize=(columns * COLUMN_INCHES, (rows + 0.5) * ROW_INCHES))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -1.0)
    for edge in _needed(graph):
        if edge.source in places:
            (x_from, y_from), (x_to, y_to) = places[edge.source], places[edge.made]
            # Past what stands in between: an arc, the higher the further it goes.
            bend = 0.0 if x_to == x_from + 1 else -0.12
            arrow = {"arrowstyle": "-|>", "color": "#64748b", "linewidth": 0.8, "shrinkA": 0}
            arrow |= {"shrinkB": 0, "connectionstyle": f"arc3,rad={bend}"}
            start, end = (x_from + WIDTH / 2, y_from), (x_to - WIDTH / 2, y_to)
            axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
    for name, (x, y) in places.items():
        node = graph.nodes[name]
        axes.add_patch(
            FancyBboxPatch(
                (x - WIDTH / 2, y - HEIGHT / 2),
                WIDTH,
                HEIGHT,
                boxstyle="round,pad=0,rounding_size=0.05",
                facecolor=COLOURS.get(node.kind, "#ffffff"),
                edgecolor="#94a3b8",
                linewidth=0.8,
            )
        )
        axes.text(x, y, _title(node), ha="center", va="center", fontsize=7.5)
    buffer = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {"Software": None}
    figure.savefig(buffer, format=form, metadata=metadata, dpi=110)
    return buffer.getvalue()


def _needed(graph: Lineage) -> list[Edge]:
    """The edges without which something would no longer be reached."""
    sources: dict[str, list[str]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.made, []).append(edge.source)
    above: dict[str, set[str]] = {}

    def reached(name: str) -> set[str]:
        if name not in above:
            direct = sources.get(name, [])
            above[name] = set(direct).union(*(reached(source) for source in direct))
        return above[name]

    return [
        edge
        for edge in graph.edges
        if not any(edge.source in reached(other) for other in sources[edge.made])
    ]


def _title(node: Node) -> str:
    name = node.name
    if len(name) > TITLE_CHARACTERS:
        name = "…" + name[1 - TITLE_CHARACTERS :]
    return f"{node.kind}\n{name}"


def _places(graph: Lineage) -> dict[str, tuple[int, int]]:
    """Column and row of each node: one column right of the rightmost of its sources."""
    columns: dict[str, int] = {}

    def column(name: str) -> int:
        if name not in columns:
            sources = [e.source for e in graph.edges if e.made == name and e.source in graph.nodes]
            columns[name] = 1 + max((column(source) for source in sources), default=-1)
        return columns[name]

    rows: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for name in graph.nodes:
        at = column(name)
        places[name] = at, rows.get(at, 0)
        rows[at] = rows.get(at, 0) + 1
    return places
