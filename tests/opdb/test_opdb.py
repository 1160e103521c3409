"""A fixed sample of PyTorch's operator database; `run.py` runs all of it."""
import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent

# One or two of each family: pointwise, matrix, reduction, softmax and norm, view, joining,
# indexing, sorting, loss, convolution, attention, random, foreach-like, linear algebra, Fourier.
MUST_BE_RIGHT = """
add clamp mul where masked_fill pow
mm addmm addmv bmm matmul nn.functional.linear einsum
sum mean amax var std prod argmax all norm linalg.vector_norm
softmax log_softmax logsumexp nn.functional.layer_norm nn.functional.rms_norm
nn.functional.group_norm nn.functional.batch_norm
view reshape flatten permute squeeze expand unfold split chunk unbind select
cat stack gather scatter index_select index_put index_add nn.functional.embedding
sort topk cumsum tril roll flip combinations
nn.functional.cross_entropy nn.functional.mse_loss nn.functional.nll_loss
nn.functional.conv2d nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.scaled_dot_product_attention
linalg.inv linalg.cholesky fft.fft
""".split()


@pytest.mark.parametrize("configuration,variant",
                         [("A", "nograd"), ("B", "function"), ("C", "function")])
def test_operators_are_correct(configuration, variant, tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, HERE / "run.py", "--configuration", configuration, "--variant", variant,
         "--ops", ",".join(MUST_BE_RIGHT), "--samples", "2", "--placements", "2", "--json", report],
        capture_output=True, text=True, timeout=900)
    assert report.exists(), done.stdout + done.stderr
    records = {record["name"]: record for record in json.loads(report.read_text())}
    missing = [name for name in MUST_BE_RIGHT if name not in {r.split(".with")[0] for r in records}]
    assert not missing
    # The database has samples of this variant for CUDA alone.
    records.pop("nn.functional.batch_norm.without_cudnn")
    others = [f"{r['class']} {name}: {r['messages'][0]}" for name, r in records.items()
              if r["class"] != "right"]
    assert not others, "\n".join(others)
