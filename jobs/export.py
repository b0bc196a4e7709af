"""Write a trained drafter in the layouts that other engines load, each with a model card."""

import logging
import sys
from pathlib import Path
from typing import Any

import runner
from dspark.drafters.export import (
    CARD,
    FORMATS,
    OWN,
    ExportConfig,
    RecordedTarget,
    accepted_lengths,
    copy_folder,
    engine_tables,
    num_bytes,
    read_curves,
    torch_dtype,
    write_folder,
)
from dspark.drafters.export_conversions import CannotExport
from dspark.drafters.export_formats import Exported, to_layout
from dspark.drafters.model_card import CardFacts, model_card
from dspark.drafters.stored import StoredDrafter, check_tensors, is_exchange_format, read_stored
from dspark.engine.drafter_folder import CALIBRATION, COST_CURVE, DRAFTER_FILES, drafter_sha256, drafter_target
from dspark.errors import MissingInput
from dspark.provenance import file_sha256, fingerprint, git_revision, read_json, write_json
from dspark.speculation.calibration import Calibration

EXPORT = "export.json"
KEPT_FIGURES = ("steps", "anchors", "supervised_slots", "parameters", "frozen_parameters", "seconds")

log = logging.getLogger("dspark.export")


def run(config: ExportConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Write what is not written yet; returns where, and what was refused for which reason."""
    folder, output = Path(config.drafter), Path(config.output).resolve()
    target = RecordedTarget(drafter_target(str(folder)), config.target_name)
    request = _request(config, folder)
    earlier = None if fresh else _earlier(config, output, request)
    if earlier is not None and not dry_run:
        log.info("the exports in %s are complete", output)
        return earlier | {"skipped": True}
    stored = read_stored(folder)
    if is_exchange_format(stored):
        check_tensors(stored, folder)
    made, refused = _convert(config, stored, target)
    _print_plan(config, folder, made, refused)
    if not made and OWN not in config.formats:
        raise CannotExport("; ".join(refused.values()))
    if dry_run:
        return {"stage": "export", "output": config.output, "dry_run": True, "refused": refused}
    with runner.track(config, "export", drafter=config.drafter) as tracked:
        (output / EXPORT).unlink(missing_ok=True)
        facts = _facts(config, folder, stored, target, refused)
        written = _write(config, folder, output, made, facts)
        result = {"stage": "export", "output": config.output, "written": written, "refused": refused}
        write_json(output / EXPORT, {"request": request, "result": result, "git_revision": git_revision()})
        for name in written:
            tracked.log_artifact(output / name / CARD, name)
    return result


def _request(config: ExportConfig, folder: Path) -> str:
    """Fingerprint of all that decides what is written."""
    inputs = [folder / name for name in (*DRAFTER_FILES, CALIBRATION, COST_CURVE)]
    if config.evaluation is not None:
        inputs.append(Path(config.evaluation) / "metrics.json")
        if not inputs[-1].is_file():
            raise MissingInput(f"no evaluation at {config.evaluation}; make it with jobs/evaluate.py, or leave it out")
    digests = {str(path): file_sha256(path) if path.is_file() else None for path in inputs}
    return fingerprint([digests, config.model_dump(mode="json", exclude={"tracking", "output"})])


def _earlier(config: ExportConfig, output: Path, request: str) -> dict[str, Any] | None:
    """The result of an earlier run of the same request whose folders are still there."""
    if not (output / EXPORT).is_file():
        return None
    export = read_json(output / EXPORT)
    result: dict[str, Any] = export["result"]
    is_there = all((output / name / CARD).is_file() for name in result["written"])
    return result if export["request"] == request and is_there else None


def _convert(
    config: ExportConfig, stored: StoredDrafter, target: RecordedTarget
) -> tuple[dict[str, Exported], dict[str, str]]:
    """(converted drafter by format, reason by refused format)."""
    made, refused = {}, {}
    for name in _others(config):
        try:
            made[name] = to_layout(name, stored, target, dtype=torch_dtype(config.dtype))
        except CannotExport as reason:
            refused[name] = reason.message
    return made, refused


def _write(
    config: ExportConfig, folder: Path, output: Path, made: dict[str, Exported], facts: CardFacts
) -> dict[str, str]:
    """Every format's folder; returns them by format."""
    if OWN in config.formats:
        present = [folder / name for name in (*DRAFTER_FILES, CALIBRATION, COST_CURVE) if (folder / name).is_file()]
        copy_folder(output / OWN, present, model_card(OWN, facts))
    calibration = Calibration.load(folder / CALIBRATION, drafter_sha256=facts.drafter_sha256)
    tables, table_notes = engine_tables(calibration, read_curves(folder / COST_CURVE))
    for name, exported in made.items():
        if name == "sglang":
            notes = [*exported.notes, *table_notes]
            write_folder(output / name, exported, tables, model_card(name, facts, notes=notes, tables=list(tables)))
        else:
            notes = exported.notes + ([_LEFT_OUT] if calibration.scales else [])
            write_folder(output / name, exported, {}, model_card(name, facts, notes=notes))
        for note in notes:
            log.warning("%s: %s", name, note)
    return {
        name: str(Path(config.output) / name) for name in FORMATS if name in made or name in {OWN} & {*config.formats}
    }


_LEFT_OUT = "temperatures and shifts of the confidences are left out: this engine takes confidences as they are"


def _facts(
    config: ExportConfig, folder: Path, stored: StoredDrafter, target: RecordedTarget, refused: dict[str, str]
) -> CardFacts:
    digest = drafter_sha256(folder)
    trained = read_json(folder / "result.json") if (folder / "result.json").is_file() else {}
    provenance = read_json(folder / "provenance.json")
    training = {name: trained[name] for name in KEPT_FIGURES if name in trained}
    if provenance.get("answers_fingerprint"):
        training |= {"answers": provenance["answers_fingerprint"], "git revision": provenance.get("git_revision")}
    return CardFacts(
        title=f"{Path(config.drafter).name}, a drafter for {target.name.rstrip('/').split('/')[-1]}",
        license=config.license,
        target=target.name,
        content=stored.content,
        training=training,
        accepted_lengths=accepted_lengths(config.evaluation, digest) if config.evaluation is not None else (),
        drafter_sha256=digest,
        outcomes={name: refused.get(name) for name in FORMATS if name in config.formats},
    )


def _others(config: ExportConfig) -> list[str]:
    return [name for name in FORMATS if name in config.formats and name != OWN]


def _print_plan(config: ExportConfig, folder: Path, made: dict[str, Exported], refused: dict[str, str]) -> None:
    print(f"export of {folder} to {config.output}, weights in {config.dtype}:")
    if OWN in config.formats:
        print(f"  {OWN}: {(folder / DRAFTER_FILES[1]).stat().st_size / 1e6:,.1f} MB, as it is stored")
    for name in _others(config):
        if name in refused:
            print(f"  {name}: refused, {refused[name]}")
        else:
            print(f"  {name}: {num_bytes(made[name]) / 1e6:,.1f} MB")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(runner.main(ExportConfig, run, default_config="export.yaml"))
