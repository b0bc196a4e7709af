"""What other engines load of ours: their keys, their tensors, and the same proposals, or a refusal with its remedy."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.drafters import export_formats
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.drafters.export_conversions import CannotExport
from dspark.drafters.export_formats import EXPRESSED, LAYOUTS, Exported, require_expressible, to_layout
from dspark.drafters.stored import StoredDrafter, check_tensors, read_stored
from dspark.errors import Mismatch, MissingInput
from engine_loaders import LOADERS, vllm_loads_eagle3, vllm_reads_eagle3_speculators, vllm_reads_speculators
from random_autoregressive import random_autoregressive_drafter
from random_drafter import VARIANTS, random_batch, random_drafter, small_config

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "deepspec"
VOCABULARY, HIDDEN = 61, 16
# What each engine cannot load, by the name of the variant.
OURS = {"anchor_fusion", "moe", "hyper_connections", "production", "bent_head", "gemma4_window"}
OTHER_HEADS = {"gated", "rnn"}
GEMMA4 = {"gemma4", "gemma4_reduced"}
REFUSED = {
    "deepspec": OURS | {"sliding_window", "mixed_windows"},
    "sglang": OURS | GEMMA4 | {"sliding_window", "mixed_windows", "learned_mask", "embeddings"},
    "vllm": OURS | OTHER_HEADS,
    "speculators": OURS | OTHER_HEADS | GEMMA4,
}
SHAPES = VARIANTS | {
    "learned_mask": {"learned_mask_embedding": True},
    "learned_mask_reduced": {"learned_mask_embedding": True, "draft_vocab_size": 30},
    "dflash_reduced": VARIANTS["dflash"] | {"draft_vocab_size": 30},
    "padded_reduced": {"valid_vocab_size": 50, "draft_vocab_size": 30},
    "no_markov_reduced": VARIANTS["no_markov"] | {"draft_vocab_size": 30},
    "embeddings": {"target_layer_ids": (-1, 2)},
    "one_layer": {"num_hidden_layers": 1, "block_size": 1},
    "gemma4_reduced": VARIANTS["gemma4"]
    | {"draft_vocab_size": 30, "markov_rank": 0, "confidence_head_with_markov": False},
    "gemma4_window": VARIANTS["gemma4"] | {"sliding_window": 6},
    "scaled_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
}
REFUSED["sglang"].add("learned_mask_reduced")
CASES = [(layout, shape) for layout in LAYOUTS for shape in SHAPES]
EXPORTED = [(layout, shape) for layout, shape in CASES if shape not in REFUSED[layout]]


@dataclass(frozen=True)
class Target:
    """A target that is nothing but its frozen matrices."""

    embedding: Tensor
    rows: Tensor
    name: str = "somebody/target-4b"
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)

    def head(self) -> Tensor:
        return self.rows


@pytest.fixture(scope="module")
def target() -> Target:
    generator = torch.Generator().manual_seed(5)
    return Target(*(torch.randn(VOCABULARY, HIDDEN, generator=generator) for _ in range(2)))


def make(folder: Path, target: Target, shape: dict[str, Any]) -> StoredDrafter:
    """A random drafter whose frozen parts are the target's, stored and read."""
    drafter = random_drafter(**shape)
    backbone = drafter.backbone
    with torch.no_grad():
        backbone.embed_tokens.weight.copy_(target.embedding)
        if not shape.get("learned_mask_embedding"):
            backbone.mask_embedding.copy_(target.embedding[drafter.config.mask_token_id])
        rows = target.rows[backbone.d2t] if drafter.config.has_reduced_vocabulary else target.rows
        backbone.lm_head.weight.copy_(rows)
    save_drafter(drafter, folder, dtype=torch.float32)
    stored = read_stored(folder)
    check_tensors(stored, folder)
    return stored


def engine_reads(layout: str, exported: Exported, target: Target, folder: Path) -> Any:
    """The drafter an engine has in memory: what the file leaves out comes from the target."""
    content = vllm_reads_speculators(exported.content) if layout == "speculators" else exported.content
    if content.get("draft_vocab_size") == VOCABULARY:
        content = content | {"valid_vocab_size": VOCABULARY}
    tensors = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.rows} | exported.tensors
    if layout == "sglang":
        tensors |= {"embed_tokens.weight": target.embedding, "lm_head.weight": target.rows}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return load_drafter(folder)


@pytest.mark.parametrize(("layout", "shape"), EXPORTED)
def test_an_export_is_what_the_engines_loader_asks_for(tmp_path, target, layout, shape):
    exported = to_layout(layout, make(tmp_path, target, SHAPES[shape]), target, dtype=torch.bfloat16)
    LOADERS[layout](exported.content, exported.tensors, target_vocab_size=VOCABULARY)
    assert {t.dtype for name, t in exported.tensors.items() if name != "d2t"} == {torch.bfloat16}
    assert all(t.dtype == torch.int64 for name, t in exported.tensors.items() if name == "d2t")
    assert exported.content["dtype"] == "bfloat16"
    assert json.loads(json.dumps(exported.content)) == exported.content


@pytest.mark.parametrize(("layout", "shape"), EXPORTED)
def test_an_export_drafts_what_the_drafter_drafts(tmp_path, target, layout, shape):
    stored = make(tmp_path / "ours", target, SHAPES[shape])
    exported = to_layout(layout, stored, target, dtype=torch.float32)
    ours = load_drafter(tmp_path / "ours")
    theirs = engine_reads(layout, exported, target, tmp_path / "theirs")
    batch = random_batch(ours.config, [[9]])
    for temperature in (0.0, 1.0, 5.0):
        proposals = []
        for drafter in (ours, theirs):
            state = drafter.new_state()
            drafter.extend_context(state, batch.target_hidden[0, :9])
            generator = torch.Generator().manual_seed(3)
            options = {"max_tokens": ours.block_size, "temperature": temperature, "generator": generator}
            proposals.append(drafter.propose(state, 3, **options))
        first, second = proposals
        if temperature == 0:
            assert first.token_ids.tolist() == second.token_ids.tolist()
        else:  # the first slot: later ones follow from what was drawn
            padding = ours.config.valid_vocab_size
            known = second.probs[0, :padding] / second.probs[0, :padding].sum()
            torch.testing.assert_close(first.probs[0, :padding], known, atol=1e-6, rtol=1e-4)
        if first.confidence_logits is not None:
            torch.testing.assert_close(first.confidence_logits[:1], second.confidence_logits[:1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("layout", "shape"), [(layout, shape) for layout in LAYOUTS for shape in sorted(REFUSED[layout])]
)
def test_what_an_engine_cannot_load_is_refused_with_the_value_and_the_remedy(tmp_path, target, layout, shape):
    stored = make(tmp_path, target, SHAPES[shape])
    with pytest.raises(CannotExport, match=r"cannot load a drafter with \w+ = .*: .*(train|cache|keeps everything)"):
        to_layout(layout, stored, target, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_only_vllm_refuses_the_other_markov_heads(kind):
    shape = small_config(markov_head_type=kind)
    for layout in ("deepspec", "sglang"):
        require_expressible(layout, shape)
    for layout in ("vllm", "speculators"):
        with pytest.raises(CannotExport, match=f"vLLM cannot load a drafter with markov_head_type = '{kind}'"):
            require_expressible(layout, shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_extension_that_no_layout_knows_is_refused_by_its_name(layout, monkeypatch):
    monkeypatch.setattr(export_formats, "EXPRESSED", EXPRESSED - {"learned_mask_embedding"})
    with pytest.raises(CannotExport, match=r"with learned_mask_embedding = True: the format dspark keeps everything"):
        require_expressible(layout, small_config(learned_mask_embedding=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_architecture_without_a_class_there_is_refused_by_its_name(tmp_path, target, layout):
    stored = StoredDrafter({"architectures": ["SomethingElse"]}, {})
    with pytest.raises(CannotExport, match="has no class for the architecture SomethingElse"):
        to_layout(layout, stored, target, dtype=torch.bfloat16)


def test_a_reduced_vocabulary_is_not_widened_by_a_head_that_is_not_the_targets(tmp_path, target):
    stored = make(tmp_path, target, {"draft_vocab_size": 30})
    other = Target(target.embedding, target.rows + 1.0)
    with pytest.raises(CannotExport, match=r"draft_vocab_size = 30, and its head rows are not those of the target"):
        to_layout("sglang", stored, other, dtype=torch.bfloat16)


def test_the_targets_head_is_asked_for_only_to_widen_a_vocabulary(tmp_path, target):
    class Absent(Target):
        def head(self) -> Tensor:
            raise AssertionError("the target was loaded")

    absent = Absent(target.embedding, target.rows)
    for shape in ({}, {"draft_vocab_size": 30}):
        stored = make(tmp_path / str(len(shape)), target, shape)
        assert to_layout("vllm", stored, absent, dtype=torch.bfloat16).tensors
    assert to_layout("sglang", make(tmp_path / "full", target, {}), absent, dtype=torch.bfloat16).tensors
    with pytest.raises(AssertionError, match="the target was loaded"):
        to_layout("sglang", make(tmp_path / "widened", target, shape), absent, dtype=torch.bfloat16)


def test_notes_say_what_was_changed(tmp_path, target):
    notes = to_layout("sglang", make(tmp_path, target, SHAPES["dflash_reduced"]), target, dtype=torch.bfloat16).notes
    assert [note.split(":")[0] for note in notes] == [
        "it has no Markov head and SGLang needs one",
        "SGLang has no reduced vocabulary",
        "no confidence head",
    ]


@pytest.mark.parametrize("case", ["dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash", "gemma4_dspark_vanilla"])
def test_a_checkpoint_of_the_public_code_is_written_back_bit_for_bit(tmp_path, target, case):
    exported = to_layout("deepspec", read_stored(FIXTURES / case), target, dtype=torch.float32)
    theirs = load_file(str(FIXTURES / case / "model.safetensors"))
    assert theirs.keys() == exported.tensors.keys()
    assert all(torch.equal(theirs[name], exported.tensors[name]) for name in theirs)
    content = json.loads((FIXTURES / case / "config.json").read_text())
    assert {name: exported.content[name] for name in content} == content


def test_an_incomplete_folder_and_a_wrong_tensor_are_named(tmp_path, target):
    with pytest.raises(MissingInput, match=r"config\.json is missing"):
        read_stored(tmp_path)
    stored = make(tmp_path, target, {})
    del stored.tensors["layers.1.mlp.up_proj.weight"]
    with pytest.raises(Mismatch, match=r"layers\.1\.mlp\.up_proj\.weight is absent.*asks for \[24, 16\]"):
        check_tensors(stored, tmp_path)
    with pytest.raises(Mismatch, match=r"tensor extra\.weight is \[2\].*asks for none"):
        check_tensors(
            StoredDrafter(stored.content, read_stored(tmp_path).tensors | {"extra.weight": torch.ones(2)}), "x"
        )


def test_other_drafters_of_the_public_code_are_written_as_they_are(target):
    content = {"architectures": ["Qwen3Eagle3Model"], "hidden_size": HIDDEN, "dtype": "float32"}
    stored = StoredDrafter(content, {"fc.weight": torch.ones(2, 2)})
    exported = to_layout("deepspec", stored, target, dtype=torch.bfloat16)
    assert exported.content == content | {"dtype": "bfloat16"}
    assert torch.equal(exported.tensors["fc.weight"], torch.ones(2, 2).bfloat16())
    assert "nothing of it was checked against DeepSpec" in exported.notes[0]
    with pytest.raises(CannotExport, match="SGLang has no class for the architecture Qwen3Eagle3Model"):
        to_layout("sglang", stored, target, dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("architecture", "name"), [("eagle3", "Qwen3Eagle3Model"), ("mtp", "DSparkMTPModel")])
def test_other_architectures_are_copied_or_refused_by_name(
    tmp_path: Path, target: Target, layout: str, architecture: str, name: str
):
    save_drafter(random_autoregressive_drafter(architecture=architecture), tmp_path, dtype=torch.float32)
    stored = read_stored(tmp_path)
    check_tensors(stored, tmp_path)
    if architecture == "eagle3" and LAYOUTS[layout].takes_eagle3:
        assert to_layout(layout, stored, target, dtype=torch.float32).notes
    elif name in LAYOUTS[layout].architectures:
        exported = to_layout(layout, stored, target, dtype=torch.float32)
        assert exported.content == stored.content
        assert exported.tensors.keys() == stored.tensors.keys()
        assert all(torch.equal(exported.tensors[key], value) for key, value in stored.tensors.items())
    else:
        with pytest.raises(CannotExport, match=f"has no class for the architecture {name}; the format dspark keeps"):
            to_layout(layout, stored, target, dtype=torch.float32)


EAGLE3 = {
    "all": {},
    "reduced": {"draft_vocab_size": 30},
    "padded": {"valid_vocab_size": 50},
    "embeddings": {"target_layer_ids": (-1, 2)},
}


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
@pytest.mark.parametrize("shape", EAGLE3.values(), ids=EAGLE3)
def test_an_eagle3_export_is_what_vllm_asks_for_and_holds_what_ours_holds(tmp_path, target, layout, shape):
    save_drafter(random_autoregressive_drafter(architecture="eagle3", **shape), tmp_path, dtype=torch.float32)
    stored = read_stored(tmp_path)
    exported = to_layout(layout, stored, target, dtype=torch.float32)
    content = vllm_reads_eagle3_speculators(exported.content) if layout == "speculators" else exported.content
    vllm_loads_eagle3(content, exported.tensors, target_vocab_size=VOCABULARY)
    assert content["eagle_aux_hidden_state_layer_ids"] == [n + 1 for n in stored.content["target_layer_ids"]]
    assert all(torch.equal(stored.tensors[name], value) for name, value in exported.tensors.items())
    left_out = stored.tensors.keys() - exported.tensors.keys()
    frozen = {"embed_tokens.weight"} if "draft_vocab_size" in shape else {"embed_tokens.weight", "lm_head.weight"}
    assert left_out == frozen
