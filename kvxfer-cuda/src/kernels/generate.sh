#!/usr/bin/env bash
# Makes FILE.ptx beside each FILE.cu: generate.sh [FILE.cu...]; without a file, copy.ptx. By hand, when a .cu changes; needs python3
# with venv and PyPI, from which it takes NVIDIA's run-time compiler and assembler into a temporary directory. No GPU.
# The PTX names the oldest version and device that it runs on, which ptxas checks with newer ones.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check 'nvidia-cuda-nvrtc-cu12==12.8.*' 'nvidia-cuda-nvcc-cu12==12.8.*'
ptxas=$(find "$work/venv" -name ptxas -type f)
library=$(find "$work/venv" -name 'libnvrtc.so.12')
chmod +x "$ptxas"
[ $# -gt 0 ] || set -- "$(dirname "$0")/copy.cu"
for source in "$@"; do
  target=${source%.cu}.ptx
  "$work/venv/bin/python" - "$library" "$source" >"$work/out.ptx" <<'PYTHON'
import ctypes
import re
import sys

library, source = ctypes.CDLL(sys.argv[1]), open(sys.argv[2], "rb").read()
program = ctypes.c_void_p()
assert library.nvrtcCreateProgram(ctypes.byref(program), source, sys.argv[2].encode(), 0, None, None) == 0
options = [b"--gpu-architecture=compute_60", b"--std=c++17", b"-w"]
failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
size = ctypes.c_size_t()
library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
log = ctypes.create_string_buffer(size.value)
library.nvrtcGetProgramLog(program, log)
sys.stderr.write(log.value.decode())
if failed:
    sys.exit(1)
library.nvrtcGetPTXSize(program, ctypes.byref(size))
text = ctypes.create_string_buffer(size.value)
library.nvrtcGetPTX(program, text)
# Without the compiler's heading, and for the first driver that knows all of it.
body = text.value.decode()
body = body[body.index(".version"):]
print(re.sub(r"\.version \S+", ".version 6.0", body), end="")
PYTHON
  for device in sm_60 sm_70 sm_80 sm_90 sm_100 sm_120; do
    "$ptxas" -arch="$device" -o "$work/out.cubin" "$work/out.ptx"
  done
  mv "$work/out.ptx" "$target"
  echo "$target: $(wc -l <"$target") lines"
done
