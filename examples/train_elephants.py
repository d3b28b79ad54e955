"""Train unet.cu's U-Net on 64x64 photos: python examples/train_elephants.py PHOTOS [minutes]

PHOTOS is a folder of more than 20 photos, of any size: 20 are held out. Each sample of neighbours.png stands beside its
nearest training photo.
"""

import argparse
import sys
from pathlib import Path

from cudiff import CudiffError
from cudiff.config import PRESETS
from cudiff.data import load_dataset
from cudiff.display import TrainingDisplay
from cudiff.plot import nearest, save_neighbours
from cudiff.train import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train unet.cu's U-Net on 64x64 photos.")
    parser.add_argument("photos", help="a folder of more than 20 photos, of any size")
    parser.add_argument("minutes", type=float, nargs="?", default=7.0, help="of training at most (default 7)")
    parser.add_argument("--folder", type=Path, default=Path("runs/elephants"), help="of the run (runs/elephants)")
    options = parser.parse_args()

    config = PRESETS["elephants"].replace(data=options.photos, minutes=options.minutes)
    trainer = Trainer(config, load_dataset(options.photos, image_size=64, channels=3), options.folder)
    with TrainingDisplay(trainer.config) as display:
        metrics = trainer.run(display)
    if "val_loss" in metrics:  # not where Ctrl-C came early
        held_out, known = metrics["val_loss"], metrics["train_loss"]
        print(f"loss on held-out photos {held_out:.4f}, on as many training photos {known:.4f}")

    samples = trainer.preview.sample(32, seed=0)
    photos = trainer.training.images
    save_neighbours(options.folder / "neighbours.png", samples, photos[nearest(samples, photos, flip=True)])


if __name__ == "__main__":
    try:
        main()
    except CudiffError as error:
        sys.exit(f"train_elephants.py: {error}")
