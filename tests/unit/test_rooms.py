"""Tests imports between the rooms (folders and files) of the package: only to lower rooms, and without circles.

Only integrations may import frameworks. Ruff checks that no test imports another test or loads code by its path (pyproject.toml).
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.cases import full

PACKAGE = Path(__file__).parents[2] / "ds_sp_overlap"
LEVELS = (
    ("warn", "launch_order", "schedule", "rotary"),
    ("config",),
    ("relayout", "profiling"),
    ("exchange",),
    ("autotune", "attention.arguments"),
    ("attention.memory",),
    ("attention.runtime",),
    ("attention",),
    ("integrations.rebinding",),
    ("integrations.layers", "integrations.inspect"),
    ("integrations.sequence",),
    ("integrations.tiles",),
    ("integrations.distributed_attention",),
    ("integrations.transformers", "integrations.megatron"),
    ("integrations", "integrations.registry"),
    ("integrations.deepspeed",),
    ("tools",),
    ("__init__",),
    ("tools.cli",),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
FRAMEWORKS = {"deepspeed", "transformers", "megatron", "accelerate", "peft"}


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def package_of(path):
    return list(path.relative_to(PACKAGE).parts[:-1])


def imports(path, source=None):
    """Return the modules of the package that a file imports, and the top-level names of other imported modules.

    Includes imports inside of functions.
    """
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(source or path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            package = package_of(path)
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                found = [".".join((*base, alias.name)), ".".join(base)]
                inside.add(next((name for name in found if name in MODULES), "__init__"))
    return inside - {module_of(path)}, outside


MODULES = {module_of(path) for path in PACKAGE.rglob("*.py")}
FILES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def room(module):
    """Return the innermost room of `LEVELS` that contains the module, else the module's top folder."""
    parts = module.split(".")
    inwards = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    return next((name for name in inwards if name in LEVEL), parts[0])


def upwards(module, inside):
    return [other for other in inside if room(other) != room(module) and LEVEL[room(other)] >= LEVEL[room(module)]]


def circle(graph):
    """Return the modules of an import circle, in its order; empty if there is no circle."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        found = next(filter(None, map(visit, sorted(graph[module]))), [])
        path.pop()
        done.add(module)
        return found

    return next(filter(None, map(visit, sorted(graph))), [])


IMPORTS = {module: imports(path) for module, path in FILES.items()}
GRAPH = {module: inside for module, (inside, _) in IMPORTS.items()}


def test_imports_point_downwards():
    assert [module for module in FILES if room(module) not in LEVEL] == [], "rooms that LEVELS doesn't know"
    assert {module: up for module in FILES if (up := upwards(module, GRAPH[module]))} == {}


def test_there_is_no_circle():
    assert circle(GRAPH) == []


def test_no_framework_is_known_outside_integrations():
    knows = [module for module, (_, outside) in IMPORTS.items() if outside & FRAMEWORKS]
    assert knows and {module.split(".")[0] for module in knows} == {"integrations"}


def test_the_schedule_needs_no_torch():
    for module in (module for module in FILES if room(module) == "schedule"):
        inside, outside = IMPORTS[module]
        assert {room(other) for other in inside} <= {"schedule"} and outside <= set(sys.stdlib_module_names) | {"__future__"}


def loaded_by(*code):
    """Run code in a new process; return the modules that the code loads, and the lines that it prints."""
    lines = "\n".join(["import sys", "before = set(sys.modules)", *code, "print(*sorted(set(sys.modules) - before))"])
    found = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    *printed, new = found.stdout.splitlines()
    return set(new.split()), printed


def roots(modules):
    return {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names)


def test_importing_the_package_loads_itself_alone():
    new, _ = loaded_by("import ds_sp_overlap")
    assert {name for name in roots(new) if not name.startswith("_")} == {"ds_sp_overlap", "wrapt"}
    assert {name.removeprefix("ds_sp_overlap.") for name in new if name.startswith("ds_sp_overlap.")} == {
        "integrations", "integrations.deepspeed", "integrations.deepspeed.accelerate",
        "integrations.megatron", "integrations.megatron.bridge", "launch_order", "profiling",
    }  # fmt: skip


def test_enable_a_layer_and_the_drop_in_load_no_framework_and_no_tool():
    new, _ = loaded_by("from ds_sp_overlap import *")
    assert "ds_sp_overlap.integrations.registry" in new
    assert [module for module in new if module.startswith("ds_sp_overlap.tools")] == []
    assert roots(new).isdisjoint(FRAMEWORKS | {"matplotlib"})


@pytest.mark.parametrize("command", ["--help", "--version", "plan --help"])
def test_a_command_that_computes_nothing_loads_neither_torch_nor_a_framework(command):
    new, printed = loaded_by("from ds_sp_overlap.tools import cli", f"try: cli.main({command.split()})", "except SystemExit: pass")
    assert printed and roots(new).isdisjoint(FRAMEWORKS | {"torch", "numpy", "pydantic"})


WAYS = {
    "before": ["import deepspeed", "import ds_sp_overlap"],
    "after": ["import ds_sp_overlap", "import deepspeed"],
    "by the adapter": ["import ds_sp_overlap.integrations.deepspeed.initialize", "import deepspeed"],
}


@pytest.mark.parametrize("order", [*list(WAYS)[:1], *map(full, list(WAYS)[1:])])
def test_deepspeed_is_wrapped_once_whoever_is_imported_first(order):
    _, printed = loaded_by(
        *WAYS[order],
        "import inspect",
        "init = deepspeed.DeepSpeedEngine.__init__",
        "print('deepspeed.initialize' in init.__code__.co_filename.replace('/', '.'), hasattr(init.__wrapped__, '__wrapped__'))",
        "print('class PipelineEngine' in inspect.getsource(deepspeed.runtime.pipe.engine), bool(inspect.getsource(deepspeed)))",
    )
    assert printed[-2:] == ["True False", "True True"]


@pytest.mark.parametrize("ours_first", [True, False])
def test_accelerate_leaves_the_section_alone_whoever_is_imported_first(ours_first):
    lines = ["import ds_sp_overlap", "from accelerate.utils import DeepSpeedPlugin"]
    new, printed = loaded_by(
        *(lines if ours_first else reversed(lines)), "print(DeepSpeedPlugin.fill_match(None, 'sp_overlap.head_groups'))"
    )
    assert printed[-1] == "None" and "deepspeed" not in new


def test_an_import_upwards_a_circle_and_a_framework_are_seen():
    path = FILES["exchange.sp_group"]
    inside, outside = imports(path, "def late():\n    from ..attention.layer import Layer\n    import deepspeed.comm")
    assert upwards("exchange.sp_group", inside) == ["attention.layer"] and outside == {"deepspeed"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_every_file_of_the_tests_stands_in_a_folder_of_its_kind():
    tests = Path(__file__).parents[1]
    found = {path.relative_to(tests).parts[0] for path in tests.glob("*/**/*.py")}
    assert found == {"unit", "ranks", "frameworks", "training", "harness"}
