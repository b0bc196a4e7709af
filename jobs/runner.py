"""What every job does the same way: arguments, environment, Ray, one line on failure, one JSON line at the end."""

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dspark.config import Config, load_config
from dspark.errors import DsparkError, one_line
from dspark.provenance import git_revision
from dspark.run_contents import mark_version
from dspark.tracking import Run, TrackingConfig, start_run

REPOSITORY = Path(__file__).resolve().parents[1]
LOGICAL_CPUS = 8  # Ray's CPUs are bookkeeping only; two real ones would leave no room for its own tasks

# Not Ray's default folder: there another job would take a cluster of ours for one that is to be joined.
RAY_FOLDER = str(Path(tempfile.gettempdir()) / f"dspark-{os.getuid()}")

C = TypeVar("C", bound=Config)
RunStage = Callable[..., dict[str, Any]]

log = logging.getLogger("dspark")

_has_own_cluster = False

PARENT_RUN = "DSPARK_PARENT_RUN"  # environment variable: id of the run that a job's own run belongs to
INTERRUPTED = 130  # exit status of a process that Ctrl-C ends: 128 + SIGINT


def main(
    config_class: type[C],
    run: RunStage,
    *,
    default_config: str,
    flags: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Parse the command line, call `run(config, fresh=, dry_run=)` and print its result as the last line.

    flags: keys of the config that may also be given as a flag of their own, with what stands for its value in the help.
    """
    arguments = _parse(default_config, flags or {}, argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for name in ("httpx", "httpx2"):  # a line per request says nothing that a job's own lines do not
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        config = load_config(config_class, arguments.config, arguments.overrides)
        result = run(config, fresh=arguments.fresh, dry_run=arguments.dry_run)
    except (DsparkError, ValueError) as error:
        # From a Ray worker comes a subclass whose message is the remote traceback; the cause has ours.
        print(f"error: {one_line(getattr(error, 'cause', error), max_chars=2000)}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        log.exception("job failed")
        print(f"error: {type(error).__name__}: {one_line(error)}", file=sys.stderr, flush=True)
        return 1
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return 0


def worker_environment() -> dict[str, str]:
    """For Ray's workers. Threads that spin at barriers cost a factor of four and more where cores are shared."""
    return {
        "GOMP_SPINCOUNT": "0",
        "OMP_NUM_THREADS": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # tensors on huge pages: half the system time of a training step on a CPU
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "0" if sys.stderr.isatty() else "1",  # in a log file our own lines tell
        "DS_ACCELERATOR": "cuda" if has_gpu() else "cpu",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",
    }


def track(config: Any, stage: str, *, run_id: str | None = None, **tags: str) -> Run:
    """The MLflow run of a stage, with its config as params. Use it as a context manager."""
    common = {"stage": stage, "git_revision": str(git_revision())}
    if os.environ.get(PARENT_RUN):
        common["mlflow.parentRunId"] = os.environ[PARENT_RUN]
    return start_run(config.tracking, params=config.model_dump(mode="json"), tags=common | tags, run_id=run_id)


@contextlib.contextmanager
def track_all(tracking: TrackingConfig, stage: str) -> Iterator[Run]:
    """A run whose block's other runs are its children, also those of processes that are started in it."""
    with start_run(tracking, tags={"stage": stage, "git_revision": str(git_revision())}) as parent:
        before = os.environ.get(PARENT_RUN)
        if parent.run_id is not None:
            os.environ[PARENT_RUN] = parent.run_id
        try:
            yield parent
        finally:
            os.environ.pop(PARENT_RUN, None)
            if before is not None:
                os.environ[PARENT_RUN] = before


class Progress:
    """How far a long job is, at what pace, and how long the rest takes at that pace."""

    def __init__(self, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock, self._started = total, clock, clock()

    def said(self, done: int) -> str:
        """ "3 of 12, 0.5/s, 18 s left"; done: in this run, of what it has to do."""
        seconds = max(self._clock() - self._started, 1e-9)
        rate = done / seconds
        pace = f"{rate:.2g}/s" if rate >= 0.1 else f"{60 * rate:.2g}/min"
        left = (self._total - done) / rate if rate else None
        return f"{done} of {self._total}, {pace}, {'?' if left is None else duration(left)} left"


def duration(seconds: float) -> str:
    """In the two largest units that it has."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def mark_drafter(run: Run, tracking: TrackingConfig, sha256: str, stage: str, tags: Mapping[str, Any]) -> None:
    """Tell the registered version of these weights how far it has come, where drafters are registered."""
    if tracking.register_as is not None:
        known = {name: value for name, value in tags.items() if value is not None}
        mark_version(run, tracking.register_as, sha256=sha256, stage=stage, tags=known)


def figures(result: dict[str, Any]) -> dict[str, float]:
    """The numbers among a stage's results."""
    return {k: float(v) for k, v in result.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def start_ray() -> None:
    """Join the cluster that `ray start` or a job submission set up, else start a local one; again is a no-op."""
    global _has_own_cluster
    import ray  # heavy, and not needed for --help or --dry-run

    if ray.is_initialized():
        return
    options: dict[str, Any] = {
        "runtime_env": {"env_vars": worker_environment()},
        "log_to_driver": True,
        "logging_level": logging.WARNING,
    }
    address = cluster_address()
    try:
        if address is None:
            raise ConnectionError("no cluster was started")
        ray.init(address=address, **options)
        log.info("joined the Ray cluster at %s", address)
    except ConnectionError:
        # A loopback cluster of our own needs no token; one that was started elsewhere keeps its own setting.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(
            address="local",
            _temp_dir=RAY_FOLDER,
            num_cpus=max(LOGICAL_CPUS, os.cpu_count() or 1),
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            **options,
        )
        _has_own_cluster = True
        log.info("started a local Ray cluster")


def stop_ray() -> None:
    """Stop a local cluster that `start_ray` started in this process; one that was joined is left as it is."""
    global _has_own_cluster
    import ray  # heavy, and loaded by whoever asks

    if _has_own_cluster:
        ray.shutdown()
    _has_own_cluster = False


def cluster_address() -> str | None:
    """Where a job submission or `ray start` set up a cluster; None without one.

    Ray's own "auto" also finds what other jobs started for their own time, and a job that joins dies with them.
    """
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    started = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    return started.read_text(encoding="utf-8").strip() or None if started.is_file() else None


def gpus_per_worker(wanted: float | None) -> float:
    """The configured share, or one GPU each where the cluster has any."""
    import ray  # heavy, and loaded by whoever asks

    if wanted is not None:
        return wanted
    return 1.0 if ray.cluster_resources().get("GPU", 0) > 0 else 0.0


def _parse(default_config: str, flags: Mapping[str, str], argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "--config",
        default=str(REPOSITORY / "configs" / "demo" / default_config),
        help="YAML file; the demo's without it",
    )
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved plan and projected sizes, do nothing"
    )
    for key, metavar in flags.items():
        parser.add_argument(
            "--" + key.replace("_", "-"), dest=key, metavar=metavar, help=f"the same as {key}={metavar}"
        )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to the config")
    arguments = parser.parse_intermixed_args(argv)  # overrides may stand before, between and after options
    given = {key: getattr(arguments, key) for key in flags}
    arguments.overrides += [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    return arguments


def has_gpu() -> bool:
    """Whether the machine has a CUDA device; torch need not be loaded to know."""
    return Path("/dev/nvidia0").exists()


# OpenMP reads its settings when torch is loaded, and jobs import torch after this module: later would be too late.
# A job that runs an engine itself has the cores to itself: a short spin at barriers makes its steps twice as fast.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
for _name, _value in worker_environment().items():
    os.environ.setdefault(_name, _value)
