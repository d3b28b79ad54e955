"""Train elephants in bf16 and in fp32 and compare: python examples/compare_precisions.py PHOTOS [steps]

Both see the same batches and noise; what counts is the loss averaged over the last 200 steps. Exits with 1 where bf16's
is more than LIMIT above fp32's, or not finite.
"""

import argparse
import math
import sys
from pathlib import Path

from cudiff import CudiffError
from cudiff.config import PRESETS
from cudiff.data import load_dataset
from cudiff.train import Trainer

LIMIT = 0.02
AVERAGED = 200  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Train elephants in bf16 and in fp32 and compare the losses.")
    parser.add_argument("photos", help="a folder of more than 20 photos, of any size")
    parser.add_argument("steps", type=int, nargs="?", default=2000, help=f"a multiple of {AVERAGED} (default 2000)")
    parser.add_argument("--folder", type=Path, default=Path("runs/precisions"), help="of both runs (runs/precisions)")
    options = parser.parse_args()
    if options.steps < 1 or options.steps % AVERAGED:
        parser.error(f"the loss is averaged over {AVERAGED} steps: give a multiple of {AVERAGED}, not {options.steps}")

    config = PRESETS["elephants"].replace(
        data=options.photos, steps=options.steps, log_every=AVERAGED, sample_every=0, save_every=0
    )
    photos = load_dataset(options.photos, image_size=64, channels=3)
    loss = {}
    for precision in ("bf16", "fp32"):
        trainer = Trainer(config.replace(precision=precision), photos, options.folder / precision)
        metrics = trainer.run()
        if trainer.step < options.steps:
            raise CudiffError(f"stopped after {trainer.step} steps in {precision}: nothing is compared")
        loss[precision] = metrics["loss"]
        print(f"{precision}: loss {loss[precision]:.5f}, {metrics['step_ms']:.1f} ms a step", flush=True)
    difference = loss["bf16"] / loss["fp32"] - 1
    print(f"bf16 against fp32: {difference:+.2%} after {options.steps} steps")
    sys.exit(not (math.isfinite(loss["fp32"]) and difference <= LIMIT))  # NaN is no success


if __name__ == "__main__":
    try:
        main()
    except CudiffError as error:
        sys.exit(f"compare_precisions.py: {error}")
