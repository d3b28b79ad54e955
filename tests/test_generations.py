"""docs/kernel-notes.md has one table of what runs on which generation of GPUs: as the kernel tables say."""

import itertools
from pathlib import Path

import numpy as np

from cudiff.backend import bfloat16, float16, float32
from cudiff.cuda.kernels.attention.problem import Problem as Attention
from cudiff.cuda.kernels.attention.table import ATTENTION
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Image, Weight
from cudiff.cuda.kernels.convolution.problem import Problem as Convolution
from cudiff.cuda.kernels.convolution.table import CONVOLUTION
from cudiff.cuda.kernels.gemm.table import LINEAR
from cudiff.cuda.kernels.norm.problem import Problem as Norm
from cudiff.cuda.kernels.norm.table import NORM

NOTES = Path(__file__).resolve().parents[1] / "docs" / "kernel-notes.md"
GENERATIONS = {  # architectures, and whether their kernels have run
    "Turing: T4, RTX 20": (("sm_75",), "by PTX, on an H100 and an H200"),
    "Ampere, Ada: A100, RTX 30, RTX 40": (("sm_80", "sm_86", "sm_89"), "compiled; as portable kernels on an H200"),
    "Hopper: H100, H200": (("sm_90a",), "run"),
    "Blackwell: B200, RTX 50": (("sm_100", "sm_120"), "compiled"),
}
PRECISIONS = {"fp32": (float32, 3), "tf32": (float32, 1), "bf16": (np.dtype(bfloat16), 1), "fp16": (float16, 1)}
COLUMNS = ("GPUs", "precision", "3x3 convolution: forward; input's gradient; weight's", "linear layer", "attention",
           "group norm", "seen")


def chosen(table, problem, architecture):
    """The files of the kernels in the row that is chosen; of two, one for tf32, that of the problem's dtype."""
    names = table.select(problem, architecture).row.name.removesuffix(", exact").split(", ")
    kernels = [name for name in names if "." in name] or names  # `group_norm.statistics, normalize` are of one file
    files = list(dict.fromkeys(name.split(".")[0] for name in kernels))
    wide = [file for file in files if "tf32" in file]
    return wide or files if getattr(problem, "x", problem).dtype == float32 else [f for f in files if f not in wide]


def kernels(architecture, dtype, products):
    """What serves a U-Net's layers of 128 channels at 32x32 pixels, and a transformer's of 12 heads at 1,024 tokens."""
    image, weight = Image((32, 32, 32, 128), dtype), Weight((128, 3, 3, 128))
    convolution = Convolution(FPROP, image, weight, image, padding=(1, 1), products=products)
    tokens = Image((1, 1, 32768, 768), dtype)
    linear = Convolution(FPROP, tokens, Weight((768, 1, 1, 768)), tokens, products=products)
    attention = Attention(False, dtype, 32, 1024, 1024, 12, 64, True, products)
    norm = Norm(False, dtype, 32, 1024, 128, 0, 32, True, False, False)
    several = [
        [chosen(CONVOLUTION, convolution._replace(direction=direction), architecture)
         for direction in (FPROP, DGRAD, WGRAD)],
        [chosen(LINEAR, linear, architecture)],
        [chosen(ATTENTION, attention._replace(backward=backward), architecture) for backward in (False, True)],
        [chosen(NORM, norm._replace(backward=backward), architecture) for backward in (False, True)],
    ]
    return ["; ".join(f"`{file}`" for file in dict.fromkeys(itertools.chain(*files))) for files in several]


def rows():
    yield COLUMNS
    yield ("---",) * len(COLUMNS)
    for generation, (architectures, seen) in GENERATIONS.items():
        found = {}
        for precision, (dtype, products) in PRECISIONS.items():
            if generation.startswith("Turing") and precision in ("tf32", "bf16"):
                continue
            (cells,) = {tuple(kernels(architecture, dtype, products)) for architecture in architectures}
            found.setdefault(cells, []).append(precision)
        for cells, precisions in found.items():
            yield generation, ", ".join(precisions), *cells, seen


def test_the_table_of_generations_is_that_of_the_kernels():
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows())
    print(table)
    assert table in NOTES.read_text()
