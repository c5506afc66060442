"""Reads README and docs: links, headings, tables, and code blocks with the comments before them.

A block runs, unless a comment directly before the block says otherwise:

    <!-- file: train.py -->   write the block to a file train.py, which later blocks may use
    <!-- printed -->          the block is output of the last block that ran
    <!-- not run: why -->     the block can't run here

The bash and Python blocks of a section run one after another in an empty folder.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("tests/*.md")])


@dataclass(frozen=True)
class Block:
    """A code block; ``said`` holds the two parts of the comment before the block, as ("file", "train.py")."""

    section: str
    language: str
    text: str
    said: tuple[str, str]


@dataclass
class Page:
    path: Path
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    tables: list[tuple[str, list[list]]] = field(default_factory=list)  # (comment before the table, rows of inline tokens)


@cache
def read(path):
    page, section, said = Page(path), "", ""
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            section = tokens[at + 1].content
            page.anchors.add("".join(c for c in section.lower().replace(" ", "-") if c.isalnum() or c in "-_"))
        elif token.type == "fence":
            what, _, rest = said.partition(":")
            page.blocks.append(Block(section, token.info, token.content, (what.strip(), rest.strip())))
        elif token.type == "table_open":
            page.tables.append((said, []))
        elif token.type == "tr_open":
            page.tables[-1][1].append([])
        elif token.type == "inline":
            if tokens[at - 1].type in ("th_open", "td_open"):
                page.tables[-1][1][-1].append(token)
            page.links += [child.attrs[name] for child in token.children for name in ("href", "src") if name in child.attrs]
        said = token.content.strip().removeprefix("<!--").removesuffix("-->").strip() if token.type == "html_block" else ""
    return page


def code(cell):
    """Return the texts between backticks in a table cell."""
    return [child.content for child in cell.children if child.type == "code_inline"]
