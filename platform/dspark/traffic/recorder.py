"""From served answers to files, in a thread of its own: whoever serves never waits for it.

event loop: begin, finish -> queue of at most max_waiting answers -> thread: redact, gather, write
"""

import json
import logging
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark.errors import one_line
from dspark.speculation.statistics import Round
from dspark.storage import absolute
from dspark.traffic.config import TrafficConfig
from dspark.traffic.redaction import Redactor
from dspark.traffic.rounds import Origin, RoundBuffer
from dspark.traffic.shards import ROUNDS, TEXTS, ShardFolder

PAUSE_S = 30.0  # without a try after a file could not be written: a store that is away costs next to nothing
TEXT_BYTES = 4_000_000  # of texts, after which a file is written

log = logging.getLogger("dspark.traffic")


@dataclass
class AnswerRecord:
    """What is kept of one answer while it is served. messages: of the prompt, None where no prompts are kept.

    is_whole: its blocks are verified whole for the record's sake.
    """

    origin: Origin
    mode: str
    is_whole: bool
    keeps_prompt: bool
    keeps_answer: bool
    rounds: list[Round] = field(default_factory=list)
    messages: list[dict[str, str]] | None = None
    pieces: list[str] = field(default_factory=list)


@dataclass
class RecorderCounts:
    """Cumulative. Rounds: written, dropped because the writer was behind, lost because a file could not be written."""

    written_rounds: int = 0
    dropped_rounds: int = 0
    lost_rounds: int = 0
    written_texts: int = 0
    lost_texts: int = 0
    failures: int = 0


class Recorder:
    """Records a share of the answers. `begin` and `finish` are for one thread; everything else happens in its own."""

    def __init__(self, config: TrafficConfig, *, writer: str, draw: random.Random | None = None) -> None:
        """writer: a name that no other process writes under. draw: None draws differently each time."""
        self.config = config
        self.counts = RecorderCounts()
        self.folder = ShardFolder(absolute(config.folder), writer=writer, max_bytes=config.max_bytes)
        self._draw = draw or random.Random()
        self._queue: queue.Queue[AnswerRecord | threading.Event | None] = queue.Queue(config.max_waiting)
        texts = config.texts
        self._redactor = None
        if texts is not None:
            self._redactor = Redactor(texts.rules, texts.redact, max_characters=texts.max_characters)
        self._buffer = RoundBuffer()
        self._origin: Origin | None = None
        self._lines: list[str] = []
        self._num_text_bytes = 0
        self._write_at = time.monotonic() + config.flush_s
        self._resume_at = 0.0
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    @property
    def redactions(self) -> Counter[str]:
        """Matches so far, by rule."""
        return Counter() if self._redactor is None else self._redactor.counts

    def begin(self, origin: Origin, mode: str, *, may_keep_text: bool) -> AnswerRecord | None:
        """A record to fill while an answer is served; None for one that is not drawn."""
        if self._draw.random() >= self.config.share:
            return None
        texts = self.config.texts
        has_text = texts is not None and may_keep_text and self._draw.random() < texts.share
        return AnswerRecord(
            origin,
            mode,
            is_whole=self._draw.random() < self.config.whole_blocks,
            keeps_prompt=has_text and texts is not None and texts.prompts,
            keeps_answer=has_text and texts is not None and texts.answers,
        )

    def finish(self, record: AnswerRecord) -> None:
        """Hand a record over; it is dropped, and counted, where the writer is too far behind."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.counts.dropped_rounds += len(record.rounds)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Have everything written that was handed over; whether it was in time. Not for an event loop: it waits."""
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is there and end the thread."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=max(0.05, self._write_at - time.monotonic()))
            except queue.Empty:
                self._write()
                continue
            if isinstance(item, AnswerRecord):
                self._take(item)
                if len(self._buffer) >= self.config.shard_rounds or self._num_text_bytes >= TEXT_BYTES:
                    self._write()
                continue
            self._write(force=True)
            if item is None:
                return
            item.set()

    def _take(self, record: AnswerRecord) -> None:
        if self._origin != record.origin:  # a file holds rounds of one drafter under one calibration
            self._write()
            self._origin = record.origin
        request = self._draw_id()
        self._buffer.add(request, record.mode, record.rounds, is_whole=record.is_whole)
        if self._redactor is not None and (record.keeps_prompt or record.keeps_answer):
            line = _text_line(record, self._redactor, request)
            self._lines.append(line)
            self._num_text_bytes += len(line)

    def _draw_id(self) -> int:
        """Nobody finds a request's id of the API by it."""
        return random.getrandbits(63)

    def _write(self, *, force: bool = False) -> None:
        """Write what was gathered. What cannot be written is lost and counted: memory is bounded, too."""
        self._write_at = time.monotonic() + self.config.flush_s
        buffer, lines, counts = self._buffer, self._lines, self.counts
        self._buffer, self._lines, self._num_text_bytes = RoundBuffer(), [], 0
        if len(buffer) and self._origin is not None:
            if self._is_written(ROUNDS, buffer.encode(self._origin), force):
                counts.written_rounds += len(buffer)
            else:
                counts.lost_rounds += len(buffer)
        if lines:
            if self._is_written(TEXTS, "".join(lines).encode(), force):
                counts.written_texts += len(lines)
            else:
                counts.lost_texts += len(lines)

    def _is_written(self, kind: str, content: bytes, force: bool) -> bool:
        """Not while the folder rests after a failure."""
        if time.monotonic() < self._resume_at and not force:
            return False
        try:
            self.folder.write(kind, content)
        except Exception as error:  # whatever a store's client raises: the server goes on without its records
            self.counts.failures += 1
            self._resume_at = time.monotonic() + PAUSE_S
            # The error names a file; nothing of a text is in it.
            log.warning("recorded rounds are lost, %s cannot be written: %s", self.config.folder, one_line(error))
            return False
        return True


def _text_line(record: AnswerRecord, redactor: Redactor, request: int) -> str:
    row: dict[str, object] = {"id": f"{request:016x}", "domain": "traffic", "mode": record.mode}
    messages: Sequence[dict[str, str]] = record.messages or []
    if record.keeps_prompt and messages:
        row["messages"] = [{"role": m["role"], "content": redactor.clean(m["content"])} for m in messages]
    if record.keeps_answer:
        row["answer"] = redactor.clean("".join(record.pieces))
    row["target"] = record.origin.target.get("name", "")
    return json.dumps(row, ensure_ascii=False) + "\n"
