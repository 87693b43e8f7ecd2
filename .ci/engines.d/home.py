"""Where things are."""
import os
import pathlib

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
HOME = pathlib.Path(os.environ.get("KVXFER_ENGINES_HOME") or pathlib.Path.home() / ".cache" / "kvxfer-engines")
LOCK = pathlib.Path(os.environ.get("KVXFER_ENGINES_LOCK") or HOME / "lock")

TOOLS = HOME / "tools"
VENV = HOME / "venv-vllm"
MODEL = HOME / "tiny-llama"
LOGS = HOME / "logs"
# The connector of this checkout, beside the virtual environment and not in it: several checkouts can share one.
KVXFER = CHECKOUT / "target" / "engines"
SITE = KVXFER / "site"


class Problem(Exception):
    """Something the user has to see and can act on; printed without a traceback."""
