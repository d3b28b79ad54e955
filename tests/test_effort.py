"""What `python -m tests.effort` counts."""

import ast

import numpy as np

from cudiff import backend
from tests.effort import calls, choices, circles, effort, functions, imports, long_functions
from tests.host import encode


def test_calls_of_the_hosts_side():
    """The stand-in for a GPU is gone afterwards."""
    before = functions()
    (_, unit), (_, files), (_, changes), (_, backward), (_, step) = rows = effort()
    assert rows == effort() and functions() == before
    assert 1 < files <= changes + 1 <= unit < backward < step


def test_calls_are_those_of_cudiff_and_of_what_stands_for_it():
    def run():
        backend.is_array(1), np.ones(3).sum(), encode(16, 7, (8,), (), (8,), 0)
        return [backend.is_array(value) for value in (2, 3)]

    assert calls({}, run) == 3 * [backend.__file__]
    path = backend.__file__.replace("backend", "cuda/tensor_map")
    assert calls({encode.__code__: path}, run) == [backend.__file__, path, *2 * [backend.__file__]]


def test_places_that_choose_a_kernel():
    text = "if hopper() and conv2d_sm90.suits(x) or _suits_norm(y): plan.run(fit)\nsuits; unsuitable(); other.run(0)"
    assert choices(ast.parse(text)) == 4


def test_functions_over_40_lines():
    text = "".join(f"def f{n}():\n" + "    x = 1\n" * n for n in (39, 40))
    assert long_functions(ast.parse(text)) == 1


def test_imports_and_circles(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "import math\nfrom cudiff import ops\nfrom cudiff.cuda import device\nfrom cudiff.autograd import accumulate\n"
        "if TYPE_CHECKING:\n    import cudiff.nn\n"
        "class A:\n    def f(self):\n        from cudiff.tensor import Tensor\n"
    )
    top = {"math", "cudiff.ops", "cudiff.cuda.device", "cudiff.autograd"}
    assert set(imports(path, inside=False, types=False)) == top
    assert set(imports(path, inside=True, types=False)) == top | {"cudiff.tensor"}
    assert set(imports(path, inside=False, types=True)) == top | {"cudiff.nn"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == [["b", "c"], ["d"]]
