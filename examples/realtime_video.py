"""Redraw a video by a model, frame by frame: python examples/realtime_video.py CHECKPOINT VIDEO

Each frame, with some noise, is denoised in few evaluations, once alone and once blended with the frame before.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, ImageSequence

import cudiff
from cudiff.data.pictures import image_folder

MOST_FRAMES = 10_000


def read(video: Path, size: int, channels: int) -> np.ndarray:
    """The frames as uint8 (N, size, size, channels), each cropped to its central square."""
    if video.is_dir():
        return image_folder(video, size, channels).images
    try:
        with Image.open(video, formats=["GIF"]) as file:
            if getattr(file, "n_frames", 1) > MOST_FRAMES:
                raise cudiff.CudiffError(f"{video} has more than {MOST_FRAMES:,} frames: cut it")
            pictures = [ImageOps.fit(frame.convert("RGB"), (size, size)) for frame in ImageSequence.Iterator(file)]
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise cudiff.CudiffError(f"cannot read {video} ({error}): give a GIF or a folder of pictures") from None
    mode = "L" if channels == 1 else "RGB"
    return np.stack([np.asarray(picture.convert(mode)).reshape(size, size, channels) for picture in pictures])


def flicker(frames) -> float:
    """The mean change of a pixel from frame to frame, of 255 levels."""
    return float(np.abs(np.diff(np.asarray(frames, int), axis=0)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Redraw a video by a model; write a GIF, latency and flicker.")
    parser.add_argument("checkpoint", help="a file, or a run's folder for its newest one")
    parser.add_argument("video", type=Path, help="a GIF, or a folder of pictures")
    parser.add_argument("--out", type=Path, default="video.gif", help="the GIF to write (default video.gif)")
    parser.add_argument("--class", dest="classes", help="a name or number (default: none)", metavar="CLASS")
    for name, kind, default in (("steps", int, 1), ("seed", int, 0), ("strength", float, 0.3), ("blend", float, 0.5)):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"see Pipeline.stream (default {default})")
    options = parser.parse_args()

    if options.out.suffix.lower() != ".gif" or not options.out.parent.is_dir():
        raise cudiff.CudiffError(f"--out {options.out} is no GIF in a folder that is there: choose another name")
    model = cudiff.load(options.checkpoint)
    if model.makes_latents:
        raise cudiff.CudiffError(f"{options.checkpoint} makes latents, not pictures: give a model of pictures")
    video = read(options.video, model.shape[0], model.shape[2])
    if len(video) < 2:
        raise cudiff.CudiffError(f"{options.video} has {len(video)} frame: a video has 2 or more")
    none = -1 if model.config.num_classes else None
    classes = none if options.classes is None else [options.classes]
    for blend in dict.fromkeys((0.0, options.blend)):
        stream = model.stream(1, options.seed, classes, options.steps, strength=options.strength, blend=blend)
        stream.frame(video[0])  # kernels are compiled
        frames, times = [], [time.perf_counter()]
        for picture in video:
            frames.append(stream.frame(picture)[0])
            times.append(time.perf_counter())
        middle, worst = 1000 * np.percentile(np.diff(times), (50, 99))
        print(f"blend {blend:g}: p50 {middle:.2f} ms, p99 {worst:.2f} ms a frame, flicker {flicker(frames):.2f}, "
              f"the video's {flicker(video):.2f}")
    pictures = [Image.fromarray(frame.squeeze()) for frame in frames]
    try:
        pictures[0].save(options.out, "GIF", save_all=True, append_images=pictures[1:], duration=40, loop=0)
    except OSError as error:
        raise cudiff.CudiffError(f"cannot write {options.out} ({error.strerror})") from None
    print(f"{len(frames)} frames in {options.out}")


if __name__ == "__main__":
    try:
        main()
    except cudiff.CudiffError as error:
        sys.exit(f"realtime_video.py: {error}")
