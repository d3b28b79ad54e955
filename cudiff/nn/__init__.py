"""Modules, layers, initialisation and flat parameter storage."""
# ruff: noqa: I001 (names in rows)

from cudiff.nn import init
from cudiff.nn.conv1d import Conv1d
from cudiff.nn.layers import (
    BatchNorm1d, BatchNorm2d, Conv2d, ConvTranspose2d, Dropout, Embedding, GroupNorm, LayerNorm, Linear,
    grouped_linear, set_generator, set_group,
)
from cudiff.nn.module import Module, ModuleList, Sequential
from cudiff.nn.module_dict import ModuleDict
from cudiff.nn.multihead_attention import MultiheadAttention
from cudiff.nn.parameter import FlatParameters, Parameter
from cudiff.nn.state_dict import StateDict
from cudiff.nn.parameterless import (
    AvgPool2d, Flatten, GELU, Identity, MaxPool2d, ReLU, Sigmoid, SiLU, Tanh,
)

__all__ = [
    "GELU", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Conv1d", "Conv2d", "ConvTranspose2d", "Dropout", "Embedding",
    "FlatParameters", "Flatten", "GroupNorm", "Identity", "LayerNorm", "Linear", "MaxPool2d", "Module", "ModuleDict",
    "ModuleList", "MultiheadAttention", "Parameter", "ReLU", "Sequential", "SiLU", "Sigmoid", "StateDict", "Tanh",
    "grouped_linear", "init", "set_generator", "set_group",
]
