"""Regenerate the target's own answers to a set of prompts, turn by turn (Ray Data)."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import runner
from dspark.chat import require_renderable
from dspark.data.answers import AnswerStore, GenerateConfig, resolve_sampling
from dspark.data.prompts import Prompt, PromptSet, read_prompts
from dspark.engine.sampling import SamplingParams
from dspark.run_contents import DatasetRecord
from dspark.storage import absolute
from dspark.targets import load_tokenizer, target_identity

log = logging.getLogger("dspark.generate")


def run(config: GenerateConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Write the answers that are missing; returns their counts."""
    config = config.with_changes(output=absolute(config.output))  # workers have a folder of their own
    prompt_set = read_prompts(
        config.prompts, seed=config.seed, heldout_fraction=config.heldout_fraction, limit=config.limit
    )
    sampling = resolve_sampling(config)
    _print_plan(config, prompt_set, sampling)
    if dry_run:
        return {"stage": "generate", "dry_run": True} | _plan(config, prompt_set)
    request = {
        "target": target_identity(config.target),
        "dtype": config.target.dtype,
        "chat": config.chat.model_dump(),
        "sampling": sampling.model_dump(include={"temperature", "top_k", "top_p"})  # all that this stage sets
        | {"max_new_tokens": config.sampling.max_new_tokens},
        "seed": config.seed,
    }
    if config.backend.kind == "openai":
        request["backend"] = config.backend.model_dump(include={"kind", "model", "retokenize", "extra_body"})
    store = AnswerStore(config.output)
    if fresh:
        store.clear()
    store.check_request(request)
    manifest = store.manifest
    if manifest is not None and manifest["prompts"] == prompt_set.fingerprint:
        log.info("answers in %s are complete", config.output)
        return _result(config, manifest) | {"skipped": True}
    store.check_unchanged(prompt_set.prompts)
    require_renderable(load_tokenizer(config.target), (p.opening for p in prompt_set.prompts), config.chat)
    with runner.track(config, "generate", target=config.target.name) as tracked:
        places = ", ".join(source.place for source in config.prompts)
        tracked.log_datasets([DatasetRecord("prompts", prompt_set.fingerprint, places, "regeneration")])
        run_token = store.begin(request)
        store.write_rejected(prompt_set)
        done = store.done_ids()
        missing = [prompt for prompt in prompt_set.prompts if prompt.id not in done]
        log.info("%d of %d prompts to answer", len(missing), len(prompt_set.prompts))
        started = time.monotonic()
        tokens = _generate(config, sampling, missing, run_token) if missing else 0
        seconds = time.monotonic() - started
        speed = {"seconds": round(seconds, 1), "tokens_per_s": round(tokens / seconds, 1) if tokens else 0.0}
        manifest = store.finish(request, prompt_set, speed | {"target": config.target.model_dump()})
        result = _result(config, manifest)
        tracked.log_metrics(runner.figures(result), step=0)
    return result


def _generate(config: GenerateConfig, sampling: SamplingParams, prompts: list[Prompt], run_token: str) -> int:
    """Answer the prompts. Returns tokens generated."""
    answer = _ask_endpoints if config.backend.kind == "openai" else _run_workers
    started, num_rows, num_tokens = time.monotonic(), 0, 0
    progress = runner.Progress(len(prompts))
    for part_rows, part_tokens in answer(config, sampling, prompts, run_token):
        num_rows += part_rows
        num_tokens += part_tokens
        speed = num_tokens / (time.monotonic() - started)
        log.info("rows: %s, %d tokens, %.0f tokens/s", progress.said(num_rows), num_tokens, speed)
    return num_tokens


def _ask_endpoints(
    config: GenerateConfig, sampling: SamplingParams, prompts: list[Prompt], run_token: str
) -> Iterator[tuple[int, int]]:
    """Answer the prompts through servers, from this process: the work is theirs. Rows and tokens of each part."""
    from dspark.data.endpoint_decoder import EndpointDecoder
    from dspark.data.regeneration import Answerer, decode_rules  # loads torch

    tokenizer = load_tokenizer(config.target)
    rules = decode_rules(config, sampling, tokenizer)
    with EndpointDecoder(config.backend, rules, tokenizer, config.chat) as decoder:
        # A conversation may wait for its next turn to be sent: twice as many keep every place busy.
        answerer = Answerer(config, decoder, tokenizer, run_token, max_open=2 * decoder.capacity)
        for part in answerer.answer(prompts):
            yield sum(part["rows"]), sum(part["tokens"])


def _run_workers(
    config: GenerateConfig, sampling: SamplingParams, prompts: list[Prompt], run_token: str
) -> Iterator[tuple[int, int]]:
    """Answer the prompts on the cluster. Rows and tokens of each part."""
    import ray  # heavy, and not needed for --dry-run

    from dspark.data.regeneration import AnswerWorker, deal, task_json  # loads torch

    runner.start_ray()
    num_workers = min(config.num_workers, len(prompts))
    tasks = [{"prompts": task_json(task)} for task in deal(prompts, num_workers)]
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    dataset.context.target_max_block_size = 1  # each part is reported when it is written, not when its task ends
    parts = dataset.map_batches(
        AnswerWorker,
        fn_constructor_args=(config.model_dump(), sampling.model_dump(), run_token),
        batch_size=1,
        # One task at a time: the first worker to be up would else take them all and the others be let go.
        compute=ray.data.ActorPoolStrategy(size=num_workers, max_tasks_in_flight_per_actor=1),
        num_cpus=1,
        num_gpus=runner.gpus_per_worker(config.gpus_per_worker),
    )
    for part in parts.iter_rows():
        yield int(part["rows"]), int(part["tokens"])


def _plan(config: GenerateConfig, prompt_set: PromptSet) -> dict[str, Any]:
    num_turns = sum(prompt.num_turns for prompt in prompt_set.prompts)
    groups = Counter(f"{prompt.domain}/{prompt.split}" for prompt in prompt_set.prompts)
    return {
        "output": config.output,
        "read": prompt_set.num_read,
        "prompts": len(prompt_set.prompts),
        "by_domain_and_split": dict(sorted(groups.items())),
        "rejected": prompt_set.rejected_by_reason,
        "over_limit": prompt_set.num_over_limit,
        "turns": num_turns,
        "max_tokens": num_turns * config.sampling.max_new_tokens,
    }


def _print_plan(config: GenerateConfig, prompt_set: PromptSet, sampling: SamplingParams) -> None:
    plan = _plan(config, prompt_set)
    sizes = f"{plan['prompts']:,} prompts of {plan['read']:,} rows, {plan['turns']:,} turns"
    print(f"answers: {sizes} by {config.target.name}")
    for url in config.backend.base_urls:
        print(f"  served as {config.backend.model} at {url}, {config.backend.concurrency} requests at once")
    for group, count in plan["by_domain_and_split"].items():
        print(f"  {group}: {count:,}")
    for reason, count in plan["rejected"].items():
        print(f"  rejected: {count:,} ({reason})")
    print(f"  temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}")
    print(f"  at most {plan['max_tokens']:,} tokens, {config.sampling.max_new_tokens} a turn", flush=True)


def _result(config: GenerateConfig, manifest: dict[str, Any]) -> dict[str, Any]:
    counts = manifest["counts"]
    return {
        "stage": "generate",
        "output": config.output,
        "prompts": counts["ok"] + counts["empty"] + counts["error"],
        "ok": counts["ok"],
        "empty": counts["empty"],
        "errors": counts["error"],
        "errors_by_reason": manifest.get("errors", {}),
        "rejected": counts["rejected"],
        "tokens": counts["tokens"],
        "finish_length": counts["finish_length"],
        "seconds": manifest["seconds"],
        "tokens_per_s": manifest["tokens_per_s"],
    }


if __name__ == "__main__":
    sys.exit(runner.main(GenerateConfig, run, default_config="generate.yaml"))
