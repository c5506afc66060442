"""Runs the command line: ``ds-sp-overlap doctor | build | plan | timeline | run``.

``python -m ds_sp_overlap`` runs the same command line.
"""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from .planner import command as plan_command


class Parser(argparse.ArgumentParser):
    """Parses arguments; reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after the program's name; None for those in ``sys.argv``.

    Returns:
        The exit status.
    """
    parser = Parser(
        prog="ds-sp-overlap",
        description="Overlapped Ulysses sequence parallelism.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    # The deepspeed launcher inserts this argument in front of the command.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, **options: Any) -> Parser:
        return commands.add_parser(name, help=text, allow_abbrev=False, **options)

    doctor = command("doctor", "versions, devices, and a gradient self-check on several ranks")
    doctor.add_argument("--ranks", type=int, default=2, help="ranks of the self-check (default 2)")
    build = command("build", "compile the CUDA and CPU kernels into this installation")
    build.add_argument("kind", nargs="?", choices=["cpu", "cuda"], help="default: CUDA with nvcc")
    planner = command("plan", "what overlap would be worth for a model, and which head groups")
    plan_command.add_arguments(planner)
    timeline = command("timeline", "what each exchange cost, from traces of torch.profiler")
    timeline.add_argument("traces", nargs="+", metavar="TRACE", help="a file, or a folder of them")
    run = command(
        "run",
        "run a training script, without editing it, whose DeepSpeed config has an sp_overlap "
        "section or which DS_SP_OVERLAP switches on",
        description="Works under launchers too: deepspeed --module ds_sp_overlap run SCRIPT ..., "
        "torchrun -m ds_sp_overlap run ..., accelerate launch -m ds_sp_overlap run ...",
    )
    run.add_argument("--timeline", metavar="FOLDER", help="write there what each exchange cost")
    run.add_argument(
        "--timeline-steps", nargs=2, type=int, metavar=("A", "B"), help="default 20 22"
    )
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", help="path of the script, or with -m the name of a module")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(argv)

    if args.command == "doctor":
        from .doctor import doctor as check

        return check(args.ranks)
    if args.command == "build":
        from ..relayout import build as builder

        try:
            print(builder.build(kind=args.kind or ""))
        except builder.BuildError as error:
            print(f"build: {error}", file=sys.stderr)
            return 1
        return 0
    if args.command == "plan":
        return plan_command.command(args, planner)
    if args.command == "timeline":
        return _timeline(args, timeline)
    return _run(args, run)


def _timeline(args: argparse.Namespace, parser: Parser) -> int:
    """Print the costs of exchanges in the traces, and write the timeline; return exit status 0."""
    from .timeline import write

    paths: list[str] = []
    for trace in map(Path, args.traces):
        paths += map(str, sorted(trace.glob("*.json*")) if trace.is_dir() else [trace])
    if not paths:
        parser.error(f"no *.json or *.json.gz in {' '.join(args.traces)}")
    try:
        print(write(paths))
    except ValueError as error:
        parser.error(str(error))
    return 0


def _run(args: argparse.Namespace, parser: Parser) -> int:
    """Run a training script or module in this process, as Python would.

    Errors of the script propagate. For wrong arguments the parser ends the process. Returns the
    exit status 0.
    """
    if args.timeline_steps and not args.timeline:
        parser.error("--timeline-steps needs --timeline FOLDER")
    script = Path(args.script)
    if not args.module and not script.is_file():
        parser.error(f"no script at {script}; give its path, or -m and the name of a module")
    if args.timeline:
        from ..integrations.deepspeed import initialize as deepspeed

        steps = {"steps": args.timeline_steps} if args.timeline_steps else {}
        # `initialize` merges these keys into the section when the script makes its engine.
        deepspeed.from_command_line["timeline"] = {"path": args.timeline, **steps}
    # `main` has parsed the launcher's argument; pass it on to the script.
    local_rank = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]
    sys.argv = [args.script, *local_rank, *args.args]
    # Python puts a script's folder first in ``sys.path``, and for ``-m`` the current folder. This
    # line does both, since the ``parent`` of a module's name is ".", the current folder.
    sys.path[0] = str(script.resolve().parent)
    # Check only the top-level package; for missing submodules, Python's own error suffices.
    if args.module and importlib.util.find_spec(args.script.partition(".")[0]) is None:
        parser.error(f"no module named {args.script!r} on {sys.path[0]} or the rest of sys.path")
    if args.module:
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(args.script, run_name="__main__")
    return 0
