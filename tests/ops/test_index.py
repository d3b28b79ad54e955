"""Indexing by NumPy's rules, on both backends: NumPy's own result for the same index is the expectation."""

import numpy as np
import pytest

import cudiff
from cudiff import Tensor, check_gradient
from cudiff.cuda.kernels import shape
from cudiff.errors import CudiffError
from tests.check import check_op, torch

INDICES = [
    np.s_[1], np.s_[-1, 2], np.s_[1:3], np.s_[:, 1:, ::2], np.s_[..., 0], np.s_[::-1], np.s_[:, ::-2, None],
    np.s_[None], np.s_[2, ..., 3:7], np.s_[:], np.s_[0, 0, 0], np.s_[3:3], np.s_[1:, None, -2, ...], np.s_[:, :, 4:12],
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_getitem(index, device, rng):
    x = rng.standard_normal((4, 5, 16))
    torch_fn = None if "-1" in str(index) or "-2" in str(index) else lambda x: x[index]
    check_op(lambda x: x[index], x, device=device, torch_fn=torch_fn, dtypes=("float32", "bfloat16", "float16"))
    assert np.array_equal(Tensor(x)[index].numpy(), x[index])


def test_getitem_gradients_are_added(device, rng):
    x = rng.standard_normal((4, 6, 16))
    check_op(
        lambda x: x[:, 1:3] + x[:, 2:4] * 2.0 + x[:, ::3] + x[[3, 0, 1, 0]][:, :2] + x[:, 4:], x, device=device,
        dtypes=("float32",),
    )


@pytest.mark.parametrize("index", [[0], [2, 0, 2, 2, -1], [[1, 1], [0, 3]], []], ids=str)
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 8)], ids=str)
def test_integer_array(shape, index, device, rng):
    x = rng.standard_normal(shape)
    positions = np.asarray(index, np.int64)
    check_op(lambda x: x[positions], x, device=device, torch_fn=lambda x: x[torch.tensor(positions)])
    assert np.array_equal(Tensor(x)[Tensor(positions)].numpy(), x[positions])


@pytest.mark.parametrize("shape, axes", [((7,), 1), ((4, 3), 1), ((4, 3), 2), ((3, 4, 8), 2)], ids=str)
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_mask(shape, axes, share, device, rng):
    x, mask = rng.standard_normal(shape), rng.uniform(size=shape[:axes]) < share
    check_op(lambda x: x[mask] * 2.0, x, device=device, dtypes=("float32", "bfloat16", "float16"))
    check_op(lambda x: x * x + (x[mask] * 3.0).sum() + (x[mask] ** 2).sum(), x, device=device, dtypes=("float32",))
    for given in (mask, Tensor(mask, device=device), mask.tolist()):
        out = Tensor(x, dtype=np.float32, device=device)[given]
        assert np.array_equal(out.numpy(), x.astype(np.float32)[mask])


def test_a_mask_in_a_captured_function(host_of, monkeypatch):
    host = host_of(True)
    x = Tensor(host.asarray(np.ones((3, 2), np.float32)))
    mask = Tensor(host.asarray(np.array([True, False, True])))
    assert x[mask].shape == (2, 2)
    monkeypatch.setattr(host.cuda.get_current_stream(), "is_capturing", lambda: True)
    with pytest.raises(CudiffError, match=r"mask's result has a size .* use where"):
        x[mask]


@pytest.mark.gpu
def test_rows_out_of_range_are_zero_on_cuda():
    x = Tensor(np.ones((3, 2), np.float32), requires_grad=True, device="cuda")
    out = x[Tensor(np.int32([0, 3, -4]), device="cuda")]
    out.sum().backward()
    assert out.numpy().tolist() == [[1, 1], [0, 0], [0, 0]]
    assert Tensor(x.grad).numpy().tolist() == [[1, 1], [0, 0], [0, 0]]
    beyond = Tensor(np.int64([2**32, -(2**32) + 1, 2**63 - 1, -1]), device="cuda")
    assert x[beyond].numpy().tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]


ADVANCED = [
    np.s_[[0, 1], [1, 2]], np.s_[:, [0, 2]], np.s_[None, [1]], np.s_[[[0], [3]], [1, 2]], np.s_[-1, [0, -2], 3],
    np.s_[[0, 2], :, [1, -1]], np.s_[:, 0, None, [1, 1, 1]], np.s_[1:, [0, 1], ::-2], np.s_[[], [1]], np.s_[..., [], 0],
    np.s_[True], np.s_[False], np.s_[True, [0, 1]], np.s_[:, None, False], np.s_[0, ..., [2]], np.s_[[1], ..., 0],
    np.s_[:, np.array(1)], np.s_[range(2), 1:2], np.s_[[[0, 1], [1, 0]]], np.s_[(0, 3), (1, 1)],
    np.s_[np.arange(4) % 2 == 0, 1], np.s_[..., np.arange(16) % 3 == 1], np.s_[0, np.ones((5, 16), bool)],
    np.s_[np.arange(4) > 1, :, [3, 1]], np.s_[:, np.arange(5) > 9], np.s_[[0], np.arange(5) > 1, None],
]


@pytest.mark.parametrize("index", ADVANCED, ids=lambda index: str(index).replace("\n", ""))
def test_arrays_and_masks_beside_slices(index, device, rng):
    x = rng.standard_normal((4, 5, 16))
    check_op(lambda x: x[index], x, device=device, dtypes=("float32", "bfloat16", "float16"))
    check_op(lambda x: x * 2.0 + x[index].sum() + (x[index] ** 2).sum(), x, device=device, dtypes=("float32",))

    def there(item):
        return Tensor(item, device=device) if isinstance(item, np.ndarray | list) and np.size(item) else item

    x = x.astype(np.float32)
    given = tuple(map(there, index)) if isinstance(index, tuple) else there(index)
    out = Tensor(x, device=device)[given]
    assert out.shape == x[index].shape and np.array_equal(out.numpy(), x[index])


def random_index(rng, shape):
    """Any items that NumPy knows, for some of the axes."""
    items, axis, dots = [], 0, False
    common = tuple(rng.integers(1, 4, rng.integers(0, 3)))
    while rng.random() < 0.8:
        kind = rng.choice(["none", "dots", "slice", "int", "array", "array", "mask", "bool"])
        left = len(shape) - axis
        if kind == "none":
            items.append(None)
        elif kind == "dots" and not dots:
            items.append(...)
            dots = True
        elif kind == "bool" and rng.random() < 0.3:
            items.append(bool(rng.integers(2)))
        elif left and kind == "slice":
            ends = [None if rng.random() < 0.4 else int(rng.integers(-5, 6)) for _ in range(2)]
            items.append(slice(*ends, [None, 1, 2, -1, -2][rng.integers(5)]))
        elif left and kind == "int":
            items.append(int(rng.integers(-shape[axis], shape[axis])))
        elif left and kind == "array":
            sizes = tuple(1 if rng.random() < 0.2 else n for n in common)[rng.integers(0, len(common) + 1) :]
            array = rng.integers(-shape[axis], shape[axis], sizes)
            items.append(array.tolist() if array.ndim and rng.random() < 0.5 else array)
        elif left and kind == "mask":
            items.append(rng.random(shape[axis : axis + int(rng.integers(1, min(2, left) + 1))]) < 0.4)
            axis += items[-1].ndim - 1
        else:
            continue
        axis += kind not in ("none", "dots", "bool")
    return tuple(items)


def test_random_indices(rng):
    """With what is written there: what NumPy refuses is refused by the same exception."""
    refused = 0
    for _ in range(1500):
        x = rng.standard_normal(tuple(rng.integers(1, 5, rng.integers(1, 5))))
        index = random_index(rng, x.shape)
        try:
            expected = x[index]
        except IndexError:
            refused += 1
            with pytest.raises(IndexError):
                Tensor(x)[index]
            continue
        if not np.size(expected) and any(item is ... for item in index):
            continue  # of an empty result NumPy does not check what stands behind the Ellipsis
        np.testing.assert_array_equal(Tensor(x)[index].numpy(), expected, err_msg=str(index))
        values = rng.standard_normal(np.shape(expected)[rng.integers(0, np.ndim(expected) + 1) :])
        put, summed = x.copy(), x.copy()
        put[index] = values
        np.add.at(summed, index, np.broadcast_to(values, np.shape(expected)))
        np.testing.assert_array_equal(Tensor(x).at[index].set(values).numpy(), put, err_msg=str(index))
        np.testing.assert_allclose(Tensor(x).at[index].add(values).numpy(), summed, rtol=1e-12, err_msg=str(index))
    assert refused > 10


def test_gradients_of_gradients(rng):
    x = rng.uniform(0.5, 1.5, (3, 4))
    for index in (np.s_[[0, 2, 0], [1, 1, 1]], np.s_[:, [0, 0, 3]], np.s_[x[:, 0] > 1, 1], np.s_[[1, 1]], x > 1):
        check_gradient(cudiff.elementwise_grad(lambda x, index=index: x[index] ** 3), x)


@pytest.mark.parametrize("width", [(), (1,), (3,), (2, 4), (700,)], ids=str)
def test_sums_are_those_of_a_scan(width, device, rng, monkeypatch):
    """A sorted index and one that is looked through add the same terms in the same order: bit for bit."""
    x = rng.standard_normal((7, *width)).astype(np.float32)
    index = Tensor(rng.integers(-7, 7, 301), device=device)
    dout = Tensor(rng.standard_normal((301, *width)).astype(np.float32), device=device)
    found = []
    for scans in (True, False):
        monkeypatch.setattr(shape, "_scans", lambda grid, count, scans=scans: scans)
        for before in (False, True):
            leaf = Tensor(x, requires_grad=True, device=device)
            leaf.grad = Tensor(x, device=device).data if before else None
            leaf[index].backward(dout)
            found.append(Tensor(leaf.grad).numpy())
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])
    expected = np.zeros(x.shape)
    np.add.at(expected, index.numpy(), dout.numpy().astype(float))
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-4)


def test_a_long_index_is_sorted_on_a_gpu_but_not_in_a_captured_function(host_of, monkeypatch):
    host, count = host_of(True), (1 << 20) + 1
    monkeypatch.setattr(shape, "_shares", lambda size, count: (1024, 1, 256))  # as of a dx too large for a test
    x = Tensor(host.zeros(9, np.float32), requires_grad=True)

    def backward():
        host.launches.clear()
        x[Tensor(host.zeros(count, np.int32))].backward(host.zeros(count, np.float32))
        return host.launches

    assert backward() == [("shape", "take"), ("shape", "sum_runs")]
    monkeypatch.setattr(host.cuda.get_current_stream(), "is_capturing", lambda: True)
    assert ("shape", "scan_sums") in backward() and ("shape", "sum_runs") not in backward()


@pytest.mark.parametrize("rows, width, count", [
    (10, 1, 5000), (3, 700, 3000), (1, 1, 1025), (700, 3, 2100), (5000, 5, 1100), (257, 1030, 1500), (40, 300, 40_000),
    (1100, 2000, 1030),
])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_sums_of_many_entries(rows, width, count, dtype, device, rng):
    """In parts of the index where there are few rows; with entries that no row has; twice, with the same bits."""
    index = rng.integers(-2 * rows, rows, count)
    index = Tensor(np.where(rng.random(count) < 0.3, rng.integers(rows), index).clip(-rows), device=device)
    x = Tensor(rng.integers(-9, 9, (rows, width)), dtype=dtype, device=device)
    values = Tensor(rng.integers(-9, 9, (count, width)), dtype=dtype, device=device)
    found = [x.at[index].add(values).numpy() for _ in range(2)]
    expected = x.numpy().astype(np.float64)
    np.add.at(expected, index.numpy(), values.numpy().astype(np.float64))
    np.testing.assert_array_equal(found[0], found[1])
    rounding = 1e-2 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(found[0].astype(np.float64), expected, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("shape, axis, count, along", [
    ((3, 5), 1, 4, False), ((3, 5), 1, 40, False), ((2, 9001), 1, 300, False), ((2, 5), 1, 9000, False),
    ((530, 16, 3), 1, 7, False), ((2, 3, 7, 24), 2, 9, False), ((3, 70, 136), 1, 50, False),
    ((2, 1030, 24), 1, 31, False), ((5, 0), 1, 0, False), ((3, 5), 1, 4, True), ((3, 50), 1, 50, True),
    ((300, 40), 0, 3, True), ((300, 40), 0, 900, True), ((40, 17, 3), 1, 5, True), ((4, 2100), 0, 9, True),
    ((700, 8), 1, 1, True), ((3, 9000), 1, 5, True),
], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_along_an_axis(shape, axis, count, along, dtype, device, rng):
    """With negative and repeated entries; twice, with the same bits."""
    rows = shape[axis]
    size = tuple(count if i == axis else n for i, n in enumerate(shape)) if along else (count,)
    index = rng.integers(-rows, rows, size) if count else np.zeros(size, int)
    index = np.where(rng.random(size) < 0.3, rows // 2, index)
    x = Tensor(rng.integers(-9, 9, shape), dtype=dtype, device=device)
    there = Tensor(index, device=device)
    out = cudiff.take_along_axis(x, there, axis) if along else cudiff.take(x, there, axis)
    numbers = x.numpy().astype(np.float64)
    taken = np.take_along_axis(numbers, index, axis) if along else np.take(numbers, index, axis)
    np.testing.assert_array_equal(out.numpy().astype(np.float64), taken)
    values = Tensor(rng.integers(-9, 9, out.shape), dtype=dtype, device=device)
    places = tuple(np.ogrid[tuple(map(slice, size))]) if along else (slice(None),) * axis
    places = (*places[:axis], index, *places[axis + 1 :])
    expected = numbers.copy()
    np.add.at(expected, places, values.numpy().astype(np.float64))
    rounding = 1e-2 if dtype == "bfloat16" else 1e-6
    found = []
    for _ in range(2):
        if dtype == "int32":
            found.append(x.at[tuple(Tensor(place, device=device) if isinstance(place, np.ndarray) else place
                                    for place in places)].add(values).numpy())
            continue
        leaf = Tensor(x, requires_grad=True)
        leaf.grad = x.data.copy()
        (cudiff.take_along_axis(leaf, there, axis) if along else cudiff.take(leaf, there, axis)).backward(values)
        found.append(Tensor(leaf.grad).numpy())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0].astype(np.float64), expected, rtol=rounding, atol=1e-6)


def test_indices_on_a_gpu_in_a_captured_function(host_of, monkeypatch):
    """Arrays that are there already, slices and numbers; nothing is copied from the host."""
    host = host_of(True)
    x, index = Tensor(host.zeros((4, 3, 8), np.float32)), Tensor(host.zeros(2, np.int32))
    monkeypatch.setattr(host.cuda.get_current_stream(), "is_capturing", lambda: True)
    assert x[index, 1].shape == (2, 8) and x[:, index, ::2].shape == (4, 2, 4) and x[index].shape == (2, 3, 8)
    assert cudiff.take_along_axis(x, Tensor(host.zeros((4, 3, 1), np.int64))).shape == (4, 3, 1)
    with pytest.raises(CudiffError, match="copied a host array to the GPU"):
        x[[0, 1], 1]
    with pytest.raises(CudiffError, match="copied a host array to the GPU"):
        x[index, [0, 1]]


def test_rows_out_of_range_on_a_gpu_are_lost(host_of):
    """Where the index lies there: their number stands for them, of which the kernel makes zeros."""
    host = host_of(True)
    x, index = Tensor(host.zeros((3, 2, 8), np.float32)), Tensor(host.asarray(np.array([0, 3, -4, -1])))
    taken = []
    host.watch = lambda launch: taken.append(np.array(launch.args[1])) if launch.name == "take" else None
    x[index, 1]
    assert taken[0].tolist() == [1, 6, 6, 5]
    with pytest.raises(IndexError, match="index 3 is out of bounds for axis 0 with size 3"):
        x[[0, 3]]
    with pytest.raises(IndexError, match="index -3 is out of bounds for axis 1 with size 2"):
        x[index, -3]


@pytest.mark.gpu
def test_elements_out_of_range_are_zero_on_cuda():
    x = Tensor(np.ones((3, 2), np.float32), requires_grad=True, device="cuda")
    out = x[Tensor([0, 3, -4], device="cuda"), 1]
    out.sum().backward()
    assert out.numpy().tolist() == [1, 0, 0] and Tensor(x.grad).numpy().tolist() == [[0, 1], [0, 0], [0, 0]]


def test_bad_indices(device):
    x = Tensor(np.ones((3, 2), np.float32), device=device)
    for index in ("a", 1.5, ([0.5], 0), {}, (slice(None), "b")):
        with pytest.raises(TypeError, match="cannot index with"):
            x[index]
    for mask in ([True, False], np.ones((3, 3), bool), np.ones(3, bool)[None], ([True], 0), (0, np.ones(3, bool))):
        with pytest.raises(IndexError, match="mask of shape"):
            x[mask]
    for index in (3, (0, 0, 0), ([0], 0, 0), [3], ([0], 2), (slice(None), [-3]), (..., ..., [0])):
        with pytest.raises(IndexError):
            x[index]
    with pytest.raises(IndexError, match=r"index arrays of shapes .* do not broadcast"):
        x[[0, 1], [0, 1, 0]]
    assert [row.shape for row in x] == [(2,)] * 3
    number = Tensor(1.0, device=device)
    assert number[()].shape == () and number[None, ...].shape == (1,) and number[True].shape == (1,)
    with pytest.raises(TypeError, match="a 0-d tensor has no elements"):
        number[0]
    with pytest.raises(IndexError, match="too many indices: 1 for a tensor of 0 dimensions"):
        number[[0]]


def test_more_rows_than_32_bits_count(monkeypatch):
    monkeypatch.setattr("cudiff.ops.index._MOST", 3)
    with pytest.raises(IndexError, match="chooses of 4 rows, over 2\\^31 - 1: take parts"):
        Tensor(np.ones((2, 2, 3)))[[0], [1]]
    with pytest.raises(IndexError, match="a mask of 4 elements, over 2\\^31 - 1: choose from parts"):
        Tensor(np.ones(4))[np.ones(4, bool)]


def test_two_devices(host_of):
    host = host_of(True)
    with pytest.raises(ValueError, match="an index on the GPU of a tensor on the CPU"):
        Tensor(np.ones(3))[Tensor(host.zeros(2, np.int32))]
    x = Tensor(host.zeros((3, 2), np.float32))
    assert x[Tensor([0, 1])].device == x[Tensor([0, 1]), 1].device == "cuda"


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("indices", [2, [0, -1], [[1, 1, 0], [0, 2, 2]], []], ids=str)
def test_take(indices, axis, device, rng):
    x = rng.standard_normal((3, 4, 5))
    check_op(lambda x: cudiff.take(x, indices, axis), x, device=device)
    out = np.take(Tensor(x, dtype=np.float32, device=device), indices, axis=axis)
    np.testing.assert_array_equal(out.numpy(), np.take(x.astype(np.float32), np.asarray(indices, int), axis))


@pytest.mark.parametrize("axis, sizes", [(None, (7,)), (0, (6, 4)), (1, (3, 2)), (-1, (1, 5)), (1, (3, 0))])
def test_take_along_axis(axis, sizes, device, rng):
    x = rng.standard_normal((3, 4))
    indices = rng.integers(-3, 3, sizes)
    check_op(lambda x: cudiff.take_along_axis(x, indices, axis), x, device=device)
    there = Tensor(indices, device=device)
    out = np.take_along_axis(Tensor(x, dtype=np.float32, device=device), there, axis)
    np.testing.assert_array_equal(out.numpy(), np.take_along_axis(x.astype(np.float32), indices, axis))


def test_take_along_axis_of_other_axes(device):
    x = Tensor(np.ones((3, 4), np.float32), device=device)
    with pytest.raises(ValueError, match="indices of 1 axes for a tensor of 2"):
        cudiff.take_along_axis(x, [0, 1], 1)
    with pytest.raises(ValueError, match="out of range"):
        cudiff.take(x, [0], 2)


def test_nonzero(device):
    x = np.array([[0, 3, 0], [-1, 0, np.nan]], np.float32)
    for found in (cudiff.nonzero(Tensor(x, device=device)), np.nonzero(Tensor(x, device=device))):
        assert all(f.device == device and f.dtype == np.int64 for f in found)
        assert [f.numpy().tolist() for f in found] == [[0, 1, 1], [1, 0, 2]]
    assert Tensor(x, device=device)[Tensor(x, device=device).nonzero()].shape == (3,)
    for found in (cudiff.argwhere(Tensor(x, device=device)), np.argwhere(Tensor(x, device=device))):
        assert found.device == device and found.numpy().tolist() == np.argwhere(x).tolist()
    for number in (0.0, 3.0):
        assert cudiff.argwhere(Tensor(number, device=device)).shape == np.argwhere(number).shape
    with pytest.raises(ValueError, match="it has no axis"):
        cudiff.nonzero(Tensor(1.0, device=device))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_array_of_indices_may_be_used_again_before_backward(dtype):
    index, x = np.array([0, 1], dtype), Tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = cudiff.sum(x[index] * np.array([1.0, 10.0], np.float32))
    index[:] = 2
    y.backward()
    np.testing.assert_array_equal(x.grad, [1, 10, 0])
