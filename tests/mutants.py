"""Mutants by rule: every place of a source file where one small change makes another program.

Python files are read by `ast`, kernels by their tokens. What is left out is named in LEFT_OUT and nowhere else.
"""

from __future__ import annotations

import ast
import bisect
import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

LEFT_OUT = {
    "plans and time estimates": "cuda/tiles.py, cuda/timing.py, tune.py, gemm/product.py, convolution/few_channels.py, "
    "convolution/sm90.py and *_sm90.py, and functions of cuda/ that count the blocks of a launch or are called "
    "microseconds or plans, and how long is waited at most (`timeout=`)",
    "texts": "strings, docstrings, and what a raise says",
    "looks": "display.py, plot.py, info.py, demo.py",
    "annotations": "type annotations, TYPE_CHECKING, __slots__, __all__, `from __future__`",
    "what runs on a GPU only": "cuda/device.py, exchange.py, graph.py, launch.py, sums.py and tensor_map.py; functions "
    "that launch a kernel, take CuPy or a stream, or are named *_cuda, functions that only those call, constants of a "
    "module that only those read, and branches of `device == \"cuda\"`",
    "the same by construction": "`strict=` of zip, `copy=` of astype, `exist_ok=`, decorators that only remember, the "
    "-1 of a reshape (NumPy takes any negative number), the sizes of the parts that work is cut into (PART_BYTES, "
    "LEAST_BYTES, CHUNK, PAIRS, _PARTIAL_SUMS, 16384), the size of an array that a kernel declares (one larger holds "
    "the same), whether addresses allow packs of several elements (single elements give the same)",
    "how many blocks fit": "in kernels/, `__launch_bounds__` and constants named BLOCKS: how many blocks a "
    "multiprocessor is to hold, a matter of speed",
    "which thread": "in kernels/, `threadIdx.x == 0`, `lane == 0` and their like: any thread may write what all hold, "
    "or start a copy for all",
    "what Turing runs": "in kernels/, the `#else` of `#if __CUDA_ARCH__ >= 800`: no GPU of these runs compiles it",
    "the same as compiled": "a survivor in kernels/ of which NVRTC makes the code it makes of the original, for the "
    "GPU of the run, with every row of tests/variants.txt of every kernel file that its text is part of "
    "(tests/equivalent.py); looked at after the tests, never instead of them",
}
_FILES = {
    "cuda/tiles.py", "cuda/timing.py", "tune.py", "cuda/kernels/gemm/product.py",
    "cuda/kernels/convolution/few_channels.py", "cuda/kernels/convolution/sm90.py", "display.py",
    "plot.py", "info.py", "demo.py", "__main__.py", "cuda/launch.py", "cuda/device.py",
    "cuda/graph.py", "cuda/exchange.py", "cuda/sums.py", "cuda/tensor_map.py",
}
_PARTS = {"PART_BYTES", "LEAST_BYTES", "CHUNK", "PAIRS", "_PARTIAL_SUMS"}
_KEYWORDS = {"strict", "copy", "exist_ok", "maxsize", "timeout"}
_PLANS = {"microseconds", "plans"}
_ON_A_GPU = {"launch", "get_cupy", "kernel", "is_capturing", "gradient_target"}

_COMPARE = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "&"),
}


class Mutant(NamedTuple):
    """`path` with the text from `start` to `stop` replaced; `where` is the function it lies in."""

    path: str
    where: str
    rule: str
    start: int
    stop: int
    new: str
    line: int
    old: str

    @property
    def key(self) -> str:
        """What a later run knows it by, wherever it then stands."""
        return f"{self.path} {self.where} {self.rule}: {self.change}"

    @property
    def told(self) -> str:
        """As a line of tests.mutate names it."""
        return f"{self.path}:{self.line} {self.where} {self.rule}: {self.change}"

    @property
    def change(self) -> str:
        return f"`{shorten(self.old)}` → `{shorten(self.new)}`"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.stop :]


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them, as even over the files as these have mutants.

    Each file's are put in an order by a digest of the seed and of what they change, so that a change elsewhere in the
    sources leaves the sample as it was.
    """
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.path, []).append(mutant)
    for found in by_file.values():
        found.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())
    chosen: list[Mutant] = []
    for turn in range(max(map(len, by_file.values()), default=0)):
        ready = [found[turn] for _, found in sorted(by_file.items()) if turn < len(found)]
        chosen += ready[: count - len(chosen)]
    return sorted(chosen, key=lambda mutant: (mutant.path, mutant.start))


def python_mutants(root: Path = ROOT) -> list[Mutant]:
    """All of `cudiff/` but for LEFT_OUT."""
    paths = sorted((root / "cudiff").rglob("*.py"))
    trees = {path.relative_to(root / "cudiff").as_posix(): ast.parse(path.read_text()) for path in paths}
    gpu, named = _gpu_functions(trees), {path: _named(tree) for path, tree in trees.items()}
    found: list[Mutant] = []
    for name, tree in trees.items():
        if name not in _FILES and not name.endswith("_sm90.py"):
            own = {line for path, line in gpu if path == name}
            elsewhere = set().union(*(names for path, names in named.items() if path != name))
            source, constants = (root / "cudiff" / name).read_text(), _gpu_constants(tree, own, elsewhere)
            found += _Python(f"cudiff/{name}", source, own, constants).visit(tree, "")
    return found


def _gpu_functions(trees: dict[str, ast.Module]) -> set[tuple[str, int]]:
    """(file, line) of functions that run on a GPU only or plan a launch: by their name or what they call; then private
    ones that only those call."""
    gpu, private = set(), {}
    users: dict[tuple[str, str], set[tuple[str, int]]] = {}
    for path, tree in trees.items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                calls = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
                called = {func.id for func in calls if isinstance(func, ast.Name)}
                plans = path.startswith("cuda/") and ("blocks" in called or function.name in _PLANS)
                if function.name.endswith("_cuda") or called & _ON_A_GPU or plans:
                    gpu.add((path, function.lineno))
        private |= {(path, f.lineno): f.name for f in tree.body
                    if isinstance(f, ast.FunctionDef) and f.name.startswith("_")}
        for name, line in _uses(tree, 0):
            users.setdefault((path, name), set()).add((path, line))
    while more := {
        place for place, name in private.items()
        if place not in gpu and (callers := users.get((place[0], name))) and callers <= gpu
    }:
        gpu |= more
    return gpu


def _uses(node: ast.AST, inside: int) -> Iterator[tuple[str, int]]:
    """(name used, line of the innermost function that uses it, or 0) of all names below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name):
            yield child.id, inside
        yield from _uses(child, child.lineno if isinstance(child, ast.FunctionDef) else inside)


def _named(tree: ast.Module) -> set[str]:
    """What a file may read of others: what it imports, and the names behind a dot."""
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def _gpu_constants(tree: ast.Module, gpu: set[int], elsewhere: set[str]) -> set[str]:
    """The constants of a module that its functions on a GPU read, and neither other code of its own nor other files."""
    readers: dict[str, set[str]] = {}
    constants = set[str]()
    for statement in tree.body:
        made = _made(statement)
        constants |= made
        for name, reader in _readers(statement, min(made, default=""), gpu):
            readers.setdefault(name, set()).add(reader)
    found = {"on a GPU"}
    while more := {
        name for name in constants - found - elsewhere if readers.get(name) and readers[name] <= found
    }:
        found |= more
    return found - {"on a GPU"}


def _made(statement: ast.AST) -> set[str]:
    """The names that a statement assigns."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _readers(node: ast.AST, reader: str, gpu: set[int]) -> Iterator[tuple[str, str]]:
    """(name read, "on a GPU", the constant that is made of it, or "") of all names below `node`."""
    if isinstance(node, ast.FunctionDef) and reader != "on a GPU":
        reader = "on a GPU" if node.lineno in gpu else ""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id, reader
    for child in ast.iter_child_nodes(node):
        yield from _readers(child, reader, gpu)


class _Python:
    """The mutants of one file."""

    def __init__(self, path: str, source: str, gpu: set[int], constants: set[str]) -> None:
        self.path, self.source, self.gpu, self.constants = path, source, gpu, constants
        lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        self.lines = lines

    def at(self, line: int, column: int) -> int:
        """Characters before this place; `ast` counts a line's columns in bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore

    def replaced(self, rule: str, where: str, start: int, stop: int, new: str) -> Mutant:
        line = bisect.bisect_right(self.starts, start)
        return Mutant(self.path, where, rule, start, stop, new, line, self.source[start:stop])

    def between(self, left: ast.AST, right: ast.AST, old: str) -> tuple[int, int]:
        """Where the operator `old` stands between two operands."""
        start, stop = self.span(left)[1], self.span(right)[0]
        pattern = old.replace(" ", r"\s+") if old[0].isalpha() else re.escape(old)
        match = re.search(pattern, self.source[start:stop])
        assert match, (self.path, left, old)
        return start + match.start(), start + match.end()

    def visit(self, node: ast.AST, where: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}".lstrip(".")
            if isinstance(node, ast.FunctionDef) and node.lineno in self.gpu:
                return
        if self.is_left_out(node) or (not where and (made := _made(node)) and made <= self.constants):
            return
        yield from self.of(node, where)
        reshapes = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "reshape"
        for child in self.children(node):
            if not (reshapes and self.is_rest(child)):
                yield from self.visit(child, where)

    def is_left_out(self, node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom | ast.Import | ast.JoinedStr):
            return True
        if isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            return bool(names & (_PARTS | {"__slots__", "__all__"}))
        if isinstance(node, ast.If):
            text = ast.unparse(node.test)
            return text == "TYPE_CHECKING" or (text.endswith("== 'cuda'") and not node.orelse)
        return isinstance(node, ast.keyword) and node.arg in _KEYWORDS

    def is_rest(self, node: ast.AST) -> bool:
        """-1 as an argument of a reshape's."""
        return isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-1"

    def children(self, node: ast.AST) -> Iterator[ast.AST]:
        skipped = {"annotation", "returns", "decorator_list", "exc", "type_comment", "bases"}
        for field, value in ast.iter_fields(node):
            if field in skipped:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield child

    def of(self, node: ast.AST, where: str) -> Iterator[Mutant]:
        """The mutants of this node itself."""
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for i, operator in enumerate(node.ops):
                    old, new = _COMPARE[type(operator)]
                    yield self.replaced("comparison", where, *self.between(operands[i], operands[i + 1], old), new)
            case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC and not self.is_text(node):
                old, new = _ARITHMETIC[type(operator)]
                yield self.replaced("arithmetic", where, *self.between(node.left, node.right, old), new)
            case ast.AugAssign(op=operator) if type(operator) in _ARITHMETIC:
                old, new = _ARITHMETIC[type(operator)]
                place = self.between(node.target, node.value, old + "=")
                yield self.replaced("arithmetic", where, *place, new + "=")
                yield self.replaced("assignment", where, *place, "=")
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield self.replaced("boolean", where, *self.between(left, right, old), new)
            case ast.UnaryOp(op=ast.Not()):
                start, _ = self.span(node)
                yield self.replaced("not removed", where, start, start + 4, "")
            case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
                start, _ = self.span(node)
                yield self.replaced("sign removed", where, start, start + 1, "")
            case ast.Constant(value=bool(value)):
                yield self.replaced("constant", where, *self.span(node), str(not value))
            case ast.Constant(value=int(value)) if value != 16384:
                yield self.replaced("constant", where, *self.span(node), str(value + 1))
                if value > 0:
                    yield self.replaced("constant", where, *self.span(node), str(value - 1))
            case ast.Constant(value=float(value)):
                yield self.replaced("constant", where, *self.span(node), repr(2 * value if value else 1.0))
            case ast.If() | ast.IfExp() | ast.While():
                start, stop = self.span(node.test)
                yield self.replaced("condition", where, start, stop, f"(not ({self.source[start:stop]}))")
            case ast.Return(value=value) if value is not None and not _is_none(value):
                yield self.replaced("return", where, *self.span(value), "None")
            case ast.Raise():
                yield self.replaced("raise removed", where, *self.span(node), "pass")
            case ast.Expr(value=ast.Call()):
                yield self.replaced("call removed", where, *self.span(node), "pass")
            case ast.Slice():
                for bound in (node.lower, node.upper, node.step):
                    if bound is not None:
                        yield self.replaced("slice", where, *self.span(bound), "")

    def is_text(self, node: ast.BinOp) -> bool:
        return any(isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
                   for side in (node.left, node.right))


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


_TOKENS = (
    ("comparison", r"(?<=[\w)\]] )(<=|>=|==|!=|<|>)(?= [\w(-])",
     {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}),
    ("boolean", r"&&|\|\|", {"&&": "||", "||": "&&"}),
    ("assignment", r"(?<= )([+*|&-])=(?= )", {"+=": "=", "-=": "+=", "*=": "=", "|=": "=", "&=": "="}),
    ("arithmetic", r"(?<=[\w)\]] )[+*/%-](?= [\w(])", {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/"}),
    ("constant", r"(?<![\w.])\d+(?![\w.])", None),
    ("constant", r"(?<![\w.])\d+\.\d*(?:e-?\d+)?f?", None),
    ("synchronisation removed", r"__syncthreads\(\);|__syncwarp\(\);", {"__syncthreads();": ";", "__syncwarp();": ";"}),
)


_HIDDEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|^\s*#[^\n]*|\basm\b[^;]*;|static_assert[^;]*;|template <[^>]*>|\"[^\"\n]*\"",
    re.DOTALL | re.MULTILINE,
)

_BLOCKS = re.compile(r"__launch_bounds__\([^)\n]*\)|^constexpr int \w*BLOCKS = [^;]*;", re.MULTILINE)

_ONE_THREAD = re.compile(r"\b(?:threadIdx\.x|lane)(?: % \d+)? == 0\b")

# A loop whose turns the compiler counts: one turn more would use what lies behind an array in registers, which is
# undefined, and compilers drop it. Its mutant has one turn less.
_COUNTED = re.compile(
    r"#pragma unroll\n\s*for \(int \w+ = [^;\n]*; \w+ <(?= )|for \(int \w+ = [^;\n]*; \w+ <(?= [A-Z\d])")

# Whether addresses are multiples of a pack's bytes.
_ADDRESSES = re.compile(r"\(?\(u64\)\w[^;&]*? % \w+(?:\(\w+\))?(?: == 0)?")

# What `#if __CUDA_ARCH__ >= 800` keeps from newer GPUs.
_OLDER = re.compile(
    r"^#if __CUDA_ARCH__ >= 800\n(?:(?!#else|#endif).*\n)*#else\n(?P<older>(?:(?!#endif).*\n)*)#endif", re.MULTILINE)

# An array that is declared, with its size: one larger holds the same. Not of a struct, which may be an argument.
_DECLARED = re.compile(
    r"^(?!.*\bstruct\b)\s*(?:__shared__ )?(?:__align__\(\d+\) )?(?:const )?(?!return\b)[A-Za-z_][\w:<>]* \w+"
    r"(?P<sizes>(?:\[[^]\n]*\])+)", re.MULTILINE,
)


def kernel_mutants(root: Path = ROOT) -> list[Mutant]:
    """All of `kernels/*/*.cu*`, but for comments, preprocessor lines, `asm`, static assertions, arrays' sizes and
    LEFT_OUT."""
    found = []
    for path in sorted((root / "kernels").glob("*/*.cu*")):
        source = path.read_text()
        hidden = _OLDER.sub(lambda match: match[0].replace(match["older"], _blank(match["older"])), source)
        for pattern in (_HIDDEN, _ADDRESSES, _BLOCKS, _ONE_THREAD):
            hidden = pattern.sub(lambda match: _blank(match.group()), hidden)
        sizes = [match.span("sizes") for match in _DECLARED.finditer(hidden)]
        counted = {match.end() for match in _COUNTED.finditer(source)}
        lines = source.splitlines(keepends=True)
        starts = list(itertools.accumulate(map(len, lines), initial=0))
        for rule, pattern, table in _TOKENS:
            for match in re.finditer(pattern, hidden):
                old = match.group()
                if rule == "constant" and any(start < match.start() < stop for start, stop in sizes):
                    continue
                line = bisect.bisect_right(starts, match.start())
                fewer = rule == "comparison" and match.end() in counted
                for new in _numbers(old) if table is None else ("< -1 +" if fewer else table[old],):
                    where = lines[line - 1].strip()
                    name, place = path.relative_to(root).as_posix(), match.span()
                    found.append(Mutant(name, where, rule, *place, new, line, old))
    return found


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _numbers(old: str) -> tuple[str, ...]:
    """Twice a fraction or a power of two, one more of another whole number: a width, a mask or a count of bytes with
    one added is often the same after rounding."""
    if "." in old:
        value = float(old.rstrip("f"))
        return (f"{2 * value if value else 1.0!r}{'f' if old.endswith('f') else ''}",)
    value = int(old)
    return (str(2 * value if value > 1 and value & (value - 1) == 0 else value + 1),)
