"""The model card of an exported drafter: what it drafts for, how well, under which licence, and how to serve it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.drafters.eagle3 import EAGLE3_ARCHITECTURES
from dspark.drafters.export_eagle3 import DRAFT_TOKENS
from dspark.drafters.mtp import MTP_ARCHITECTURE


@dataclass(frozen=True)
class CardFacts:
    """What a card says whatever the format. content: the stored `config.json`; training: figures by name.

    accepted_lengths: (mode, domain, tau). outcomes: format -> why it was refused, or None where it was written.
    """

    title: str
    license: str
    target: str
    content: Mapping[str, Any]
    training: Mapping[str, Any]
    accepted_lengths: Sequence[tuple[str, str, float]] = ()
    drafter_sha256: str = ""
    outcomes: Mapping[str, str | None] = field(default_factory=dict)


def model_card(format_name: str, facts: CardFacts, *, notes: Sequence[str] = (), tables: Sequence[str] = ()) -> str:
    """Markdown with the hub's header. notes: what the conversion changed; tables: names of the JSON files beside it."""
    sections = [
        _header(facts),
        f"# {facts.title}\n\nA speculative drafter for {facts.target}, in the layout `{format_name}`. It changes the "
        "speed of the target's answers and nothing else: the target verifies every token.",
        "## Drafter\n\n" + _rows(_shape(facts)),
        "## Training\n\n" + (_rows(facts.training) if facts.training else "Trained elsewhere; see provenance.json."),
        "## Accepted length\n\n" + _accepted_lengths(facts),
        "## Serving\n\nFrom this folder:\n\n" + _block(serving_command(format_name, facts, tables)),
    ]
    if notes:
        sections.append("## What to know\n\n" + "\n".join(f"- {note}" for note in notes))
    sections.append("## Other layouts\n\n" + "\n".join(_outcomes(format_name, facts)))
    return "\n\n".join(sections) + "\n"


def serving_command(format_name: str, facts: CardFacts, tables: Sequence[str] = ()) -> str:
    """The command line that serves target and drafter with the engine of this layout, run in its folder."""
    if format_name == "sglang":
        return _sglang_command(facts, tables)
    if format_name == "vllm":
        return _vllm_command(facts)
    if format_name == "speculators":
        return "vllm serve ."
    if format_name == "deepspec":
        return (
            f"# DeepSpec's evaluation\npython eval.py --target_name_or_path {facts.target} --draft_name_or_path .\n"
            "# dspark\n"
            f"python jobs/adopt.py drafter=FOLDER target.name={facts.target} output=runs/adopted\n"
            "serve run deployments/colocated.yaml    # with args.drafter set to runs/adopted"
        )
    return "serve run deployments/colocated.yaml    # with args.drafter set to this folder"


def _vllm_command(facts: CardFacts) -> str:
    if _kind(facts.content) == "EAGLE-3":
        tokens = min(DRAFT_TOKENS, facts.content["ttt_length"])
        options = {"method": "eagle3", "model": ".", "num_speculative_tokens": tokens}
        return f"vllm serve {facts.target} --speculative-config '{json.dumps(options)}'"
    speculative = {
        "method": "dspark",  # never left to vLLM, which reads the method from the folder's name
        "model": ".",
        "num_speculative_tokens": facts.content["block_size"],
        "draft_sample_method": "probabilistic",
        "enable_adaptive_verification": True,
        "attention_backend": "FLASH_ATTN",
    }
    return f"vllm serve {facts.target} --speculative-config '{json.dumps(speculative)}'"


def _sglang_command(facts: CardFacts, tables: Sequence[str]) -> str:
    costs = next((name for name in tables if name.startswith("sps")), None)
    scales = next((name for name in ("sts_sampled.json", "sts_greedy.json") if name in tables), None)
    # Without a confidence head or a cost table there is nothing to schedule by: the whole block is verified.
    is_scheduled = bool(facts.content.get("enable_confidence_head")) and costs is not None
    lines = [
        f"SGLANG_RAGGED_VERIFY_MODE={'compact' if is_scheduled else 'static'} python -m sglang.launch_server",
        f"--model-path {facts.target} --speculative-algorithm DSPARK --speculative-draft-model-path .",
        f"--speculative-dspark-block-size {facts.content['block_size']}",
    ]
    if is_scheduled:
        lines.append(f"--speculative-dspark-sps-table-path {costs}")
        if scales is not None:
            lines.append(f"--speculative-dspark-confidence-sts-path {scales}")
    return " \\\n  ".join(lines)


def _header(facts: CardFacts) -> str:
    lines = ["---", f"license: {facts.license}", f"base_model: {json.dumps(facts.target)}", "library_name: dspark"]
    return "\n".join([*lines, "tags:", "- speculative-decoding", "- dspark", "---"])


def _shape(facts: CardFacts) -> dict[str, Any]:
    content = facts.content
    has_head = bool(content.get("markov_rank"))
    return {
        "kind": _kind(content),
        "layers": content.get("num_hidden_layers"),
        "block size": content.get("block_size", content.get("ttt_length")),
        "target layers read": ", ".join(map(str, content.get("target_layer_ids", []))),
        "draft vocabulary": content.get("draft_vocab_size") or content.get("vocab_size"),
        "Markov head": f"{content.get('markov_head_type', 'vanilla')}, rank {content['markov_rank']}"
        if has_head
        else "none",
        "confidence head": "yes" if content.get("enable_confidence_head") else "none",
        "digest of the stored drafter": facts.drafter_sha256,
    }


def _kind(content: Mapping[str, Any]) -> str:
    architectures = set(content.get("architectures") or ())
    if architectures & {*EAGLE3_ARCHITECTURES}:
        return "EAGLE-3"
    if MTP_ARCHITECTURE in architectures:
        return "MTP"
    return "DSpark" if content.get("markov_rank") or content.get("enable_confidence_head") else "DFlash"


def _accepted_lengths(facts: CardFacts) -> str:
    if not facts.accepted_lengths:
        return "Not measured; run jobs/evaluate.py."
    lines = ["| decoding | domain | τ |", "|---|---|---|"]
    lines += [f"| {mode} | {domain} | {length:.2f} |" for mode, domain, length in facts.accepted_lengths]
    return "\n".join(
        [*lines, "", "τ is committed tokens per round, the target's own one counted: plain decoding is 1."]
    )


def _outcomes(format_name: str, facts: CardFacts) -> list[str]:
    others = {name: reason for name, reason in facts.outcomes.items() if name != format_name}
    lines = [
        f"- `{name}`: {'written beside this one' if reason is None else reason}" for name, reason in others.items()
    ]
    return lines or ["None was asked for."]


def _rows(values: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_shown(value)} |" for name, value in values.items())])


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _block(command: str) -> str:
    return f"```bash\n{command}\n```"
