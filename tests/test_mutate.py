"""The mutation script's own rules: what is mutated, what is left out, and that reports keep their explanations."""

import ast
import os
import subprocess
import sys

import pytest

from tests import equivalent, mutate
from tests.executed import Executed, read
from tests.mutants import ROOT, Mutant, _gpu_constants, _gpu_functions, _Python, kernel_mutants, python_mutants, sample


def changes(source):
    found = _Python("cudiff/x.py", source, set(), set()).visit(ast.parse(source), "")
    return {mutant.apply(source) for mutant in found}


@pytest.mark.parametrize("source, expected", [
    ("a < b", ["a <= b"]), ("a is not b", ["a is b"]), ("a + b", ["a - b"]), ("a += b", ["a -= b", "a = b"]),
    ("a and b or c", ["a or b or c", "a and b and c"]), ("not a", ["a"]), ("x = 3", ["x = 4", "x = 2"]),
    ("x = 1e-5", ["x = 2e-05"]), ("x = True", ["x = False"]), ("x[a:b]", ["x[:b]", "x[a:]"]), ("f(x)", ["pass"]),
    ("def f():\n    return x", ["def f():\n    return None"]),
    ("def f(a=2): ...", ["def f(a=3): ...", "def f(a=1): ..."]),
    ("raise E(f'{a + b}')", ["pass"]), ("'a' + b", []), ("x: a | b", []), ("f(timeout=3)", ["pass"]),
    ("y = x.reshape(-1, 3)", ["y = x.reshape(-1, 4)", "y = x.reshape(-1, 2)"]), ("zip(a, b, strict=True)", ["pass"]),
    ("if TYPE_CHECKING:\n    a < b", []), ("if d == 'cuda':\n    a < b", []), ("'''a < b'''", []),
])
def test_rules(source, expected):
    assert changes(source) == set(expected)


def test_constants_that_only_functions_on_a_gpu_read_are_left_out():
    tree = ast.parse("""
A, B = 1, 2
C = A + 3
D = 4
E = 5
F = 6
def run_cuda(x, n=F):
    def inside():
        return C + B + D + E
    return launch(inside())
def run(x):
    return D
""")
    lines = {node.name: node.lineno for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert _gpu_constants(tree, {lines["run_cuda"]}, {"E"}) == {"A", "B", "C", "F"}
    assert _gpu_constants(tree, {lines["run_cuda"]}, {"B", "C"}) == {"E", "F"}
    assert _gpu_constants(tree, set(lines.values()), set()) == {"A", "B", "C", "D", "E", "F"}
    found = _Python("cudiff/x.py", "A = 1\nB = 2\n", set(), {"A"}).visit(ast.parse("A = 1\nB = 2\n"), "")
    assert {mutant.old for mutant in found} == {"2"}


def test_of_two_functions_of_one_name_only_that_on_a_gpu_is_left_out():
    tree = ast.parse("""
class A:
    def __init__(self): get_cupy(), _only(1), _both(1)
class B:
    def __init__(self): _both(2)
def _only(x): return x
def _both(x): return x
""")
    assert {line for _, line in _gpu_functions({"x.py": tree})} == {3, 6}


@pytest.mark.slow
def test_every_mutant_is_another_program_and_has_tests():
    mutants = sample(python_mutants(), 150, 7)
    sources = {path: (ROOT / path).read_text() for path in {mutant.path for mutant in mutants}}
    for mutant in mutants:
        source = sources[mutant.path]
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source)), mutant
    for mutant in kernel_mutants():
        assert mutant.old != mutant.new
    for path in sorted({mutant.path for mutant in kernel_mutants()}):
        assert mutate.tests_of(path), f"{path} has no tests: name them in tests/mutate.py"


def test_a_kernels_tests_are_those_of_the_operations_that_name_it():
    found = {stem: mutate.tests_of(f"kernels/portable/{stem}.cu") for stem in ("optim", "reduce")}
    assert "tests/ops/test_loss_scale.py" in found["optim"] and "tests/ops/test_reduce.py" in found["reduce"]


def test_an_arrays_size_in_a_kernel_makes_no_mutant_but_other_numbers_do(tmp_path):
    (tmp_path / "kernels" / "portable").mkdir(parents=True)
    (tmp_path / "kernels" / "portable" / "x.cu").write_text("""
    __shared__ float2 sums[8][32];
    float acc[2 * V] = {3};
    return words[4];
struct Job { int at[5]; };
""")
    assert {m.old for m in kernel_mutants(tmp_path) if m.rule == "constant"} == {"3", "4", "5"}


def test_whether_addresses_allow_packs_makes_no_mutant_but_the_rest_of_the_condition_does(tmp_path):
    (tmp_path / "kernels" / "portable").mkdir(parents=True)
    text = "    bool packs = size % 4 == 0 && ((u64)x | (u64)y) % 16 == 0;\n"
    (tmp_path / "kernels" / "portable" / "x.cu").write_text(text)
    assert sorted(m.old for m in kernel_mutants(tmp_path)) == ["%", "&&", "0", "4", "=="]


def test_what_only_older_gpus_compile_makes_no_mutant(tmp_path):
    (tmp_path / "kernels" / "portable").mkdir(parents=True)
    (tmp_path / "kernels" / "portable" / "x.cu").write_text("""
#if __CUDA_ARCH__ >= 900
int a = 1;
#endif
#if __CUDA_ARCH__ >= 800
int b = 2;
#else
int c = 3;
int d = 4;
#endif
int e = 5;
""")
    assert [m.old for m in kernel_mutants(tmp_path)] == ["1", "2", "5"]


def test_a_counted_loop_ends_early_and_another_late(tmp_path):
    (tmp_path / "kernels" / "portable").mkdir(parents=True)
    (tmp_path / "kernels" / "portable" / "x.cu").write_text("""
#pragma unroll
    for (int i = a; i < b; i++)
    for (int i = a; i < N; i++)
    for (int i = a; i < n; i++)
""")
    assert [m.new for m in kernel_mutants(tmp_path)] == ["< -1 +", "< -1 +", "<="]


def test_launch_bounds_and_which_thread_writes_make_no_mutant_and_powers_of_two_double(tmp_path):
    (tmp_path / "kernels" / "portable").mkdir(parents=True)
    (tmp_path / "kernels" / "portable" / "x.cu").write_text("""
constexpr int BLOCKS = WIDTH <= 64 ? 2 : 1;
__global__ void __launch_bounds__(256, 2) f(float* out) {
    if (threadIdx.x % 4 == 0) out[row] = shift(sum, 16, 3, 0);
    if (lane % 4 == 0 || lane == 0) out[row] = sum;
""")
    assert [(m.old, m.new) for m in kernel_mutants(tmp_path)] == [("||", "&&"), ("16", "32"), ("3", "4"), ("0", "1")]


@pytest.mark.slow
def test_a_sample_takes_turns_and_stays_as_it_was():
    mutants = python_mutants()
    chosen = sample(mutants, 100, 1)
    others = [mutant for mutant in mutants if mutant.path != "cudiff/cli.py"]
    assert {m.key for m in sample(others, 100, 1)} >= {m.key for m in chosen if m.path == "cudiff/autograd.py"}
    counts = [sum(m.path == path for m in chosen) for path in {m.path for m in chosen}]
    assert len(chosen) == 100 and max(counts) - min(counts) <= 1
    assert sample(mutants, 100, 2) != chosen


def test_a_report_keeps_its_explanations_and_its_other_half(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate, "REPORT", tmp_path / "MUTANTS.md")
    survivor = Mutant("cudiff/a.py", "f", "constant", 0, 1, "2", 9, "1")
    caught = Mutant("kernels/portable/b.cu", "a < b", "comparison", 0, 1, "<=", 3, "<")
    mutate.write_report("cudiff", mutate.section("cudiff", [(survivor, "")], "now", {}))
    text = mutate.REPORT.read_text()
    assert "**0 of 1 caught, 0.0 %**" in text and "Not run: no GPU." in text
    mutate.REPORT.write_text(text.replace("not explained", "the same for all x"))
    mutate.write_report("kernels", mutate.section("kernels", [(caught, "timeout")], "later", {}))
    known = mutate.explanations(mutate.REPORT.read_text())
    later = mutate.section("cudiff", [(survivor._replace(line=40), "")], "", known)
    assert "cudiff/a.py:40 f, constant: `1` → `2`: the same for all x" in later
    assert "| kernels/portable | 1 | 1 | 1 |" in mutate.REPORT.read_text()


@pytest.mark.parametrize("starts", [True, False])
def test_a_mutant_that_keeps_tests_from_starting_is_caught_only_where_they_start_without_it(
    tmp_path, monkeypatch, starts
):
    file = tmp_path / "cudiff" / "backend.py"
    file.parent.mkdir()
    file.write_text("A = 1\n")
    mutant = next(m for m in _Python("cudiff/backend.py", "A = 1\n", set(), set()).visit(ast.parse("A = 1\n"), ""))
    monkeypatch.setattr(mutate, "run_tests", lambda tree, tests, *rest: (0 if starts and "2" not in file.read_text()
                                                                         else 2, ""))
    if starts:
        assert mutate.is_caught(tmp_path, mutant, [], {}) == "failed"
    else:
        with pytest.raises(RuntimeError, match="cannot start these tests without a mutant"):
            mutate.is_caught(tmp_path, mutant, [], {})
    assert file.read_text() == "A = 1\n"


def test_others_are_the_tests_that_execute_the_line_and_of_what_runs_at_import_those_that_execute_the_file():
    source = "A = 1\n\n@cache\ndef f(x, y=2):\n    if x:\n        return 3 + (\n            4)\n    return 5\n"
    lines = {3: [0, 1, 2], 5: [0, 1, 2], 6: [1, 2], 8: [0]}
    tests = [("fast", 1.0), ("slow", 50.0), ("medium", 20.0)]
    found = {m.old: mutate.executing(m, source, Executed(tests, {"cudiff/x.py": lines}))
             for m in _Python("cudiff/x.py", source, set(), set()).visit(ast.parse(source), "") if m.rule == "constant"}
    assert found == {"1": ["fast", "medium"], "2": ["fast", "medium"], "3": ["medium"], "4": ["medium"], "5": ["fast"]}
    nothing = mutate.executing(next(iter(kernel_mutants())), "", Executed(tests, {}))
    assert nothing == []


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs sys.monitoring of Python 3.12")
def test_the_plugin_sees_which_lines_a_test_executes(tmp_path):
    test = "tests/ops/test_softmax.py"
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "tests.executed", "-m", "not gpu", test], cwd=ROOT,
                   check=True, capture_output=True, env=os.environ | {"CUDIFF_EXECUTED": str(tmp_path)})
    executed = read(tmp_path)
    assert all(name.startswith(test) for name, _ in executed.tests)
    lines, source = executed.lines["cudiff/ops/softmax.py"], (ROOT / "cudiff/ops/softmax.py").read_text().split("\n")
    numpy, cuda = (source.index(f"    def forward_{name}(ctx, x, axis, log):") + 1 for name in ("numpy", "cuda"))
    assert numpy + 1 in lines and not {*range(cuda, cuda + 8)} & {*lines}
    assert not any(source[line - 1].startswith(("import", "from", "class")) for line in lines)


def test_mutants_of_which_nvrtc_makes_the_same_code_are_equivalent_and_others_are_not(nvrtc):
    path = "kernels/portable/embedding.cu"
    source = (ROOT / path).read_text()

    def changed(old, new):
        start = source.index(old)
        return Mutant(path, "", "", start, start + len(old), new, 1, old)

    same = [("index >= 0", "index > -1"), ("indices[n]", "indices[n + 0]"),
            ("int index", "int  index")]
    for old, new in same:
        assert equivalent.is_equivalent(changed(old, new), "sm_90a"), new
    for old, new in [("index >= 0", "index > 0"), ("index < num", "index <= num"), ("i - n * dim", "i + n * dim"),
                     ("? 0.0f", "? 1.0f"), ("index >= 0", "index >= nothing")]:
        assert not equivalent.is_equivalent(changed(old, new), "sm_90a"), new
    assert not equivalent.is_equivalent(changed(*same[0]), "sm_90a", limit=0)


def test_equivalent_ones_are_found_by_what_was_printed_and_left_out_of_the_score():
    mutants = kernel_mutants()[:3]
    told = f"failed     1.0 s  {mutants[0].told}\nSURVIVED   12.3 s  {mutants[1].told}\n"
    assert equivalent.survivors(told) == [mutants[1]]
    text = mutate.section("kernels", list(zip(mutants, ("failed", "equivalent", ""), strict=True)), "now", {})
    assert "**1 of 2 caught, 50.0 %**" in text
    left_out = text[text.index("Left out: the same code"):]
    assert f"{mutants[1].path}:{mutants[1].line} " in left_out and mutants[1].change in left_out
