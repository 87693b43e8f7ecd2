"""kvxfer.vllm is strictly typed; vLLM itself need not be there for that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer

pytest.importorskip("mypy", reason="mypy is not installed: types are not checked")

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


@pytest.mark.skipif(not PROJECT.exists(), reason="needs a checkout")
def test_the_connector_is_strictly_typed(tmp_path):
    # vLLM's own types, where it is installed, would take minutes: it is not followed.
    home = Path(kvxfer.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(PROJECT), "--cache-dir", str(tmp_path), "-p", "kvxfer.vllm"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **({} if home.name == "site-packages" else {"MYPYPATH": str(home)})},
    )
    assert done.returncode == 0, done.stdout + done.stderr
