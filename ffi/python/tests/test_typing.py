"""The types: sources and stubs are checked, and the stubs are compared with the module."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HERE

import kvxfer

pytest.importorskip("mypy", reason="mypy is not installed: types are not checked")


def run(*command):
    # mypy finds what is installed; a package that is used where it was built must be shown to it.
    parent = Path(kvxfer.__file__).parent.parent
    shown = {} if parent.name == "site-packages" else {"MYPYPATH": str(parent)}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, cwd=HERE, env={**os.environ, **shown}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_is_strictly_typed():
    package = Path(kvxfer.__file__).parent
    # What needs vLLM is checked where vLLM is.
    modules = [f"kvxfer.{path.stem}" for path in sorted(package.glob("*.py*")) if path.stem.isidentifier() and path.stem != "__init__"]
    assert "kvxfer._tensors" in modules and "kvxfer._kvxfer" in modules
    run("mypy", "--strict", "-m", "kvxfer", *(word for name in modules for word in ("-m", name)))


def test_users_see_the_types(tmp_path):
    use = tmp_path / "use.py"
    use.write_text(
        "import kvxfer\n"
        "async def main(endpoint: kvxfer.Endpoint, pool: kvxfer.Pool) -> int:\n"
        "    claim = endpoint.claim('r', pool, ['127.0.0.1:1'])\n"
        "    arrival = await claim\n"
        "    async for event in endpoint.events:\n"
        "        print(event.data)\n"
        "    reveal_type(arrival)\n"
        "    return claim.wait(1.0).bytes\n"
    )
    run("mypy", "--strict", use)
    use.write_text("import kvxfer\nkvxfer.Endpoint(name=5)\n")
    with pytest.raises(AssertionError, match="arg-type"):
        run("mypy", "--strict", use)


def test_examples_are_typed():
    run("mypy", "--strict", *sorted((HERE.parent / "examples").glob("*.py")))


def test_the_stubs_are_the_module():
    allowlist = HERE / "stubtest-allowlist.txt"
    run("mypy.stubtest", "kvxfer._kvxfer", "--allowlist", allowlist, "--ignore-unused-allowlist", "--concise")


def public(thing):
    return [name for name in vars(thing) if not name.startswith("_")]


def test_everything_has_a_docstring_and_a_signature():
    missing = []
    for name in kvxfer.__all__:
        thing = getattr(kvxfer, name)
        if isinstance(thing, str):
            continue
        if not inspect.getdoc(thing):
            missing.append(name)
        if not inspect.isclass(thing) or not thing.__module__.startswith("kvxfer"):
            continue
        for member in public(thing):
            found = inspect.getattr_static(thing, member)
            if isinstance(found, staticmethod):
                found = found.__func__
            if callable(found):
                assert inspect.signature(found), (name, member)
            if (callable(found) or inspect.isgetsetdescriptor(found)) and not inspect.getdoc(found):
                missing.append(f"{name}.{member}")
    assert not missing


def test_all_names_everything_public():
    for name in public(kvxfer):
        assert name in kvxfer.__all__ or inspect.ismodule(getattr(kvxfer, name)), name
