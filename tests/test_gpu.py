"""What only a GPU can show: the same commands on cuda, ranks sharing one GPU through gloo where there are not enough."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
MODEL = ("--hidden-size", "256", "--num-hidden-layers", "2", "--vocab-size", "509", "--seq-len", "63", "--optimizer-steps", "4")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [(), ("--sequence-parallel", "--vocab-parallel", "--async-communication")])
def test_validate_on_cuda(dtype: str, strategy: tuple[str, ...]) -> None:
    command = [
        sys.executable,
        "-m",
        "minimind_tron",
        "validate",
        "--device",
        "cuda",
        "--tp",
        "2",
        "--dtype",
        dtype,
        *MODEL,
        *strategy,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nPASS" in done.stdout
