"""MNIST and Fashion-MNIST: where they are looked for, downloads from a server on this machine, and what is refused."""

import dataclasses
import gzip
import hashlib
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from cudiff.backend import cache_folder
from cudiff.config import PRESETS
from cudiff.data import fashion_mnist, load_dataset, mnist, published
from cudiff.data.published import LARGEST, PUBLISHED
from tests.test_data import idx_bytes, picture, refused, shared_data

READ = {"mnist": mnist, "fashion-mnist": fashion_mnist}


class Mirror:
    """A server of small files. answers: by path, a body, or (status, body, Content-Length). asked: paths, in turn."""

    def __init__(self):
        self.answers, self.asked = {}, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
                answer = outer.answers.get(self.path, (404, b"", 0))
                status, body, length = answer if isinstance(answer, tuple) else (200, answer, len(answer))
                self.send_response(status)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, folder):
        return f"http://127.0.0.1:{self.server.server_port}/{folder}/"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(params=list(PUBLISHED))
def name(request):
    return request.param


@pytest.fixture
def mirror(name, tmp_path, monkeypatch):
    """Two mirrors of small files in place of the published ones, and an empty cache. Returns them, and the images."""
    images, labels = picture(20, 28, 28), (np.arange(20) % 10).astype(np.uint8)
    contents = {file: idx_bytes(images if "images" in file else labels) for file in PUBLISHED[name].sha256}
    mirror = Mirror()
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    small = dataclasses.replace(PUBLISHED[name], sha256=digests, mirrors=(mirror.url("one"), mirror.url("two")))
    monkeypatch.setitem(PUBLISHED, name, small)
    monkeypatch.setattr(published, "MNIST" if name == "mnist" else "FASHION_MNIST", small)
    for file, content in contents.items():
        mirror.answers[f"/one/{file}.gz"] = mirror.answers[f"/two/{file}.gz"] = gzip.compress(content)
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("CUDIFF_DATA", raising=False)
    yield mirror, images
    mirror.close()


def cached(name):
    folder = cache_folder(name)
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_it_is_downloaded_once(mirror, name):
    server, images = mirror
    data = load_dataset(name)
    np.testing.assert_array_equal(data.images[..., 0], images)
    assert data.class_names == PUBLISHED[name].class_names and data.num_classes == 10 and data.name == name
    files = ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
    assert cached(name) == files and server.asked == [f"/one/{file}" for file in files]
    padded = load_dataset(name, image_size=32).images
    assert padded.shape == (20, 32, 32, 1) and len(server.asked) == 2
    np.testing.assert_array_equal(padded[:, 2:-2, 2:-2, 0], images)


def test_it_is_looked_for_before_it_is_downloaded(mirror, name, tmp_path, monkeypatch):
    server, _ = mirror
    for folder in (tmp_path / "given", tmp_path / "data" / name):
        folder.mkdir(parents=True)
        for path, content in server.answers.items():
            (folder / path.rsplit("/")[-1]).write_bytes(content)
    assert len(READ[name]("test", folder=tmp_path / "given")) == 20
    monkeypatch.setenv("CUDIFF_DATA", str(tmp_path / "data"))
    assert len(load_dataset(name, part="test")) == 20
    file = tmp_path / "data" / name / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(idx_bytes(picture(20, 28, 28))))
    refused(f"not the published {PUBLISHED[name].title}", name)
    assert file.exists() and server.asked == []


@pytest.mark.parametrize("answer, message", [
    (gzip.compress(b"something else"), "wrong SHA-256"), (gzip.compress(b"something else")[:-9], "end-of-stream"),
    (b"<html>busy</html>", "gzip"), ((404, b"", 0), "404"), ((503, b"", 0), "503"),
    ((200, b"123", 456), "IncompleteRead|end-of-stream|gzip"),
], ids=["another", "cut", "page", "missing", "busy", "broken off"])
def test_a_failed_download_leaves_nothing(mirror, name, answer, message):
    server, _ = mirror
    server.answers = dict.fromkeys(server.answers, answer)
    title = PUBLISHED[name].title
    refused(f"cannot download {title} .*/one/.*({message}).*/two/.*({message}).*CUDIFF_DATA/{name}", name)
    assert cached(name) == [] and len(server.asked) == 2


def test_a_server_that_is_not_there_is_said(mirror, name):
    server, _ = mirror
    server.close()
    refused("cannot download .*refused.*or use digits", name)
    assert cached(name) == []


def test_the_second_mirror_is_tried(mirror, name):
    server, images = mirror
    server.answers["/one/train-images-idx3-ubyte.gz"] = b""
    np.testing.assert_array_equal(load_dataset(name).images[..., 0], images)
    assert len(server.asked) == 3


def test_an_interrupted_write_leaves_no_partial_file(mirror, name, monkeypatch):
    def fail_with(error):
        def fsync(file):
            raise error

        return fsync

    monkeypatch.setattr(os, "fsync", fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        load_dataset(name)
    assert cached(name) == []
    monkeypatch.setattr(os, "fsync", fail_with(OSError(28, "No space left on device")))
    refused(f"cannot keep {PUBLISHED[name].title} .*No space left.*CUDIFF_CACHE_DIR", name)
    assert cached(name) == []


def test_the_largest_file_is_that_of_60_000_images():
    """No more is taken from a mirror."""
    assert LARGEST == 16 + 60_000 * 28 * 28


def test_every_set_has_a_preset_of_its_name(name):
    config = PRESETS[name]
    assert (config.data, config.image_size, config.channels, config.num_classes) == (name, 28, 1, 10)


def test_real_fashion_mnist():
    shared_data("fashion-mnist")
    train, test = load_dataset("fashion-mnist"), load_dataset("fashion-mnist", part="test")
    assert train.images.shape == (60000, 28, 28, 1) and test.images.shape == (10000, 28, 28, 1)
    assert train.labels[:5].tolist() == [9, 0, 0, 3, 0] and test.labels[:5].tolist() == [9, 2, 1, 1, 6]
    assert np.bincount(train.labels).tolist() == [6000] * 10
