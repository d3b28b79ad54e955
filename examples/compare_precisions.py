"""Train elephants in bf16 and in fp32 and compare: python examples/compare_precisions.py FOLDER [steps]

FOLDER holds the photos. Both see the same batches and noise; what counts is the loss averaged over the last 200 steps.
"""

import sys
from pathlib import Path

from cudiff.config import PRESETS
from cudiff.data import load_dataset
from cudiff.train import Trainer

LIMIT = 0.02  # bf16's loss may be that much higher

folder = sys.argv[1]
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
config = PRESETS["elephants"].replace(data=folder, steps=steps, log_every=200, sample_every=0, save_every=0)
photos = load_dataset(folder, image_size=64, channels=3)
loss = {}
for precision in ("bf16", "fp32"):
    trainer = Trainer(config.replace(precision=precision), photos, Path("runs/precisions") / precision)
    metrics = trainer.run()
    loss[precision] = metrics["loss"]
    print(f"{precision}: loss {loss[precision]:.5f}, {metrics['step_ms']:.1f} ms a step", flush=True)
difference = loss["bf16"] / loss["fp32"] - 1
print(f"bf16 against fp32: {difference:+.2%} after {steps} steps")
sys.exit(difference > LIMIT)
