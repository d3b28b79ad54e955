"""Data from strangers: what is crafted or damaged is refused in one line, at once, and what is left out is said."""

import gzip
import io
import os
import resource
import struct
import zipfile

import numpy as np
import pytest
from PIL import Image

import cudiff.data.folder as folder_module
import cudiff.data.pictures as pictures
import cudiff.memory
from cudiff.data import load_dataset
from cudiff.errors import CudiffError
from cudiff.files import opened
from tests.test_data import idx_bytes, picture, refused, unetcu_bytes


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def save(path, *shape, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(*(shape or (8, 8, 3)))).save(path, **options)


# --- pictures ------------------------------------------------------------------------------------------------------


def test_postscript_never_reaches_ghostscript(tmp_path, monkeypatch):
    mark = tmp_path / "ran"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(content)
    import PIL.EpsImagePlugin

    monkeypatch.setattr(PIL.EpsImagePlugin, "gs_binary", None)
    refused("a.png .not an image", tmp_path / "images")
    assert not mark.exists()
    with pytest.raises(OSError):
        Image.open(io.BytesIO(content)).load()
    assert mark.exists()  # the trap works


@pytest.mark.parametrize("kind", ["ICO", "TGA", "PCX", "SGI", "ICNS", "JPEG2000"])
def test_only_the_formats_documented_are_decoded(tmp_path, kind):
    try:
        Image.new("RGB", (16, 16)).save(tmp_path / "a.png", kind)
    except (OSError, KeyError):
        pytest.skip(f"this Pillow cannot write {kind}")
    refused("not an image", tmp_path)


def test_a_picture_of_many_pixels_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    save(tmp_path / "a.png", 8, 9, 3)
    monkeypatch.setattr(pictures, "MOST_PIXELS", 72)
    assert load_dataset(tmp_path, image_size=8).images.shape == (1, 8, 8, 3)
    monkeypatch.setattr(pictures, "MOST_PIXELS", 71)
    refused("9x8 pixels are more than 71: make it smaller", tmp_path, image_size=8)


@pytest.mark.parametrize("side", [8200, 13000, 60000])
def test_pixels_announced_take_no_memory(tmp_path, side):
    """A header alone; Pillow warns from 89 megapixels and refuses from 179."""
    image = io.BytesIO()
    Image.new("1", (8, 8)).save(image, "BMP")
    content = bytearray(image.getvalue())
    content[18:26] = struct.pack("<ii", side, side)
    (tmp_path / "a.bmp").write_bytes(content)
    before = peak()
    refused("pixels", tmp_path)
    assert peak() - before < 64


def test_a_jpeg_of_thousands_of_scans(tmp_path):
    """Its last scan again and again: 5 kB more are minutes for a large picture."""
    save(tmp_path / "a.jpg", 64, 64, 3, progressive=True)
    content = (tmp_path / "a.jpg").read_bytes()
    assert len(load_dataset(tmp_path)) == 1
    scan = content[content.rindex(b"\xff\xda") : -2]
    (tmp_path / "a.jpg").write_bytes(content[:-2] + 100 * scan + b"\xff\xd9")
    refused("progressive JPEG of more than 100 scans", tmp_path)


def test_digits_must_fit(monkeypatch):
    monkeypatch.setattr(cudiff.memory, "memory_available", lambda: 299_999)
    refused("digits of 100x100 would take", "digits", count=100, image_size=100)


def test_what_the_system_refuses_is_told(tmp_path):
    refused("cannot read .* \\(File name too long\\): check its ", tmp_path / ("x" * 300))


def test_links_are_followed_once(tmp_path):
    """Two links a folder to the next one are 2**40 paths; the shortest one and a folder itself win."""
    root = tmp_path / "root"
    for i in range(40):
        save(tmp_path / "chain" / str(i) / "p.png")
        if i:
            for name in "ab":
                (tmp_path / "chain" / str(i - 1) / name).symlink_to(tmp_path / "chain" / str(i))
    save(root / "zebra" / "z.png")
    (root / "aardvark").symlink_to(root / "zebra")
    (root / "chain").symlink_to(tmp_path / "chain" / "0")
    (root / "chain2").symlink_to(root)
    data = load_dataset(root)
    assert len(data) == 41 and data.class_names == ("chain", "zebra")
    left = "links to folders that are read already, or that hold this one, are left out: 41 ("
    assert any(left in note for note in data.notes)


def test_a_class_is_not_lost_to_a_link_inside_another(tmp_path):
    save(tmp_path / "dog" / "d.png")
    save(tmp_path / "cat" / "c.png")
    (tmp_path / "cat" / "also").symlink_to(tmp_path / "dog")
    data = load_dataset(tmp_path)
    assert data.labels.tolist() == [0, 1] and data.class_names == ("cat", "dog")


def test_nothing_of_the_kernels_is_read_or_waited_for(tmp_path):
    save(tmp_path / "a" / "good.png")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    (tmp_path / "a" / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "a" / "kernel.png").symlink_to("/proc/version")
    (tmp_path / "a" / "nowhere.png").symlink_to("nowhere")
    (tmp_path / "a" / "itself.png").symlink_to("itself.png")
    for name in ("proc", "sys"):
        (tmp_path / "a" / name).symlink_to(f"/{name}")
    assert len(load_dataset(tmp_path)) == 1
    refused("holds no images", "/proc")
    os.mkfifo(tmp_path / "x.npz")
    refused("no regular file", tmp_path / "x.npz")


def test_nine_hundred_nested_folders(tmp_path):
    place = tmp_path
    for _ in range(900):
        place = place / "d"
    place.mkdir(parents=True)
    save(place / "p.png")
    data = load_dataset(tmp_path)
    assert len(data) == 1 and data.class_names == ("d",)


def test_a_folder_with_too_many_files(tmp_path, monkeypatch):
    save(tmp_path / "a" / "p.png")
    monkeypatch.setattr(folder_module, "MOST_FILES", 1)
    refused("more than 1 files: name a smaller folder", tmp_path)


def test_names_that_no_terminal_shows(tmp_path):
    bad = os.fsdecode(b"li\nne\x1b\xff")
    (tmp_path / bad).mkdir()
    (tmp_path / bad / "text\n.png").write_text("no picture")
    refused(r"li\\nne\\x1b\\udcff/text\\n.png .not an image", tmp_path)
    save(tmp_path / bad / "good.png")
    data = load_dataset(tmp_path, skip_bad=True)
    assert data.class_names == (r"li\nne\x1b\udcff",) and data.name.isprintable()
    save(tmp_path / "stray.png")
    data = load_dataset(tmp_path / bad, skip_bad=True)
    assert data.name == r"li\nne\x1b\udcff"


def test_what_is_left_out_is_said(tmp_path):
    for name in ("cat/a.png", "cat/b.png", "dog/a.png"):
        save(tmp_path / name)
    assert load_dataset(tmp_path).notes == ()
    for name in ("cat/b.HEIC", "cat/c.avif", "dog/b.heic"):
        (tmp_path / name).write_bytes(b"?")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.png").write_bytes(b"?")
    data = load_dataset(tmp_path, skip_bad=True)
    assert data.notes == (
        "pictures of formats that are not read are left out: 1 .avif, 2 .heic, first cat/b.HEIC; "
        "convert them to PNG or JPEG",
        "folders without a picture are no classes: 1 (empty)",
        "classes of which no picture can be read: 1 (bad); repair the pictures, or move the folders elsewhere",
    )
    assert data.class_names == ("bad", "cat", "dog") and data.labels.tolist() == [1, 1, 2]
    for i in range(4):
        save(tmp_path / f"{i}.png")
    data = load_dataset(tmp_path, skip_bad=True)
    assert data.labels is None and len(data.notes) == 2
    assert data.notes[1] == (
        "pictures lie beside the 3 class folders, so no image has a label: 4 (0.png, 1.png, 2.png, ...); "
        "move them into a class folder or elsewhere to have classes"
    )


def test_an_empty_folder_says_what_it_holds_instead(tmp_path):
    (tmp_path / "a.heic").write_bytes(b"?")
    refused("holds no images.*1 .heic, first a.heic; convert them", tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="everything opens for root")
def test_closed_folders_are_said(tmp_path):
    save(tmp_path / "a.png")
    (tmp_path / "closed").mkdir(mode=0)
    assert "cannot be opened are left out: 1 (closed)" in load_dataset(tmp_path).notes[0]


def test_sixteen_bits_keep_the_upper_byte(tmp_path):
    """Values whose two bytes differ, so that the lower byte, or a scaling, is told from the upper."""
    values = np.array([[0x00FF, 0x1234], [0xAB01, 0xFE80]], np.uint16).repeat(4, 0).repeat(4, 1)
    Image.fromarray(values).save(tmp_path / "a.png")
    Image.fromarray(values).save(tmp_path / "b.tif")
    for image in load_dataset(tmp_path).images:
        np.testing.assert_array_equal(image[..., 0], values >> 8)


@pytest.mark.parametrize("height, width", [(9, 4), (4, 9), (8, 4), (7, 4), (4, 7)])
def test_the_central_square(tmp_path, height, width):
    """Of an odd rest the smaller half is cut before the square."""
    pixels = np.arange(height * width, dtype=np.uint8).reshape(height, width)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    top, left = (height - 4) // 2, (width - 4) // 2
    expected = pixels[top : top + 4, left : left + 4]
    np.testing.assert_array_equal(load_dataset(tmp_path, image_size=4).images[0, ..., 0], expected)
    np.savez(tmp_path / "a.npz", images=pixels[None])
    np.testing.assert_array_equal(load_dataset(tmp_path / "a.npz", image_size=4).images[0, ..., 0], expected)


def test_a_picture_in_strips_is_the_same(tmp_path, monkeypatch):
    for mode in ("RGB", "RGBA", "P", "1", "CMYK"):
        Image.fromarray(picture(30, 20, 4)).convert("RGB").convert(mode).save(tmp_path / f"{mode}.tif")
    Image.fromarray(picture(30, 20, 4)).save(tmp_path / "clear.png")
    whole = load_dataset(tmp_path, image_size=16).images
    monkeypatch.setattr(pictures, "CROP_PIXELS", 47)
    np.testing.assert_array_equal(load_dataset(tmp_path, image_size=16).images, whole)


# --- IDX -----------------------------------------------------------------------------------------------------------


def write_idx(folder, images, labels, packed=gzip.compress):
    (folder / "train-images-idx3-ubyte.gz").write_bytes(packed(images))
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)


def test_idx_labels_with_gaps(tmp_path):
    write_idx(tmp_path, idx_bytes(picture(4, 8, 8)), idx_bytes(np.array([5, 0, 0, 5], np.uint8)))
    data = load_dataset(tmp_path)
    assert data.num_classes == 6 and data.labels.tolist() == [5, 0, 0, 5]


def test_crafted_idx(tmp_path):
    images, labels = idx_bytes(picture(4, 8, 8)), idx_bytes(np.zeros(4, np.uint8))

    def header(*shape):
        return struct.pack(f">BBBB{len(shape)}i", 0, 0, 8, len(shape), *shape)

    whole = gzip.compress(images)
    for content, message in [
        (header(65536, 65536, 65536), "truncated"),  # 2**48
        (header(2**30, 2**30, 16) + b"x", "truncated"),  # 2**64, which wraps around to 0
        (header(-4, -8, 8) + bytes(256), "damaged"),
        (header(4, 0, 0), "0x0 pixels"),
        (header(4, 0, 8), "0x8 pixels"),
        (images + b"x", "more bytes"),
        (images[:-1], "fewer bytes"),
        (header(4), "1 dimensions|fewer"),
    ]:
        write_idx(tmp_path, content, labels)
        refused(message, tmp_path)
    for packed, message in [
        (whole + whole, "more bytes"),
        (whole[:-8] + bytes(4) + whole[-4:], "CRC"),
        (whole[:-4] + bytes(4), "Incorrect length"),
        (whole + b"garbage", "cannot read|gzip"),
    ]:
        write_idx(tmp_path, b"", labels, lambda _, packed=packed: packed)
        refused(message, tmp_path)
    write_idx(tmp_path, b"", labels, lambda _: gzip.compress(images[:100]) + gzip.compress(images[100:]) + bytes(9))
    assert len(load_dataset(tmp_path)) == 4  # several members are one file


def test_a_small_gz_that_inflates_to_much(tmp_path):
    """300 MB of zeros in 300 kB, both with an honest header and with one that says little."""
    labels = idx_bytes(np.zeros(4, np.uint8))
    for shape, message in [((300, 1000, 1000), "truncated"), ((4, 8, 8), "more bytes")]:
        header = struct.pack(">BBBB3i", 0, 0, 8, 3, *shape)
        stream = io.BytesIO()
        with gzip.open(stream, "wb", 9) as file:
            file.write(header)
            for _ in range(300):
                file.write(bytes(10**6))
        write_idx(tmp_path, b"", labels, lambda _, stream=stream: stream.getvalue())
        before = peak()
        refused(message, tmp_path)
        assert peak() - before < 64


# --- .npz and .bin -------------------------------------------------------------------------------------------------


def npy(array=None, header=None, version=1):
    if header is None:
        header = repr({"descr": array.dtype.str, "fortran_order": False, "shape": array.shape})
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + (b"" if array is None else array.tobytes())


def write_npz(path, compression=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_crafted_npz(tmp_path):
    file, images = tmp_path / "a.npz", picture(4, 8, 8, 3)
    whole = npy(images)
    plain = "{'descr': '|u1', 'fortran_order': False, 'shape': (%s), }"
    for content in [
        npy(header=plain % "16777216, 2048, 2048, 3"),  # 112 TiB and more
        npy(header=plain % ("9" * 18 + ", " + "9" * 18)),
        npy(header="(" * 5000 + "1"),
        npy(header="-" * 9000 + "1"),
        npy(header="{'descr': '|u1', 'fortran_order': False, 'shape': (4,", version=2),
        npy(header="{'descr': '<f3', 'fortran_order': False, 'shape': (4,)}"),
        npy(header="{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (4,)}"),
        whole[:7] + b"\0" + struct.pack("<I", 2**31),
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1),
        whole[:-1], whole + b"x", whole[:9], b"",
    ]:  # fmt: skip
        for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            write_npz(file, compression, images=content)
            refused("cannot read .*numpy.savez", file)
    for compression in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        write_npz(file, compression, images=whole)
        refused("otherwise than by deflate", file)
    write_npz(file, images=whole)
    encrypted = bytearray(file.read_bytes())
    for signature, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        encrypted[encrypted.index(signature) + place] |= 1
    file.write_bytes(encrypted)
    refused("encrypted", file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("images.npy", whole)
        archive.writestr("images.npy", whole)
    refused("two arrays are called images", file)
    for shape, message in [((), r"shape \(\)"), ((3,), "shape"), ((1, 2, 2, 3, 1), "shape"), ((4, 0, 8), "no images")]:
        np.savez(file, images=np.zeros(shape, np.uint8))
        refused(message, file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x" * 60000, b"")
        archive.writestr("y" * 60000, b"")
    refused("^.{,500}$", file)
    content = file.read_bytes().replace(b"x" * 60000, b"images".ljust(60000, b"x"), 1)
    file.write_bytes(content.replace(b"y" * 60000, b"images.npy".ljust(60000, b"\0")))
    refused("^.{,600}$", file)  # its names disagree
    with zipfile.ZipFile(file, "w") as archive:
        for i in range(20000):
            archive.writestr(f"{i}.npy", b"")
    refused("directory is too long", file)


def test_a_deflate_bomb_with_honest_sizes(tmp_path):
    file = tmp_path / "a.npz"
    np.savez_compressed(file, images=np.zeros((100, 1000, 1000), np.uint8))
    before = peak()
    refused("would inflate to 100,000,000 bytes", file)
    assert peak() - before < 64
    np.savez_compressed(file, images=np.zeros((60, 1000, 1000), np.uint8))
    assert len(load_dataset(file)) == 60


def test_npz_of_every_order_and_labels_of_any_integers(tmp_path):
    file, images = tmp_path / "a.npz", picture(4, 8, 8, 3)
    for dtype in (">i8", "<i8", "u1", ">u2", "<u8", "i1"):
        np.savez_compressed(file, images=np.asfortranarray(images), labels=np.array([0, 2, 1, 0], dtype))
        data = load_dataset(file)
        np.testing.assert_array_equal(data.images, images)
        assert data.labels.tolist() == [0, 2, 1, 0] and data.labels.dtype == np.int32 and data.num_classes == 3
    for labels, message in [
        (np.array([0, 1, 2, 10**9]), "run to 1000000000: number the classes from 0"),
        (np.array([0, 1, 2, 2**64 - 1], np.uint64), "number the classes"),
        (np.array([0, 1, 2, -1]), "labels begin at -1"),
        (np.zeros((4, 1), int), "one integer for each"),
        (np.zeros(5, int), "one integer for each"),
        (np.zeros(4, bool), "one integer for each"),
    ]:
        np.savez(file, images=images, labels=labels)
        refused(message, file)


def test_crafted_bin(tmp_path):
    file = tmp_path / "a.bin"
    whole = unetcu_bytes(picture(4, 8, 8, 3))
    for numbers, message in [
        ((2**31 - 1,) * 4, "truncated or damaged"),
        ((2**30, 2**30, 2**4, 1), "truncated or damaged"),
        ((-4, -3, 8, 8), "truncated or damaged"),
        ((4, 0, 8, 8), "truncated or damaged"),
        ((4, 2, 8, 12), "2 channels"),
    ]:
        file.write_bytes(whole[:4] + struct.pack("<4i", *numbers) + whole[20:])
        refused(message, file)
    for value in (np.nan, np.inf, -1.01):
        content = bytearray(whole)
        content[1024 + 4 * 192 : 1024 + 4 * 193] = np.float32(value).tobytes()
        file.write_bytes(content)
        refused("image 1 leaves", file)


def test_only_a_nul_in_a_name_is_a_path_that_cannot_be_read(tmp_path):
    with pytest.raises(CudiffError, match=r"cannot read a\\x00b \(.*null.*\): check the path"), opened("a\0b"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^what its reader says$"), opened(tmp_path / "file"):
        raise ValueError("what its reader says")
    with pytest.raises(CudiffError, match="is not a file: check the path"), opened(tmp_path):
        pass
    with pytest.raises(CudiffError, match=r"cannot read .*none \(No such file"), opened(tmp_path / "none"):
        pass


def test_ten_million_files_are_as_many_as_are_listed():
    assert folder_module.MOST_FILES == 10_000_000
