"""Draws drawing.svg, the picture of README and of the landing page.

    python docs/drawing.py

One file serves light and dark pages. It has its own background, since a page may be dark where the
system is light.
"""

from __future__ import annotations

from pathlib import Path

DRAWING = Path(__file__).with_name("drawing.svg")
WIDTH, HEIGHT = 640, 474  # a phone shows it at half this size, so letters are large
TITLE = (
    "Raw ids are hashed to rows, a plan shards the rows over ranks, and they are saved and served"
)
# Colours that colour-blind readers can distinguish. Source: Okabe and Ito, "Color Universal Design", 2008.
STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #afb8c1; --box: #f6f8fa;
  --a: #0072b2; --b: #d55e00; --c: #009e73; --d: #b1508b; }
@media (prefers-color-scheme: dark) {
  svg { --page: #161b22; --ink: #f0f6fc; --soft: #9198a1; --line: #59636e; --box: #0d1117;
    --a: #56b4e9; --b: #f08a3c; --c: #2fc79a; --d: #dd8fbd; }
}
text { font: 16px sans-serif; fill: var(--ink); text-anchor: middle; }
.title { font-size: 19px; font-weight: bold; }
.soft { fill: var(--soft); }
.page { fill: var(--page); stroke: var(--line); }
.box { fill: var(--box); stroke: var(--line); }
.free { fill: none; stroke: var(--line); stroke-dasharray: 4 3; }
.arrow { fill: none; stroke: var(--soft); stroke-width: 2; marker-end: url(#head); }
#head { fill: var(--soft); }
"""
STYLE += "".join(
    f".{one} {{ fill: var(--{one}); fill-opacity: 0.22; stroke: var(--{one}); }}\n"
    f".to-{one} {{ fill: none; stroke: var(--{one}); stroke-width: 2; }}\n"
    for one in "abcd"
)

# Colour -> id, its slot in the map, its rank. Rows are numbered in the order of first occurrence.
IDS = {
    "a": ("7", 4, 0),
    "b": ("−2⁶³", 1, 1),
    "c": ("2⁶³ − 1", 6, 0),
    "d": ("90210", 2, 1),
}


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text around x."""
    of_class = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{of_class}>{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, corner: int = 4) -> str:
    """A rectangle."""
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="{corner}" class="{kind}"/>'


def curve(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    """A line that starts and ends level."""
    middle = (x + to_x) / 2
    return f'<path d="M{x:g} {y:g} C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}" class="{kind}"/>'


def arrow(way: str) -> str:
    """A line with a head."""
    return f'<path d="{way}" class="arrow"/>'


def numbers(x: float, y: float, kind: str, columns: int = 6) -> list[str]:
    """A row: its weights, then, apart, its optimizer state."""
    places = [*(x + 15 * column for column in range(columns)), x + 15 * columns + 6]
    return [box(place, y, 13, 18, kind, corner=2) for place in places]


def ids_to_rows() -> list[str]:
    """The upper half: each id has a slot, each slot a row."""
    parts = [text(80, 38, "raw ids", "title"), text(80, 224, "any int64", "soft")]
    parts += [text(294, 38, "hash", "title"), text(294, 224, "a slot for each id", "soft")]
    parts += [text(546, 38, "rows", "title"), text(546, 224, "weights + optimizer", "soft")]
    parts += [box(216, 58 + 20 * slot, 156, 20, "box", corner=0) for slot in range(7)]
    for row, (kind, (one, slot, _)) in enumerate(IDS.items()):
        id_y, slot_y, row_y = 72 + 38 * row, 58 + 20 * slot, 56 + 30 * row
        parts += [curve(134, id_y, 216, slot_y + 10, f"to-{kind}")]
        parts += [curve(372, slot_y + 10, 490, row_y + 9, f"to-{kind}")]
        parts += [box(26, id_y - 14, 108, 28, kind, corner=14), text(80, id_y + 5, one)]
        parts += [box(216, slot_y, 156, 20, kind, corner=0)]
        parts += [text(294, slot_y + 15.5, f"{one} : row {row}")]
        parts += numbers(492, row_y, kind)
    return parts + numbers(492, 56 + 30 * len(IDS), "free")


def ranks_to_servers() -> list[str]:
    """The lower half: the rows of each rank, a checkpoint of all, servers."""
    parts = [
        arrow("M546 234 V256 H134 V270"),
        text(340, 250, "sharded under a TorchRec plan", "soft"),
    ]
    parts += [text(134, 294, "ranks", "title"), text(134, 456, "row-wise, or another plan", "soft")]
    parts += [text(364, 294, "saved", "title"), text(364, 456, "loads under any plan", "soft")]
    parts += [text(553, 294, "served", "title"), text(553, 456, "updated by deltas", "soft")]
    for rank in (0, 1):
        x = 26 + 112 * rank
        parts += [box(x, 308, 104, 124, "box"), text(x + 52, 330, f"rank {rank}")]
        held = [kind for kind, (_, _, owner) in IDS.items() if owner == rank]
        for place, kind in enumerate(held):
            parts += numbers(x + 13, 344 + 30 * place, kind, columns=4)
        parts += numbers(x + 13, 344 + 30 * len(held), "free", columns=4)
    parts += [arrow("M246 370 H296"), box(306, 308, 116, 124, "box", corner=12)]
    for place, kind in enumerate(IDS):
        parts += numbers(314 + 2, 318 + 27 * place, kind, columns=5)
    parts += [arrow("M426 370 H482")]
    for place, words in enumerate(("Python", "C++")):
        parts += [box(492, 308 + 66 * place, 122, 58, "box"), text(553, 342 + 66 * place, words)]
    return parts


def drawing() -> str:
    """Returns the file."""
    head = '<path d="M0 0 L8 4 L0 8 z"/>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img">',
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="5" '
        f'markerHeight="5" orient="auto">{head}</marker></defs>',
        box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "page", corner=8),
        *ids_to_rows(),
        *ranks_to_servers(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DRAWING.write_text(drawing(), encoding="utf-8")
    print(f"written: {DRAWING}")
