"""The notebooks run from top to bottom; their committed outputs are whole and tell nothing of the machine."""

import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/\w[\w.-]*/\w|\b[A-Za-z]:\\|\bfile://")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def text_of(output):
    """What a reader sees of an output, but for its pictures."""
    data = {key: value for key, value in output.get("data", {}).items() if not key.startswith("image/")}
    return "".join("".join(value) for value in [output.get("text", ""), *data.values()])


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2


@each_notebook
def test_outputs_are_committed(path):
    for number, cell in enumerate(code_cells(path), start=1):
        assert cell["execution_count"] == number, f"cell {cell['id']} was not executed in order: run all, then save"
        for output in cell["outputs"]:
            kind = output["output_type"]
            assert kind != "error", f"cell {cell['id']} ends in {output['ename']}: {output['evalue']}"
            assert output.get("name") != "stderr", f"cell {cell['id']} prints a warning: {text_of(output)}"


@each_notebook
def test_nothing_tells_of_the_machine(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert not any(cell["metadata"] for cell in notebook["cells"])
    for cell in code_cells(path):
        for text in ["".join(cell["source"]), *map(text_of, cell["outputs"])]:
            found = ABSOLUTE_PATH.search(text)
            assert not found, f"cell {cell['id']} holds an absolute path: {text[found.start() :][:60]}"


@pytest.mark.slow
@each_notebook
def test_runs_from_top_to_bottom(path, tmp_path):
    """With a tenth of the training: the committed outputs are those of all steps."""
    needed = "notebooks are not run: pip install -e '.[notebooks]'"
    for package in ("matplotlib", "ipykernel", "nbformat"):
        pytest.importorskip(package, reason=needed)
    nbclient = pytest.importorskip("nbclient", reason=needed)
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r"(?m)^STEPS = (\d+)0$", r"STEPS = \1", cell.source)
    here = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    nbclient.NotebookClient(notebook, timeout=1800).execute(cwd=str(tmp_path), env=os.environ | {"PYTHONPATH": here})
