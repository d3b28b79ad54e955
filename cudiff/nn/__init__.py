"""Modules, layers, initialisation and flat parameter storage."""
# ruff: noqa: I001 (names in rows)

from cudiff.nn import init
from cudiff.nn.layers import (
    BatchNorm2d, Conv2d, ConvTranspose2d, Dropout, Embedding, GroupNorm, LayerNorm, Linear, ReLU, SiLU, linears,
    set_generator,
)
from cudiff.nn.module import Module, ModuleList, Sequential
from cudiff.nn.parameter import FlatParameters, Parameter

__all__ = [
    "BatchNorm2d", "Conv2d", "ConvTranspose2d", "Dropout", "Embedding", "FlatParameters", "GroupNorm", "LayerNorm",
    "Linear", "Module", "ModuleList", "Parameter", "ReLU", "Sequential", "SiLU", "init", "linears",
    "set_generator",
]
