"""How many small faults the suite sees: `python -m tests.mutate [--count 220] [--seed 1] [--workers 1] [--executed F]`.

Each mutant of tests/mutants.py is made in a copy of the tree, where its stem's tests run without PyTorch: first those
that are not slow, and where they pass, the slow ones. Where they pass too, other tests that execute its line run, the
fastest first, as many as take a minute: those that tests.executed has found, in the folder F. A failure or a time-out
catches it. The result is written to tests/MUTANTS.md, where explanations of survivors are kept from run to run.
`--kernels` mutates kernels/ instead of cudiff/, by their stems' tests alone, which needs a GPU, or CUDIFF_EMULATE=1
(tests/emulator); `--only PATH` takes the files whose path begins so and writes nothing; after `--seconds` no mutant
begins. A survivor in kernels/ whose compiled code is the original's (tests/equivalent.py) is left out of the score.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import importlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.equivalent import architecture, is_equivalent
from tests.executed import Executed, read
from tests.mutants import LEFT_OUT, ROOT, Mutant, kernel_mutants, python_mutants, sample

REPORT = ROOT / "tests" / "MUTANTS.md"
EMULATED = os.environ.get("CUDIFF_EMULATE") == "1"
TIMEOUT = 1200 if EMULATED else 120  # seconds in which no test ends: a mutant that hangs
EXECUTING = 60  # seconds, when tests.executed saw them, of tests that run for executing a mutant's line
EQUIVALENCE = 40  # seconds of compiling a survivor; `python -m tests.equivalent` takes longer where they are not enough
BLOCKED = ["torch"]
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

# Beside tests/**/test_<stem>*.py: tests that run a file in a process of its own, where tests.executed does not see it,
# and tests of kernels that bear other names.
TESTS = {
    "cudiff/distributed/": ["tests/test_distributed.py", "tests/test_mpi.py", "tests/test_together.py"],
    "cudiff/cli.py": ["tests/test_signals.py"],
    "cudiff/signals.py": ["tests/test_signals.py"],
    "kernels/portable/elementwise.cu": ["tests/ops/test_trigonometry.py", "tests/ops/test_gelu.py",
                                        "tests/ops/test_mlp.py"],
    "kernels/portable/shape.cu": ["tests/ops/test_index.py", "tests/ops/test_at.py", "tests/ops/test_order.py",
                                  "tests/ops/test_rearrange.py", "tests/ops/test_conv2d_sm90.py"],
    "kernels/portable/optim.cu": ["tests/test_optimizers.py", "tests/test_muon.py"],
    "kernels/portable/accumulate.cu": ["tests/test_graph.py", "tests/ops/test_reduce.py",
                                       "tests/ops/test_norm_silu_conv2d.py"],
}
# Of headers and kernels. Beside these run the tests of the operations that name a kernel's file.
STEMS_OF = {
    "activation": ["elementwise", "gelu", "mlp"], "affine": ["group_norm", "conv2d_few_channels"],
    "attention": ["attention", "attention_sm90"], "blend": ["blend", "frame"], "convolution": ["conv2d"],
    "attention_sm90": ["attention", "attention_sm90"], "attention_short_sm90": ["attention", "attention_sm90"],
    "attention_wide_sm90": ["attention_sm90"], "conv2d_depthwise": ["conv2d"], "conv2d_grouped": ["conv2d"],
    "cluster": ["conv2d_wgrad_sm90", "group_norm_sm90"], "common": ["elementwise", "shape"],
    "conv2d_epilogue": ["conv2d_sm90"], "conv2d_patches": ["conv2d_few_channels"],
    "stream_k": ["conv2d_stream_k", "conv2d_sm90"], "exchange": ["conv2d_stream_k", "group_norm_sm90"],
    "conv2d_wgrad_tf32_sm90": ["conv2d_wgrad_sm90"], "denoised": ["frame", "edm"], "flash": ["attention"],
    "few_rows": ["matmul", "grouped_linear"],
    "gemm": ["matmul", "conv2d", "norm_silu_conv2d"], "gemm_sm90": ["gemm_sm90", "windows_sm90", "mlp"],
    "group_norm_backward_sm90": ["group_norm_sm90", "group_norm"], "group_norm_boxes": ["group_norm_sm90"],
    "map": ["elementwise"], "mma": ["matmul", "grouped_linear", "attention", "conv2d"],
    "channel_statistics": ["group_norm", "pool", "batch_norm"], "philox": ["random", "dropout"],
    "reduce": ["softmax", "layer_norm", "mse"], "tiles": ["group_norm"],
    "vector": ["layer_norm", "mse", "edm", "gated"],
    "wgmma": ["conv2d_sm90", "attention_sm90", "attention_backward_sm90"],
}


def tests_of(path: str) -> list[str]:
    """What runs first on a mutant of this file: paths below the root."""
    file, folder = Path(path), ROOT / "tests"
    stems = STEMS_OF.get(file.stem, [file.stem]) if path.startswith("kernels/") else [file.stem]
    if file.suffix == ".cu":
        operations = sorted((ROOT / "cudiff" / "ops").glob("*.py"))
        stems = [*stems, *(op.stem for op in operations if f'"{file.stem}"' in op.read_text())]
    own = []
    for stem in dict.fromkeys(stems):
        own += sorted(folder.rglob(f"test_{stem}.py")) + sorted(folder.rglob(f"test_{stem}_*.py"))
    found = [test.relative_to(ROOT).as_posix() for test in own]
    if path.startswith(("cudiff/ops/", "kernels/")) and (folder / "ops" / "test_table.py").is_file():
        found.append("tests/ops/test_table.py")
    for prefix, more in TESTS.items():
        if path.startswith(prefix):
            found += [test for test in more if (ROOT / test).exists()]
    return list(dict.fromkeys(found))


def executing(mutant: Mutant, source: str, executed: Executed) -> list[str]:
    """Tests that execute the mutant's line, the fastest first; of what runs at import, those that execute any line of
    the file."""
    lines = executed.lines.get(mutant.path)
    if not lines:
        return []
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _FUNCTIONS)]
    spans = [(min([f.lineno, *(one.lineno for one in getattr(f, "decorator_list", []))]), f.end_lineno or f.lineno)
             for f in functions]
    if first := max((start for start, stop in spans if start <= mutant.line <= stop), default=0):
        last = max((line for line in lines if first <= line <= mutant.line), default=0)
        lines = {last: lines[last]} if last else {}
    tests = sorted((executed.tests[number] for number in set().union(*lines.values())), key=lambda test: test[1])
    until = list(itertools.accumulate(seconds for _, seconds in tests))
    return [name for (name, _), total in zip(tests, until, strict=True) if total <= EXECUTING or total == until[0]]


def copy_of_the_tree(folder: Path) -> Path:
    """cudiff/, kernels/, tests/ and what tests read of the rest, as they stand, in `folder`."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


class _First:
    """A pytest plugin: writes which test failed first, and when a test ended last. Where single tests are named, only
    these run, in the order given; names that no longer exist are passed over."""

    def __init__(self, failed: Path, ended: Path, named: list[str]) -> None:
        self.failed, self.ended, self.named = failed, ended, named

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.named:
            found = {item.nodeid: item for item in items}
            items[:] = [found[name] for name in self.named if name in found]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ended.touch()
        if report.failed and not self.failed.exists():
            self.failed.write_text(report.nodeid)


def run_tests(tree: Path, tests: list[str], marks: str, stem: str, left_out: list[str]) -> tuple[int, str]:
    """Run files, or single tests, without those that are left out. Returns pytest's exit status, 5 where nothing was
    selected and -1 where a test hangs; and the first failed test.

    In a process forked from this one, in which what tests import but cudiff is loaded: that would take longer than
    most mutants live.
    """
    failed, ended = tree / ".failed", tree / ".ended"
    failed.unlink(missing_ok=True)
    ended.touch()
    process = os.fork()
    if process == 0:
        os.setsid()
        status = 3
        try:
            os.chdir(tree)
            with open(os.devnull, "r+") as null:
                for stream in range(3):
                    os.dup2(null.fileno(), stream)
            os.environ.update(PYTHONPATH=str(tree), CUDIFF_TABLE=stem, CUDIFF_CACHE_DIR=str(tree / ".cache"))
            for name in [name for name in sys.modules if name.split(".")[0] in ("cudiff", "tests")]:
                del sys.modules[name]
            sys.modules.update(dict.fromkeys(BLOCKED))
            sys.path[0], sys.dont_write_bytecode = str(tree), True
            arguments = ["-x", "-q", "-m", marks, "-p", "no:cacheprovider"]
            arguments += [f"--deselect={name}" for name in left_out]
            files = dict.fromkeys(name.split("::")[0] for name in tests)
            first = _First(failed, ended, [name for name in tests if "::" in name])
            status = int(pytest.main([*arguments, *files], [first]))
        finally:
            os._exit(status)
    while time.time() < ended.stat().st_mtime + TIMEOUT:
        is_over, status = os.waitpid(process, os.WNOHANG)
        if is_over:
            return os.waitstatus_to_exitcode(status), failed.read_text() if failed.exists() else ""
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -1, ""


def is_caught(tree: Path, mutant: Mutant, others: list[str], sound: dict[str, bool]) -> str:
    """What caught it: "failed", "timeout", or "" of a survivor that its stem's tests and the `others` pass. A test
    catches only if it passes without the mutant, which `sound` remembers."""
    file = tree / mutant.path
    source = file.read_text()
    gpu = "gpu" if mutant.path.startswith("kernels/") else "not gpu"
    own, left_out = tests_of(mutant.path), list[str]()
    others = [name for name in others if name.split("::")[0] not in own]
    runs = [(own, f"{gpu} and not slow", file.stem), (own, f"{gpu} and slow", file.stem), (others, gpu, "")]
    while runs:
        tests, marks, stem = runs[0]
        if not tests:
            runs.pop(0)
            continue
        file.write_text(mutant.apply(source))
        try:
            status, first = run_tests(tree, tests, marks, stem, left_out)
        finally:
            file.write_text(source)
        if status in (0, 5):
            runs.pop(0)
            continue
        if first and first not in sound:
            sound[first] = run_tests(tree, [first], gpu, "", [])[0] == 0
        if not first and status != -1 and mutant.path not in sound:  # no test began
            sound[mutant.path] = run_tests(tree, ["--collect-only", *tests], marks, stem, [])[0] in (0, 5)
            if not sound[mutant.path]:
                raise RuntimeError(f"pytest cannot start these tests without a mutant either: {' '.join(tests)}")
        if sound.get(first, True):
            return "timeout" if status == -1 else "failed"
        print(f"{first} fails without a mutant too: left out", flush=True)
        left_out.append(first)
    return ""


def _worker(
    mutants: list[Mutant], others: list[list[str]], place: tuple[int, int], deadline: float
) -> list[tuple[int, str]]:
    """The mutants place[0], place[0] + place[1], ... that begin before the deadline: number and what caught each, or
    "equivalent"; a line each as they end. Compiles last: it loads libraries, and what is forked has loaded none."""
    found, sound = [], dict[str, bool]()
    if gpus := gpu_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = str(place[0] % gpus)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        for number in range(place[0], len(mutants), place[1]):
            mutant, start = mutants[number], time.monotonic()
            if start > deadline:
                break
            how = is_caught(tree, mutant, others[number], sound)
            seconds = time.monotonic() - start
            print(f"{how or 'SURVIVED':8} {seconds:5.1f} s  {mutant.told}", flush=True)
            found.append((number, how))
    for i, (number, how) in enumerate(found):
        mutant = mutants[number]
        if not how and mutant.path.startswith("kernels/") and is_equivalent(mutant, architecture(), EQUIVALENCE):
            print(f"EQUIVALENT {mutant.told}", flush=True)
            found[i] = number, "equivalent"
    return found


def gpu_count() -> int:
    """Asks no driver: what a worker forks could not use it."""
    if not shutil.which("nvidia-smi"):
        return 0
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines())


def check(
    mutants: list[Mutant], others: list[list[str]], workers: int, seconds: float
) -> list[tuple[Mutant, str]]:
    """Each mutant that begins within `seconds` with what caught it, in their order."""
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        parts = pool.map(_worker, itertools.repeat(mutants), itertools.repeat(others),
                         [(i, workers) for i in range(workers)], itertools.repeat(time.monotonic() + seconds))
        found = dict(itertools.chain.from_iterable(parts))
    return [(mutant, found[number]) for number, mutant in enumerate(mutants) if number in found]


def explanations(report: str) -> dict[str, str]:
    """What an earlier report says of its survivors, by file and change."""
    found = re.findall(r"^- (\S+?):\d+ (.*? → `.*?`): (.*)$", report, re.MULTILINE)
    return {f"{path} {change}": text for path, change, text in found}


def commit() -> str:
    """What git calls the sources as they stand."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def section(title: str, results: list[tuple[Mutant, str]], run: str, known: dict[str, str]) -> str:
    """One half of the report; `run` says of which commit and by which command."""
    equivalent = [mutant for mutant, how in results if how == "equivalent"]
    results = [(mutant, how) for mutant, how in results if how != "equivalent"]
    caught = sum(bool(how) for _, how in results)
    lines = [
        f"## {title}", "",
        f"{datetime.date.today()}, {run}: **{caught} of {len(results)} caught, "
        f"{100 * caught / max(1, len(results)):.1f} %**.", "", "| folder | mutants | caught | of these by time-out |",
        "|---|---|---|---|",
    ]
    folders = sorted({str(Path(mutant.path).parent) for mutant, _ in results})
    for folder in folders:
        hows = [how for mutant, how in results if str(Path(mutant.path).parent) == folder]
        lines.append(f"| {folder} | {len(hows)} | {sum(map(bool, hows))} | {hows.count('timeout')} |")
    lines += ["", "Survivors:", ""]
    for mutant, how in results:
        if not how:
            what = f"{mutant.where or '(module)'}, {mutant.rule}: {mutant.change}"
            lines.append(f"- {mutant.path}:{mutant.line} {what}: {known.get(f'{mutant.path} {what}', 'not explained')}")
    if equivalent:
        lines += ["", "Left out: the same code as compiled (tests/equivalent.py):", ""]
        lines += [f"- {one.path}:{one.line} {one.where}, {one.rule}: {one.change}" for one in equivalent]
    return "\n".join(lines) + "\n"


def write_report(title: str, text: str) -> None:
    """Replace one half of the report; the other stays."""
    halves = {"cudiff": "## cudiff\n\nNot run.\n", "kernels": "## kernels\n\nNot run: no GPU.\n"}
    if REPORT.is_file():
        for half in re.split(r"^(?=## )", REPORT.read_text(), flags=re.MULTILINE):
            for name in halves:
                if half.startswith(f"## {name}\n"):
                    halves[name] = half.rstrip() + "\n"
    halves[title] = text
    head = ["# Mutants", "", (sys.modules[__name__].__doc__ or "").split("\n\n", 1)[1].replace("\n", " ").strip(), "",
            "Left out, by the rules of tests/mutants.py:", ""]
    head += [f"- {name}: {what}" for name, what in LEFT_OUT.items()]
    REPORT.write_text("\n".join(head) + "\n\n" + halves["cudiff"] + "\n" + halves["kernels"])


def preload() -> None:
    """Import what tests import, but for cudiff, and for CuPy where there is a GPU: a fork cannot use its driver."""
    for name in (*([] if shutil.which("nvidia-smi") else ["cupy"]),
                 "hypothesis", "PIL.Image", "PIL.ImageFont", "rich.progress", "rich.table", "safetensors.numpy",
                 "threadpoolctl", "ml_dtypes", "numpy", "matplotlib.pyplot"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate")
    parser.add_argument("--count", type=int, default=220)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--executed", type=Path, help="folder that tests.executed has written")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    if options.kernels and not (EMULATED or shutil.which("nvidia-smi")):
        print("skipped: no GPU, and no CUDIFF_EMULATE=1")
        return 0
    if not (options.kernels or options.executed):
        sys.exit("--executed FOLDER is missing, of: CUDIFF_EXECUTED=FOLDER python -m pytest -p tests.executed")
    preload()
    mutants, at = kernel_mutants() if options.kernels else python_mutants(), commit()
    chosen = sample(mutants, options.count, options.seed)
    executed = read(options.executed) if options.executed else Executed([], {})
    chosen = [mutant for mutant in chosen if mutant.path.startswith(options.only)]
    others = [executing(mutant, (ROOT / mutant.path).read_text(), executed) for mutant in chosen]
    results = check(chosen, others, options.workers, options.seconds)
    hows = [how for _, how in results]
    equivalent = hows.count("equivalent")
    print(f"{len(hows) - equivalent - hows.count('')} of {len(hows) - equivalent} caught, {equivalent} equivalent")
    if not options.only:
        title = "kernels" if options.kernels else "cudiff"
        command = f"python -m tests.mutate --count {options.count} --seed {options.seed}"
        command += " --kernels" * options.kernels
        known = explanations(REPORT.read_text()) if REPORT.is_file() else {}
        write_report(title, section(title, results, f"commit {at}, `{command}`", known))
    return 0


if __name__ == "__main__":
    sys.exit(main())
