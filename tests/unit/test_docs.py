"""Tests that README and docs are true: links, keys, defaults, messages, figures, commands."""

import csv
import importlib
import json
import re
from dataclasses import replace
from typing import get_args
from unittest import mock
from urllib.parse import urlparse

import pytest
from pydantic import BaseModel

from benchmarks.convergence.training import variants
from ds_sp_overlap import SpOverlapConfig
from tests.harness import sweep_page
from tests.harness.pages import PAGES, ROOT, code, read

pages = pytest.mark.parametrize("page", [pytest.param(read(path), id=path.name) for path in PAGES])
BLOCKS = [(path.name, block) for path in PAGES for block in read(path).blocks]


@pages
def test_a_link_leads_to_a_file_that_is_there_and_to_a_heading_in_it(page):
    for link in page.links:
        where = urlparse(link)
        if where.scheme:
            assert where.scheme == "https" and where.netloc, link
            continue
        target = (page.path.parent / where.path).resolve() if where.path else page.path
        assert target.exists(), link
        assert not where.fragment or where.fragment in read(target).anchors, link


@pages
def test_a_page_of_docs_can_be_reached_from_the_readme(page):
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        links = [(path.parent / urlparse(link).path).resolve() for path in new for link in read(path).links]
        new = {path for path in links if path.suffix == ".md" and path.exists()} - reached
    assert page.path in reached or page.path.name == "CHANGELOG.md"


def test_a_block_is_of_a_known_language_and_says_why_it_is_not_run():
    for page, block in BLOCKS:
        assert block.language in ("bash", "python", "json", "yaml", "diff", "text", "bibtex"), (page, block)
        what, rest = block.said
        assert (what, bool(rest)) in (("", False), ("printed", False), ("file", True), ("not run", True)), (page, block)


def test_the_description_on_an_index_page_has_no_link_into_this_repository(tmp_path):
    with mock.patch("setuptools.setup") as setup:
        importlib.import_module("setup")
    (tmp_path / "description.md").write_text(text := setup.call_args.kwargs["long_description"])
    page = read(tmp_path / "description.md")
    assert len(page.links) >= 2 and all(link.startswith("https:") for link in page.links)
    assert page.blocks == [replace(block, said=("", "")) for block in read(ROOT / "README.md").blocks] and "<!--" not in text


def written_in(language):
    return pytest.mark.parametrize("block", [pytest.param(block, id=page) for page, block in BLOCKS if block.language == language])


@written_in("json")
def test_a_config_is_valid(block):
    SpOverlapConfig.parse(json.loads(block.text)["sp_overlap"])


@written_in("python")
def test_a_script_compiles(block):
    compile(block.text, block.section, "exec")


def keys(section=SpOverlapConfig, within=""):
    """Yield for each key its name, its default as JSON, and the strings that it accepts."""
    for name, field in section.model_fields.items():
        choices = [json.dumps(value) for kind in (field.annotation, *get_args(field.annotation)) for value in get_args(kind)
                   if isinstance(value, str)]  # fmt: skip
        default = field.default.model_dump() if isinstance(field.default, BaseModel) else field.default
        yield within + name, "must be given" if field.is_required() else json.dumps(default), sorted(set(choices))
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, f"{name}.")


def test_the_table_of_keys_has_every_key_with_its_default_and_its_words():
    table = next(rows for _, rows in read(ROOT / "docs/configuration.md").tables if rows[0][0].content == "key")
    found = [
        (code(key)[0], (code(default) or [default.content])[0], sorted(value for value in code(kind) if value.startswith('"')))
        for key, kind, default, *_ in table[1:]
    ]
    assert found == list(keys())


def test_a_message_that_is_explained_is_one_of_the_packages():
    source = "".join(path.read_text() for path in (ROOT / "ds_sp_overlap").rglob("*.py"))
    source = re.sub(r"""["']\s*f?["']""", "", source).replace('\\"', '"')  # join adjacent string literals
    table = next(rows for _, rows in read(ROOT / "README.md").tables if rows[0][0].content == "message")
    assert len(table) > 5
    for message, _ in table[1:]:
        if not message.content.startswith("DeepSpeed's: "):  # DeepSpeed's messages are tested in `frameworks/test_mistakes.py`
            for piece in code(message)[0].split("..."):
                assert piece.strip() in source, piece


def test_the_runs_of_make_convergence_have_the_names_that_the_docs_give_them():
    rows = next(rows for _, rows in read(ROOT / "docs/correctness.md").tables if rows[0][1].content == "variant")
    assert {row[1].content for row in rows[1:]} <= {variant.name for variant in variants([1, 2])}


def tables_of_figures():
    return [(said, rows) for page in PAGES for said, rows in read(page).tables if said.startswith("figures:")]


@pytest.mark.parametrize("said, rows", tables_of_figures(), ids=[said for said, _ in tables_of_figures()])
def test_a_table_of_figures_is_that_of_its_results_file(said, rows):
    """A column of the table is a variant; a row is a value of the file's first column, unless this column is the variant."""
    path, value = said.removeprefix("figures:").strip().split(", ")
    results = list(csv.DictReader((ROOT / path).open()))
    first = next(iter(results[0]))
    measured = {(0.0 if first == "variant" else float(row[first]), row["variant"]): float(row[value] or 0) for row in results}
    header = [cell.content for cell in rows[0]]
    for row in rows[1:]:
        cells = dict(zip(header, (cell.content for cell in row), strict=True))
        at = float(cells.pop(first, 0))
        for variant, cell in cells.items():
            decimals = len(cell.partition(".")[2])
            assert abs(float(cell) - measured[at, variant]) <= 0.5001 * 10**-decimals, (at, variant)


def test_the_page_of_the_sweep_is_made_of_its_file():
    rows = list(csv.DictReader(sweep_page.FILE.open(newline="")))
    assert sweep_page.PAGE.read_text() == sweep_page.page(rows)
    assert max(len(sweep_page.reason(row["why"]).split(";")[0].split()) for row in rows if row["type"] != sweep_page.RUN) <= 6


def test_what_a_command_names_is_there():
    """Checks files of this repository and targets of the Makefile, also in code blocks that are not run."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))
    seen = 0
    for path in PAGES:
        for word in re.findall(r"(?:tests|benchmarks|examples)/[\w/.-]*\w", path.read_text()):
            seen += 1
            assert (ROOT / word).exists() or word.startswith("benchmarks/results"), f"{path.name}: {word}"
        for target in re.findall(r"^ *make (\w+)", path.read_text(), flags=re.M):
            assert target in targets, f"{path.name}: make {target}"
    assert seen > 50
