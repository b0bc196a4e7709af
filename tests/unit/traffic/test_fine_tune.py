"""One job per cool-down, whichever replica asks; what fails is told and may be tried again."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from dspark.provenance import read_json
from dspark.traffic.config import FineTuneConfig
from dspark.traffic.fine_tune import AlreadySubmitted, FineTune

COMMAND = ["python", "jobs/train.py", "initialize_from={drafter}", "output=runs/tuned/{id}", "prompts={traffic}"]
CONFIG = FineTuneConfig(command=COMMAND, cooldown_s=1000)


class Cluster:
    """Takes each id once, as Ray does."""

    def __init__(self) -> None:
        self.jobs: dict[str, list[str]] = {}
        self.is_up = True

    def submit(self, command: list[str], job_id: str) -> None:
        if not self.is_up:
            raise ConnectionError("no cluster")
        if job_id in self.jobs:
            raise AlreadySubmitted(job_id)
        self.jobs[job_id] = command


def make(folder: Path, cluster: Cluster, now: list[float]) -> FineTune:
    return FineTune(CONFIG, folder=folder, submit=cluster.submit, clock=lambda: now[0])


def test_the_job_goes_on_from_the_drafter_that_serves_once_per_cool_down(tmp_path: Path) -> None:
    cluster, now = Cluster(), [5000.0]
    one, other = make(tmp_path, cluster, now), make(tmp_path, cluster, now)
    outcomes = []
    for seconds in (0, 10, 900, 999, 1001, 1500, 2002):
        now[0] = 5000.0 + seconds
        outcomes += [tuner.start_now("runs/drafter", "abcdef0123456789", "why") for tuner in (one, other)]
    assert [i for i, outcome in enumerate(outcomes) if outcome == "started"] == [0, 8, 12]
    job_id, command = next(iter(cluster.jobs.items()))
    assert job_id == "dspark-fine-tune-abcdef01-5"
    assert command[2:] == ["initialize_from=runs/drafter", f"output=runs/tuned/{job_id}", f"prompts={tmp_path}"]
    state = read_json(tmp_path / "fine_tune.json")
    assert (state["started_s"], state["reason"]) == (7002.0, "why")


def test_two_that_ask_in_the_same_moment_start_one_job(tmp_path: Path) -> None:
    """Neither sees the other's note: the job's id is what they share."""
    cluster, now = Cluster(), [5000.0]
    one, other = make(tmp_path / "a", cluster, now), make(tmp_path / "b", cluster, now)
    assert [tuner.start_now("runs/drafter", "ab" * 8, "") for tuner in (one, other)] == ["started", "cooling_down"]
    assert len(cluster.jobs) == 1


def test_a_cluster_that_is_away_is_told_and_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster, now = Cluster(), [5000.0]
    tuner = make(tmp_path, cluster, now)
    cluster.is_up = False
    for _ in range(2):
        thread = tuner.start("runs/drafter", "ab" * 8, "acceptance fell")
        assert thread is not None
        thread.join(10)
        cluster.is_up = True
    assert tuner.outcomes == {"started": 1, "cooling_down": 0, "failed": 1}
    assert "no fine-tuning was started after acceptance fell: no cluster" in caplog.text


def test_a_placeholder_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"holds \{drafer\}; there are drafter, traffic, id"):
        FineTuneConfig(command=["x={drafer}"])
    with pytest.raises(ValidationError, match="for braces"):
        FineTuneConfig(command=["x={"])
    assert FineTuneConfig(command=["{{}}"]).command == ["{{}}"]
