"""The command line: `cudiff demo | train | sample | eval | info | convert`, thin shells over the Python calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cudiff.config import Config, add_arguments, from_arguments
from cudiff.errors import CudiffError

console = Console()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for a mistake the user can mend, 130 for Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except CudiffError as error:
        if options.debug:
            raise
        console.print(f"cudiff: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        if options.debug:
            raise
        return 130
    except Exception as error:
        if options.debug:
            raise
        text = str(error).splitlines()[0] if str(error) else ""
        message = f"cudiff: unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)"
        console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cudiff", description="Train and sample diffusion models with hand-written CUDA kernels, or on a CPU."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return added

    demo = command("demo", _demo, "train on drawn digits and sample them, in three minutes on a laptop")
    demo.add_argument("--folder", default="runs/demo", help="where the pictures go (default runs/demo)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))

    train = command("train", _train, "train a model")
    train.add_argument("--folder", help="of the run (default runs/ and the data's name)")
    train.add_argument("--resume", metavar="PATH", help="go on with a run's folder or a checkpoint")
    add_arguments(train)

    sample = command("sample", _sample, "draw images from a checkpoint")
    sample.add_argument("checkpoint")
    sample.add_argument("-n", type=int, default=64, help="how many images (default 64)")
    sample.add_argument("--out", default="samples.png", help=".png grid, .npz, .gif of the denoising, or a folder")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--classes", type=_integers, help="a class, or a list such as 0,1,2 that is repeated")
    sample.add_argument("--steps", type=int)
    sample.add_argument("--guidance", type=float)
    sample.add_argument("--sampler", choices=("heun", "euler", "ddim", "ancestral"))
    sample.add_argument("--batch-size", type=int, default=64)
    sample.add_argument("--weights", choices=("ema", "model"), default="ema")
    _device_arguments(sample)

    evaluate = command("eval", _eval, "judge a checkpoint's samples with a classifier that cudiff trains")
    evaluate.add_argument("checkpoint")
    evaluate.add_argument("-n", type=int, default=2000, help="samples (default 2000)")
    evaluate.add_argument("--data", help="the data to compare with (default: that of training)")
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--steps", type=int)
    evaluate.add_argument("--guidance", type=float)
    evaluate.add_argument("--sampler", choices=("heun", "euler", "ddim", "ancestral"))
    evaluate.add_argument("--batch-size", type=int, default=256)
    _device_arguments(evaluate)

    info = command("info", _info, "say what hardware, versions and kernels are in use")
    info.add_argument("checkpoint", nargs="?", help="also describe this checkpoint")

    convert = command("convert", _convert, "bring weights from or to PyTorch's layout")
    convert.add_argument("source", help=".pt or .safetensors in PyTorch's layout, unet.cu's .bin, or a checkpoint")
    convert.add_argument("target", help="a cudiff checkpoint, or with --to-torch a .safetensors in PyTorch's layout")
    convert.add_argument("--to-torch", action="store_true", help="write the weights with PyTorch's layout")
    convert.add_argument("--weights", choices=("ema", "model"), default="ema", help="which to write with --to-torch")
    add_arguments(convert, sections=("data", "model", "diffusion", "sampling"))
    return parser


def _device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"))


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number or a list such as 0,1,2") from None


def _demo(options: argparse.Namespace) -> None:
    from cudiff.demo import demo

    demo(Path(options.folder), options.seed, options.device, console)


def _train(options: argparse.Namespace) -> None:
    from cudiff.checkpoint import load_checkpoint
    from cudiff.data import load_dataset
    from cudiff.display import TrainingDisplay
    from cudiff.train import Trainer, checkpoint_to_resume

    resume, folder = None, options.folder
    if options.resume:
        path = checkpoint_to_resume(options.resume)
        resume = load_checkpoint(path)
        folder = folder or path.parent
        config = from_arguments(options, Config.from_dict(resume.config))
    else:
        config = from_arguments(options)
        folder = Path(folder or Path("runs") / Path(config.data).stem)
        if (folder / "metrics.jsonl").exists():
            raise CudiffError(f"{folder} already holds a run: go on with --resume {folder}, or choose another --folder")
    _check_device(config.device)
    dataset = load_dataset(
        config.data, image_size=config.image_size or None, channels=config.channels or None, skip_bad=config.skip_bad
    )
    if dataset.skipped:
        console.print(f"{len(dataset.skipped)} images did not decode and are left out", style="yellow")
    trainer = Trainer(config, dataset, folder, resume)
    console.print(
        f"{dataset!r}: {len(trainer.training):,} images to train on, {len(trainer.held_out):,} held out\n"
        f"{trainer.net.num_parameters():,} parameters, {config.precision}, on {trainer.device}; run in {folder}",
        highlight=False,
    )
    with TrainingDisplay(trainer.config, console, trainer.step) as display:
        trainer.run(display)
    console.print(f"saved {folder}/step-{trainer.step:08d}.safetensors", highlight=False)


def _sample(options: argparse.Namespace) -> None:
    import numpy as np

    from cudiff.pipeline import load
    from cudiff.plot import save_gif, save_grid, save_images, save_npz

    _check_device(options.device)
    pipeline = load(options.checkpoint, options.device, options.weights, options.precision)
    classes = None if options.classes is None else np.resize(options.classes, options.n)
    frames: list[np.ndarray] | None = [] if options.out.endswith(".gif") else None
    with console.status("sampling"):
        images = pipeline.sample(
            options.n, options.seed, classes, options.steps, options.guidance, options.sampler, options.batch_size,
            frames=frames,
        )
    suffix = Path(options.out).suffix
    if frames is not None:
        save_gif(options.out, frames)
    elif suffix == ".npz":
        save_npz(options.out, images, pipeline.labels(options.n, classes))
    elif suffix == ".png":
        save_grid(options.out, images)
    elif suffix == "":
        save_images(options.out, images)
    else:
        raise CudiffError(f"cannot write {options.out}: use .png, .npz, .gif or a folder's name")
    console.print(f"{options.n} images in {options.out}", highlight=False)


def _eval(options: argparse.Namespace) -> None:
    from cudiff.evaluate import evaluate_pipeline
    from cudiff.pipeline import load

    _check_device(options.device)
    pipeline = load(options.checkpoint, options.device, precision=options.precision)
    report = evaluate_pipeline(
        pipeline, options.n, options.data, seed=options.seed, steps=options.steps, guidance=options.guidance,
        sampler=options.sampler, batch_size=options.batch_size,
    )
    console.print(report.table())


def _info(options: argparse.Namespace) -> None:
    from cudiff.info import checkpoint_table, system_table

    console.print(system_table())
    if options.checkpoint:
        console.print(checkpoint_table(options.checkpoint))


def _convert(options: argparse.Namespace) -> None:
    from cudiff.pipeline import export_torch, import_torch

    if options.to_torch:
        export_torch(options.source, options.target, options.weights)
    else:
        import_torch(options.source, options.target, from_arguments(options))
    console.print(f"wrote {options.target}", highlight=False)


def _check_device(device: str) -> None:
    if device == "cuda":
        from cudiff.backend import get_cupy

        get_cupy()


if __name__ == "__main__":
    sys.exit(main())
