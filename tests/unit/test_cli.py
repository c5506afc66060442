"""Tests the commands as a user types them; `run` runs a script as Python does, with the package imported."""

import sys

import pytest

import ds_sp_overlap
from ds_sp_overlap.tools.cli import main

TOLD = "import sys, pathlib; pathlib.Path({!r}).write_text(repr((__name__, sys.argv[0], sys.argv[1:], sys.path[0])))"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Run the test in an empty folder; restore afterwards the attributes of `sys` that a command changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ds-sp-overlap"])
    monkeypatch.setattr(sys, "path", ["/of/the/console/script", *sys.path])
    return tmp_path


def program(path, told):
    path.parent.mkdir(exist_ok=True)
    path.write_text(TOLD.format(str(told)))


@pytest.mark.parametrize("module,file", [("ways_package.train", "train.py"), ("ways_package", "__main__.py")])
def test_run_m_is_python_m(here, module, file):
    program(here / "ways_package" / file, here / "told")
    (here / "ways_package" / "__init__.py").touch()
    try:
        assert main(["run", "-m", module, "--lr", "3", "-m", "x"]) == 0
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "ways_package"]:
            del sys.modules[name]
    told = eval((here / "told").read_text())
    assert told == ("__main__", str(here / "ways_package" / file), ["--lr", "3", "-m", "x"], str(here))


def test_run_script_is_python_script(here):
    program(here / "folder" / "train.py", here / "told")
    assert main(["--local_rank", "3", "run", "folder/train.py", "--lr", "3"]) == 0
    told = eval((here / "told").read_text())
    assert told == ("__main__", "folder/train.py", ["--local_rank=3", "--lr", "3"], str(here / "folder"))


@pytest.mark.parametrize(
    "words,message",
    [
        (["run", "nowhere.py"], "run: no script at nowhere.py; give its path, or -m and the name of a module"),
        (["run", "-m", "nowhere.at.all"], "run: no module named 'nowhere.at.all' on {here}"),
        (["run", "-m", "nowhere"], "run: no module named 'nowhere' on {here}"),
        (["run", "--timeline-steps", "1", "2", "train.py"], "run: --timeline-steps needs --timeline FOLDER"),
        (["run", "--timeline-st", "1", "2", "train.py"], "unrecognized arguments: --timeline-st"),
        (["ru", "train.py"], "argument command: invalid choice: 'ru'"),
    ],
)
def test_errors_are_one_line(here, capsys, words, message):
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(here=here) in line and line.startswith("ds-sp-overlap")


def test_a_module_whose_package_fails_to_import_fails_with_its_own_error(here):
    (here / "ways_broken").mkdir()
    (here / "ways_broken" / "__init__.py").write_text("import not_there_either")
    with pytest.raises(ModuleNotFoundError, match="not_there_either"):
        main(["run", "-m", "ways_broken.train"])


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"ds-sp-overlap {ds_sp_overlap.__version__}\n"
