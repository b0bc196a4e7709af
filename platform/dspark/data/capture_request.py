"""What is to be captured: whose answers, which of the target's layers, cut how. The same offline and online."""

from dataclasses import dataclass
from typing import Any

from dspark.chat import require_supervision, training_sequences, truncate
from dspark.config import build_config
from dspark.data.answers import AnswerSet, read_answers
from dspark.data.capture import CaptureSettings, resolve_layer_ids
from dspark.provenance import require_same
from dspark.targets import TargetConfig, load_target_config, target_identity


@dataclass(frozen=True)
class CaptureRequest:
    """record: what the states depend on, as plain values; whatever is made from them keeps it and compares it."""

    answers: AnswerSet
    target: TargetConfig
    layer_ids: tuple[int, ...]
    hidden_size: int
    record: dict[str, Any]


def resolve_capture(folder: str, settings: CaptureSettings) -> CaptureRequest:
    """The request for the answers in `folder`.

    Raises: Mismatch by field name when the target is not the one that answered; ValueError for layers it has not.
    """
    answers = read_answers(folder)
    target = build_config(TargetConfig, answers.target | {"dtype": settings.dtype}, source=f"answers {folder}")
    require_same(
        f"target {target.name} of the answers {folder}",
        target_identity(target),
        answers.target_identity,
        remedy="make the answers again with jobs/generate.py",
    )
    shape = load_target_config(target)
    layer_ids = resolve_layer_ids(settings, shape.num_hidden_layers)
    record = {
        "answers_fingerprint": answers.fingerprint,
        "target": answers.target_identity,
        "chat": answers.chat,
        "target_layer_ids": list(layer_ids),
        "dtype": settings.dtype,
        "max_length": settings.max_length,
        "min_loss_tokens": settings.min_loss_tokens,
    }
    return CaptureRequest(answers, target, layer_ids, shape.hidden_size, record)


def require_supervised(request: CaptureRequest, *, max_length: int) -> None:
    """Raises: ValueError when no usable answer carries loss, naming the target."""
    turns_of = (row["turns"] for row in request.answers.rows(statuses=["ok"]))
    require_supervision(
        (truncate(sequence, max_length) for turns in turns_of for sequence in training_sequences(turns)),
        target=request.target.name,
    )
