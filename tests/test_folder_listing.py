"""Which entries of a folder are pictures: files and links to files, and nothing that is read for ever."""

import os
from pathlib import Path

import pytest

from cudiff.cli import main
from cudiff.data import load_dataset
from cudiff.data.folder import list_folder, some
from cudiff.errors import CudiffError
from tests.test_data import refused
from tests.test_readers import save


def test_links_to_pictures_are_pictures_and_pipes_are_not(tmp_path):
    root = tmp_path / "root"
    save(root / "a.png")
    save(tmp_path / "elsewhere.png")
    (root / "b.png").symlink_to(tmp_path / "elsewhere.png")
    (root / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (root / ".hidden.png").symlink_to(tmp_path / "elsewhere.png")
    os.mkfifo(root / "c.png")
    (root / "d.png").mkdir()
    (root / "e.PNG").symlink_to(tmp_path / "elsewhere.png")
    (root / "f.txt").touch()
    found = list_folder(root)
    assert found.pictures == [Path("a.png"), Path("b.png"), Path("e.PNG")] and found.folders == ["d.png"]
    assert found.unread == [] and found.others == ["f.txt"] and found.repeated == [] and found.closed == []
    assert len(load_dataset(root)) == 3


def test_the_pictures_of_runs_are_no_data(tmp_path, monkeypatch, capsys):
    """`--data .` makes its run below the data: it had been a class of the next one, and could not be resumed."""
    for name in ("ant/a.png", "ant/b.png", "bee/c.png"):
        save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    words = ["--model-channels", "8", "--channel-mult", "1", "--num-res-blocks", "1", "--batch-size", "2", "--samples",
             "1", "--sample-steps", "1", "--device", "cpu"]
    assert main(["train", "--data", ".", "--steps", "1", *words]) == 0
    run = f"runs/{tmp_path.name}"
    assert Path(run, "samples-00000001.png").exists() and main(["train", "--resume", run, "--steps", "2"]) == 0
    assert f"folders of runs are left out: 1 ({run})\n" in capsys.readouterr().out
    assert load_dataset(".").class_names == ("ant", "bee") and list_folder(tmp_path).runs == [run]
    assert main(["train", "--data", "ant", "--steps", "1", *words, "--folder", "bee/../ant"]) == 2
    assert "is the data's folder, and a run's pictures would be among them: choose an" in capsys.readouterr().err


def test_files_without_a_pictures_suffix_are_counted(tmp_path):
    save(tmp_path / "a.png")
    for name in ("img3", "img4.png_", "img5.jpg.1", "q.qoi", "q.pcx", ".hidden"):
        (tmp_path / name).touch()
    assert load_dataset(tmp_path).notes == (
        "pictures of formats that are not read are left out: 1 .pcx, 1 .qoi, first q.pcx; convert them to PNG or JPEG",
        "files without a picture's suffix are left out: 3 (img3, img4.png_, img5.jpg.1); where these are pictures, end "
        "their names in .png or .jpg",
    )


@pytest.mark.parametrize("target", ["/", "..", "../..", "."])
def test_links_to_folders_that_hold_this_one_are_left_out(tmp_path, target):
    root = tmp_path / "photos"
    save(tmp_path / "other" / "a.png")
    save(root / "mine" / "b.png")
    (root / "far").symlink_to(target)
    (root / "other").symlink_to("../other")
    found = list_folder(root)
    assert list(map(str, found.pictures)) == ["mine/b.png", "other/a.png"] and found.repeated == ["far"]
    assert found.notes() == ["links to folders that are read already, or that hold this one, are left out: 1 (far)"]


def test_links_that_lead_nowhere_are_told(tmp_path):
    save(tmp_path / "a" / "b.png")
    for name in ("c.png", "a/d", "e"):
        (tmp_path / name).symlink_to("gone")
    (tmp_path / "f.png").symlink_to("f.png")
    (tmp_path / "g.png").symlink_to("a/b.png")
    found = list_folder(tmp_path)
    assert list(map(str, found.pictures)) == ["a/b.png", "g.png"] and found.broken == ["a/d", "c.png", "e", "f.png"]
    assert found.notes() == ["links that lead nowhere are left out: 4 (a/d, c.png, e, ...); make them anew"]
    assert load_dataset(tmp_path).notes[0] == found.notes()[0]


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="no /proc here")
def test_the_kernels_files_are_no_pictures(tmp_path):
    save(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to("/proc/uptime")
    (tmp_path / "c").symlink_to("/proc/self")
    assert list_folder(tmp_path).pictures == [Path("a.png")] and list_folder(tmp_path).folders == []
    assert list_folder(Path("/proc/self")).pictures == []


def test_three_names_and_how_many_there_are():
    assert some(["a"]) == "1 (a)" and some(["a", "b", "c"]) == "3 (a, b, c)"
    assert some(list("abcd")) == "4 (a, b, c, ...)" and some(["a"] * 1200) == "1,200 (a, a, a, ...)"


def test_folders_are_those_right_in_the_folder(tmp_path):
    for place in ("b/x/y", "a", "b/z"):
        save(tmp_path / place / "p.png")
    found = list_folder(tmp_path)
    assert found.folders == ["a", "b"]
    assert list(map(str, found.pictures)) == ["a/p.png", "b/x/y/p.png", "b/z/p.png"]


def test_a_part_that_data_does_not_have_is_refused(tmp_path):
    save(tmp_path / "a.png")
    for spec in (tmp_path, "digits", "mnist"):
        refused("unknown part 'validation': use train or test", spec, part="validation")
    refused("has no test part: hold some of it out, or name a second data set", tmp_path, part="test")
    for channels in (0, 2, 4):
        refused(f"images cannot have {channels} channels", tmp_path, channels=channels)
    refused("image size 0 is too small: use 8 or more", tmp_path, image_size=0)
    assert load_dataset(tmp_path, image_size=1, channels=1).images.shape == (1, 1, 1, 1)
    refused("count says how many digits to draw", tmp_path, count=3)
    assert len(load_dataset("digits", count=1)) == 1


def test_as_many_files_as_are_allowed(tmp_path, monkeypatch):
    """All entries count, in every folder."""
    for place in ("a.png", "b/c.png"):
        save(tmp_path / place)
    monkeypatch.setattr("cudiff.data.folder.MOST_FILES", 3)
    assert len(list_folder(tmp_path).pictures) == 2
    (tmp_path / "d.txt").touch()
    with pytest.raises(CudiffError, match="holds more than 3 files: name a smaller folder"):
        list_folder(tmp_path)
