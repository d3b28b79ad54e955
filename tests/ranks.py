"""Programs that tests run as several processes: over MPI, or by `cudiff.distributed.launch.start`."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def mpiexec():
    """The command that starts processes over mpi4py's MPI; skips the test where there is none."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install -e '.[distributed]'")
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("no mpiexec: pip install -e '.[distributed]'")
    # Open MPI starts no more processes than there are cores.
    return [found, *(["--oversubscribe"] if "ompi" in os.path.realpath(found) else [])]


def program(code):
    return [sys.executable, "-c", textwrap.dedent(code)]


START = """
import sys
from cudiff.distributed.launch import start
sys.exit(start(int(sys.argv[1]), sys.argv[2:]))
"""


def run(size, command, within=120, cwd=ROOT, mpi=True):
    """Exit code, output and errors of so many processes of a command.

    After `within` seconds they are ended, and the test fails with where each of them was.
    """
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/stacks'}"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    begin = [*mpiexec(), "-n"] if mpi else [sys.executable, "-c", START]
    with subprocess.Popen([*begin, str(size), *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment) as launcher:
        try:
            out, err = launcher.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            for process in below(launcher.pid):
                os.kill(process, signal.SIGUSR1)  # tests/stacks; mpiexec drops what is said after one has died
            time.sleep(2)  # until the launcher has read the stacks
            launcher.terminate()
            out, err = ended(launcher)
            pytest.fail(f"{command} took longer than {within} s\n{out}\n{err}", pytrace=False)
    return launcher.returncode, out, err


def ended(launcher):
    """What a launcher has left to say, which is killed where it does not end by itself."""
    try:
        return launcher.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        launcher.kill()
        return launcher.communicate()


def below(launcher):
    """The processes of Python that a process has started, or those that it has started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            status = (folder / "status").read_text()
            parents[int(folder.name)] = int(status.split("PPid:")[1].split()[0]), status.split()[1]
    found = [launcher]
    for process in found:
        found += [child for child, (parent, _) in parents.items() if parent == process]
    return [process for process in found[1:] if parents[process][1].startswith("python")]
