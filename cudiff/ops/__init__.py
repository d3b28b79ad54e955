"""The operations: what each file of this folder names in `__all__`."""

from cudiff.ops.arithmetic import *
from cudiff.ops.at import *
from cudiff.ops.attention import *
from cudiff.ops.batch import *
from cudiff.ops.batch_norm import *
from cudiff.ops.blend import *
from cudiff.ops.cast import *
from cudiff.ops.clip import *
from cudiff.ops.compare import *
from cudiff.ops.conv2d import *
from cudiff.ops.create import *
from cudiff.ops.dropout import *
from cudiff.ops.edm import *
from cudiff.ops.einsum import *
from cudiff.ops.elementwise import *
from cudiff.ops.embedding import *
from cudiff.ops.frame import *
from cudiff.ops.gelu import *
from cudiff.ops.group_norm import *
from cudiff.ops.grouped_linear import *
from cudiff.ops.index import *
from cudiff.ops.integer import *
from cudiff.ops.layer_norm import *
from cudiff.ops.lerp import *
from cudiff.ops.losses import *
from cudiff.ops.matmul import *
from cudiff.ops.mlp import *
from cudiff.ops.mse import *
from cudiff.ops.norm_silu_conv2d import *
from cudiff.ops.order import *
from cudiff.ops.pad import *
from cudiff.ops.pool import *
from cudiff.ops.random import *
from cudiff.ops.rearrange import *
from cudiff.ops.reduce import *
from cudiff.ops.shape import *
from cudiff.ops.softmax import *
from cudiff.ops.timestep_embedding import *
from cudiff.ops.trigonometry import *

# isort: split

from typing import TYPE_CHECKING

from cudiff.ops import methods
from cudiff.tensor import Tensor

if not TYPE_CHECKING:  # for type checkers the lines above are the names
    __all__ = sorted(name for name, value in globals().items() if getattr(value, "__module__", "").startswith(__name__))
    methods.add_to(Tensor, {name: globals()[name] for name in __all__})
