"""``ds-sp-overlap doctor | build | plan | run``, also as ``python -m ds_sp_overlap``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .planner import command as plan_command


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names, and says what is wrong in one line."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = Parser(prog="ds-sp-overlap", description="Overlapped Ulysses sequence parallelism.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the deepspeed launcher puts it first
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="versions, devices, and a gradient self-check on several ranks")
    doctor.add_argument("--ranks", type=int, default=2, help="ranks of the self-check (default 2)")
    build = commands.add_parser("build", help="compile the CUDA and CPU kernels into this installation")
    build.add_argument("kind", nargs="?", choices=["cpu", "cuda"], help="default: CUDA kernels where nvcc is found")
    planner = commands.add_parser("plan", help="what overlap would be worth for a model on a machine, and which head groups")
    plan_command.add_arguments(planner)
    run = commands.add_parser(
        "run",
        help="run a training script, without editing it, whose DeepSpeed config has an sp_overlap section or which "
        "DS_SP_OVERLAP switches on",
        description="Works under launchers too: deepspeed --module ds_sp_overlap run SCRIPT ..., torchrun -m ds_sp_overlap run ..., "
        "accelerate launch -m ds_sp_overlap run ...",
    )
    run.add_argument("--timeline", metavar="FOLDER", help="record what each exchange costs and write it there")
    run.add_argument("--timeline-steps", nargs=2, type=int, metavar=("A", "B"), help="the steps to record (default 20 22)")
    run.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as for python -m")
    run.add_argument("script", help="path of the script, or with -m the name of a module")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(argv)

    if given.command == "doctor":
        from .doctor import doctor as check

        return check(given.ranks)
    if given.command == "build":
        from .relayout import build as builder

        try:
            print(builder.build(kind=given.kind or ""))
        except builder.BuildError as error:
            print(f"build: {error}", file=sys.stderr)
            return 1
        return 0
    if given.command == "plan":
        return plan_command.command(given, planner)
    return _run(given, run)


def _run(given: argparse.Namespace, parser: Parser) -> int:
    """Run a training script, or module, as Python would."""
    if given.timeline_steps and not given.timeline:
        parser.error("--timeline-steps needs --timeline FOLDER")
    script = Path(given.script)
    if not given.module and not script.is_file():
        parser.error(f"no script at {script}; give its path, or -m and the name of a module")
    if given.timeline:
        from .integrations import deepspeed

        steps = {"steps": given.timeline_steps} if given.timeline_steps else {}
        deepspeed.from_command_line["timeline"] = {"path": given.timeline, **steps}
    local_rank = [] if given.local_rank is None else [f"--local_rank={given.local_rank}"]
    sys.argv = [given.script, *local_rank, *given.args]
    sys.path[0] = os.getcwd() if given.module else str(script.resolve().parent)  # as python -m, and python SCRIPT, would
    if given.module and (reason := _not_to_be_run(given.script)):
        parser.error(reason)
    from .integrations.megatron_bridge import explain

    try:
        if given.module:
            runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(given.script, run_name="__main__")
    except Exception as error:
        if hint := explain(error):
            print(f"ds_sp_overlap run: {hint}", file=sys.stderr, flush=True)
        raise
    return 0


def _not_to_be_run(name: str) -> str | None:
    """Why ``python -m`` could not run a module; None if it could."""
    try:
        found = None if "" in name.split(".") else importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            name = f"{name}.__main__"
            found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):  # of what a package around it imports
            raise
        found = None
    return None if found else f"no module named {name!r} on {sys.path[0]} or the rest of sys.path"
