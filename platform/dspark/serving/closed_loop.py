"""What a replica learns from its own answers: live calibration error, drift, recorded rounds, new calibrations.

Everything here is for the replica's event loop and waits for nothing; files are read and written by threads of
`dspark.traffic`. Only rounds with confidences count: copied tokens have none.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspark.engine.confidences import Confidences
from dspark.engine.drafter_folder import CALIBRATION, DRAFTER_FILES, WITHOUT_FOLDER, drafter_sha256
from dspark.engine.loading import LoadedEngine
from dspark.engine.request import GenerationRequest
from dspark.engine.running import DecodingMode
from dspark.engine.step import StepOutput
from dspark.errors import one_line
from dspark.provenance import git_revision
from dspark.serving.config import ServeConfig
from dspark.serving.fine_tune_job import submit_job
from dspark.serving.openai_schema import ChatRequest, CompletionRequest, GenerateRequest
from dspark.speculation.calibration import SlotScales
from dspark.storage import absolute, locate
from dspark.traffic.calibration_watch import CalibrationWatch, FoundCalibration
from dspark.traffic.config import WatchConfig
from dspark.traffic.drift import LEVELS, AcceptanceWatch
from dspark.traffic.fine_tune import FineTune, Submit
from dspark.traffic.live_error import ConfidenceWindow
from dspark.traffic.recorder import AnswerRecord, Recorder
from dspark.traffic.rounds import MODES, Origin, num_judged
from dspark.transfer import local_folder

log = logging.getLogger("dspark")


@dataclass(frozen=True)
class Served:
    """A drafter with confidences as it serves; another one is another object. folder: where it was named to be."""

    engine: Any
    folder: str
    sha256: str
    block_size: int
    target: dict[str, Any]


@dataclass(frozen=True)
class Belief:
    """What is held of a drafter's confidences since the present calibration, by way of decoding."""

    found: FoundCalibration
    windows: dict[str, ConfidenceWindow]
    watches: dict[str, AcceptanceWatch]

    @classmethod
    def new(cls, found: FoundCalibration, config: WatchConfig, block_size: int) -> "Belief":
        levels = found.calibration.fitted_on.get(LEVELS, {})
        options = config.model_dump(include={"drop", "rounds_between_false_alarms", "design_effect", "learn_rounds"})
        return cls(
            found,
            {mode: ConfidenceWindow(block_size, config.window_rounds) for mode in MODES},
            {mode: AcceptanceWatch(levels.get(mode), **options) for mode in MODES},
        )

    def scales(self, mode: str) -> SlotScales | None:
        """Those that the engine goes by."""
        return self.found.calibration.for_mode(mode)


class ClosedLoop:
    """One per replica. `use` comes before the first answer, and again after another drafter took over."""

    def __init__(self, config: ServeConfig, replica: str, *, submit: Submit | None = None) -> None:
        self.recorder = None if config.traffic is None else Recorder(config.traffic, writer=replica)
        self.fine_tune = None
        settings = config.watch.fine_tune
        if settings is not None and self.recorder is not None:
            submit = submit or submit_job(settings.address, settings.working_dir)
            self.fine_tune = FineTune(settings, folder=self.recorder.folder.place, submit=submit)
        self.calibrations = {"taken": 0, "refused": 0}  # of drafters that served before
        self.is_paused = False
        self.served: Served | None = None
        self.belief: Belief | None = None
        self.calibration_watch: CalibrationWatch | None = None
        self._origin: Origin | None = None
        self._config, self._replica = config.watch, replica
        self._git_revision = git_revision() if config.traffic is not None else None

    def pause(self) -> None:
        """Nothing counts until `use` or `resume`: another drafter is about to take over."""
        self.is_paused = True

    def resume(self) -> None:
        """All is as it was: the other drafter was refused."""
        self.is_paused = False

    def use(self, loaded: LoadedEngine, drafter: str | None) -> None:
        """Go by this engine. It reads the drafter's weights to know them again, which takes a moment."""
        self._forget()
        try:
            self._watch(loaded, drafter)
        except Exception as error:  # whatever a store raises: answers are served, if unwatched
            log.error("drafter %s is not watched while it serves: %s", drafter, one_line(error))
            self._forget()
        self.is_paused = False

    def _forget(self) -> None:
        self.served = self.belief = None
        if self.calibration_watch is not None:
            self.calibration_watch.stop()
            for outcome, number in self.calibration_watch.outcomes.items():
                self.calibrations[outcome] += number
            self.calibration_watch = None

    def _watch(self, loaded: LoadedEngine, drafter: str | None) -> None:
        if drafter in WITHOUT_FOLDER or loaded.provenance is None or not loaded.engine.policy.has_confidence:
            return
        folder = absolute(str(drafter))
        digest = drafter_sha256(local_folder(folder, DRAFTER_FILES))
        block_size = loaded.engine.block_size
        served = Served(loaded.engine, folder, digest, block_size, loaded.provenance["target"])
        watch = CalibrationWatch(
            locate(folder) / CALIBRATION,
            drafter_sha256=digest,
            block_size=block_size,
            period_s=self._config.calibration_check_s,
            take=lambda found: self._take(served, found),
        )
        self.calibration_watch = watch
        self._believe(served, watch.present)
        self.served = served

    def begin(self, request: GenerateRequest, choices: Sequence[GenerationRequest]) -> "Recording":
        """To be told what each of the choices outputs. Its `requests` are what the engine is to be given."""
        return Recording(self, request, choices)

    def close(self) -> None:
        """Write what is recorded, and stop the threads."""
        self._forget()
        if self.recorder is not None:
            self.recorder.close()

    def drifted(self, mode: str) -> None:
        """An alarm has begun."""
        served, belief = self.served, self.belief
        if served is None or belief is None:
            return
        test = belief.watches[mode].test
        share = "unknown" if test is None or test.ratio is None else f"{test.ratio:.2f}"
        reason = f"{mode} drafts of {served.folder} are accepted {share} times as often as at calibration"
        log.warning("%s", reason)
        if self.fine_tune is not None:
            self.fine_tune.start(served.folder, served.sha256, reason)

    def _take(self, served: Served, found: FoundCalibration) -> None:
        """A new calibration, in the watch's thread: one attribute of the policy changes, and a step in flight may see
        the one before or this; neither changes what is output, only what is verified."""
        if served.engine.config.verify_length is None:  # a fixed length asks no confidences
            served.engine.policy.confidences = Confidences(found.calibration)
        if self.served is served:
            self._believe(served, found)

    def _believe(self, served: Served, found: FoundCalibration) -> None:
        self.belief = Belief.new(found, self._config, served.block_size)
        self._origin = Origin(
            drafter_sha256=served.sha256,
            drafter=served.folder,
            target=served.target,
            block_size=served.block_size,
            replica=self._replica,
            calibration=found.digest,
            git_revision=self._git_revision,
        )

    def new_record(self, request: GenerateRequest, mode: str) -> AnswerRecord | None:
        """To be filled, where this answer is drawn for it."""
        if self.recorder is None or self._origin is None or self.served is None:
            return None
        messages = None if self.recorder.config.texts is None else _messages(request)
        record = self.recorder.begin(self._origin, mode, may_keep_text=messages is not None)
        if record is not None and record.keeps_prompt:
            record.messages = messages
        return record


class Recording:
    """The answers to one request while they are served."""

    def __init__(self, loop: ClosedLoop, request: GenerateRequest, choices: Sequence[GenerationRequest]) -> None:
        self._loop, self._served = loop, loop.served
        self._modes = {choice.request_id: mode_of(choice) for choice in choices}
        self._records = {choice.request_id: loop.new_record(request, mode_of(choice)) for choice in choices}
        self.requests = [self._prepared(choice) for choice in choices]

    def add(self, output: StepOutput) -> None:
        """What a step gave one of the choices."""
        loop, done = self._loop, output.round
        record = self._records[output.request_id]
        if record is not None and record.keeps_answer:
            record.pieces.append(output.text)
        belief = loop.belief
        if done is None or done.confidence_logits is None or belief is None:
            return
        if loop.is_paused or loop.served is not self._served:
            return  # which drafter proposed it is not known, or it is another one than the record's
        mode, judged = self._modes[output.request_id], num_judged(done)
        belief.windows[mode].add(done.confidence_logits, done.num_accepted, judged)
        if belief.watches[mode].add(done.num_accepted, judged):
            loop.drifted(mode)
        if record is not None:
            record.rounds.append(done)

    def end(self) -> None:
        """Hand the records over, whole answers or not."""
        recorder = self._loop.recorder
        if recorder is not None:
            for record in self._records.values():
                if record is not None:
                    recorder.finish(record)

    def _prepared(self, choice: GenerationRequest) -> GenerationRequest:
        """A whole block a round, where that is drawn and the request itself asks for nothing else."""
        record = self._records[choice.request_id]
        if record is None or not record.is_whole or self._served is None:
            return choice
        if choice.verify_length is not None:
            record.is_whole = False
            return choice
        return replace(choice, verify_length=self._served.block_size)


def mode_of(request: GenerationRequest) -> DecodingMode:
    """How its tokens are decided, as `RunningRequest.mode` says once it runs."""
    if request.sampling.temperature == 0:
        return "greedy"
    is_seeded = request.seed is not None and request.sampling.seeded == "invariant"
    return "seeded" if is_seeded else "sampled"


def _messages(request: GenerateRequest) -> list[dict[str, str]] | None:
    """A prompt that is nothing but text, in the form of a prompt file; None for any other, and where the client says
    that nothing may be stored."""
    if not request.store:
        return None
    if isinstance(request, CompletionRequest):
        return [{"role": "user", "content": request.prompt}] if isinstance(request.prompt, str) else None
    assert isinstance(request, ChatRequest)
    if request.tools:
        return None
    turns = [(turn.role, turn.content) for turn in request.messages]
    if any(role == "tool" or content is None for role, content in turns):
        return None
    names = {"developer": "system"}
    return [{"role": names.get(role, role), "content": str(content)} for role, content in turns]
