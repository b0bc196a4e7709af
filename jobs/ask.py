"""Serve a deployment with `serve run`, ask it questions over HTTP with the official client, and stop it again."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import runner
from dspark.config import load_config
from dspark.errors import DsparkError
from dspark.evaluation.questions import Answer, AskConfig, ask
from dspark.evaluation.server_metrics import sum_samples
from dspark.provenance import file_sha256, fingerprint, read_json, write_json
from dspark.serving.deployment_file import DeploymentFile

ANSWERS, LOG = "answers.json", "serve.log"

log = logging.getLogger("dspark.ask")


def run(config: AskConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Ask every question; returns the answers and the server's accepted length."""
    deployment = load_config(DeploymentFile, config.deployment)
    host, port = deployment.http_options.host, deployment.http_options.port
    output = Path(config.output).resolve()
    request = _request(config, deployment)
    print(f"serving {config.deployment} at http://{host}:{port}, {len(config.questions)} questions", flush=True)
    if dry_run:
        return {"stage": "ask", "dry_run": True, "output": config.output}
    if not fresh and (output / ANSWERS).is_file() and (content := read_json(output / ANSWERS))["request"] == request:
        return content["result"] | {"skipped": True}
    output.mkdir(parents=True, exist_ok=True)
    runner.start_ray()
    started = time.monotonic()
    with (
        runner.track(config, "ask") as tracked,
        _served(
            config, f"http://{host}:{port}", [application.name for application in deployment.applications], output / LOG
        ) as base_url,
    ):
        answers = list(_answers(config, base_url))
        result = _result(config, answers, _metrics(base_url), time.monotonic() - started)
        tracked.log_metrics(runner.figures(result), step=0)
        write_json(output / ANSWERS, {"request": request, "result": result})
        tracked.log_artifact(output / ANSWERS)
    return result


def _request(config: AskConfig, deployment: DeploymentFile) -> str:
    """Fingerprint of what the answers depend on; the drafter's own files among it."""
    folders = [Path(application.args.drafter or "") for application in deployment.applications]
    files = [folder / name for folder in folders for name in ("model.safetensors", "calibration.json")]
    digests = [file_sha256(path) if path.is_file() else None for path in files]
    return fingerprint([config.model_dump(mode="json"), deployment.model_dump(mode="json"), digests])


@contextlib.contextmanager
def _served(config: AskConfig, base_url: str, applications: Sequence[str], log_path: Path) -> Iterator[str]:
    """`serve run` on the job's own Ray cluster, until the block ends. Raises: DsparkError when it does not come up."""
    import ray  # heavy, and not needed for --dry-run

    _require_free(base_url)
    command = [str(Path(sys.executable).with_name("serve")), "run", config.deployment]
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with open(log_path, "wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_heed_interrupts,
        )
        try:
            _wait(process, base_url, config.startup_timeout_s, log_path)
            yield base_url
        finally:
            process.send_signal(signal.SIGINT)  # SIGTERM would leave the application running
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            _stop_serving(applications)


def _heed_interrupts() -> None:
    """A job in a shell's background ignores SIGINT, and what it starts would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _stop_serving(applications: Sequence[str]) -> None:
    """Whatever `serve run` left behind; Serve itself stays up while others have applications on it."""
    from ray import serve  # heavy, and not needed for --dry-run

    others = serve.status().applications.keys() - set(applications)
    if not others:
        serve.shutdown()
        return
    for name in applications:
        serve.delete(name)


def _require_free(base_url: str) -> None:
    host, port = base_url.removeprefix("http://").split(":")
    with contextlib.closing(socket.socket()) as probe:
        if probe.connect_ex((host, int(port))) == 0:
            raise DsparkError(
                f"something listens at {host}:{port} already; stop it or set http_options.port in the deployment file"
            )


def _wait(process: "subprocess.Popen[bytes]", base_url: str, timeout_s: float, log_path: Path) -> None:
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise DsparkError(f"serve run ended with status {process.returncode}; its last lines are in {log_path}")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{base_url}/health") as reply:
            if reply.status == 200:
                return
        time.sleep(0.5)
    raise DsparkError(f"the server did not answer within {timeout_s:g} s; see {log_path} or raise startup_timeout_s")


def _answers(config: AskConfig, base_url: str) -> Iterator[Answer]:
    import openai  # heavy, and not needed for --dry-run

    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    for question in config.questions:
        answer = ask(client, question, max_tokens=config.max_tokens, temperature=config.temperature)
        print(f"\nQ: {question}\nA: {answer.text.strip()}")
        print(
            f"   ({answer.completion_tokens} tokens in {answer.chunks} pieces, {answer.tokens_per_s:.1f} tokens/s, "
            f"ended by {answer.finish_reason})",
            flush=True,
        )
        yield answer


def _metrics(base_url: str) -> dict[str, float]:
    """The server's counters, summed over replicas, by name."""
    with urllib.request.urlopen(f"{base_url}/metrics") as reply:
        return sum_samples(reply.read().decode())


def _result(config: AskConfig, answers: list[Answer], metrics: dict[str, float], seconds: float) -> dict[str, Any]:
    tokens = sum(answer.completion_tokens for answer in answers)
    return {
        "stage": "ask",
        "output": config.output,
        "answers": [answer.to_dict() for answer in answers],
        "accepted_length_served": _accepted_length(metrics),
        "seconds": round(seconds, 1),
        "tokens": tokens,
        "tokens_per_s": round(tokens / sum(answer.seconds for answer in answers), 1),
    }


def _accepted_length(metrics: dict[str, float]) -> float | None:
    rounds = metrics.get("dspark_rounds_total", 0.0)
    return round(metrics["dspark_committed_tokens_total"] / rounds, 4) if rounds else None


if __name__ == "__main__":
    sys.exit(runner.main(AskConfig, run, default_config="ask.yaml"))
