"""`cudiff sample`: images of a checkpoint's model, or the noise that a picture comes from, as a command line asks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cudiff.config import Config, options_in
from cudiff.distributed import Group
from cudiff.errors import CudiffError
from cudiff.files import locked
from cudiff.options import Option
from cudiff.registry import options_named

if TYPE_CHECKING:
    from cudiff.pipeline import Pipeline

_OF_DRAWING = ("n", "seed", "init", "strength", "mask", "noise", "other", "other_seed", "floats", "sampler",
               "guidance_interval", "guidance_rescale", "batch_invariant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of what is given to the sampling, and of guidance."""
    parser.add_argument("--init", type=expanduser, metavar="FILE",
                        help="a picture to begin with, of the model's size; of latents an .npz")
    parser.add_argument("--strength", type=float, metavar="X",
                        help="share of the steps that it goes through (default 0.6, with --mask 1)")
    parser.add_argument("--mask", type=expanduser, metavar="FILE",
                        help="a picture: what is white is painted anew, the rest of --init is kept")
    parser.add_argument("--invert", type=expanduser, metavar="FILE",
                        help="write the noise that this picture comes from to --out NAME.npz, and draw nothing")
    parser.add_argument("--noise", type=expanduser, metavar="FILE", help="begin with the noise of such an .npz")
    parser.add_argument("--other", type=texts, metavar="NAME,NAME,..", help="draw between --classes and these")
    parser.add_argument("--other-seed", type=int, metavar="N", help="begin with noise between --seed's and this one's")
    parser.add_argument("--share", type=float, metavar="X",
                        help="how far to go to --other and --other-seed, 0 to 1 (default 0.5)")
    parser.add_argument("--floats", action="store_true",
                        help="write floats in about [-1, 1], neither rounded nor cut, to --out NAME.npz")
    parser.add_argument("--guidance-interval", type=_levels, metavar="X,X",
                        help="guide only between these two noise levels")
    parser.add_argument("--guidance-rescale", type=float, default=0.0, metavar="X",
                        help="share, 0 to 1, by which guidance keeps an image's contrast (default 0)")
    for name, option in _options().items():
        option.add_to(parser, name, f"{option.help} (default: the model's)")


def _options() -> dict[str, Option]:
    """Those of sampling that a model comes with and that have no flag of another name."""
    return {name: option for name, option in options_in("sampling").items()
            if name not in ("sampler", "sample_steps", "guidance", "samples")}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"


def texts(text: str) -> list[str]:
    """The names in a list such as 0,1,2."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"'{text}' is not a class or a list such as 0,1,2")
    return parts


def _levels(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not two noise levels such as 0.2,5") from None


def check_options(options: argparse.Namespace) -> str:
    """The suffix of --out. Raises CudiffError where the system refuses to write there, and for options that do not go
    together."""
    from cudiff.tensorfile import require_writable

    suffix = Path(options.out).suffix.lower()
    name_alone = Path(options.out).name.lower() in (".png", ".npz", ".gif")
    if not options.out or name_alone or suffix not in (".png", ".npz", ".gif", ""):
        raise CudiffError(f"cannot write '{options.out}': use .png, .npz, .gif or a folder's name")
    unused = (*_OF_DRAWING, *_options()) if options.invert is not None else ()
    for name in unused:
        if name != "guidance_channels" and getattr(options, name, None) not in (None, False, 0.0):
            raise CudiffError(f"--invert draws nothing: leave {_flag(name)} out")
    options.n = 64 if options.n is None else options.n
    for given in (options.classes, options.other):
        if given is not None and len(given) > options.n:
            raise CudiffError(f"{len(given)} classes were given for {options.n} images: give fewer, or more images "
                              "with -n")
    if suffix != ".npz" and (options.floats or options.invert is not None):
        raise CudiffError(f"{'--floats' if options.floats else '--invert'} writes floats: give --out NAME.npz")
    if options.invert is not None and options.classes is not None and len(options.classes) > 1:
        raise CudiffError(f"--invert takes one class, that of its picture, not {len(options.classes)}")
    if options.noise is not None and options.other_seed is not None:
        raise CudiffError("--noise is in place of a seed's: leave --other-seed out")
    if options.share is not None and options.other is None and options.other_seed is None:
        raise CudiffError("--share says how far to go to --other or --other-seed: give one of them too")
    if not suffix:
        _check_no_pictures(options.out)
    require_writable(options.out if suffix else Path(options.out) / "000000.png")
    return suffix


def _check_no_pictures(folder: str) -> None:
    old = next(Path(folder).glob("*.png"), None)
    if old is not None:
        raise CudiffError(f"{folder} holds pictures already, such as {old.name}: name another folder with --out")


@contextmanager
def drawing_alone_in(folder: str) -> Iterator[None]:
    """Lock a folder that pictures go to, as far as the system can, until the block or the process ends. The folder
    itself is locked: a file for that would stay among the pictures.

    Raises CudiffError where another process draws into it, or has since it was last looked at.
    """
    try:
        place = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folder
        yield
        return
    try:
        if not locked(place):
            raise CudiffError(f"another process draws into {folder}: name another folder with --out")
        _check_no_pictures(folder)
        yield
    finally:
        os.close(place)


def sample(options: argparse.Namespace, suffix: str, pipeline: Pipeline, group: Group,
           progress: Callable[[int, int], None]) -> str:
    """Draw and write what the options of `cudiff sample` say; of a group's processes the first writes. Returns what to
    tell. Raises CudiffError as `Pipeline.sample` does."""
    from cudiff.plot import save_gif, save_grid, save_images, save_npz

    given = {name: value for name, value in vars(options).items() if name in _options()}
    _check_used(options, given, pipeline.config)
    if given:
        pipeline.config = pipeline.config.replace(**given)
    if pipeline.makes_latents and suffix != ".npz":
        raise CudiffError(f"the model makes latents of {pipeline.config.channels} channels, which are no pictures: "
                          "give --out NAME.npz")
    if options.invert is not None:
        found = pipeline.invert(_picture(options.invert, pipeline), options.classes and options.classes[:1],
                                options.steps, options.guidance, options.batch_size)
        if group.leads:
            save_npz(options.out, found)
        return f"the noise of {options.invert} in {options.out}"
    classes = None if options.classes is None else np.resize(options.classes, options.n)
    frames: list[np.ndarray] | None = [] if suffix == ".gif" else None
    batch_size = options.batch_size
    if frames is not None and batch_size is None:
        batch_size = pipeline._at_once(options.n)  # the first batch is shown, however many processes there are
    images = pipeline.sample(
        options.n, options.seed, classes, options.steps, options.guidance, options.sampler, batch_size,
        progress, frames, guidance_interval=options.guidance_interval, guidance_rescale=options.guidance_rescale,
        strength=options.strength, floats=options.floats, group=group, batch_invariant=options.batch_invariant,
        **_given(options, pipeline),
    )
    if frames is not None:
        frames = frames or [images]  # of no step
    if group.leads and frames is not None:
        save_gif(options.out, frames)
    elif group.leads and suffix == ".npz":
        labels = pipeline.labels(options.n, classes)
        # Of images of no class there is no number: data of which some have none have no labels.
        save_npz(options.out, images, None if labels is None or labels.min() < 0 else labels)
    elif group.leads:
        (save_grid if suffix == ".png" else save_images)(options.out, images)
    guidance = pipeline.config.guidance if options.guidance is None else options.guidance
    untrained = pipeline.config.num_classes and guidance != 1 and not pipeline.config.label_dropout
    return f"{options.n if frames is None else len(frames[0]):,} images in {options.out}" + (
        "; the model was trained by --label-dropout 0, and so knows no images without a class, which guidance takes: "
        "--guidance 1 does without" if untrained else "")


def _check_used(options: argparse.Namespace, given: dict[str, Any], config: Config) -> None:
    """Raise CudiffError for options that would change nothing."""
    sampler = options.sampler or config.sampler
    for name in given:
        of = [entry.name for _, entry, _ in options_named(name)]
        if of and sampler not in of:
            raise CudiffError(f"{_flag(name)} is an option of {' and '.join(of)}, not of sampler {sampler}: leave it "
                              "out")
    guidance = config.guidance if options.guidance is None else options.guidance
    for name in ("guidance_interval", "guidance_rescale", "guidance_channels"):
        if getattr(options, name, None) and (guidance == 1 or not config.num_classes):
            raise CudiffError(f"{_flag(name)} says how to guide, and nothing is guided: give --guidance to a model "
                              "with classes, or leave it out")
    if given.get("guidance_channels", 0) > config.channels:
        raise CudiffError(f"--guidance-channels {given['guidance_channels']} are more than the model's "
                          f"{config.channels}: give fewer, or leave it out")


def _given(options: argparse.Namespace, pipeline: Pipeline) -> dict[str, Any]:
    """The arrays that sampling is given, by their names in `Pipeline.sample`."""
    from cudiff.diffusion import slerp

    given: dict[str, Any] = {}
    share = 0.5 if options.share is None else options.share
    if options.init is not None:
        given["init"] = _picture(options.init, pipeline)
    if options.mask is not None:
        shades = _of_its_size(options.mask, 1, pipeline, "black")
        if shades.max() <= 127:
            raise CudiffError(f"nothing in {options.mask} is white, its brightest pixel is {shades.max()} of 255: what "
                              "is to be painted anew has to be above 127")
        given["mask"] = shades[..., 0] > 127
    if options.noise is not None:
        given["noise"] = noise = _floats(options.noise, "--invert")
        if not 0.5 < (spread := float(noise.std(dtype=np.float64))) < 2:
            raise CudiffError(f"{options.noise} holds no noise: its standard deviation is {spread:.2g}, not about 1; "
                              "it should be what --invert "
                              "wrote, by a well-trained model and enough --steps")
        if len(noise) != options.n:
            raise CudiffError(f"{options.noise} holds noise of {len(noise)} images: give -n {len(noise)}")
    if options.other_seed is not None:
        start, end = (pipeline.noise(options.n, seed) for seed in (options.seed, options.other_seed))
        given["noise"] = slerp(start, end, share)
    if options.other is not None:
        given |= {"other": np.resize(options.other, options.n), "share": share}
    return given


def _picture(path: str, pipeline: Pipeline) -> np.ndarray:
    """A picture, uint8 (H, W, C), of the model's size; for a model of latents those of an .npz, or (H, W, C) of one."""
    if not pipeline.makes_latents:
        return _of_its_size(path, pipeline.shape[2], pipeline, "white")
    if Path(path).suffix.lower() != ".npz":
        raise CudiffError(f"the model makes latents, and begins with those of an .npz, not with {path}")
    latents = _floats(path)
    return latents[0] if len(latents) == 1 else latents


def _of_its_size(path: str, channels: int, pipeline: Pipeline, behind: str) -> np.ndarray:
    from cudiff.data.pictures import read_picture

    picture, (height, width, _) = read_picture(path, channels, behind), pipeline.shape
    if picture.shape[:2] != (height, width):
        raise CudiffError(f"{path} is {picture.shape[1]}x{picture.shape[0]} and the model's images are "
                          f"{width}x{height}: resize it")
    return picture


def _floats(path: str, by: str = "--floats") -> np.ndarray:
    """What `cudiff sample` wrote as floats to an .npz, by such an option."""
    from cudiff.data.npz import npz_file

    found = npz_file(Path(path))
    if not found.latents:
        raise CudiffError(f"{path} holds pictures, not floats: give an .npz that {by} wrote")
    return found.images
