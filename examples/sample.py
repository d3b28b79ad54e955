"""Draw images from a checkpoint: python examples/sample.py CHECKPOINT [class]"""

import argparse
import sys

import cudiff
from cudiff.plot import save_gif, save_grid


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw 64 images from a checkpoint, and a GIF of their denoising.")
    parser.add_argument("checkpoint", help="a file, or a run's folder for its newest one")
    parser.add_argument("classes", metavar="class", type=int, nargs="?", help="default: all in turn")
    options = parser.parse_args()

    frames = []
    images = cudiff.load(options.checkpoint).sample(64, seed=1, classes=options.classes, frames=frames)
    save_grid("samples.png", images)
    save_gif("denoising.gif", frames)
    print("64 images of", images.shape[1:], "in samples.png, their denoising in denoising.gif")


if __name__ == "__main__":
    try:
        main()
    except cudiff.CudiffError as error:
        sys.exit(f"sample.py: {error}")
