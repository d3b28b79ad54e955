"""Draw images from a checkpoint: python examples/sample.py CHECKPOINT [class]"""

import sys

import cudiff
from cudiff.plot import save_gif, save_grid

pipeline = cudiff.load(sys.argv[1])
classes = int(sys.argv[2]) if len(sys.argv) > 2 else None

frames = []
images = pipeline.sample(64, seed=1, classes=classes, frames=frames)
save_grid("samples.png", images)
save_gif("denoising.gif", frames)
print("64 images of", images.shape[1:], "in samples.png, their denoising in denoising.gif")
