"""Train unet.cu's U-Net on 64x64 photos: python examples/train_elephants.py FOLDER [minutes]

FOLDER holds the photos, of any size. Each sample of neighbours.png stands beside its nearest training photo.
"""

import sys

from cudiff.config import PRESETS
from cudiff.data import load_dataset
from cudiff.display import TrainingDisplay
from cudiff.plot import nearest, save_neighbours
from cudiff.train import Trainer

folder = sys.argv[1]
minutes = float(sys.argv[2]) if len(sys.argv) > 2 else 7.0
config = PRESETS["elephants"].replace(data=folder, minutes=minutes)

trainer = Trainer(config, load_dataset(folder, image_size=64, channels=3), "runs/elephants")
with TrainingDisplay(trainer.config) as display:
    metrics = trainer.run(display)
print(f"loss on held-out photos {metrics['val_loss']:.4f}, on as many training photos {metrics['train_loss']:.4f}")

samples = trainer.preview.sample(32, seed=0)
photos = trainer.training.images
save_neighbours("runs/elephants/neighbours.png", samples, photos[nearest(samples, photos, flip=True)])
