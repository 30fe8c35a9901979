"""Check that the Ray job API answers, and write the runtime environment of a run. Called by
`submit.sh`.

    prepare_submission.py ADDRESS START_DIR OUTPUT_FILE NUM_PACKAGES [PACKAGE_DIR ...] [VARIABLE
    ...]

The exit code is 1, with one message, if the API does not answer: `ray job submit` would print a
traceback.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

_TIMEOUT_S = 20.0


def api_problem(address: str) -> str | None:
    """Return why the job API at `address` cannot be used, with the fix, or None if it answers."""
    if not address.startswith(("http://", "https://")):
        return f"RAY_API_SERVER_ADDRESS is {address!r}; it must begin with http:// or https://"
    try:
        request = urllib.request.Request(f"{address.rstrip('/')}/api/jobs/")
        token = _token()
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        # An address on this machine must not go through the proxy of the environment.
        opener = (
            urllib.request.build_opener(urllib.request.ProxyHandler({}))
            if _is_local(address)
            else None
        )
        with (opener.open if opener else urllib.request.urlopen)(
            request, timeout=_TIMEOUT_S
        ) as response:
            json.load(response)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return (
                f"the Ray job API at {address} refuses the token (HTTP {error.code}); use the one"
                f" of the head, in"
                " ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            )
        return (
            f"{address} answers HTTP {error.code}, so it is no Ray job API; set"
            " RAY_API_SERVER_ADDRESS"
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return (
            f"there is no Ray job API at {address} ({reason}); start a head with"
            f" ray_jobs/start_head.sh, open an ssh"
            " tunnel to one, or set RAY_API_SERVER_ADDRESS"
        )
    return None


def _token() -> str:
    """Return Ray's token: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if token:
        return token.strip()
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _is_local(address: str) -> bool:
    host = urllib.parse.urlparse(address).hostname
    return host in ("localhost", "127.0.0.1", "::1")


def runtime_env(start_dir: str, packages: list[str], names: list[str]) -> dict[str, object]:
    """Return Ray's runtime environment: the variables that rewards and hubs need, and the packages
    to upload.

    Relative parts of the path variables are relative to `start_dir`.
    """
    names = [*names, "PYTHONPATH", "NEMO_LIKE_DATA"]
    names += [name for name in os.environ if name.startswith(("HF_", "WANDB_"))]
    variables = {name: os.environ[name] for name in names if name in os.environ}
    for name in {"PYTHONPATH", "NEMO_LIKE_DATA"} & variables.keys():
        parts = [part for part in variables[name].split(os.pathsep) if part]
        variables[name] = os.pathsep.join(os.path.join(start_dir, part) for part in parts)
    # `ray job stop` kills a run after 3 s by default, which is too soon to finish a step and save.
    variables["RAY_JOB_STOP_WAIT_TIME_S"] = os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "1800")
    return {"env_vars": variables, **({"py_modules": packages} if packages else {})}


def main() -> int:
    """Check the Ray address, write the runtime environment; return the exit status."""
    address, start_dir, output_file, num_packages = sys.argv[1:5]
    packages = sys.argv[5 : 5 + int(num_packages)]
    names = sys.argv[5 + int(num_packages) :]
    problem = api_problem(address)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    Path(output_file).write_text(
        json.dumps(runtime_env(start_dir, packages, names)), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
