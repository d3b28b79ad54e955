"""How near a few evaluations come to the solution: python examples/compare_samplers.py CHECKPOINT [evaluations]

All samplers begin with the same noise. The solution is Heun's method's after 1,000 steps, the distance the root mean
square over all pixels, which lie in about [-1, 1].
"""

import argparse
import sys

import numpy as np

import cudiff

SOLUTION = 1000  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare samplers by their distance to the solution of many steps.")
    parser.add_argument("checkpoint", help="a file, or a run's folder for its newest one")
    parser.add_argument("evaluations", type=int, nargs="?", default=10, help="of the network, even (default 10)")
    parser.add_argument("-n", type=int, default=256, help="images (default 256)")
    options = parser.parse_args()
    if options.evaluations < 4 or options.evaluations % 2:
        parser.error("Heun's method takes an odd number, one less and one more than the others': give an even one from "
                     f"4, not {options.evaluations}")
    model = cudiff.load(options.checkpoint)
    model.config = model.config.replace(S_churn=0.0)  # with noise on the way there is no solution to be near to

    def drawn(sampler: str, steps: int) -> np.ndarray:
        return model.sample(options.n, seed=1, steps=steps, sampler=sampler, floats=True)

    solution, half = drawn("heun", SOLUTION), options.evaluations // 2
    # A step of Heun's takes two evaluations, the last one one.
    steps = [("heun", half, 2 * half - 1), ("heun", half + 1, 2 * half + 1)]
    steps += [(sampler, 2 * half, 2 * half) for sampler in ("euler", "dpmpp-2m", "unipc")]
    for sampler, count, evaluations in steps:
        distance = np.sqrt(np.mean(np.square(drawn(sampler, count) - solution), dtype=np.float64))
        print(f"{sampler}, {evaluations} evaluations: {distance:.4f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except cudiff.CudiffError as error:
        sys.exit(f"compare_samplers.py: {error}")
