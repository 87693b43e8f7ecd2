"""Makes PyPI's CUDA build of torch importable on a machine without CUDA, and without its 2 GB of CUDA wheels.

torch's shared objects name CUDA libraries that the loader must find. Each is made here: a library of that name with just the
symbols that torch refers to, under the versions it asks for, which all return an error. torch then says that there is no device.
The CUDA runtime alone is the real one.

  cuda_stubs.py SITE_PACKAGES
"""
import pathlib
import re
import subprocess
import sys
import tempfile

CUDA_LIBRARY = re.compile(r"lib(cu[a-zA-Z]+|nccl|nvshmem\w*|nvrtc|nvJitLink|nvToolsExt)\.so")
CUDA_SYMBOL = re.compile(r"(cu|nccl|nvshmem|nvrtc)")
RUNTIME = "libcudart.so.13"
# The library of a symbol, by the symbol's beginning; the longest that fits.
OWNERS = {
    "cusparseLt": "libcusparseLt", "cublasLt": "libcublasLt", "cublas": "libcublas", "cudnn": "libcudnn", "cusparse": "libcusparse",
    "cusolver": "libcusolver", "cufft": "libcufft", "curand": "libcurand", "nccl": "libnccl", "cuFile": "libcufile",
    "nvshmem": "libnvshmem_host", "nvrtc": "libnvrtc", "cupti": "libcupti",
}
# Asked for when torch is imported; it wants an answer, not an error.
ANSWERS = {
    "ncclGetVersion": "int ncclGetVersion(int *version) { *version = 22907; return 0; }",
    "cudnnGetVersion": "unsigned long cudnnGetVersion(void) { return 92000; }",
}


def main(site):
    libraries = site / "torch" / "lib"
    needed, symbols = wants(list(libraries.glob("*.so*")) + list((site / "torch").glob("_C*.so")))
    for name in sorted(needed - {RUNTIME, "libcuda.so.1"}):   # the driver's library is loaded at run time, and never here
        base = name.split(".so")[0]
        mine = {symbol: version for symbol, version in symbols.items() if owner(symbol) == base and version != RUNTIME}
        make(libraries / name, mine)
        print(f"{name}: {len(mine)} symbols")
    for real in list(site.glob(f"nvidia/*/lib/{RUNTIME}")):
        link = libraries / RUNTIME
        if not link.exists():
            link.symlink_to(real)


def wants(objects):
    """The CUDA libraries that these objects name, and the CUDA symbols they do not define, with their versions."""
    needed, symbols = set(), {}
    for path in objects:
        if CUDA_LIBRARY.match(path.name):
            continue   # made by an earlier run
        for name in re.findall(r"\(NEEDED\).*\[(.*?)\]", output("readelf", "-dW", path)):
            if CUDA_LIBRARY.match(name):
                needed.add(name)
        for line in output("nm", "-D", "--undefined-only", path).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if CUDA_SYMBOL.match(symbol):
                symbols[symbol] = version.lstrip("@")
    return needed, symbols


def owner(symbol):
    fitting = [beginning for beginning in OWNERS if symbol.startswith(beginning)]
    return OWNERS[max(fitting, key=len)] if fitting else None


def make(library, symbols):
    versions = {}
    for symbol, version in symbols.items():
        versions.setdefault(version, []).append(symbol)
    with tempfile.TemporaryDirectory() as folder:
        source, script = pathlib.Path(folder, "stub.c"), pathlib.Path(folder, "stub.map")
        source.write_text("\n".join([f"int kvxfer_stub_of_{len(symbols)}_symbols;"] + [body(symbol) for symbol in sorted(symbols)]) + "\n")
        script.write_text("\n".join(f"{version} {{ global: {'; '.join(sorted(names))}; }};" for version, names in versions.items() if version))
        command = ["gcc", "-w", "-shared", "-fPIC", "-o", library, source, f"-Wl,-soname,{library.name}"]
        if script.read_text():
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([str(part) for part in command], check=True)


def body(symbol):
    if symbol in ANSWERS:
        return ANSWERS[symbol]
    if symbol.endswith(("GetErrorString", "GetLastError")):
        return f'const char *{symbol}(void) {{ return "no CUDA here"; }}'
    return f"int {symbol}(void) {{ return 1; }}"


def output(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
