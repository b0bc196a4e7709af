"""Everything that needs a GPU to be checked, in one command of at most eight minutes: `make gpu-check`.

    python benchmarks/gpu_check.py [--target bundled:smollm2-135m-instruct] [--drafter runs/demo/drafter]
                                   [--prompts prompts/heldout.jsonl] [--device cuda] [--limit 420]

Attention, each way that is installed against the reference; greedy float32 output against `generate`, with and without
a drafter; captured graphs against the same steps without; what a step costs; the drafter's speed; memory. A line each
at the end, exit status 1 where one failed.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from dspark.chat import ChatConfig, render_prompt
from dspark.config import build_config
from dspark.data.prompts import PromptSource, read_prompts
from dspark.evaluation import gpu_check
from dspark.evaluation.checks import Check, format_findings, have_passed, run_checks
from dspark.evaluation.gpu_subject import Subject
from dspark.targets import TargetConfig, load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_PROMPTS = 16
MAX_PROMPT_TOKENS = 400
DTYPES = (torch.float32, torch.bfloat16)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: gpu-check needs one; on a machine without, `make test` is all there is", file=sys.stderr)
        return 1
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    target = TargetConfig(name=arguments.target, device=str(device))
    prompts = read_token_ids(target, arguments.prompts)
    subject = Subject(target, device, prompts, drafter=arguments.drafter)
    findings = run_checks(checks_of(subject), limit_s=arguments.limit)
    print(format_findings(findings), flush=True)
    return 0 if have_passed(findings) else 1


def checks_of(subject: Subject) -> list[Check]:
    """In the order of what the later ones build on."""
    device = subject.device
    return [
        Check("device", partial(gpu_check.check_device, device)),
        Check("attention", partial(gpu_check.check_attention, device, DTYPES)),
        Check("greedy as generate", partial(gpu_check.check_greedy, subject)),
        Check("graphs", partial(gpu_check.check_buckets, subject)),
        Check("cost of a step", partial(gpu_check.check_cost, subject)),
        Check("speed", partial(gpu_check.check_speed, subject)),
        Check("memory", partial(gpu_check.check_memory, device)),
    ]


def read_token_ids(target: TargetConfig, path: str) -> list[list[int]]:
    """The first held-out prompts that are not long, rendered as chats."""
    source = build_config(PromptSource, {"path": path, "split": "heldout"})
    tokenizer = load_tokenizer(target)
    prompts = read_prompts([source], seed=0, heldout_fraction=0.0).prompts
    rendered = (render_prompt(tokenizer, prompt.opening, ChatConfig()) for prompt in prompts)
    return [list(ids) for ids in rendered if len(ids) <= MAX_PROMPT_TOKENS][:NUM_PROMPTS]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled:smollm2-135m-instruct")
    parser.add_argument(
        "--drafter", default=str(REPOSITORY / "runs" / "demo" / "drafter"), help="a fresh one if it is not there"
    )
    parser.add_argument("--prompts", default=str(REPOSITORY / "prompts" / "heldout.jsonl"))
    parser.add_argument("--device", default="cuda", help="`cpu` runs the same checks without graphs")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds after which no check is begun")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
