"""--gpus, --processes and --timeout: what is refused, what is started, and which GPU a process takes."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from cudiff import distributed, folder, processes
from cudiff.cli import main
from cudiff.distributed import launch
from cudiff.distributed.launch import LAUNCHER
from cudiff.errors import CudiffError


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, as far as the launcher looks, and what it is told to start."""
    started = []
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    monkeypatch.setattr(processes, "get_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(processes, "start", lambda *given: started.append(given) or 7)
    return started


TRAIN = ["train", "--preset", "digits", "--folder", "runs/none"]


def test_gpus_start_the_same_command_as_processes(gpus):
    assert main([*TRAIN, "--gpus", "2"]) == 7
    assert gpus == [(2, [sys.executable, "-m", "cudiff", *TRAIN, "--gpus", "2"])]


def test_who_starts_processes_keeps_no_weights(gpus, tmp_path, monkeypatch):
    assert main(["train", "--preset", "digits", "--image-size", "8", "--model-channels", "8", "--channel-mult", "1",
                 "--num-head-channels", "8", "--batch-size", "4", "--steps", "1", "--sample-every", "0",
                 "--device", "cpu", "--folder", str(tmp_path / "run")]) == 0
    read, load = [], folder.load_checkpoint

    def noted(*given):
        read.append(load(*given))
        return read[-1]

    monkeypatch.setattr(folder, "load_checkpoint", noted)
    for words in (["--resume", str(tmp_path / "run"), "--steps", "2"], ["--init", str(tmp_path / "run")]):
        assert main(["train", *words, "--folder", str(tmp_path / "new"), "--device", "cuda", "--gpus", "2"]) == 7
    assert len(gpus) == 2 and len(read) == 2 and not any(checkpoint.tensors for checkpoint in read)


def test_processes_of_a_cpu_start_the_same_command(gpus, monkeypatch):
    """The demo asks for two by itself where there are two cores."""
    words = [*TRAIN, "--processes", "3", "--device", "cpu"]
    assert main(words) == 7 and gpus.pop() == (3, [sys.executable, "-m", "cudiff", *words])
    made = []
    monkeypatch.setattr("cudiff.demo.demo", lambda *given: made.append(given[4].size))
    for cores, device, started in ((2, "cpu", [2]), (1, "cpu", []), (2, "cuda", [])):
        monkeypatch.setattr("cudiff.cli.CORES", cores)
        assert main(["demo", "--device", device]) == (7 if started else 0)
        assert [count for count, _ in gpus] == started
        gpus.clear()
    assert made == [1, 1]


@pytest.mark.parametrize(
    "words, environment, told",
    [
        (["--gpus", "3"], {}, "--gpus 3, and 2 can be seen here"),
        (["--gpus", "0"], {}, "gpus must be"),
        (["--gpus", "2", "--device", "cpu"], {}, "--processes 2"),
        (["--processes", "2", "--device", "cuda"], {}, "--gpus for GPUs"),
        (["--processes", "0", "--device", "cpu"], {}, "processes must be"),
        (["--gpus", "2", "--processes", "2"], {}, "give one of them"),
        (["--gpus", "2"], {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "4 were started already: leave it out"),
        (["--timeout", "0"], {}, "timeout must be above 0"),
        (["--timeout", "nan"], {}, "timeout must be"),
    ],
)
def test_what_is_refused(gpus, monkeypatch, capsys, words, environment, told):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*TRAIN, *words]) == 2
    assert told in capsys.readouterr().err and not gpus


def test_one_gpu_and_processes_of_the_launcher_start_none(gpus, monkeypatch):
    options = SimpleNamespace(gpus=1, processes=None, timeout=10.0, command="train", arguments=TRAIN)
    console = Console()
    assert processes.joined_by(options, "auto", console).size == 1
    with pytest.raises(CudiffError, match="--gpus is for GPUs"):
        processes.joined_by(options, "cpu", console)
    monkeypatch.setenv(LAUNCHER, "1")
    options.gpus = 2
    assert processes.joined_by(options, "cpu", console).size == 1 and not gpus and not console.quiet


@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_that_work_together_end_together(monkeypatch, size):
    """The text is told, or in its place the traceback where that was asked for; a process alone ends by itself."""
    told = []
    group = SimpleNamespace(size=size, fail=lambda code, text: told.append((code, text)))
    monkeypatch.setattr(processes, "joined", lambda: group)
    try:
        raise KeyError("why")
    except KeyError:
        processes.end_all(141)
        processes.end_all(2, "cudiff: a line")
        processes.end_all(2, "cudiff: a line", debug=True)
    if size == 1:
        assert not told
    else:
        (code, trace) = told.pop()
        assert told == [(141, ""), (2, "cudiff: a line")] and code == 2
        assert trace.startswith("Traceback") and trace.endswith("KeyError: 'why'")


@pytest.mark.parametrize(
    "shown, number, processes_here, expected",
    [(None, 1, 2, "1"), ("4,5", 1, 2, "5"), ("GPU-a,GPU-b", 0, 2, "GPU-a"), ("3", 1, 2, "3"), ("", 0, 2, "")],
)
def test_a_process_sees_one_gpu(monkeypatch, shown, number, processes_here, expected):
    """That of its local number; what a launcher has chosen for it stays."""
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    distributed._take_gpu(number, processes_here)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_gpus_that_are_too_few_or_shared(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(CudiffError, match=r"3 processes and 2 GPUs here \(CUDA_VISIBLE_DEVICES=0,1\)"):
        distributed._take_gpu(2, 3)
    distributed._check_apart([["a", "0"], ["a", "1"], ["b", "0"]])
    with pytest.raises(CudiffError, match="processes 1 and 2 have one GPU"):
        distributed._check_apart([["a", "0"], ["a", "1"], ["a", "1"]])


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the system has no SIGHUP")
def test_signals_that_are_ignored_are_ignored_by_all_processes():
    """As under nohup."""
    code = "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch.start(2, [sys.executable, "-c", code]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert launch.start(2, [sys.executable, "-c", code]) == 1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_of_several_processes_the_first_tells_of_an_interrupt():
    code = "from cudiff import signals; signals._leave(2, None)"
    for rank, told in (("0", "cudiff: interrupted\n"), ("1", "")):
        words, environment = [sys.executable, "-c", code], os.environ | {"RANK": rank}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (130, told)
