"""Try an installed wheel outside the repository: its kernels equal the tree's, the command runs, a model trains."""

import subprocess
import sys
import tempfile
from pathlib import Path

import cudiff
from cudiff.cuda.compiler import kernel_folder

tree = Path(sys.argv[1])


def sources(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.suffix in (".cu", ".cuh", ".toml")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


in_wheel, in_tree = sources(kernel_folder()), sources(tree)
assert "site-packages" in str(kernel_folder()), f"the kernels come from {kernel_folder()}, not from the wheel"
assert in_wheel == in_tree, f"the wheel's kernels differ from the tree's: {set(in_wheel) ^ set(in_tree)}"

command = Path(sys.executable).with_name("cudiff")
subprocess.run([command, "info"], check=True)
with tempfile.TemporaryDirectory() as folder:
    run = f"{folder}/run"
    subprocess.run(
        [command, "train", "--preset", "digits", "--device", "cpu", "--steps", "4", "--batch-size", "8",
         "--model-channels", "16", "--sample-every", "0", "--folder", run],
        check=True,
    )
    (checkpoint,) = Path(run).glob("*.safetensors")
    images = cudiff.load(checkpoint).sample(2, seed=1, steps=2)
    assert images.shape == (2, 16, 16, 1), images.shape
print("the wheel works")
