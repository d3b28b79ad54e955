"""Train a class-conditional EDM on MNIST and judge its samples: python examples/train_mnist.py [minutes]

Five minutes on an H200 suffice. MNIST is looked for in $CUDIFF_DATA/mnist and downloaded otherwise.
"""

import sys

from rich import print

import cudiff
from cudiff.config import PRESETS
from cudiff.data import load_dataset
from cudiff.display import TrainingDisplay
from cudiff.evaluate import evaluate_pipeline
from cudiff.train import Trainer

minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 4.5
config = PRESETS["mnist"].replace(minutes=minutes, validation=1000)

trainer = Trainer(config, load_dataset("mnist"), "runs/mnist")
print(trainer.net.num_parameters(), "parameters on", trainer.device)
with TrainingDisplay(trainer.config) as display:
    trainer.run(display)

pipeline = cudiff.load(trainer.save())
print(evaluate_pipeline(pipeline, 10000).table())
