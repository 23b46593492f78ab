"""What only a GPU can show: the same commands on cuda, ranks sharing one GPU through gloo where there are not enough."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
MODEL = ("--hidden-size", "256", "--num-hidden-layers", "2", "--vocab-size", "509", "--seq-len", "63", "--optimizer-steps", "4")


TOPOLOGIES = {
    "tp": "--tp 2",
    "tp, sp, vp, async": "--tp 2 --sequence-parallel --vocab-parallel --async-communication",
    "cp, ring": "--cp 2",
    "cp, gathered": "--cp 2 --cp-comm-type all_gather",
    "cp, by heads, tp, sp": "--cp 2 --cp-comm-type a2a --tp 2 --sequence-parallel",
    "pp": "--pp 2 --num-microbatches 3 --micro-batch-size 1",
    "pp, zb-h1, tp, sp": "--pp 2 --tp 2 --sequence-parallel --pp-schedule zb-h1 --num-microbatches 3 --micro-batch-size 1",
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_validate_on_cuda(dtype: str, topology: str) -> None:
    command = [sys.executable, "-m", "minimind_tron", "validate", "--device", "cuda", "--dtype", dtype]
    done = subprocess.run([*command, *MODEL, *TOPOLOGIES[topology].split()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nPASS" in done.stdout
