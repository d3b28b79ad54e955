"""Train a class-conditional EDM on MNIST and judge its samples: python examples/train_mnist.py [minutes]

Five minutes on an H200 suffice. MNIST is looked for in $CUDIFF_DATA/mnist and downloaded otherwise.
"""

import argparse
import sys

from rich import print

import cudiff
from cudiff.config import PRESETS
from cudiff.data import load_dataset
from cudiff.display import TrainingDisplay
from cudiff.evaluate import evaluate_pipeline
from cudiff.train import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a class-conditional EDM on MNIST and judge its samples.")
    parser.add_argument("minutes", type=float, nargs="?", default=4.5, help="of training (default 4.5)")
    parser.add_argument("--folder", default="runs/mnist", help="of the run (default runs/mnist)")
    options = parser.parse_args()

    config = PRESETS["mnist"].replace(minutes=options.minutes, validation=1000)
    trainer = Trainer(config, load_dataset("mnist"), options.folder)
    print(trainer.net.num_parameters(), "parameters on", trainer.device)
    with TrainingDisplay(trainer.config) as display:
        trainer.run(display)

    pipeline = cudiff.load(trainer.save())
    print(evaluate_pipeline(pipeline, 10000).table())


if __name__ == "__main__":
    try:
        main()
    except cudiff.CudiffError as error:
        sys.exit(f"train_mnist.py: {error}")
