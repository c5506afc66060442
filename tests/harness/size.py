"""Prints the lines and tokens of each folder of the package and of the tests, for `make size`.

Blank lines, comments and docstrings don't count. Unlike the number of tokens, the number of lines depends on the formatter, which
breaks lines of the package at 100 columns, and lines of the tests at 132.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def size(source):
    """Count the lines and tokens of a file's code."""
    documented = [
        node.body[0] for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None
    ]
    docstrings = {(node.lineno, node.col_offset) for node in documented}
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NO_CODE and token.start not in docstrings
    ]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return Counter(lines=len(lines), tokens=len(tokens))


def main(root):
    for top in ("ds_sp_overlap", "tests"):
        rooms = {}
        for path in sorted(root.joinpath(top).rglob("*.py")):
            rooms.setdefault(str(path.parent.relative_to(root)), Counter()).update(size(path.read_text()))
        for name, counts in [*rooms.items(), (f"{top} in all", sum(rooms.values(), Counter()))]:
            print(f"{name:46}{counts['lines']:8,}{counts['tokens']:10,}")


print(f"{'':46}{'lines':>8}{'tokens':>10}")
main(Path(*sys.argv[1:]))
