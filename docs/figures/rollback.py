"""Draws ``rollback.svg``: one step of speculative decoding on a hybrid model, and how rejected tokens are taken back.

python docs/figures/rollback.py
"""

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

FILE = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 944, 496
HEADING = 16
INK, FAINT, LINE = "#1f2937", "#6b7280", "#9ca3af"
TARGET, DRAFT, TAPE, STATE, GONE = "#dbeafe", "#fef3c7", "#dcfce7", "#ede9fe", "#f3f4f6"
#: Left edges of the block's five columns, and their width.
COLUMNS, CELL = [330 + 92 * i for i in range(5)], 80


def text(x: float, y: float, words: str, size: int = 14, fill: str = INK, anchor: str = "start") -> str:
    # Headings are the only text of this size.
    weight = ' font-weight="600"' if size == HEADING else ""
    place = f'x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}'
    return f"<text {place}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "", gone: bool = False) -> str:
    stroke, dash, ink = (LINE, ' stroke-dasharray="4 3"', FAINT) if gone else (INK, "", INK)
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{stroke}"{dash}/>'
    return shape + text(x + width / 2, y + height / 2 + 5, words, 14, ink, "middle")


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.4" marker-end="url(#head)"/>'


def label(y: float, number: str, title: str, words: tuple[str, ...]) -> list[str]:
    lines = [text(28, y, f"{number}  {title}", HEADING)]
    return lines + [text(47, y + 20 + 17 * i, line, 13, FAINT) for i, line in enumerate(words)]


def drawing() -> str:
    """The picture as SVG. It brings its own light background, so that it reads on dark pages too."""
    kept, tokens = 3, ("x", "d₁", "d₂", "d₃", "d₄")
    parts = label(44, "1", "Draft", ("K = 4 tokens after x, the last", "one that is decided"))
    parts += [box(x, 26, CELL, 34, DRAFT if i else TARGET, tokens[i]) for i, x in enumerate(COLUMNS)]

    parts += label(118, "2", "Verify", ("one pass of the target over all", "five; S₀ itself stays as it was"))
    parts += [arrow(x + CELL / 2, 62, x + CELL / 2, 96) for x in COLUMNS]
    parts.append(text(812, 128, "attention layers:", 12, FAINT))
    parts.append(text(812, 144, "keys and values", 12, FAINT))
    parts.append(text(812, 178, "recurrent layers:", 12, FAINT))
    parts.append(text(812, 194, "the tape", 12, FAINT))
    for i, x in enumerate(COLUMNS):
        parts.append(box(x, 110, CELL, 36, TARGET, "k, v"))
        parts.append(box(x, 160, CELL, 36, TAPE, f"D{'₁₂₃₄₅'[i]} k{'₁₂₃₄₅'[i]} u{'₁₂₃₄₅'[i]}"))
    parts.append(box(258, 160, 46, 36, STATE, "S₀"))

    parts += label(262, "3", "Accept", ("those that the target itself would", "have said; its own token follows"))
    for i, x in enumerate(COLUMNS):
        stays = i < kept
        parts.append(arrow(x + CELL / 2, 200, x + CELL / 2, 240))
        parts.append(box(x, 244, CELL, 34, (DRAFT if i else TARGET) if stays else GONE, tokens[i], not stays))
        parts.append(text(x + CELL / 2, 298, "stays" if stays else "rejected", 12, INK if stays else FAINT, "middle"))

    parts += label(
        352,
        "4",
        "Commit",
        ("attention: the length moves back", "", "recurrent: one product from S₀", "and the kept part of the tape"),
    )
    for i, x in enumerate(COLUMNS):
        parts.append(box(x, 336, CELL, 36, TARGET if i < kept else GONE, "k, v", i >= kept))
    parts.append(box(258, 400, 46, 58, STATE, "S₃"))
    parts.append(text(318, 434, "=  (D₃ D₂ D₁) ⊙ S₀  +  (D₃ D₂) ⊙ k₁u₁ᵀ  +  D₃ ⊙ k₂u₂ᵀ  +  k₃u₃ᵀ", 15))
    parts.append(text(318, 460, "for all layers of one shape at once; no second pass, no state per token", 13, FAINT))
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>'
    )
    title = "<title>One step: draft, verify, accept, commit. The recurrent state is rebuilt from the tape.</title>"
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff" stroke="#d1d5db"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" font-family="Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif">'
    )
    return "\n".join([head, title, marker, ground, *parts, "</svg>", ""])


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    FILE.write_text(drawing(), encoding="utf-8")
    print(FILE)


if __name__ == "__main__":
    main()
