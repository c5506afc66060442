"""``python -m ds_sp_overlap doctor | build | plan | run``."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from .planner import command as plan_command


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ds_sp_overlap", description="Overlapped Ulysses sequence parallelism.")
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
        help="run a training script whose DeepSpeed config has an sp_overlap section, without editing it",
        description="Works under launchers too: deepspeed --module ds_sp_overlap run SCRIPT ..., torchrun -m ds_sp_overlap run ...",
    )
    run.add_argument("--timeline", metavar="FOLDER", help="record what each exchange costs and write it there")
    run.add_argument("--timeline-steps", nargs=2, type=int, metavar=("A", "B"), help="the steps to record (default 20 22)")
    run.add_argument("script", help="path of the script")
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
    if given.timeline_steps and not given.timeline:
        parser.error("run: --timeline-steps needs --timeline FOLDER")
    script = Path(given.script)
    if not script.is_file():
        parser.error(f"run: no script at {script}")
    if given.timeline:
        from .integrations import deepspeed

        steps = {"steps": given.timeline_steps} if given.timeline_steps else {}
        deepspeed.from_command_line["timeline"] = {"path": given.timeline, **steps}
    local_rank = [] if given.local_rank is None else [f"--local_rank={given.local_rank}"]
    sys.argv = [str(script), *local_rank, *given.args]
    sys.path[0] = str(script.resolve().parent)  # as python SCRIPT would
    from .integrations.megatron_bridge import explain

    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        if hint := explain(error):
            print(f"ds_sp_overlap run: {hint}", file=sys.stderr, flush=True)
        raise
    return 0
