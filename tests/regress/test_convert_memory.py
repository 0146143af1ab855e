"""Peak memory of convert: the largest tensor + 512 MiB at most, in this process and in the one that runs llama.cpp.

The model has 1.2 GB (0.7 GB where nothing is quantised) of zeros in a sparse file, so that making it costs nothing;
convert reads and quantises it like any other.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

MIB = 2**20
N_EXPERT, N_EMBD, N_FF = 64, 1024, 704

SCRIPT = """
import json, re, resource, sys
from pathlib import Path
from mkdeploy.convert.pipeline import convert
from mkdeploy.convert.merge import merge
convert(Path(sys.argv[1]), Path(sys.argv[2]), keep_types=sys.argv[3] == "keep")
merge(Path(sys.argv[2]), Path(sys.argv[2] + ".gguf"))
# not ru_maxrss for this process: it survives exec, so it would tell how large the test runner is
own = int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps([own * 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024]))
"""


def write_sparse(path: Path, n_layer: int) -> int:
    """Writes the model; returns its largest tensor's bytes."""
    w = gguf.GGUFWriter(path, "qwen2moe")
    w.add_context_length(128)
    w.add_embedding_length(N_EMBD)
    w.add_block_count(n_layer)
    w.add_feed_forward_length(N_FF)
    w.add_head_count(16)
    w.add_head_count_kv(16)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_expert_count(N_EXPERT)
    w.add_expert_used_count(6)
    w.add_expert_feed_forward_length(N_FF)
    w.add_tokenizer_model("none")
    w.add_vocab_size(32000)
    shapes = {"token_embd.weight": (32000, N_EMBD), "output.weight": (32000, N_EMBD)}
    for i in range(n_layer):
        shapes |= {f"blk.{i}.ffn_{r}_exps.weight": (N_EXPERT, N_FF, N_EMBD) for r in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down_exps.weight"] = (N_EXPERT, N_EMBD, N_FF)
    for name, shape in shapes.items():
        w.add_tensor_info(name, shape, np.dtype(np.float16), 2 * int(np.prod(shape)))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    w.close()
    sizes = [2 * int(np.prod(s)) for s in shapes.values()]
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + sum(sizes))
    return max(sizes)


@pytest.mark.parametrize(("mode", "n_layer"), [("quantise", 4), ("keep", 2)])
def test_convert_and_merge_stay_within_the_largest_tensor_and_512_mib(tmp_path: Path, mode: str, n_layer: int) -> None:
    largest = write_sparse(tmp_path / "m.gguf", n_layer)
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "m.gguf"), str(tmp_path / "p.mkd"), mode]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    print(f"largest tensor {largest / MIB:.0f} MiB, peaks (self, child) {[round(p / MIB) for p in peaks]} MiB")
    assert max(peaks) <= largest + 512 * MIB
