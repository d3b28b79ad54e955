"""`cudiff convert`: weights from or to other programs, or unet.cu's data, as a command line asks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from pathlib import Path

from cudiff.beginning import notes_of
from cudiff.checkpoint import latest, load_checkpoint
from cudiff.config import Config, as_flags, from_arguments
from cudiff.convert import is_unet_cu
from cudiff.data import load_dataset
from cudiff.data.unetcu import write_unetcu
from cudiff.errors import CudiffError
from cudiff.folder import quoted
from cudiff.pipeline import export_torch, export_unet_cu, import_torch


def convert(options: argparse.Namespace) -> list[str]:
    """Do what the options of `cudiff convert` say; returns what to tell, in lines. Raises CudiffError for mistakes."""
    if options.to_torch:
        _refuse(options, ("to_torch", "weights"), "is for weights that come from PyTorch: with --to-torch leave it out")
        export_torch(options.source, options.target, options.weights or "ema")
        return [f"wrote {options.target}"]
    if Path(options.target).suffix.lower() == ".bin":
        return _to_unet_cu(options)
    if options.weights is not None:
        raise CudiffError("--weights chooses what --to-torch writes: give that too, or leave it out")
    if Path(options.source).is_dir():
        raise CudiffError(f"{options.source} is a folder: a run's weights go to PyTorch's layout with --to-torch, or "
                          "to unet.cu with a target that ends in .bin")
    asked = from_arguments(options, Config())
    config = import_torch(options.source, options.target, asked, options.key)
    _check_taken(options, asked, config)
    return [
        *notes_of(load_checkpoint(options.target, ())),
        f"wrote {options.target}: a model of {config.diffusion}, sampled by {config.sampler} in {config.sample_steps} "
        f"steps; cudiff info {quoted(options.target)} says the rest",
    ]


def _check_taken(options: argparse.Namespace, asked: Config, config: Config) -> None:
    """Raise CudiffError, without the file, for flags that are otherwise in it, as its weights told their model."""
    made = config.to_dict()
    lost = {name: value for name, value in asked.to_dict().items()
            if name in vars(options) and value != made.get(name) and name != "norm_group_channels"}
    if lost:
        os.unlink(options.target)
        told = config.model == "dit" and asked.model != "dit"
        way = "leave that out" + (", or give --preset dit-xl-2 too" if told else "")
        raise CudiffError(f"{options.source} tells its model by itself, without {as_flags(lost)}: {way}")


def _refuse(options: argparse.Namespace, known: Collection[str], why: str) -> None:
    """Raise CudiffError for an option that was given and is not among those known."""
    for name, value in vars(options).items():
        if name not in ("command", "run", "source", "target", *known) and value not in (None, False):
            raise CudiffError(f"--{name.replace('_', '-')} {why}")


def _to_unet_cu(options: argparse.Namespace) -> list[str]:
    """Write unet.cu's .bin: of weights where the source is a checkpoint, else of a data set's images."""
    source = Path(options.source)
    if source.suffix.lower() == ".safetensors" or is_unet_cu(source) or (source.is_dir() and latest(source)):
        _refuse(options, ("weights",), "is not for the weights of a checkpoint: leave it out")
        export_unet_cu(source, options.target, options.weights or "model")
        return [*notes_of(load_checkpoint(source, ())), f"wrote {options.target}"]
    _refuse(options, ("image_size", "channels", "skip_bad"), "is not for a data set's images: leave it out")
    if os.path.exists(options.target):
        raise CudiffError(f"{options.target} exists already: choose another name")
    given = vars(options)
    dataset = load_dataset(options.source, image_size=given.get("image_size"), channels=given.get("channels"),
                           skip_bad=given.get("skip_bad", False))
    write_unetcu(options.target, dataset)
    labels = "" if dataset.labels is None else "; its labels have no place there"
    return [f"wrote {options.target}, {len(dataset):,} images{labels}", *dataset.notes]
