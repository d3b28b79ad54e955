"""Modules, layers, initialisation and flat parameter storage."""
# ruff: noqa: I001 (names in rows)

from cudiff.nn import init
from cudiff.nn.layers import (
    BatchNorm2d, Conv2d, ConvTranspose2d, Dropout, Embedding, GroupNorm, LayerNorm, Linear, grouped_linear,
    set_generator,
)
from cudiff.nn.module import Module, ModuleList, Sequential
from cudiff.nn.parameter import FlatParameters, Parameter
from cudiff.nn.parameterless import (
    AvgPool2d, Flatten, GELU, Identity, MaxPool2d, ReLU, Sigmoid, SiLU, Tanh,
)

__all__ = [
    "GELU", "AvgPool2d", "BatchNorm2d", "Conv2d", "ConvTranspose2d", "Dropout", "Embedding", "FlatParameters",
    "Flatten", "GroupNorm", "Identity", "LayerNorm", "Linear", "MaxPool2d", "Module", "ModuleList", "Parameter", "ReLU",
    "Sequential", "SiLU", "Sigmoid", "Tanh", "grouped_linear", "init", "set_generator",
]
