"""Start-up check of a run: one training step of a tiny copy of the model against transformers.

The copy has the keys of the model's config.json with small sizes. It is trained in the engine, the
batching mode, the layout and the recomputation of the run, by a process without GPUs, while the
run reads its weights. A difference would make training silently wrong. Equal outcomes are kept in
the cache of the user, so that the same run does not check again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path

from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import build_layout, num_policy_workers
from nemo_like.config.paths import model_directory
from nemo_like.config.schema import ClusterConfig, ParallelConfig, PolicyConfig
from nemo_like.data.encoded_rows import cache_directory
from nemo_like.models.pretrained import load_model_config
from nemo_like.run.files import write_json
from nemo_like.run.progress import Progress
from nemo_like.run.versions import installed_versions
from nemo_like.training.parity import TinyRun, in_mode, tiny_run

logger = logging.getLogger(__name__)

LIMIT_S = 20.0
"""A run does not wait for the process when it has run for so long."""
_MAX_SIZE = 2
"""Size of each axis of the layout, which shows what a larger one does."""
_KEY = "policy.parity_check"


class ParityCheck:
    """The check of one run, in a process or with the outcome of an earlier run.

    An outcome is a file with its kind, `equal`, `different` or `unknown` (there is no tiny copy in
    this layout), and a text for the user.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        parallel: ParallelConfig,
        cluster: ClusterConfig,
        closing: ExitStack,
    ) -> None:
        """Start the process, where one is needed; it ends with `closing` at the latest."""
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = time.monotonic()
        if not policy.parity_check:
            logger.info("%s is false: the layout is not compared with transformers", _KEY)
            return
        run = checked_run(policy, parallel, build_layout(parallel, num_policy_workers(cluster)).dp)
        self._kept = cache_directory("parity") / f"{_digest(run)}.json"
        if self._kept.exists():
            self._report(self._kept, "in an earlier run")
            return
        folder = tempfile.TemporaryDirectory(prefix="nemo_like_parity_", ignore_cleanup_errors=True)
        self._folder = Path(closing.enter_context(folder))
        self._process = _start_process(run, self._folder)
        closing.callback(self._stop)

    def finish(self, progress: Progress) -> None:
        """Wait for the outcome, up to `LIMIT_S` from the start.

        Raises ConfigError for a difference. A process that takes longer, or fails, gives a warning.
        """
        if self._process is None:
            return
        with (
            progress.phase("comparing a tiny copy of the model with transformers", unit="checks"),
            suppress(subprocess.TimeoutExpired),
        ):
            self._process.wait(max(self._started_s + LIMIT_S - time.monotonic(), 0))
        code = self._process.poll()
        self._stop()
        if (self._folder / "outcome.json").exists():
            # A difference is known before its cause.
            self._report(self._folder / "outcome.json", "in this run")
        elif code is None:
            logger.warning("%s: no result after %g s, so it is left out", _KEY, LIMIT_S)
        else:
            lines = (self._folder / "output").read_text(errors="replace").splitlines()
            reason = lines[-1] if lines else f"exit code {code}"
            logger.warning("%s: the comparison with transformers failed: %s", _KEY, reason)

    def _report(self, path: Path, when: str) -> None:
        """Log the outcome in a file and keep it. Raises ConfigError for a difference."""
        kind, text = json.loads(path.read_text())
        if kind == "different":
            raise ConfigError(text)
        level = logging.INFO if kind == "equal" else logging.WARNING
        logger.log(level, "%s: %s %s", _KEY, text, when)
        # Without a cache the next run checks again.
        with suppress(OSError):
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            self._kept.write_text(path.read_text())

    def _stop(self) -> None:
        """Kill the process and its ranks, if they run. Only once: another could get its number."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def checked_run(policy: PolicyConfig, parallel: ParallelConfig, num_replicas: int) -> TinyRun:
    """Return what is checked of a run: every axis of its layout in a small size.

    Its model is the real one. Data-parallel replicas of a model in more than two parts are not
    checked, which would take more processes than the time allows.
    """
    axes = ("tensor", "context", "pipeline", "virtual_pipeline", "expert")
    sizes: dict[str, int] = {name: min(getattr(parallel, name), _MAX_SIZE) for name in axes}
    small = replace(parallel, replicas=1, **sizes)
    if small.tensor * small.context * small.pipeline > _MAX_SIZE:
        num_replicas = 1
    packs = policy.sequence_packing.enabled
    mode = "packed" if packs else "dynamic" if policy.dynamic_batching.enabled else "padded"
    # Other keys do not change what is compared, and would be new outcomes.
    kept = PolicyConfig(
        model_name=policy.model_name,
        engine=policy.engine,
        activation_checkpointing=policy.checkpointing,
        shared_prefix=policy.shared_prefix,
    )
    directory = Path(model_directory("policy.model_name", policy.model_name, weights=False))
    return tiny_run(in_mode(kept, mode), small, num_replicas, directory)


def _digest(run: TinyRun) -> str:
    """Return a hash of everything that the outcome depends on."""
    model_config = load_model_config(run.policy.model_name).to_dict()
    anywhere = replace(run, policy=replace(run.policy, model_name="-"))
    key = repr((sorted(model_config.items()), anywhere, installed_versions())).encode()
    for part in ("data", "models", "policy", "training"):
        for path in sorted(Path(__file__).parents[1].glob(f"{part}/**/*.py")):
            key += path.read_bytes()
    return hashlib.blake2b(key, digest_size=16).hexdigest()


def _start_process(run: TinyRun, folder: Path) -> subprocess.Popen[bytes]:
    write_json(folder / "run.json", asdict(run))
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    # The same modules as here, and none of the working directory.
    modules = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.parity_process", str(folder)],
            env={**os.environ, **hidden, **modules},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # With its ranks it is one group, which is killed together.
            start_new_session=True,
        )
