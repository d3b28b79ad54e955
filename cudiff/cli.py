"""The command line: `cudiff demo | train | sample | eval | play | info | tune | convert`, shells over Python calls."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from cudiff import processes, signals
from cudiff.backend import PRECISIONS, out_of_memory_errors
from cudiff.config import add_arguments, from_arguments
from cudiff.errors import CudiffError, printable
from cudiff.play.command import add_arguments as add_play_arguments
from cudiff.play.command import play
from cudiff.registry import SAMPLERS
from cudiff.sample_command import add_arguments as add_sample_arguments
from cudiff.sample_command import check_options, drawing_alone_in, sample, texts
from cudiff.threads import CORES, keep_freed_memory


class _Console(Console):
    """A console that lets a closed pipe be seen, where rich's would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise


console, errors = _Console(), Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0; 2 for a mistake the user can mend; 128 + n where signal n ended the command: 130 for Ctrl-C, 143 for SIGTERM, 129
    for the terminal's end, 141 for a pipe that its reader closed. A mistake is one line on stderr; `--debug` raises it,
    with its traceback.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # names of files may hold what a terminal's encoding does not
    try:
        with signals.raising():
            options = _parser().parse_args([argument for argument in arguments if argument != "--debug"])
            keep_freed_memory()
            if "gpus" in options:
                options.arguments = arguments  # for the processes that it starts
            processes.run(options)
            if sys.stdout is not None:  # closed from the start
                sys.stdout.flush()
        return 0
    except processes.Ended as ended:
        return ended.code
    except signals.Stopped as stopped:
        return signals.EXIT + stopped.number
    except BrokenPipeError:
        processes.end_all(signals.EXIT + 13)  # SIGPIPE
        _discard_output()
        return signals.EXIT + 13
    except KeyboardInterrupt:
        processes.end_all(signals.EXIT + signal.SIGINT, signals.INTERRUPTED, debug)
        if debug:
            raise
        print(signals.INTERRUPTED, file=sys.stderr)
        return signals.EXIT + signal.SIGINT
    except Exception as error:
        processes.end_all(2, f"cudiff: {_explain(error)}", debug)
        if debug:
            raise
        with contextlib.suppress(OSError):  # stderr is a full disk
            errors.print(f"cudiff: {_explain(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2


def _discard_output() -> None:
    """Nobody reads stdout any more: what Python still flushes at its end goes nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stdout that is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _explain(error: Exception) -> str:
    """What went wrong and what to do next, in one line."""
    if isinstance(error, CudiffError):
        return str(error)
    if isinstance(error, out_of_memory_errors()):
        return "out of memory: use a smaller --batch-size or model, or --residency host for large data"
    if isinstance(error, OSError):
        where = f"cannot use {error.filename}" if error.filename else "cannot write"
        if isinstance(error, PermissionError):
            return f"{where} ({error.strerror or error}): check its permissions or choose another folder"
        room = "" if isinstance(error, FileExistsError | NotADirectoryError) else "make room or "
        return f"{where} ({error.strerror or error}): {room}choose another folder"
    text = str(error).strip().splitlines()
    kind = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return f"unexpected {kind} (run again with --debug for the traceback)"


def _say(text: str) -> None:
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are CudiffErrors: one line, with the nearest option where one is unknown."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # a value, of a list such as -1,2 too

    def error(self, message: str) -> NoReturn:
        raise CudiffError(f"{message}: see {self.prog} --help")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].split("=")[0]
            known = self._option_string_actions
            near = ["-n"] if word == "--samples" and "-n" in known else difflib.get_close_matches(word, known, 1)
            if word.startswith("-"):
                advice = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
                raise CudiffError(f"unknown option {word}: {advice}")
            raise CudiffError(f"'{word}' is one word too many: see {self.prog} --help")
        return options, unknown


class _Formatter(argparse.HelpFormatter):
    """Help as wide as the terminal, at most 110; a switch is --[no-]name."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=min(110, shutil.get_terminal_size().columns) - 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cudiff", description="Train and sample diffusion models with hand-written CUDA kernels, or on a CPU.",
        epilog="cudiff COMMAND --help lists a command's options; --debug shows the traceback of an error.",
    )
    parser.add_argument("--version", action="version", version=f"cudiff {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Callable, text: str, usage: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.",
                                    usage=f"cudiff {name} {usage}")
        added.set_defaults(run=run)
        return added

    demo = command("demo", _demo, "train on drawn digits and sample them, in about a minute on a CPU", "[options]")
    demo.add_argument("--folder", type=expanduser, metavar="PATH", default="runs/demo",
                      help="where the pictures go (default runs/demo)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, noise and samples (default 0)")
    demo.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), metavar="auto|cpu|cuda")
    demo.add_argument("--processes", type=int, choices=(1, 2, 4, 8), metavar="1|2|4|8",
                      help="that train on a CPU (default 2 where it has two cores or more)")
    demo.set_defaults(gpus=None, timeout=10.0)

    train = command("train", _train, "train a model", "[--preset NAME | --config FILE | --resume PATH] [options]")
    train.epilog = (
        "Defaults are those without a preset. Without --preset the one named like the data is taken, or, without "
        "--data either, digits. What is given here goes before the file, and the file before the preset."
    )
    train.add_argument("--folder", type=expanduser, metavar="PATH",
                       help="of the run (default runs/ and the data's name)")
    train.add_argument("--resume", type=expanduser, metavar="PATH", help="go on with a run's folder or a checkpoint")
    train.add_argument("--init", type=expanduser, metavar="PATH",
                       help="begin with the weights of a run's folder or a checkpoint, on other data or classes")
    train.add_argument("--data-changed", action="store_true", help="resume though the data is not that of the run")
    processes.add_arguments(train)
    add_arguments(train)

    draw = command("sample", _sample, "draw images from a checkpoint", "CHECKPOINT [options]")
    draw.add_argument("checkpoint", type=expanduser, metavar="CHECKPOINT",
                      help="a file, or a run's folder for its newest one")
    draw.add_argument("-n", type=int, metavar="N", help="how many images (default 64)")
    draw.add_argument("--out", type=expanduser, default="samples.png", metavar="PATH",
                      help="a .png grid, an .npz, a .gif of the denoising, or a folder for single PNGs (default "
                           "samples.png)")
    draw.add_argument("--classes", type=texts, metavar="NAME,NAME,..",
                      help="one class, or several in turn, by name or number; -1 is none (default: all in turn)")
    _sampling_arguments(draw, None)
    add_sample_arguments(draw)
    draw.add_argument("--batch-invariant", action="store_true",
                      help="the same bits whatever -n and --batch-size are: 64 images are denoised at once")
    draw.add_argument("--weights", choices=("ema", "model"), default="ema", metavar="ema|model",
                      help="the moving average or the raw weights (default ema)")

    evaluate = command(
        "eval", _eval, "judge a checkpoint's samples with a classifier that cudiff trains", "CHECKPOINT [options]"
    )
    evaluate.add_argument("checkpoint", type=expanduser, metavar="CHECKPOINT",
                          help="a file, or a run's folder for its newest one")
    evaluate.add_argument("-n", type=int, default=2000, metavar="N", help="samples (default 2000)")
    evaluate.add_argument("--data", metavar="DATA", help="what to compare with (default: the data of training)")
    evaluate.add_argument("--against", choices=("test", "train"), default="test", metavar="test|train",
                          help="which of its images (default test); train where those held out are few")
    _sampling_arguments(evaluate, 256)

    add_play_arguments(command("play", lambda options: play(options, _load, _say),
                               "serve a web page that draws anew as its controls move", "CHECKPOINT [options]"))

    info = command("info", _info, "say what hardware, versions and kernels are in use",
                   "[CHECKPOINT] [--kernels [--arch NAME | --preset NAME]]")
    info.add_argument("checkpoint", type=expanduser, metavar="CHECKPOINT", nargs="?", help="also describe this one")
    info.add_argument("--kernels", action="store_true", help="list what each kernel takes, and which run here")
    info.add_argument("--arch", metavar="NAME", help="with --kernels: which run on another GPU, such as sm_80")
    info.add_argument("--preset", metavar="NAME", help="with --kernels: which serve each problem of its training step")
    info.add_argument("--precision", metavar="NAME", help="with --preset: in place of its own")
    info.add_argument("--batch-size", type=int, metavar="N", help="with --preset: in place of its own")

    tune = command("tune", _tune, "measure which tiles of the kernels are the fastest for a model on this GPU",
                   "[--preset NAME | --config FILE] [options]")
    tune.epilog = (
        "Defaults are those of cudiff train; --device, --capture, --shard and --validation change nothing here. What "
        "is found is kept in the user's cache, and training and sampling take it from then on."
    )
    tune.add_argument("--images", type=_counts, default=[64], metavar="N,N,..",
                      help="sampled at once, besides training's batches (default 64)")
    add_arguments(tune)

    convert = command("convert", _convert, "bring weights, or unet.cu's data, from or to other programs",
                      "SOURCE TARGET [options]")
    convert.add_argument("source", type=expanduser, metavar="SOURCE",
                         help=".pt or .safetensors in PyTorch's layout, unet.cu's .bin, a checkpoint, or data")
    convert.add_argument("target", type=expanduser, metavar="TARGET",
                         help="a cudiff checkpoint; with --to-torch a .safetensors in PyTorch's layout; or unet.cu's "
                              ".bin, of the weights of a checkpoint or the images of a data set")
    convert.add_argument("--to-torch", action="store_true", help="write the weights with PyTorch's layout")
    convert.add_argument("--key", metavar="NAME", help="which state_dict of a .pt that holds several")
    convert.add_argument("--weights", choices=("ema", "model"), metavar="ema|model",
                         help="which to write with --to-torch (default ema), or to a .bin (default model, with "
                              "AdamW's moments)")
    add_arguments(convert, sections=("data", "model", "diffusion", "sampling"))
    return parser


def _version() -> str:
    import cudiff

    return cudiff.__version__


def _sampling_arguments(parser: argparse.ArgumentParser, batch_size: int | None) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise (default 0)")
    parser.add_argument("--steps", type=int, metavar="N", help="noise levels to pass through (default: the model's)")
    parser.add_argument("--guidance", type=float, metavar="X", help="1 = none (default: the model's)")
    parser.add_argument("--sampler", choices=tuple(SAMPLERS), metavar="NAME",
                        help=f"{' or '.join(SAMPLERS)} (default: the model's)")
    parser.add_argument("--batch-size", type=int, default=batch_size, metavar="N",
                        help=f"images at once (default {batch_size or '64, on a GPU up to 256 small ones'})")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), metavar="auto|cpu|cuda",
                        help="auto takes the GPU where there is one")
    parser.add_argument("--precision", choices=("auto", *PRECISIONS), metavar="auto|" + "|".join(PRECISIONS),
                        help="(default: that of training on the GPU, fp32 on the CPU)")
    processes.add_arguments(parser)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 1 or more, or a list such as 1,16,64")
    return counts


def _demo(options: argparse.Namespace) -> None:
    from cudiff.demo import demo

    if options.processes is None:
        alone = processes.place().size == 1
        options.processes = 2 if alone and CORES > 1 and processes.on_cpu(options.device) else None
    group = processes.joined_by(options, options.device, console)
    demo(Path(options.folder), options.seed, options.device, console, group)


def _train(options: argparse.Namespace) -> None:
    from cudiff.beginning import configuration_of, resumed_configuration
    from cudiff.checkpoint import PARTS, checkpoints, find_checkpoint
    from cudiff.data.published import PUBLISHED
    from cudiff.display import TrainingDisplay, introduction
    from cudiff.folder import check_free, check_unused, read_checkpoint
    from cudiff.train import Trainer

    resume, init, path = None, None, None
    if options.resume is not None and options.init is not None:
        raise CudiffError("--resume goes on with a run, --init begins a new one: give one of them")
    if options.data_changed and options.resume is None:
        raise CudiffError("--data-changed is for a run that goes on: give --resume, or leave it out")
    if options.resume is not None:
        check_unused(options.folder or options.resume)  # first: a run that has just begun holds no checkpoint
        path = find_checkpoint(options.resume)
        # A file alone, as one that was downloaded, is no run's folder.
        of_run = Path(options.resume).is_dir() or (path.parent / "metrics.jsonl").exists() or len(
            checkpoints(path.parent)) > 1
        folder = Path(options.folder or (path.parent if of_run else Path("runs") / path.stem))
        check_unused(folder)
        sampler = getattr(options, "sampler", None)
        resume = read_checkpoint(path, processes.needed(options, PARTS), "go on with --resume ", sampler)[1]
        config = resumed_configuration(options, resume)
    else:
        base = None
        if options.init is not None:
            init = read_checkpoint(options.init, processes.needed(options, ("ema",)), "begin with --init ")[1]
            base = configuration_of(init)
        config = from_arguments(options, base)
        name = Path(os.path.abspath(expanduser(config.data))).stem  # "." has one too
        folder = Path(options.folder or Path("runs") / name)
        if config.data not in ("digits", *PUBLISHED) and _is_same(folder, config.data):
            raise CudiffError(f"{folder} is the data's folder, and a run's pictures would be among them: choose another"
                              " --folder")
    if path is None or folder.resolve() != path.parent.resolve():
        check_free(folder)
    group = processes.joined_by(options, config.device, console)
    _check_device(config.device)
    dataset = _dataset(config)
    trainer = Trainer(config, dataset, folder, resume, init=init, data_changed=options.data_changed, group=group)
    for line in introduction(trainer, dataset, config):
        _say(line)
    with TrainingDisplay(trainer.config, console, trainer.step) as display:
        trainer.run(display)
    group.close()
    if trainer.stopped_by is not None:
        raise signals.Stopped(trainer.stopped_by)
    _say(f"saved {trainer.save_path}")


def _is_same(folder: Path, data: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.path.samefile(folder, expanduser(data))
    return False


def _sample(options: argparse.Namespace) -> None:
    suffix = check_options(options)
    group = processes.joined_by(options, options.device, console)
    with contextlib.nullcontext() if suffix or not group.leads else drawing_alone_in(options.out):
        pipeline = _load(options)
        told = _with_progress("sampling", lambda progress: sample(options, suffix, pipeline, group, progress))
    group.close()
    if group.leads:
        _say(told)


def _eval(options: argparse.Namespace) -> None:
    from cudiff.evaluate import evaluate_pipeline

    group = processes.joined_by(options, options.device, console)
    pipeline = _load(options)
    report = _with_progress("training the classifier, then sampling", lambda progress: evaluate_pipeline(
        pipeline, options.n, options.data, seed=options.seed, steps=options.steps, guidance=options.guidance,
        sampler=options.sampler, batch_size=options.batch_size, against=options.against, progress=progress, group=group,
    ))
    group.close()
    console.print(report.table())


def _info(options: argparse.Namespace) -> None:
    from cudiff.info import checkpoint_table, kernel_tables, step_table, system_table

    if options.preset is not None:
        if not options.kernels or options.arch is not None or options.checkpoint is not None:
            raise CudiffError("--preset goes with --kernels alone: add it, and leave out --arch and the checkpoint")
        console.print(step_table(options.preset, precision=options.precision, batch_size=options.batch_size))
        return
    if options.precision is not None or options.batch_size is not None:
        raise CudiffError("--precision and --batch-size go with --kernels --preset NAME: add it, or leave them out")
    if options.kernels or options.arch is not None:
        if options.checkpoint is not None:
            raise CudiffError("--kernels and --arch say nothing of a checkpoint: leave them out, or the checkpoint")
        for kernels in kernel_tables(options.arch):
            console.print(kernels)
        return
    if options.checkpoint is None:
        console.print(system_table())
        return
    table = checkpoint_table(options.checkpoint)
    console.print(system_table())
    console.print(table)


def _tune(options: argparse.Namespace) -> None:
    from cudiff.tune import table, tune

    _check_device("cuda")
    config = from_arguments(options)
    dataset = _dataset(config)
    with console.status("compiling") as status:
        tuned = tune(config, dataset, options.images,
                     lambda kernel, launches: status.update(f"measuring {kernel}: launch {launches:,}"))
    console.print(table(tuned))


def _convert(options: argparse.Namespace) -> None:
    from cudiff.convert_command import convert

    for line in convert(options):
        _say(line)


def _dataset(config: Any) -> Any:
    from cudiff.data import load_dataset

    dataset = load_dataset(
        config.data, image_size=config.image_size or None, channels=config.channels or None, skip_bad=config.skip_bad,
        only_classes=config.only_classes, on_disk=config.residency == "disk",
    )
    if dataset.skipped:
        _say(f"images that do not decode and are left out: {len(dataset.skipped)}, first {dataset.skipped[0]}")
    for note in dataset.notes:
        _say(note)
    return dataset


def _load(options: argparse.Namespace) -> Any:
    from cudiff.pipeline import load

    _check_device(options.device)
    weights = getattr(options, "weights", "ema")
    return load(options.checkpoint, options.device, weights, options.precision, sampler=options.sampler)


def _with_progress(title: str, run: Callable[[Callable[[int, int], None]], Any]) -> Any:
    """run(progress), with a line that counts while it lasts."""
    with console.status(title) as status:
        return run(lambda done, total: status.update(f"{title}: {done:,} of {total:,}"))


def _check_device(device: str) -> None:
    if device == "cuda":
        from cudiff.backend import get_cupy

        get_cupy()
