"""Folders that memory does not hold: decoded once into a file, which gives the same as memory, bit for bit."""

import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cudiff.memory
from cudiff import evaluate
from cudiff.checkpoint import load_checkpoint
from cudiff.cli import main
from cudiff.config import Config
from cudiff.data import Dataset, decoded, load_dataset, pictures
from cudiff.data import loader as loader_module
from cudiff.data.loader import Loader
from cudiff.data.rows import Rows
from cudiff.errors import CudiffError
from cudiff.tensor import Tensor
from cudiff.train import Trainer
from tests.test_data import picture, refused
from tests.test_pictures import many
from tests.test_train import TINY, assert_same_state

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder in which decoded pictures lie."""
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pictures"


@pytest.fixture
def folder(tmp_path):
    """54 pictures in two classes, and six that do not decode."""
    (tmp_path / "data").mkdir()
    many(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def reads(monkeypatch):
    """The names of the files that are decoded."""
    names, read = [], pictures._read_picture
    monkeypatch.setattr(pictures, "_read_picture", lambda file, size: names.append(file.name) or read(file, size))
    return names


def load(folder, **options):
    return load_dataset(folder, **(dict(image_size=16, skip_bad=True) | options))


def same(stored, resident):
    assert isinstance(stored.images, Rows) and isinstance(resident.images, np.ndarray)
    assert stored.images.shape == resident.images.shape and stored.images.nbytes == resident.images.nbytes
    np.testing.assert_array_equal(np.asarray(stored.images), resident.images)
    for name in ("num_classes", "class_names", "skipped", "name"):
        assert getattr(stored, name) == getattr(resident, name)
    assert (stored.labels is None) == (resident.labels is None)
    assert stored.labels is None or stored.labels.tolist() == resident.labels.tolist()
    assert stored.fingerprint() == resident.fingerprint()


@pytest.mark.parametrize("options", [
    {}, {"channels": 1}, {"channels": 3}, {"only_classes": ["b"]}, {"only_classes": ["b", "a"]}, {"image_size": 40},
], ids=str)
def test_the_file_holds_what_memory_would(cache, folder, options):
    resident, stored = load(folder, **options), load(folder, on_disk=True, **options)
    same(stored, resident)
    *notes, where = stored.notes
    assert tuple(notes) == resident.notes
    [path] = cache.glob("*.npy")
    assert where == f"the pictures lie decoded in {path} (0.0 GiB), which training reads"
    np.testing.assert_array_equal(np.load(path), resident.images)


@pytest.mark.parametrize("color", [False, True])
def test_gray_pictures_of_one_size(cache, tmp_path, monkeypatch, color):
    """One channel is kept where all are gray, in parts; a coloured picture at the end gives all three."""
    monkeypatch.setattr(decoded, "CHUNK", 70)
    (tmp_path / "data").mkdir()
    for i in range(5):
        pixels = picture(12, 12, 3) if color and i == 4 else picture(12, 12)
        Image.fromarray(pixels).save(tmp_path / "data" / f"{i}.png")
    options = dict(image_size=None, skip_bad=False)
    stored = load(tmp_path / "data", on_disk=True, **options)
    assert stored.images.shape == (5, 12, 12, 3 if color else 1)
    shutil.rmtree(cache)
    same(stored, load(tmp_path / "data", **options))


def test_drawn_digits_have_no_folder(cache):
    with pytest.raises(CudiffError, match="digits is no folder of pictures, and only these are kept on a disk"):
        load_dataset("digits", on_disk=True)


def test_from_which_size_on(cache, folder, monkeypatch):
    """A quarter of the free memory, by the image size, or without by the first picture's header."""
    for options, taken in (({}, 60 * 16 * 16 * 3), ({"channels": 1}, 60 * 16 * 16)):
        for free, kind in ((4 * taken, np.ndarray), (4 * taken - 1, Rows)):
            monkeypatch.setattr(pictures, "memory_available", lambda free=free: free)
            assert type(load(folder, **options).images) is kind
    assert len(list(cache.glob("*.npy"))) == 2
    monkeypatch.setattr(pictures, "memory_available", lambda: 2**40)
    assert isinstance(load(folder).images, Rows)  # faster than to decode again


class Told(mmap.mmap):
    """Has in `bytes` which the system was told to read."""

    def madvise(self, option, start, length):
        assert option == mmap.MADV_WILLNEED and start % mmap.PAGESIZE == 0
        self.bytes = getattr(self, "bytes", set()) | set(range(start, start + length))


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="the system is not told what will be read")
def test_the_system_is_told_which_pictures_will_be_read():
    with Told(-1, 5 * mmap.PAGESIZE) as mapping:
        size = mmap.PAGESIZE // 4
        Rows(mapping, 100, (16, 4, size // 4, 1))[[2, 13]]
        first, second = (range(100 + row * size, 100 + (row + 1) * size) for row in (2, 13))
        assert mapping.bytes >= {*first, *second}
        assert mapping.bytes <= {*range(first.stop), *range(3 * mmap.PAGESIZE, second.stop)}


def test_pictures_are_read_where_the_system_cannot_be_told():
    content = np.arange(100, dtype=np.uint8)
    rows = Rows(bytearray(content), 4, (8, 2, 3, 2))
    np.testing.assert_array_equal(rows[[5, 1]], content[4:].reshape(8, 2, 3, 2)[[5, 1]])


def test_sizes_that_differ_are_refused_and_leave_nothing(cache, folder):
    refused("are not squares of one size .*: give an image size", folder, skip_bad=True, on_disk=True)
    refused("cannot read image .*/b/007.jpg", folder / "b", image_size=16, on_disk=True)
    (folder / "none").mkdir()
    (folder / "none" / "1.png").write_text("no picture")
    refused("none of the 1 images in .* can be read", folder / "none", skip_bad=True, on_disk=True)
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_a_later_start_decodes_nothing(cache, folder, reads):
    first = load(folder, on_disk=True)
    assert len(reads) == 60
    again = load(folder, on_disk=True)
    assert len(reads) == 60 and again.notes == first.notes and again.skipped == first.skipped
    np.testing.assert_array_equal(np.asarray(again.images), np.asarray(first.images))


@pytest.mark.parametrize("change", ["pixels", "time", "more", "fewer", "renamed", "swapped"])
def test_a_picture_that_has_changed_is_noticed(cache, folder, reads, change):
    """All are decoded again, and the file takes the place of the one before, which others may still read."""
    same_size = [folder / "a" / name for name in ("one.bmp", "two.bmp")]
    for number, path in enumerate(same_size if change == "swapped" else []):  # as an archive leaves them
        Image.new("RGB", (16, 16), (90 * number, 0, 0)).save(path)
        os.utime(path, (315532800, 315532800))
    before = load(folder, on_disk=True)
    kept = np.asarray(before.images)
    reads.clear()
    file = folder / "a" / "000.png"
    if change == "pixels":
        Image.fromarray(picture(30, 30, 3)[::-1].copy()).save(file)
    elif change == "time":
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    elif change == "more":
        shutil.copy(file, folder / "a" / "new.png")
    elif change == "fewer":
        file.unlink()
    elif change == "renamed":
        file.rename(folder / "a" / "z.png")
    else:
        same_size[0].rename(folder / "kept")
        same_size[1].rename(same_size[0])
        (folder / "kept").rename(same_size[1])
    after = load(folder, on_disk=True)
    assert len(reads) == 60 + {"more": 1, "fewer": -1, "swapped": 2}.get(change, 0)
    assert len(list(cache.glob("*.npy"))) == 1
    shutil.rmtree(cache)
    same(after, load(folder))
    np.testing.assert_array_equal(np.asarray(before.images), kept)


def test_sizes_that_a_configuration_fills_in_name_the_same_file(cache, tmp_path, reads):
    """A first start asks for no size and no channels; the checkpoint's configuration has both."""
    for number in range(3):
        Image.new("RGB", (16, 16), (90 * number, 0, 9)).save(tmp_path / f"{number}.png")
    first = load(tmp_path, image_size=None, on_disk=True)
    assert len(reads) == 3
    again = load(tmp_path, image_size=16, channels=3, on_disk=True)
    assert len(reads) == 3 and len(list(cache.glob("*.npy"))) == 1
    np.testing.assert_array_equal(np.asarray(again.images), np.asarray(first.images))


def test_without_a_size_pictures_of_several_are_refused_though_they_lie_decoded(cache, tmp_path):
    for number in (16, 16, 20):
        Image.new("RGB", (number, number)).save(tmp_path / f"{number}.png")
    load(tmp_path, image_size=16, on_disk=True)
    refused("not squares of one size .* give an image size", tmp_path, on_disk=True)


def test_what_is_no_file_in_the_file_s_place_is_not_waited_for(cache, tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    load(tmp_path, on_disk=True)
    (path,) = cache.glob("*.npy")
    path.unlink()
    os.mkfifo(path)
    assert len(load(tmp_path)) == 1


def damaged(content, how):
    content = bytearray(content)
    header = 128
    place = {"magic": 0, "header": 60, "first pixel": header, "last pixel": header + 54 * 16 * 16 * 3 - 1,
             "facts": header + 54 * 16 * 16 * 3 + 20, "digest": len(content) - 1}.get(how)
    if place is not None:
        content[place] ^= 1
    return {"truncated": content[:-1], "longer": content + b"0", "empty": b"", "half": content[: len(content) // 2],
            "no facts": content[: header + 54 * 16 * 16 * 3]}.get(how, content)


@pytest.mark.parametrize("how", ["magic", "header", "first pixel", "last pixel", "facts", "digest", "truncated",
                                 "longer", "empty", "half", "no facts"])
def test_a_damaged_file_is_made_anew(cache, folder, reads, how):
    resident = load(folder)
    load(folder, on_disk=True)
    [path] = cache.glob("*.npy")
    content = path.read_bytes()
    path.write_bytes(damaged(content, how))
    reads.clear()
    same(load(folder, on_disk=True), resident)
    assert len(reads) == 60 and path.read_bytes() == content


def test_of_large_files_as_much_is_checked_as_a_fingerprint_reads(cache, folder, monkeypatch, reads):
    monkeypatch.setattr("cudiff.data.dataset.DIGESTED", 2 * 16 * 16 * 3)
    load(folder, on_disk=True)
    [path] = cache.glob("*.npy")
    content = bytearray(path.read_bytes())
    for place, noticed in ((128 + 20 * 16 * 16 * 3, False), (128, True)):  # the first and the last image
        content[place] ^= 1
        path.write_bytes(content)
        reads.clear()
        load(folder, on_disk=True)
        assert bool(reads) == noticed


def test_a_disk_without_room(cache, folder, monkeypatch):
    """Known before a picture is decoded; or while they are written, when others have taken it."""
    needed = 60 * 16 * 16 * 3
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    refused("60 images of 16x16 would take 0.0 GiB in .*/pictures, and 0.0 GiB are free there: make room .*"
            "CUDIFF_CACHE_DIR to another disk, or give a smaller image size", folder, image_size=16, on_disk=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    load(folder, on_disk=True)
    os.utime(folder / "a" / "000.png", ns=(0, 0))
    monkeypatch.setattr(shutil, "disk_usage",
                        lambda path: usage._replace(free=0 if any(path.glob("*.npy")) else needed))
    load(folder, on_disk=True)  # the file of what the folder was before gives its room
    code = f"""
import resource, sys
from cudiff.data import load_dataset
from cudiff.errors import CudiffError
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    load_dataset({str(folder)!r}, image_size=17, skip_bad=True, on_disk=True)
except CudiffError as error:
    print(error)
"""
    out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert out == (f"cannot keep decoded pictures in {cache} (File too large): make room there, or point "
                   "CUDIFF_CACHE_DIR to a folder that can be written\n")
    assert len(list(cache.glob("*.npy"))) == 1 and not list(cache.glob(".*.tmp"))


def test_a_cache_that_cannot_be_written(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "file"))
    refused(r"cannot keep decoded pictures in .*/file/pictures \(Not a directory\): make room there, or point "
            "CUDIFF_CACHE_DIR", folder, image_size=16, on_disk=True)


def test_decoding_that_is_interrupted_leaves_nothing(cache, folder, monkeypatch):
    read = pictures._read_picture

    def interrupted(file, size):
        if file.name == "031.jpg":
            raise KeyboardInterrupt
        return read(file, size)

    with monkeypatch.context() as patch:
        patch.setattr(pictures, "_read_picture", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(folder, on_disk=True)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    resident = load(folder)
    [lock] = cache.iterdir()
    lock.with_name(f".{lock.stem}.npy.tmp").write_bytes(b"of a process that was killed")
    same(load(folder, on_disk=True), resident)
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".npy"]


def test_of_two_processes_one_decodes(cache, folder):
    code = f"""
import time
from cudiff.data import load_dataset, pictures
read, seen = pictures._read_picture, []
pictures._read_picture = lambda file, size: (seen.append(file), time.sleep(0.02), read(file, size))[2]
data = load_dataset({str(folder)!r}, image_size=16, skip_bad=True, on_disk=True)
print(len(seen), data.fingerprint()["pixels"])
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE)
                 for _ in range(2)]
    counts, digests = zip(*(process.communicate()[0].split() for process in processes), strict=True)
    assert sorted(counts) == ["0", "60"]
    assert set(digests) == {load(folder).fingerprint()["pixels"]} and not list(cache.glob(".*.tmp"))


@pytest.mark.parametrize("residency", ["auto", "device", "host", "disk"])
@pytest.mark.parametrize("accumulate, classes", [(1, 2), (2, 0)])
def test_batches_are_those_of_data_in_memory(cache, folder, residency, accumulate, classes):
    """Of what is left beside the images held out, over more than an epoch; on the CPU a thread draws them ahead, unless
    told otherwise."""
    config = Config(batch_size=8, accumulate=accumulate, image_size=16, num_classes=classes, flip=True)
    resident, stored = load(folder), load(folder, on_disk=True)
    parts = [data.split(10, seed=3) for data in (resident, stored)]
    np.testing.assert_array_equal(*(np.asarray(held_out.images) for _, held_out in parts))
    loaders = [Loader(training, config.replace(residency=how), "cpu", first=2)
               for (training, _), how in zip(parts, ("device", residency), strict=True)]
    assert loaders[1].resident == (residency == "device")
    for update in range(2, 9):
        arrays = loaders[1].next()
        for index in range(accumulate):
            expected, found = (loader.batch(Tensor(np.int32([update])), arrays, index) for loader in loaders)
            np.testing.assert_array_equal(found[0].numpy(), expected[0].numpy())
            assert (found[1] is None) == (classes == 0)
            assert found[1] is None or found[1].numpy().tolist() == expected[1].numpy().tolist()


def test_on_a_gpu_a_file_is_copied_in_parts(cache, folder, host_of, monkeypatch):
    """The host's memory may not hold it. Where it takes too much of the GPU's it is streamed."""
    host_of(True)
    resident, stored = load(folder), load(folder, on_disk=True).subset(np.arange(54)[::-1])
    copied = []
    copy_into = loader_module.copy_into
    monkeypatch.setattr(loader_module, "copy_into", lambda out, part: copied.append(len(part)) or copy_into(out, part))
    monkeypatch.setattr(loader_module, "UPLOAD", 20 * 16 * 16 * 3)
    loader = Loader(stored, Config(batch_size=8, image_size=16), "cuda")
    assert loader.resident and copied == [20, 20, 14]
    np.testing.assert_array_equal(loader._images.numpy(), resident.images[::-1])
    monkeypatch.setattr(loader_module, "Staging", lambda device: None)
    monkeypatch.setattr(loader_module, "memory_total", lambda device: 4 * stored.images.nbytes)
    assert Loader(stored, Config(batch_size=8, image_size=16), "cuda")._images is stored.images


def test_a_classifier_is_the_same(cache, folder):
    resident, stored = load(folder), load(folder, on_disk=True)
    assert evaluate._digest(stored, stored, {}) == evaluate._digest(resident, resident, {})
    classifier = evaluate.train_classifier(resident, resident, "cpu", epochs=1, cache=cache)
    assert classifier.accuracy(stored) == classifier.accuracy(resident)


def test_a_data_set_in_a_file_is_one_as_any(cache, folder, monkeypatch):
    resident, stored = load(folder), load(folder, on_disk=True)
    assert len(stored) == 54 and repr(stored) == repr(resident) and stored._repr_html_() == resident._repr_html_()
    some = [5, 3, 3]
    same(stored.subset(some), resident.subset(some))
    same(stored.only(["b"]), resident.only(["b"]))
    for index in (7, -1, slice(3, 9), np.array([2, 2])):
        np.testing.assert_array_equal(stored.images[index], resident.images[index])
    np.testing.assert_array_equal(list(stored.images), resident.images)
    assert stored.images.dtype == np.uint8 and stored.images.ndim == 4
    stored.images[3][...] = 0  # a copy
    np.testing.assert_array_equal(stored.images[3], resident.images[3])
    monkeypatch.setattr(cudiff.memory, "memory_available", lambda: stored.images.nbytes - 1)
    with pytest.raises(CudiffError, match=r"54 images of 16x16 in memory would take .*: take some of them, by subset"):
        Dataset(np.asarray(stored.images))


def test_a_run_is_the_same_and_goes_on_from_either(cache, folder, tmp_path):
    config = TINY.replace(data=str(folder), image_size=16, channels=3, num_classes=2, validation=5, flip=True, steps=6)
    resident, stored = load(folder), load(folder, on_disk=True)
    runs = [Trainer(config, data, tmp_path / name) for data, name in ((resident, "a"), (stored, "b"))]
    for run in runs:
        run.run()
    assert_same_state(*runs)
    assert runs[0].validation_loss(runs[0].held_out) == runs[1].validation_loss(runs[1].held_out)
    for data, name in ((stored, "a"), (resident, "b")):
        checkpoint = load_checkpoint(runs[0].save_path.parent.parent / name / runs[0].save_path.name)
        longer = Trainer(config.replace(steps=8), data, tmp_path / name, checkpoint)
        longer.run()
    other = load(folder, on_disk=True).subset(np.arange(53))
    with pytest.raises(CudiffError, match=r"not the data that the run was trained on \(54 images are now 53"):
        Trainer(config.replace(steps=9), other, tmp_path / "b", load_checkpoint(longer.save_path))


def test_the_command_line_asks_for_it(cache, folder, tmp_path, capsys):
    flags = ["train", "--data", str(folder), "--image-size", "16", "--skip-bad", "--residency", "disk", "--steps", "1",
             "--model-channels", "32", "--channel-mult", "1", "--num-res-blocks", "1", "--batch-size", "2",
             "--sample-every", "0", "--folder", str(tmp_path / "run")]
    assert main(flags) == 0 and "the pictures lie decoded in" in capsys.readouterr().out
    assert main([*flags, "--data", "digits", "--folder", str(tmp_path / "other")]) == 2
    assert "digits is no folder of pictures, and only these are kept on a disk" in capsys.readouterr().err
